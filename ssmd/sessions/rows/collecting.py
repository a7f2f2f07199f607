"""Collecting: checkpoints go until those left fit the quota, in parts, and the disk gets their space back."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from ssmd.machine.progress import tell
from ssmd.sessions.rows import database, holding, retention
from ssmd.sessions.rows.faults import DiskFull
from ssmd.sessions.rows.room import Room


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


def _give_back(engine: Engine, file: Path, room: Room) -> None:
    try:
        database.give_back(engine, file)
    except DiskFull:
        room.give_up(0)
        database.shrink(engine, file)
