"""Starting a daemon that outlives the tray, and how one that runs was started."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ssmd.daemon import discovery
from ssmd.daemon.discovery import Address, DaemonError
from ssmd.machine.process import started
from ssmd_tray.view import plain

LONGEST_S = 300.0  # a model that is loaded at the start
_LOOK_S = 0.1
_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Command:
    """The command of a process. variables: its whole environment; None for this process's."""

    arguments: tuple[str, ...]
    folder: Path | None = None
    variables: Mapping[str, str] | None = field(default=None, repr=False)


def usual(data_dir: Path, port: int | None = None) -> Command:
    """Return the command `ssmd serve` of this Python, for all installed models. port: None: as in the settings."""
    at = () if port is None else ("--port", str(port))
    return Command((sys.executable, "-m", "ssmd", "serve", "--data-dir", str(data_dir), *at))


def command_of(process: int) -> Command | None:
    """Return a daemon's command, folder and environment; None if it is not `ssmd serve`, or the system is not Linux."""
    found = started(process)
    if found is None or "serve" not in found.arguments:
        return None
    return Command(found.arguments, found.folder, found.variables)


def start(data_dir: Path, command: Command, longest_s: float = LONGEST_S) -> Address:
    """Start a daemon and wait until it can be asked. It belongs to no terminal, and runs on when this process ends.

    Raises DaemonError with its own last words if it does not start.
    """
    discovery.check_alone(data_dir)
    with tempfile.TemporaryFile(prefix="ssmd-") as words:
        try:
            process = subprocess.Popen(
                command.arguments,
                cwd=command.folder,
                env=None if command.variables is None else dict(command.variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                start_new_session=True,
            )
        except OSError as err:
            raise DaemonError(f"cannot start {command.arguments[0]}: {err.strerror or err}") from err
        threading.Thread(target=process.wait, name="ssmd-tray-child", daemon=True).start()  # none is left as a zombie
        deadline = time.monotonic() + longest_s
        while time.monotonic() < deadline:
            ended = process.poll()
            found = discovery.find(data_dir)
            if found is not None:
                return found
            if ended is not None:
                raise DaemonError(f"the daemon did not start: {_last(words.fileno()) or f'exit code {ended}'}")
            time.sleep(_LOOK_S)
    raise DaemonError(
        f"the daemon, process {process.pid}, does not answer after {longest_s:.0f} s; `ssmd logs` may say why"
    )


def _last(descriptor: int) -> str:
    """Return the last line of a file."""
    size = os.fstat(descriptor).st_size
    os.lseek(descriptor, max(0, size - _TAIL_BYTES), os.SEEK_SET)
    lines = os.read(descriptor, _TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()
    return plain(lines[-1].removeprefix("error: "), 300) if lines else ""
