"""DRY ("don't repeat yourself"): a token is made less likely, the longer the sequence is that it would repeat.

Of text-generation-webui (oobabooga/text-generation-webui#5677), as llama.cpp has it: where the last n tokens stood
before, followed by a token, `multiplier * base ** (n - allowed_length)` is subtracted from that token's logit if n is
`allowed_length` or more, of the longest such n. Sequences end at breakers, which repeat in every text.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssmd.model.defaults import EVERYTHING

BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 16
MAX_BREAKER_CHARS = 40
_LONGER = 50  # tokens beyond the allowed length, after which a sequence is not followed further back
_MORE = 256  # tokens that there is made room for at a time, at least
_MOST = 1e30  # that is subtracted

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Dry:
    """multiplier 0 is off. last_n: tokens of prompt and answer that are looked at, 0 none, -1 all. breakers: texts; a
    token that holds one of them is one.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = EVERYTHING
    breakers: tuple[str, ...] = BREAKERS


class DryPenalty:
    """The tokens so far, and at each how many end there as the last ones do now: carried on from token to token."""

    def __init__(self, dry: Dry, breakers: Collection[int], before: NDArray[np.int32]) -> None:
        """breakers: ids. before: a prompt's ids [n], the last `last_n` at least."""
        self._dry, self._breakers = dry, frozenset(breakers)
        self._longest = dry.allowed_length + _LONGER
        ids = before if dry.last_n == EVERYTHING else before[-dry.last_n :]
        self._count = ids.size
        self._ids = np.concatenate([ids.astype(np.intp), np.empty(_MORE, np.intp)])
        self._same = np.zeros(self._ids.size, np.int32)  # tokens up to a place that are as the last ones
        places, n = np.arange(max(0, ids.size - 1)), 0
        while places.size and n < self._longest and (token := int(ids[-1 - n])) not in self._breakers:
            places = places[places >= n]
            places = places[ids[places - n] == token]
            n += 1
            self._same[places] = n

    def add(self, token: int) -> None:
        """Count a token that was said."""
        if self._count == self._ids.size:
            more = max(_MORE, self._count)
            self._ids = np.concatenate([self._ids, np.empty(more, np.intp)])
            self._same = np.concatenate([self._same, np.zeros(more, np.int32)])
        ids, same = self._ids[self._first : self._count], self._same[self._first : self._count]
        if token in self._breakers:
            same[:] = 0
        elif ids.size:
            longer = np.minimum(same[:-1] + 1, self._longest)  # what ended one place before goes on here
            same[1:] = np.where(ids[1:] == token, longer, 0)
            same[0] = ids[0] == token
        self._ids[self._count] = token
        self._count += 1

    @property
    def _first(self) -> int:
        """The place where the window begins."""
        return 0 if self._dry.last_n == EVERYTHING else max(0, self._count - self._dry.last_n)

    def penalize(self, logits: Floats) -> None:
        """Change the logits [V] of what would repeat, in place."""
        first, dry = self._first, self._dry
        if self._count - first < 2:
            return
        # At a place of the window no more than it holds before that can be the same.
        same = np.minimum(self._same[first : self._count - 1], np.arange(1, self._count - first))
        places = np.flatnonzero(same >= dry.allowed_length)
        if not places.size:
            return
        longest: dict[int, int] = {}
        for token, n in zip(self._ids[first + 1 + places].tolist(), same[places].tolist(), strict=True):
            if token not in self._breakers:
                longest[token] = max(n, longest.get(token, 0))
        for token, n in longest.items():
            logits[token] -= min(_MOST, dry.multiplier * dry.base ** (n - dry.allowed_length))
