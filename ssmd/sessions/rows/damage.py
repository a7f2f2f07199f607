"""Damaged checkpoints in the database: they go, with all that stand on the same rows. Their turns are read again."""

from __future__ import annotations

import contextlib

from sqlalchemy import Connection, delete, select

from ssmd.model.state import StateSpec
from ssmd.sessions.rows.blobs import is_genuine
from ssmd.sessions.rows.checkpoints import sweep
from ssmd.sessions.rows.holding import batches, count_again
from ssmd.sessions.rows.parts import DamagedState, read_parts, segments_of
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, segment, turn, turn_checkpoint


def drop(connection: Connection, checkpoint_id: int, spec: StateSpec) -> int:
    """Remove a checkpoint that cannot be read, and those that list KV rows of it that were altered. Returns how many.

    It is read once more first: what was a slip of the memory harms nothing.
    """
    if _is_sound(connection, checkpoint_id, spec):
        return 0
    listed, altered = [], []
    columns = (segment.c.id, segment.c.checksum, segment.c.data)
    with contextlib.closing(connection.execute(segments_of(checkpoint_id, *columns))) as rows:
        for row in rows:
            listed.append(row.id)
            if not isinstance(row.data, bytes) or not is_genuine(row.data, row.checksum):
                altered.append(row.id)
    c = checkpoint_segment.c
    listing = select(checkpoint.c.id).join(checkpoint_segment, c.checkpoint == checkpoint.c.id)
    doomed = {checkpoint_id}
    for some in batches(altered):
        doomed.update(connection.scalars(listing.where(c.segment.in_(some))))
    sharing = set(doomed)
    for some in batches(listed):
        sharing.update(connection.scalars(listing.where(c.segment.in_(some))))
    sessions: set[str] = set()
    link = turn_checkpoint.c
    for some in batches(sorted(sharing)):
        linked = select(turn.c.session).join(turn_checkpoint, link.turn == turn.c.id).where(link.checkpoint.in_(some))
        sessions.update(connection.scalars(linked.distinct()))
    for some in batches(sorted(doomed)):
        connection.execute(delete(turn_checkpoint).where(link.checkpoint.in_(some)))
    sweep(connection, doomed)
    count_again(connection, sessions)
    return len(doomed)


def _is_sound(connection: Connection, checkpoint_id: int, spec: StateSpec) -> bool:
    """Whether it can be read. Raises StoreError if it is not there any more."""
    try:
        _, parts = read_parts(connection, checkpoint_id, spec)
        with contextlib.closing(parts):
            for _ in parts:
                pass
    except DamagedState:
        return False
    return True
