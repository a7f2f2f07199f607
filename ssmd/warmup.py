"""The warm-up: what takes longer the first time is done once, piece by piece, while nobody comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from ssmd.runtime import Program

AFTER_S = 0.1  # how long nobody must have come before the first piece; the others follow at once
Piece = Callable[[], object]


class WarmUp:
    """A request waits for one piece at most."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._left = deque(pieces)
        self._patience = AFTER_S

    def __bool__(self) -> bool:
        """Whether pieces are left."""
        return bool(self._left)

    @property
    def due_s(self) -> float | None:
        """How long to wait for a request before the next piece; None: there is none."""
        return self._patience if self._left else None

    def step(self) -> None:
        """Do the next piece."""
        self._patience = 0.0
        self._left.popleft()()

    def cancel(self) -> None:
        """Somebody has come."""
        self._left.clear()


def run_bucket(program: Program, tokens: int) -> None:
    """Prefill so many tokens of nothing."""
    handle = program.new_state()
    program.prefill(handle, [0] * tokens)
    program.release(handle)
