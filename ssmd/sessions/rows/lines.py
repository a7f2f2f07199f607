"""Ids and text of turns beyond their own: what is read only when it has to be fed or rendered again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, bindparam, literal, select

from ssmd.sessions.checkpoint import Found, Scope
from ssmd.sessions.domain import Domain
from ssmd.sessions.line import Line
from ssmd.sessions.rows.checkpoints import find
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import as_they_are, turn_of
from ssmd.sessions.turn import StoreError

_MOST = 4096  # turns read at once
_t = turn_table.c


def _stems() -> Any:
    """A turn and those that it grew from, at most `:most`, the deepest first."""
    first = select(_t.id, _t.stem, literal(1).label("n")).where(_t.id == bindparam("turn"))
    walk = first.cte("stems", recursive=True)
    walk = walk.union_all(
        select(_t.id, _t.stem, walk.c.n + 1).where(_t.id == walk.c.stem, walk.c.n < bindparam("most"))
    )
    return select(turn_table).join(walk, walk.c.id == _t.id).order_by(walk.c.n)


_STEMS = _stems()


def resume(
    connection: Connection,
    scope: Scope,
    ids: Line,
    stem: str | None,
    session: str | None,
    domain: Domain,
    skip: Collection[int],
) -> tuple[Found | None, Line, str | None]:
    """(checkpoint, line, stem): the deepest checkpoint for a prompt, with all ids at hand that are to be fed after it.

    stem: the turn whose ids end where those at hand begin; None at the beginning. Of what is stored only that is read
    which is to be fed. Without a checkpoint all ids are at hand. Raises StoreError if some of them were altered.
    """
    most = 1
    while True:
        found = find(connection, scope, ids, session, domain, skip)
        if found is not None or stem is None:
            return found, ids, stem
        ids, stem = _before(connection, ids, stem, most)
        most = min(4 * most, _MOST)


def reach(connection: Connection, ids: Line, stem: str | None, position: int) -> tuple[Line, str | None]:
    """(line, stem): the line with its ids from `position` on at hand; stem as in `resume`. Raises StoreError."""
    most = 1
    while stem is not None and ids.start > position:
        ids, stem = _before(connection, ids, stem, most)
        most = min(4 * most, _MOST)
    return ids, stem


def _before(connection: Connection, ids: Line, stem: str, most: int) -> tuple[Line, str | None]:
    """The line with more ids at hand: those of its stem, and of up to `most` turns in all; and the stem before."""
    with as_they_are(connection):
        rows = connection.execute(_STEMS, {"turn": stem, "most": most}).all()
    turns = [turn_of(row) for row in rows]
    if not turns:
        raise StoreError(f"there is no turn {stem!r} any more")
    start, before = ids.start, ids.before
    for turn in turns:
        if not turn.sound or len(turn.ids) != start or turn.ids.hash(start) != before:
            raise StoreError(f"the tokens of turn {turn.id!r} are not those that were written")
        start, before = turn.ids.start, turn.ids.before
    return ids.after([turn.ids for turn in reversed(turns)]), turns[-1].stem
