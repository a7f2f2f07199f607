"""Checkpoints that no turn links to: of requests that store no conversation, or written ahead of a turn.

They stay for a while after their last use, and take a share of the quota at most. Here is which of them give way first.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Integer, and_, cast, false, func, or_, select

from ssmd.sessions.checkpoint import FIRST_NAME, IN_MEMORY, SEALS
from ssmd.sessions.rows.checkpoints import sweep, use
from ssmd.sessions.rows.schema import checkpoint, turn_checkpoint

SHARE = 8  # unlinked checkpoints may take 1/SHARE of the quota
THIN = 8  # of a conversation, states that are 1/THIN of their position or less from the next ones go first
_AHEAD = 16  # 1/_AHEAD of the share is freed beyond the need: to put many states in order takes time
_UNBOUNDED = 1 << 30  # bytes that they may take without a quota
SEALED = tuple(seal.kind for seal in SEALS)

_c = checkpoint.c
_LINKS = select(turn_checkpoint.c.checkpoint).where(turn_checkpoint.c.checkpoint == _c.id)
_IS_SEALED = (_c.key >= FIRST_NAME, _c.kind.in_(SEALED))  # found by the index of keys
_NUMBERS = (_c.parent, _c.position, _c.created_at, _c.last_used_at, _c.recurrent_nbytes, _c.rows_nbytes)
_FACTS = select(_c.id, _c.owner, *(cast(n, Integer).label(n.name) for n in _NUMBERS))  # altered ones are some number
_LOOSE = _FACTS.where(~_LINKS.exists(), _c.kind.not_in(SEALED))
_SEALED_ONES = _FACTS.where(*_IS_SEALED)


def bound(
    connection: Connection,
    quota: int | None,
    used: Collection[int],
    made: Collection[int],
    keep: Collection[int],
    *,
    sealed: bool = False,
) -> int:
    """Delete the least recently used unlinked checkpoints while they exceed their share. Return how many.

    The owner that has most of them gives up first, so that one client cannot push out what another one left.
    used, made: ids of the checkpoints that one request just went on from, or made again, and of its new ones. keep: ids
    of those whose turn may still come. sealed: of the sealed ones, which have a share of their own.
    """
    use(connection, used, made)
    most = _UNBOUNDED if quota is None else quota // SHARE
    which = (_SEALED_ONES if sealed else _LOOSE).subquery()
    if (connection.scalar(select(func.sum(which.c.recurrent_nbytes + which.c.rows_nbytes))) or 0) <= most:
        return 0
    order = in_order(connection, sealed=sealed)
    nbytes, gone = sum(one.nbytes for one in order), list[int]()
    for one in largest_first(order):
        if nbytes <= most - most // _AHEAD:
            break
        if one.id not in keep:
            nbytes -= one.nbytes
            gone.append(one.id)
    sweep(connection, gone)
    return len(gone)


def largest_first(order: Sequence[LooseCheckpoint]) -> Iterator[LooseCheckpoint]:
    """Yield each owner's checkpoints in their order; the next one is always of the owner that has most bytes left."""
    held, loose = Counter[str](), dict[str, deque[LooseCheckpoint]]()
    for one in order:
        held[one.owner] += one.nbytes
        loose.setdefault(one.owner, deque()).append(one)
    while loose:
        owner = max(loose, key=lambda one: held[one])
        one = loose[owner].popleft()
        if not loose[owner]:
            del loose[owner]
        held[owner] -= one.nbytes
        yield one


@dataclass(frozen=True)
class LooseCheckpoint:
    """A checkpoint that no turn links to."""

    id: int
    owner: str
    recurrent_nbytes: int
    nbytes: int  # freed by its removal, if those that come before it in the order are removed


def in_order(connection: Connection, *, sealed: bool) -> list[LooseCheckpoint]:
    """Return the sealed checkpoints, or all others that no turn links to, in the order in which they give way.

    Each conversation is thinned first: of states that lie close to one another the later ones stay, as the next request
    starts from them. Then conversations go, the least recently used first, and the end of each is last. In both steps
    states that no request came back to go before others. But states that are only rows go from their end: to remove one
    that others grew from would free nothing.
    """
    rows = {row.id: row for row in connection.execute(_SEALED_ONES if sealed else _LOOSE).all()}
    used = {number: row.last_used_at for number, row in rows.items()}
    came_back = {number: row.last_used_at != row.created_at for number, row in rows.items()}
    above = {n: row.parent if row.parent in rows and row.parent < n else None for n, row in rows.items()}
    below: dict[int, dict[int, None]] = {number: {} for number in rows}
    kept = {number: row.rows_nbytes for number, row in rows.items()}  # bytes of rows that go with the last of its heirs
    for number in sorted(rows, reverse=True):  # children before their parents
        parent = above[number]
        if parent is not None:
            used[parent] = max(used[parent], used[number])
            below[parent][number] = None
    order: list[LooseCheckpoint] = []

    def give(number: int) -> None:
        heirs, parent = below.pop(number), above[number]
        freed = rows[number].recurrent_nbytes
        if heirs:
            kept[min(heirs)] += kept[number]
        else:
            freed += kept[number]
        for heir in heirs:
            above[heir] = parent
        if parent is not None:
            below[parent].pop(number, None)
            below[parent] |= heirs
        order.append(LooseCheckpoint(number, rows[number].owner, rows[number].recurrent_nbytes, freed))

    def gap(number: int, end: int) -> int:
        """Return the tokens from the state above one to a position."""
        parent = above[number]
        return end - (0 if parent is None else rows[parent].position)

    for row in sorted(rows.values(), key=lambda row: (came_back[row.id], used[row.id], row.position, row.id)):
        nearest = min((rows[heir].position for heir in below[row.id]), default=None)
        if row.recurrent_nbytes and nearest is not None and gap(row.id, nearest) * THIN <= row.position:
            give(row.id)

    def turn_of(number: int) -> tuple[int, bool, bool, float, int]:
        row = rows[number]
        if not row.recurrent_nbytes:
            return used[number], False, False, -row.position, number
        is_end, apart = not below[number], gap(number, row.position) / max(1, row.position)
        return used[number], is_end, came_back[number], apart, number

    for number in sorted(below, key=turn_of):
        give(number)
    return order


def unlinked(connection: Connection, unused_s: float = 0.0, sealed_s: float = 0.0) -> list[int]:
    """List the checkpoints that no turn links to and that were not used in the last `unused_s` seconds.

    sealed_s: the same for sealed ones.
    """
    links = select(turn_checkpoint.c.checkpoint).where(turn_checkpoint.c.checkpoint == _c.id)
    now = time.time_ns() // 1000

    def fresh(seconds: float) -> Any:  # a clock may be set back
        margin = int(seconds * 1e6)
        return _c.last_used_at.between(now - margin, now + margin) if margin else false()

    kept = or_(and_(_c.kind.in_(SEALED), fresh(sealed_s)), and_(_c.kind.not_in(SEALED), fresh(unused_s)))
    return list(connection.scalars(select(_c.id).where(~links.exists(), ~kept)))


def of_other_processes(connection: Connection, before: int) -> list[int]:
    """List the checkpoints that were sealed for the memory of a process before a time, microseconds since 1970.

    Also those of a time that is still to come: the clock was set back since.
    """
    own = _c.created_at.between(before, time.time_ns() // 1000)
    return list(connection.scalars(select(_c.id).where(*_IS_SEALED, _c.kind == IN_MEMORY.kind, ~own)))


def sealed_of_others(connection: Connection, owners: Collection[str]) -> list[int]:
    """List the sealed checkpoints of all owners but these."""
    rows = connection.execute(select(_c.id, _c.owner).where(*_IS_SEALED)).all()
    return [row.id for row in rows if row.owner not in owners]
