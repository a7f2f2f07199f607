"""The parts of a stored state: read from the database and verified, a little ahead of their consumer."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast

from numpy.typing import NDArray
from sqlalchemy import Connection, select

from ssmd.model.state import Part, StateError, StateSpec
from ssmd.sessions.checkpoint import Digested, digest
from ssmd.sessions.rows.blobs import (
    MAX_BLOB_BYTES,
    Blob,
    is_genuine,
    opened,
    piece_values,
    recurrent_parts,
    recurrent_values,
    rows_part,
)
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, piece, segment
from ssmd.sessions.rows.turns import as_they_are
from ssmd.sessions.sealing import SealedLine
from ssmd.sessions.turn import StoreError

Array = NDArray[Any]


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
