"""Choice of the next token from a row of logits, exactly and without a sort, with the penalties that come first.

Penalties, temperature, top_k, top_p and min_p apply in the order of transformers. Each of the last three leaves a set
of the likeliest tokens. So their order only decides the total that top_p is a share of: top_k's tokens or all.

The V logits are seen as 64 rows, token = row * V/64 + column (padded with -inf). Sums over columns make a draw cheap,
maxima over columns bound the k-th largest: numpy reduces the first axis several times faster than the last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.engine.sampling.filters import LEAST, Filters, nearness
from ssmd.engine.sampling.params import Dry, SamplingParams
from ssmd.model.defaults import ALL_TOKENS

GREEDY_BELOW = 1e-6  # temperature below which any float32 logit gap decides, unless it is 0
ROWS = 64
SORT_BELOW = 2048  # tokens up to which sorting is quicker than another draw
FEW_COLUMNS = 8  # up to 1/8 of the columns, gathering them beats a pass over all
Floats = NDArray[np.float32]
Ids = NDArray[np.intp]
_LONGER = 50  # tokens of a match beyond the allowed length; a longer match is not followed further back
_MORE = 256  # least growth of the token buffer
_MOST = 1e30  # largest penalty that is subtracted
_MORE_IDS = 64  # least growth of an id buffer


@dataclass(frozen=True)
class Sample:
    """A chosen token. `logprob` and `top` (token, logprob; most likely first) are of the logits before temperature."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draws tokens for one choice of a request. The same prompt, seed, index and logits give the same tokens."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        index: int = 0,
        before: Sequence[int] | NDArray[Any] = (),
        breakers: Collection[int] = (),
        padding: Callable[[int], Ids] | None = None,
    ) -> None:
        """Start behind a prompt.

        before: the prompt's last ids, at least `params.counted` of them. breakers: ids of DRY's breakers.
        padding: returns the ids below a size that no token has, and which are never drawn; none by default.
        """
        self.params = params
        self._filters = params.filters
        self._penalties: list[Penalty] = []  # in the order in which they apply
        if params.repetition_penalty != 1.0 and params.repeat_last_n:
            counted = np.asarray(before, np.int32)
            self._penalties.append(Repetition(params.repetition_penalty, params.repeat_last_n, counted))
        if params.frequency_penalty or params.presence_penalty:
            self._penalties.append(Frequency(params.frequency_penalty, params.presence_penalty))
        if params.dry is not None and params.dry.multiplier and params.dry.last_n:
            self._penalties.append(DryPenalty(params.dry, breakers, np.asarray(before, np.int32)))
        entropy = None if params.seed is None else [params.seed % 2**64, index]
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
        self._bias_ids: Ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._bias: Floats = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._padding_of, self._padding = padding, np.empty(0, np.intp)
        self._vocabulary = 0
        self._own = self._weights = self._rest = self._keys = self._masked = np.empty(0, np.float32)
        self._before = np.empty(0, np.bool_)

    def sample(self, logits: Floats, mask: Floats | None = None, *, penalized: bool = True) -> Sample:
        """Choose from float32 logits [V], which stay as they are. Raises ValueError if no token can be chosen.

        mask: [V], 0 for each token that may be chosen, else -inf. Log-probabilities ignore it.
        penalized: True if penalties apply to this token. It counts for later tokens either way.
        """
        sample = self._sample(logits, mask, penalized)
        for penalty in self._penalties:
            penalty.add(sample.token)
        return sample

    def skip(self, token: int) -> None:
        """Count a token that was forced, so that no draw chose it. Later draws are as if it had been drawn."""
        for penalty in self._penalties:
            penalty.add(token)
        if not self._is_greedy:
            self._random.random()

    @property
    def _is_greedy(self) -> bool:
        params = self.params
        return params.temperature < GREEDY_BELOW or params.top_p <= 0 or params.top_k == 1

    def _sample(self, logits: Floats, mask: Floats | None, penalized: bool) -> Sample:
        prepared = self._prepare(logits, self._penalties if penalized else [])  # (64, V/64)
        rows = prepared if mask is None else self._only(prepared, mask)
        maxima = rows.max(axis=0)  # (V/64)
        highest = float(maxima.max())
        if not math.isfinite(highest):
            raise ValueError(_why_not(logits))
        params = self.params
        total = 0.0  # of exp(logit - highest), once known
        if self._is_greedy:
            token = int(rows.argmax())
        elif self._filters is not None and self._filters.typical_alone and not 0 < params.top_k < self._vocabulary:
            token = self._draw_typical(rows, highest)
        elif self._filters is not None:
            token = self._draw_filtered(self._filters, rows, maxima, highest)
        elif 0 < params.top_k < self._vocabulary:
            token = self._draw_sorted(*_largest(rows, maxima, params.top_k), highest)
        else:
            weights, sums = self._softmax(rows, highest, params.temperature)
            if params.temperature == 1.0:
                total = float(sums.sum(dtype=np.float64))
            token = self._draw(weights, sums)
        if not params.logprobs:
            return Sample(token, None, ())
        if rows is not prepared:
            rows, maxima, total = prepared, prepared.max(axis=0), 0.0
            highest = float(maxima.max())
        if not total:
            total = float(self._softmax(rows, highest, 1.0)[1].sum(dtype=np.float64))
        shift = highest + math.log(total)
        top: tuple[tuple[int, float], ...] = ()
        if params.top_logprobs:
            ids, values = _largest(rows, maxima, params.top_logprobs)
            top = tuple((int(i), float(v) - shift) for i, v in zip(ids, values, strict=True) if v > -math.inf)
        return Sample(token, float(rows.reshape(-1)[token]) - shift, top)

    def _prepare(self, logits: Floats, penalties: Sequence[Penalty]) -> Floats:
        """Return the logits with bias and penalties (64, V/64), -inf for no token; a view if nothing changes."""
        if logits.ndim != 1 or logits.size == 0 or logits.dtype != np.float32:
            raise ValueError(f"expected one row of float32 logits, got {logits.dtype} of shape {logits.shape}")
        size = logits.size
        if size != self._vocabulary:
            if self._bias_ids.size and int(self._bias_ids.max()) >= size:
                raise ValueError(f"logit_bias names token {int(self._bias_ids.max())}; the vocabulary has {size}")
            self._vocabulary = size
            if self._padding_of is not None:
                self._padding = self._padding_of(size)
            columns = -(-size // ROWS)
            self._own = np.full(ROWS * columns, -np.inf, np.float32)
            self._weights, self._rest = np.empty((2, ROWS, columns), np.float32)
            self._before = np.empty(ROWS * columns, np.bool_)
        if self._bias_ids.size or self._padding.size or penalties or size % ROWS or not logits.flags.c_contiguous:
            self._own[:size] = logits
            self._own[self._bias_ids] += self._bias
            for penalty in penalties:
                penalty.penalize(self._own)
            self._own[self._padding] = -np.inf
            return self._own.reshape(ROWS, -1)
        return logits.reshape(ROWS, -1)

    def _only(self, rows: Floats, mask: Floats) -> Floats:
        """Return the logits (64, V/64) of the tokens that the mask allows, -inf for the others."""
        if self._masked.size != rows.size:
            self._masked = np.full(rows.size, -np.inf, np.float32)
        with np.errstate(invalid="ignore"):  # inf + -inf is NaN, which `sample` refuses
            np.add(rows.reshape(-1)[: mask.size], mask, out=self._masked[: mask.size])
        return self._masked.reshape(ROWS, -1)

    def _softmax(self, rows: Floats, highest: float, temperature: float) -> tuple[Floats, Floats]:
        """Return unnormalised probabilities exp((logit - highest) / temperature), and their sums over columns."""
        weights = np.subtract(rows, np.float32(highest), out=self._weights)
        if temperature != 1.0:
            weights *= np.float32(1.0 / temperature)
        np.exp(weights, out=weights)
        return weights, weights.sum(axis=0)

    def _draw(self, weights: Floats, sums: Floats) -> int:
        """Draw from the nucleus: the most probable tokens (ties: lower id first) whose predecessors' mass < top_p.

        A draw from a superset of the nucleus is kept if it lies inside. Otherwise it bounds the nucleus: the tokens
        more probable than it are the next, smaller superset. So a handful of draws is enough.
        min_p: tokens whose weight is below this share of the highest weight, which is 1, are never drawn.
        """
        columns = np.cumsum(sums, dtype=np.float64)
        allowed = self.params.top_p * float(columns[-1])
        if self.params.min_p:
            np.greater_equal(weights, np.float32(self.params.min_p), out=self._before.reshape(weights.shape))
            np.copyto(self._rest, self._before.reshape(weights.shape))
            weights = np.multiply(weights, self._rest, out=weights)
            sums = weights.sum(axis=0)
            columns = np.cumsum(sums, dtype=np.float64)
        token = self._pick(weights, sums, columns)
        return token if self.params.top_p >= 1.0 else self._within(token, None, weights, allowed)

    def _within(self, token: int, keys: Floats | None, weights: Floats, allowed: float) -> int:
        """Return the drawn token, or draw others until one is inside the set.

        The set: tokens with the greatest keys (ties: lower id first) whose predecessors' weights are less than
        `allowed`. keys: (64, V/64); the weights themselves if None.
        """
        spare, before = self._rest, self._before
        for draws in itertools.count(1):
            flat = (weights if keys is None else keys).reshape(-1)
            np.greater_equal(flat[:token], flat[token], out=before[:token])
            np.greater(flat[token:], flat[token], out=before[token:])
            # Multiplying by a float mask is twice as fast as by a bool one.
            np.copyto(spare.reshape(-1), before)
            rest = np.multiply(spare, weights, out=spare)
            sums = rest.sum(axis=0)
            columns = np.cumsum(sums, dtype=np.float64)
            if columns[-1] < allowed:
                break
            if draws > 1 and np.count_nonzero(before) <= SORT_BELOW:
                ids = np.flatnonzero(before)
                order = np.argsort(-flat[ids].astype(np.float64), kind="stable")
                return self._pick_sorted(ids[order], weights.reshape(-1)[ids[order]].astype(np.float64), allowed)
            weights, spare = rest, weights
            token = self._pick(weights, sums, columns)
        return token

    def _draw_typical(self, rows: Floats, highest: float) -> int:
        """Draw one of the locally typical tokens (filters.py) by a draw from all, as in `_draw`."""
        weights, sums = self._softmax(rows, highest, self.params.temperature)
        keys = nearness(self._scaled(rows, highest), weights)
        columns = np.cumsum(sums, dtype=np.float64)
        token = self._pick(weights, sums, columns)
        return self._within(token, keys, weights, max(self.params.typical_p * float(columns[-1]), LEAST))

    def _scaled(self, rows: Floats, highest: float) -> Floats:
        """Return (logit - highest) / temperature, in an array of its own."""
        if self._keys.size != rows.size:
            self._keys = np.empty_like(rows)
        scaled = np.subtract(rows, np.float32(highest), out=self._keys)
        if self.params.temperature != 1.0:
            scaled *= np.float32(1.0 / self.params.temperature)
        return scaled

    def _draw_filtered(self, filters: Filters, rows: Floats, maxima: Floats, highest: float) -> int:
        """Draw one of the tokens that the filters leave, with probability in proportion to its weight."""
        if 0 < self.params.top_k < self._vocabulary:
            ids, logits = _largest(rows, maxima, self.params.top_k)
            scaled = (logits - np.float32(highest)) * np.float32(1.0 / self.params.temperature)
            weights = np.exp(scaled)
            filters.apply(scaled, weights, self._random)
            mass = np.cumsum(weights, dtype=np.float64)
            return int(ids[np.searchsorted(mass, self._random.random() * mass[-1], side="right")])
        weights, _ = self._softmax(rows, highest, self.params.temperature)
        filters.apply(self._scaled(rows, highest).reshape(-1), weights.reshape(-1), self._random)
        sums = weights.sum(axis=0)
        return self._pick(weights, sums, np.cumsum(sums, dtype=np.float64))

    def _draw_sorted(self, ids: Ids, logits: Floats, highest: float) -> int:
        """Draw as `_draw` does, from tokens that are sorted already, most probable first."""
        values = np.exp((logits.astype(np.float64) - highest) / self.params.temperature)
        kept = np.searchsorted(-values, -self.params.min_p, side="right")  # values descend
        return self._pick_sorted(ids[:kept], values[:kept], self.params.top_p * float(values.sum()))

    def _pick_sorted(self, ids: Ids, values: NDArray[np.float64], allowed: float) -> int:
        mass = np.cumsum(values)
        kept = int(np.searchsorted(mass, allowed, side="left")) + 1  # predecessors' mass < allowed
        mass = mass[:kept]
        at = int(np.searchsorted(mass, self._random.random() * mass[-1], side="right"))
        return int(ids[min(at, mass.size - 1)])

    def _pick(self, weights: Floats, sums: Floats, columns: NDArray[np.float64]) -> int:
        """Draw a token with probability in proportion to its weight: the column first, then the token within it.

        columns: the running total of `sums`.
        """
        at = self._random.random() * columns[-1]
        column = int(np.searchsorted(columns, at, side="right"))
        if column >= columns.size:  # rounding at the very end
            column = int(np.flatnonzero(sums)[-1])
        within = np.cumsum(weights[:, column], dtype=np.float64)
        # The column's sum was rounded in float32: scale, so that the offset stays inside.
        offset = (at - (columns[column - 1] if column else 0.0)) / float(sums[column]) * within[-1]
        row = int(np.searchsorted(within, offset, side="right"))
        if row >= ROWS:
            row = int(np.flatnonzero(weights[:, column])[-1])
        return row * columns.size + column


def _largest(rows: Floats, maxima: Floats, k: int) -> tuple[Ids, Floats]:
    """Return ids and values of the k largest of `rows` (64, columns), largest first; ties: lower id first."""
    flat = rows.reshape(-1)
    k = min(k, flat.size)
    # k columns have a maximum of at least this, so the k-th largest value is not below it.
    bound = np.partition(maxima, -k)[-k] if k <= maxima.size else np.float32(-np.inf)
    columns = np.flatnonzero(maxima > bound)
    if columns.size <= maxima.size // FEW_COLUMNS:
        row, column = np.nonzero(rows[:, columns] > bound)
        ids = row * maxima.size + columns[column]
    else:
        ids = np.flatnonzero(flat > bound)
    if ids.size > k:
        values = flat[ids]
        bound = np.partition(values, -k)[-k]
        ids = ids[values > bound]
    if ids.size < k:  # the k-th largest is the bound itself
        ids = np.concatenate([ids, _first_equal(rows, maxima, bound, k - ids.size)])
    values = flat[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], values[order]


def _first_equal(rows: Floats, maxima: Floats, value: np.float32, n: int) -> Ids:
    """Return the n lowest ids whose logit equals `value`, or all if there are fewer."""
    columns = np.flatnonzero(maxima >= value)
    if columns.size <= maxima.size // FEW_COLUMNS:
        row, column = np.nonzero(rows[:, columns] == value)
        return (row * maxima.size + columns[column])[:n]
    flat = rows.reshape(-1)
    start = np.flatnonzero(flat[: 64 * n] == value)  # where nearly all are equal, the first few ids are enough
    return start[:n] if start.size >= n else np.flatnonzero(flat == value)[:n]


def _why_not(logits: Floats) -> str:
    if np.isnan(logits).any():
        return f"the model returned {int(np.isnan(logits).sum())} logits that are not a number: its state is damaged"
    if np.isposinf(logits).any():
        return "the model returned infinite logits: its computation overflowed"
    return "no token can be sampled: every logit is -inf"


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


Penalty = Repetition | Frequency | DryPenalty
