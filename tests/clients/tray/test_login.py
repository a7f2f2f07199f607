"""Starting at login: what each desktop is given. That Linux's is obeyed is seen in test_ui.py."""

from __future__ import annotations

import plistlib
import re
import sys
from pathlib import Path

import pytest

from ssmd_tray.login import item

WHERE = {"HOME": "/home/x", "APPDATA": r"C:\Users\x\AppData\Roaming", "XDG_CONFIG_HOME": ""}


def unescaped(line: str) -> list[str]:
    """Parse Exec as a desktop does: escapes of all values first, then quotes, then field codes."""
    line = line.replace("\\\\", "\\")
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    return [(re.sub(r"\\(.)", r"\1", quoted) or bare).replace("%%", "%") for quoted, bare in found]


@pytest.mark.parametrize(
    "folder", ["/home/x/data", "/home/x/my data", '/x/a"b', "/x/a$b`c`", "/x/50%", r"/x/a\b", "/x/ü;(&)"]
)
def test_an_entry_of_autostart(folder: str) -> None:
    one = item(Path(folder), "linux", WHERE)
    assert (one.path, one.tried) == (Path("/home/x/.config/autostart/ssmd-tray.desktop"), True)
    assert one.text.startswith("[Desktop Entry]\nType=Application\n")
    [line] = [line.removeprefix("Exec=") for line in one.text.splitlines() if line.startswith("Exec=")]
    assert unescaped(line) == [sys.executable, "-m", "ssmd", "tray", "--at-login", "--data-dir", folder]


def test_a_line_in_a_name_begins_no_other_key() -> None:
    one = item(Path("/x/a\nExec=evil"), "linux", WHERE)
    assert one.text.count("\nExec=") == 1


def test_a_launch_agent() -> None:
    one = item(None, "darwin", WHERE)
    assert (one.path, one.tried) == (Path("/home/x/Library/LaunchAgents/io.ssmd.tray.plist"), False)
    found = plistlib.loads(one.text.encode())
    assert found["ProgramArguments"] == [sys.executable, "-m", "ssmd", "tray", "--at-login"]
    assert found["RunAtLoad"] is True


def test_a_script_of_the_startup_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", r"C:\Program Files\ssmd\python.exe")
    one = item(Path("D:\\50% data"), "win32", WHERE)
    assert str(one.path).endswith("ssmd tray.cmd")
    assert not one.tried
    assert one.text == (
        '@start "" "C:\\Program Files\\ssmd\\pythonw.exe" -m ssmd tray --at-login --data-dir "D:\\50%% data"\r\n'
    )


def test_on_and_off(tmp_path: Path) -> None:
    one = item(None, "linux", {"HOME": str(tmp_path)})
    assert not one.enabled
    one.enable()
    one.enable()
    assert one.enabled
    assert one.path.read_text("utf-8") == one.text
    assert [p.name for p in one.path.parent.iterdir()] == [one.path.name]
    one.disable()
    one.disable()
    assert not one.enabled
