"""The state of a conversation's newest end in a remote: a row of JSON, and the pack that it names.

    a pack   a line of JSON: session and turn, filled up to _ALIGNED bytes, so that no two rows name one pack;
             the ids that were fed, int32; the recurrent tensors; key and value rows [kv_heads, n, head_dim]

Numbers are little-endian, as they are stored here. A row is another machine's word, and its state is taken as one of a
session file is. Its size must follow from the layout of the model that asks, before a byte of the pack is read. It
serves this conversation and its forks alone, unless a trusted machine signed the row and vouches for the state.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from sqlalchemy import Connection, select

from ssmd.model.state import DTYPES, State, StateError, StateSpec
from ssmd.sessions.checkpoint import CheckpointKind, Maker, NewCheckpoint, Scope, of_machine
from ssmd.sessions.files.document import Hex, Id
from ssmd.sessions.files.packing import as_stored
from ssmd.sessions.line import Line
from ssmd.sessions.remote.allowance import Allowance
from ssmd.sessions.remote.body import Word, read_as
from ssmd.sessions.remote.recovery import mark_of
from ssmd.sessions.remote.remote import InvalidTurn, Remote, TurnPlace
from ssmd.sessions.remote.signing import FORMAT, SignedRow, own_key
from ssmd.sessions.rows import outbox
from ssmd.sessions.rows.blobs import encode
from ssmd.sessions.rows.checkpoints import CheckpointRow, is_trusted, named_by, newest_on_path
from ssmd.sessions.rows.schema import checkpoint, turn
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.rows.trust import origin_of
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Turn, UnknownSession

log = logging.getLogger(__name__)
MAX_PACK_BYTES = 1 << 30  # bytes of a pack: it is in memory twice while it is taken
_ALIGNED = 64  # bytes: numbers begin at a multiple
_IDS = np.dtype("<i4")
_Dtype = Literal["float16", "float32"]


class EndBody(SignedRow):
    """A state that a remote has: the turn that it belongs to, the models that it fits, and the pack that holds it.

    vouched: all that it grew from was made by the machine that signed the row, or by those that it trusts.
    """

    kind_signed = b"ssmd state 2\n"
    session: Id
    turn: Id
    lineage: Hex
    layout: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    build: Hex
    producer: Word
    kind: CheckpointKind
    position: Annotated[int, Field(ge=1, le=1 << 31)]
    recurrent: _Dtype
    rows: _Dtype
    pack: Hex
    nbytes: Annotated[int, Field(ge=1, le=MAX_PACK_BYTES)]
    vouched: bool = False

    @property
    def place(self) -> TurnPlace:
        return TurnPlace(self.session, self.turn)


@dataclass(frozen=True)
class RemoteReader:
    """Reads a remote's turns and states for the model of one request. context: in tokens.

    ms_per_token: the time that reading took so far; None if it has read nothing yet.
    """

    maker: Maker
    vocabulary: int
    context: int | None = None
    ms_per_token: float | None = None


def send_end(store: Store, remote: Remote, session_id: str, allowance: Allowance | None = None) -> int:
    """Send the state of a conversation's newest end, if it may go and the remote has not got it.

    Returns the bytes of the pack; 0 if nothing is to be sent. The pack is whole before the row that names it, and the
    rows of the ends before it are removed after that. allowance: counts the bytes that this machine may still send.
    Raises RemoteError, StoreError.
    """
    packs = remote.packs
    if packs is None:
        return 0
    try:
        with store.reading() as connection:
            end = _newest(store, connection, session_id)
        if end is None or remote.end(TurnPlace(session_id, end)) is not None:
            return 0
        place, machine = TurnPlace(session_id, end), mark_of(store, remote).machine
        with store.reading() as connection:
            found = _state_of(connection, end, session_id)
            if found is None:
                return 0
            row, line, vouched = found
            spec = as_stored(row)
            nbytes = len(_head(place)) + 4 * row.position + spec.nbytes_at(row.position)
            if nbytes > MAX_PACK_BYTES:
                return 0
            if allowance is not None and not allowance.takes_state(remote, machine, nbytes):
                log.info("the state of session %s stays here: this machine may not have more in the remote", session_id)
                return 0
            state = store.load_in(connection, row.id, spec)
    except UnknownSession:  # it was removed meanwhile
        return 0
    key = own_key(store)
    numbers = (np.ascontiguousarray(state.tensors[t.name], t.numpy_dtype) for t in (*spec.recurrent, *spec.rows))
    parts: list[bytes | memoryview] = [_head(place), np.ascontiguousarray(line.own, _IDS).tobytes()]
    parts += [_bytes_of(values) for values in numbers]
    pack = packs.put(parts)
    body = EndBody(
        format=FORMAT,
        session=session_id,
        turn=end,
        lineage=row.lineage,
        layout=row.layout,
        build=row.build,
        producer=row.producer,
        kind=row.kind,  # type: ignore[arg-type] # the database has a CheckpointKind as text
        position=row.position,
        recurrent=_dtype(spec, recurrent=True),
        rows=_dtype(spec, recurrent=False),
        pack=pack,
        nbytes=nbytes,
        vouched=vouched,
    )
    older = [name for name in remote.ends(session_id) if name != end]
    with store.reading() as connection:  # ends of other machines that are not known here stay
        if outbox.standing(connection, session_id) != "shared":  # while the pack was sent: `sweep` removes that
            return 0
        known = select(turn.c.id).where(turn.c.session == session_id, turn.c.id.in_(older[:500]))
        replaced = list(connection.scalars(known))
    remote.publish_end(place, pack, body.signed_by(key), replaced, machine=machine, nbytes=nbytes)
    return nbytes


def _newest(store: Store, connection: Connection, session_id: str) -> str | None:
    """Return the last turn of a shared conversation, if the remote has it; else None."""
    session = store.session_in(connection, session_id)
    if session.info.imported is not None or outbox.standing(connection, session_id) != "shared":
        return None
    head = session.head
    return None if head is None or outbox.waits(connection, head) else head


def _state_of(connection: Connection, turn_id: str, session_id: str) -> tuple[CheckpointRow, Line, bool] | None:
    """Return the deepest state of a turn that may go, the ids that it was fed, and if this machine vouches for it."""
    stored = Snapshot(connection)
    one: Turn = stored.turn(turn_id)
    if one.session != session_id or not one.sound or not one.lineage:
        return None
    rows = sorted(newest_on_path(connection, [turn_id], one.lineage), key=lambda row: row.position, reverse=True)
    for row in rows:
        origin = connection.execute(select(checkpoint.c.origin).where(checkpoint.c.id == row.id)).scalar_one()
        vouched = not origin or (of_machine(origin) and is_trusted(connection, origin))
        if not (vouched or origin == session_id) or row.position > len(one.ids):  # of an import, or of other ids
            continue
        line, _ = stored.reach(one.ids, one.stem, 0)
        line = line.up_to(row.position)
        if named_by(row, line):
            return row, line, vouched
    return None


def _dtype(spec: StateSpec, *, recurrent: bool) -> _Dtype:
    found = {t.dtype for t in spec.tensors if t.recurrent is recurrent}
    return "float16" if found == {"float16"} else "float32"


def _bytes_of(values: NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def _head(place: TurnPlace) -> bytes:
    line = json.dumps({"session": place.session, "turn": place.turn}).encode()
    return line + b" " * (-(len(line) + 1) % _ALIGNED) + b"\n"


def read_end(raw: bytes, place: TurnPlace, reader: RemoteReader) -> EndBody | None:
    """Read the row of a turn's state; None if a model of another lineage or layout made it. Raises InvalidTurn."""
    what = f"the state of turn {place.turn!r} of the remote"
    body = read_as(EndBody, raw, what)
    if body.place != place:
        raise InvalidTurn(f"{what} says that it is of {body.turn!r} of {body.session!r}")
    scope = reader.maker.scope
    if (body.lineage, body.layout) != (scope.lineage, scope.layout):
        return None
    if reader.context is not None and body.position >= reader.context:
        return None
    size = len(_head(place)) + 4 * body.position + _spec_of(body, reader).nbytes_at(body.position)
    if body.nbytes != size:
        raise InvalidTurn(f"{what} has {body.nbytes} bytes by its row, {size} by its layout and position")
    return body


def _spec_of(body: EndBody, reader: RemoteReader) -> StateSpec:
    """Return the layout with the dtypes that the pack has."""
    tensors = reader.maker.spec.tensors
    return StateSpec(tuple(replace(t, dtype=body.recurrent if t.recurrent else body.rows) for t in tensors))


def take_end(store: Store, body: EndBody, pack: bytes, reader: RemoteReader) -> None:
    """Store a fetched state with its turn, which is here. pack: bytes with the digest and the size that the row has.

    Raises InvalidTurn if the pack is not what its row says; StoreError if there is no room for it.
    """
    what, head = f"the state of turn {body.turn!r} of the remote", _head(body.place)
    if pack[: len(head)] != head:
        raise InvalidTurn(f"{what} names the pack of another turn")
    at = len(head) + 4 * body.position
    ids = np.frombuffer(pack, _IDS, body.position, len(head))
    if ids.min() < 0 or ids.max() >= reader.vocabulary:
        raise InvalidTurn(
            f"{what} has ids from {ids.min()} to {ids.max()}, the vocabulary is 0 to {reader.vocabulary - 1}"
        )
    tensors: dict[str, NDArray[Any]] = {}
    spec = _spec_of(body, reader)
    for t in (*spec.recurrent, *spec.rows):
        shape = t.shape_at(body.position)
        tensors[t.name] = np.frombuffer(pack, DTYPES[t.dtype], math.prod(shape), at).reshape(shape)
        at += tensors[t.name].nbytes
    with store.snapshot() as stored:
        one = stored.turn(body.turn)
        info = stored.info(body.session)
    if one.session != body.session:
        raise InvalidTurn(f"{what} is of session {one.session!r} here")
    state, origin = State(body.position, 0, tensors), body.session
    if body.vouched and body.key is not None:
        with store.reading() as connection:
            if is_trusted(connection, origin_of(body.key)):
                origin = origin_of(body.key)
    made = NewCheckpoint(body.kind, Line(ids), state, origin=origin, turn=body.turn, owner=info.owner)
    scope = Scope(body.layout, body.lineage, body.build)
    try:
        encoded = encode(made, scope=scope, producer=body.producer, spec=reader.maker.spec)
    except (StateError, ValueError) as err:
        raise InvalidTurn(f"{what} is invalid: {err}") from err
    store.attach([one], [encoded], session=info)


def find_end(remote: Remote, places: Sequence[TurnPlace], reader: RemoteReader) -> EndBody | None:
    """Return the row of the first of these turns that has a state for the model. Raises RemoteError, InvalidTurn."""
    for place in places:
        raw = remote.end(place)
        if raw is not None and (body := read_end(raw, place, reader)) is not None:
            return body
    return None
