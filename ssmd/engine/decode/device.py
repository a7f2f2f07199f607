"""Turns on a device that several programs share: one step each, in the order in which they ask.

Two programs at once on the same cores are slower than one after the other: their threads wait for one another in turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class DeviceLock:
    """Gives out turns on the device, first come, first served: `with turns:` goes around each computation.

    A program that asks again at once comes after those that wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()
        self._busy: dict[object, Callable[[], None]] = {}
        self._idle: dict[object, Callable[[], None]] = {}

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()  # released by the thread that had the turn before

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    def join(self, who: object, wake: Callable[[], None]) -> None:
        """Add a sharer of the device. wake: called when no other one is busy any more."""
        with self._lock:
            self._idle[who] = wake

    def leave(self, who: object) -> None:
        """Remove a sharer."""
        self.idle(who)
        with self._lock:
            self._idle.pop(who, None)

    def busy(self, who: object) -> None:
        """Note that a sharer has requests. The others then do only work that a request waits for."""
        with self._lock:
            if who in self._idle:
                self._busy[who] = self._idle.pop(who)

    def idle(self, who: object) -> None:
        """Note that a sharer has no requests any more. Wakes the others if none is busy."""
        with self._lock:
            if who not in self._busy:
                return
            self._idle[who] = self._busy.pop(who)
            woken = [] if self._busy else [wake for other, wake in self._idle.items() if other is not who]
        for wake in woken:
            wake()

    def others_busy(self, who: object) -> bool:
        """Return True if another sharer has requests to answer."""
        return len(self._busy) > (who in self._busy)
