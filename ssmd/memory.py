"""What the allocator keeps of freed memory, and giving it back. glibc only; elsewhere nothing is done."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # malloc.h
_BIG_BYTES = 8 << 20


def return_big_blocks() -> None:
    """From now on blocks of 8 MiB and more go back to the system as soon as they are freed.

    By itself glibc raises that size to that of the largest block freed, up to 32 MiB: the caches, stores and workspaces
    of a model then lie in arenas that cannot shrink.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _BIG_BYTES)


def trim() -> None:
    """Hand the freed pages of all threads' arenas back: a turn of 1,600 tokens leaves some 60 MB there."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
