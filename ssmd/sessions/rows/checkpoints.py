"""Checkpoints in the database: found by a prompt's ids, written, swept. blobs.py reads their states."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Connection,
    Integer,
    LargeBinary,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from ssmd.model.state import StateError, StateSpec
from ssmd.sessions.checkpoint import SEALS, Scope, Seal, StoredCheckpoint, digest, keys_of, of_machine, prefix_keys
from ssmd.sessions.line import Line, anchors
from ssmd.sessions.rows.blobs import EncodedCheckpoint, dtype_of, segments_of
from ssmd.sessions.rows.holding import add_stored_bytes
from ssmd.sessions.rows.schema import (
    by,
    checkpoint,
    checkpoint_segment,
    layout,
    piece,
    seen,
    segment,
    serves_all,
    trusted_machine,
    turn_checkpoint,
)
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import as_they_are
from ssmd.sessions.turn import Domain, StoreError

_BATCH = 500  # keys in one statement

# Built once: putting a statement together takes longer than running it.
_c = checkpoint.c
_ITS = cast(_c.owner, LargeBinary).label("owner")
_HEIRS = select(_c.id, _c.parent, _ITS).where(_c.parent.in_(bindparam("gone", expanding=True))).order_by(_c.id)
_SIZES = (cast(n, Integer).label(n.name) for n in (_c.parent, _c.recurrent_nbytes, _c.rows_nbytes))
_GONE = select(_c.id, _ITS, *_SIZES)
_GONE = _GONE.where(_c.id.in_(bindparam("gone", expanding=True)))
_INHERIT = update(checkpoint).where(_c.id == bindparam("heir"))
_INHERIT = _INHERIT.values(parent=bindparam("above"), rows_nbytes=_c.rows_nbytes + bindparam("more"))


@dataclass(frozen=True)
class CheckpointResult:
    """The result of storing a checkpoint."""

    id: int | None  # None if it was not stored
    was_there: bool = False  # an equal one was stored already, and got the links
    nbytes: int = 0  # that it added to the store
    why_not: str = ""  # why it was not stored


# Hundreds of names come as one value that is cut here: to bind each of them takes longer than to look it up.
_NAME_BYTES = 32
_numbered = select(literal(0).label("n")).cte("numbered", recursive=True)
_numbered = _numbered.union_all(select(_numbered.c.n + 1).where(_numbered.c.n + 1 < bindparam("count", type_=Integer)))
_NAMES = select(func.substr(bindparam("names", type_=LargeBinary), _numbered.c.n * _NAME_BYTES + 1, _NAME_BYTES))


def _next_position(anchor: Any, after: Any) -> Any:
    """Build the query for the next position beyond another one, of the states with an anchor that the domain sees."""
    up_to_last = _c.position <= bindparam("last", type_=Integer)
    return select(func.min(_c.position)).where(_c.anchor == anchor, _c.position > after, up_to_last, seen(_c.owner))


def _near() -> Any:
    """Build the query for the positions of the states with some anchors.

    It steps from each position to the next one in the index. All sessions that an agent begins have the same anchors,
    and their states lie at few positions: to read every state would take the longer the more sessions there are.
    """
    named = _NAMES.subquery()
    anchor = next(iter(named.c))
    first = select(
        anchor.label("anchor"),
        _next_position(anchor, bindparam("before", type_=Integer)).scalar_subquery().label("position"),
    )
    walk: Any = first.cte("walk", recursive=True)
    further = _next_position(walk.c.anchor, walk.c.position).scalar_subquery()
    walk = walk.union_all(select(walk.c.anchor, further).where(walk.c.position.is_not(None)))
    return select(walk.c.position).where(walk.c.position.is_not(None)).distinct()


_NEAR = _near()
# Values are bound parameters: SQLAlchemy keeps compiled statements with the values in them.
_NEW, _NEW_PIECE, _NEW_SEGMENT = insert(checkpoint), insert(piece), insert(segment)
_NEW_LISTED, _NEW_LINK = insert(checkpoint_segment), insert(turn_checkpoint)
_KNOWN_LAYOUT = select(layout.c.digest).where(layout.c.digest == bindparam("layout"))
_NAMED = select(_c.id, _c.position, _c.key, _c.origin, _c.digest).where(
    *(_c.key == bindparam("key"), _c.build == bindparam("build")),
    *(_c.origin == bindparam("origin"), _c.owner == bindparam("owner")),
)
_PARENT = select(_c.id, _c.position, _c.key, _c.origin).where(_c.id == bindparam("checkpoint"))
_LINKED = select(turn_checkpoint.c.turn).where(
    turn_checkpoint.c.checkpoint == bindparam("checkpoint"),
    turn_checkpoint.c.turn.in_(bindparam("turns", expanding=True)),
)
_USED = update(checkpoint).where(_c.id.in_(bindparam("some", expanding=True))).values(last_used_at=bindparam("now"))
_MADE = update(checkpoint).where(_c.id.in_(bindparam("some", expanding=True)))
_MADE = _MADE.values(created_at=bindparam("now"), last_used_at=bindparam("now"))
_ROWS = segments_of(bindparam("checkpoint"), segment.c.id, segment.c.first, segment.c.last, segment.c.checksum)
_IMPORTED = select(session_table.c.imported).where(session_table.c.id == bindparam("session")).scalar_subquery()
# A state of an unknown machine has its session as its origin: it serves that one, and forks that begin in it.
_BEGAN: Any = select(turn_table.c.session).join(session_table, session_table.c.root == turn_table.c.id)
_BEGAN = _BEGAN.where(session_table.c.id == bindparam("session")).scalar_subquery()
_ITS_ORIGIN = or_(serves_all(_c.origin), _c.origin == _IMPORTED, _c.origin == bindparam("session"), _c.origin == _BEGAN)
_IS_TRUSTED = select(trusted_machine.c.origin).where(trusted_machine.c.origin == bindparam("origin"))
_FITTING = (
    select(_c.id, _c.key, _c.position, _c.build, _c.producer, _c.origin)
    .where(_c.key.in_(_NAMES), _ITS_ORIGIN, seen(_c.owner))
    .order_by(_c.position.desc(), (_c.build == bindparam("build")).desc(), _c.origin)
)


def find(
    connection: Connection, scope: Scope, ids: Line, session: str | None, domain: Domain, skip: Collection[int]
) -> StoredCheckpoint | None:
    """Find the deepest checkpoint whose ids are a proper prefix of `ids`; among equally deep ones the build's own.

    It considers only checkpoints that the domain sees, and none before ids.start: the ids to feed after it must be at
    hand. Sealed ones are found if all ids are at hand, of which their names are made.
    skip: ids of checkpoints to pass over.
    """
    first, last = max(1, ids.start), len(ids) - 1
    seals = () if ids.start else SEALS

    def named(positions: Sequence[int]) -> dict[bytes, Seal | None]:
        """Return all names that the states at ascending positions may have; those of one position are neighbours."""
        hashes, of = ids.hashes(positions), (scope.layout, scope.lineage)
        families = [(None, keys_of(*of, hashes)), *((seal, seal.names(*of, hashes)) for seal in seals)]
        return {names[i]: seal for i in range(len(hashes)) for seal, names in families}

    marks = named(anchors(first, last))
    if not marks:
        return None
    near = {**_names(list(marks)), "before": first - 1, "last": last, **by(domain)}
    sealed_as = named(sorted(connection.scalars(_NEAR, near)))
    keys = list(sealed_as)
    batch = 16  # the match is mostly among the deepest keys
    while keys:
        wanted = {**_names(keys[-batch:]), "session": session or "", "build": scope.build, **by(domain)}
        with as_they_are(connection):  # altered rows are found when the checkpoint is loaded
            rows = connection.execute(_FITTING, wanted).all()
        for row in rows:
            if row.id not in skip:
                seal, origin = sealed_as[row.key], row.origin or None
                return StoredCheckpoint(row.id, row.position, row.build, row.producer, origin, seal)
        keys, batch = keys[:-batch], _BATCH
    return None


def is_trusted(connection: Connection, origin: str) -> bool:
    """Return True if the machine whose states have this origin is trusted."""
    return connection.execute(_IS_TRUSTED, {"origin": origin}).first() is not None


def _names(names: Sequence[bytes]) -> dict[str, object]:
    """Return the parameters of a query that cuts names."""
    return {"names": b"".join(names), "count": len(names)}


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint as the database describes it. segments: (id, first, last, dtype) of its KV rows in order."""

    id: int
    turn: str
    kind: str
    position: int
    build: str
    producer: str
    key: bytes
    layout: str
    lineage: str
    dtype: str  # of its recurrent data
    segments: tuple[tuple[int, int, int, str], ...]
    spec: StateSpec


def newest_on_path(connection: Connection, path: Sequence[str], lineage: str) -> list[CheckpointRow]:
    """Return the deepest checkpoint of each kind that the turns of a path link to. path: turn ids, root first.

    All have one layout, and numbers in an encoding that is known. Those inside a prompt are left out.
    """
    depth = {turn: i for i, turn in enumerate(path)}
    t = turn_checkpoint.c
    own: dict[int, str] = {}  # the topmost turn that links to a checkpoint is the turn that it was made for
    for at in range(0, len(path), _BATCH):
        for turn, number in connection.execute(select(t.turn, t.checkpoint).where(t.turn.in_(path[at : at + _BATCH]))):
            if number not in own or depth[turn] < depth[own[number]]:
                own[number] = turn
    columns = select(_c.id, _c.kind, _c.position, _c.layout).where(_c.lineage == lineage, _c.kind != "prefix")
    rows: list[Any] = []
    numbers = sorted(own)
    for at in range(0, len(numbers), _BATCH):
        rows += connection.execute(columns.where(_c.id.in_(numbers[at : at + _BATCH])))
    # By turn first: the turns after a cut are shorter than those before it.
    deepest = sorted(rows, key=lambda r: (depth[own[r.id]], r.position, r.id), reverse=True)
    chosen: dict[str, CheckpointRow] = {}
    for row in deepest:
        if row.kind in chosen or row.layout != deepest[0].layout:
            continue
        if (stored := _stored(connection, row.id, own[row.id])) is not None:
            chosen[row.kind] = stored
    return list(chosen.values())


def _stored(connection: Connection, checkpoint_id: int, turn: str) -> CheckpointRow | None:
    """Return a checkpoint; None if its numbers are in an unknown encoding, or of a kind of state that is unknown."""
    query = select(checkpoint, layout.c.tensors).join(layout, layout.c.digest == _c.layout)
    row = connection.execute(query.where(_c.id == checkpoint_id)).one()
    encodings = connection.scalars(select(piece.c.dtype).where(piece.c.checkpoint == checkpoint_id).distinct())
    dtypes = [dtype_of(e) for e in encodings]
    columns = (segment.c.id, segment.c.first, segment.c.last, segment.c.dtype)
    segments: list[tuple[int, int, int, str]] = []
    for s in connection.execute(segments_of(checkpoint_id, *columns)):
        if (dtype := dtype_of(s.dtype)) is None:
            return None
        segments.append((s.id, s.first, s.last, dtype))
    if None in dtypes:
        return None
    try:
        spec = StateSpec.from_json(row.tensors)
    except StateError:  # a newer version wrote it
        return None
    return CheckpointRow(
        id=checkpoint_id,
        turn=turn,
        kind=row.kind,
        position=row.position,
        build=row.build,
        producer=row.producer,
        key=row.key,
        layout=row.layout,
        lineage=row.lineage,
        dtype="float32" if any(d != "float16" for d in dtypes) else "float16",
        segments=tuple(segments),
        spec=spec,
    )


def insert_checkpoints(
    connection: Connection, new: Sequence[EncodedCheckpoint], turns: Sequence[str]
) -> list[CheckpointResult]:
    """Write checkpoints and link them and their parents to their turns. A parent comes before its children.

    A checkpoint that a request went on from, or made again, is noted as used: retention keeps it longer.
    """
    now = time.time_ns() // 1000
    placed: list[CheckpointResult] = []
    other_rows: set[int] = set()  # stored before, with KV rows of other calls than those that the new children saw
    for digest_, spec in {enc.scope.layout: enc.spec for enc in new}.items():
        if connection.execute(_KNOWN_LAYOUT, {"layout": digest_}).one_or_none() is None:
            connection.execute(insert(layout).values(digest=digest_, tensors=spec.to_json()))
    for enc in new:
        parent, why_not = _parent(connection, enc)
        if enc.origin is not None and of_machine(enc.origin) and not is_trusted(connection, enc.origin):
            why_not = "it grew from a state of a machine that is not trusted any more"
        if why_not:
            placed.append(CheckpointResult(None, why_not=why_not))
            continue
        links = [enc.turn] if enc.turn is not None else list(turns)
        if parent is not None:
            _link(connection, links, parent.id, now if isinstance(enc.parent, int) else None)
        rows = _rows_of(connection, parent.id) if parent is not None and enc.since else []
        segments = [(r.first, r.last, r.checksum) for r in rows]
        segments += [(b.first, b.last, b.checksum) for b in enc.segments]
        name = (enc.key, enc.scope.build, enc.origin or "")
        own = digest(name, enc.position, segments, [(b.first, b.last, b.checksum) for b in enc.pieces])
        there = named_as(connection, enc, enc.key)
        if there is not None:
            if there.digest != own:
                other_rows.add(there.id)
            _link(connection, links, there.id, now if enc.has_data else None)  # else it was written for these turns
            placed.append(CheckpointResult(there.id, was_there=True))
            continue
        if not enc.has_data:
            placed.append(CheckpointResult(None, why_not="it was removed before its turn came"))
            continue
        mixed = parent is not None and enc.since > 0 and parent.id in other_rows
        new_id = _insert(connection, enc, parent.id if parent else None, own, now, mixed=mixed)
        if mixed:
            other_rows.add(new_id)
        if rows:
            shared = [{"checkpoint": new_id, "segment": r.id} for r in rows]
            connection.execute(_NEW_LISTED, shared)
        _link(connection, links, new_id)
        placed.append(CheckpointResult(new_id, nbytes=enc.nbytes))
    owners = Counter[bytes]()
    for enc, one in zip(new, placed, strict=True):
        owners[enc.owner.encode()] += one.nbytes
    add_stored_bytes(connection, owners.total(), owners)
    return placed


def _insert(
    connection: Connection, enc: EncodedCheckpoint, parent: int | None, own: bytes, now: int, *, mixed: bool
) -> int:
    values = {
        "key": enc.key,
        "anchor": enc.anchor,
        "layout": enc.scope.layout,
        "lineage": enc.scope.lineage,
        "build": enc.scope.build,
        # The rows below came from other calls: within tolerance, but not bit-exact, so the producer must differ.
        "producer": f"{enc.producer} (rows of several runs)" if mixed else enc.producer,
        "origin": enc.origin or "",
        "owner": enc.owner,
        "position": enc.position,
        "parent": parent,
        "kind": enc.kind,
        "digest": own,
        "recurrent_nbytes": enc.recurrent_nbytes,
        "rows_nbytes": enc.rows_nbytes,
        "created_at": now,
        "last_used_at": now,
    }
    new_id = connection.execute(_NEW, values).inserted_primary_key
    assert new_id is not None
    number = int(new_id[0])
    pieces = [
        {"checkpoint": number, "first": b.first, "last": b.last, "dtype": b.encoding}
        | {"checksum": b.checksum, "data": b.data}
        for b in enc.pieces
    ]
    if pieces:
        connection.execute(_NEW_PIECE, pieces)
    for b in enc.segments:
        row = {"first": b.first, "last": b.last, "dtype": b.encoding, "nbytes": len(b.data)}
        made = connection.execute(_NEW_SEGMENT, row | {"checksum": b.checksum, "data": b.data})
        assert made.inserted_primary_key is not None
        connection.execute(_NEW_LISTED, {"checkpoint": number, "segment": made.inserted_primary_key[0]})
    return number


def _parent(connection: Connection, enc: EncodedCheckpoint) -> tuple[Any, str]:
    """Return the parent's row, and why the checkpoint cannot be stored without it. Raises StoreError if it is wrong."""
    if enc.parent is None:
        return None, ""
    if isinstance(enc.parent, bytes):
        row = named_as(connection, enc, enc.parent)
    else:
        row = connection.execute(_PARENT, {"checkpoint": enc.parent}).one_or_none()
    if row is None:
        # Recurrent tensors are whole; only the KV rows below would be missing.
        return None, "the checkpoint it grew from was removed meanwhile" if enc.since else ""
    if row.origin and row.origin != enc.origin:
        raise StoreError(f"a checkpoint grown from one imported as {row.origin!r} must keep that origin")
    if enc.parent_key is not None and (row.position != enc.since or row.key != enc.parent_key):
        raise StoreError(f"checkpoint {row.id} does not hold the rows below {enc.since} of the same ids")
    return row, ""


def named_as(connection: Connection, enc: EncodedCheckpoint, key: bytes) -> Any:
    """Return the row with this key and the build, origin and owner of `enc`; None if there is none."""
    name = {"key": key, "build": enc.scope.build, "origin": enc.origin or "", "owner": enc.owner}
    return connection.execute(_NAMED, name).one_or_none()


def _rows_of(connection: Connection, checkpoint_id: int) -> Sequence[Any]:
    return connection.execute(_ROWS, {"checkpoint": checkpoint_id}).all()


def _link(connection: Connection, turns: Sequence[str], checkpoint_id: int, used: int | None = None) -> None:
    """Link turns to a checkpoint, which keeps it alive. Links that exist stay.

    used: the time, if these turns use it and were not there when it was made.
    """
    there = set(connection.scalars(_LINKED, {"checkpoint": checkpoint_id, "turns": turns}))
    missing = [{"turn": turn, "checkpoint": checkpoint_id} for turn in dict.fromkeys(turns) if turn not in there]
    if missing:
        connection.execute(_NEW_LINK, missing)
        if used is not None:
            connection.execute(_USED, {"some": [checkpoint_id], "now": used})


def use(connection: Connection, some: Collection[int], made: Collection[int]) -> None:
    """Note that a request used some checkpoints and made others, all at one time: now."""
    now = time.time_ns() // 1000
    for note, numbers in ((_USED, some), (_MADE, made)):
        if numbers:
            connection.execute(note, {"some": list(numbers), "now": now})


def linked_to(connection: Connection, turns: Any) -> list[int]:
    """List the checkpoints that turns of the sub-select `turns` link to."""
    return list(connection.scalars(select(turn_checkpoint.c.checkpoint).where(turn_checkpoint.c.turn.in_(turns))))


def unlink_strangers(connection: Connection, turn: str, ids: Line) -> list[int]:
    """Unlink a turn's end-of-turn checkpoints that do not match its new `ids`. Returns their ids.

    The state of its prompt stays for another answer. Its ids may differ from those that later prompts have.
    """
    link = turn_checkpoint.c
    mine = select(_c.id, _c.key, _c.layout, _c.lineage, _c.position).join(turn_checkpoint, link.checkpoint == _c.id)
    linked = connection.execute(mine.where(link.turn == turn, _c.kind == "turn"))
    # A checkpoint before its own ids belongs to a turn above, from which it was resumed.
    strangers = [row.id for row in linked if row.position >= ids.start and not named_by(row, ids)]
    connection.execute(delete(turn_checkpoint).where(link.turn == turn, link.checkpoint.in_(strangers)))
    return strangers


def named_by(row: Any, ids: Line) -> bool:
    """Return True if a checkpoint's key is that of a prefix of `ids`; False if those ids are not at hand.

    row: with `position`, `key`, `layout` and `lineage`.
    """
    if not ids.start <= row.position <= len(ids):
        return False
    return bool(prefix_keys(row.layout, row.lineage, ids, [row.position]) == [row.key])


def sweep(connection: Connection, candidates: Collection[int]) -> None:
    """Delete the candidates to which no turn links, and then the segments that no checkpoint needs."""
    numbers = sorted(set(candidates))
    for at in range(0, len(numbers), _BATCH):
        some = numbers[at : at + _BATCH]
        kept = select(turn_checkpoint.c.checkpoint).where(turn_checkpoint.c.checkpoint.in_(some))
        gone = select(checkpoint.c.id).where(checkpoint.c.id.in_(some), checkpoint.c.id.not_in(kept))
        doomed = list(connection.scalars(gone))
        rows = select(checkpoint_segment.c.segment).where(checkpoint_segment.c.checkpoint.in_(doomed)).distinct()
        loose = list(connection.scalars(rows))
        recurrent = select(func.coalesce(func.sum(checkpoint.c.recurrent_nbytes), 0))
        freed = connection.scalars(recurrent.where(checkpoint.c.id.in_(doomed))).one()
        owners = bequeath(connection, doomed)
        connection.execute(delete(checkpoint).where(checkpoint.c.id.in_(doomed)))
        for start in range(0, len(loose), _BATCH):
            part = loose[start : start + _BATCH]
            used = select(checkpoint_segment.c.segment).where(checkpoint_segment.c.segment.in_(part))
            unused = (segment.c.id.in_(part), segment.c.id.not_in(used))
            freed += connection.scalars(select(func.coalesce(func.sum(segment.c.nbytes), 0)).where(*unused)).one()
            connection.execute(delete(segment).where(*unused))
        add_stored_bytes(connection, -freed, owners)


def bequeath(connection: Connection, gone: Collection[int]) -> Counter[bytes]:
    """Let the checkpoints that grew from those that are removed grow from what is above, and count the rows below.

    The rows that stay are counted with the first one. Returns what each owner's states grow by, mostly below 0, by the
    UTF-8 of its name.
    """
    rows = {row.id: row for row in connection.execute(_GONE, {"gone": list(gone)})}
    heirs = [row for row in connection.execute(_HEIRS, {"gone": list(gone)}) if row.id not in rows]
    changes, taken, owners = [], set[int](), Counter[bytes]()
    for row in rows.values():
        owners[row.owner] -= (row.recurrent_nbytes or 0) + (row.rows_nbytes or 0)
    for heir in heirs:
        parent, more, last = heir.parent, 0, heir.id
        while parent in rows and parent < last:  # a parent was written before
            more += 0 if parent in taken else rows[parent].rows_nbytes
            taken.add(parent)
            parent, last = rows[parent].parent, parent
        changes.append({"heir": heir.id, "above": parent, "more": more})
        owners[heir.owner] += more
    if changes:
        connection.execute(_INHERIT, changes)
    return owners


def rows_of_one(connection: Connection, checkpoint_id: int) -> list[tuple[int, int]]:
    """List (id, bytes) of the segments that no other checkpoint lists."""
    mine, other = checkpoint_segment.alias(), checkpoint_segment.alias()
    others = select(other.c.checkpoint).where(other.c.segment == mine.c.segment, other.c.checkpoint != checkpoint_id)
    found = select(segment.c.id, segment.c.nbytes).join(mine, mine.c.segment == segment.c.id)
    return [
        (r.id, r.nbytes) for r in connection.execute(found.where(mine.c.checkpoint == checkpoint_id, ~others.exists()))
    ]
