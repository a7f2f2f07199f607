"""The warm-up: what takes longer the first time is done once, step by step, while nobody comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from ssmd.engine.terms import Steps
from ssmd.runtime.protocol import Handle, Program

AFTER_S = 0.1  # how long nobody must have come before the first step; the others follow at once


class WarmUp:
    """Pieces of work that make the first request quick. A request waits for one step at most."""

    def __init__(self, pieces: Iterable[Steps] = ()) -> None:
        self._left = deque(pieces)
        self._patience = AFTER_S

    def __bool__(self) -> bool:
        """Whether something is left to do."""
        return bool(self._left)

    @property
    def due_s(self) -> float | None:
        """How long to wait for a request before the next step; None: there is none."""
        return self._patience if self._left else None

    def step(self) -> None:
        """Do the next step. One that fails ends its piece, not those after it."""
        self._patience = 0.0
        try:
            next(self._left[0])
        except BaseException as err:
            self._left.popleft()
            if not isinstance(err, StopIteration):
                raise

    def cancel(self) -> None:
        """Drop all that is left: somebody has come."""
        while self._left:
            self._left.popleft().close()


def once(work: Callable[[], object]) -> Steps:
    """Make a piece of one step."""
    work()
    yield


def run_tokens(program: Program, tokens: int, handle: Handle | None = None) -> Steps:
    """Feed so many tokens at once and one more, to a state of its own or to this one, which it releases."""
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
