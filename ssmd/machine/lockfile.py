"""A lock file: one process holds it until it releases it or ends. The file contains its process id."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from ssmd.machine.privatefile import NOFOLLOW, PLAIN

LOCK_FILE = "daemon.lock"  # of a data directory
TRIES = 25  # most tries to take the lock, or to look at it; a process that looks holds it for a moment
_BETWEEN_S = 0.01
_LOCKED_BYTE = 1 << 20  # offset of the locked byte, beyond the text: Windows does not allow reading locked bytes


def lock(descriptor: int) -> bool:
    """Lock an open file for this process. Returns False if another process keeps holding it."""
    for left in reversed(range(TRIES)):
        if _lock(descriptor):
            return True
        if left:
            time.sleep(_BETWEEN_S)
    return False


def lock_directory(folder: Path) -> int | None:
    """Lock a directory for this process. Returns its descriptor; None if the system cannot lock directories.

    Raises BlockingIOError if another process keeps holding it. Windows lets no program remove an open lock file, so it
    needs no such lock. Network file systems lock files that are open for writing only.
    """
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | PLAIN)
    except OSError:
        return None
    try:
        locked = lock(descriptor)
    except OSError:
        os.close(descriptor)
        return None
    if not locked:
        os.close(descriptor)
        raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", str(folder))
    return descriptor


def named(descriptor: int) -> int:
    """Return the process id that an open lock file contains; 0 if it contains no number."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    text = os.read(descriptor, 20).split(b"\n")[0]
    return int(text) if text.isdigit() else 0


def holder(file: Path) -> int | None:
    """Return the id of the process that holds a lock file; 0 if unknown; None if it is free. Raises OSError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return None if _free(descriptor) else named(descriptor)
    finally:
        os.close(descriptor)  # also releases the lock


def locks_files(folder: Path) -> bool:
    """Return False if the file system of a folder refuses POSIX locks. It locks a new file, so that it closes no other.

    To close a file drops all POSIX locks that this process has on it.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            _lock_range(probe)
    except OSError as err:
        return err.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
    return True


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as err:
            if err.errno not in (errno.EACCES, 0):  # wine gives no number
                raise
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return True

    def _free(descriptor: int) -> bool:
        """Lock exclusively, with retries: Windows' lock is not shared, so two looks could collide."""
        return lock(descriptor)

    def _lock_range(file: IO[bytes]) -> None:
        """Do nothing: Windows locks files wherever it can open them."""

else:
    import fcntl

    def _lock_range(file: IO[bytes]) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _lock(descriptor: int) -> bool:
        return _flock(descriptor, fcntl.LOCK_EX)

    def _free(descriptor: int) -> bool:
        return _flock(descriptor, fcntl.LOCK_SH)

    def _flock(descriptor: int, how: int) -> bool:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
