"""Opening the database of a store: made, or brought to the newest schema, also on a disk that is full."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import Engine

from ssmd.machine import lockfile
from ssmd.sessions.rows import database, migrate, room
from ssmd.sessions.rows.faults import DiskFull
from ssmd.sessions.turn import StoreError


def open_store(data_dir: Path, *, busy_ms: int) -> tuple[Engine, Path]:
    """Open the database in `data_dir`; create (0700, 0600) or migrate it as needed. Raises StoreError.

    A database of a newer version is refused untouched, and so is one of an older version whose daemon still runs.
    """
    try:
        return _open(data_dir, busy_ms)
    except DiskFull:  # the log's index takes 32 kB
        if not room.cut(data_dir, room.FOR_REMOVAL) and not room.cut(data_dir, 0):
            raise
        return _open(data_dir, busy_ms)


def _open(data_dir: Path, busy_ms: int) -> tuple[Engine, Path]:
    file = data_dir / database.FILE
    engine = database.open_database(data_dir, busy_ms=busy_ms)
    try:
        with database.reading(engine, file) as connection:
            revision = migrate.current(connection)
        if revision != migrate.HEAD:
            if revision is not None:
                _check_unused(data_dir, file)
            with database.migrating(engine, file) as connection:
                migrate.upgrade(connection, file)
    except BaseException:
        engine.dispose()
        raise
    return engine, file


def _check_unused(data_dir: Path, file: Path) -> None:
    """Refuse to migrate what the daemon of an older version, in another process, goes on writing as it knows it."""
    try:
        holder = lockfile.holder(data_dir / lockfile.LOCK_FILE)
    except OSError:  # no daemon could have taken it either
        return
    if holder not in (None, os.getpid()):
        process = f" (process {holder})" if holder else ""
        raise StoreError(
            f"{file} is of an older ssmd, whose daemon{process} still runs; nothing was changed: end that daemon "
            "first, with `ssmd stop`"
        )
