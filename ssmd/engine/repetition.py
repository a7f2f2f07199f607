"""What was said lately is made less likely: the repetition penalty of the CTRL paper (arXiv:1909.05858, section 4.1).

As transformers and llama.cpp have it: a logit above 0 is divided by the penalty, one below is multiplied, once for
each token of the window, however often it stands there. The window is over prompt and answer alike, as in llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ssmd.model.defaults import EVERYTHING

_MORE = 64  # ids that there is made room for at a time, at least

Floats = NDArray[np.float32]


class Repetition:
    """The ids of the last tokens, the next one written over the oldest."""

    def __init__(self, penalty: float, last_n: int, before: NDArray[np.int32]) -> None:
        """last_n: how many tokens count, EVERYTHING for all. before: a prompt's ids [n], the last `last_n` at least."""
        self._penalty = np.float32(penalty)
        self._last_n = last_n
        self._known: set[int] | None = None
        ids = before[-last_n:]
        if last_n == EVERYTHING:  # each id once: there may be very many tokens, and none of them leaves
            ids = np.unique(before)
            self._known = set(ids.tolist())
        self._ids = ids.astype(np.intp)
        self._next = int(ids.size)
        self._filled = self._next

    def add(self, token: int) -> None:
        """Count a token that was said."""
        if self._known is not None:
            if token in self._known:
                return
            self._known.add(token)
        if self._next == self._last_n:
            self._next = 0
        if self._next == self._ids.size:
            self._ids = np.concatenate([self._ids, np.empty(max(_MORE, self._next), np.intp)])
        self._ids[self._next] = token
        self._next += 1
        self._filled = max(self._filled, self._next)

    def penalize(self, logits: Floats) -> None:
        """Change the logits [V] of these tokens, in place."""
        ids = self._ids[: self._filled]
        values = logits[ids]
        # An id that stands there twice is written twice, both times from what its logit was before.
        logits[ids] = np.where(values > 0, values / self._penalty, values * self._penalty)
