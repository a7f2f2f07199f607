"""Faults of the session store: SQLite's errors as errors that say what happened and what to do."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ssmd.machine.folder import read_only
from ssmd.machine.lockfile import LOCK_FILE, holder, locks_files
from ssmd.sessions.turn import StoreError

_MOVE = "move the data directory to a local disk, and name it with --data-dir or SSMD_DATA_DIR"


class DamagedFile(StoreError):
    """A file whose own structure SQLite finds damaged."""

    reason = "damaged"


class ReplacedFile(StoreError):
    """An open file that does not have its name any more. Writes to it are lost at the end."""

    reason = "replaced"


class ReadOnlyDisk(StoreError):
    """A file system that takes no writes any more."""

    reason = "read_only"


class NoSharedMemory(StoreError):
    """A file system on which processes cannot share the memory that SQLite's log needs."""


class StoreLocked(StoreError):
    """A store that another process, or another thread, holds longer than the caller waits."""

    reason = "locked"


class StoreHeldAlone(StoreLocked):
    """A store on a disk where only one process can use it. process: the daemon's; None if another program holds it."""

    def __init__(self, message: str, process: int | None) -> None:
        super().__init__(message)
        self.process = process


class DiskFull(StoreError):
    """A file system without room for a write."""

    reason = "disk_full"


@contextlib.contextmanager
def errors(file: Path) -> Iterator[None]:
    """Turn the database's exceptions into StoreErrors that say what to do."""
    try:
        yield
    except DBAPIError as err:
        raise _error(err.orig, file) from err
    except sqlite3.Error as err:
        raise _error(err, file) from err
    except (json.JSONDecodeError, UnicodeError) as err:
        raise DamagedFile(
            f"session store {file} is damaged: it holds text that cannot be read ({err}); see `ssmd session check`"
        ) from err
    except SQLAlchemyError as err:
        raise StoreError(f"session store {file}: {err}") from err


_KINDS = {
    sqlite3.SQLITE_CORRUPT: DamagedFile,
    sqlite3.SQLITE_NOTADB: DamagedFile,
    sqlite3.SQLITE_BUSY: StoreLocked,
    sqlite3.SQLITE_LOCKED: StoreLocked,
    sqlite3.SQLITE_FULL: DiskFull,
}
_LOCKING = (
    sqlite3.SQLITE_IOERR_LOCK,
    sqlite3.SQLITE_IOERR_RDLOCK,
    sqlite3.SQLITE_IOERR_UNLOCK,
    sqlite3.SQLITE_IOERR_CHECKRESERVEDLOCK,
)
SHARING = (sqlite3.SQLITE_IOERR_SHMOPEN, sqlite3.SQLITE_IOERR_SHMMAP, sqlite3.SQLITE_IOERR_SHMLOCK)
_UNCONFIRMED = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)
_READ_ONLY_SIDES = (
    sqlite3.SQLITE_READONLY_RECOVERY,
    sqlite3.SQLITE_READONLY_CANTLOCK,
    sqlite3.SQLITE_READONLY_CANTINIT,
)
_WITHOUT_FILE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)  # what a missing file gives
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)  # what EROFS gives
_NO_ROOM = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)  # because of a disk quota, for example


def _error(err: BaseException | None, file: Path) -> StoreError:
    extended = getattr(err, "sqlite_errorcode", 0)
    code = extended & 0xFF
    if code in _WITHOUT_FILE and not os.path.lexists(file):  # it was there when the store was opened
        return replaced(file, f"{file} was removed")
    if extended == sqlite3.SQLITE_READONLY_DBMOVED:
        return replaced(file, f"{file} was moved")
    if code in _UNWRITABLE and read_only(file.parent):
        return read_only_disk(file)
    if extended in SHARING:
        return NoSharedMemory(no_shared_memory(file))
    if extended in _LOCKING or (code == sqlite3.SQLITE_BUSY and not locks_files(file.parent)):
        return StoreError(
            f"session store {file}: its file system cannot lock files ({_name(err)}), as some of NFS, CIFS, 9p and "
            f"FUSE; {_MOVE}"
        )
    kind = DiskFull if extended in _NO_ROOM else _KINDS.get(code, StoreError)
    return kind(_explain(err, extended, file))


def _name(err: BaseException | None) -> str:
    """Return the name of SQLite's extended error code, such as SQLITE_IOERR_LOCK; the message if it has none."""
    return str(getattr(err, "sqlite_errorname", "") or err)


def no_shared_memory(file: Path) -> str:
    return f"session store {file}: its file system has no memory that processes share; {_MOVE}"


def held_alone(err: StoreLocked, file: Path) -> StoreLocked:
    """Return the error of a store that cannot be opened because of a lock: reading needs one only if it is held alone.

    err: the error of the opening. One of a process that recovers the store is returned as it is.
    """
    cause = getattr(err.__cause__, "orig", None) or err.__cause__
    if getattr(cause, "sqlite_errorcode", 0) != sqlite3.SQLITE_BUSY:
        return err
    process = None
    with contextlib.suppress(OSError):
        process = holder(file.with_name(LOCK_FILE))
    who = f"the daemon, process {process}," if process else "another process"
    return StoreHeldAlone(
        f"session store {file}: {who} uses it alone, as its file system has no memory that processes share; run this "
        f"again after `ssmd stop`, or ask the daemon (its page, or /ssmd/v1/sessions). Else {_MOVE}",
        process or None,
    )


def replaced(
    file: Path, happened: str, advice: str = "put the old files back, or restart the daemon to use the present ones"
) -> ReplacedFile:
    return ReplacedFile(
        f"session store {file}: {happened} while it was in use, so nothing is written any more; {advice}"
    )


def disk_full(file: Path) -> DiskFull:
    return DiskFull(
        f"session store {file}: the disk is full; free some space, or remove sessions with `ssmd session rm`"
    )


def read_only_disk(file: Path) -> ReadOnlyDisk:
    return ReadOnlyDisk(
        f"session store {file}: its file system is read-only, so nothing can be written; a system does that after "
        "errors of a disk: see its log (`dmesg`), and remount it read-write"
    )


def unusable_store(file: Path, err: OSError) -> StoreError:
    if err.errno == errno.EROFS:
        return read_only_disk(file)
    return StoreError(f"session store {file}: {err}; check the disk, and that the directory is still there")


def _explain(err: BaseException | None, extended: int, file: Path) -> str:
    code, store = extended & 0xFF, f"session store {file}"
    if extended == sqlite3.SQLITE_BUSY_RECOVERY:
        return f"{store} is being recovered by another process after a crash; try again in a moment"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{store} is locked by another process that writes; try again when it is done"
    if code == sqlite3.SQLITE_FULL:
        return str(disk_full(file))
    if extended in _READ_ONLY_SIDES:
        return f"{store}: a file beside it, `-shm` or `-wal`, cannot be written ({_name(err)}); check its rights"
    if extended == sqlite3.SQLITE_CANTOPEN_ISDIR:
        return f"{store}: a folder has the name of the file, or of its `-wal` or `-shm`; move it away"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"{store} cannot be written ({err}); check the rights of the file and of its directory"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return (
            f"{store} is damaged ({err}); take out what can be read with `ssmd session check --repair`, "
            "or move it away to start with an empty one"
        )
    if code == sqlite3.SQLITE_CONSTRAINT:
        return f"{store}: nothing was written, because it contradicts stored rows ({err})"
    if extended in _UNCONFIRMED:
        return (
            f"{store}: the disk did not confirm a write ({_name(err)}), so it may be broken; see the system's log, "
            f"make a backup with `ssmd backup DIR`, and {_MOVE}"
        )
    if code == sqlite3.SQLITE_IOERR:
        return f"{store}: reading or writing failed ({_name(err)}); is the disk full or broken?"
    return f"{store}: {err}; run `ssmd session check` to see if it is damaged"
