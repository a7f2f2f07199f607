"""Checkpoints: what names one, and what committing one needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ssmd.sessions.blobs import Blob, cut
from ssmd.state import State, StateError, StateSpec

CheckpointKind = Literal["system", "user", "turn"]
KINDS: tuple[CheckpointKind, ...] = ("system", "user", "turn")
_ANCHOR_BITS = 4

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Scope:
    """Whose states can serve whom: `layout` is StateSpec.digest(), `lineage` and `build` are the artifact's."""

    layout: str
    lineage: str
    build: str


@dataclass(frozen=True)
class Found:
    """A stored checkpoint. Resuming from it is exact when build and producer are the program's own."""

    id: int
    position: int
    build: str
    producer: str
    origin: str | None


@dataclass(frozen=True, eq=False)
class NewCheckpoint:
    """A state to be kept.

    ids: all ids fed, int32, as many as `state.position`. state: with the KV rows since the parent's position, or
    whole if there is no parent. parent: the stored checkpoint it grew from, or one that is still on its way to the
    store. origin: the imported session it grew from, if any; it is the parent's. turn: the turn it belongs to; None
    for all turns of the commit.
    """

    kind: CheckpointKind
    ids: Ids
    state: State
    parent: int | NewCheckpoint | None = None
    origin: str | None = None
    turn: str | None = None


@dataclass(frozen=True, eq=False)
class Encoded:
    """A checkpoint ready to be written. `parent` is an id, the key of one on its way, or None."""

    scope: Scope
    producer: str
    kind: CheckpointKind
    spec: StateSpec
    ids: Ids
    key: bytes
    anchor: bytes
    parent: int | bytes | None
    since: int  # KV rows from here on
    parent_key: bytes | None  # what the parent's key must be, as it holds the rows below `since`
    origin: str | None
    turn: str | None
    pieces: tuple[Blob, ...]
    segments: tuple[Blob, ...]

    @property
    def position(self) -> int:
        return len(self.ids)

    @property
    def recurrent_nbytes(self) -> int:
        return sum(len(b.data) for b in self.pieces)

    @property
    def rows_nbytes(self) -> int:
        return sum(len(b.data) for b in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes that committing it adds to the store."""
        return self.recurrent_nbytes + self.rows_nbytes

    @property
    def has_data(self) -> bool:
        return all(b.data for b in (*self.pieces, *self.segments))

    def without_data(self) -> Encoded:
        """What linking it takes once it is stored; its memory goes."""

        def emptied(blobs: tuple[Blob, ...]) -> tuple[Blob, ...]:
            return tuple(replace(b, data=b"") for b in blobs)

        return replace(self, pieces=emptied(self.pieces), segments=emptied(self.segments))


def as_ids(ids: Sequence[int] | NDArray[Any]) -> Ids:
    """Token ids as little-endian int32. Raises ValueError on one that no vocabulary can hold."""
    wide = np.asarray(ids, dtype=np.int64)
    if wide.ndim != 1 or (wide.size and (wide.min() < 0 or wide.max() > 0x7FFFFFFF)):
        raise ValueError("token ids must be a flat list of numbers from 0 to 2147483647")
    return np.ascontiguousarray(wide.astype("<i4"))


def prefix_keys(layout: str, lineage: str, ids: Ids, positions: Sequence[int]) -> list[bytes]:
    """H(layout, lineage, ids[:p]) for each p of the ascending `positions`, in one pass over the ids."""
    running = hashlib.blake2b(digest_size=32, person=b"ssmd.prefix.1")
    running.update(json.dumps([layout, lineage]).encode())
    data = memoryview(ids.tobytes())
    keys, at = [], 0
    for p in positions:
        running.update(data[4 * at : 4 * p])
        at = p
        keys.append(running.copy().digest())
    return keys


def anchor(position: int) -> int:
    """The position rounded down to its four leading bits.

    Stored beside each checkpoint is the key of its ids up to here. Some 8 anchors for every doubling of the length
    are enough to ask the database for the checkpoints that share nearly all of their ids with a prompt, however many
    others there are.
    """
    shift = max(0, position.bit_length() - _ANCHOR_BITS)
    return position >> shift << shift


def anchors(last: int) -> list[int]:
    """All anchors of the positions 1..last, ascending."""
    found: list[int] = []
    at = 1
    while at <= last:
        found.append(at)
        at += 1 << max(0, at.bit_length() - _ANCHOR_BITS)
    return found


def encode(checkpoint: NewCheckpoint, *, scope: Scope, producer: str, spec: StateSpec) -> Encoded:
    """Everything that committing `checkpoint` needs, hashed.

    It touches no database, and may run on any thread as soon as the state was saved. Raises StateError if the state is
    not one of `spec` at this position, or not finite; ValueError if ids and position disagree.
    """
    state, parent = checkpoint.state, checkpoint.parent
    ids = as_ids(checkpoint.ids)
    if checkpoint.kind not in KINDS:
        raise ValueError(f"checkpoint kind {checkpoint.kind!r}, expected one of {KINDS}")
    if not 1 <= state.position == len(ids):
        raise ValueError(f"a checkpoint at position {state.position} needs that many ids, not {len(ids)}")
    if scope.layout != spec.digest():
        raise StateError(f"scope of layout {scope.layout} does not belong to a state of layout {spec.digest()}")
    if spec.rows and (parent is None) != (state.since == 0):
        raise StateError(f"a state with rows from {state.since} on needs {'a' if state.since else 'no'} parent")
    if isinstance(parent, NewCheckpoint) and spec.rows and parent.state.position != state.since:
        raise StateError(f"rows start at {state.since}, the parent ends at {parent.state.position}")
    state.check(spec)
    mark = anchor(state.position)
    anchor_key, key = prefix_keys(scope.layout, scope.lineage, ids, [mark, state.position])
    above: int | bytes | None = None
    parent_key = None
    if isinstance(parent, NewCheckpoint):
        (above,) = prefix_keys(scope.layout, scope.lineage, as_ids(parent.ids), [parent.state.position])
    else:
        above = parent
    if spec.rows and parent is not None:
        (parent_key,) = prefix_keys(scope.layout, scope.lineage, ids, [state.since])
    pieces, segments = cut(state, spec)
    return Encoded(
        scope=scope,
        producer=producer,
        kind=checkpoint.kind,
        spec=spec,
        ids=ids,
        key=key,
        anchor=anchor_key,
        parent=above,
        since=state.since if spec.rows else 0,
        parent_key=parent_key,
        origin=checkpoint.origin,
        turn=checkpoint.turn,
        pieces=pieces,
        segments=segments,
    )


Digested = tuple[int, int, bytes]  # of a blob: first, last, checksum


def digest(position: int, segments: Sequence[Digested], pieces: Sequence[Digested]) -> bytes:
    """What a checkpoint is made of: sha256 over its position and (first, last, checksum) of all segments and pieces."""
    running = hashlib.sha256(f"ssmd checkpoint 1 {position}\n".encode())
    for name, parts in (("rows", segments), ("recurrent", pieces)):
        for first, last, checksum in parts:
            running.update(f"{name} {first} {last} {checksum.hex()}\n".encode())
    return running.digest()
