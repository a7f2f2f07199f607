"""Sharing among clients: the queue in which they take turns, fair shares of the device, and one reading for several.

A single client gets the whole device. While several clients have answers under way, each gets a token in every step.
A client with more answers gets more tokens only while the step stays about as short. Prompts that a client sends
without end are prefilled in a small part of the time, so that most steps of the others stay as short as without them.

A prompt that begins like one under way waits for it, and goes on from a copy of its state. Without it two requests with
one beginning read the same tokens twice, each at half the speed. Only requests of one trust domain share: no client
learns from times that another one asked the same. A copy is taken where prefill stops in any case, so that no result
depends on company.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ssmd.engine.decode.choice import Choice
from ssmd.engine.decode.generation import Generation
from ssmd.engine.prompt.planner import Prompt
from ssmd.engine.terms import Rejection
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program

SHARED = 256  # tokens that a shared reading saves at the least
CREDIT_S = 1.0  # s of prefill that a client may take at once beside others' answers
REFILL = 0.03  # s of credit per s: a 64-token piece takes as long as a step for two, so one step in 30 has one
FAIR = 1.25  # bound of a step with more than a token for each client, in steps for one
Open = tuple[Generation, Choice]
RETRY_AFTER_S = 5  # s, if the queue's speed is not known
_MOST_RETRY_AFTER_S = 60
_PART_FREE = 8  # part of the places, 1 in this many, that should be free when a refused client retries
_TIMED = 32  # latest requests that left the queue, from which its speed is estimated


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


class FairShare:
    """The device's shares by client. For the worker only.

    max_running: choices that decode at once.
    spare_choices: lanes beside these, one for each client that has none.
    step_cost: cost of a decode step, by the number of choices in it; with one choice it is 1.
    """

    def __init__(self, max_running: int, spare_choices: int = 1, step_cost: Callable[[int], float] = float) -> None:
        self._max_running = max_running
        self._spare_choices = spare_choices
        self._step_cost = step_cost
        self._turns: dict[str, int] = {}
        self._credit: dict[str, tuple[float, float, float]] = {}  # by client: s left, at which time, s of last piece

    def served(self, running: Sequence[Generation], in_use: int) -> frozenset[str] | None:
        """Return the clients that get no lane now, beside `in_use` lanes; None if no client gets one.

        Spare lanes are for clients that have nothing running. So none of them waits for the end of another client's
        answer, which may be far.
        """
        if in_use < self._max_running:
            return frozenset()
        if in_use < self._max_running + self._spare_choices:
            return frozenset(g.asked.request.client for g in running)
        return None

    def choices(self, unended: Sequence[Open], beside: int = 0) -> Sequence[Open]:
        """Pick the choices that get a token in this step: all of them, if there is a single client.

        Of several clients each gets one token, for its choices in turn. Further choices are added in turn while the
        step costs no more than with those, or than FAIR.
        beside: tokens that are in the step already.
        """
        by_client: dict[str, list[Open]] = {}
        for g, choice in unended:
            by_client.setdefault(g.asked.request.client, []).append((g, choice))
        if len(by_client) < 2:
            return unended
        self._turns = {client: self._turns.get(client, 0) for client in by_client}
        most = max(self._step_cost(beside + len(by_client)), FAIR)
        chosen: list[Open] = []
        for place in range(max(map(len, by_client.values()))):
            for client, mine in by_client.items():
                if place < len(mine) and (place == 0 or self._step_cost(beside + len(chosen) + 1) <= most):
                    chosen.append(mine[self._turns[client] % len(mine)])
                    self._turns[client] += 1
        return chosen

    def in_turn(self, reading: Sequence[Generation]) -> list[Generation]:
        """Order the prefilling requests so that clients alternate: least recently served first.

        Of one client's requests the older come first. An agent asks for a title beside its real request: the title's
        prompt is short, so it is planned sooner, and would be prefilled first.
        """

        def turn(g: Generation) -> tuple[float, float]:
            known = self._credit.get(g.asked.request.client)
            return g.asked.started if known is None else known[1], g.asked.started

        return sorted(reading, key=turn)

    def may_read(self, g: Generation, decoding: Sequence[Generation], more_wait: bool) -> bool:
        """Return True if a piece of this prompt may be prefilled now, beside the answers under way.

        A client may while it has credit. If more of its requests wait in the queue (`more_wait`), it may at the pace of
        the refill: a client that asks for more lanes than there are spends no credit on that.
        """
        client = g.asked.request.client
        known = self._credit.get(client)
        if known is None or all(other.asked.request.client == client for other in decoding):
            return True
        now = time.perf_counter()
        if more_wait:
            return REFILL * (now - known[1]) >= known[2]
        return self._at(known, now) > 0

    def spend(self, g: Generation, seconds: float) -> None:
        """Charge a client for prefill time, even when no other client waits.

        So a flood has no credit left when another client comes. A client owes at most the time of its last piece.
        """
        client, now = g.asked.request.client, time.perf_counter()
        self._credit = {c: known for c, known in self._credit.items() if self._at(known, now) < CREDIT_S}
        left = self._at(self._credit[client], now) if client in self._credit else CREDIT_S
        self._credit[client] = (max(-seconds, left - seconds), now, seconds)

    @staticmethod
    def _at(known: tuple[float, float, float], now: float) -> float:
        return min(CREDIT_S, known[0] + REFILL * (now - known[1]))


class Queue:
    """Requests that wait for the worker. Thread-safe.

    Round robin by client: a client with many requests does not delay the others. Of one client's requests the one that
    came first is next, even if it was planned later. In a full queue, a client with few
    requests gets the place of the newest request of the client with the most.

    draining: new requests are refused. closing: the worker is to stop.
    """

    def __init__(self, limit: int) -> None:
        """Make an empty queue, in which at most `limit` requests may wait."""
        self.draining = self.closing = False
        self._limit = limit
        self._changed = threading.Condition()  # over a lock that its holder may take again
        self._waiting: dict[str, deque[Generation]] = {}  # by client; the next one to serve is first
        self._count = 0
        self._departed: deque[Generation] = deque()
        self._taken: deque[float] = deque(maxlen=_TIMED)  # monotonic s of each take since the queue was last empty
        self.unfinished = 0  # accepted requests whose clients have not got the last event yet

    def __len__(self) -> int:
        """Return how many requests wait."""
        return self._count

    def check(self, client: str) -> None:
        """Raise Rejection if a request of this client would not be accepted now."""
        with self._changed:
            if self.draining:
                raise unavailable("the server is shutting down", "shutting_down")
            if self._count >= self._limit and self._with_most(client) is None:
                raise self._full()

    def put(self, generation: Generation) -> None:
        """Add a request. It may push out the newest one of another client. Raises Rejection."""
        client = generation.asked.request.client
        with self._changed:
            self.check(client)
            if self._count >= self._limit and (most := self._with_most(client)) is not None:
                last = self._waiting[most][-1]
                last.progress.error = self._full()
                self._give_up(last)
            insort(self._waiting.setdefault(client, deque()), generation, key=_came)
            self._count += 1
            self.unfinished += 1
            self._changed.notify_all()

    def has(self, client: str) -> bool:
        """Return True if a request of this client waits."""
        return client in self._waiting

    def waits(self, without: frozenset[str]) -> bool:
        """Return True if a request waits whose client is not in `without`."""
        return any(client not in without for client in tuple(self._waiting))

    def waiting(self) -> list[Generation]:
        """Return the requests that wait, by client."""
        with self._changed:
            return [g for mine in self._waiting.values() for g in mine]

    def take(self, without: frozenset[str] = frozenset()) -> Generation | None:
        """Take the next request, if there is one. For the worker only.

        without: clients that are passed over.
        """
        with self._changed:
            client = next((client for client in self._waiting if client not in without), None)
            if client is None:
                return None
            mine = self._waiting.pop(client)
            found = mine.popleft()
            if mine:
                self._waiting[client] = mine  # behind all others
            self._count -= 1
            self._taken.append(time.monotonic())
            if not self._count:
                self._taken.clear()
            return found

    def recall(self) -> list[Generation]:
        """Take out and return the waiting requests whose callers take them back."""
        with self._changed:
            found = [g for mine in self._waiting.values() for g in mine if g.asked.recallable]
            for g in found:
                self._take_out(g)
                g.recalled = True
            self.unfinished -= len(found)
            self._changed.notify_all()
            return found

    def leave(self, generation: Generation) -> None:
        """Drop a waiting request whose client left. Does nothing if the worker has taken it."""
        with self._changed:
            if generation in self._waiting.get(generation.asked.request.client, ()):
                self._give_up(generation)
                self._changed.notify_all()

    @property
    def any_departed(self) -> bool:
        """Return True if `departed` has a request."""
        return bool(self._departed)

    def departed(self) -> Generation | None:
        """Take a request that lost or gave up its place, to send its last event; None if no request did.

        For the worker only.
        """
        return self._departed.popleft() if self._departed else None

    def told(self) -> None:
        """Note that the client of a request got its last event."""
        with self._changed:
            self.unfinished -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake `wait`: its condition may have changed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Wait until `until` is true, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(until, timeout=timeout)

    def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait `grace_s` seconds for the others to end, then have the worker stop."""
        with self._changed:
            self.draining = True
            self._changed.wait_for(lambda: self.unfinished == 0, timeout=grace_s)
            self.closing = True
            self._changed.notify_all()

    def _give_up(self, generation: Generation) -> None:
        self._take_out(generation)
        self._departed.append(generation)

    def _take_out(self, generation: Generation) -> None:
        client = generation.asked.request.client
        self._waiting[client].remove(generation)
        if not self._waiting[client]:
            del self._waiting[client]
        self._count -= 1

    def _with_most(self, client: str) -> str | None:
        """Return the client whose newest request gives way to one of `client`.

        None if no client would still have more requests left than `client` has.
        """
        if not self._waiting:
            return None
        most = max(self._waiting, key=lambda other: len(self._waiting[other]))
        return most if len(self._waiting[most]) > len(self._waiting.get(client, ())) + 1 else None

    def _full(self) -> Rejection:
        after_s = self._retry_after_s()
        return unavailable(
            "Too many requests: the server is overloaded and its request queue is full "
            f"({self._limit} requests are waiting already). Please try again in {after_s} seconds.",
            "queue_full",
            after_s,
        )

    def _retry_after_s(self) -> int:
        """Estimate after how many seconds some places are free, by the time that the last requests took."""
        taken = list(self._taken)
        if len(taken) < 2:
            return RETRY_AFTER_S
        each_s = (time.monotonic() - taken[0]) / len(taken)
        return min(_MOST_RETRY_AFTER_S, max(1, math.ceil(each_s * self._limit / _PART_FREE)))


def _came(generation: Generation) -> float:
    """Return when a request came, in seconds of perf_counter."""
    return generation.asked.started


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> Rejection:
    return Rejection(message, status=503, code=code, retry_after_s=retry_after_s)
