"""The turns of a session file, checked: messages, and the ids and the text of each turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from ssmd.sessions.files.document import FirstTurnEntry, TurnEntry
from ssmd.sessions.files.sessionfile import SessionFileReader
from ssmd.sessions.line import NOTHING, SILENCE, Ids, Line, Passage, regrown
from ssmd.sessions.rows.turns import check_unicode, to_micros
from ssmd.sessions.turn import NewTurn, StoreError

_MAX_PARTS = 64  # turns above a turn of format 1 that are searched for its stem
MAX_REBUILT_BYTES = 256 << 20  # ids and text of all turns of format 1, which may share any part of their parent's


def read_turns(reader: SessionFileReader, vocabulary: int | None) -> tuple[list[NewTurn], dict[str, str | None]]:
    """Return the turns, parents before their children, and the stem of each: the turn whose ids it continues.

    Raises SessionFileError on the first invalid turn.
    """
    turns: dict[str, NewTurn] = {}
    stems: dict[str, str | None] = {}
    lengths: dict[str | None, int] = {None: 0}  # of conversations, in messages
    rebuilt = 0
    entries: Sequence[TurnEntry | FirstTurnEntry] = reader.document.turns
    for i, entry in enumerate(entries):
        if entry.id in turns:
            raise reader.error(f"turn {entry.id!r} occurs twice")
        if entry.parent is not None and entry.parent not in turns:
            raise reader.error(f"turn {entry.id!r} stands before its parent {entry.parent!r}, or that is missing")
        own = reader.ids(f"turn.{i}.ids", vocabulary)
        if isinstance(entry, TurnEntry):
            stem, ids, text = _grown(reader, turns, entry, own)
        else:
            stem, ids, text = _regrown(reader, turns, stems, entry, own)
            rebuilt += ids.own.nbytes + len(text.own)
            if rebuilt > MAX_REBUILT_BYTES:
                raise reader.error(f"its turns unfold to more than {MAX_REBUILT_BYTES} bytes")
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
        cut = entry.cut if isinstance(entry, TurnEntry) else 0
        if cut >= lengths[entry.parent] + max(1, len(messages)):
            raise reader.error(f"turn {entry.id!r} leaves out {cut} messages, more than there are before it")
        lengths[entry.id] = lengths[entry.parent] + len(messages) + 1
        stems[entry.id] = stem
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
            cut=cut,
        )
        try:
            check_unicode(turns[entry.id])
        except StoreError as err:
            raise reader.error(str(err)) from err
    return list(turns.values()), stems


def _grown(
    reader: SessionFileReader, turns: Mapping[str, NewTurn], entry: TurnEntry, own: Ids
) -> tuple[str | None, Line, Passage]:
    """Return (stem, ids, text) of a turn."""
    if entry.stem is None:
        return None, Line(own), Passage(entry.text)
    above = turns.get(entry.stem)
    if above is None or not len(above.ids):
        raise reader.error(f"turn {entry.id!r} stands before its stem {entry.stem!r}, or that has no ids")
    ids = above.ids.cut(len(above.ids)).then(own)
    return entry.stem, ids, above.text.cut(len(above.text)).then(entry.text)


def _regrown(
    reader: SessionFileReader,
    turns: Mapping[str, NewTurn],
    stems: Mapping[str, str | None],
    entry: FirstTurnEntry,
    own: Ids,
) -> tuple[str | None, Line, Passage]:
    """Return (stem, ids, text) of a turn of format 1."""
    names: list[str] = []
    at = entry.parent
    while at is not None and len(turns[at].ids) and len(names) < _MAX_PARTS:
        names.append(at)
        if len(turns[at].ids) <= entry.ids_shared and len(turns[at].text) <= entry.text_shared:
            break  # this is the stem
        at = stems[at]
    else:
        if at is not None and len(names) == _MAX_PARTS:
            return None, NOTHING, SILENCE  # the next request reads its messages again
    made = regrown(
        [(turns[n].ids, turns[n].text, True) for n in names], entry.ids_shared, own, entry.text_shared, entry.text
    )
    if made is None:
        raise reader.error(f"turn {entry.id!r} shares more with its parent than the parent has")
    stem, ids, text = made
    return None if stem is None else names[stem], ids, text


def moment_of(reader: SessionFileReader, text: str) -> datetime:
    """Parse an ISO time with a time zone. Raises SessionFileError."""
    try:
        moment = datetime.fromisoformat(text)
        to_micros(moment)
    except (ValueError, OverflowError, OSError, StoreError) as err:
        raise reader.error(f"{text[:40]!r} is not a time with a time zone") from err
    return moment
