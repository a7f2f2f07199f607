"""Retention: the checkpoints of all sessions together never take more than the quota. It picks which to remove first.

First those go that belong to no session, of requests with "store": false. Then the old checkpoints thin out, session by
session, the least recently used one first. If that is not enough, sessions are emptied of the rest in the same order.
Of an age, states go first that no request came back to. Pinned sessions keep all. Turns stay; without a checkpoint they
are read again.

Several owners have equal shares of the quota. An owner above its share gives first, the one farthest above before the
others, in that order of its own sessions. Sessions of all owners are taken only if no owner above its share can give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, literal_column, select, update

from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import loose, tree
from ssmd.sessions.rows.blobs import EncodedCheckpoint
from ssmd.sessions.rows.checkpoints import CheckpointResult
from ssmd.sessions.rows.holding import (
    HeldCheckpoint,
    SessionHoldings,
    add_stored_bytes,
    batches,
    bytes_by_owner,
    count_again,
    grow,
    read_holding,
    relink,
    stored_bytes,
)
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, segment, turn, turn_checkpoint
from ssmd.sessions.rows.schema import session as session_table

EVERYTHING, THINNED, NOTHING = 0, 1, 2  # session.retained: what retention has left of it since its last turn
PART_BYTES = 256 << 20  # bytes that a collection frees in one transaction: as much goes through the log
_AHEAD, _MOST_AHEAD = 1 / 16, 32 << 20  # share of the quota, and bytes, that a commit thins out beyond its need
# Built once: putting a statement together takes longer than running it.
_s = session_table.c
_NUMBER_OF_TURNS = select(_s.turns).where(_s.id == bindparam("session"))
_READY = select(_s.id).where(_s.pinned.is_(False), _s.retained == bindparam("level"))
_READY = _READY.order_by(_s.last_used_at, _s.id).limit(bindparam("most"))
# An index has the owners, another one the order: the rows of other owners' sessions are not read.
_ROW: Any = literal_column("session.rowid")
_OWN: Any = select(literal_column("own.rowid")).select_from(session_table.alias("own"))
_OWN = _OWN.where(literal_column("own.owner") == bindparam("owner"))
_OLDEST = select(func.min(_s.last_used_at)).where(_s.owner == bindparam("owner")).correlate(None).scalar_subquery()
_OWN_READY = _READY.where(_ROW.in_(_OWN), _s.last_used_at >= _OLDEST)
_AT_ONCE = 16  # sessions of an owner that one query finds

NEWEST = 2  # turns at the end of every path that keep all their checkpoints


@dataclass
class FreedSpace:
    """Freed checkpoints. sessions: (bytes, checkpoints) that each session gave up."""

    nbytes: int = 0
    sessions: dict[str, tuple[int, int]] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)

    def add(self, session_id: str, ledger: Ledger) -> None:
        self.nbytes += ledger.freed
        nbytes, count = self.sessions.get(session_id, (0, 0))
        if ledger.gone:
            self.sessions[session_id] = (nbytes + ledger.freed, count + len(ledger.gone))
        self.checkpoints += [held.id for held in ledger.gone if not held.shared]
        self.segments += ledger.loose


@dataclass(frozen=True)
class CollectionResult:
    """The result of a collection. sessions: (bytes, checkpoints) freed, by session. left: bytes of checkpoints left."""

    quota: int | None
    nbytes: int = 0
    checkpoints: int = 0
    sessions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    left: int = 0

    def and_then(self, more: CollectionResult) -> CollectionResult:
        sessions = dict(self.sessions)
        for one, (nbytes, count) in more.sessions.items():
            before = sessions.get(one, (0, 0))
            sessions[one] = (before[0] + nbytes, before[1] + count)
        return CollectionResult(
            self.quota, self.nbytes + more.nbytes, self.checkpoints + more.checkpoints, sessions, more.left
        )


def reopen(connection: Connection, sessions: Collection[str]) -> None:
    """Note that these sessions may have checkpoints to give again, and other sizes."""
    count_again(connection, sessions)
    for some in batches(sorted(sessions)):
        connection.execute(update(session_table).where(session_table.c.id.in_(some)).values(retained=EVERYTHING))


def loosen(connection: Connection, session_id: str) -> None:
    """Reopen the owners of a fork's beginning after the fork was unpinned, as that is not pinned any more either."""
    t = turn.c
    owners = select(t.session).where(t.id.in_(tree.inherited(session_id)), t.session != session_id).distinct()
    reopen(connection, list(connection.scalars(owners)))


def collect(connection: Connection, quota: int | None, *, dry_run: bool) -> CollectionResult:
    """Remove one transaction's part of what exceeds the quota. dry_run: all of it, and then roll back."""
    before = stored_bytes(connection)
    over = 0 if quota is None else before - quota
    if quota is None or over <= 0:
        return CollectionResult(quota, left=before)
    attempt = connection.begin_nested()
    shares, freed = read_shares(connection, quota), FreedSpace()
    while (needed := min(over - freed.nbytes, PART_BYTES)) > 0:
        already = freed.nbytes
        make_room(connection, needed, shares, dry_run=dry_run, freed=freed)
        if not dry_run or freed.nbytes == already:
            break
    attempt.rollback() if dry_run else attempt.commit()
    return CollectionResult(quota, freed.nbytes, len(freed.checkpoints), freed.sessions, before - freed.nbytes)


@dataclass
class Shares:
    """The bytes that each owner's states take, and the share of the quota of each. No owners: there is only one."""

    owners: Counter[str] = field(default_factory=Counter)
    each: int = 0  # bytes

    def above(self) -> dict[str, int]:
        """Return the bytes by which owners exceed their share."""
        return {owner: nbytes - self.each for owner, nbytes in self.owners.items() if nbytes > self.each}


def read_shares(connection: Connection, quota: int, coming: Mapping[str, int] | None = None) -> Shares:
    """Share a quota between the owners that have states. coming: bytes by owner that are about to be written."""
    owners = Counter(bytes_by_owner(connection))
    if owners:
        owners.update(coming or {})
    return Shares(owners, quota // max(1, sum(nbytes > 0 for nbytes in owners.values())))


def part_of_largest(above: Iterable[int], needed: int) -> int:
    """Return how much the owner farthest above its share gives, if all give down to one level that frees `needed`."""
    heights = [*sorted(above, reverse=True), 0]
    for count, height in enumerate(heights[:-1], 1):
        step = (height - heights[count]) * count
        if step >= needed:
            return heights[0] - height + -(-needed // count)
        needed -= step
    return heights[0]


def make_room(
    connection: Connection,
    needed: int,
    shares: Shares,
    keep: Collection[int] = (),
    *,
    ahead: int = 0,
    dry_run: bool = False,
    freed: FreedSpace | None = None,
) -> FreedSpace:
    """Remove checkpoints until `needed` bytes are free, or only pinned sessions and `keep` are left.

    Time grows with what is removed, not with the store: sessions remember what was taken from them already. With
    several owners it grows with the entries of two indexes.
    ahead: bytes that are thinned out beyond that, because searching a session takes time that grows with its turns.
    dry_run: only links are removed, and the caller rolls back. freed: of the calls before, in one dry run.
    """
    freed = FreedSpace() if freed is None else freed
    until = freed.nbytes + needed
    _take_sealed(connection, until, shares, keep, freed)
    if shares.owners:
        _take_above_shares(connection, until, ahead, shares, keep, freed)
        ahead = 0
    _take_in_order(connection, EVERYTHING, until + ahead, keep, freed)
    _take_in_order(connection, THINNED, until, keep, freed)
    if not dry_run:
        _remove(connection, freed)
    return freed


def _take_sealed(connection: Connection, until: int, shares: Shares, keep: Collection[int], freed: FreedSpace) -> None:
    """Take sealed checkpoints in the order in which they give way, until so many bytes are free.

    The owner that has most of them gives first, as where they exceed their own share.
    """
    if freed.nbytes >= until:
        return
    gone = {*keep, *freed.checkpoints}
    for one in loose.largest_first(loose.in_order(connection, sealed=True)):
        if freed.nbytes >= until:
            return
        if one.id not in gone:
            rows = checkpoint_rows.rows_of_one(connection, one.id)
            connection.execute(delete(checkpoint_segment).where(checkpoint_segment.c.checkpoint == one.id))
            nbytes = one.recurrent_nbytes + sum(size for _, size in rows)
            if one.owner in shares.owners:
                shares.owners[one.owner] -= nbytes
            freed.nbytes += nbytes
            freed.checkpoints.append(one.id)
            freed.segments += [number for number, _ in rows]


def _take_above_shares(
    connection: Connection, until: int, ahead: int, shares: Shares, keep: Collection[int], freed: FreedSpace
) -> None:
    """Take checkpoints of owners above their share, until so many bytes are free or none of them can give more.

    ahead: the owner that gives thins out so many bytes more of its own.
    """
    exhausted: set[str] = set()
    while freed.nbytes < until:
        above = {owner: nbytes for owner, nbytes in shares.above().items() if owner not in exhausted}
        if not above:
            return
        owner = max(above, key=lambda one: (above[one], one))
        already = freed.nbytes
        gives = already + part_of_largest(above.values(), until - already)
        _take_in_order(connection, EVERYTHING, gives + ahead, keep, freed, owner)
        _take_in_order(connection, THINNED, gives, keep, freed, owner)
        shares.owners[owner] -= freed.nbytes - already
        if freed.nbytes < gives:
            exhausted.add(owner)


def _take_in_order(
    connection: Connection,
    level: int,
    until: int,
    keep: Collection[int],
    freed: FreedSpace,
    owner: str | None = None,
) -> None:
    """Take from sessions at a level, the least recently used first, until so many bytes are free. None: any owner's."""
    passed: set[str] = set()  # sessions that `keep` holds back
    while freed.nbytes < until:
        some = [one for one in _ready(connection, level, len(passed), owner) if one not in passed]
        if not some:
            return
        for session_id in some:
            if freed.nbytes >= until:
                return
            if not _take(connection, session_id, level, until - freed.nbytes, keep, freed):
                passed.add(session_id)


def _ready(connection: Connection, level: int, passed: int, owner: str | None) -> list[str]:
    """List the sessions, after so many that were passed over, that can give at a level."""
    if owner is None:
        return list(connection.scalars(_READY, {"level": level, "most": passed + 1}))
    return list(connection.scalars(_OWN_READY, {"level": level, "most": passed + _AT_ONCE, "owner": owner}))


def _take(
    connection: Connection, session_id: str, level: int, needed: int, keep: Collection[int], freed: FreedSpace
) -> bool:
    """Take checkpoints from one session. Return True if it has nothing more to give at this level."""
    holding = read_holding(connection, session_id)
    ledger = Ledger(holding)
    enough = (ledger.thin if level == EVERYTHING else ledger.empty)(holding, needed, keep)
    mine = session_table.c.id == session_id
    if ledger.gone:
        _unlink(connection, session_id, ledger.gone)
        # Not subtracted: the freed bytes may have been another session's too when they were counted.
        count_again(connection, {session_id})
        relink(connection, session_id, [held.id for held in ledger.gone if held.shared])
    freed.add(session_id, ledger)
    if enough or (level == THINNED and any(held.id in keep for held in holding.checkpoints)):
        return False
    connection.execute(update(session_table).where(mine).values(retained=level + 1))
    return True


def empty(connection: Connection, session_id: str) -> int:
    """Remove a part of the checkpoints of a session that is to be removed, pinned or not. Returns the bytes freed."""
    freed = FreedSpace()
    _take(connection, session_id, THINNED, PART_BYTES, (), freed)
    _remove(connection, freed)
    return freed.nbytes


def _unlink(connection: Connection, session_id: str, gone: Sequence[HeldCheckpoint]) -> None:
    mine = select(turn.c.id).where(turn.c.session == session_id)
    link = turn_checkpoint.c
    for some in batches([held.id for held in gone]):
        connection.execute(delete(turn_checkpoint).where(link.checkpoint.in_(some), link.turn.in_(mine)))
    for some in batches([held.id for held in gone if not held.shared]):
        connection.execute(delete(checkpoint_segment).where(checkpoint_segment.c.checkpoint.in_(some)))


def _remove(connection: Connection, freed: FreedSpace) -> None:
    owners = Counter[bytes]()
    for some in batches(freed.checkpoints):
        owners.update(checkpoint_rows.bequeath(connection, some))
        connection.execute(delete(checkpoint).where(checkpoint.c.id.in_(some)))
    for some in batches(freed.segments):
        connection.execute(delete(segment).where(segment.c.id.in_(some)))
    add_stored_bytes(connection, -freed.nbytes, owners)


def place(
    connection: Connection, new: Sequence[EncodedCheckpoint], turns: Sequence[str], session_id: str, quota: int | None
) -> list[CheckpointResult]:
    """Write checkpoints of a session and link them to its turns. Make room for them: the quota holds afterwards.

    If pinned sessions leave no room, the newest checkpoint is kept if it fits, else none; `CheckpointResult.why_not`
    says so.
    """
    if not new:
        return []
    too_large = [quota is not None and enc.nbytes > quota for enc in new]
    fitting = [enc for enc, no in zip(new, too_large, strict=True) if not no]
    if quota is not None:
        coming = _incoming(connection, fitting)
        over = stored_bytes(connection) + coming.total() - quota
        if over > 0:
            # Before they are written, so that they use the freed pages.
            parents = {enc.parent for enc in fitting if isinstance(enc.parent, int)}
            _try_to_make_room(connection, over, quota, parents, coming, ahead=_ahead(quota))
    placed = checkpoint_rows.insert_checkpoints(connection, fitting, turns)
    _book(connection, session_id, fitting, placed, [*turns, *(enc.turn for enc in new if enc.turn is not None)])
    if quota is not None and stored_bytes(connection) > quota:
        placed = _squeeze(connection, placed, session_id, quota)
    rest = iter(placed)
    refused = CheckpointResult(None, why_not=f"it is larger than the quota of {quota} bytes")
    return [refused if no else next(rest) for no in too_large]


def place_ahead(connection: Connection, new: EncodedCheckpoint, quota: int | None) -> CheckpointResult:
    """Write a checkpoint before its turn, if there is room or room can be made. It stays until a turn links to it."""
    if quota is not None:
        coming, ahead = _incoming(connection, [new]), _ahead(quota)
        over = stored_bytes(connection) + coming.total() - quota
        keep = {new.parent} if isinstance(new.parent, int) else ()
        most = quota // loose.SHARE if new.kind in loose.SEALED else quota
        fits = new.nbytes <= most
        if not fits or (over > 0 and not _try_to_make_room(connection, over, quota, keep, coming, ahead=ahead)):
            return CheckpointResult(None, why_not=f"the quota of {quota} bytes has no room for it yet")
    return checkpoint_rows.insert_checkpoints(connection, [new], [])[0]


def _ahead(quota: int) -> int:
    return min(int(quota * _AHEAD), _MOST_AHEAD)


def _incoming(connection: Connection, new: Iterable[EncodedCheckpoint]) -> Counter[str]:
    """Count the bytes that are not stored already, by owner."""
    nbytes = Counter[str]()
    for enc in new:
        if checkpoint_rows.named_as(connection, enc, enc.key) is None:
            nbytes[enc.owner] += enc.nbytes
    return nbytes


def _try_to_make_room(
    connection: Connection,
    needed: int,
    quota: int,
    keep: Collection[int],
    coming: Mapping[str, int] | None = None,
    *,
    ahead: int = 0,
) -> bool:
    """Free `needed` bytes, or nothing if that is not possible. Return True if they were freed."""
    s = session_table.c
    pinned = connection.execute(select(func.sum(s.own_nbytes)).where(s.pinned.is_(True))).scalar() or 0
    if needed > stored_bytes(connection) - pinned:
        return False
    attempt = connection.begin_nested()
    shares = read_shares(connection, quota, coming)
    freed = make_room(connection, needed, shares, keep, ahead=ahead, dry_run=True)
    if freed.nbytes < needed:
        attempt.rollback()
        return False
    attempt.commit()
    _remove(connection, freed)
    return True


def _book(
    connection: Connection,
    session_id: str,
    new: Sequence[EncodedCheckpoint],
    placed: Sequence[CheckpointResult],
    linked_turns: Sequence[str],
) -> None:
    """Note that the session grew: it has checkpoints to give again, and other sizes."""
    (turns,) = connection.execute(_NUMBER_OF_TURNS, {"session": session_id}).one()
    there = {p.id for p in placed if p.was_there and p.id is not None}
    grow(
        connection,
        session_id,
        turns=turns,
        new_turns=linked_turns,
        nbytes=sum(p.nbytes for p in placed),
        ahead=there - {p.id for p in placed if not p.was_there},
        shared=there | {enc.parent for enc in new if isinstance(enc.parent, int)},
        retained=EVERYTHING if turns > NEWEST else THINNED,  # so few turns are not thinned
    )


def _squeeze(
    connection: Connection, placed: Sequence[CheckpointResult], session_id: str, quota: int
) -> list[CheckpointResult]:
    """Make room for the last of the new checkpoints if there is none for all, or drop all of them."""
    made = [p.id for p in placed if p.id is not None and not p.was_there]
    gone: set[int] = set()
    for some in (made[:-1], made[-1:]):
        if some:
            _drop(connection, session_id, some)
        gone.update(some)
        over = stored_bytes(connection) - quota
        if over <= 0 or _try_to_make_room(connection, over, quota, set(made) - gone):
            break
    else:
        make_room(connection, stored_bytes(connection) - quota, read_shares(connection, quota))
    why_not = f"the quota of {quota} bytes leaves no room for it beside the pinned sessions"
    return [CheckpointResult(None, why_not=why_not) if p.id in gone else p for p in placed]


def _drop(connection: Connection, session_id: str, numbers: Collection[int]) -> None:
    holding = read_holding(connection, session_id)
    ledger = Ledger(holding)
    for held in holding.checkpoints:
        if held.id in numbers:
            ledger.let_go(held)
    _unlink(connection, session_id, ledger.gone)
    freed = FreedSpace()
    freed.add(session_id, ledger)
    _remove(connection, freed)
    count_again(connection, {session_id})


def ages(parents: Mapping[str, str | None], ends: Collection[str] = ()) -> dict[str, int]:
    """Count, for each turn, the turns of the shortest path below it. parents: in the order of writing.

    ends: turns at which a conversation ends though others follow, because forks begin at them.
    """
    found: dict[str, int] = dict.fromkeys(ends, 0)
    for one in reversed(list(parents)):
        age = found.setdefault(one, 0)
        above = parents[one]
        if above is not None:
            found[above] = min(age + 1, found.get(above, age + 1))
    return found


def kept_when_thin(age: int, depth: int) -> bool:
    """Return True if a turn `age` turns above the end and `depth` turns below the beginning keeps a checkpoint.

    They get ever sparser: of the turns 2 and 3 back every second keeps one, of those 4 to 7 back every fourth, and so
    on. So n turns keep some log2(n) checkpoints, and to edit a message k turns back at most some 2 k turns are read
    again. The choice depends on the depth, so that it stays right as the conversation goes on.
    """
    return age < NEWEST or depth % (1 << (age.bit_length() - 1)) == 0


def thinned(holding: SessionHoldings) -> list[HeldCheckpoint]:
    """Return the checkpoints that a thinned session gives up, the oldest first.

    Of an age, those go first that no request came back to. The end of a system prompt stays. Of a turn that keeps its
    end, a place inside its prompt stays too if a request came back to it: others may follow.
    """
    old = ages(holding.parents, holding.bases)
    deepest = _deepest(holding)

    def stays(held: HeldCheckpoint) -> bool:
        if held.kind == "system" or old[held.turn] < NEWEST:
            return True
        # Of an old turn its end is enough: from there the messages of both its successors can be edited. A client may
        # come back to a place in each turn: then these grow sparser too.
        wanted = held.position == deepest[held.turn] or (held.kind == "prefix" and held.used)
        return wanted and kept_when_thin(old[held.turn], holding.depths[held.turn])

    gone = [held for held in holding.checkpoints if not stays(held)]
    return sorted(gone, key=lambda h: (-old[h.turn].bit_length(), h.used, -old[h.turn], h.position))


def leaving(holding: SessionHoldings) -> list[HeldCheckpoint]:
    """Return all checkpoints in the order in which an emptied session gives them up. The likeliest to be used is last.

    Likeliest are the ends of its current path and of what its forks began with, and then what was used before.
    """
    ends = {holding.head, *holding.bases}
    current: set[str] = set()
    for end in ends:
        at: str | None = end
        while at is not None and at in holding.parents and at not in current:
            current.add(at)
            at = holding.parents[at]
    deepest = _deepest(holding)

    def worth(held: HeldCheckpoint) -> tuple[bool, bool, bool, int]:
        at_end = held.turn in ends and held.position == deepest[held.turn]
        return held.turn in current, at_end, held.used, held.position

    return sorted(holding.checkpoints, key=worth)


def _deepest(holding: SessionHoldings) -> dict[str, int]:
    """Return the position of the last checkpoint that was made for each turn."""
    found: dict[str, int] = {}
    for held in holding.checkpoints:
        found[held.turn] = max(held.position, found.get(held.turn, 0))
    return found


class Ledger:
    """Adds up the bytes that are freed by giving up some of a session's checkpoints."""

    def __init__(self, holding: SessionHoldings) -> None:
        self._nbytes = {number: s.nbytes for number, s in holding.segments.items()}
        self._users = {number: s.users for number, s in holding.segments.items()}
        self.gone: list[HeldCheckpoint] = []
        self.loose: list[int] = []  # segments that no checkpoint lists any more
        self.freed = 0

    def gain(self, held: HeldCheckpoint) -> int:
        """Count the bytes that giving up a checkpoint frees: none if it is shared, no segments that others list."""
        if held.shared:
            return 0
        return held.nbytes + sum(self._nbytes[s] for s in held.segments if self._users[s] == 1)

    def let_go(self, held: HeldCheckpoint) -> None:
        self.freed += self.gain(held)
        self.gone.append(held)
        if not held.shared:
            self.loose += [s for s in held.segments if self._users[s] == 1]
            for s in held.segments:
                self._users[s] -= 1

    def thin(self, holding: SessionHoldings, needed: int, keep: Collection[int]) -> bool:
        """Give up old checkpoints until `needed` bytes are free. Return False if all are gone and it is not enough."""
        for held in thinned(holding):
            if self.freed >= needed:
                return True
            if held.id not in keep and not held.pinned and self.gain(held):
                self.let_go(held)
        return self.freed >= needed

    def empty(self, holding: SessionHoldings, needed: int, keep: Collection[int]) -> bool:
        """Give up all but `keep`, until `needed` bytes are free. Return False if that was not enough."""
        left = [held for held in leaving(holding) if held.id not in keep and not held.pinned]
        while self.freed < needed:
            # A checkpoint whose rows the next one lists frees nothing now: the end of the chain goes before it.
            best = next((held for held in left if self.gain(held)), None)
            if best is None:
                for held in left:
                    self.let_go(held)
                return False
            left.remove(best)
            self.let_go(best)
        return True
