"""Penalties that make tokens less likely: DRY ("don't repeat yourself"), repetition, frequency and presence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssmd.model.defaults import ALL_TOKENS, OPTIONS

BREAKERS = ("\n", ":", '"', "*")
_LONGER = 50  # tokens of a match beyond the allowed length; a longer match is not followed further back
_MORE = 256  # least growth of the token buffer
_MOST = 1e30  # largest penalty that is subtracted

Floats = NDArray[np.float32]

_MORE_IDS = 64  # least growth of an id buffer


@dataclass(frozen=True)
class Dry:
    """Options of DRY. multiplier 0 is off."""

    multiplier: float
    base: float = OPTIONS["dry_base"].otherwise
    allowed_length: int = int(OPTIONS["dry_allowed_length"].otherwise)
    last_n: int = int(
        OPTIONS["dry_penalty_last_n"].otherwise
    )  # tokens of prompt and answer to search; 0: none, -1: all
    breakers: tuple[str, ...] = BREAKERS  # texts; a token that contains one of them is a breaker
    prompt: bool = True  # False: search the answer alone


class DryPenalty:
    """DRY penalty. Holds the tokens so far, and at each the length of the match that ends there with the last tokens.

    From text-generation-webui (oobabooga/text-generation-webui#5677), in llama.cpp's form. If the last n tokens stood
    before, the token that followed them there is penalised: `multiplier * base ** (n - allowed_length)` is subtracted
    from its logit, for the longest n of at least `allowed_length`. Matches end at breakers, which repeat in every text.
    """

    def __init__(self, dry: Dry, breakers: Collection[int], before: NDArray[np.int32]) -> None:
        """Start behind a prompt. breakers: ids. before: the prompt's ids [n], at least the last `last_n`."""
        self._dry, self._breakers = dry, frozenset(breakers)
        self._longest = dry.allowed_length + _LONGER
        before = before if dry.prompt else before[:0]
        ids = before if dry.last_n == ALL_TOKENS else before[-dry.last_n :]
        self._count = ids.size
        self._ids = np.concatenate([ids.astype(np.intp), np.empty(_MORE, np.intp)])
        self._same = np.zeros(self._ids.size, np.int32)  # length of the match that ends at each place
        places, n = np.arange(max(0, ids.size - 1)), 0
        while places.size and n < self._longest and (token := int(ids[-1 - n])) not in self._breakers:
            places = places[places >= n]
            places = places[ids[places - n] == token]
            n += 1
            self._same[places] = n

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        if self._count == self._ids.size:
            more = max(_MORE, self._count)
            self._ids = np.concatenate([self._ids, np.empty(more, np.intp)])
            self._same = np.concatenate([self._same, np.zeros(more, np.int32)])
        ids, same = self._ids[self._first : self._count], self._same[self._first : self._count]
        if token in self._breakers:
            same[:] = 0
        elif ids.size:
            longer = np.minimum(same[:-1] + 1, self._longest)  # a match that ended one place before goes on here
            same[1:] = np.where(ids[1:] == token, longer, 0)
            same[0] = ids[0] == token
        self._ids[self._count] = token
        self._count += 1

    @property
    def _first(self) -> int:
        """Return the place at which the window begins."""
        return 0 if self._dry.last_n == ALL_TOKENS else max(0, self._count - self._dry.last_n)

    def penalize(self, logits: Floats) -> None:
        """Lower the logits [V] of tokens that would repeat, in place."""
        first, dry = self._first, self._dry
        if self._count - first < 2:
            return
        # A match within the window is no longer than the window's part before it.
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
    """Repetition penalty: the ids of the last tokens in a ring buffer.

    From the CTRL paper (arXiv:1909.05858, section 4.1), as in transformers and llama.cpp. A logit above 0 is divided
    by the penalty, one below 0 is multiplied. Each token of the window counts once, however often it stands there. The
    window spans prompt and answer, as in llama.cpp.
    """

    def __init__(self, penalty: float, last_n: int, before: NDArray[np.int32]) -> None:
        """Start behind a prompt.

        last_n: size of the window, ALL_TOKENS for all. before: the prompt's ids [n], at least the last `last_n`.
        """
        self._penalty = np.float32(penalty)
        self._last_n = last_n
        self._known: set[int] | None = None
        ids = before[-last_n:]
        if last_n == ALL_TOKENS:  # each id once: there may be very many tokens, and none of them leaves
            ids = np.unique(before)
            self._known = set(ids.tolist())
        self._ids = ids.astype(np.intp)
        self._next = int(ids.size)
        self._filled = self._next

    def add(self, token: int) -> None:
        """Count a token of the answer."""
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
        """Change the logits [V] of the tokens in the window, in place."""
        ids = self._ids[: self._filled]
        values = logits[ids]
        # A repeated id is written twice, both times from its logit before.
        logits[ids] = np.where(values > 0, values / self._penalty, values * self._penalty)


class Frequency:
    """Frequency and presence penalties: the ids of an answer, each once, and their counts.

    As in OpenAI's API reference and vLLM, the frequency penalty is subtracted from a token's logit for each time that
    the answer has it, the presence penalty once. The prompt does not count (in llama.cpp it does, within its window).
    """

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = np.float32(frequency), np.float32(presence)
        self._places: dict[int, int] = {}
        self._ids = np.empty(_MORE_IDS, np.intp)
        self._off = np.empty(_MORE_IDS, np.float32)  # what is subtracted, by place

    def add(self, token: int) -> None:
        """Count a token of the answer."""
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
        """Lower the logits [V] of the answer's tokens, in place."""
        said = len(self._places)
        logits[self._ids[:said]] -= self._off[:said]
