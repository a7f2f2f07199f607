"""Limits that a process sets on itself before it reads untrusted bytes.

Windows supports none of them. macOS does not enforce a limit on memory, nor notify a process that its parent is gone;
there only the parent's deadline ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import time

DESCRIPTORS = 64  # open files of a confined process
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


def confine(memory: int, *, threads: bool = False, writable: int | None = None) -> None:
    """Limit this process: few open files, no core dump, no child process, and no new thread unless `threads`.

    memory: bytes of address space beside those it has now. With `threads`, files and processes are not limited.
    writable: bytes of private memory that it may write, with those it has now; on Linux only, None for no limit.
    """
    if sys.platform == "win32":
        return
    import resource

    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory + _address_space())]
    if writable is not None and sys.platform == "linux":  # address space that is only reserved does not count
        limits.append((resource.RLIMIT_DATA, writable))
    if not threads:
        limits += [(resource.RLIMIT_NOFILE, DESCRIPTORS), (resource.RLIMIT_NPROC, 0)]
    for limit, most in limits:
        with contextlib.suppress(OSError, ValueError):  # macOS ignores RLIMIT_AS; elsewhere a lower limit is in force
            resource.setrlimit(limit, (most, most))


def allow_processor(seconds: float) -> None:
    """Let this process use `seconds` more of processor time, all its threads together.

    Then the kernel ends it, even inside a library.
    """
    if sys.platform == "win32":
        return
    import resource

    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def allow_memory(nbytes: int) -> None:
    """Let this process map `nbytes` more of address space than now, within the limit of `confine`."""
    if sys.platform == "win32":
        return
    import resource

    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = nbytes + _address_space()
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def end_with(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends (Linux only).

    parent: id of the parent process. Exits at once if that is already gone.
    """
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
