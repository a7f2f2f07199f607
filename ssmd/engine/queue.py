"""The queue: which requests are taken in, how they wait for the worker, and when the last of them has been answered."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ssmd.engine.generation import Generation
from ssmd.engine.request import Rejected

RETRY_AFTER_S = 5


class Queue:
    """Thread-safe. `draining`: nobody is taken in any more; `closing`: the worker is to stop."""

    def __init__(self, limit: int) -> None:
        """`limit`: how many may wait."""
        self.draining = self.closing = False
        self._limit = limit
        self._changed = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self.unfinished = 0  # taken in and not yet told the end

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def check(self) -> None:
        """Check that a request would be taken in now. Raises Rejected."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if len(self._waiting) >= self._limit:
            raise unavailable(f"{self._limit} requests are waiting already; try again later", "queue_full")

    def put(self, generation: Generation) -> None:
        """Take a request in, to wait for the worker. Raises Rejected."""
        with self._changed:
            self.check()
            self._waiting.append(generation)
            self.unfinished += 1
            self._changed.notify_all()

    def take(self) -> Generation:
        """The one that waits longest; there must be one. The worker's alone."""
        return self._waiting.popleft()

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


def unavailable(message: str, code: str) -> Rejected:
    return Rejected(message, status=503, code=code, retry_after_s=RETRY_AFTER_S)
