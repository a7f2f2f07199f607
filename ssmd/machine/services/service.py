"""The daemon as a service of the system: its definition and state, and the interface of service managers."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

NAME = "ssmd"
DESCRIPTION = "ssmd, inference daemon for state-space and hybrid language models"
NOT_ROOT = "a service of the machine is installed by root: put sudo in front, or leave --system out"
WAIT_S = 60.0  # longest run of a manager's command; a daemon that is stopped gives its answers 10 s


class ServiceError(ValueError):
    """The system's service manager refused, or is missing; the message says what to do."""


@dataclass(frozen=True)
class Definition:
    """The command that the service runs, and its environment."""

    command: tuple[str, ...]  # its first word is a path
    environment: Mapping[str, str]  # contains no secret


@dataclass(frozen=True)
class Status:
    """The state of a service."""

    installed: bool
    running: bool
    state: str  # as the manager calls it
    pid: int | None  # of the daemon; None if it does not run, or is unknown
    starts: bool  # it starts with the machine, or at login


class Manager(Protocol):
    """Systemd, launchd, or Windows' Task Scheduler. Every method raises ServiceError."""

    @property
    def name(self) -> str:
        """Its name, for people."""

    @property
    def when(self) -> str:
        """The time of the service's start, as words for a message."""

    @property
    def file(self) -> Path:
        """The file of the definition."""

    def text(self, definition: Definition) -> str:
        """Return the text of the definition's file."""

    def install(self, definition: Definition) -> bool:
        """Write the definition, enable it, and start the service. Returns False if nothing had to change."""

    def uninstall(self) -> bool:
        """Stop the service and remove its definition. Returns False if there was none."""

    def status(self) -> Status:
        """Return the state of the service."""

    def data_dir(self) -> Path | None:
        """Return the data directory of the installed service; None if it names none."""

    def start(self) -> None:
        """Start the service, if it does not run."""

    def stop(self) -> None:
        """Stop the service, as SIGTERM does."""

    def log(self, lines: int, *, follow: bool) -> Sequence[str] | None:
        """Return the command that shows the service's output; None if only the daemon's own log has it."""


def asked(command: Sequence[str], *, fails: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a manager's command. Raises ServiceError if it is missing, hangs, or, with `fails`, exits with an error."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WAIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise ServiceError(f"{command[0]} is not installed here, so a service cannot be installed") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{' '.join(command)}` does not end within {WAIT_S:.0f} s") from None
    if fails and done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise ServiceError(f"`{' '.join(command)}` says: {' '.join(said)[:500]}")
    return done


def written(file: Path, text: str, *, encoding: str = "utf-8") -> bool:
    """Write a definition, whole or not at all. Returns False if the file has this text already. Raises ServiceError."""
    data = text.encode(encoding)
    try:
        if file.is_file() and file.read_bytes() == data:
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}-new")
        new.write_bytes(data)
        new.chmod(0o644)
        new.replace(file)
    except OSError as err:
        raise ServiceError(f"{file} cannot be written: {err.strerror or err}") from err
    return True


def removed(file: Path) -> bool:
    """Remove a definition. Returns False if there was none. Raises ServiceError."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    except OSError as err:
        raise ServiceError(f"{file} cannot be removed: {err.strerror or err}") from err
    return True
