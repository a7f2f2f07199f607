"""What one transaction writes: turns with their states, a turn rendered anew, a session from elsewhere.

quota: bytes of checkpoints that may stay; what was said may take as much again, and at least 1 GiB. Errors are
StoreErrors, on which the transaction is to be given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from sqlalchemy import Connection, select

from ssmd.sessions.line import Line, Passage
from ssmd.sessions.reply import NewReply
from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import erasure, growth, holding, replies, retention, sessions, turns
from ssmd.sessions.rows.checkpoints import Placed
from ssmd.sessions.rows.encoded import Encoded
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.turn import NewTurn, SessionInfo, StoreError
from ssmd.text.messages import Message

_LEAST_TEXT_BYTES = 1 << 30


def check(session: SessionInfo, new: Sequence[NewTurn], checkpoints: Sequence[Encoded]) -> None:
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
    checkpoints: Sequence[Encoded],
    quota: int | None,
    reply: NewReply | None,
    heard: Mapping[str, Sequence[Message]],
) -> list[Placed]:
    """Write turns (siblings, the first becomes the head) of a session, new or not, and what Store.commit says."""
    for turn_id, said in heard.items():
        growth.heal(connection, turn_id, said)
    sessions.touch_session(connection, new, session)
    growth.insert_turns(connection, new, session.lineage, session.owner)
    _bound_text(connection, quota)
    placed = retention.place(connection, checkpoints, [t.id for t in new], session.id, quota)
    if reply is not None:
        replies.insert_reply(connection, reply, new, state_stored=ends_placed(new, checkpoints, placed))
        if replies.replace_turns(connection, session.id, reply.key.replaces):
            erasure.owe(connection)
    return placed


def ends_placed(new: Sequence[NewTurn], checkpoints: Sequence[Encoded], placed: Sequence[Placed]) -> bool:
    """Tell whether the state at the end of each of these turns is stored."""
    ends = {c.turn for c, p in zip(checkpoints, placed, strict=True) if c.kind == "turn" and p.id is not None}
    return all(t.id in ends for t in new)


def attach(
    connection: Connection,
    session_id: str,
    new: Sequence[NewTurn],
    checkpoints: Sequence[Encoded],
    quota: int | None,
    reply: NewReply | None,
) -> list[Placed]:
    """Write checkpoints of turns that stand without them; none where one of those turns was removed meanwhile.

    reply: the one that was written with the turns; it says from now on whether their states are stored.
    """
    turn_ids = [t.id for t in new]
    there = connection.scalars(select(turn_table.c.id).where(turn_table.c.id.in_(turn_ids))).all()
    if len(there) < len(turn_ids):
        return [Placed(None, why_not="its turn was removed meanwhile") for _ in checkpoints]
    placed = retention.place(connection, checkpoints, turn_ids, session_id, quota)
    if reply is not None:
        replies.update_reply(connection, reply, new, state_stored=ends_placed(new, checkpoints, placed))
    return placed


def rewrite(
    connection: Connection, turn_id: str, ids: Line, text: Passage, checkpoint: Encoded, quota: int | None
) -> Placed | None:
    """Replace the ids and the text of a turn, and the state after them; None if it is gone or was continued."""
    if not turns.is_leaf(connection, turn_id):
        return None
    growth.rewrite(connection, turn_id, ids, text)
    session_id = connection.execute(select(turn_table.c.session).where(turn_table.c.id == turn_id)).scalar_one()
    strangers = checkpoint_rows.unlink_strangers(connection, turn_id, ids)
    holding.count_again(
        connection, {session_id, *holding.sole_sharers(connection, strangers, session_id)} if strangers else ()
    )
    checkpoint_rows.sweep(connection, strangers)
    return retention.place(connection, [checkpoint], [turn_id], session_id, quota)[0]


def adopt(
    connection: Connection,
    session: SessionInfo,
    new: Sequence[NewTurn],
    checkpoints: Sequence[Encoded],
    quota: int | None,
    *,
    head: str,
    title: str | None = None,
) -> list[Placed]:
    """Write a whole session from elsewhere; parents stand before their children."""
    if turns.taken(connection, session.id, [t.id for t in new]):
        raise StoreError(f"session {session.id!r}, or one of its turns, is stored here already")
    sessions.insert_session(connection, new, session, head=head, now=turns.to_micros(datetime.now(UTC)), title=title)
    growth.insert_turns(connection, new, session.lineage, session.owner)
    _bound_text(connection, quota)
    return retention.place(connection, checkpoints, [head], session.id, quota)


def _bound_text(connection: Connection, quota: int | None) -> None:
    if quota is None:
        return
    bound, nbytes = max(quota, _LEAST_TEXT_BYTES), holding.turn_bytes(connection)
    if nbytes > bound:
        raise StoreError(
            f"what was said takes {nbytes} of {bound} bytes; remove sessions with `ssmd session rm`, or raise the quota"
        )
