"""Retention: the checkpoints of all sessions together never take more than the quota. It picks which to remove first.

First those go that belong to no session, of requests with "store": false. Then the old checkpoints thin out, session by
session, the least recently used one first. If that is not enough, sessions are emptied of the rest in the same order.
Of an age, states go first that no request came back to. Pinned sessions keep all. Turns stay; without a checkpoint they
are read again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, bindparam, delete, func, select, update

from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import loose, tree
from ssmd.sessions.rows.blobs import EncodedCheckpoint
from ssmd.sessions.rows.checkpoints import CheckpointResult
from ssmd.sessions.rows.holding import (
    HeldCheckpoint,
    SessionHoldings,
    add_stored_bytes,
    batches,
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
    if over <= 0:
        return CollectionResult(quota, left=before)
    attempt = connection.begin_nested()
    freed = make_room(connection, over if dry_run else min(over, PART_BYTES), dry_run=dry_run)
    attempt.rollback() if dry_run else attempt.commit()
    return CollectionResult(quota, freed.nbytes, len(freed.checkpoints), freed.sessions, before - freed.nbytes)


def make_room(
    connection: Connection, needed: int, keep: Collection[int] = (), *, ahead: int = 0, dry_run: bool = False
) -> FreedSpace:
    """Remove checkpoints until `needed` bytes are free, or only pinned sessions and `keep` are left.

    Time grows with what is removed, not with the store: sessions remember what was taken from them already.
    ahead: bytes that are thinned out beyond that, because searching a session takes time that grows with its turns.
    dry_run: only links are removed, and the caller rolls back.
    """
    freed = FreedSpace()
    _take_sealed(connection, needed, keep, freed)
    s = session_table.c
    for level in (EVERYTHING, THINNED):
        ready = select(s.id).where(s.pinned.is_(False), s.retained == level).order_by(s.last_used_at, s.id)
        passed: list[str] = []  # sessions that `keep` holds back
        wanted = needed + ahead if level == EVERYTHING else needed
        while freed.nbytes < wanted:
            first = connection.scalars(ready.limit(len(passed) + 1))
            session_id = next((one for one in first if one not in passed), None)
            if session_id is None:
                break
            if not _take(connection, session_id, level, wanted - freed.nbytes, keep, freed):
                passed.append(session_id)
    if not dry_run:
        _remove(connection, freed)
    return freed


def _take_sealed(connection: Connection, needed: int, keep: Collection[int], freed: FreedSpace) -> None:
    """Take sealed checkpoints in the order in which they give way, until `needed` bytes are free."""
    for one in loose.in_order(connection, sealed=True) if needed > 0 else ():
        if freed.nbytes >= needed:
            return
        if one.id not in keep:
            rows = checkpoint_rows.rows_of_one(connection, one.id)
            connection.execute(delete(checkpoint_segment).where(checkpoint_segment.c.checkpoint == one.id))
            freed.nbytes += one.recurrent_nbytes + sum(size for _, size in rows)
            freed.checkpoints.append(one.id)
            freed.segments += [number for number, _ in rows]


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
    for some in batches(freed.checkpoints):
        checkpoint_rows.bequeath(connection, some)
        connection.execute(delete(checkpoint).where(checkpoint.c.id.in_(some)))
    for some in batches(freed.segments):
        connection.execute(delete(segment).where(segment.c.id.in_(some)))
    add_stored_bytes(connection, -freed.nbytes)


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
        over = stored_bytes(connection) + _incoming(connection, fitting) - quota
        if over > 0:
            # Before they are written, so that they use the freed pages.
            parents = {enc.parent for enc in fitting if isinstance(enc.parent, int)}
            _try_to_make_room(connection, over, parents, ahead=_ahead(quota))
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
        over = stored_bytes(connection) + _incoming(connection, [new]) - quota
        keep = {new.parent} if isinstance(new.parent, int) else ()
        most = quota // loose.SHARE if new.kind in loose.SEALED else quota
        if new.nbytes > most or (over > 0 and not _try_to_make_room(connection, over, keep, ahead=_ahead(quota))):
            return CheckpointResult(None, why_not=f"the quota of {quota} bytes has no room for it yet")
    return checkpoint_rows.insert_checkpoints(connection, [new], [])[0]


def _ahead(quota: int) -> int:
    return min(int(quota * _AHEAD), _MOST_AHEAD)


def _incoming(connection: Connection, new: Iterable[EncodedCheckpoint]) -> int:
    """Count the bytes that are not stored already."""
    nbytes = 0
    for enc in new:
        if checkpoint_rows.named_as(connection, enc, enc.key) is None:
            nbytes += enc.nbytes
    return nbytes


def _try_to_make_room(connection: Connection, needed: int, keep: Collection[int], *, ahead: int = 0) -> bool:
    """Free `needed` bytes, or nothing if that is not possible. Return True if they were freed."""
    s = session_table.c
    pinned = connection.execute(select(func.sum(s.own_nbytes)).where(s.pinned.is_(True))).scalar() or 0
    if needed > stored_bytes(connection) - pinned:
        return False
    attempt = connection.begin_nested()
    freed = make_room(connection, needed, keep, ahead=ahead, dry_run=True)
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
        if over <= 0 or _try_to_make_room(connection, over, set(made) - gone):
            break
    else:
        make_room(connection, stored_bytes(connection) - quota)
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
