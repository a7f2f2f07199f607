"""Shared reading: a prompt that begins like one under way waits for it, and goes on from a copy of its state.

Without it two requests with one beginning read the same tokens twice, each at half the speed. Only requests of one
trust domain share: no client learns from times that another one asked the same. A copy is taken where prefill stops in
any case, so that no result depends on company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ssmd.engine.decode.generation import Generation
from ssmd.engine.prompt.planner import Prompt
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program

SHARED = 256  # tokens that a shared reading saves at the least


class SharedReading:
    """Requests that follow the reading of others. For the worker only.

    A request follows only those that were admitted before it began, and none that follows it. So one of them always
    reads.
    """

    def __init__(
        self,
        program: Program,
        running: Sequence[Generation],
        guarded: Callable[[Sequence[Generation], Callable[[], None]], None],
    ) -> None:
        """running: the admitted requests, as the worker keeps them.

        guarded: runs work, and ends these requests if it fails.
        """
        self._program, self._running, self._guarded = program, running, guarded
        self._cell = buckets.grid(program.buckets)
        # By follower: the request whose reading it follows, and the position at which it takes a copy of the state.
        self._followed: dict[Generation, tuple[Generation, int]] = {}

    def begin(self, g: Generation) -> None:
        """Begin an admitted request: it follows another one's reading, or its own state is restored.

        A request that has passed the common beginning already writes its states at once, for a look-up of this one.
        """
        mine = _found(g)
        if len(g.prompt.ids) - mine <= SHARED:
            g.kept.restore()
            return
        alike = [(self._common(one, g), one) for one in self._running if self._may_lead(one, g)]
        alike = [(at, one) for at, one in alike if at - mine >= SHARED]
        at, leader = max(alike, key=lambda found: found[0], default=(0, None))
        if leader is not None and mine <= _read(leader) <= at:
            self._followed[g] = leader, at
            self.give(leader)
            return
        for _, one in alike:
            one.kept.publish()
        g.kept.restore(again=bool(alike))

    def reader(self, g: Generation) -> Generation | None:
        """Return the request whose prompt is read next for this one, mostly itself; None while a state is restored."""
        while g in self._followed:
            g = self._followed[g][0]
        return g if g.kept.ready() else None

    def stop(self, g: Generation) -> int | None:
        """Return the next position at which a follower takes a copy of a request's state; None without a follower."""
        if not self._followed:
            return None
        places = (at for leader, at in self._followed.values() if leader is g)
        return min((at for at in places if at > g.progress.position), default=None)

    def give(self, g: Generation) -> None:
        """Give a request's state to the followers that wait for its present position."""
        for one in self._followers(g):
            at = self._followed[one][1]
            if g.progress.handle is None or g.progress.position < at:
                continue
            del self._followed[one]
            # Its restored state may be deeper than was known, or its prompt may have been rendered again.
            good = g.progress.position == at <= self._common(g, one) and g.kept.shareable
            self._guarded([one], partial(self._take, one, g) if good else partial(self.begin, one))

    def leave(self, g: Generation) -> None:
        """Hand the reading of a cancelled request on. One follower goes on from its state, the others follow that."""
        if not self._followed:
            return
        self._followed.pop(g, None)
        followers = self._followers(g)
        places = [self._followed.pop(one)[1] for one in followers]
        for one, at in zip(followers, places, strict=True):
            position = g.progress.position
            fits = _found(one) < position <= min(at, self._common(g, one))
            if g.progress.handle is not None and fits and not one.cancelled and g.kept.shareable:
                self._guarded([one], partial(self._take, one, g))
                followers.remove(one)
                break
        for one in followers:
            self._guarded([one], partial(self.begin, one))

    def settle(self) -> None:
        """Forget the requests that have ended. Their followers begin anew."""
        if not self._followed:
            return
        self._followed = {g: found for g, found in self._followed.items() if g in self._running}
        left = [g for g, (leader, _) in self._followed.items() if leader not in self._running]
        for g in left:
            del self._followed[g]
        for g in left:
            self._guarded([g], partial(self.begin, g))

    def _followers(self, g: Generation) -> list[Generation]:
        if not self._followed:
            return []
        return [one for one, (leader, _) in self._followed.items() if leader is g]

    def _may_lead(self, one: Generation, g: Generation) -> bool:
        """Return True if a request's states may serve another one, and it does not wait for that one itself."""
        at: Generation | None = one
        while at is not None and at is not g:
            at = self._followed[at][0] if at in self._followed else None
        mine, its = g.asked.request.domain, one.asked.request.domain
        return at is not g and mine == its and not one.cancelled and one.kept.shareable

    def _common(self, one: Generation, g: Generation) -> int:
        return common(one.prompt, g.prompt, self._cell)

    def _take(self, g: Generation, leader: Generation) -> None:
        """Let a request go on from a copy of the leader's state, and its followers from that."""
        p, its = g.progress, leader.progress
        p.handle, p.position = self._program.clone(its.handle), its.position
        p.resume = "exact" if its.resume == "none" else its.resume
        g.kept.grow_from(leader.kept, p.handle, p.position, its.prefill_ms / max(1, its.fed))
        self.give(g)


def common(one: Prompt, other: Prompt, cell: int) -> int:
    """Count the tokens after which a state of one prompt is, bit by bit, that of the other. A multiple of `cell`.

    Prefill stops on the grid and at the end of a system prompt. Behind an end that only one of them has, states differ
    in bits. The last token of each is decoded, not prefilled.
    """
    a, b = one.ids, other.ids
    start, last = max(a.start, b.start), min(len(a), len(b)) - 1
    if start > last or (start and a.hash(start) != b.hash(start)):
        return 0
    differing = np.flatnonzero(a.since(start)[: last - start] != b.since(start)[: last - start])
    shared = start + int(differing[0]) if len(differing) else last
    if one.system != other.system:
        shared = min([shared, *(end for end in (one.system, other.system) if end % cell)])
    return shared - shared % cell


def _found(g: Generation) -> int:
    found = g.prompt.found
    return 0 if found is None else found.start


def _read(g: Generation) -> int:
    """Return the position that a request has read to, or that it is to start from."""
    p = g.progress
    return p.position if p.handle is not None or p.choices else _found(g)
