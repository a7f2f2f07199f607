"""Other processes of this user."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_PROCESSES = Path("/proc")


@dataclass(frozen=True)
class ProcessInfo:
    """The command line, folder and environment of a process."""

    arguments: tuple[str, ...]
    folder: Path
    variables: dict[str, str] = field(repr=False)


def started(process: int) -> ProcessInfo | None:
    """Return how a process was started, from /proc; None if it is gone, or its files cannot be read. Linux only."""
    place = _PROCESSES / str(process)
    try:
        arguments = tuple(os.fsdecode(one) for one in (place / "cmdline").read_bytes().split(b"\0")[:-1])
        lines = (place / "environ").read_bytes().split(b"\0")
        folder = (place / "cwd").resolve(strict=True)
    except OSError:
        return None
    return ProcessInfo(arguments, folder, dict(os.fsdecode(line).split("=", 1) for line in lines if b"=" in line))
