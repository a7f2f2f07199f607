"""The parts of a stored state: read from the database and verified, a little ahead of whoever takes them in."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, cast

from numpy.typing import NDArray
from sqlalchemy import Connection, select

from ssmd.sessions import codec
from ssmd.sessions.blobs import (
    MAX_BLOB_BYTES,
    Blob,
    piece_values,
    recurrent_parts,
    recurrent_values,
    rows_part,
)
from ssmd.sessions.checkpoint import Digested, digest
from ssmd.sessions.schema import checkpoint, checkpoint_segment, piece, segment
from ssmd.sessions.turn import StoreError
from ssmd.state import Part, StateError, StateSpec

_AHEAD = 2  # parts
Array = NDArray[Any]
_Job = Callable[[], Part | Array]


def read_parts(
    connection: Connection, checkpoint_id: int, spec: StateSpec, threads: Executor
) -> tuple[int, Generator[Part]]:
    """(position, the parts of its state in order). A thread reads, `threads` verify, while the caller works.

    Raises StoreError naming what is missing or was altered, at the latest after the last part. The connection may be
    used again when the iterator has ended or was closed.
    """
    c = checkpoint.c
    head = connection.execute(select(c.position, c.layout, c.digest).where(c.id == checkpoint_id)).one_or_none()
    if head is None:
        raise StoreError(f"checkpoint {checkpoint_id} is not stored any more")
    if head.layout != spec.digest():
        raise StoreError(f"checkpoint {checkpoint_id} is of layout {head.layout}, the program's is {spec.digest()}")
    return head.position, _parts(connection, checkpoint_id, head, spec, threads)


def _parts(
    connection: Connection, checkpoint_id: int, head: Any, spec: StateSpec, threads: Executor
) -> Generator[Part]:
    segments: list[Digested] = []
    pieces: list[Digested] = []

    def jobs() -> Iterator[_Job]:
        what = f"checkpoint {checkpoint_id}: KV rows"
        rows = connection.execute(segments_of(checkpoint_id))
        for blob in _blobs(rows, what, head.position if spec.rows else 0, segments):
            yield partial(_verified, blob, what, partial(rows_part, spec=spec))
        what = f"checkpoint {checkpoint_id}: recurrent values"
        rows = connection.execute(select(piece).where(piece.c.checkpoint == checkpoint_id).order_by(piece.c.first))
        for blob in _blobs(rows, what, recurrent_values(spec), pieces):
            yield partial(_verified, blob, what, piece_values)

    with contextlib.closing(_ahead(jobs(), threads)) as results:
        values: Iterator[Array] = iter(())
        for result in results:
            if not isinstance(result, Part):
                values = itertools.chain([result], cast(Iterator[Array], results))
                break
            yield result
        try:
            yield from recurrent_parts(values, spec, head.position)
        except StateError as err:
            raise StoreError(f"checkpoint {checkpoint_id}: recurrent values cannot be read: {err}") from err
    if digest(head.position, segments, pieces) != head.digest:
        raise StoreError(f"checkpoint {checkpoint_id} does not consist of the parts that were written")


def _verified(blob: Blob, name: str, read: Callable[[Blob], Part | Array]) -> Part | Array:
    what = f"{name} [{blob.first}, {blob.last})"
    if not blob.is_genuine():
        raise StoreError(f"{what} were altered (sha256 differs)")
    try:
        return read(blob)
    except (codec.CodecError, StateError) as err:
        raise StoreError(f"{what} cannot be read: {err}") from err


def _blobs(rows: Iterable[Any], name: str, end: int, found: list[Digested]) -> Iterator[Blob]:
    """The rows of a table as blobs, which must lie one after the other and reach `end`; `found` tells of each."""
    at = 0
    for row in rows:
        what = f"{name} [{row.first}, {row.last})"
        sound = isinstance(row.data, bytes) and len(row.data) <= MAX_BLOB_BYTES and isinstance(row.dtype, str)
        if not sound or row.first != at or not isinstance(row.last, int) or not at < row.last <= end:
            raise StoreError(f"{what} are not what was written")
        at = row.last
        found.append((row.first, row.last, row.sha256))
        yield Blob(row.first, row.last, row.dtype, row.sha256, row.data)
    if at != end:
        raise StoreError(f"{name} from {at} on are missing")


def segments_of(checkpoint_id: int, *columns: Any) -> Any:
    """A checkpoint's segments in the order of their rows.

    That is the order of their ids, as a parent's are written before its children's. Asked for in this way SQLite walks
    the link table; ordering by `first` it would sort the blobs themselves, which takes longer than all the rest.
    """
    joined = checkpoint_segment.join(segment, segment.c.id == checkpoint_segment.c.segment)
    mine = select(*(columns or (segment,))).select_from(joined).where(checkpoint_segment.c.checkpoint == checkpoint_id)
    return mine.order_by(checkpoint_segment.c.segment)


def _ahead(jobs: Iterator[_Job], threads: Executor) -> Generator[Part | Array]:
    """What `jobs` return or raise, in order: another thread asks for them, `threads` do them, up to _AHEAD ahead."""
    made: queue.Queue[Future[Part | Array] | BaseException | None] = queue.Queue(_AHEAD)
    unwanted = threading.Event()

    def produce() -> None:
        end: BaseException | None = None
        try:
            for job in jobs:
                if unwanted.is_set():
                    break
                made.put(threads.submit(job))
                del job  # the blob in it is the other thread's now
        except BaseException as err:
            end = err
        made.put(end)

    # Not one of `threads`: if each of them waited for a caller, nobody would do the jobs.
    reader = threading.Thread(target=produce, name="ssmd-read", daemon=True)
    reader.start()
    item: Future[Part | Array] | BaseException | None = None
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item.result()
    finally:
        unwanted.set()
        while isinstance(item, Future):  # the connection is the reader's until then
            item.cancel()
            item = made.get()
        reader.join()
