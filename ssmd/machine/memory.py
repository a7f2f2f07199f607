"""The memory of this process: its amounts, and the return of freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

if sys.platform == "win32":
    from ssmd.machine import windows

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_ARENAS = 4  # of all threads; glibc has 8 for each core, and freed memory of one is not used by the others
_BIG_BYTES = 8 << 20  # size from which a freed block is returned to the system
_MADV_DONTNEED = 4  # mman.h of Linux
_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def return_big_blocks() -> None:
    """Make blocks of 8 MiB and more go back to the system as soon as they are freed, and have few arenas (glibc only).

    By default glibc raises that size to the largest block freed, up to 32 MiB. A model's caches, stores and workspaces
    would then lie in arenas that cannot shrink.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_MMAP_THRESHOLD, _BIG_BYTES)
            libc.mallopt(_M_ARENA_MAX, _ARENAS)


def trim() -> None:
    """Return the freed pages of all threads' arenas (glibc only): a turn of 1,600 tokens leaves about 60 MB there."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


class TrimSchedule:
    """Decides when freed memory goes back to the system: once this process rests after work, rarely while it works.

    All kinds of work count, by their processor time: answers, prompts that are left, grammars, texts. To take memory
    again costs as much as to write it, and a trim of a gigabyte stops other threads for tenths of a second.
    """

    WORK_S = 0.2  # processor time after which there may be something to return
    RESTING = 0.1  # most processor time of a process that rests, as a share of the time
    LOOK_S = 0.5  # least time over which that is measured
    GROWN_BYTES = 256_000_000  # growth since the last trim from which a process that works is trimmed
    AGAIN_S = 60.0  # least time between two trims of a process that works

    def __init__(self, now: float, worked: float, nbytes: int) -> None:
        """Begin with the present figures: monotonic s, processor time in s, and resident bytes."""
        self._seen = now, worked
        self._at, self._work, self._bytes = now, worked, nbytes

    def due(self, now: float, worked: float, nbytes: Callable[[], int]) -> bool:
        """Return True if it is time to trim; then the caller trims, and calls `trimmed`.

        nbytes: returns the resident bytes, which costs the read of a file.
        """
        before, spent = self._seen
        if worked - self._work < self.WORK_S or now - before < self.LOOK_S:
            return False
        self._seen = now, worked
        if worked - spent <= self.RESTING * (now - before):
            return True
        return now - self._at >= self.AGAIN_S and nbytes() - self._bytes >= self.GROWN_BYTES

    def trimmed(self, now: float, worked: float, nbytes: int) -> None:
        """Note a trim, and the figures after it."""
        self._at, self._work, self._bytes = now, worked, nbytes
        self._seen = now, worked


def available() -> int | None:
    """Return the bytes that this process can still take before the system has to swap; None if unknown.

    Limits of the container and of the process count too. Linux and Windows report the bytes.
    """
    if sys.platform == "win32":
        return windows.memory_free()
    free = [_field(_MEMINFO, "MemAvailable"), address_space()]
    with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
        held = int((_CGROUP / "memory.current").read_text()) - _of_files(_CGROUP / "memory.stat")
        free.append(int((_CGROUP / "memory.max").read_text()) - held)
    known = [n for n in free if n is not None]
    return max(0, min(known)) if known else None


def _of_files(stat: Path) -> int:
    """Return the bytes of a container's file pages: the system reclaims them before it refuses memory."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
        return int(fields["inactive_file"]) + int(fields["active_file"])
    except (OSError, ValueError, KeyError):
        return 0


def address_space() -> int | None:
    """Return the bytes that this process can still map within its own limit (`ulimit -v`).

    None if it has no limit, or if the system does not report the mapped bytes; Linux does.
    """
    size = _status("VmSize")
    if sys.platform == "win32" or size is None:
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else max(0, limit - size)


def resident() -> int | None:
    """Return the bytes of this process in memory now, including mapped files; None if the system does not report it."""
    if sys.platform == "win32":
        return windows.resident()
    return _status("VmRSS")


def mapped() -> int | None:
    """Return the bytes of `resident` that are pages of files; None if the system does not report it.

    The system reclaims such pages when other processes need memory.
    """
    return _status("RssFile")


def most_resident() -> int | None:
    """Return the maximum of `resident` so far, in bytes; None if the system does not report it."""
    if sys.platform == "win32":
        return windows.most_resident()
    # ru_maxrss only as a fallback: on Linux it begins with the memory of the process that started this one.
    peak = _status("VmHWM")
    if peak is None:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def _status(field: str) -> int | None:
    return _field(_STATUS, field)


def _field(file: Path, field: str) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        found = re.search(rf"^{field}:\s*(\d+) kB$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def drop_mapped(file: Path) -> None:
    """Release the pages of `file` that this process has mapped for reading. They are read again if needed (Linux).

    A library that has packed the weights into its own memory does not need the file's copy any more.
    """
    if sys.platform != "linux":
        return
    try:
        maps, mapped = _MAPS.read_text().splitlines(), str(file.resolve())
    except OSError:
        return
    libc = ctypes.CDLL(None)
    for line in maps:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == mapped and fields[1].startswith("r--"):
            first, last = (int(address, 16) for address in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def drop_pages(memory: mmap.mmap, but: Iterable[int]) -> None:
    """Release the pages of a mapped file except those of the bytes `but`. They are read again if needed (Linux).

    but: offsets of bytes.
    """
    if sys.platform == "linux":
        kept = sorted({place // mmap.PAGESIZE for place in but})
        for first, last in pairwise((-1, *kept, -(-len(memory) // mmap.PAGESIZE))):
            if last > first + 1:
                start = (first + 1) * mmap.PAGESIZE
                memory.madvise(mmap.MADV_DONTNEED, start, min(last * mmap.PAGESIZE, len(memory)) - start)
