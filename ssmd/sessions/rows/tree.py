"""The tree of a session: its turns, forks that begin at one of them, and the effects of a removal.

A fork owns no turn at first. Its `base` names a turn of another session, and that turn with all above it count as its
own. A turn has one owner at a time, always a session that has the turn. When the owner is removed, each turn that a
fork still needs is handed over to that fork.
"""

from __future__ import annotations

import secrets
from typing import Any

from sqlalchemy import CTE, Connection, exists, insert, literal, or_, select, update

from ssmd.sessions.rows.schema import checkpoint as checkpoint_table
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.schema import turn_checkpoint
from ssmd.sessions.turn import UnknownTurn, check_id

_t, _s = turn_table.c, session_table.c


def above(start: Any) -> Any:
    """Select the ids of a turn and of all above it. start: an expression for its id; no rows if that is NULL."""
    return select(_path(start).c.id)


def _path(start: Any) -> CTE:
    ends = select(_t.id, _t.parent)
    path = ends.where(_t.id == start).cte("above", recursive=True)
    return path.union(ends.where(_t.id == path.c.parent))


def inherited(session_id: Any) -> Any:
    """Select the ids of the turns that a fork began with, of any owner. No rows if the session is not a fork.

    session_id: an id, or an expression for one.
    """
    return above(select(_s.base).where(_s.id == session_id).scalar_subquery())


def belongs(session_id: Any) -> Any:
    """Build the condition that a row of `turn` is one of the session's turns, inherited ones included."""
    return or_(_t.session == session_id, _t.id.in_(inherited(session_id)))


def insert_fork(connection: Connection, origin: Any, turn_id: str, owner: str, now: int, used: int) -> str:
    """Write a session that begins at a turn of `origin`, a row of `session`. Returns its id.

    Nothing is copied. It has the origin's clock, so that templates render its beginning as before. Imported states
    that serve the origin serve it too. owner: of the new session; "": the origin's owner. now, used: microseconds.
    Raises UnknownTurn, and StoreError on an invalid id.
    """
    check_id("turn", turn_id)
    base = connection.execute(select(_t.depth).where(_t.id == turn_id, belongs(origin.id))).one_or_none()
    if base is None:
        raise UnknownTurn(
            f"session {origin.id!r} has no turn {turn_id!r}; `ssmd session tree {origin.id}` shows those it has"
        )
    path = _path(literal(turn_id))  # of the table's rows SQLite would read all without a parent
    root = select(path.c.id).where(path.c.parent.is_(None))
    fork = {
        "id": f"ses_{secrets.token_hex(12)}",
        "created_at": now,
        "last_used_at": used,
        "model": origin.model,
        "lineage": origin.lineage,
        "clock": origin.clock,
        "head": turn_id,
        "turns": base.depth + 1,
        "title": origin.title,
        "pinned": False,
        "imported": origin.imported,
        "owner": owner or origin.owner,
        "base": turn_id,
        "root": connection.execute(root).scalar_one(),
    }
    connection.execute(insert(session_table).values(fork))
    return str(fork["id"])


def hand_over(connection: Connection, session_id: str) -> list[str]:
    """Hand each turn of a session that a fork still needs over to such a fork, before the session is removed.

    Returns the forks that own more turns than before.
    """
    if connection.execute(select(_t.id).where(_t.session == session_id).limit(1)).first() is None:
        return []  # a fork that was never continued; there may be thousands
    # Only trees that the session is a part of: those of its own roots, and that of the session it was forked from.
    roots = (
        select(_t.id)
        .where(_t.session == session_id, _t.parent.is_(None))
        .union(select(_s.root).where(_s.id == session_id, _s.root.is_not(None)))
    )
    forks = connection.execute(
        select(_s.id, _s.base, _s.owner).where(_s.root.in_(roots), _s.id != session_id).order_by(_s.created_at, _s.id)
    )
    heirs = []
    for fork in forks.all():
        path = above(literal(fork.base))
        moved = update(turn_table).where(_t.session == session_id, _t.id.in_(path))
        moved = moved.values(session=fork.id, owner=fork.owner)
        if connection.execute(moved).rowcount:
            heirs.append(fork.id)
    return heirs


def resumable(connection: Connection, session_id: str) -> set[str]:
    """Return the turns of a session whose end has a stored state: to continue one feeds none of its tokens again."""
    link = turn_checkpoint.c
    kept = (
        exists()
        .where(link.turn == _t.id, checkpoint_table.c.id == link.checkpoint)
        .where(checkpoint_table.c.kind == "turn", checkpoint_table.c.position >= _t.prompt_tokens)
    )
    return set(connection.scalars(select(_t.id).where(belongs(session_id), kept)))
