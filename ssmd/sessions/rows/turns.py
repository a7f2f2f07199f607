"""Turns in the database: a row each, sealed with a checksum. It holds a turn's additions to the turns above it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import xxhash
from sqlalchemy import Connection, bindparam, exists, select

from ssmd.sessions.items import messages_of
from ssmd.sessions.line import NOTHING, SILENCE, Line, Passage
from ssmd.sessions.match import Chain
from ssmd.sessions.rows import tree
from ssmd.sessions.rows.schema import checkpoint as checkpoint_table
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.turn import NewTurn, RenderedPrefix, StoreError, Turn, UnknownSession
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


def is_unicode(value: object) -> bool:
    """Return True if a value is a text that can be written as UTF-8."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


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
