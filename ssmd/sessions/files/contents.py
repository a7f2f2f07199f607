"""The contents of a session file, checked and ready for the store: turns, encoded checkpoints, and their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import State, StateError, StateSpec, TensorSpec
from ssmd.sessions.checkpoint import CheckpointKind, NewCheckpoint, Scope
from ssmd.sessions.files import sessionfile
from ssmd.sessions.files.document import CheckpointEntry
from ssmd.sessions.files.sessionfile import SessionFileReader
from ssmd.sessions.files.turns import moment_of, read_turns
from ssmd.sessions.line import NOTHING, Line
from ssmd.sessions.rows.blobs import EncodedCheckpoint, encode
from ssmd.sessions.turn import NewTurn

MAX_STATE_FACTOR = 4  # bytes of all states, each with the rows that it cannot share, over the size of the file
# They are never more than sessionfile.MAX_FILE_BYTES either: an import takes less than twice that much memory.


@dataclass(frozen=True)
class CheckpointPlace:
    """The place of a turn's checkpoint: after its first `position` ids."""

    turn: str
    kind: CheckpointKind
    position: int


@dataclass(frozen=True)
class Contents:
    """A session as a file has it: its own session and turn ids, parents before their children."""

    clock: datetime
    turns: list[NewTurn]
    checkpoints: list[EncodedCheckpoint]
    marks: list[CheckpointPlace]  # of the checkpoints
    stems: dict[str, str | None]  # by turn: the turn whose ids it continues

    def line(self, turn_id: str) -> Line:
        """Return all ids of a turn."""
        known = {t.id: t for t in self.turns}
        first, *rest = _parts(self.stems, known, turn_id)
        return first.after(rest[::-1])


def read(reader: SessionFileReader, *, spec: StateSpec | None, vocabulary: int | None, states: bool = True) -> Contents:
    """Read everything in the file, its states only if `states`.

    spec, vocabulary: of the model that will use it, if known. Raises SessionFileError on the first invalid part.
    """
    own = _spec(reader, spec)
    _no_strangers(reader, own)
    turns, stems = read_turns(reader, vocabulary)
    if reader.document.session.head not in {t.id for t in turns}:
        raise reader.error(f"its head {reader.document.session.head!r} is not one of its turns")
    fed = _fed(reader, turns, stems)
    room = min(MAX_STATE_FACTOR * reader.nbytes, sessionfile.MAX_FILE_BYTES)
    checkpoints = _checkpoints(reader, own, fed, room) if own and states else []
    marks = [CheckpointPlace(entry.turn, entry.kind, entry.position) for entry in reader.document.checkpoints]
    return Contents(moment_of(reader, reader.document.session.clock), turns, checkpoints, marks, stems)


def _spec(reader: SessionFileReader, expected: StateSpec | None) -> StateSpec | None:
    document = reader.document
    if not document.layout:
        if document.checkpoints or document.rows:
            raise reader.error("it has checkpoints but no layout")
        return None
    try:
        spec = StateSpec.from_json([t.model_dump() for t in document.layout])
    except StateError as err:
        raise reader.error(str(err)) from err
    if expected and spec.digest() != expected.digest():
        raise reader.error(f"its states are of layout {spec.digest()}, the model's of {expected.digest()}")
    return expected or spec  # they differ in dtypes at most, and the model's do not depend on the file


def _checkpoints(
    reader: SessionFileReader, spec: StateSpec, ids: Sequence[_FedIds], room: int
) -> list[EncodedCheckpoint]:
    """Check, read and encode the checkpoints, parents first. ids: of each of them. room: bytes that all may take."""
    document = reader.document
    made: list[tuple[CheckpointEntry, NewCheckpoint, bytes]] = []
    encoded: list[EncodedCheckpoint] = []
    most = room
    for i in sorted(range(len(ids)), key=lambda i: ids[i].position):
        entry, position = document.checkpoints[i], ids[i].position
        _rows_are_whole(reader, i, entry, position if spec.rows else 0)
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
        line = ids[i].line(since if parent else position)
        checkpoint = NewCheckpoint(entry.kind, line, State(position, since, tensors), parent, turn=entry.turn)
        scope = Scope(spec.digest(), document.session.lineage, entry.build)
        try:
            encoded.append(encode(checkpoint, scope=scope, producer=entry.producer, spec=spec))
        except ValueError as err:
            raise reader.error(f"checkpoint {i}: {err}") from err
        kept = replace(checkpoint, state=State(position, since, {}), parent=None)  # without the numbers
        made.append((entry, kept, line.hash(position)))
    if len({(c.key, c.scope.build) for c in encoded}) != len(encoded):
        raise reader.error("it has a checkpoint twice")
    return encoded


@dataclass(frozen=True)
class _FedIds:
    """The ids that a checkpoint was fed: the first `position` ids of these parts. The last part is first."""

    position: int
    parts: Sequence[Line]

    def line(self, since: int) -> Line:
        """Return the ids, with those from `since` on at hand."""
        needed: list[Line] = []
        for part in self.parts:
            if part.start <= self.position:
                needed.insert(0, part)
            if part.start <= since:
                break
        if not needed:
            return NOTHING
        return needed[-1].after(needed[:-1]).up_to(self.position)

    def hash(self, position: int) -> bytes:
        """Hash the first `position` ids."""
        return next(part for part in self.parts if part.start <= position).hash(position)


def _fed(reader: SessionFileReader, turns: Sequence[NewTurn], stems: Mapping[str, str | None]) -> list[_FedIds]:
    """Return the ids that each checkpoint was fed."""
    known = {t.id: t for t in turns}
    found = []
    for i, entry in enumerate(reader.document.checkpoints):
        if entry.turn not in known:
            raise reader.error(f"checkpoint {i} belongs to the turn {entry.turn!r}, which is not in the file")
        if entry.position > len(known[entry.turn].ids):
            raise reader.error(f"checkpoint {i} at position {entry.position} is not within the ids of its turn")
        found.append(_FedIds(entry.position, _parts(stems, known, entry.turn)))
    return found


def _parts(stems: Mapping[str, str | None], turns: Mapping[str, NewTurn], turn: str) -> list[Line]:
    """Return the parts of a turn's ids, the last part first."""
    at: str | None = turn
    parts = []
    while at is not None:
        parts.append(turns[at].ids)
        at = stems[at]
    return parts


def _rows_are_whole(reader: SessionFileReader, i: int, entry: CheckpointEntry, position: int) -> None:
    at = 0
    for k in entry.rows:
        if k >= len(reader.document.rows):
            raise reader.error(f"checkpoint {i} needs chunk {k} of KV rows, which is not in the file")
        rows = reader.document.rows[k]
        if rows.first != at or rows.last <= at:
            raise reader.error(f"checkpoint {i} has rows [{rows.first}, {rows.last}), expected rows from {at} on")
        at = rows.last
    if at != position:
        raise reader.error(f"checkpoint {i} at position {position} has KV rows up to {at}")


def _parent_among(
    made: Sequence[tuple[CheckpointEntry, NewCheckpoint, bytes]], entry: CheckpointEntry, ids: _FedIds
) -> NewCheckpoint | None:
    """Return the deepest checkpoint made so far whose rows are the first of this one's, so that they can be shared."""
    for other, checkpoint, hashed in reversed(made):
        n = checkpoint.state.position
        same = other.build == entry.build and other.rows == entry.rows[: len(other.rows)]
        if same and n < ids.position and ids.hash(n) == hashed:
            return checkpoint
    return None


def _joined_rows(reader: SessionFileReader, t: TensorSpec, chunks: Sequence[int]) -> NDArray[Any]:
    """Return the rows of all chunks: [kv_heads, rows, head_dim]."""
    parts = []
    for k in chunks:
        rows = reader.document.rows[k]
        parts.append(reader.state(f"rows.{k}.{t.name}", t.shape_at(rows.last - rows.first)))
    return np.concatenate(parts, axis=1)


def _no_strangers(reader: SessionFileReader, spec: StateSpec | None) -> None:
    """Raise SessionFileError unless the file has exactly the tensors that its document describes."""
    document = reader.document
    recurrent = [t.name for t in (spec.recurrent if spec else ())]
    rows = [t.name for t in (spec.rows if spec else ())]
    # Counted first: a document can describe far more tensors than a file can hold.
    count = len(document.turns) + len(document.checkpoints) * len(recurrent) + len(document.rows) * len(rows)
    if count != len(reader.names):
        raise reader.error(f"it has {len(reader.names)} tensors, its document describes {count}")
    expected = {f"turn.{i}.ids" for i in range(len(document.turns))}
    expected |= {f"checkpoint.{i}.{name}" for i in range(len(document.checkpoints)) for name in recurrent}
    expected |= {f"rows.{k}.{name}" for k in range(len(document.rows)) for name in rows}
    if odd := reader.names ^ expected:
        raise reader.error(f"tensors are missing or not described: {sorted(odd)[:3]}")
