"""Folders that settings name: their absolute paths, their creation, and their rights."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from pathlib import Path

if sys.platform == "win32":
    from ssmd.machine import windows


def expanded(path: Path) -> Path:
    """Return the absolute path, without `~` and `..`. Raises ValueError."""
    try:
        whole = path.expanduser()
    except RuntimeError as err:
        raise ValueError(str(err)) from err
    if "\0" in str(path):
        raise ValueError("a path cannot contain a null character")
    return Path(os.path.abspath(whole))


def absolute(path: Path) -> Path:
    """Return the absolute path of a folder. Raises ValueError if it or a folder above it is a file.

    Rights are not checked here, but where the folder is used.
    """
    whole = expanded(path)
    for one in (whole, *whole.parents):
        try:
            if not stat.S_ISDIR(one.stat().st_mode):
                raise ValueError(f"{one} is a file, not a folder; move it away, or choose another")
        except OSError:
            continue
        break
    return whole


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, all with mode 0700 or private by Windows' access lists.

    Raises OSError.
    """
    for one in (*reversed(folder.absolute().parents), folder):
        made = not one.is_dir()
        one.mkdir(mode=0o700, exist_ok=True)
        if made and sys.platform == "win32":
            close_to_others(one)


def close_to_others(folder: Path) -> None:
    """Close a folder to other users: by mode 0700, on Windows by its access list. Raises OSError."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError):  # USB sticks may have no access lists: see `others_open`
            windows.make_private(folder)
    else:
        folder.chmod(0o700)


def others_open(folder: Path) -> bool:
    """Return True if users other than this one and the system's own can open a folder. Raises OSError."""
    if sys.platform == "win32":
        return windows.others_open(folder)
    return bool(stat.S_IMODE(folder.stat().st_mode) & 0o077)


def own(path: Path, called: str, advice: str) -> None:
    """Make a folder that only this user can open. Raises ValueError if it cannot be trusted or made.

    called: the name of its purpose, for the error. advice: the error's advice if it cannot be made or written.
    """
    try:
        make_private(path)
        found = path.stat()
        if hasattr(os, "getuid"):
            if found.st_uid != os.getuid():
                raise ValueError(f"{called} {path} belongs to user {found.st_uid}; use one of your own")
            if found.st_mode & stat.S_IWOTH:
                raise ValueError(
                    f"{called} {path} can be written by every user of this computer, so what lies there cannot be "
                    f"trusted; look it through, then: chmod 700 {path}"
                )
            if stat.S_IMODE(found.st_mode) != 0o700:
                path.chmod(0o700)
        elif others_open(path):
            close_to_others(path)
        if reason := _why_not_writable(path):
            raise ValueError(f"{called} {path} cannot be written ({reason}); {advice}")
    except OSError as err:
        raise ValueError(f"{called} {path} cannot be made ({err.strerror or err}); {advice}") from err


def writable(path: Path, called: str, advice: str) -> None:
    """Make a folder that others may read. Raises ValueError, as `own` does."""
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        reason = _why_not_writable(path)
    except OSError as err:
        reason = err.strerror or str(err)
    if reason:
        raise ValueError(f"{called} {path} cannot be written ({reason}); {advice}")


def _why_not_writable(path: Path) -> str:
    """Return why this user cannot write into a folder; "" if it can."""
    if os.access(path, os.W_OK | os.X_OK):
        return ""
    return "its file system is read-only; see the system's log, and remount it" if read_only(path) else "no permission"


def read_only(path: Path) -> bool:
    """Return True if the file system of a folder takes no writes.

    It tries to make a file. After errors of a disk, the flags of the file system may not show it.
    """
    try:
        with tempfile.TemporaryFile(dir=path):
            return False
    except OSError as err:
        return err.errno == errno.EROFS
