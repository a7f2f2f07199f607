"""One tray to a data directory, and the command that starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from test_server import environment

from ssmd_tray.single import LOCK, Single, socket_name

TAKE = (
    "import sys, pathlib; from ssmd_tray.single import Single; "
    "print(Single.take(pathlib.Path(sys.argv[1])) is not None)"
)


def taken_elsewhere(data_dir: Path) -> bool:
    return subprocess.check_output([sys.executable, "-c", TAKE, str(data_dir)], text=True) == "True\n"


def test_one_at_a_time(tmp_path: Path) -> None:
    data = tmp_path / "new" / "data"
    first = Single.take(data)
    assert first is not None
    assert oct(data.stat().st_mode)[-3:] == "700"
    assert not taken_elsewhere(data)
    first.release()
    first.release()
    assert taken_elsewhere(data), "and one that has ended has let go"
    again = Single.take(data)
    assert again is not None
    again.release()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=LOCK):
        Single.take(tmp_path)


def test_where_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert socket_name(Path("/x")) == "/x/tray.sock"
    long = socket_name(Path("/x" * 80))
    assert long.startswith("/run/user/1/ssmd-tray-")
    assert long != socket_name(Path("/x" * 81))


@pytest.mark.ui
def test_a_display_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("PySide6")
    command = [sys.executable, "-m", "ssmd", "tray", "--data-dir", str(tmp_path)]
    env = {**os.environ, "DISPLAY": ":7777", "QT_QPA_PLATFORM": "xcb"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: the display ':7777' cannot be opened; in a terminal use: ssmd ps\n"


def test_without_a_display(tmp_path: Path) -> None:
    env = {k: v for k, v in environment(tmp_path).items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")}
    done = commands.ssmd("tray", env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: there is no display here (neither DISPLAY nor WAYLAND_DISPLAY is set); in a terminal use: ssmd ps\n"
    )


def test_without_the_extra(tmp_path: Path) -> None:
    none = "import sys; sys.modules['PySide6'] = None"
    done = commands.ssmd("tray", env=environment(tmp_path, DISPLAY=":99"), before=none)
    assert done.returncode == 1
    assert "the tray is not installed" in done.stderr
    assert "install it with: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_other_command_waits_for_it(tmp_path: Path) -> None:
    loaded = (
        "import sys, ssmd.cli; sys.argv = ['ssmd', '--help']\n"
        "try: ssmd.cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith(('PySide6', 'ssmd_tray'))])"
    )
    said = subprocess.check_output([sys.executable, "-c", loaded], text=True, env=environment(tmp_path))
    assert "tray " in said
    assert said.endswith("\n[]\n")
