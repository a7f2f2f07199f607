"""The body of a turn in a remote: JSON of the turn, as a session file has it, and of the session that it is of.

A body comes from another machine, and is checked as a file to be imported is: names, types, sizes, ids within the
vocabulary. arrivals.py checks that the messages make the chain by which the turn was found.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, Field, ValidationError

from ssmd.model.strict import Strict, too_many
from ssmd.sessions.files.document import Count, Hex, Id, Short, TurnEntry, as_entries
from ssmd.sessions.line import NOTHING, SILENCE, Line, Passage
from ssmd.sessions.remote.remote import InvalidTurn, RemoteTurn, TurnPlace, UnknownVersion
from ssmd.sessions.remote.signing import FORMAT, FORMATS, MachineKey, SignedRow, check_signature
from ssmd.sessions.rows.turns import check_unicode, to_micros
from ssmd.sessions.rows.warm import WARM
from ssmd.sessions.turn import NewTurn, Session, StoreError, Turn, is_unicode, items_of, title_problem

M = TypeVar("M", bound=SignedRow)
_MAX_OBJECTS = 400_000
_Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$")]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64,1200}$")]  # of a line: 32 bytes, and a block that is not full


def _writable(text: str) -> str:
    if not is_unicode(text) or "\0" in text:
        raise ValueError("expected text that can be stored")
    return text


Word = Annotated[Short, AfterValidator(_writable)]


class SessionBody(Strict):
    """The session of a turn, as its machine has it. title: "" if none was given to it."""

    id: Id
    model: Word
    lineage: Hex
    clock: Short
    owner: Annotated[Word, Field(max_length=64)]
    title: Word = ""


class TurnBody(SignedRow):
    """A turn. above: session of its parent. ids_before, text_before: hashes of what its stem has."""

    kind_signed = b"ssmd turn 2\n"
    session: SessionBody
    above: Id | None
    turn: TurnEntry
    lineage: Hex | Literal[""]
    chain: Hex
    ids: _Base64
    ids_start: Count
    ids_before: _Hash
    text_start: Count
    text_before: _Hash

    @property
    def place(self) -> TurnPlace:
        return TurnPlace(self.session.id, self.turn.id)


def remote_turn(turn: Turn, session: Session, above: str | None, key: MachineKey) -> RemoteTurn:
    """Return a stored turn as a remote keeps it, signed. above: session of its parent.

    Raises StoreError if it does not fit.
    """
    items, answer = items_of(turn.id, turn.conversation)
    info = session.info
    try:
        body = TurnBody(
            format=FORMAT,
            session=SessionBody(
                id=info.id,
                model=info.model,
                lineage=info.lineage,
                clock=info.clock.isoformat(),
                owner=info.owner,
                title="" if title_problem(session.title) else session.title,
            ),
            above=above,
            turn=TurnEntry(
                id=turn.id,
                parent=turn.parent,
                text=turn.text.own,
                prompt_tokens=turn.prompt_tokens,
                finish=turn.finish,
                complete=turn.complete,
                created_at=turn.created_at.isoformat(),
                stem=turn.stem,
                cut=turn.cut,
                items=as_entries(items),
                answer=as_entries(answer),
            ),
            lineage=turn.lineage,
            chain=turn.chain.said.hex(),
            ids=base64.b64encode(turn.ids.own.tobytes()).decode(),
            ids_start=turn.ids.start,
            ids_before=turn.ids.before.hex(),
            text_start=turn.text.start,
            text_before=turn.text.before.hex(),
        )
    except ValidationError as err:
        raise StoreError(f"turn {turn.id!r} does not fit into a remote: {_first(err)}") from err
    return RemoteTurn(TurnPlace(info.id, turn.id), info.owner, turn.chain.said, body.signed_by(key))


def read_as(model: type[M], raw: bytes, what: str) -> M:
    """Read another machine's row, whose signature must be right if it has one.

    Raises InvalidTurn, which says `what` is wrong.
    """
    if too_many(raw, _MAX_OBJECTS):
        raise InvalidTurn(f"{what} has too many parts")
    try:
        fields: Any = json.loads(raw)
        if isinstance(fields, dict) and fields.get("format") not in FORMATS:
            raise UnknownVersion(f"{what} is of another version: its format is not one of {FORMATS}")
        body = model.model_validate(fields)
    except ValidationError as err:
        raise InvalidTurn(f"{what} is invalid: {_first(err)}") from err
    except (ValueError, RecursionError) as err:
        raise InvalidTurn(f"{what} is not JSON") from err
    if body.format != 1:
        check_signature(raw, model.kind_signed, what)
    elif body.key is not None or body.signature is not None:
        raise InvalidTurn(f"{what} has a key or a signature, which its format 1 has not")
    return body


def read_body(raw: bytes, place: TurnPlace) -> TurnBody:
    """Read the body of the turn at a place. Raises InvalidTurn."""
    body = read_as(TurnBody, raw, f"turn {place.turn!r} of the remote")
    if body.place != place:
        raise InvalidTurn(f"turn {place.turn!r} of the remote says that it is {body.turn.id!r} of {body.session.id!r}")
    return body


def new_turn(
    body: TurnBody, session: str, parent: NewTurn | None, stem: NewTurn | None, vocabularies: Mapping[str, int]
) -> NewTurn:
    """Return the turn of a body, as a turn of `session`. Raises InvalidTurn.

    parent, stem: those turns. Its ids are taken if they go on from those of the stem as they are here, and their
    model's vocabulary is known. Else its messages alone are, and the next request reads them again.
    """
    entry = body.turn
    try:
        given, answered = entry.said
        if len(answered) != 1 or answered[0].role != "assistant":
            raise InvalidTurn(f"turn {entry.id!r} of the remote is not answered by one message of an assistant")
        if entry.finish == WARM:
            raise InvalidTurn(f"turn {entry.id!r} of the remote is a warm beginning, and such turns are not shared")
        if entry.cut > len(given) and parent is None:
            raise InvalidTurn(f"turn {entry.id!r} of the remote leaves out {entry.cut} messages, more than it has")
        ids, text = _tokens(body, stem, vocabularies)
        kept = len(ids) > 0
        turn = NewTurn(
            id=entry.id,
            session=session,
            parent=entry.parent,
            messages=tuple(given),
            answer=answered[0],
            ids=ids,
            prompt_tokens=min(entry.prompt_tokens, len(ids)),
            text=text,
            finish=entry.finish,
            complete=entry.complete,
            created_at=moment(entry.created_at),
            lineage=body.lineage or body.session.lineage,
            cut=entry.cut if kept else 0,
        )
        check_unicode(turn)
    except InvalidTurn:
        raise
    except (ValueError, StoreError) as err:
        raise InvalidTurn(f"turn {entry.id!r} of the remote is invalid: {err}") from err
    return turn


def _tokens(body: TurnBody, stem: NewTurn | None, vocabularies: Mapping[str, int]) -> tuple[Line, Passage]:
    vocabulary = vocabularies.get(body.lineage)
    try:
        own = np.frombuffer(base64.b64decode(body.ids, validate=True), "<i4")
    except (ValueError, binascii.Error) as err:
        raise InvalidTurn(f"turn {body.turn.id!r} of the remote has ids that are not numbers") from err
    if vocabulary is not None and own.size and (own.min() < 0 or own.max() >= vocabulary):
        raise InvalidTurn(
            f"turn {body.turn.id!r} of the remote has ids from {own.min()} to {own.max()}, the vocabulary is 0 to "
            f"{vocabulary - 1}"
        )
    if vocabulary is None or (not own.size and not body.ids_start):
        return NOTHING, SILENCE
    if body.turn.stem is None:
        whole = body.ids_start == body.text_start == 0
        return (Line(own), Passage(body.turn.text)) if whole else (NOTHING, SILENCE)
    if stem is None or (len(stem.ids), len(stem.text)) != (body.ids_start, body.text_start):
        return NOTHING, SILENCE
    ids, text = stem.ids.cut(body.ids_start), stem.text.cut(body.text_start)
    if ids.before.hex() != body.ids_before or text.before.hex() != body.text_before:  # rewritten there, or here
        return NOTHING, SILENCE
    return ids.then(own), text.then(body.turn.text)


def moment(text: str) -> datetime:
    """Parse an ISO time with a time zone. Raises InvalidTurn."""
    try:
        found = datetime.fromisoformat(text)
        to_micros(found)
    except (ValueError, OverflowError, OSError, StoreError) as err:
        raise InvalidTurn(f"{text[:40]!r} in the remote is not a time with a time zone") from err
    return found


def _first(err: ValidationError) -> str:
    one = err.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, one['loc']))[:100]}: {one['msg'][:200]}"
