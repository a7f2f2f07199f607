"""Blobs: the numbers of a state cut into rows of the database, and read back and verified, part by part.

Recurrent data is all conv and ssm tensors in the order of the spec, flattened and cut. KV rows are stored token by
token in the order of `StateSpec.row_columns`: [rows, tensors x kv_heads x head_dim]. Both are little-endian values as
they are, `raw/float16` or `raw/float32`. Compression gave 0.85 to 0.87 of the size and cost more time than all the rest
of a restore: docs/notes/decisions.md. Parts are read a little ahead of their consumer.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from sqlalchemy import Connection, select

from ssmd.model.state import DTYPES, Part, State, StateError, StateSpec, TensorSpec
from ssmd.sessions.checkpoint import (
    KINDS,
    CheckpointKind,
    Digested,
    NewCheckpoint,
    Scope,
    SealedLine,
    SealKind,
    digest,
    prefix_keys,
)
from ssmd.sessions.line import Line, anchor
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, piece, segment
from ssmd.sessions.rows.turns import as_they_are
from ssmd.sessions.turn import StoreError

BLOB_BYTES = 1 << 20  # bytes of one database row: read, verified and used while it is in the processor's cache
SEGMENT_ROWS = 128  # least KV rows of a segment, up to 4 times BLOB_BYTES: fewer are slow to scatter over caches
MAX_BLOB_BYTES = 8 << 20  # upper bound of a stored row
_LARGE_BYTES = 256 << 10  # size from which a recurrent tensor has pieces of its own, which are not copied
_RAW = "raw/"
Array = NDArray[Any]


@dataclass(frozen=True)
class Blob:
    """One row of stored numbers: values [first, last) of the recurrent data, or KV rows [first, last)."""

    first: int
    last: int
    encoding: str
    checksum: bytes
    data: bytes | memoryview = field(repr=False)


def is_genuine(data: bytes | memoryview, checksum: object) -> bool:
    """Return True if data match their checksum: xxh3-128, or the sha256 of early rows.

    Both reveal damage; neither is a signature.
    """
    if isinstance(checksum, bytes) and len(checksum) == hashlib.sha256().digest_size:
        return hashlib.sha256(data).digest() == checksum
    return xxhash.xxh3_128_digest(data) == checksum


def dtype_of(encoding: str) -> str | None:
    """Return the dtype of an encoding, float16 or float32; None if the encoding is unknown, as of early rows."""
    name = encoding.removeprefix(_RAW)
    return name if name != encoding and name in DTYPES else None


def _common_dtype(arrays: Iterator[Array]) -> str:
    """Return float16 if all arrays are float16, else float32, which holds both without loss."""
    return "float16" if all(a.dtype == DTYPES["float16"] for a in arrays) else "float32"


def _blob(first: int, last: int, values: Array) -> Blob:
    data = values.reshape(-1).view(np.uint8).data
    if len(data) > MAX_BLOB_BYTES:
        raise StateError(f"one row of stored numbers takes {len(data)} bytes, {MAX_BLOB_BYTES} are possible")
    return Blob(first, last, f"{_RAW}{values.dtype.name}", xxhash.xxh3_128_digest(data), data)


def _places(spec: StateSpec) -> list[tuple[TensorSpec, int, int]]:
    """List the recurrent tensors with their begin and end in the flattened data."""
    places, end = [], 0
    for t in spec.recurrent:
        end += math.prod(t.shape)
        places.append((t, end - math.prod(t.shape), end))
    return places


def recurrent_values(spec: StateSpec) -> int:
    return sum(math.prod(t.shape) for t in spec.recurrent)


def _pieces(state: State, spec: StateSpec) -> Iterator[Blob]:
    """Yield all recurrent data. Pieces of a large tensor are views of it; only small tensors are copied."""
    dtype = DTYPES[_common_dtype(state.tensors[t.name] for t in spec.recurrent)]
    step = BLOB_BYTES // dtype.itemsize
    small: list[tuple[Array, int]] = []  # tensors to copy, each with its begin
    end = 0

    def copied() -> Iterator[Blob]:
        """Cut the small tensors gathered so far."""
        low = small[0][1] if small else end
        values = np.empty(end - low, dtype)
        for array, at in small:
            values[at - low : at - low + array.size] = array.reshape(-1)
        small.clear()
        return _cut(values, low, step)

    for t, at, stop in _places(spec):
        array = state.tensors[t.name]
        if array.nbytes >= _LARGE_BYTES and array.dtype == dtype and array.flags.c_contiguous:
            yield from copied()
            yield from _cut(array.reshape(-1), at, step)
        else:
            small.append((array, at))
        end = stop
    yield from copied()


def _cut(values: Array, first: int, step: int) -> Iterator[Blob]:
    """Cut flat values into pieces that are views of them. first: their begin in the recurrent data."""
    for low in range(0, len(values), step):
        part = values[low : low + step]
        yield _blob(first + low, first + low + len(part), part)


def _as_block(state: State, spec: StateSpec) -> Array | None:
    """Return [rows, values of a row], a view of the row tensors, if they lie in memory in that order; else None."""
    columns, width = spec.row_columns, spec.row_values
    first = state.tensors[next(iter(columns))]
    size, start = first.itemsize, first.ctypes.data
    for t in spec.rows:
        a = state.tensors[t.name]
        strides = (t.shape[1] * size, width * size, size)  # of [kv_heads, rows, head_dim]
        if a.dtype != first.dtype or a.strides != strides or a.ctypes.data != start + columns[t.name].start * size:
            return None
    shape = (state.position - state.since, width)
    return np.lib.stride_tricks.as_strided(first, shape, (width * size, size), writeable=False)


def _segment(state: State, spec: StateSpec, first: int, last: int, dtype: str, block: Array | None) -> Blob:
    part = slice(first - state.since, last - state.since)
    if block is not None:
        return _blob(first, last, block[part])
    rows = np.empty((last - first, spec.row_values), DTYPES[dtype])
    for t in spec.rows:
        target = rows[:, spec.row_columns[t.name]].reshape(last - first, *t.shape)  # [rows, kv_heads, head_dim]
        target[...] = state.tensors[t.name][:, part].transpose(1, 0, 2)
    return _blob(first, last, rows)


def _segments(state: State, spec: StateSpec) -> Iterator[Blob]:
    """Yield all key and value rows [since, position)."""
    if not spec.rows or state.since == state.position:
        return iter(())
    dtype = _common_dtype(state.tensors[t.name] for t in spec.rows)
    row = spec.row_values * DTYPES[dtype].itemsize
    step = max(1, BLOB_BYTES // row, min(SEGMENT_ROWS, 4 * BLOB_BYTES // row))
    end, block = state.position, _as_block(state, spec)
    return (_segment(state, spec, at, min(at + step, end), dtype, block) for at in range(state.since, end, step))


def cut(state: State, spec: StateSpec) -> tuple[tuple[Blob, ...], tuple[Blob, ...]]:
    """Cut a checked state into (recurrent data, KV rows), hashed. Both may be views of the state's own memory."""
    return tuple(_pieces(state, spec)), tuple(_segments(state, spec))


def _values(blob: Blob, count: int) -> Array:
    """Return the values of a blob, [count]. Raises StateError if their number differs."""
    name = dtype_of(blob.encoding)
    if name is None:
        raise StateError(f"numbers are stored as {blob.encoding!r}, which this version does not support")
    if len(blob.data) != count * DTYPES[name].itemsize:
        raise StateError(f"{len(blob.data)} bytes are not {count} values of {name}")
    return np.frombuffer(blob.data, DTYPES[name])


def _as_dtype(values: Array, dtype: np.dtype[Any]) -> Array:
    if values.dtype == dtype or dtype == DTYPES["float32"]:
        return values.astype(dtype, copy=False)
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if not np.isfinite(narrow).all():
        raise StateError(f"stored {values.dtype.name} values are too large for {dtype.name}")
    return narrow


def rows_part(blob: Blob, spec: StateSpec) -> Part:
    """Return the KV rows of a segment, in the dtypes of `spec`. Raises StateError."""
    count = blob.last - blob.first
    block = _values(blob, count * spec.row_values).reshape(count, spec.row_values)
    tensors: dict[str, Array] = {}
    for t in spec.rows:
        rows = block[:, spec.row_columns[t.name]].reshape(count, *t.shape).transpose(1, 0, 2)
        tensors[t.name] = _as_dtype(rows, t.numpy_dtype)
    return Part(blob.first, blob.last, tensors)


def _closed(blob: Blob, sealed: SealedLine, of: str, position: int) -> Blob:
    """Encrypt a blob. Its checksum is that of the encrypted bytes."""
    data = sealed.close(blob.data, (of, blob.first, blob.last), position)
    return replace(blob, data=data, checksum=xxhash.xxh3_128_digest(data))


def opened(blob: Blob, sealed: SealedLine, of: str, position: int) -> Blob:
    """Decrypt a blob. Raises StateError if it is of other ids."""
    try:
        return replace(blob, data=sealed.open(bytes(blob.data), (of, blob.first, blob.last), position))
    except ValueError as err:
        raise StateError(str(err)) from err


def piece_values(blob: Blob) -> Array:
    """Return the values [first, last) of the recurrent data. Raises StateError."""
    return _values(blob, blob.last - blob.first)


def recurrent_parts(pieces: Iterator[Array], spec: StateSpec, position: int) -> Iterator[Part]:
    """Yield whole recurrent tensors, in the dtypes of `spec`, from the values of all pieces in order."""
    held: list[Array] = []  # values of the next tensor
    waiting = list(spec.recurrent)
    for values in pieces:
        at = 0
        tensors: dict[str, Array] = {}
        while waiting:
            size, have = int(np.prod(waiting[0].shape)), sum(len(v) for v in held)
            held.append(values[at : at + size - have])
            at += len(held[-1])
            if have + len(held[-1]) < size:
                break
            t = waiting.pop(0)
            flat = held[0] if len(held) == 1 else np.concatenate(held)
            tensors[t.name] = _as_dtype(flat, t.numpy_dtype).reshape(t.shape)
            held = []
        yield Part(position, position, tensors)


def joined(parts: Iterator[Part], spec: StateSpec, position: int) -> State:
    """Join all parts into a whole state."""
    rows: dict[str, list[Array]] = {t.name: [] for t in spec.rows}
    tensors: dict[str, Array] = {}
    for part in parts:
        for name, array in part.tensors.items():
            if name in rows:
                rows[name].append(array)
            else:
                tensors[name] = array
    return State(position, 0, tensors | {name: np.concatenate(found, axis=1) for name, found in rows.items()})


@dataclass(frozen=True, eq=False)
class EncodedCheckpoint:
    """A checkpoint ready to be written. `parent`: an id, the key of one that is on its way to the store, or None."""

    scope: Scope
    producer: str
    kind: CheckpointKind | SealKind
    spec: StateSpec
    position: int
    key: bytes
    anchor: bytes
    parent: int | bytes | None
    since: int  # KV rows from here on
    parent_key: bytes | None  # required key of the parent, which holds the rows below `since`
    origin: str | None
    turn: str | None
    owner: str
    pieces: tuple[Blob, ...]
    segments: tuple[Blob, ...]

    @property
    def recurrent_nbytes(self) -> int:
        return sum(len(b.data) for b in self.pieces)

    @property
    def rows_nbytes(self) -> int:
        return sum(len(b.data) for b in self.segments)

    @property
    def nbytes(self) -> int:
        """Count the bytes that committing it adds to the store."""
        return self.recurrent_nbytes + self.rows_nbytes

    @property
    def has_data(self) -> bool:
        return all(b.data for b in (*self.pieces, *self.segments))

    def without_data(self) -> EncodedCheckpoint:
        """Drop the data once it is stored; the fields needed to link the checkpoint stay."""

        def emptied(blobs: tuple[Blob, ...]) -> tuple[Blob, ...]:
            return tuple(replace(b, data=b"") for b in blobs)

        return replace(self, pieces=emptied(self.pieces), segments=emptied(self.segments))


def encode(checkpoint: NewCheckpoint, *, scope: Scope, producer: str, spec: StateSpec) -> EncodedCheckpoint:
    """Prepare and hash everything that committing `checkpoint` needs.

    It touches no database, and may run on any thread once the state is saved. Raises StateError if the state does not
    match `spec` at this position or is not finite; ValueError if ids and position disagree.
    """
    state, parent = checkpoint.state, checkpoint.parent
    ids = checkpoint.ids
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
    seal = checkpoint.seal
    sealed = None if seal is None else SealedLine(seal, scope.layout, scope.lineage, ids)

    def names(line: Line, positions: list[int]) -> list[bytes]:
        if seal is None:
            return prefix_keys(scope.layout, scope.lineage, line, positions)
        return seal.names(scope.layout, scope.lineage, line.hashes(positions))

    mark = anchor(state.position)
    anchor_key, key = names(ids, [mark, state.position])
    above: int | bytes | None = None
    parent_key = None
    if isinstance(parent, NewCheckpoint):
        if parent.seal != seal:
            raise ValueError("a sealed state and one that is not cannot share rows")
        (above,) = names(parent.ids, [parent.state.position])
    else:
        above = parent
    if spec.rows and parent is not None:
        (parent_key,) = names(ids, [state.since])
    pieces, segments = cut(state, spec)
    if sealed is not None:
        pieces = tuple(_closed(blob, sealed, "recurrent", state.position) for blob in pieces)
        segments = tuple(_closed(blob, sealed, "rows", blob.last) for blob in segments)
    return EncodedCheckpoint(
        scope=scope,
        producer=producer,
        kind=checkpoint.kind if seal is None else seal.kind,
        spec=spec,
        position=state.position,
        key=key,
        anchor=anchor_key,
        parent=above,
        since=state.since if spec.rows else 0,
        parent_key=parent_key,
        origin=checkpoint.origin,
        turn=checkpoint.turn,
        owner=checkpoint.owner,
        pieces=pieces,
        segments=segments,
    )


class DamagedState(StoreError):
    """A checkpoint's bytes are not those that were written."""

    reason = "damaged"


class RemovedState(StoreError):
    """A checkpoint was removed after it was found, as retention does."""


def read_parts(
    connection: Connection,
    checkpoint_id: int,
    spec: StateSpec,
    sealed: SealedLine | None = None,
    *,
    end: int | None = None,
) -> tuple[int, Generator[Part]]:
    """Read (position, the parts of the state in order). A thread reads and verifies the next while the caller works.

    sealed: the ids that a sealed state was computed from. end: position to cut a state of rows alone to; None: whole.
    Raises StoreError that names the missing or altered part, at the latest after the last part. The connection may be
    used again when the iterator has ended or was closed.
    """
    c = checkpoint.c
    columns = (c.position, c.layout, c.digest, c.key, c.build, c.origin)
    with as_they_are(connection):
        head = connection.execute(select(*columns).where(c.id == checkpoint_id)).one_or_none()
    if head is None:
        raise RemovedState(f"checkpoint {checkpoint_id} is not stored any more")
    if head.layout != spec.digest():
        raise DamagedState(f"checkpoint {checkpoint_id} is of layout {head.layout}, the program's is {spec.digest()}")
    if end is not None and (spec.recurrent or not 0 < end <= head.position):
        raise StoreError(f"checkpoint {checkpoint_id} at {head.position} cannot be cut to {end}")
    end = head.position if end is None else end
    return end, _parts(connection, checkpoint_id, head, spec, sealed, end)


def _parts(
    connection: Connection, checkpoint_id: int, head: Any, spec: StateSpec, sealed: SealedLine | None, end: int
) -> Generator[Part]:
    segments: list[Digested] = []
    pieces: list[Digested] = []

    def rows_of(blob: Blob) -> Part:
        part = rows_part(blob if sealed is None else opened(blob, sealed, "rows", blob.last), spec)
        if part.last <= end:
            return part
        return Part(part.first, end, {name: rows[:, : end - part.first] for name, rows in part.tensors.items()})

    def values_of(blob: Blob) -> Array:
        return piece_values(blob if sealed is None else opened(blob, sealed, "recurrent", head.position))

    def read() -> Iterator[Part | Array]:
        what = f"checkpoint {checkpoint_id}: KV rows"
        # Always closed: a result that was left half read holds the connection to the past.
        needed = segments_of(checkpoint_id).where(segment.c.first < end)
        with contextlib.closing(connection.execute(needed)) as rows:
            for blob in _blobs(rows, what, head.position if spec.rows else 0, segments, end if spec.rows else 0):
                yield _verified(blob, what, rows_of)
        if end < head.position:  # the checkpoint's digest is over all of them
            columns = segment.c.first, segment.c.last, segment.c.checksum
            rest = segments_of(checkpoint_id, *columns).where(segment.c.first >= end)
            segments.extend((row.first, row.last, row.checksum) for row in connection.execute(rest))
        what = f"checkpoint {checkpoint_id}: recurrent values"
        mine = select(piece).where(piece.c.checkpoint == checkpoint_id).order_by(piece.c.first)
        with contextlib.closing(connection.execute(mine)) as rows:
            for blob in _blobs(rows, what, recurrent_values(spec), pieces, recurrent_values(spec)):
                yield _verified(blob, what, values_of)

    with contextlib.closing(_ahead(read())) as results:
        values: Iterator[Array] = iter(())
        for result in results:
            if not isinstance(result, Part):
                values = itertools.chain([result], cast(Iterator[Array], results))
                break
            yield result
        try:
            yield from recurrent_parts(values, spec, end)
        except StateError as err:
            raise DamagedState(f"checkpoint {checkpoint_id}: recurrent values cannot be read: {err}") from err
    if digest((head.key, head.build, head.origin), head.position, segments, pieces) != head.digest:
        raise DamagedState(f"checkpoint {checkpoint_id} does not consist of the parts that were written")


def _verified(blob: Blob, name: str, read: Callable[[Blob], Part | Array]) -> Part | Array:
    what = f"{name} [{blob.first}, {blob.last})"
    if not is_genuine(blob.data, blob.checksum):
        raise DamagedState(f"{what} were altered (their checksum differs)")
    try:
        return read(blob)
    except StateError as err:
        raise DamagedState(f"{what} cannot be read: {err}") from err


def _blobs(rows: Iterable[Any], name: str, end: int, found: list[Digested], least: int) -> Iterator[Blob]:
    """Yield the rows of a table as blobs, which must follow one another, reach `least` and end at `end` at the latest.

    `found` gets their digests.
    """
    at = 0
    for row in rows:
        what = f"{name} [{row.first}, {row.last})"
        sound = isinstance(row.data, bytes) and len(row.data) <= MAX_BLOB_BYTES and isinstance(row.dtype, str)
        if not sound or row.first != at or not isinstance(row.last, int) or not at < row.last <= end:
            raise DamagedState(f"{what} are not what was written")
        at = row.last
        found.append((row.first, row.last, row.checksum))
        yield Blob(row.first, row.last, row.dtype, row.checksum, row.data)
    if at < least:
        raise DamagedState(f"{name} from {at} on are missing")


def segments_of(checkpoint_id: Any, *columns: Any) -> Any:
    """List a checkpoint's segments in the order of their rows.

    That is the order of their ids, because a parent's are written before its children's. With this order SQLite walks
    the link table. Ordered by `first` it would sort the blobs themselves, which takes longer than all the rest.
    """
    joined = checkpoint_segment.join(segment, segment.c.id == checkpoint_segment.c.segment)
    mine = select(*(columns or (segment,))).select_from(joined).where(checkpoint_segment.c.checkpoint == checkpoint_id)
    return mine.order_by(checkpoint_segment.c.segment)


def _ahead(items: Iterator[Part | Array]) -> Generator[Part | Array]:
    """Yield the same items, or raise the same error. Another thread makes the next while the caller has one."""
    made: queue.Queue[Part | Array | BaseException | None] = queue.Queue(1)
    unwanted = threading.Event()

    def produce() -> None:
        end: BaseException | None = None
        try:
            for item in items:
                if unwanted.is_set():
                    break
                made.put(item)
                del item  # the consumer owns it now
        except BaseException as err:
            end = err
        made.put(end)

    reader = threading.Thread(target=produce, name="ssmd-read", daemon=True)
    reader.start()
    item: Part | Array | BaseException | None = None
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        unwanted.set()
        while not (item is None or isinstance(item, BaseException)):  # the connection is the reader's until then
            item = made.get()
        reader.join()
