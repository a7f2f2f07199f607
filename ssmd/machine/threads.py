"""The default number of threads for this processor."""

from __future__ import annotations

import sys
from pathlib import Path

from ssmd.machine.processor import cpus, sysctl

MOST_BY_DEFAULT = 8  # most threads by default: with more, a decode step waits for memory, not for cores
_SYSTEM = Path("/sys")


def default_threads() -> int:
    """Return the number of physical cores that this process may use, from 1 to MOST_BY_DEFAULT."""
    return max(1, min(MOST_BY_DEFAULT, _cores(), _quota()))


def _cores() -> int:
    """Return the number of physical cores. Of a Mac's cores only the fast ones count: a step waits for the slowest.

    Two hardware threads of a core count once, as they share its arithmetic unit.
    """
    if sys.platform == "darwin" and (fast := sysctl("hw.perflevel0.physicalcpu")).isdecimal():
        return int(fast)
    own = cpus()
    siblings: set[str] = set()
    for cpu in own:
        try:
            path = _SYSTEM / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            siblings.add(path.read_text().strip())
        except OSError:
            return len(own)
    return len(siblings)


def _quota() -> int:
    """Return a container's limit on processor time, rounded up to whole cores; MOST_BY_DEFAULT without a limit."""
    try:
        quota, period = (_SYSTEM / "fs/cgroup/cpu.max").read_text().split()
        return MOST_BY_DEFAULT if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return MOST_BY_DEFAULT
