"""The device between requests: turns on it that several programs share, and the warm-up while no request comes.

Two programs at once on the same cores are slower than one after the other: their threads wait for one another in turn.
Work that takes longer the first time is done once, step by step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from ssmd.engine.terms import Steps
from ssmd.runtime.protocol import Handle, Program

AFTER_S = 0.1  # s without a request before the first step; the others follow at once


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


class WarmUp:
    """Pieces of work that make the first request quick. A request waits for one step at most."""

    def __init__(self, pieces: Iterable[Steps] = ()) -> None:
        self._left = deque(pieces)
        self._patience = AFTER_S

    def __bool__(self) -> bool:
        """Return True if a piece is left."""
        return bool(self._left)

    @property
    def due_s(self) -> float | None:
        """Return how many seconds to wait for a request before the next step; None if no step is left."""
        return self._patience if self._left else None

    def step(self) -> None:
        """Do the next step. A step that fails ends its piece, not the later ones."""
        self._patience = 0.0
        try:
            next(self._left[0])
        except BaseException as err:
            self._left.popleft()
            if not isinstance(err, StopIteration):
                raise

    def cancel(self) -> None:
        """Drop the pieces that are left, as a request has come."""
        while self._left:
            self._left.popleft().close()


def once(work: Callable[[], object]) -> Steps:
    """Make a piece of one step."""
    work()
    yield


def run_tokens(program: Program, tokens: int, handle: Handle | None = None) -> Steps:
    """Feed `tokens` tokens at once and one more, to a new state or to that of `handle`. Releases it."""
    if handle is None:
        handle = program.new_state()
    try:
        if program.context is None or program.position(handle) + tokens < program.context:
            program.prefill(handle, [0] * tokens)
            yield
            program.decode([handle], [0])
            yield
    finally:
        program.release(handle)
