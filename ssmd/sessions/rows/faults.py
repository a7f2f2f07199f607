"""What the database's own errors mean, as StoreErrors that say what to do."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ssmd.sessions.turn import StoreError


class DamagedFile(StoreError):
    """SQLite finds the file's own structure damaged."""

    reason = "damaged"


class ReplacedFile(StoreError):
    """The file that is open is not the one of that name any more: what is written to it is lost at the end."""

    reason = "replaced"


class Locked(StoreError):
    """Another process holds the store longer than one waits for it."""

    reason = "locked"


class DiskFull(StoreError):
    """The file system has no room for what is to be written."""

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
    sqlite3.SQLITE_BUSY: Locked,
    sqlite3.SQLITE_LOCKED: Locked,
    sqlite3.SQLITE_FULL: DiskFull,
}
_WITHOUT_FILE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)  # what a missing file gives
_NO_ROOM = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)  # a user's quota, say


def _error(err: BaseException | None, file: Path) -> StoreError:
    extended = getattr(err, "sqlite_errorcode", 0)
    code = extended & 0xFF
    if code in _WITHOUT_FILE and not os.path.lexists(file):  # it was there when the store was opened
        return replaced(file, f"{file} was removed")
    kind = DiskFull if extended in _NO_ROOM else _KINDS.get(code, StoreError)
    return kind(_explain(err, code, file))


def replaced(file: Path, happened: str) -> ReplacedFile:
    return ReplacedFile(
        f"session store {file}: {happened} while it was in use, so nothing is written any more; "
        "put back the files that were there, or restart the daemon to go on with those that are there now"
    )


def disk_full(file: Path) -> DiskFull:
    return DiskFull(
        f"session store {file}: the disk is full; free some space, or remove sessions with `ssmd session rm`"
    )


def unusable(file: Path, err: OSError) -> StoreError:
    return StoreError(f"session store {file}: {err}; check the disk, and that the directory is still there")


def _explain(err: BaseException | None, code: int, file: Path) -> str:
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"session store {file} is locked by another process that writes; try again when it is done"
    if code == sqlite3.SQLITE_FULL:
        return str(disk_full(file))
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"session store {file} cannot be written ({err}); check the rights of the file and of its directory"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return (
            f"session store {file} is damaged ({err}); take out what can be read with `ssmd session check --repair`, "
            "or move it away to start with an empty one"
        )
    if code == sqlite3.SQLITE_CONSTRAINT:
        return f"session store {file}: nothing was written, as it contradicts what is stored ({err})"
    if code == sqlite3.SQLITE_IOERR:
        return f"session store {file}: reading or writing failed ({err}); is the disk full or broken?"
    return f"session store {file}: {err}; `ssmd session check` tells whether it is damaged"
