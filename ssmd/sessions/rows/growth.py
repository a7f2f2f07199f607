"""Growth of conversations in the database: a turn is written as an addition, and rewritten while it is a leaf."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from ssmd.sessions.items import items_of
from ssmd.sessions.line import NOTHING, SILENCE, Line, Passage
from ssmd.sessions.match import Chain
from ssmd.sessions.rows import tree
from ssmd.sessions.rows.holding import add_turn_bytes, turn_bytes
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import (
    as_they_are,
    check_unicode,
    is_moment,
    is_unicode,
    read_turn,
    seal,
    to_micros,
    turn_of,
)
from ssmd.sessions.turn import NewTurn, RenderedPrefix, StoreError, Turn, TurnRemoved, UnknownSession, check_id
from ssmd.text.messages import Message

_MAX_STEMS = 64  # turns above a new one that are searched for its stem
_LEAST_TEXT_BYTES = 1 << 30  # that conversations may take, whatever the quota
_LEAST_NBYTES = 512  # of a row, beside items, answer, ids and text
_t = turn_table.c
_ONE = select(turn_table).where(_t.id == bindparam("turn"))
_NEW = insert(turn_table)


class _Path:
    """Turns above those to be written, read on demand."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[str, Turn] = {}

    def of(self, turn_id: str) -> Turn:
        """Return a turn. Raises UnknownSession if it does not exist, StoreError if it was altered."""
        if turn_id not in self._known:
            turn = read_turn(self._connection, turn_id)
            if not turn.sound:
                raise StoreError(f"turn {turn_id!r} was altered; see `ssmd session check`")
            self.add(turn)
        return self._known[turn_id]

    def add(self, turn: Turn) -> None:
        self._known[turn.id] = turn

    def stem(self, parent: str | None, ids: Line, text: Passage, lineage: str) -> Turn | None:
        """Return the deepest of the next _MAX_STEMS turns above whose ids and text these continue, or None."""
        at = parent
        for _ in range(_MAX_STEMS):
            if at is None:
                break
            try:
                above = self.of(at)
            except StoreError:  # altered or removed
                break
            n, c = len(above.ids), len(above.text)
            fits = n > 0 and above.lineage == lineage and ids.start <= n <= len(ids) and text.start <= c <= len(text)
            if fits and ids.hash(n) == above.ids.hash(n) and text.hash(c) == above.text.hash(c):
                return above
            at = above.parent  # not its stem: a turn of another model, or without ids, has none that fits
        return None


def insert_turns(connection: Connection, turns: Sequence[NewTurn], lineage: str, owner: str = "") -> None:
    """Write turns; a parent is stored already or comes earlier in `turns`. Raises StoreError.

    lineage: of turns that have none of their own.
    """
    path = _Path(connection)
    rows = []
    for turn in turns:
        check_id("turn", turn.id)
        above = None
        if turn.parent is not None:
            try:
                above = path.of(turn.parent)
            except UnknownSession as err:
                raise TurnRemoved(f"turn {turn.id!r}: {err}; was its session removed meanwhile?") from err
            if above.session != turn.session and not _inherits(connection, turn.session, turn.parent):
                raise StoreError(f"turn {turn.id!r} of session {turn.session!r} has a parent in {above.session!r}")
        check_unicode(turn)
        row, end = _row(turn, above, path, turn.lineage or lineage)
        path.add(end)
        rows.append(row | {"owner": owner})
    connection.execute(_NEW, rows)
    add_turn_bytes(connection, sum(row["nbytes"] for row in rows))


def _inherits(connection: Connection, session_id: str, turn_id: str) -> bool:
    path = tree.inherited(session_id)
    return connection.execute(select(_t.id).where(_t.id == turn_id, _t.id.in_(path))).first() is not None


def _row(turn: NewTurn, above: Turn | None, path: _Path, lineage: str) -> tuple[dict[str, Any], Turn]:
    """Return the row of a new turn, and the turn as those below it see it."""
    chain = above.chain.then(turn.conversation, above.answer.tool_calls) if above else Chain().then(turn.conversation)
    depth, length = (above.depth + 1, above.length) if above else (0, 0)
    length += len(turn.conversation)
    items, answer = items_of(turn.id, turn.conversation)
    row: dict[str, Any] = {
        "id": turn.id,
        "session": turn.session,
        "parent": turn.parent,
        "root": above.root if above else turn.id,
        "depth": depth,
        "length": length,
        "chain": chain.said,
        "whole": chain.whole,
        "items": as_json(items),
        "answer": as_json(answer),
        "lineage": lineage,
        "cut": turn.cut,
        "finish": turn.finish,
        "complete": turn.complete,
        "created_at": to_micros(turn.created_at),
    }
    row |= _grown(path, turn.parent, turn.ids, turn.text, lineage, turn.prompt_tokens, turn.settled)
    kept = row["ids_start"] or row["ids"]
    given = {f.name: getattr(turn, f.name) for f in fields(NewTurn)}
    given |= {"ids": turn.ids if kept else NOTHING, "text": turn.text if kept else SILENCE, "lineage": lineage}
    end = Turn(
        **given,
        stem=row["stem"],
        root=row["root"],
        depth=depth,
        length=length,
        chain=chain,
    )
    return sealed(row), end


def _grown(
    path: _Path,
    parent: str | None,
    ids: Line,
    text: Passage,
    lineage: str,
    prompt_tokens: int,
    settled: RenderedPrefix | None,
) -> dict[str, Any]:
    """Return the columns for a turn's ids and text: those of its stem come first, then its own."""
    stem = path.stem(parent, ids, text, lineage) if len(ids) else None
    if stem is not None:
        ids, text = ids.cut(len(stem.ids)), text.cut(len(stem.text))
    elif ids.start or text.start or not len(ids):  # the turn they continued was rewritten meanwhile: to be read again
        ids, text, prompt_tokens, settled = NOTHING, SILENCE, 0, None
    return {
        "stem": stem.id if stem else None,
        "ids_start": ids.start,
        "ids": ids.own.tobytes(),
        "ids_before": ids.before,
        "ids_anchored": ids.anchored,
        "text_start": text.start,
        "text": text.own.encode(),
        "text_before": text.before,
        "prompt_tokens": min(prompt_tokens, len(ids)),
        "settled_messages": settled.messages if settled else None,
        "settled_characters": settled.characters if settled else None,
        "template": settled.template if settled else "",
    }


def sealed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a turn with its size and its checksum."""
    size = len(row["items"]) + len(row["answer"] or b"") + len(row["ids"]) + len(row["text"]) + _LEAST_NBYTES
    whole = dict(row) | {"nbytes": size}
    return whole | {"checksum": seal(whole)}


def as_json(items: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode items as they are stored."""
    return json.dumps(list(items), ensure_ascii=False, separators=(",", ":")).encode()


def rewrite(connection: Connection, turn_id: str, ids: Line, text: Passage) -> None:
    """Replace a turn's ids and text. Only for a leaf: turns that continue it are stored as additions to it."""
    path = _Path(connection)
    old = path.of(turn_id)
    row = dict(connection.execute(_ONE, {"turn": turn_id}).one()._mapping)
    settled = None
    if row["settled_messages"] is not None and text.start <= row["settled_characters"] <= len(text):
        settled = RenderedPrefix(row["settled_messages"], row["settled_characters"], row["template"])
    changed = _grown(path, old.parent, ids, text, old.lineage, min(row["prompt_tokens"], len(ids)), settled)
    _write(connection, row, changed)


def bound_text(connection: Connection, quota: int | None) -> None:
    """Check that conversations take no more bytes than they may. Raises StoreError. quota: of the checkpoints."""
    if quota is None:
        return
    bound, nbytes = max(quota, _LEAST_TEXT_BYTES), turn_bytes(connection)
    if nbytes > bound:
        raise StoreError(
            f"conversations take {nbytes} of {bound} bytes; remove sessions with `ssmd session rm`, or raise the quota"
        )


def heal(connection: Connection, turn_id: str, said: Sequence[Message]) -> None:
    """Write the messages of an altered turn again, without ids: they are read again.

    said: its messages, the answer last, by which it was found. Raises StoreError if its parent was altered too.
    """
    with as_they_are(connection):
        row = connection.execute(_ONE, {"turn": turn_id}).one_or_none()
    if row is not None and not turn_of(row).sound:
        restate(connection, turn_id, said, keep=False)


def restate(connection: Connection, turn_id: str, said: Sequence[Message], *, keep: bool) -> None:
    """Write a turn with these messages, and its place below its parent. keep: with its ids and text.

    Raises StoreError if its parent was altered.
    """
    with as_they_are(connection):
        row = connection.execute(_ONE, {"turn": turn_id}).one()
    above = _Path(connection).of(row.parent) if row.parent is not None else None
    chain = above.chain.then(said, above.answer.tool_calls) if above else Chain().then(said)
    items, answer = items_of(turn_id, said)
    changed = {} if keep else _grown(_Path(connection), None, NOTHING, SILENCE, "", 0, None)
    changed |= {
        "root": above.root if above else turn_id,
        "depth": above.depth + 1 if above else 0,
        "length": (above.length if above else 0) + len(said),
        "chain": chain.said,
        "whole": chain.whole,
        "items": as_json(items),
        "answer": as_json(answer),
        "owner": row.owner if is_unicode(row.owner) else "",
        "lineage": row.lineage if is_unicode(row.lineage) else None,
        "cut": row.cut if keep else 0,
        "finish": row.finish if is_unicode(row.finish) else "stop",
        "complete": bool(row.complete),
        "created_at": row.created_at if is_moment(row.created_at) else 0,
    }
    _write(connection, dict(row._mapping), changed)


def _write(connection: Connection, row: dict[str, Any], changed: Mapping[str, Any]) -> None:
    before = _nbytes_counted(row)
    new = sealed({**row, **changed})
    values = {name: new[name] for name in (*changed, "nbytes", "checksum")}
    connection.execute(update(turn_table).where(_t.id == row["id"]).values(values))
    add_turn_bytes(connection, new["nbytes"] - before)


def _nbytes_counted(row: Mapping[str, Any]) -> int:
    """Return the bytes of a stored turn in the total: the row's own number, unless it was altered."""
    with contextlib.suppress(TypeError, ValueError):
        if (again := sealed(row))["checksum"] == row["checksum"]:
            return int(again["nbytes"])
    return row["nbytes"] if isinstance(row["nbytes"], int) else 0
