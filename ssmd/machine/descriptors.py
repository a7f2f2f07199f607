"""File descriptors of this process: as many as the system allows, how many are left, and reading through one."""

from __future__ import annotations

import contextlib
import os
import sys

MOST = 10_240  # descriptors to raise the limit to: macOS refuses more; elsewhere the hard limit may be a billion
_UNKNOWN = 1024  # descriptors assumed to be open if they cannot be counted


def raise_limit() -> None:
    """Raise the soft limit to the hard one, at most to MOST: shells give 256 (macOS) or 1,024 (Linux)."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(OSError, ValueError):  # a system with a limit of its own; then as it was
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def left() -> int:
    """Return how many more descriptors this process may open, at most MOST."""
    if sys.platform == "win32":
        return MOST
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        taken = len(os.listdir("/dev/fd"))
    except OSError:
        taken = min(_UNKNOWN, soft // 2)
    return max(0, (MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)) - taken)


def read_at(descriptor: int, at: int, nbytes: int) -> bytes:
    """Return at most `nbytes` bytes of an open file from offset `at`. For one thread at a time. Raises OSError."""
    if sys.platform != "win32":
        return os.pread(descriptor, nbytes, at)
    os.lseek(descriptor, at, os.SEEK_SET)
    return os.read(descriptor, nbytes)
