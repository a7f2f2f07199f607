"""Turns in the database: what a turn adds to its parent is stored, whole turns are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy import Connection, bindparam, exists, insert, select, update

from ssmd.sessions.checkpoint import Ids, as_ids
from ssmd.sessions.match import Chain, Conversation, continues, echoed_chains
from ssmd.sessions.rows import tree
from ssmd.sessions.rows.schema import checkpoint as checkpoint_table
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.turn import NewTurn, StoreError, Turn, UnknownSession, check_id, conversation
from ssmd.text.messages import Message

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_END = (datetime(9999, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_MAX_TRIED = 64  # stored conversations that are compared with a request
_MAX_FORKS = 1000  # that have its beginning from elsewhere, those used last
_MAX_CHAINS = 1000  # answers of one request that are looked up, the last ones: enough to find the deepest


def to_micros(moment: datetime) -> int:
    """Microseconds since 1970. Raises StoreError on a time without a zone, as it would mean another one elsewhere."""
    if moment.tzinfo is None:
        raise StoreError(f"time {moment.isoformat()} has no time zone")
    micros = (moment - _EPOCH) // timedelta(microseconds=1)
    if not 0 <= micros < _END:
        raise StoreError(f"time {moment.isoformat()} cannot be; is the clock set?")
    return micros


def from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def read_path(connection: Connection, turn_id: str) -> list[Turn]:
    """The turns from the root to `turn_id`. Raises UnknownSession if there is none of that id."""
    rows = connection.execute(_on_path(turn_table), {"turn": turn_id}).all()
    if not rows:
        raise UnknownSession(f"there is no turn {turn_id!r}")
    return list(_whole(rows))


def _on_path(*columns: Any) -> Any:
    """The columns of the turns from the root to the turn `:turn`."""
    return select(*columns).where(turn_table.c.id.in_(tree.above(bindparam("turn")))).order_by(turn_table.c.depth)


def _read_messages(connection: Connection, turn_id: str) -> tuple[Message, ...]:
    """The conversation up to a turn's answer, without its ids and text."""
    rows = connection.execute(_on_path(turn_table.c.messages, turn_table.c.answer), {"turn": turn_id})
    try:
        return tuple(Message.from_json(m) for row in rows for m in (*row.messages, row.answer))
    except (ValueError, TypeError, AttributeError) as err:
        raise StoreError(f"the conversation up to turn {turn_id!r} is broken: {err}") from err


def read_tree(connection: Connection, session_id: str) -> list[Turn]:
    """All turns of a session, in the order of writing: parents before their children.

    Those that a fork began with are told as its own.
    """
    rows = connection.execute(select(turn_table).where(tree.belongs(session_id)).order_by(turn_table.c.seq))
    return [turn if turn.session == session_id else replace(turn, session=session_id) for turn in _whole(rows.all())]


def _whole(rows: Iterable[Any]) -> Iterable[Turn]:
    """Rows, parents first, to turns."""
    seen: dict[str, Turn] = {}
    for row in rows:
        parent = seen.get(row.parent) if row.parent is not None else None
        if row.parent is not None and parent is None:
            raise StoreError(f"turn {row.id!r} is broken: its parent {row.parent!r} is missing")
        try:
            turn = _turn(row, parent)
        except (ValueError, TypeError, AttributeError) as err:
            raise StoreError(f"turn {row.id!r} is broken: {err}") from err
        seen[turn.id] = turn
        yield turn


def _turn(row: Any, parent: Turn | None) -> Turn:
    ids_above = parent.ids[: row.ids_shared] if parent else np.empty(0, np.int32)
    text_above = parent.text[: row.text_shared] if parent else ""
    if len(ids_above) != row.ids_shared or len(text_above) != row.text_shared:
        raise ValueError("it shares more with its parent than that one has")
    return Turn(
        id=row.id,
        session=row.session,
        parent=row.parent,
        messages=tuple(Message.from_json(m) for m in row.messages),
        answer=Message.from_json(row.answer),
        ids=np.concatenate([ids_above, np.frombuffer(row.ids, "<i4")]),
        prompt_tokens=row.prompt_tokens,
        text=text_above + row.text,
        finish=row.finish,
        complete=row.complete,
        created_at=from_micros(row.created_at),
        lineage=row.lineage or "",
        depth=row.depth,
    )


@dataclass(frozen=True)
class _End:
    """Where a path of turns ends: what its next turn is written as an addition to."""

    session: str
    depth: int
    length: int
    chain: Chain
    ids: Ids
    text: str

    @staticmethod
    def of(path: Sequence[NewTurn]) -> _End:
        messages = conversation(path)
        last = path[-1]
        return _End(last.session, len(path), len(messages), Chain().then(messages), as_ids(last.ids), last.text)


def insert_turns(connection: Connection, turns: Sequence[NewTurn], lineage: str) -> None:
    """Write turns; a parent is stored already or comes earlier in `turns`. Raises StoreError.

    lineage: of those turns that do not say theirs.
    """
    ends: dict[str, _End] = {}
    rows = []
    for turn in turns:
        check_id("turn", turn.id)
        above = _End(turn.session, 0, 0, Chain(), np.empty(0, np.int32), "")
        if turn.parent is not None:
            if turn.parent not in ends:
                try:
                    ends[turn.parent] = _End.of(read_path(connection, turn.parent))
                except UnknownSession as err:
                    raise StoreError(f"turn {turn.id!r}: {err}; was its session removed meanwhile?") from err
            above = ends[turn.parent]
            if above.session != turn.session and not _inherits(connection, turn.session, turn.parent):
                raise StoreError(f"turn {turn.id!r} of session {turn.session!r} has a parent in {above.session!r}")
        ids = as_ids(turn.ids)
        chain = above.chain.then(turn.conversation)
        length = above.length + len(turn.conversation)
        ends[turn.id] = _End(turn.session, above.depth + 1, length, chain, ids, turn.text)
        rows.append(_row(turn, ends[turn.id], above) | {"lineage": turn.lineage or lineage})
    connection.execute(insert(turn_table), rows)


def _inherits(connection: Connection, session_id: str, turn_id: str) -> bool:
    path = tree.inherited(session_id)
    found = connection.execute(select(turn_table.c.id).where(turn_table.c.id == turn_id, turn_table.c.id.in_(path)))
    return found.first() is not None


def _row(turn: NewTurn, end: _End, above: _End) -> dict[str, Any]:
    check_unicode(turn)
    ids_shared = shared_ids(end.ids, above.ids)
    text_shared = shared_text(turn.text, above.text)
    return {
        "id": turn.id,
        "session": turn.session,
        "parent": turn.parent,
        "depth": above.depth,
        "length": end.length,
        "chain": end.chain.digest(),
        "messages": [m.to_json() for m in turn.messages],
        "answer": turn.answer.to_json(),
        "ids_shared": ids_shared,
        "ids": end.ids[ids_shared:].tobytes(),
        "text_shared": text_shared,
        "text": turn.text[text_shared:],
        "prompt_tokens": turn.prompt_tokens,
        "finish": turn.finish,
        "complete": turn.complete,
        "created_at": to_micros(turn.created_at),
    }


def is_leaf(connection: Connection, turn_id: str) -> bool:
    """Whether the turn is stored and no other one has it as its parent."""
    child = turn_table.alias()
    below = exists().where(child.c.parent == turn_table.c.id)
    query = select(turn_table.c.id).where(turn_table.c.id == turn_id, ~below)
    return connection.execute(query).first() is not None


def rewrite(connection: Connection, turn_id: str, ids: Ids, text: str) -> None:
    """Replace a turn's ids and text. Only for one that no other continues: those are stored as additions to it."""
    *above, old = read_path(connection, turn_id)
    parent = above[-1] if above else None
    whole = as_ids(ids)
    ids_shared = shared_ids(whole, as_ids(parent.ids)) if parent else 0
    text_shared = shared_text(text, parent.text) if parent else 0
    changed = {
        "ids_shared": ids_shared,
        "ids": whole[ids_shared:].tobytes(),
        "text_shared": text_shared,
        "text": text[text_shared:],
        "prompt_tokens": min(old.prompt_tokens, len(whole)),
    }
    connection.execute(update(turn_table).where(turn_table.c.id == turn_id).values(changed))


def check_unicode(turn: NewTurn) -> None:
    """Check that all texts of the turn can be written as UTF-8. Raises StoreError."""
    for text in (turn.text, *(t for m in turn.conversation for t in (m.content, m.name or ""))):
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise StoreError(f"turn {turn.id!r}: its text is not Unicode ({err.reason})") from err


def shared_ids(a: Ids, b: Ids) -> int:
    """Count the ids with which both begin."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def shared_text(a: str, b: str) -> int:
    """Count the characters with which both begin."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    wide_a = np.frombuffer(a[:n].encode("utf-32-le"), "<i4")
    return shared_ids(wide_a, np.frombuffer(b[:n].encode("utf-32-le"), "<i4"))


def _echoed() -> tuple[Any, Any, Any]:
    """Turns by `:chains`, the best first: of their owners, of forks that began with them, and of one `:session`."""
    t, s, first = turn_table.c, session_table.c, turn_table.alias("first").c
    is_head, imported = s.head == t.id, s.imported != ""
    columns = select(t.id, t.seq, t.length, s.id.label("session"), s.last_used_at)
    columns = columns.add_columns(is_head.label("is_head"), imported.label("imported"))
    chains: Any = bindparam("chains", expanding=True)

    def best(joined: Any) -> Any:
        order = (t.length.desc(), imported, s.last_used_at.desc(), is_head.desc(), t.seq.desc())
        return joined.where(t.chain.in_(chains)).order_by(*order).limit(_MAX_TRIED)

    # A fork begins as the request does, so its first turn is among the echoed ones: by that it is found.
    forks = select(s.id, s.base).join(first.id.table, first.id == s.root).where(first.chain.in_(chains))
    last_used = forks.order_by(s.last_used_at.desc()).limit(_MAX_FORKS).subquery()
    bases = select(last_used.c.base.label("base"), last_used.c.base.label("turn")).distinct()
    walk = bases.cte("walk", recursive=True)  # once for all forks that begin at the same turn
    walk = walk.union_all(select(walk.c.base, t.parent).where(t.id == walk.c.turn, t.parent.is_not(None)))
    inherited = columns.select_from(walk).join(turn_table, t.id == walk.c.turn)
    inherited = inherited.join(last_used, last_used.c.base == walk.c.base).join(session_table, s.id == last_used.c.id)
    one = columns.join(session_table, s.id == bindparam("session")).where(tree.belongs(bindparam("session")))
    return best(columns.join(session_table, s.id == t.session)), best(inherited), best(one)


_ECHOED, _INHERITED, _ECHOED_IN = _echoed()  # built once: putting a statement together takes longer than running it


def read_echoed(connection: Connection, messages: Sequence[Message], session: str | None) -> list[Conversation]:
    """The stored conversation that a request echoes: the one that match.match would choose among all, or none."""
    chains = echoed_chains(messages)[-_MAX_CHAINS:]
    if not chains:
        return []
    if session is None:
        rows = [*connection.execute(_ECHOED, {"chains": chains}), *connection.execute(_INHERITED, {"chains": chains})]
    else:
        rows = list(connection.execute(_ECHOED_IN, {"chains": chains, "session": session}))
    # The order is match.match's; of equal chains only a few differ from the echo, in reasoning that it changed.
    rows.sort(key=lambda r: (r.length, not r.imported, r.last_used_at, r.is_head, r.seq), reverse=True)
    for row in rows:
        found = Conversation(
            session=row.session,
            turn=row.id,
            messages=_read_messages(connection, row.id),
            last_used_at=from_micros(row.last_used_at),
            is_head=bool(row.is_head),
            seq=row.seq,
            imported=bool(row.imported),
        )
        if continues(messages, found):
            return [found]
    return []


def taken(connection: Connection, session_id: str, turn_ids: Sequence[str]) -> bool:
    """Whether a session, an import or a turn of these ids is stored.

    An import's id is in use as long as a fork of it is there, to which states of that origin are given.
    """
    queries = [
        select(session_table.c.id).where(session_table.c.id == session_id),
        select(session_table.c.id).where(session_table.c.imported == session_id),
        select(checkpoint_table.c.id).where(checkpoint_table.c.origin == session_id),
    ]
    for at in range(0, len(turn_ids), _MAX_CHAINS):
        queries.append(select(turn_table.c.id).where(turn_table.c.id.in_(turn_ids[at : at + _MAX_CHAINS])))
    return any(connection.execute(q.limit(1)).first() is not None for q in queries)
