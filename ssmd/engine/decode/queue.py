"""The queue: it accepts requests, holds them until the worker takes them, and knows when the last one was answered."""

from __future__ import annotations

import math
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable

from ssmd.engine.decode.generation import Generation
from ssmd.engine.terms import Rejection

RETRY_AFTER_S = 5  # s, if the queue's speed is not known
_MOST_RETRY_AFTER_S = 60
_PART_FREE = 8  # part of the places, 1 in this many, that should be free when a refused client retries
_TIMED = 32  # latest requests that left the queue, from which its speed is estimated


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
