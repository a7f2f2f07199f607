"""Turns in the database: a row each, sealed with a checksum, written as an addition to the turns above it.

A turn is rewritten while it is a leaf.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import xxhash
from sqlalchemy import Connection, bindparam, exists, insert, select, update

from ssmd.sessions.line import NOTHING, SILENCE, Line, Passage
from ssmd.sessions.match import Chain
from ssmd.sessions.rows import tree
from ssmd.sessions.rows.holding import add_turn_bytes, turn_bytes
from ssmd.sessions.rows.schema import checkpoint as checkpoint_table
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.turn import (
    NewTurn,
    RenderedPrefix,
    StoreError,
    Turn,
    TurnRemoved,
    UnknownSession,
    check_id,
    is_unicode,
    items_of,
    messages_of,
)
from ssmd.text.messages import Message

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST_MOMENT = (datetime(9999, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)  # a later time was damaged
_MANY = 1000  # ids in one statement
_t = turn_table.c
_UNSEALED = {"seq", "session", "owner", "checksum"}  # may change when a turn is handed to another session
_SEALED = [c.name for c in turn_table.columns if c.name not in _UNSEALED]
_ONE = select(turn_table).where(_t.id == bindparam("turn"))
_SAID = select(_t.id, _t["items"], _t.answer).where(_t.id.in_(bindparam("turns", expanding=True)))
_PATH_IDS = select(_t.id).where(_t.id.in_(tree.above(bindparam("turn")))).order_by(_t.depth)
_PATH = select(turn_table).where(_t.id.in_(tree.above(bindparam("turn")))).order_by(_t.depth)
_MAX_STEMS = 64  # turns above a new one that are searched for its stem
_LEAST_TEXT_BYTES = 1 << 30  # that conversations may take, whatever the quota
_LEAST_NBYTES = 512  # of a row, beside items, answer, ids and text
_NEW = insert(turn_table)


def to_micros(moment: datetime) -> int:
    """Return microseconds since 1970. Raises StoreError on a time without a zone, which would depend on the place."""
    if moment.tzinfo is None:
        raise StoreError(f"time {moment.isoformat()} has no time zone")
    micros = (moment - _EPOCH) // timedelta(microseconds=1)
    if not 0 <= micros < LAST_MOMENT:
        raise StoreError(f"time {moment.isoformat()} is out of range; is the clock set?")
    return micros


def from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def is_moment(micros: object) -> bool:
    """Return True if a value is a time: microseconds since 1970, before the year 9999."""
    return isinstance(micros, int) and 0 <= micros < LAST_MOMENT


def as_text(value: object) -> str:
    """Return the value if it is a valid text, else ""."""
    return value if isinstance(value, str) and (value.isascii() or is_unicode(value)) else ""


@contextlib.contextmanager
def as_they_are(connection: Connection) -> Iterator[None]:
    """Read invalid UTF-8 without an error inside; such text is then found to be broken."""
    raw: Any = connection.connection.dbapi_connection
    before, raw.text_factory = raw.text_factory, lambda data: data.decode("utf-8", "surrogateescape")
    try:
        yield
    finally:
        raw.text_factory = before


def seal(values: Mapping[str, Any]) -> bytes:
    """Return the checksum of a row of `turn`: xxh3-128 over the columns that only a rewrite changes, in their order."""
    parts: list[bytes] = []
    for name in _SEALED:
        value = values[name]
        kind = type(value)
        if kind is bytes:
            parts += (b"b%d:" % len(value), value)
        elif kind is str:
            value = value.encode("utf-8", "surrogateescape")
            parts += (b"s%d:" % len(value), value)
        else:
            whole = kind is int or value in (0, 1)
            value = b"%d" % value if whole else repr(value).encode()
            parts += (b"v%d:" % len(value), value)
    return xxhash.xxh3_128_digest(b"".join(parts))


def read_turn(connection: Connection, turn_id: str) -> Turn:
    """Read one turn. Raises UnknownSession if no turn has that id."""
    return next(iter(_read(connection, _ONE, turn_id)))


def read_said(connection: Connection, turn_ids: Sequence[str]) -> dict[str, tuple[Message, ...]]:
    """Read only the messages of some turns, by id, each turn's answer last. Turns that cannot be read are left out."""
    with as_they_are(connection):
        rows = connection.execute(_SAID, {"turns": list(turn_ids)}).all()
    found: dict[str, tuple[Message, ...]] = {}
    for name, items, answer in rows:
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):  # it was altered
            given, answered = said_in(items, answer)
            found[name] = (*given, answered)
    return found


def read_above(connection: Connection, turn: Turn) -> Turn | None:
    """Read the parent of a turn; None at the root, and if the reference to it was altered."""
    if turn.parent is None:
        return None
    with contextlib.suppress(UnknownSession):
        return read_turn(connection, turn.parent)
    return None


def read_path(connection: Connection, turn_id: str) -> list[Turn]:
    """Read the turns from the root to `turn_id`. Raises UnknownSession if no turn has that id."""
    return list(_read(connection, _PATH, turn_id))


def read_path_ids(connection: Connection, turn_id: str) -> list[str]:
    """Read the ids of the turns from the root to `turn_id`; [] if no turn has that id. Altered ids are left out."""
    with as_they_are(connection):
        found = connection.scalars(_PATH_IDS, {"turn": turn_id}).all()
    return [one for one in found if is_unicode(one)]


def _read(connection: Connection, query: Any, turn_id: str) -> list[Turn]:
    rows: Sequence[Any] = ()
    if is_unicode(turn_id):  # an altered reference to a parent may not be
        with as_they_are(connection):
            rows = connection.execute(query, {"turn": turn_id}).all()
    if not rows:
        raise UnknownSession(f"there is no turn {turn_id!r}")
    return [turn_of(row) for row in rows]


def read_beginnings(connection: Connection, lineage: str, most: int) -> list[tuple[str, Line]]:
    """Read (owner, ids) of the newest first turns of conversations with a model, at most so many, the oldest first.

    Turns without an input are passed over: they have no prompt.
    """
    newest = select(turn_table).where(_t.parent.is_(None), _t.length > 1).order_by(_t.seq.desc()).limit(most)
    with as_they_are(connection):
        rows = connection.execute(newest).all()
    turns = [(as_text(row.owner), turn_of(row)) for row in reversed(rows) if row.lineage == lineage]
    return [(owner, turn.ids) for owner, turn in turns if turn.sound]


def read_tree(connection: Connection, session_id: str) -> list[Turn]:
    """Read all turns of a session, in the order of writing: parents before their children.

    Turns that a fork began with are returned as its own. Ids that were altered to invalid text are returned empty.
    """
    with as_they_are(connection):
        rows = connection.execute(select(turn_table).where(tree.belongs(session_id)).order_by(_t.seq)).all()
    turns = map(turn_of, rows)
    return [replace(t, id=as_text(t.id), parent=as_text(t.parent) or None, session=session_id) for t in turns]


def turn_of(row: Any) -> Turn:
    """Make a turn of a row. An altered row makes an unsound turn, with its messages as far as they can be read."""
    fields = row._mapping
    try:
        sound = seal(fields) == row.checksum
        messages, answer = said_in(row.items, row.answer)
    except (ValueError, TypeError, AttributeError, KeyError):
        sound, messages, answer = False, (), Message("assistant", "")
    if not sound:
        return _unsound(row, messages, answer)
    settled = None
    if row.settled_messages is not None:
        settled = RenderedPrefix(row.settled_messages, row.settled_characters, row.template)
    return Turn(
        id=row.id,
        session=row.session,
        parent=row.parent,
        messages=messages,
        answer=answer,
        ids=Line(np.frombuffer(row.ids, "<i4"), row.ids_start, row.ids_before, row.ids_anchored),
        prompt_tokens=row.prompt_tokens,
        text=Passage(row.text.decode(), row.text_start, row.text_before),
        finish=row.finish,
        complete=row.complete,
        created_at=from_micros(row.created_at),
        lineage=row.lineage or "",
        settled=settled,
        cut=row.cut,
        stem=row.stem,
        root=row.root,
        depth=row.depth,
        length=row.length,
        chain=Chain(row.chain, row.whole),
    )


def _unsound(row: Any, messages: tuple[Message, ...], answer: Message) -> Turn:
    def count(value: Any) -> int:
        return value if is_moment(value) else 0

    return Turn(
        id=row.id,
        session=row.session,
        parent=row.parent,
        messages=messages,
        answer=answer,
        ids=NOTHING,
        prompt_tokens=0,
        text=SILENCE,
        finish=row.finish if is_unicode(row.finish) else "stop",
        complete=bool(row.complete),
        created_at=from_micros(count(row.created_at)),
        stem=None,
        root="",
        depth=count(row.depth),
        length=count(row.length),
        chain=Chain(row.chain, row.whole),
        sound=False,
    )


def said_in(items: bytes, answer: bytes) -> tuple[tuple[Message, ...], Message]:
    """Read the messages of a turn. Raises ValueError and the like if they are invalid."""
    given, answered = messages_of(json.loads(items)), messages_of(json.loads(answer))
    if len(answered) != 1:
        raise ValueError("an answer of several messages is of a newer version")
    return given, answered[0]


def is_leaf(connection: Connection, turn_id: str) -> bool:
    """Return True if the turn is stored and no turn has it as its parent."""
    child = turn_table.alias()
    below = exists().where(child.c.parent == turn_table.c.id)
    return connection.execute(select(_t.id).where(_t.id == turn_id, ~below)).first() is not None


def check_unicode(turn: NewTurn) -> None:
    """Check that all texts of the turn can be written as UTF-8. Raises StoreError."""
    for text in (turn.text.own, *(t for m in turn.conversation for t in m.texts)):
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise StoreError(f"turn {turn.id!r}: its text is not Unicode ({err.reason})") from err


def taken(connection: Connection, session_id: str, turn_ids: Sequence[str]) -> bool:
    """Return True if a session, an import or a turn of these ids is stored.

    An import's id is in use as long as a fork of it exists, which may use states of that origin.
    """
    queries = [
        select(session_table.c.id).where(session_table.c.id == session_id),
        select(session_table.c.id).where(session_table.c.imported == session_id),
        select(checkpoint_table.c.id).where(checkpoint_table.c.origin == session_id),
    ]
    for at in range(0, len(turn_ids), _MANY):
        queries.append(select(_t.id).where(_t.id.in_(turn_ids[at : at + _MANY])))
    return any(connection.execute(q.limit(1)).first() is not None for q in queries)


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
