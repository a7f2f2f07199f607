"""Penalties that make tokens less likely: DRY ("don't repeat yourself"), repetition, frequency and presence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssmd.model.defaults import EVERYTHING, OPTIONS

BREAKERS = ("\n", ":", '"', "*")
_LONGER = 50  # tokens beyond the allowed length, after which a sequence is not followed further back
_MORE = 256  # tokens that there is made room for at a time, at least
_MOST = 1e30  # that is subtracted

Floats = NDArray[np.float32]

_MORE_IDS = 64  # ids that there is made room for at a time, at least


@dataclass(frozen=True)
class Dry:
    """multiplier 0 is off. last_n: tokens of prompt and answer that are looked at, 0 none, -1 all. breakers: texts; a
    token that holds one of them is one. prompt: False looks at the answer alone.
    """

    multiplier: float
    base: float = OPTIONS["dry_base"].otherwise
    allowed_length: int = int(OPTIONS["dry_allowed_length"].otherwise)
    last_n: int = int(OPTIONS["dry_penalty_last_n"].otherwise)
    breakers: tuple[str, ...] = BREAKERS
    prompt: bool = True


class DryPenalty:
    """The tokens so far, and at each how many end there as the last ones do now: carried on from token to token.

    Of text-generation-webui (oobabooga/text-generation-webui#5677), as llama.cpp has it: where the last n tokens stood
    before, followed by a token, `multiplier * base ** (n - allowed_length)` is subtracted from that token's logit if n
    is `allowed_length` or more, of the longest such n. Sequences end at breakers, which repeat in every text.
    """

    def __init__(self, dry: Dry, breakers: Collection[int], before: NDArray[np.int32]) -> None:
        """breakers: ids. before: a prompt's ids [n], the last `last_n` at least."""
        self._dry, self._breakers = dry, frozenset(breakers)
        self._longest = dry.allowed_length + _LONGER
        before = before if dry.prompt else before[:0]
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


class Repetition:
    """The ids of the last tokens, the next one written over the oldest.

    The repetition penalty of the CTRL paper (arXiv:1909.05858, section 4.1), as transformers and llama.cpp have it: a
    logit above 0 is divided by the penalty, one below is multiplied, once for each token of the window, however often
    it stands there. The window is over prompt and answer alike, as in llama.cpp.
    """

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
            self._ids = np.concatenate([self._ids, np.empty(max(_MORE_IDS, self._next), np.intp)])
        self._ids[self._next] = token
        self._next += 1
        self._filled = max(self._filled, self._next)

    def penalize(self, logits: Floats) -> None:
        """Change the logits [V] of these tokens, in place."""
        ids = self._ids[: self._filled]
        values = logits[ids]
        # An id that stands there twice is written twice, both times from what its logit was before.
        logits[ids] = np.where(values > 0, values / self._penalty, values * self._penalty)


class Frequency:
    """The ids that an answer has, each once, and how often.

    As OpenAI's API reference and vLLM have it: from a token's logit the frequency penalty is subtracted as often as the
    answer has it, the presence penalty once. The prompt does not count (in llama.cpp it does, within its window).
    """

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = np.float32(frequency), np.float32(presence)
        self._places: dict[int, int] = {}
        self._ids = np.empty(_MORE_IDS, np.intp)
        self._off = np.empty(_MORE_IDS, np.float32)  # what is subtracted, by place

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
