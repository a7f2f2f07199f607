"""The default number of threads for this processor."""

from __future__ import annotations

import sys
from pathlib import Path

from ssmd.machine.processor import cpus, sysctl

MOST_BY_DEFAULT = 8  # beyond that a decode step waits for memory, not for cores
_SYSTEM = Path("/sys")


def default_threads() -> int:
    """Physical cores that this process may use, at most MOST_BY_DEFAULT, at least 1."""
    return max(1, min(MOST_BY_DEFAULT, _cores(), _quota()))


def _cores() -> int:
    """Two hardware threads of one core share the unit that does the work: they count once. Of a Mac's cores the fast
    ones count alone: a step waits for the slowest."""
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
    """The limit that a container sets on processor time, rounded up to whole cores."""
    try:
        quota, period = (_SYSTEM / "fs/cgroup/cpu.max").read_text().split()
        return MOST_BY_DEFAULT if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return MOST_BY_DEFAULT
