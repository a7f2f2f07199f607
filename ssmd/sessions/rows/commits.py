"""The transactions of a store: turns with their states, a turn rendered again, a session from elsewhere.

quota: bytes of checkpoints that may stay. Text may take as much again, and at least 1 GiB. Errors are StoreErrors, on
which the transaction is to be rolled back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, delete, select

from ssmd.machine.progress import tell
from ssmd.model.state import StateSpec
from ssmd.sessions.line import Line, Passage
from ssmd.sessions.reply import NewReply
from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import conversations, database, erasure, holding, paths, replies, retention, sessions, turns
from ssmd.sessions.rows.blobs import DamagedState, EncodedCheckpoint, dtype_of, is_genuine, read_parts, segments_of
from ssmd.sessions.rows.checkpoints import CheckpointResult, sweep
from ssmd.sessions.rows.disk_space import DiskSpace
from ssmd.sessions.rows.faults import DiskFull
from ssmd.sessions.rows.holding import batches, count_again
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, segment, turn, turn_checkpoint
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.turn import NewTurn, SessionInfo, StoreError
from ssmd.text.messages import Message

_COUNTED_WHEN_IDLE = 100  # sessions counted at once; some milliseconds each


def check(session: SessionInfo, new: Sequence[NewTurn], checkpoints: Sequence[EncodedCheckpoint]) -> None:
    """Check that turns and checkpoints belong to one session. Raises StoreError."""
    if not new:
        raise StoreError("a commit needs at least one turn")
    for t in new:
        if t.session != session.id:
            raise StoreError(f"turn {t.id!r} is of session {t.session!r}, the commit of {session.id!r}")
    strangers = {c.turn for c in checkpoints} - {t.id for t in new} - {None}
    if strangers:
        raise StoreError(f"checkpoints belong to turns {sorted(map(str, strangers))} that are not of this commit")


def write(
    connection: Connection,
    session: SessionInfo,
    new: Sequence[NewTurn],
    checkpoints: Sequence[EncodedCheckpoint],
    quota: int | None,
    reply: NewReply | None,
    heard: Mapping[str, Sequence[Message]],
) -> list[CheckpointResult]:
    """Write turns (siblings, the first becomes the head) of a new or known session, as Store.commit describes."""
    for turn_id, said in heard.items():
        turns.heal(connection, turn_id, said)
    sessions.touch_session(connection, new, session)
    turns.insert_turns(connection, new, session.lineage, session.owner)
    turns.bound_text(connection, quota)
    placed = retention.place(connection, checkpoints, [t.id for t in new], session.id, quota)
    if reply is not None:
        replies.insert_reply(connection, reply, new, state_stored=ends_placed(new, checkpoints, placed))
        if reply.facts is not None:
            replies.drop_receipt(connection, new[0].id)
            paths.note(connection, new[0])
            if reply.complete and "conversation" in reply.facts:
                conversations.append(connection, new[0], reply.facts)
        if replies.replace_turns(connection, session.id, reply.key.replaces):
            erasure.owe(connection)
    return placed


def ends_placed(
    new: Sequence[NewTurn], checkpoints: Sequence[EncodedCheckpoint], placed: Sequence[CheckpointResult]
) -> bool:
    """Return True if the state at the end of each of these turns is stored."""
    ends = {c.turn for c, p in zip(checkpoints, placed, strict=True) if c.kind == "turn" and p.id is not None}
    return all(t.id in ends for t in new)


def attach(
    connection: Connection,
    session_id: str,
    new: Sequence[NewTurn],
    checkpoints: Sequence[EncodedCheckpoint],
    quota: int | None,
    reply: NewReply | None,
) -> list[CheckpointResult]:
    """Write checkpoints of turns that are stored without them; none if one of those turns was removed meanwhile.

    reply: the reply that was written with the turns; it is updated to say if their states are stored.
    """
    turn_ids = [t.id for t in new]
    there = connection.scalars(select(turn_table.c.id).where(turn_table.c.id.in_(turn_ids))).all()
    if len(there) < len(turn_ids):
        return [CheckpointResult(None, why_not="its turn was removed meanwhile") for _ in checkpoints]
    placed = retention.place(connection, checkpoints, turn_ids, session_id, quota)
    if reply is not None:
        replies.update_reply(connection, reply, new, state_stored=ends_placed(new, checkpoints, placed))
    return placed


def rewrite(
    connection: Connection, turn_id: str, ids: Line, text: Passage, checkpoint: EncodedCheckpoint, quota: int | None
) -> CheckpointResult | None:
    """Replace the ids and the text of a turn, and the state after them; None if it is gone or was continued."""
    if not turns.is_leaf(connection, turn_id):
        return None
    turns.rewrite(connection, turn_id, ids, text)
    session_id = connection.execute(select(turn_table.c.session).where(turn_table.c.id == turn_id)).scalar_one()
    strangers = checkpoint_rows.unlink_strangers(connection, turn_id, ids)
    holding.relink(connection, session_id, strangers)
    checkpoint_rows.sweep(connection, strangers)
    return retention.place(connection, [checkpoint], [turn_id], session_id, quota)[0]


def adopt(
    connection: Connection,
    session: SessionInfo,
    new: Sequence[NewTurn],
    checkpoints: Sequence[EncodedCheckpoint],
    quota: int | None,
    *,
    head: str,
    title: str | None = None,
) -> list[CheckpointResult]:
    """Write a whole session from elsewhere; parents stand before their children."""
    if turns.taken(connection, session.id, [t.id for t in new]):
        raise StoreError(f"session {session.id!r}, or one of its turns, is stored here already")
    sessions.insert_session(connection, new, session, head=head, now=turns.to_micros(datetime.now(UTC)), title=title)
    turns.insert_turns(connection, new, session.lineage, session.owner)
    turns.bound_text(connection, quota)
    return retention.place(connection, checkpoints, [head], session.id, quota)


def drop(connection: Connection, checkpoint_id: int, spec: StateSpec) -> int:
    """Remove a checkpoint that cannot be read, and those that list its unreadable KV rows. Returns how many.

    It is read once more first: a mere read error then removes nothing.
    """
    if _is_sound(connection, checkpoint_id, spec):
        return 0
    listed, unreadable = [], []
    columns = (segment.c.id, segment.c.dtype, segment.c.checksum, segment.c.data)
    with contextlib.closing(connection.execute(segments_of(checkpoint_id, *columns))) as rows:
        for row in rows:
            listed.append(row.id)
            known = isinstance(row.dtype, str) and dtype_of(row.dtype) is not None
            if not known or not isinstance(row.data, bytes) or not is_genuine(row.data, row.checksum):
                unreadable.append(row.id)
    c = checkpoint_segment.c
    listing = select(checkpoint.c.id).join(checkpoint_segment, c.checkpoint == checkpoint.c.id)
    doomed = {checkpoint_id}
    for some in batches(unreadable):
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
    """Return True if a checkpoint can be read. Raises StoreError if it does not exist any more."""
    try:
        _, parts = read_parts(connection, checkpoint_id, spec)
        with contextlib.closing(parts):
            for _ in parts:
                pass
    except DamagedState:
        return False
    return True


def collect(
    engine: Engine, file: Path, room: DiskSpace, limit: int | None, *, dry_run: bool
) -> retention.CollectionResult:
    """Remove checkpoints until those left take at most `limit` bytes. dry_run: only report what would go."""
    done = retention.CollectionResult(quota=limit)
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


def settle(engine: Engine, file: Path, room: DiskSpace) -> bool:
    """Count some of the sizes that sharing changed, and settle the log. Return True if more are to be counted."""
    with database.reading(engine, file) as connection:
        some = holding.has_unknown_sizes(connection)
    counted = 0
    if some:
        with database.writing(engine, file) as connection:
            counted = holding.count_sizes(connection, at_most=_COUNTED_WHEN_IDLE)
    room.for_words(lambda: database.settle(engine, file, idle=True))  # this lets the file grow
    return counted == _COUNTED_WHEN_IDLE


def _give_back(engine: Engine, file: Path, room: DiskSpace) -> None:
    try:
        database.give_back(engine, file)
    except DiskFull:
        room.give_up(0)
        database.shrink(engine, file)
