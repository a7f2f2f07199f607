"""The checkpoints that a session holds, and every size that is kept: of the whole store, and of each session.

No other module writes a size. A transaction reports here what it wrote, linked or removed. The store's two totals are
always right. A session's sizes are, or are unknown (NULL) until they are needed or the store is idle. An owner's bytes
are counted when room is first made beside another owner's; from then on they are right too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import xxhash
from sqlalchemy import (
    Connection,
    Integer,
    LargeBinary,
    bindparam,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from ssmd.sessions.rows import tree
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, segment, total, turn, turn_checkpoint
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.turn import is_unicode

_BATCH = 500  # values in one statement
_COUNT_AT_ONCE = 4  # turns up to which a session is counted within its commit
_CHECKPOINTS, _TURNS_TOTAL = "checkpoints", "turns"
_OWNER = "@"  # begins the names of the totals by owner
Value = TypeVar("Value", int, str)


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint that a session keeps, and the bytes it takes."""

    id: int
    turn: str  # the topmost one that links to it, for which it was made
    kind: str
    position: int
    nbytes: int  # of its pieces
    segments: tuple[int, ...]  # ids of those it lists
    shared: bool  # turns of other sessions link to it too
    pinned: bool = False  # a pinned fork began with a turn that links to it
    used: bool = False  # a later request went on from it


@dataclass(frozen=True)
class HeldSegment:
    """A segment that a session's checkpoints list. Counts may stop above the number of the session's checkpoints."""

    nbytes: int
    users: int  # checkpoints that list it, in the whole store
    linked: int  # those of them that a turn links to; the others were written ahead


@dataclass(frozen=True)
class SessionHoldings:
    """All that a session keeps."""

    session: str
    head: str
    bases: frozenset[str]  # its turns that forks begin at
    parents: Mapping[str, str | None]  # by turn in the order of writing: the turn above it
    depths: Mapping[str, int]  # turns above each turn
    checkpoints: tuple[HeldCheckpoint, ...]
    segments: Mapping[int, HeldSegment]

    def sizes(self) -> tuple[int, int]:
        """Add up (own, shared) bytes: what would be free if the session were removed, and what would not."""
        whole = sum(h.nbytes for h in self.checkpoints) + sum(s.nbytes for s in self.segments.values())
        own = sum(h.nbytes for h in self.checkpoints if not h.shared)
        users: dict[int, int] = {}
        for h in self.checkpoints:
            if not h.shared:
                for number in h.segments:
                    users[number] = users.get(number, 0) + 1
        own += sum(s.nbytes for number, s in self.segments.items() if users.get(number) == s.linked)
        return own, whole - own


# Built once: putting a statement together takes longer than running it.
_t, _c, _link, _list = turn.c, checkpoint.c, turn_checkpoint.c, checkpoint_segment.c
_SESSION: Any = bindparam("session")
_SOME: Any = bindparam("some", expanding=True)
# Altered numbers count as some number: a check has to find them, not a list of sessions.
_TURNS = select(_t.id, _t.parent, cast(_t.depth, Integer).label("depth")).where(_t.session == _SESSION).order_by(_t.seq)
_LINKED = (
    select(
        *(_link.turn, _c.id, _c.kind, cast(_c.position, Integer).label("position")),
        cast(_c.recurrent_nbytes, Integer).label("recurrent_nbytes"),
        (_c.last_used_at != _c.created_at).label("used"),
    )
    .select_from(turn.join(turn_checkpoint, _link.turn == _t.id).join(checkpoint, _c.id == _link.checkpoint))
    .where(_t.session == _SESSION)
)
_OTHERS = exists().where(_link.checkpoint == _c.id, _t.id == _link.turn, _t.session != _SESSION)
_SHARED = select(_c.id).where(_c.id.in_(_SOME), _OTHERS)
_LISTED = select(_list.checkpoint, segment.c.id).join(segment, segment.c.id == _list.segment)
_LISTED = _LISTED.where(_list.checkpoint.in_(_SOME))
_LISTED = _LISTED.order_by(_list.checkpoint, _list.segment)
# Counting up to one more than the session can have is enough: rows of a system prompt may have thousands of users.
_USERS = select(_list.checkpoint).where(_list.segment == segment.c.id).limit(bindparam("most")).correlate(segment)
_ROWS = select(
    *(segment.c.id, cast(segment.c.nbytes, Integer).label("nbytes")),
    select(func.count()).select_from(_USERS.subquery()).scalar_subquery().label("users"),
).where(segment.c.id.in_(_SOME))
_LINKED_USERS = _USERS.where(exists().where(_link.checkpoint == _list.checkpoint))
_LINKED_ROWS = select(
    segment.c.id, select(func.count()).select_from(_LINKED_USERS.subquery()).scalar_subquery().label("linked")
).where(segment.c.id.in_(_SOME))
_s = session_table.c
_HEAD = select(_s.head).where(_s.id == _SESSION)
_BASES = select(_s.base).join(turn, _t.id == _s.base).where(_t.session == _SESSION)
# All forks that began with some of the session's turns have their root in common with it.
_OWN_ROOTS = select(_t.id).where(_t.session == _SESSION, _t.parent.is_(None))
_ROOTS = _OWN_ROOTS.union(select(_s.root).where(_s.id == _SESSION, _s.root.is_not(None)))
_TOTAL = select(cast(total.c.nbytes, Integer)).where(total.c.name == bindparam("name"))
_ADDED = update(total).where(or_(total.c.name == bindparam("of"), total.c.name == bindparam("and_of")))
_ADDED = _ADDED.values(nbytes=total.c.nbytes + bindparam("more"))
# An altered owner may be no text: it is read as bytes.
_ENDS = select(*(cast(select(f(session_table.c.owner)).scalar_subquery(), LargeBinary) for f in (func.min, func.max)))
_PER_OWNER = select(total.c.name, cast(total.c.nbytes, Integer)).where(total.c.name.between(_OWNER, _OWNER + "~"))
_BY_OWNER = select(
    cast(_c.owner, LargeBinary).label("owner"),
    func.sum(cast(_c.recurrent_nbytes, Integer) + cast(_c.rows_nbytes, Integer)).label("nbytes"),
).group_by(_c.owner)


def _owners() -> Any:
    """Build the query for the owners of sessions. It steps from each one to the next in the index."""
    first = select(func.min(session_table.c.owner).label("owner")).cte("owners", recursive=True)
    further = select(func.min(session_table.c.owner)).where(session_table.c.owner > first.c.owner).scalar_subquery()
    walk = first.union_all(select(further).where(first.c.owner.is_not(None)))
    return select(cast(walk.c.owner, LargeBinary)).where(walk.c.owner.is_not(None))


_OWNERS = _owners()
_SIZED = update(session_table).where(_s.id == _SESSION)
_SIZED = _SIZED.values(own_nbytes=bindparam("own"), shared_nbytes=bindparam("shared"))
_GROWN = (
    update(session_table)
    .where(_s.id == _SESSION)
    .values(retained=bindparam("left"), own_nbytes=_s.own_nbytes + bindparam("fresh"))
)
_LINKED_ELSEWHERE = exists().where(_link.checkpoint == _c.id, _link.turn.not_in(bindparam("turns", expanding=True)))
_ONLY_OF = select(func.sum(_c.recurrent_nbytes + _c.rows_nbytes)).where(_c.id.in_(_SOME), ~_LINKED_ELSEWHERE)
_UNKNOWN = select(_s.id).where(_s.own_nbytes.is_(None))
_UNSIZED = update(session_table).where(_s.id.in_(_SOME)).values(own_nbytes=None, shared_nbytes=None)
_SHARER = (
    select(_t.session)
    .join(turn_checkpoint, _link.turn == _t.id)
    .where(_link.checkpoint == bindparam("checkpoint"), _t.session != _SESSION)
    .limit(1)
)
_SECOND_SHARER = _SHARER.where(_t.session != bindparam("first"))
_PINNED = select(_s.base).where(_s.pinned.is_(True), _s.root.in_(_ROOTS))


def read_holding(connection: Connection, session_id: str) -> SessionHoldings:
    """Read all that a session keeps, in a few queries.

    The time grows with the session's own checkpoints, not with the store.
    """
    mine = {"session": session_id}
    turns = connection.execute(_TURNS, mine).all()
    depths = {row.id: row.depth for row in turns}
    rows = connection.execute(_LINKED, mine).all()
    topmost = {row.id: row for row in sorted(rows, key=lambda r: depths[r.turn], reverse=True)}
    numbers = sorted(topmost)
    shared = shared_among(connection, numbers, session_id)
    lists: dict[int, list[int]] = {number: [] for number in numbers}
    for some in batches(numbers):
        for number, of in connection.execute(_LISTED, {"some": some}):
            lists[number].append(of)
    segments = _rows(connection, lists)
    pinned = _inherited_by_pinned(connection, session_id)
    held_fast = {row.id for row in rows if row.turn in pinned}
    return SessionHoldings(
        session=session_id,
        head=connection.execute(_HEAD, mine).scalar_one(),
        bases=frozenset(connection.scalars(_BASES, mine)),
        parents={row.id: row.parent for row in turns},
        depths=depths,
        checkpoints=tuple(
            HeldCheckpoint(
                *(n, r.turn, r.kind, r.position, r.recurrent_nbytes, tuple(lists[n])),
                *(n in shared, n in held_fast, bool(r.used)),
            )
            for n, r in sorted(topmost.items())
        ),
        segments=segments,
    )


def _rows(connection: Connection, lists: Mapping[int, Sequence[int]]) -> dict[int, HeldSegment]:
    """Read the segments that these checkpoints list."""
    mine: dict[int, int] = {}
    for listed in lists.values():
        for number in listed:
            mine[number] = mine.get(number, 0) + 1
    most = len(lists) + 1
    found: dict[int, HeldSegment] = {}
    for some in batches(sorted(mine)):
        for row in connection.execute(_ROWS, {"some": some, "most": most}):
            found[row.id] = HeldSegment(row.nbytes, row.users, row.users)
    others = [number for number, rows in found.items() if rows.users != mine[number]]
    for some in batches(others):
        for number, linked in connection.execute(_LINKED_ROWS, {"some": some, "most": most}):
            found[number] = replace(found[number], linked=linked)
    return found


def _inherited_by_pinned(connection: Connection, session_id: str) -> set[str]:
    """Return the turns that pinned forks began with, if the session may own some of them."""
    found: set[str] = set()
    for base in connection.scalars(_PINNED, {"session": session_id}).all():
        found.update(connection.scalars(tree.above(literal(base))))
    return found


def shared_among(connection: Connection, checkpoints: Sequence[int], session_id: str) -> set[int]:
    """Return the checkpoints to which turns of other sessions link."""
    found: set[int] = set()
    for some in batches(checkpoints):
        found.update(connection.scalars(_SHARED, {"some": some, "session": session_id}))
    return found


def stored_bytes(connection: Connection) -> int:
    """Return the bytes of all checkpoints: every piece and every segment once."""
    return _total(connection, _CHECKPOINTS)


def turn_bytes(connection: Connection) -> int:
    """Return the bytes of the items, ids and text of all turns."""
    return _total(connection, _TURNS_TOTAL)


def _total(connection: Connection, name: str) -> int:
    return int(connection.execute(_TOTAL, {"name": name}).scalar() or 0)


def add_stored_bytes(connection: Connection, nbytes: int, owners: Mapping[bytes, int]) -> None:
    """Change the total of stored bytes, in the transaction that writes or deletes pieces or segments.

    owners: what each owner's states grew by, by the UTF-8 of its name.
    """
    if list(owners.values()) == [nbytes]:
        _add(connection, _CHECKPOINTS, nbytes, _of(*owners))
        return
    _add(connection, _CHECKPOINTS, nbytes)
    for owner, part in owners.items():
        _add(connection, _of(owner), part)


def add_turn_bytes(connection: Connection, nbytes: int) -> None:
    """Change the total of the turns' bytes, in the transaction that writes, changes or deletes turns."""
    _add(connection, _TURNS_TOTAL, nbytes)


def nbytes_of_turns(connection: Connection, which: Any) -> int:
    """Return the bytes of the turns for which a condition holds."""
    return int(connection.execute(select(func.coalesce(func.sum(_t.nbytes), 0)).where(which)).scalar_one())


def _add(connection: Connection, name: str, nbytes: int, and_name: str | None = None) -> None:
    """Change a total, or two of them. One that is not kept stays so."""
    if nbytes:
        connection.execute(_ADDED, {"of": name, "and_of": and_name or name, "more": nbytes})


def _of(owner: bytes) -> str:
    """Return the name of an owner's total, which has 16 characters."""
    return _OWNER + xxhash.xxh3_64_hexdigest(owner)[1:]


def bytes_by_owner(connection: Connection) -> dict[str, int]:
    """Return the bytes of the states of each owner that has sessions. Empty if there is only one such owner.

    The first call beside a new owner reads all checkpoints, and keeps the sums.
    """
    ends = connection.execute(_ENDS).one()
    if ends[0] == ends[1]:
        return {}
    owners = {owner: _of(owner) for owner in connection.scalars(_OWNERS)}
    kept: dict[str, int] = {name: nbytes for name, nbytes in connection.execute(_PER_OWNER)}
    missing = owners.keys() - {owner for owner, name in owners.items() if name in kept}
    if missing:
        counted = {row.owner: row.nbytes for row in connection.execute(_BY_OWNER)}
        new = [{"name": owners[owner], "nbytes": counted.get(owner, 0)} for owner in sorted(missing)]
        connection.execute(insert(total), new)
        kept |= {row["name"]: row["nbytes"] for row in new}
    texts = {owner: owner.decode("utf-8", "surrogateescape") for owner in owners}
    return {texts[owner]: kept[name] for owner, name in owners.items() if is_unicode(texts[owner])}


def miscounted_owners(connection: Connection) -> int:
    """Count the totals by owner that are not the sums of its checkpoints."""
    counted = {_of(row.owner): row.nbytes for row in connection.execute(_BY_OWNER)}
    return sum(counted.get(name, 0) != nbytes for name, nbytes in connection.execute(_PER_OWNER))


def count_again(connection: Connection, sessions: Collection[str]) -> None:
    """Forget the sizes of these sessions. They are counted when they are next needed."""
    for some in batches(sorted(filter(is_unicode, sessions))):
        connection.execute(_UNSIZED, {"some": some})


def relink(connection: Connection, session_id: str, checkpoints: Collection[int]) -> None:
    """Forget the sizes that a session's links to these checkpoints change, before or after they are made or removed.

    These are its own, and those of the sessions that share a checkpoint with it alone.
    """
    if checkpoints:
        count_again(connection, {session_id, *_sole_sharers(connection, sorted(set(checkpoints)), session_id)})


def grow(
    connection: Connection,
    session_id: str,
    *,
    turns: int,
    new_turns: Sequence[str],
    nbytes: int,
    ahead: Collection[int],
    shared: Collection[int],
    retained: int,
) -> None:
    """Add checkpoints that were linked to a session to its sizes, and write its `retained`.

    turns: number of turns that it has. new_turns: ids of those that link. nbytes: written for it now. ahead: ids of
    checkpoints that may have been written before, for these turns alone. shared: ids that it may share from now on.
    """
    written = (connection.scalar(_ONLY_OF, {"some": sorted(ahead), "turns": new_turns}) or 0) if ahead else 0
    connection.execute(_GROWN, {"session": session_id, "left": retained, "fresh": nbytes + written})
    numbers = sorted(shared)
    if not shared_among(connection, numbers, session_id):
        return
    if turns <= _COUNT_AT_ONCE:
        count_again(connection, _sole_sharers(connection, numbers, session_id))
        write_sizes(connection, session_id)
    else:
        relink(connection, session_id, numbers)


def _sole_sharers(connection: Connection, checkpoints: Sequence[int], session_id: str) -> set[str]:
    """Return the other sessions that are alone in sharing one of these checkpoints with this one.

    A link of this session changes their sizes. Where three sessions share, it changes none.
    """
    found: set[str] = set()
    for number in checkpoints:
        others = {"checkpoint": number, "session": session_id}
        first = connection.execute(_SHARER, others).scalar()
        if first is not None and is_unicode(first):
            second = connection.execute(_SECOND_SHARER, others | {"first": first}).scalar()
            if second is None:
                found.add(first)
    return found


def has_unknown_sizes(connection: Connection) -> bool:
    """Return True if the sizes of a session are to be counted."""
    return connection.execute(_UNKNOWN.limit(1)).first() is not None


def count_all_again(connection: Connection) -> None:
    """Count the store's totals from its rows, after a repair, and forget the sizes of all sessions."""
    stored = select(func.coalesce(func.sum(_c.recurrent_nbytes), 0)).scalar_subquery()
    rows = select(func.coalesce(func.sum(segment.c.nbytes), 0)).scalar_subquery()
    words = select(func.coalesce(func.sum(_t.nbytes), 0)).scalar_subquery()
    connection.execute(delete(total))
    for name, nbytes in ((_CHECKPOINTS, select(stored + rows).scalar_subquery()), (_TURNS_TOTAL, words)):
        connection.execute(insert(total).values(name=name, nbytes=nbytes))
    count_again(connection, list(connection.scalars(select(_s.id))))


def count_sizes(connection: Connection, *, at_most: int) -> int:
    """Count and store the unknown sizes of at most `at_most` sessions. Return how many there were."""
    sessions = list(connection.scalars(_UNKNOWN.limit(at_most)))
    for session_id in sessions:
        write_sizes(connection, session_id)
    return len(sessions)


def write_sizes(connection: Connection, session_id: str) -> None:
    own, shared = read_holding(connection, session_id).sizes()
    connection.execute(_SIZED, {"session": session_id, "own": own, "shared": shared})


def batches(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    """Cut values into batches, few enough for one statement each."""
    for at in range(0, len(values), _BATCH):
        yield values[at : at + _BATCH]
