"""Retention: the checkpoints of all sessions together never take more than the quota. What goes first, and its going.

First the old checkpoints thin out, session by session, the one used least recently first. If that is not enough,
sessions are emptied of the rest in the same order. thinning.py knows which these are. Pinned sessions keep all. Turns
stay, and are read again where no checkpoint is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, bindparam, delete, exists, func, select, update

from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import tree
from ssmd.sessions.rows.checkpoints import Placed
from ssmd.sessions.rows.encoded import Encoded
from ssmd.sessions.rows.holding import (
    Held,
    add_stored_bytes,
    batches,
    count_again,
    read_holding,
    shared_among,
    sole_sharers,
    stored_bytes,
    write_sizes,
)
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, segment, turn, turn_checkpoint
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.thinning import NEWEST, Ledger

EVERYTHING, THINNED, NOTHING = 0, 1, 2  # session.retained: what retention has left of it since its last turn
PART_BYTES = 256 << 20  # that a collection frees in one transaction: as much goes through the log
_AHEAD, _MOST_AHEAD = 1 / 16, 32 << 20  # of the quota, and bytes, that a commit thins out beyond what it needs
_COUNT_AT_ONCE = 4  # a session of so few turns is counted within its commit
# Built once: putting a statement together takes longer than running it.
_s = session_table.c
_OTHERS = exists().where(
    turn_checkpoint.c.checkpoint == checkpoint.c.id, turn_checkpoint.c.turn.not_in(bindparam("turns", expanding=True))
)
_ONLY_OF = select(func.sum(checkpoint.c.recurrent_nbytes + checkpoint.c.rows_nbytes)).where(
    checkpoint.c.id.in_(bindparam("there", expanding=True)), ~_OTHERS
)
_NUMBER_OF_TURNS = select(_s.turns).where(_s.id == bindparam("session"))
_GROWN = (
    update(session_table)
    .where(_s.id == bindparam("session"))
    .values(retained=bindparam("left"), own_nbytes=_s.own_nbytes + bindparam("fresh"))
)


@dataclass
class Freed:
    """What went. sessions: bytes and checkpoints that each session let go of."""

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
class Collected:
    """What a collection let go of. sessions: (bytes, checkpoints) by session. left: bytes of checkpoints stored now."""

    quota: int | None
    nbytes: int = 0
    checkpoints: int = 0
    sessions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    left: int = 0

    def and_then(self, more: Collected) -> Collected:
        sessions = dict(self.sessions)
        for one, (nbytes, count) in more.sessions.items():
            before = sessions.get(one, (0, 0))
            sessions[one] = (before[0] + nbytes, before[1] + count)
        return Collected(
            self.quota, self.nbytes + more.nbytes, self.checkpoints + more.checkpoints, sessions, more.left
        )


def reopen(connection: Connection, sessions: Collection[str]) -> None:
    """These sessions may have something to give again, and other sizes."""
    count_again(connection, sessions)
    for some in batches(sorted(sessions)):
        connection.execute(update(session_table).where(session_table.c.id.in_(some)).values(retained=EVERYTHING))


def loosen(connection: Connection, session_id: str) -> None:
    """A session is not pinned any more: nor is what it began with, if it is a fork."""
    t = turn.c
    owners = select(t.session).where(t.id.in_(tree.inherited(session_id)), t.session != session_id).distinct()
    reopen(connection, list(connection.scalars(owners)))


def collect(connection: Connection, quota: int | None, *, dry_run: bool) -> Collected:
    """One transaction's part of bringing the store down to the quota; with `dry_run` all of it, and then nothing."""
    before = stored_bytes(connection)
    over = 0 if quota is None else before - quota
    if over <= 0:
        return Collected(quota, left=before)
    attempt = connection.begin_nested()
    freed = make_room(connection, over if dry_run else min(over, PART_BYTES), dry_run=dry_run)
    attempt.rollback() if dry_run else attempt.commit()
    return Collected(quota, freed.nbytes, len(freed.checkpoints), freed.sessions, before - freed.nbytes)


def make_room(
    connection: Connection, needed: int, keep: Collection[int] = (), *, ahead: int = 0, dry_run: bool = False
) -> Freed:
    """Let checkpoints go until `needed` bytes are free, or nothing but pinned sessions and `keep` is left.

    Takes time that grows with what goes, not with the store: sessions remember what was taken from them already.
    ahead: so many bytes more are thinned out at once, as looking through a session takes time that grows with its
    turns. dry_run: only links are removed, and the caller rolls back.
    """
    freed = Freed()
    s = session_table.c
    for level in (EVERYTHING, THINNED):
        ready = select(s.id).where(s.pinned.is_(False), s.retained == level).order_by(s.last_used_at, s.id)
        passed: list[str] = []  # those that `keep` holds back
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


def _take(
    connection: Connection, session_id: str, level: int, needed: int, keep: Collection[int], freed: Freed
) -> bool:
    """Take checkpoints from one session. True if it has nothing more to give at this level."""
    holding = read_holding(connection, session_id)
    ledger = Ledger(holding)
    enough = (ledger.thin if level == EVERYTHING else ledger.empty)(holding, needed, keep)
    mine = session_table.c.id == session_id
    if ledger.gone:
        _unlink(connection, session_id, ledger.gone)
        # Not subtracted: what became free may have been another session's too when it was counted.
        shared = [held.id for held in ledger.gone if held.shared]
        count_again(connection, {session_id, *sole_sharers(connection, shared, session_id)})
    freed.add(session_id, ledger)
    if enough or (level == THINNED and any(held.id in keep for held in holding.checkpoints)):
        return False
    connection.execute(update(session_table).where(mine).values(retained=level + 1))
    return True


def empty(connection: Connection, session_id: str) -> int:
    """Let a part of a session's checkpoints go, pinned or not, as it is to be removed; bytes that were freed."""
    freed = Freed()
    _take(connection, session_id, THINNED, PART_BYTES, (), freed)
    _remove(connection, freed)
    return freed.nbytes


def _unlink(connection: Connection, session_id: str, gone: Sequence[Held]) -> None:
    mine = select(turn.c.id).where(turn.c.session == session_id)
    link = turn_checkpoint.c
    for some in batches([held.id for held in gone]):
        connection.execute(delete(turn_checkpoint).where(link.checkpoint.in_(some), link.turn.in_(mine)))
    for some in batches([held.id for held in gone if not held.shared]):
        connection.execute(delete(checkpoint_segment).where(checkpoint_segment.c.checkpoint.in_(some)))


def _remove(connection: Connection, freed: Freed) -> None:
    for some in batches(freed.checkpoints):
        connection.execute(delete(checkpoint).where(checkpoint.c.id.in_(some)))
    for some in batches(freed.segments):
        connection.execute(delete(segment).where(segment.c.id.in_(some)))
    add_stored_bytes(connection, -freed.nbytes)


def place(
    connection: Connection, new: Sequence[Encoded], turns: Sequence[str], session_id: str, quota: int | None
) -> list[Placed]:
    """Write checkpoints of a session and link them to its turns, and make room for them: the quota holds afterwards.

    Where pinned sessions leave no room, the newest of them is kept if it fits, else none; `Placed.why_not` says so.
    """
    if not new:
        return []
    too_large = [quota is not None and enc.nbytes > quota for enc in new]
    fitting = [enc for enc, no in zip(new, too_large, strict=True) if not no]
    if quota is not None:
        over = stored_bytes(connection) + _incoming(connection, fitting) - quota
        if over > 0:
            # Before they are written, so that they take the pages that become free.
            parents = {enc.parent for enc in fitting if isinstance(enc.parent, int)}
            _try_to_make_room(connection, over, parents, ahead=_ahead(quota))
    placed = checkpoint_rows.insert_checkpoints(connection, fitting, turns)
    _book(connection, session_id, fitting, placed, [*turns, *(enc.turn for enc in new if enc.turn is not None)])
    if quota is not None and stored_bytes(connection) > quota:
        placed = _squeeze(connection, placed, session_id, quota)
    rest = iter(placed)
    refused = Placed(None, why_not=f"it is larger than the quota of {quota} bytes")
    return [refused if no else next(rest) for no in too_large]


def place_ahead(connection: Connection, new: Encoded, quota: int | None) -> Placed:
    """Write a checkpoint before its turn, if there is room or room can be made. Until a turn links to it, it stays."""
    if quota is not None:
        over = stored_bytes(connection) + _incoming(connection, [new]) - quota
        keep = {new.parent} if isinstance(new.parent, int) else ()
        if new.nbytes > quota or (over > 0 and not _try_to_make_room(connection, over, keep, ahead=_ahead(quota))):
            return Placed(None, why_not=f"the quota of {quota} bytes has no room for it yet")
    return checkpoint_rows.insert_checkpoints(connection, [new], [])[0]


def _ahead(quota: int) -> int:
    return min(int(quota * _AHEAD), _MOST_AHEAD)


def _incoming(connection: Connection, new: Iterable[Encoded]) -> int:
    """Bytes that are not stored already."""
    nbytes = 0
    for enc in new:
        if checkpoint_rows.named_as(connection, enc, enc.key) is None:
            nbytes += enc.nbytes
    return nbytes


def _try_to_make_room(connection: Connection, needed: int, keep: Collection[int], *, ahead: int = 0) -> bool:
    """All of it or nothing."""
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


def _adopted(connection: Connection, placed: Sequence[Placed], turns: Sequence[str]) -> int:
    """Bytes of checkpoints that were written ahead, for these turns."""
    fresh = {p.id for p in placed if not p.was_there}
    there = [p.id for p in placed if p.was_there and p.id is not None and p.id not in fresh]
    return (connection.scalar(_ONLY_OF, {"there": there, "turns": turns}) or 0) if there else 0


def _book(
    connection: Connection,
    session_id: str,
    new: Sequence[Encoded],
    placed: Sequence[Placed],
    linked_turns: Sequence[str],
) -> None:
    """The session grew: it has something to give again, and its sizes are other ones."""
    fresh = sum(p.nbytes for p in placed) + _adopted(connection, placed, linked_turns)
    (turns,) = connection.execute(_NUMBER_OF_TURNS, {"session": session_id}).one()
    left = EVERYTHING if turns > NEWEST else THINNED  # of so few nothing is thinned
    connection.execute(_GROWN, {"session": session_id, "left": left, "fresh": fresh})
    linked = {enc.parent for enc in new if isinstance(enc.parent, int)}
    linked |= {p.id for p in placed if p.was_there and p.id is not None}
    numbers = sorted(linked)
    if not shared_among(connection, numbers, session_id):
        return
    others = sole_sharers(connection, numbers, session_id)
    if turns <= _COUNT_AT_ONCE:
        count_again(connection, others)
        write_sizes(connection, session_id)
    else:
        count_again(connection, {session_id, *others})


def _squeeze(connection: Connection, placed: Sequence[Placed], session_id: str, quota: int) -> list[Placed]:
    """There was no room for all: make it for the last of the new ones, or do without."""
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
    return [Placed(None, why_not=why_not) if p.id in gone else p for p in placed]


def _drop(connection: Connection, session_id: str, numbers: Collection[int]) -> None:
    holding = read_holding(connection, session_id)
    ledger = Ledger(holding)
    for held in holding.checkpoints:
        if held.id in numbers:
            ledger.let_go(held)
    _unlink(connection, session_id, ledger.gone)
    freed = Freed()
    freed.add(session_id, ledger)
    _remove(connection, freed)
    count_again(connection, {session_id})
