"""One daemon to a data directory: a lock that the operating system releases however its process ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ssmd.machine.lockfile import LOCK_FILE, lock, named
from ssmd.machine.privatefile import NOLINK
from ssmd.sessions.turn import StoreError


class DirectoryLock:
    """The lock of a data directory, from `take` until `release` or the process's end. Its file names the process."""

    def __init__(self, descriptor: int, file: Path) -> None:
        self._descriptor: int | None = descriptor
        self._file = file

    def is_in_place(self) -> bool:
        """Return True if the locked file still has its name. Otherwise a second daemon would not see the lock."""
        if self._descriptor is None:
            return False
        try:
            found = self._file.stat()
        except OSError:
            return False
        held = os.fstat(self._descriptor)
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    @staticmethod
    def take(data_dir: Path, advice: str) -> DirectoryLock:
        """Lock the data directory for this process. Raises StoreError that names the holder and gives the advice."""
        file = data_dir / LOCK_FILE
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | NOLINK, 0o600)
        except OSError as err:
            raise StoreError(f"cannot use {file}: {err.strerror}; check that you may write there") from err
        try:
            if not lock(descriptor):
                holder = named(descriptor)
                process = f" (process {holder})" if holder else ""
                raise StoreError(f"another ssmd daemon{process} uses {data_dir}: {advice}")
            os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):  # on a full disk the lock has no name
                os.write(descriptor, f"{os.getpid()}\n".encode())
        except OSError as err:
            os.close(descriptor)
            raise StoreError(f"{file} cannot be locked: {err.strerror}; is the directory on a local disk?") from err
        except BaseException:
            os.close(descriptor)
            raise
        return DirectoryLock(descriptor, file)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a name that is left over does no harm
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
