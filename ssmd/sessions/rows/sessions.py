"""Sessions in the database: a row each, with the head of its turns and the sizes of what it holds."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    Connection,
    LargeBinary,
    Select,
    Text,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import erasure, holding, outbox, retention, tree
from ssmd.sessions.rows import replies as reply_rows
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import (
    LAST_MOMENT,
    as_text,
    as_they_are,
    from_micros,
    is_moment,
    said_in,
    to_micros,
    turn_of,
)
from ssmd.sessions.turn import (
    BIDI,
    Domain,
    NewTurn,
    Session,
    SessionInfo,
    StoreError,
    TurnRemoved,
    UnknownSession,
    check_id,
    title_problem,
)
from ssmd.text.messages import Message

_TITLE_CHARACTERS = 80
_BEGINNING = 4096  # characters of a message that are looked at for its title
_CONTROLS = (chr(n) for n in (*range(0x20), *range(0x7F, 0xA0)))
_STEERING = dict.fromkeys(map(ord, (*BIDI, *(c for c in _CONTROLS if not c.isspace()))))  # removed from titles
_NO_CLOCK = datetime(1970, 1, 1, tzinfo=UTC)
_s = session_table.c
_SESSIONS = select(
    *(_s.id, _s.model, _s.lineage, _s.clock, _s.pinned, _s.imported, _s.owner, _s.created_at, _s.last_used_at),
    *(_s.head, _s.turns, _s.title, _s.own_nbytes, _s.shared_nbytes, _s.base),
)
_TITLES = select(_s.id, _s.title, _s.turns, _s.base, _s.last_used_at)
_COUNTED = select(func.count()).select_from(session_table)
_COUNTED_PINNED = _COUNTED.where(_s.pinned.is_(True))
_TURNS = select(_s.turns).where(_s.id == bindparam("session"))
_LATEST = select(func.max(_s.last_used_at)).where(_s.last_used_at < LAST_MOMENT)
_NEW = insert(session_table)
_GOES_ON = ("turns", "last_used_at", "head", "model", "lineage", "clock", "owner")
_TOUCHED = update(session_table).where(_s.id == bindparam("session"))
_TOUCHED = _TOUCHED.values({name: bindparam(f"new_{name}") for name in _GOES_ON})
_LEFT = select(turn.c.owner).where(turn.c.session == bindparam("session")).limit(1)

TURNS_AT_ONCE = 200  # turns that one query searches
PAGE = 500  # sessions read at once where all are wanted
_t = turn_table.c
_RUN = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class TitleRow:
    """The columns of a session that a search compares first."""

    id: str
    title: str
    turns: int  # how many it has
    base: str | None  # as of a Session


def session_row(connection: Connection, session_id: str, domain: Domain) -> Any:
    """Read one row of _SESSIONS, if the domain sees it.

    Raises UnknownSession, but StoreError if only the session's turns are there.
    """
    with as_they_are(connection):
        row = connection.execute(_SESSIONS.where(_s.id == session_id)).one_or_none()
        if row is not None and domain.has(row.owner):
            return row
        left = connection.execute(_LEFT, {"session": session_id}).scalar()  # also if the answer is not used
    if row is None and left is not None and domain.has(left):
        raise StoreError(
            f"session {session_id!r} was damaged, but its turns exist; restore it with `ssmd session check --repair`"
        )
    raise UnknownSession(f"there is no session {session_id!r}; `ssmd session list` shows those there are")


def read_session(connection: Connection, session_id: str, domain: Domain) -> Session:
    """Read one session. Raises UnknownSession."""
    return _session(connection, session_row(connection, session_id, domain))


def read_info(connection: Connection, session_id: str, domain: Domain) -> SessionInfo:
    """Read one session's SessionInfo, without counting its sizes. Raises UnknownSession."""
    return _info(session_row(connection, session_id, domain))


def read_sessions(
    connection: Connection, domain: Domain, limit: int | None = None, after: str | None = None
) -> list[Session]:
    """Read the sessions that the domain sees, most recently used first. Raises UnknownSession.

    limit: at most so many. after: only sessions that follow this one in the order.
    """
    place = None if after is None else _place(session_row(connection, after, domain))
    return [_session(connection, row) for row in _in_order(connection, _SESSIONS, domain, limit, place)]


def iterate_sessions(connection: Connection, domain: Domain) -> Iterator[Session]:
    """Yield all sessions that the domain sees, as `read_sessions`, with a page of them in memory."""
    place = None
    while rows := _in_order(connection, _SESSIONS, domain, PAGE, place):
        yield from (_session(connection, row) for row in rows)
        place = _place(rows[-1])


def read_titles(
    connection: Connection, domain: Domain, place: SessionPlace | None = None
) -> tuple[list[TitleRow], SessionPlace | None]:
    """Read a page of the sessions' columns for a search, in the order of `read_sessions`.

    place: the page's beginning. Returns also where the next page begins; None after the last one.
    """
    rows = _in_order(connection, _TITLES, domain, PAGE, place)
    turns = [row.turns if isinstance(row.turns, int) else 0 for row in rows]
    titles = [
        TitleRow(as_text(row.id), as_text(row.title), n, as_text(row.base) or None)
        for row, n in zip(rows, turns, strict=True)
    ]
    return titles, _place(rows[-1]) if len(rows) == PAGE else None


def read_ids(connection: Connection, domain: Domain, beginning: str = "") -> list[str]:
    """Read the ids of the sessions that the domain sees and that begin so, most recently used first."""
    asked = select(_s.id, _s.last_used_at).order_by(_s.last_used_at.desc(), _s.id)
    if domain.sees is not None:
        asked = asked.where(_s.owner.in_(domain.sees))
    if beginning:
        asked = asked.where(_s.id >= beginning, _s.id < beginning + chr(sys.maxunicode))
    with as_they_are(connection):
        return [as_text(row.id) for row in connection.execute(asked)]


def count_sessions(connection: Connection) -> tuple[int, int]:
    """Count the sessions of all owners: (all, pinned ones)."""
    return connection.execute(_COUNTED).scalar_one(), connection.execute(_COUNTED_PINNED).scalar_one()


SessionPlace = tuple[Any, Any]  # in the order of sessions: last_used_at and id of one, as they are stored


def _place(row: Any) -> SessionPlace:
    return row.last_used_at, row.id


def _in_order(
    connection: Connection, columns: Select[Any], domain: Domain, limit: int | None, place: SessionPlace | None
) -> list[Any]:
    """Read rows of the sessions that the domain sees, as `read_sessions`. columns: id and last_used_at among them.

    place: only the sessions that follow it.
    """
    asked = columns.order_by(_s.last_used_at.desc(), _s.id).limit(limit)
    if place is not None:
        last_used, last_id = map(_as_stored, place)
        # The first condition bounds the index. Of an OR of two places alone SQLite reads all rows before them.
        asked = asked.where(_s.last_used_at <= last_used, (_s.last_used_at < last_used) | (_s.id > last_id))
    # One by one: an index has each owner's sessions in this order, but not those of two owners.
    parts = [asked] if domain.sees is None else [asked.where(_s.owner == owner) for owner in domain.sees]
    with as_they_are(connection):
        rows = [row for part in parts for row in connection.execute(part)]
    if parts[1:]:
        rows.sort(key=lambda row: _rank(row.id))
        rows.sort(key=lambda row: _rank(row.last_used_at), reverse=True)
    return rows[:limit]


def _as_stored(value: Any) -> Any:
    """Return an expression for a stored value, also for an altered one, such as text that is not Unicode."""
    if isinstance(value, str):
        return cast(literal(value.encode("utf-8", "surrogateescape"), LargeBinary), Text)
    return literal(value)


def _rank(value: Any) -> tuple[int, Any]:
    """Return a key that sorts values as SQLite does: nothing, numbers, text, bytes."""
    if value is None:
        return 0, 0
    if isinstance(value, str):
        return 2, value.encode("utf-8", "surrogateescape")
    return (3, value) if isinstance(value, bytes) else (1, value)


def _session(connection: Connection, row: Any) -> Session:
    """Make a Session of a row of _SESSIONS. An unreadable value is left empty, so that it hides no other session.

    The row is unpacked in one go: with 10,000 rows, reading columns by name takes twice as long.
    """
    *about, created_at, last_used_at, head, turns, title, own, shared, base = row
    info = _info(about)
    if not isinstance(own, int) or not isinstance(shared, int):
        own, shared = holding.read_holding(connection, info.id).sizes() if info.id else (0, 0)
    turns, title, head = turns if isinstance(turns, int) else 0, as_text(title), as_text(head)
    created, used = (from_micros(t if is_moment(t) else 0) for t in (created_at, last_used_at))
    return Session(info, created, used, head, turns, title, own + shared, own, as_text(base) or None)


def _info(row: Sequence[Any]) -> SessionInfo:
    """Make a SessionInfo of the first columns of _SESSIONS. An unreadable clock becomes the year 1970."""
    name, model, lineage, clock, pinned, imported, owner, *_ = row
    try:
        now = datetime.fromisoformat(clock)
    except (ValueError, TypeError):
        now = _NO_CLOCK
    if now.tzinfo is None:
        now = _NO_CLOCK
    origin = as_text(imported) or None
    name, model, lineage, owner = map(as_text, (name, model, lineage, owner))
    return SessionInfo(name, model, lineage, now, bool(pinned), origin, owner, known=True)


def touch_session(connection: Connection, turns: Sequence[NewTurn], info: SessionInfo) -> None:
    """Make the first of new turns the head of its session. Write the session if it is new."""
    now = max(to_micros(t.created_at) for t in turns)
    there = connection.execute(_TURNS, {"session": info.id}).one_or_none()
    if there is not None:
        values = {
            "turns": there.turns + len(turns) if isinstance(there.turns, int) else len(turns),
            "last_used_at": after_all(connection, now),
            "head": turns[0].id,
            "model": info.model,
            "lineage": info.lineage,
            "clock": info.clock.isoformat(),  # as it was, unless that could not be read
            "owner": info.owner,  # as it was, unless it had no owner
        }
        connection.execute(_TOUCHED, {"session": info.id, **{f"new_{n}": values[n] for n in _GOES_ON}})
        return
    if info.known or turns[0].parent is not None:
        raise TurnRemoved(f"session {info.id!r} was removed meanwhile")
    insert_session(connection, turns, info, head=turns[0].id, now=now)


def after_all(connection: Connection, now: int) -> int:
    """Return the time of a use now. It is later than all stored ones, even if the clock was ahead at one of them."""
    return max(now, (connection.execute(_LATEST).scalar() or 0) + 1)


def insert_session(
    connection: Connection,
    turns: Sequence[NewTurn],
    info: SessionInfo,
    *,
    head: str,
    now: int,
    title: str | None = None,
) -> None:
    """Write the row of a new session. now: microseconds since 1970. title: one that was given to it."""
    if info.clock.tzinfo is None:
        raise StoreError(f"the clock of session {info.id!r} has no time zone")
    title = info.title if title is None else title
    row = {
        "id": check_id("session", info.id),
        "created_at": min(now, *(to_micros(t.created_at) for t in turns)),
        "last_used_at": after_all(connection, now),
        "model": info.model,
        "lineage": info.lineage,
        "clock": info.clock.isoformat(),
        "head": head,
        "turns": len(turns),
        "title": default_title(turns[0].messages) if title is None else title,
        "pinned": info.pinned,
        "imported": info.imported or "",
        "owner": info.owner,
    }
    connection.execute(_NEW, row)


def pin_session(connection: Connection, session_id: str, domain: Domain, pinned: bool) -> None:
    """Exempt a session from retention, or no longer. Raises UnknownSession."""
    session_row(connection, session_id, domain)
    connection.execute(update(session_table).where(_s.id == session_id).values(pinned=pinned))
    if not pinned:
        retention.loosen(connection, session_id)


def rename_session(connection: Connection, session_id: str, domain: Domain, title: str | None) -> None:
    """Give a session a title; None: its default title. Raises UnknownSession, StoreError on an invalid title."""
    session_row(connection, session_id, domain)
    if title is None:
        roots = select(turn).where(tree.belongs(session_id), turn.c.parent.is_(None))
        with as_they_are(connection):
            first = connection.execute(roots.order_by(turn.c.seq).limit(1)).one_or_none()
        title = "" if first is None else default_title(turn_of(first).messages)
    elif why := title_problem(title):
        raise StoreError(f"a title {why}")
    connection.execute(update(session_table).where(_s.id == session_id).values(title=title))


def remove_session(connection: Connection, session_id: str, domain: Domain) -> None:
    """Remove a session, its turns that no fork needs, and the checkpoints only it needed. Raises UnknownSession."""
    if session_row(connection, session_id, domain).pinned:
        retention.loosen(connection, session_id)
    mine = select(turn.c.id).where(turn.c.session == session_id)
    reply_rows.forget(connection, mine)  # also of turns that stay: a reply has text of choices that are removed
    shared = outbox.standing(connection, session_id) is not None
    own = list(connection.scalars(mine)) if shared else []
    retention.reopen(connection, tree.hand_over(connection, session_id))
    if shared:
        outbox.bury(connection, session_id, own)
    linked = checkpoint_rows.linked_to(connection, mine)
    holding.relink(connection, session_id, linked)
    # First unlink children from their parents: SQLite follows a chain of 1,000 cascades, and then fails.
    holding.add_turn_bytes(connection, -holding.nbytes_of_turns(connection, turn.c.session == session_id))
    connection.execute(update(turn).where(turn.c.session == session_id).values(parent=None))
    connection.execute(delete(turn).where(turn.c.session == session_id))
    connection.execute(delete(session_table).where(_s.id == session_id))
    checkpoint_rows.sweep(connection, linked)
    erasure.owe(connection)


def default_title(messages: Sequence[Message]) -> str:
    """Return the title of a session without a given one: the beginning of its first user message.

    Control characters are left out, and those that change the direction of text.
    """
    first = next((m.content for m in messages if m.role == "user"), "")
    plain = first.lstrip()[:_BEGINNING].translate(_STEERING)
    shown = " ".join(plain.split())[:_TITLE_CHARACTERS]
    return shown.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. after: the session after which it continues; None: it is complete."""

    sessions: tuple[Session, ...]
    after: str | None


def find(
    reading: Callable[[], AbstractContextManager[Connection]],
    domain: Domain,
    text: str,
    limit: int,
    after: str | None,
    within_s: float,
) -> SearchResult:
    """Find the sessions that have all words of a text in their title or turns, most recently used first.

    limit: at most so many. after: only sessions that follow this one.
    reading: opens a read transaction; each is short. within_s: about how long to look.
    Raises UnknownSession if session `after` does not exist any more.

    Titles are read a page at a time, so memory does not grow with the store. A session that is used meanwhile moves to
    the front, and may be missed.
    The database first looks for a word's letters and digits, outside Python. Only rows that have them are read and
    compared as text.
    """
    words, found = words_of(text), list[Session]()
    until = time.monotonic() + within_s
    place: SessionPlace | None = None
    if after is not None:
        with reading() as connection:
            place = _place(session_row(connection, after, domain))
    while True:
        with reading() as connection:
            titles, place = read_titles(connection, domain, place)
        for portion in _portions(titles):
            with reading() as connection:
                found += _read_some(connection, _having(connection, portion, words), domain)
            if len(found) > limit:
                return SearchResult(tuple(found[:limit]), found[limit - 1].id)
            if time.monotonic() > until and (place is not None or portion[-1] is not titles[-1]):
                return SearchResult(tuple(found), portion[-1].id)
        if place is None:
            return SearchResult(tuple(found), None)


def _read_some(connection: Connection, ids: Sequence[str], domain: Domain) -> list[Session]:
    """Read sessions in this order. Those that were removed just now are left out."""
    with as_they_are(connection):
        rows = {row.id: row for row in connection.execute(_SESSIONS.where(_s.id.in_(ids)))} if ids else {}
    return [_session(connection, rows[one]) for one in ids if one in rows and domain.has(rows[one].owner)]


def words_of(text: str) -> list[str]:
    """Return the words to look for: the parts between spaces, in small letters."""
    return list(dict.fromkeys(text.lower().split()))


def _portions(sessions: Iterable[TitleRow]) -> Iterator[list[TitleRow]]:
    """Split sessions, in their order, into portions that are searched at once."""
    portion: list[TitleRow] = []
    turns = 0
    for one in sessions:
        if portion and turns + one.turns > TURNS_AT_ONCE:
            yield portion
            portion, turns = [], 0
        portion.append(one)
        turns += one.turns + 1
    if portion:
        yield portion


def _having(connection: Connection, sessions: Sequence[TitleRow], words: Sequence[str]) -> list[str]:
    """Return the ids of the sessions in a portion that have all words, in their order."""
    missing = {one.id: {word for word in words if word not in one.title.lower()} for one in sessions}
    wanted = [id_ for id_, left in missing.items() if left]
    if wanted:
        _look(connection, _t.session.in_(wanted), missing)
    for one in sessions:
        if missing[one.id] and one.base is not None:
            _look(connection, _t.id.in_(tree.above(literal(one.base))), missing, one.id)
    return [one.id for one in sessions if not missing[one.id]]


def _look(connection: Connection, where: Any, missing: dict[str, set[str]], session: str | None = None) -> None:
    """Remove the words found in these turns from `missing`. session: counted as theirs; None: the turns' own."""
    words = sorted(set[str]().union(*(missing.values() if session is None else [missing[session]])))
    query = select(_t.session, _t["items"], _t.answer).where(where, or_(*map(_may_be_said, words)))
    with as_they_are(connection):
        for owner, items, answer in connection.execute(query):
            left = missing[owner if session is None else session]
            if not left:
                continue
            try:
                given, answered = said_in(items, answer)
            except (ValueError, TypeError, AttributeError, KeyError):
                continue  # it was altered
            said = "\n".join(text for message in (*given, answered) for text in message.words).lower()
            left.difference_update([word for word in left if word in said])


def _may_be_said(word: str) -> Any:
    """Build a condition on turns that holds for all turns with a word, and for some others.

    It looks for the longest run of A to Z and digits, in either case. For a word without any, it looks for usual
    spellings.
    """
    said = (_t["items"], _t.answer)
    run = max(_RUN.findall(word), key=len, default="")
    if run:
        return or_(*(cast(column, Text).like(f"%{run}%") for column in said))
    spelled = {json.dumps(one, ensure_ascii=False)[1:-1].encode() for one in (word, word.upper(), word.title())}
    return or_(*(func.instr(column, one) > 0 for column in said for one in sorted(spelled)))
