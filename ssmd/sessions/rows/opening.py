"""Opening the database of a store: made, or brought to the newest schema, also on a disk that is full."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from ssmd.sessions.rows import database, migrate, room
from ssmd.sessions.rows.faults import DiskFull


def open_store(data_dir: Path, *, busy_ms: int) -> tuple[Engine, Path]:
    """Open the database in `data_dir`; create (0700, 0600) or migrate it as needed. Raises StoreError.

    A database of a newer version is refused untouched.
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
            ready = migrate.current(connection) == migrate.HEAD
        if not ready:
            with database.migrating(engine, file) as connection:
                migrate.upgrade(connection, file)
    except BaseException:
        engine.dispose()
        raise
    return engine, file
