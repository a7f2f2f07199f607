"""The turns of a session file, checked: messages, and the ids and the text of each turn."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from ssmd.sessions.files.document import TurnEntry
from ssmd.sessions.files.sessionfile import SessionFileReader
from ssmd.sessions.line import Ids, Line, Passage
from ssmd.sessions.rows.turns import check_unicode, to_micros
from ssmd.sessions.turn import NewTurn, StoreError


def read_turns(reader: SessionFileReader, vocabulary: int | None) -> tuple[list[NewTurn], dict[str, str | None]]:
    """Return the turns, parents before their children, and the stem of each: the turn whose ids it continues.

    Raises SessionFileError on the first invalid turn.
    """
    turns: dict[str, NewTurn] = {}
    stems: dict[str, str | None] = {}
    lengths: dict[str | None, int] = {None: 0}  # of conversations, in messages
    for i, entry in enumerate(reader.document.turns):
        if entry.id in turns:
            raise reader.error(f"turn {entry.id!r} occurs twice")
        if entry.parent is not None and entry.parent not in turns:
            raise reader.error(f"turn {entry.id!r} stands before its parent {entry.parent!r}, or that is missing")
        own = reader.ids(f"turn.{i}.ids", vocabulary)
        ids, text = _grown(reader, turns, entry, own)
        if entry.prompt_tokens > len(ids) > 0:
            raise reader.error(f"turn {entry.id!r} has more prompt tokens than ids")
        try:
            messages, answers = entry.said
        except ValueError as err:
            raise reader.error(f"turn {entry.id!r}: {err}") from err
        if len(answers) != 1:
            raise reader.error(f"turn {entry.id!r} has an answer of {len(answers)} messages")
        [answer] = answers
        if answer.role != "assistant":
            raise reader.error(f"turn {entry.id!r} is answered by the {answer.role}")
        if entry.cut >= lengths[entry.parent] + max(1, len(messages)):
            raise reader.error(f"turn {entry.id!r} leaves out {entry.cut} messages, more than there are before it")
        lengths[entry.id] = lengths[entry.parent] + len(messages) + 1
        stems[entry.id] = entry.stem
        turns[entry.id] = NewTurn(
            id=entry.id,
            session=reader.document.session.id,
            parent=entry.parent,
            messages=tuple(messages),
            answer=answer,
            ids=ids,
            prompt_tokens=min(entry.prompt_tokens, len(ids)),
            text=text,
            finish=entry.finish,
            complete=entry.complete,
            created_at=moment_of(reader, entry.created_at),
            cut=entry.cut,
        )
        try:
            check_unicode(turns[entry.id])
        except StoreError as err:
            raise reader.error(str(err)) from err
    return list(turns.values()), stems


def _grown(reader: SessionFileReader, turns: Mapping[str, NewTurn], entry: TurnEntry, own: Ids) -> tuple[Line, Passage]:
    """Return (ids, text) of a turn."""
    if entry.stem is None:
        return Line(own), Passage(entry.text)
    above = turns.get(entry.stem)
    if above is None or not len(above.ids):
        raise reader.error(f"turn {entry.id!r} stands before its stem {entry.stem!r}, or that has no ids")
    return above.ids.cut(len(above.ids)).then(own), above.text.cut(len(above.text)).then(entry.text)


def moment_of(reader: SessionFileReader, text: str) -> datetime:
    """Parse an ISO time with a time zone. Raises SessionFileError."""
    try:
        moment = datetime.fromisoformat(text)
        to_micros(moment)
    except (ValueError, OverflowError, OSError, StoreError) as err:
        raise reader.error(f"{text[:40]!r} is not a time with a time zone") from err
    return moment
