"""Starting the tray at login: a file in the place where each desktop looks for such. Only Linux's was ever tried; what
macOS and Windows get is text that nobody has run there.
"""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LABEL = "io.ssmd.tray"
_RESERVED = set(" \t\n\"'\\><~|&;$*?#()`")  # of the Desktop Entry Specification, in Exec


@dataclass(frozen=True)
class Item:
    """What is to stand in a file so that a desktop starts the tray. tried: whether that was ever seen to work."""

    path: Path
    text: str
    tried: bool

    @property
    def enabled(self) -> bool:
        """Whether it is there, for whatever installation of ssmd."""
        return self.path.is_file()

    def enable(self) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}-new")
        new.write_text(self.text, encoding="utf-8")
        new.replace(self.path)

    def disable(self) -> None:
        """Raises OSError."""
        self.path.unlink(missing_ok=True)


def item(data_dir: Path | None, system: str = sys.platform, variables: Mapping[str, str] = os.environ) -> Item:
    """What starts this installation's tray. system: as `sys.platform` names it; data_dir: None for the usual one."""
    more = () if data_dir is None else ("--data-dir", str(data_dir))
    command = (sys.executable, "-m", "ssmd", "tray", "--at-login", *more)
    home = Path(variables.get("HOME") or Path.home())
    if system == "darwin":
        return Item(home / "Library" / "LaunchAgents" / f"{LABEL}.plist", launch_agent(command), False)
    if system == "win32":
        roaming = Path(variables.get("APPDATA") or home / "AppData" / "Roaming")
        folder = roaming / "Microsoft" / "Windows" / "Start Menu" / "Programs" / "Startup"
        return Item(folder / "ssmd tray.cmd", startup_script(command), False)
    config = Path(variables.get("XDG_CONFIG_HOME") or home / ".config")
    return Item(config / "autostart" / "ssmd-tray.desktop", desktop_entry(command), True)


def desktop_entry(command: tuple[str, ...]) -> str:
    """An entry of XDG autostart."""
    return (
        "[Desktop Entry]\n"
        "Type=Application\n"
        "Name=ssmd\n"
        "Comment=What the ssmd daemon does\n"
        f"Exec={' '.join(map(_quoted, command))}\n"
        "Terminal=false\n"
        "X-GNOME-Autostart-enabled=true\n"
    )


def _quoted(argument: str) -> str:
    """An argument as the Desktop Entry Specification has it: quoted, then escaped as any value is."""
    text = argument.replace("%", "%%")
    if not _RESERVED.isdisjoint(text):
        text = '"' + "".join(f"\\{c}" if c in '"`$\\' else c for c in text) + '"'
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def launch_agent(command: tuple[str, ...]) -> str:
    """A LaunchAgent of macOS."""
    return plistlib.dumps({"Label": LABEL, "ProgramArguments": list(command), "RunAtLoad": True}).decode()


def startup_script(command: tuple[str, ...]) -> str:
    """A script for Windows' Startup folder, which opens no console that stays."""
    windowless = (
        command[0].removesuffix("python.exe") + "pythonw.exe" if command[0].endswith("python.exe") else command[0]
    )
    line = subprocess.list2cmdline([windowless, *command[1:]]).replace("%", "%%")
    return f'@start "" {line}\r\n'
