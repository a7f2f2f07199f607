"""Warm beginnings in the database: pinned sessions whose one turn is the beginning of prompts, without an answer.

Such a turn ends with WARM in place of a finish reason. Its ids and text are the beginning: tools and system messages as
the template renders them. The state at its end is linked to it, as to any turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, func, select, true

from ssmd.sessions.checkpoint import Scope
from ssmd.sessions.rows import sessions as session_rows
from ssmd.sessions.rows import tree
from ssmd.sessions.rows.schema import checkpoint, serves_all, turn, turn_checkpoint
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.turns import as_they_are, turn_of
from ssmd.sessions.turn import Domain, NewTurn, Session, SessionInfo, StoreError, Turn
from ssmd.text.messages import Message

WARM = "warm"  # the finish of a turn that is a warm beginning
ANSWER = Message("assistant", "", name="ssmd_warm_beginning")  # no request echoes it, so none continues such a turn
_t, _c, _s, _l = turn.c, checkpoint.c, session_table.c, turn_checkpoint.c
_LENGTH = _t.ids_start + func.length(_t.ids) // 4
_TURNS = turn.join(session_table, _s.id == _t.session)
_IS_WARM = (_s.pinned.is_(True), _t.finish == WARM)  # the index finds the pinned sessions, which are few


@dataclass(frozen=True)
class WarmBeginning:
    """A warm beginning. tokens: its length. ready: its state is stored, and serves requests of its owner."""

    session: Session
    turn: str
    tokens: int
    ready: bool


def warm_turn(new: NewTurn) -> NewTurn:
    """Return a turn as one that is a warm beginning, at the root of its session."""
    return replace(
        new, parent=None, answer=ANSWER, finish=WARM, complete=True, settled=None, cut=0, prompt_tokens=len(new.ids)
    )


def read_warm(connection: Connection, domain: Domain) -> list[WarmBeginning]:
    """Read the warm beginnings that the domain sees, the one used last first."""
    stored = _end(true())
    asked = select(_t.session, _t.id, _LENGTH, stored.label("ready")).select_from(_TURNS).where(*_IS_WARM)
    with as_they_are(connection):
        rows = connection.execute(asked.order_by(_s.last_used_at.desc(), _t.seq)).all()
    found = []
    for name, its, tokens, ready in rows:
        info = session_rows.read_info(connection, name, Domain())
        if domain.has(info.owner):
            found.append(WarmBeginning(session_rows.read_session(connection, name, domain), its, tokens, bool(ready)))
    return found


def read_unread(connection: Connection, scope: Scope) -> list[tuple[str, SessionInfo]]:
    """Read (turn, session) of the warm beginnings of a model whose state is not stored. Of all owners."""
    missing = ~_end(_c.layout == scope.layout)
    asked = select(_t.id, _t.session).select_from(_TURNS).where(*_IS_WARM, _t.lineage == scope.lineage, missing)
    with as_they_are(connection):
        rows = connection.execute(asked.order_by(_t.seq)).all()
    return [(row.id, session_rows.read_info(connection, row.session, Domain())) for row in rows]


def read_states(connection: Connection) -> frozenset[int]:
    """Read the ids of the checkpoints of all warm beginnings: at their ends and inside them."""
    asked = select(_l.checkpoint).join(turn, _t.id == _l.turn).join(session_table, _s.id == _t.session)
    return frozenset(connection.scalars(asked.where(*_IS_WARM)))


def read_beginning(connection: Connection, session_id: str) -> tuple[Turn, int]:
    """Read the first turn of a session, and how many of its ids are tools and system messages.

    The position of the state after them is their number. Raises StoreError if that state is missing.
    """
    root = select(turn).where(tree.belongs(session_id), _t.parent.is_(None)).order_by(_t.seq).limit(1)
    with as_they_are(connection):
        row = connection.execute(root).one_or_none()
    found = None if row is None else turn_of(row)
    if found is None or not found.sound:
        raise StoreError(f"session {session_id!r} has no first turn that can be read; see `ssmd session check`")
    ends = select(func.max(_c.position)).join(turn_checkpoint, _l.checkpoint == _c.id)
    position = connection.scalar(ends.where(_l.turn == found.id, _c.kind == "system"))
    if found.finish == WARM:
        position = len(found.ids)
    if position is None or position > len(found.ids):
        raise StoreError(
            f"session {session_id!r} has no state behind its tools and system messages: they are few, or the state was "
            "removed for room; give them as a file: ssmd warm FILE"
        )
    return found, int(position)


def _end(layout: Any) -> Any:
    """Build the condition that the state at the end of a turn is stored, and serves more than one session."""
    linked = select(_c.id).join(turn_checkpoint, _l.checkpoint == _c.id)
    return linked.where(_l.turn == _t.id, _c.position == _LENGTH, serves_all(_c.origin), layout).exists()
