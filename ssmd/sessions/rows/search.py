"""Search in the database: which sessions have all words, each in the title or in what was said in any turn.

The database looks for a word's letters and digits first, which takes nothing of the interpreter; only what has them is
read, and compared as text.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Text, cast, func, literal, or_, select

from ssmd.sessions.domain import Domain
from ssmd.sessions.rows import tree
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.sessions import Titled, read_session, read_titles
from ssmd.sessions.rows.turns import as_they_are, said_in
from ssmd.sessions.turn import Session, UnknownSession

TURNS_AT_ONCE = 200  # that one query looks through
_t = turn_table.c
_RUN = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Found:
    """What a search found. after: the session behind which it goes on; None: there is nothing more."""

    sessions: tuple[Session, ...]
    after: str | None


def find(
    reading: Callable[[], AbstractContextManager[Connection]],
    domain: Domain,
    text: str,
    limit: int,
    after: str | None,
    within_s: float,
) -> Found:
    """The sessions that have all words of a text, each in the title or in any turn, those used last first; at most
    `limit`, of those that follow session `after`.

    reading: opens a read transaction; none is long. within_s: about how long to look. Raises UnknownSession if there is
    no session `after`, any more.
    """
    words, found = words_of(text), list[Session]()
    until = time.monotonic() + within_s
    with reading() as connection:
        titles = read_titles(connection, domain, after)
    for portion in _portions(titles):
        with reading() as connection:
            for id_ in _having(connection, portion, words):
                with contextlib.suppress(UnknownSession):  # it was removed just now
                    found.append(read_session(connection, id_, domain))
        if len(found) > limit:
            return Found(tuple(found[:limit]), found[limit - 1].id)
        if time.monotonic() > until and portion[-1] is not titles[-1]:
            return Found(tuple(found), portion[-1].id)
    return Found(tuple(found), None)


def words_of(text: str) -> list[str]:
    """The words to look for: what stands between spaces, in small letters."""
    return list(dict.fromkeys(text.lower().split()))


def _portions(sessions: Iterable[Titled]) -> Iterator[list[Titled]]:
    """Sessions in their order, so many at a time as can be looked through at once."""
    portion: list[Titled] = []
    turns = 0
    for one in sessions:
        if portion and turns + one.turns > TURNS_AT_ONCE:
            yield portion
            portion, turns = [], 0
        portion.append(one)
        turns += one.turns + 1
    if portion:
        yield portion


def _having(connection: Connection, sessions: Sequence[Titled], words: Sequence[str]) -> list[str]:
    """The ids of those of a portion that have all words, in their order."""
    missing = {one.id: {word for word in words if word not in one.title.lower()} for one in sessions}
    wanted = [id_ for id_, left in missing.items() if left]
    if wanted:
        _look(connection, _t.session.in_(wanted), missing)
    for one in sessions:
        if missing[one.id] and one.base is not None:
            _look(connection, _t.id.in_(tree.above(literal(one.base))), missing, one.id)
    return [one.id for one in sessions if not missing[one.id]]


def _look(connection: Connection, where: Any, missing: dict[str, set[str]], session: str | None = None) -> None:
    """Take out of what is missing what was said in these turns. session: whose they count as; None: their owner's."""
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
                continue  # what was altered
            said = "\n".join(text for message in (*given, answered) for text in message.words).lower()
            left.difference_update([word for word in left if word in said])


def _may_be_said(word: str) -> Any:
    """A condition on a turn that holds wherever the word stands in it, and elsewhere too.

    The longest part of A to Z and digits in either case; of a word without any, its usual spellings.
    """
    said = (_t["items"], _t.answer)
    run = max(_RUN.findall(word), key=len, default="")
    if run:
        return or_(*(cast(column, Text).like(f"%{run}%") for column in said))
    spelled = {json.dumps(one, ensure_ascii=False)[1:-1].encode() for one in (word, word.upper(), word.title())}
    return or_(*(func.instr(column, one) > 0 for column in said for one in sorted(spelled)))
