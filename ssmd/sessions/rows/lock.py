"""One daemon to a data directory: a lock that the operating system releases however its process ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ssmd.machine.lockfile import LOCK_FILE, lock, lock_directory, named
from ssmd.machine.privatefile import NOLINK
from ssmd.sessions.turn import StoreError


class DirectoryLock:
    """The lock of a data directory, from `take` until `release` or the process's end. Its file names the process.

    The directory itself is locked too, where the system can do that. So a second process is refused even if another
    program removed the lock file.
    """

    def __init__(self, data_dir: Path, descriptor: int, folder: int | None) -> None:
        """folder: descriptor of the locked directory; None if it cannot be locked."""
        self._data_dir, self._file = data_dir, data_dir / LOCK_FILE
        self._descriptor: int | None = descriptor
        self._folder = folder

    def is_in_place(self) -> bool:
        """Return True if the locked file still has its name. Otherwise commands would not find the daemon."""
        return self._descriptor is not None and _has_name(self._descriptor, self._file)

    @staticmethod
    def take(data_dir: Path, advice: str) -> DirectoryLock:
        """Lock the data directory for this process. Raises StoreError that names the holder and gives the advice."""
        descriptor = _lock_file(data_dir, advice)
        try:
            return DirectoryLock(data_dir, descriptor, _lock_folder(data_dir, advice))
        except BaseException:
            os.close(descriptor)
            raise

    def retake(self, advice: str) -> None:
        """Lock the directory again after another program removed the lock file, or put another directory there.

        Raises StoreError as `take` does, and then keeps the locks that it has.
        """
        before, folder = self._descriptor, self._folder
        descriptor = _lock_file(self._data_dir, advice)
        try:
            if folder is None or not _has_name(folder, self._data_dir):
                self._folder = _lock_folder(self._data_dir, advice)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        for left in (before, folder if folder != self._folder else None):
            if left is not None:
                os.close(left)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a name that is left over does no harm
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def _has_name(descriptor: int, path: Path) -> bool:
    """Return True if a path leads to an open file or directory."""
    try:
        found = path.stat()
    except OSError:
        return False
    held = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _lock_file(data_dir: Path, advice: str) -> int:
    """Lock the lock file, write this process's id into it, and return its descriptor. Raises StoreError."""
    file = data_dir / LOCK_FILE
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | NOLINK, 0o600)
    except OSError as err:
        raise StoreError(f"cannot use {file}: {err.strerror}; check that you may write there") from err
    try:
        if not lock(descriptor):
            raise _held(data_dir, named(descriptor), advice)
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # on a full disk the lock has no name
            os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError as err:
        os.close(descriptor)
        raise StoreError(f"{file} cannot be locked: {err.strerror}; is the directory on a local disk?") from err
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock_folder(data_dir: Path, advice: str) -> int | None:
    """Lock the directory itself, and return its descriptor; None if the system cannot. Raises StoreError."""
    try:
        return lock_directory(data_dir)
    except BlockingIOError as err:
        raise _held(data_dir, 0, advice) from err


def _held(data_dir: Path, holder: int, advice: str) -> StoreError:
    """Return the error for a directory that another process has locked. holder: its id; 0 if unknown."""
    process = f" (process {holder})" if holder else ""
    return StoreError(f"another ssmd daemon{process} uses {data_dir}: {advice}")
