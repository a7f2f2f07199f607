"""The queue: which requests are taken in, how they wait for the worker, and when the last of them has been answered."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from ssmd.engine.decode.generation import Generation
from ssmd.engine.terms import Rejected

RETRY_AFTER_S = 5  # where nothing is known of the queue's speed
_MOST_RETRY_AFTER_S = 60
_PART_FREE = 8  # who was refused comes back when one place in so many is free
_TIMED = 32  # requests whose leaving the queue tells how fast it moves


class Queue:
    """Thread-safe. Clients take turns: who asks much waits for the others, not they for him. When it is full a client
    with few gets the place of the newest request of the one with the most.

    `draining`: nobody is taken in any more; `closing`: the worker is to stop.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: how many may wait."""
        self.draining = self.closing = False
        self._limit = limit
        self._changed = threading.Condition()  # over a lock that who holds it may take again
        self._waiting: dict[str, deque[Generation]] = {}  # by client, whose turn it is first
        self._count = 0
        self._departed: deque[Generation] = deque()
        self._taken: deque[float] = deque(maxlen=_TIMED)  # when, since the queue was last empty
        self.unfinished = 0  # taken in and not yet told the end

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def check(self, client: str) -> None:
        """Check that a request of this client would be taken in now. Raises Rejected."""
        with self._changed:
            if self.draining:
                raise unavailable("the server is shutting down", "shutting_down")
            if self._count >= self._limit and self._with_most(client) is None:
                raise self._full()

    def put(self, generation: Generation) -> None:
        """Take a request in, to wait for the worker. Raises Rejected."""
        client = generation.asked.request.client
        with self._changed:
            self.check(client)
            if self._count >= self._limit and (most := self._with_most(client)) is not None:
                last = self._waiting[most][-1]
                last.progress.error = self._full()
                self._give_up(last)
            self._waiting.setdefault(client, deque()).append(generation)
            self._count += 1
            self.unfinished += 1
            self._changed.notify_all()

    def has(self, client: str) -> bool:
        """Whether one of this client's waits."""
        return client in self._waiting

    def waits(self, without: frozenset[str]) -> bool:
        """Whether one waits that is of none of these clients."""
        return any(client not in without for client in tuple(self._waiting))

    def waiting(self) -> list[Generation]:
        """Those that wait, by client."""
        with self._changed:
            return [g for mine in self._waiting.values() for g in mine]

    def take(self, without: frozenset[str] = frozenset()) -> Generation | None:
        """The next one, if there is one: of the client whose turn it is, but for these. The worker's alone."""
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
        """Take out those that wait and whose clients take them back, as if they had never come."""
        with self._changed:
            found = [g for mine in self._waiting.values() for g in mine if g.asked.recallable]
            for g in found:
                self._take_out(g)
                g.recalled = True
            self.unfinished -= len(found)
            self._changed.notify_all()
            return found

    def leave(self, generation: Generation) -> None:
        """Give up a place: nobody waits for the answer any more. Nothing, if the worker has it already."""
        with self._changed:
            if generation in self._waiting.get(generation.asked.request.client, ()):
                self._give_up(generation)
                self._changed.notify_all()

    @property
    def any_departed(self) -> bool:
        """Whether `departed` has one."""
        return bool(self._departed)

    def departed(self) -> Generation | None:
        """One of those that gave up their places, or lost them, to be told its end. The worker's alone."""
        return self._departed.popleft() if self._departed else None

    def told(self) -> None:
        """Note that a request that was taken in has been told its end."""
        with self._changed:
            self.unfinished -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake `wait`: something that it looks at may have changed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Wait until something is so, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(until, timeout=timeout)

    def drain(self, grace_s: float) -> None:
        """Take nobody in, wait `grace_s` seconds for the end of those there are, then have the worker stop."""
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
        """Whose newest gives way to one of this client; None where nobody would have more left than this one has."""
        if not self._waiting:
            return None
        most = max(self._waiting, key=lambda other: len(self._waiting[other]))
        return most if len(self._waiting[most]) > len(self._waiting.get(client, ())) + 1 else None

    def _full(self) -> Rejected:
        return unavailable(
            f"{self._limit} requests are waiting already; try again later", "queue_full", self._retry_after_s()
        )

    def _retry_after_s(self) -> int:
        """After how long some places are free, by how long the last ones took."""
        taken = list(self._taken)
        if len(taken) < 2:
            return RETRY_AFTER_S
        each_s = (time.monotonic() - taken[0]) / len(taken)
        return min(_MOST_RETRY_AFTER_S, max(1, math.ceil(each_s * self._limit / _PART_FREE)))


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> Rejected:
    return Rejected(message, status=503, code=code, retry_after_s=retry_after_s)
