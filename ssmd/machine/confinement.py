"""Limits that a process sets itself before it touches a stranger's bytes.

Windows has none of them. macOS keeps no limit on memory, and tells no process that its parent is gone. There the
parent's own deadline is what ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import time

DESCRIPTORS = 64
_PR_SET_PDEATHSIG = 1  # prctl.h


def forbid_core_dumps() -> None:
    """Keep the memory of this process and its children out of core files."""
    if sys.platform == "win32":
        return
    import resource

    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Linux ignores the limit if it pipes the core to a program: this filter leaves all memory out of that core.
    with contextlib.suppress(OSError), open("/proc/self/coredump_filter", "w") as file:
        file.write("0")


def confine(memory: int, *, threads: bool = False) -> None:
    """Bound this process: `memory` bytes of address space beside what it has, few files, no core dump, and no other
    process, nor another thread unless `threads`."""
    if sys.platform == "win32":
        return
    import resource

    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory + _address_space())]
    if not threads:
        limits += [(resource.RLIMIT_NOFILE, DESCRIPTORS), (resource.RLIMIT_NPROC, 0)]
    for limit, most in limits:
        with contextlib.suppress(OSError, ValueError):  # macOS has no RLIMIT_AS that counts; elsewhere less is allowed
            resource.setrlimit(limit, (most, most))


def allow_processor(seconds: float) -> None:
    """Let this process run for so many more seconds of processor time, all its threads together: then the kernel ends
    it, in whatever library it is."""
    if sys.platform == "win32":
        return
    import resource

    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def end_with(parent: int) -> None:
    """Have the kernel end this process as soon as the thread is gone that started it (Linux only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)


def _address_space() -> int:
    if sys.platform == "win32":
        return 0
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30
