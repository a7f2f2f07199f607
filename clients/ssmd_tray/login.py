"""The start of the tray at login, by a file where each desktop looks for one.

Only Linux's file was tested on a desktop; those of macOS and Windows were never run there.
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
    """A file, with its text, by which a desktop starts the tray. tried: it was tested on such a desktop."""

    path: Path
    text: str
    tried: bool

    @property
    def enabled(self) -> bool:
        """Return True if the file exists, for any installation of ssmd."""
        return self.path.is_file()

    def enable(self) -> None:
        """Write the file. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}-new")
        new.write_text(self.text, encoding="utf-8")
        new.replace(self.path)

    def disable(self) -> None:
        """Remove the file. Raises OSError."""
        self.path.unlink(missing_ok=True)


def item(data_dir: Path | None, system: str = sys.platform, variables: Mapping[str, str] = os.environ) -> Item:
    """Return the item that starts this installation's tray. system: as `sys.platform`. data_dir: None: the default."""
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
    """Return the text of an XDG autostart entry."""
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
    """Return an argument in the form of the Desktop Entry Specification: quoted, then escaped as any value."""
    text = argument.replace("%", "%%")
    if not _RESERVED.isdisjoint(text):
        text = '"' + "".join(f"\\{c}" if c in '"`$\\' else c for c in text) + '"'
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def launch_agent(command: tuple[str, ...]) -> str:
    """Return the text of a LaunchAgent of macOS."""
    return plistlib.dumps({"Label": LABEL, "ProgramArguments": list(command), "RunAtLoad": True}).decode()


def startup_script(command: tuple[str, ...]) -> str:
    """Return a script for Windows' Startup folder that leaves no console open."""
    windowless = (
        command[0].removesuffix("python.exe") + "pythonw.exe" if command[0].endswith("python.exe") else command[0]
    )
    line = subprocess.list2cmdline([windowless, *command[1:]]).replace("%", "%%")
    return f'@start "" {line}\r\n'
