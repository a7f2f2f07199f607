"""Turns on a device that several programs share: one step each, in the order in which they ask.

Two programs at once on the same cores are slower than one after the other: their threads wait for one another in turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class Turns:
    """Gives out turns: `with turns:` is around whatever computes. Who asks again at once comes after those who wait."""

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
        mine.acquire()  # released by whoever was before

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    def join(self, who: object, wake: Callable[[], None]) -> None:
        """Be one of those who share. wake: called when the others have nothing to do any more."""
        with self._lock:
            self._idle[who] = wake

    def leave(self, who: object) -> None:
        """Be none of them any more."""
        self.idle(who)
        with self._lock:
            self._idle.pop(who, None)

    def busy(self, who: object) -> None:
        """Have requests to answer, from now on: others do nothing that nobody waits for."""
        with self._lock:
            if who in self._idle:
                self._busy[who] = self._idle.pop(who)

    def idle(self, who: object) -> None:
        """Have none, from now on."""
        with self._lock:
            if who not in self._busy:
                return
            self._idle[who] = self._busy.pop(who)
            woken = [] if self._busy else [wake for other, wake in self._idle.items() if other is not who]
        for wake in woken:
            wake()

    def others_busy(self, who: object) -> bool:
        """Whether any of the others has requests to answer."""
        return len(self._busy) > (who in self._busy)
