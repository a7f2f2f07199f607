"""Collecting: checkpoints go until those left fit the quota, in parts, and the disk gets their space back. And settling
what commits left for a quiet moment.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine, select

from ssmd.machine.progress import tell
from ssmd.sessions.rows import database, holding, retention
from ssmd.sessions.rows.faults import DiskFull
from ssmd.sessions.rows.room import Room
from ssmd.sessions.rows.schema import session as session_table

_COUNTED_WHEN_IDLE = 100  # sessions; some milliseconds each


def collect(engine: Engine, file: Path, room: Room, limit: int | None, *, dry_run: bool) -> retention.Collected:
    """Let checkpoints go until those left take at most `limit` bytes. dry_run: only say what would go."""
    done = retention.Collected(quota=limit)
    with database.reading(engine, file) as connection:
        above = 0 if limit is None or dry_run else holding.stored_bytes(connection) - limit
    while True:
        tell(done.nbytes, above)
        try:
            with database.writing(engine, file) as connection:
                more = retention.collect(connection, limit, dry_run=dry_run)
        except DiskFull:
            if dry_run:
                raise
            more = room.removing(lambda connection: retention.collect(connection, limit, dry_run=False))
        done = done.and_then(more)
        if dry_run:
            return done
        if not more.nbytes:
            break
        # In parts, so that the log stays small, and a daemon gets its turn.
        _give_back(engine, file, room)
    _give_back(engine, file, room)
    room.restock()
    return done


def settle(engine: Engine, file: Path, room: Room) -> bool:
    """Count some of the sessions whose sizes sharing changed, and settle the log. Whether more are to be counted."""
    with database.reading(engine, file) as connection:
        unknown = select(session_table.c.id).where(session_table.c.own_nbytes.is_(None)).limit(1)
        some = connection.execute(unknown).first() is not None
    counted = 0
    if some:
        with database.writing(engine, file) as connection:
            counted = holding.count_sizes(connection, at_most=_COUNTED_WHEN_IDLE)
    room.for_words(lambda: database.settle(engine, file, idle=True))  # which lets the file grow
    return counted == _COUNTED_WHEN_IDLE


def _give_back(engine: Engine, file: Path, room: Room) -> None:
    try:
        database.give_back(engine, file)
    except DiskFull:
        room.give_up(0)
        database.shrink(engine, file)
