"""What a session file contains, checked and ready for the store: turns, encoded checkpoints, and where those stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import State, StateError, StateSpec, TensorSpec
from ssmd.sessions.checkpoint import CheckpointKind, Ids, NewCheckpoint, Scope
from ssmd.sessions.files import sessionfile
from ssmd.sessions.files.document import CheckpointEntry
from ssmd.sessions.files.sessionfile import SessionFileReader
from ssmd.sessions.rows.encoded import Encoded, encode
from ssmd.sessions.rows.turns import check_unicode, to_micros
from ssmd.sessions.turn import NewTurn, StoreError
from ssmd.text.messages import Message

MAX_REBUILT_BYTES = 256 << 20  # ids and text of all turns, each whole
MAX_STATE_FACTOR = 4  # bytes of all states, each with the rows that it cannot share, over the size of the file; and
# they are never more than sessionfile.MAX_FILE_BYTES: an import takes less than twice that much memory.


@dataclass(frozen=True)
class Mark:
    """Where a checkpoint of a turn stands: after its first `position` ids."""

    turn: str
    kind: CheckpointKind
    position: int


@dataclass(frozen=True)
class Contents:
    """A session as a file has it: its own session and turn ids, parents before their children.

    marks: of the checkpoints whose ids are a turn's own.
    """

    clock: datetime
    turns: list[NewTurn]
    checkpoints: list[Encoded]
    marks: list[Mark]


def read(reader: SessionFileReader, *, spec: StateSpec | None, vocabulary: int | None, states: bool = True) -> Contents:
    """Everything in the file, its states only if `states`. spec, vocabulary: of the model that is to go on, if known.

    Raises SessionFileError on the first thing that is not sound.
    """
    own = _spec(reader, spec)
    _no_strangers(reader, own)
    turns = _turns(reader, vocabulary)
    if reader.document.session.head not in {t.id for t in turns}:
        raise reader.error(f"its head {reader.document.session.head!r} is none of its turns")
    checkpoints = _checkpoints(reader, own, vocabulary) if own and states else []
    marks = _marks(reader, {t.id: t.ids for t in turns}, vocabulary)
    return Contents(_moment(reader, reader.document.session.clock), turns, checkpoints, marks)


def _spec(reader: SessionFileReader, expected: StateSpec | None) -> StateSpec | None:
    document = reader.document
    if not document.layout:
        if document.checkpoints or document.rows:
            raise reader.error("it has checkpoints and no layout")
        return None
    try:
        spec = StateSpec.from_json([t.model_dump() for t in document.layout])
    except StateError as err:
        raise reader.error(str(err)) from err
    if expected and spec.digest() != expected.digest():
        raise reader.error(f"its states are of layout {spec.digest()}, the model's of {expected.digest()}")
    return expected or spec  # they differ in dtypes at most, and the model's are not on the file's word


def _turns(reader: SessionFileReader, vocabulary: int | None) -> list[NewTurn]:
    turns: dict[str, NewTurn] = {}
    rebuilt = 0
    nothing = np.empty(0, np.int32)
    for i, entry in enumerate(reader.document.turns):
        if entry.id in turns:
            raise reader.error(f"turn {entry.id!r} stands in it twice")
        if entry.parent is not None and entry.parent not in turns:
            raise reader.error(f"turn {entry.id!r} stands before its parent {entry.parent!r}, or has none")
        above = turns[entry.parent] if entry.parent is not None else None
        ids_above, text_above = (above.ids, above.text) if above else (nothing, "")
        if entry.ids_shared > len(ids_above) or entry.text_shared > len(text_above):
            raise reader.error(f"turn {entry.id!r} shares more with its parent than that one has")
        tail = reader.ids(f"turn.{i}.ids", vocabulary)
        rebuilt += 4 * (entry.ids_shared + len(tail)) + entry.text_shared + len(entry.text)
        if rebuilt > MAX_REBUILT_BYTES:
            raise reader.error(f"its turns unfold to more than {MAX_REBUILT_BYTES} bytes")
        if entry.prompt_tokens > entry.ids_shared + len(tail):
            raise reader.error(f"turn {entry.id!r} has a longer prompt than ids")
        turns[entry.id] = NewTurn(
            id=entry.id,
            session=reader.document.session.id,
            parent=entry.parent,
            messages=tuple(Message(m.role, m.content, m.name) for m in entry.messages),
            answer=Message(entry.answer.role, entry.answer.content, entry.answer.name),
            ids=np.concatenate([ids_above[: entry.ids_shared], tail]),
            prompt_tokens=entry.prompt_tokens,
            text=text_above[: entry.text_shared] + entry.text,
            finish=entry.finish,
            complete=entry.complete,
            created_at=_moment(reader, entry.created_at),
        )
        try:
            check_unicode(turns[entry.id])
        except StoreError as err:
            raise reader.error(str(err)) from err
        if entry.answer.role != "assistant":
            raise reader.error(f"turn {entry.id!r} is answered by the {entry.answer.role}")
    return list(turns.values())


def _moment(reader: SessionFileReader, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        to_micros(moment)
    except (ValueError, OverflowError, OSError, StoreError) as err:
        raise reader.error(f"{text[:40]!r} is no time with a zone") from err
    return moment


def _checkpoints(reader: SessionFileReader, spec: StateSpec, vocabulary: int | None) -> list[Encoded]:
    """Checked, read and encoded, parents first."""
    document = reader.document
    turn_ids = {t.id for t in document.turns}
    made: list[tuple[CheckpointEntry, NewCheckpoint]] = []
    encoded: list[Encoded] = []
    room = most = min(MAX_STATE_FACTOR * reader.nbytes, sessionfile.MAX_FILE_BYTES)
    ids = [reader.ids(f"checkpoint.{i}.ids", vocabulary) for i in range(len(document.checkpoints))]
    for i in sorted(range(len(ids)), key=lambda i: len(ids[i])):
        entry = document.checkpoints[i]
        if entry.turn not in turn_ids:
            raise reader.error(f"checkpoint {i} belongs to the turn {entry.turn!r}, which is not in it")
        _rows_are_whole(reader, i, entry, len(ids[i]) if spec.rows else 0)
        if not len(ids[i]):
            raise reader.error(f"checkpoint {i} has no ids: before the first token there is no state")
        parent = _parent_among(made, entry, ids[i]) if spec.rows else None
        since = parent.state.position if parent else 0
        chunks = [k for k in entry.rows if document.rows[k].first >= since]
        tensors: dict[str, NDArray[Any]] = {}
        for t in spec.recurrent:
            tensors[t.name] = reader.state(f"checkpoint.{i}.{t.name}", t.shape)
        for t in spec.rows:
            tensors[t.name] = _joined_rows(reader, t, chunks)
        room -= sum(a.nbytes for a in tensors.values())
        if room < 0:
            raise reader.error(f"its states unfold to more than {most} bytes")
        checkpoint = NewCheckpoint(entry.kind, ids[i], State(len(ids[i]), since, tensors), parent, turn=entry.turn)
        scope = Scope(spec.digest(), document.session.lineage, entry.build)
        try:
            encoded.append(encode(checkpoint, scope=scope, producer=entry.producer, spec=spec))
        except ValueError as err:
            raise reader.error(f"checkpoint {i}: {err}") from err
        made.append((entry, replace(checkpoint, state=State(len(ids[i]), since, {}), parent=None)))  # numbers not kept
    if len({(c.key, c.scope.build) for c in encoded}) != len(encoded):
        raise reader.error("a checkpoint stands in it twice")
    return encoded


def _marks(reader: SessionFileReader, turns: Mapping[str, Ids], vocabulary: int | None) -> list[Mark]:
    marks = []
    for i, entry in enumerate(reader.document.checkpoints):
        ids = reader.ids(f"checkpoint.{i}.ids", vocabulary)
        own = turns.get(entry.turn)
        if own is not None and 0 < len(ids) <= len(own) and np.array_equal(own[: len(ids)], ids):
            marks.append(Mark(entry.turn, entry.kind, len(ids)))
    return marks


def _rows_are_whole(reader: SessionFileReader, i: int, entry: CheckpointEntry, position: int) -> None:
    at = 0
    for k in entry.rows:
        if k >= len(reader.document.rows):
            raise reader.error(f"checkpoint {i} needs chunk {k} of KV rows, which is not in it")
        rows = reader.document.rows[k]
        if rows.first != at or rows.last <= at:
            raise reader.error(f"checkpoint {i} has rows [{rows.first}, {rows.last}) where those from {at} on belong")
        at = rows.last
    if at != position:
        raise reader.error(f"checkpoint {i} at position {position} has KV rows up to {at}")


def _parent_among(
    made: Sequence[tuple[CheckpointEntry, NewCheckpoint]], entry: CheckpointEntry, ids: Ids
) -> NewCheckpoint | None:
    """The deepest one made so far whose rows are the first of this one's: those need not be stored again."""
    for other, checkpoint in reversed(made):
        n = len(checkpoint.ids)
        same = other.build == entry.build and other.rows == entry.rows[: len(other.rows)]
        if same and n < len(ids) and np.array_equal(checkpoint.ids, ids[:n]):
            return checkpoint
    return None


def _joined_rows(reader: SessionFileReader, t: TensorSpec, chunks: Sequence[int]) -> NDArray[Any]:
    """[kv_heads, rows of all chunks, head_dim]."""
    parts = []
    for k in chunks:
        rows = reader.document.rows[k]
        parts.append(reader.state(f"rows.{k}.{t.name}", t.shape_at(rows.last - rows.first)))
    return np.concatenate(parts, axis=1)


def _no_strangers(reader: SessionFileReader, spec: StateSpec | None) -> None:
    """Exactly the tensors that the document speaks of are there."""
    document = reader.document
    recurrent = ["ids", *(t.name for t in (spec.recurrent if spec else ()))]
    rows = [t.name for t in (spec.rows if spec else ())]
    # Counted first: a document can speak of far more tensors than a file can hold.
    count = len(document.turns) + len(document.checkpoints) * len(recurrent) + len(document.rows) * len(rows)
    if count != len(reader.names):
        raise reader.error(f"it has {len(reader.names)} tensors, its document speaks of {count}")
    expected = {f"turn.{i}.ids" for i in range(len(document.turns))}
    expected |= {f"checkpoint.{i}.{name}" for i in range(len(document.checkpoints)) for name in recurrent}
    expected |= {f"rows.{k}.{name}" for k in range(len(document.rows)) for name in rows}
    if odd := reader.names ^ expected:
        raise reader.error(f"tensors are missing or do not belong: {sorted(odd)[:3]}")
