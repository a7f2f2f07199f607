"""`ssmd tray`: the daemon in the desktop's tray."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from ssmd.cli import options
from ssmd.cli.output import fail

_PROBE = "from PySide6.QtWidgets import QApplication; QApplication([])"
_PROBE_S = 30.0


def tray(
    data_dir: options.DataDir = None,
    at_login: Annotated[bool, typer.Option("--at-login", hidden=True)] = False,
) -> None:
    """Show the daemon in the desktop's tray: what it does, TTFT and TBT; load and unload models, stop answers, open the
    page, start and stop the daemon. A second one has the first show its window.

    Without a tray its window opens instead.
    """
    from ssmd.daemon.place import data_dir as place
    from ssmd.machine.installation import broken, to_add

    where = place(data_dir)
    if sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"))):
        fail("there is no display here (neither DISPLAY nor WAYLAND_DISPLAY is set); in a terminal use: ssmd ps")
    try:
        from ssmd_tray.qt.app import run
    except ModuleNotFoundError as err:
        fail(f"the tray is not installed ({err.name} is missing); install it with: {to_add('tray')}")
    except ImportError as err:
        fail(broken("PySide6-Essentials", err))
    if sys.platform == "linux" and (why := _why_no_window()):
        fail(why)
    raise typer.Exit(run(where, at_login=at_login))


def _why_no_window() -> str:
    """Return why Qt cannot open a window here, or "". A process of its own tries it: Qt ends the process on failure."""
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the display does not answer within {_PROBE_S:.0f} s; in a terminal use: ssmd ps"
    if tried.returncode == 0:
        return ""
    if "could not connect to display" in tried.stderr:  # Qt then names libraries too
        return f"the display {os.environ.get('DISPLAY', '')!r} cannot be opened; in a terminal use: ssmd ps"
    if "xcb-cursor" in tried.stderr:
        return "Qt needs a library that this system does not have; on Debian: apt install libxcb-cursor0"
    lines = tried.stderr.strip().splitlines()
    return f"Qt cannot open a window ({lines[0][:300] if lines else f'exit code {tried.returncode}'}); use: ssmd ps"
