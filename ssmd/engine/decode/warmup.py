"""The warm-up: work that takes longer the first time is done once, step by step, while no request comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from ssmd.engine.terms import Steps
from ssmd.runtime.protocol import Handle, Program

AFTER_S = 0.1  # s without a request before the first step; the others follow at once


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
