"""Files that hold secrets or are trusted: checks that no other user can read or write them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# On Windows: creating links needs a right, folders contain no pipes, and O_BINARY keeps line ends unchanged.
PLAIN = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
NOLINK = PLAIN | getattr(os, "O_NOFOLLOW", 0)
NOWAIT = PLAIN | getattr(os, "O_NONBLOCK", 0)
NOFOLLOW = NOLINK | NOWAIT


def owned(found: os.stat_result) -> bool:
    """Return True if the file belongs to this user; on Windows always."""
    return not hasattr(os, "getuid") or found.st_uid == os.getuid()


def close_to_others(descriptor: int) -> None:
    """Set an open file's mode so that only this user may open it; on Windows its folder's rights apply."""
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, 0o600)


def others_write(found: os.stat_result) -> bool:
    """Return True if every user of this computer can write the file; on Windows False."""
    return hasattr(os, "getuid") and bool(found.st_mode & stat.S_IWOTH)


def others_read(found: os.stat_result) -> bool:
    """Return True if other users can read the file. Root does not count, nor the group of another user's file."""
    if not hasattr(os, "getuid"):
        return False
    others = stat.S_IROTH | (stat.S_IRGRP if found.st_uid == os.getuid() else 0)
    return bool(found.st_mode & others)


def of_another_user(found: os.stat_result) -> bool:
    """Return True if the file belongs to a user other than this one and root; on Windows False."""
    return hasattr(os, "getuid") and found.st_uid not in (0, os.getuid())


def read_own(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a file that only this user can have written.

    Raises OSError for any other file, at once: it follows no link and waits for no pipe.
    """
    return _read(path, most, stat.S_IWGRP | stat.S_IWOTH, "written")


def read_secret(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a file that only this user can read or write. Raises OSError as `read_own`."""
    return _read(path, most, stat.S_IRWXG | stat.S_IRWXO, "read or written")


def _read(path: Path, most: int, forbidden: int, what: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & forbidden):
            raise PermissionError(f"{path} could be {what} by others")
        return file.read(most)
