"""Replies in the database: written with their turns, found by their request, gone with their turns or their time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from ssmd.sessions.reply import NewReply, Reply, ReplyKey
from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import holding, tree
from ssmd.sessions.rows.schema import reply as reply_table
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import as_they_are, to_micros, turn_of
from ssmd.sessions.turn import NewTurn


def find_reply(connection: Connection, key: ReplyKey) -> Reply | None:
    """The reply under a key. Of several, those that broke off come first: theirs is the client that asks again."""
    r, t = reply_table.c, turn_table.c
    query = select(r.body, r.turns, r.complete, r.answer).where(r.key == key.digest, r.expires_at > _now())
    row = connection.execute(query.order_by(r.complete, r.id.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    with as_they_are(connection):
        found = connection.execute(select(turn_table).where(t.id.in_(row.turns))).all()
    turns = {turn.id: turn for turn in map(turn_of, found) if turn.sound}
    if set(turns) != set(row.turns):
        return None
    texts = tuple(turns[turn].answer.content for turn in row.turns)
    return Reply(row.body, turns[row.turns[0]].session, tuple(row.turns), texts, row.complete, row.answer)


def insert_reply(connection: Connection, reply: NewReply, turns: Sequence[NewTurn]) -> None:
    """Keep a reply with its turns, one a choice; drop those whose time is over and the one it takes the place of."""
    r, now = reply_table.c, _now()
    connection.execute(delete(reply_table).where(r.expires_at <= now))
    if reply.key.named:
        connection.execute(delete(reply_table).where(r.key == reply.key.digest))
    row = {
        "key": reply.key.digest,
        "body": reply.key.body,
        "turn": turns[0].id,
        "turns": [turn.id for turn in turns],
        "complete": reply.complete,
        "expires_at": now + to_micros(datetime.fromtimestamp(0, UTC) + reply.key.lasts),
        "answer": dict(reply.answer),
    }
    connection.execute(insert(reply_table).values(row))


def forget(connection: Connection, turns: Any) -> None:
    """Remove the replies of the turns of a sub-select."""
    connection.execute(delete(reply_table).where(reply_table.c.turn.in_(turns)))


def replace_turns(connection: Connection, session_id: str, turns: Sequence[str]) -> bool:
    """Remove the turns of attempts that broke off, as far as nothing follows on them; others only lose their reply.

    Whether there were any.
    """
    if not turns:
        return False
    t = turn_table.c
    connection.execute(delete(reply_table).where(reply_table.c.turn.in_(turns)))
    followed = select(t.parent).where(t.parent.in_(turns))
    begun_at = select(session_table.c.base).where(session_table.c.base.in_(turns))  # by forks
    mine = (t.id.in_(turns), t.session == session_id, t.id.not_in(followed), t.id.not_in(begun_at))
    gone = list(connection.scalars(select(t.id).where(*mine)))
    if not gone:
        return False
    linked = checkpoint_rows.linked_to(connection, gone)
    holding.add_turn_bytes(connection, -holding.nbytes_of_turns(connection, t.id.in_(gone)))
    connection.execute(delete(turn_table).where(t.id.in_(gone)))
    left = select(func.count()).where(tree.belongs(session_id)).scalar_subquery()
    connection.execute(update(session_table).where(session_table.c.id == session_id).values(turns=left))
    holding.count_again(connection, {session_id, *holding.sole_sharers(connection, sorted(set(linked)), session_id)})
    checkpoint_rows.sweep(connection, linked)
    return True


def _now() -> int:
    return to_micros(datetime.now(UTC))
