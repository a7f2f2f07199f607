"""Checkpoints: what names one, and how a state becomes rows of a database and a state again.

The layout of the stored bytes is described in docs/state-layout.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ssmd.sessions import codec
from ssmd.state import DTYPES, State, StateError, StateSpec, TensorSpec

CheckpointKind = Literal["system", "user", "turn"]
KINDS: tuple[CheckpointKind, ...] = ("system", "user", "turn")
BLOB_BYTES = 4 << 20  # raw bytes in one row of the database; several rows let threads share the work
MAX_BLOB_BYTES = 8 << 20  # no stored row is larger
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


@dataclass(frozen=True)
class Blob:
    """One row of stored numbers: values [first, last) of the recurrent data, or KV rows [first, last)."""

    first: int
    last: int
    dtype: str
    sha256: bytes
    data: bytes = field(repr=False)


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


def _common_dtype(dtypes: Iterator[np.dtype[Any]]) -> str:
    """float16 if all are, else float32, which holds both without loss."""
    return "float16" if all(d == DTYPES["float16"] for d in dtypes) else "float32"


def _groups(tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Runs of tensors of one shape: each run is moved with one strided copy."""
    runs: list[list[TensorSpec]] = []
    for t in tensors:
        if runs and runs[-1][0].shape == t.shape:
            runs[-1].append(t)
        else:
            runs.append([t])
    return runs


def row_values(spec: StateSpec) -> int:
    """Values in one token's KV rows, all layers together."""
    return sum(t.shape[0] * t.shape[1] for t in spec.rows)


def _blob(first: int, last: int, dtype: str, flat: NDArray[Any]) -> Blob:
    data = codec.pack(flat)
    if len(data) > MAX_BLOB_BYTES:
        raise StateError(f"one row of stored numbers takes {len(data)} bytes, {MAX_BLOB_BYTES} are possible")
    return Blob(first, last, dtype, hashlib.sha256(data).digest(), data)


_Job = Callable[[], Blob]


def _recurrent_jobs(state: State, spec: StateSpec) -> list[_Job]:
    """All conv and ssm tensors in the order of the spec, flattened and cut."""
    if not spec.recurrent:
        return []
    dtype = _common_dtype(state.tensors[t.name].dtype for t in spec.recurrent)
    flat = np.empty(sum(int(np.prod(t.shape)) for t in spec.recurrent), DTYPES[dtype])
    at = 0
    for t in spec.recurrent:
        size = int(np.prod(t.shape))
        flat[at : at + size].reshape(t.shape)[...] = state.tensors[t.name]
        at += size
    step = BLOB_BYTES // flat.itemsize
    return [partial(_blob, a, min(a + step, at), dtype, flat[a : a + step]) for a in range(0, at, step)]


def _row_jobs(state: State, spec: StateSpec) -> list[_Job]:
    """All key and value rows [since, position), as segments."""
    if not spec.rows:
        return []
    dtype = _common_dtype(state.tensors[t.name].dtype for t in spec.rows)
    step = max(1, BLOB_BYTES // (row_values(spec) * DTYPES[dtype].itemsize))
    end = state.position
    return [partial(_segment, state, spec, a, min(a + step, end), dtype) for a in range(state.since, end, step)]


def _segment(state: State, spec: StateSpec, first: int, last: int, dtype: str) -> Blob:
    """Within it: [tensor, kv_heads, last - first, head_dim]."""
    flat = np.empty(row_values(spec) * (last - first), DTYPES[dtype])
    at = 0
    for t in spec.rows:
        shape = t.shape_at(last - first)
        size = int(np.prod(shape))
        rows = state.tensors[t.name][:, first - state.since : last - state.since]  # [kv_heads, last - first, head_dim]
        flat[at : at + size].reshape(shape)[...] = rows
        at += size
    return _blob(first, last, dtype, flat)


def _run(jobs: Sequence[_Job], workers: int) -> list[Blob]:
    if workers < 2 or len(jobs) < 2:
        return [job() for job in jobs]
    with ThreadPoolExecutor(workers, thread_name_prefix="ssmd-encode") as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def encode(checkpoint: NewCheckpoint, *, scope: Scope, producer: str, spec: StateSpec, workers: int = 1) -> Encoded:
    """Everything that committing `checkpoint` needs, compressed and hashed.

    For a 22 MB state it takes 70 ms, with two workers 45 ms. It touches no database, and may run on any thread as soon
    as the state was saved. workers: threads to share the work; more than one is for when somebody waits and the model
    does not run. Raises StateError if the state is not one of `spec` at this position, or not finite; ValueError if
    ids and position disagree.
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
    pieces = _recurrent_jobs(state, spec)
    blobs = _run([*pieces, *_row_jobs(state, spec)], workers)
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
        pieces=tuple(blobs[: len(pieces)]),
        segments=tuple(blobs[len(pieces) :]),
    )


Part = tuple[int, int, bytes]  # first, last, sha256


def digest(position: int, segments: Sequence[Part], pieces: Sequence[Part]) -> bytes:
    """What a checkpoint is made of: sha256 over its position and (first, last, sha256) of all segments and pieces."""
    running = hashlib.sha256(f"ssmd checkpoint 1 {position}\n".encode())
    for name, parts in (("rows", segments), ("recurrent", pieces)):
        for first, last, sha in parts:
            running.update(f"{name} {first} {last} {sha.hex()}\n".encode())
    return running.digest()


class Assembly:
    """Arrays of a state that blobs are unpacked into, by several threads at once; then the State."""

    def __init__(self, spec: StateSpec, position: int) -> None:
        self._spec = spec
        self._position = position
        recurrent = sum(int(np.prod(t.shape)) for t in spec.recurrent)
        self._flat = np.empty(recurrent, DTYPES[_common_dtype(t.numpy_dtype for t in spec.recurrent)])
        rows = DTYPES[_common_dtype(t.numpy_dtype for t in spec.rows)]
        self._groups = _groups(spec.rows)
        # [tensors of one shape, kv_heads, position, head_dim] for each group
        self._rows = [np.empty((len(g), *g[0].shape_at(position)), rows) for g in self._groups]
        self._width = row_values(spec)

    def recurrent(self, blob: Blob) -> None:
        """Raises CodecError or StateError."""
        _place(blob, [self._flat[blob.first : blob.last]])

    def rows(self, blob: Blob) -> None:
        """Raises CodecError or StateError."""
        _place(blob, [g[:, :, blob.first : blob.last] for g in self._rows])

    @property
    def recurrent_values(self) -> int:
        return int(self._flat.size)

    def state(self) -> State:
        tensors: dict[str, NDArray[Any]] = {}
        at = 0
        for t in self._spec.recurrent:
            size = int(np.prod(t.shape))
            tensors[t.name] = self._flat[at : at + size].reshape(t.shape).astype(t.numpy_dtype, copy=False)
            at += size
        for group, arena in zip(self._groups, self._rows, strict=True):
            for i, t in enumerate(group):
                tensors[t.name] = arena[i].astype(t.numpy_dtype, copy=False)
        return State(self._position, 0, tensors)


def _place(blob: Blob, targets: Sequence[NDArray[Any]]) -> None:
    """Unpack over the targets one after the other, casting where the store's dtype is not the program's."""
    dtype = DTYPES[blob.dtype]
    parts = codec.planes(blob.data, sum(t.size for t in targets), dtype.itemsize)
    at = 0
    for target in targets:
        own = [p[at : at + target.size] for p in parts]
        at += target.size
        if target.dtype == dtype:
            codec.join(own, target)
            continue
        stored = np.empty(target.shape, dtype)
        codec.join(own, stored)
        with np.errstate(over="ignore"):
            target[...] = stored
        if not np.isfinite(target).all():
            raise StateError(f"stored {blob.dtype} values are too large for {target.dtype}")
