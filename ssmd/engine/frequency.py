"""What an answer has said is made less likely: OpenAI's frequency and presence penalties.

As OpenAI's API reference and vLLM have it: from a token's logit the frequency penalty is subtracted as often as the
answer has it, the presence penalty once. The prompt does not count (in llama.cpp it does, within its window).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MORE = 64  # ids that there is made room for at a time, at least

Floats = NDArray[np.float32]


class Frequency:
    """The ids that an answer has, each once, and how often."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = np.float32(frequency), np.float32(presence)
        self._places: dict[int, int] = {}
        self._ids = np.empty(_MORE, np.intp)
        self._off = np.empty(_MORE, np.float32)  # what is subtracted, by place

    def add(self, token: int) -> None:
        """Count a token that was said."""
        place = self._places.get(token)
        if place is not None:
            self._off[place] += self._frequency
            return
        place = self._places[token] = len(self._places)
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._off = np.concatenate([self._off, np.empty_like(self._off)])
        self._ids[place] = token
        self._off[place] = self._presence + self._frequency

    def penalize(self, logits: Floats) -> None:
        """Change the logits [V] of these tokens, in place."""
        said = len(self._places)
        logits[self._ids[:said]] -= self._off[:said]
