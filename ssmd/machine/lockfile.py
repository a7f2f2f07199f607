"""A file that one process holds locked, until it lets go or ends, however it ends; the file names it."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from ssmd.machine.privatefile import NOFOLLOW

LOCK_FILE = "daemon.lock"  # of a data directory
TRIES = 25  # of who takes it, or looks at it: whoever looks holds it for a moment
_BETWEEN_S = 0.01
_LOCKED_BYTE = 1 << 20  # on Windows what is locked cannot be read: away from the text


def lock(descriptor: int) -> bool:
    """Lock an open file for this process. False if another one holds it, for longer than a look takes."""
    for left in reversed(range(TRIES)):
        if _lock(descriptor):
            return True
        if left:
            time.sleep(_BETWEEN_S)
    return False


def named(descriptor: int) -> int:
    """The process that wrote its number into an open lock file; 0 if none did, or something else stands there."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    text = os.read(descriptor, 20).split(b"\n")[0]
    return int(text) if text.isdigit() else 0


def holder(file: Path) -> int | None:
    """The process that holds a lock file, 0 if it has not said which it is; None if nobody does. Raises OSError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return None if _free(descriptor) else named(descriptor)
    finally:
        os.close(descriptor)  # which lets go of it, too


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
        """Nothing can be shared here: two that look at it at once could each take the other for the holder."""
        return lock(descriptor)

else:
    import fcntl

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
