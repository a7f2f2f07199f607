"""Which of the likely tokens may be drawn: locally typical sampling, and XTC, which leaves out the top choices.

typical_p: Meister et al., "Locally Typical Sampling" (arXiv:2202.00666, section 5), as in transformers: the tokens
whose surprise is nearest to the entropy, until their mass reaches typical_p. XTC ("exclude top choices", of
text-generation-webui and llama.cpp): with a probability, all tokens of at least a threshold but the least of them go.

Where more than one of these bounds the set, the set itself has to be known: typical_p, top_p, min_p, XTC, in the order
of llama.cpp, each of what the one before left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS = 64
SORT_BELOW = 2048  # so few keys are quicker sorted than split again
MAX_XTC_THRESHOLD = 0.5  # two tokens cannot both have more
_PICKS = 128  # tokens, as probable as they are, whose keys tell where about the end is
_SLACK = 8  # of them, to both sides
_SOME = 256
LEAST = 1e-30  # weight of a token that may be drawn
_LEAST_SCALED = np.float32(-1e4)  # instead of -inf, which times 0 is no number

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]


@dataclass(frozen=True)
class Filters:
    """typical_p 1, top_p 1, min_p 0 and xtc_probability 0 are off, as is a threshold above 0.5."""

    typical_p: float
    top_p: float
    min_p: float
    xtc_probability: float
    xtc_threshold: float

    @property
    def typical_alone(self) -> bool:
        """Whether a draw from all is enough, if what is drawn may be refused."""
        return self.top_p >= 1.0 and not self.min_p and not self.xtc_probability

    def apply(self, scaled: Floats, weights: Floats, random: np.random.Generator) -> None:
        """Set the weights to 0 of what may not be drawn; one at least stays.

        scaled: (logit - highest) / temperature [V], which is written over. weights: exp of that [V].
        """
        if self.typical_p < 1.0:
            near = nearness(scaled, weights)
            _keep_least(np.negative(near, out=near), weights, self.typical_p)
        if self.top_p < 1.0:
            _keep_least(np.negative(weights, out=scaled), weights, self.top_p)
        if self.min_p:
            weights *= weights >= np.float32(self.min_p) * weights.max()
        if self.xtc_probability and random.random() < self.xtc_probability:
            self._leave_out_top(weights)

    def _leave_out_top(self, weights: Floats) -> None:
        if self.xtc_threshold > MAX_XTC_THRESHOLD:
            return
        top = np.flatnonzero(weights >= max(self.xtc_threshold * weights.sum(dtype=np.float64), LEAST))
        if top.size > 1:
            stays = top[np.flatnonzero(weights[top] == weights[top].min())[-1]]  # of some equal ones the last
            weights[top[top != stays]] = 0


def nearness(scaled: Floats, weights: Floats) -> Floats:
    """How near each token's surprise is to the entropy: 0, or less; in the place of `scaled`, of any shape.

    The log of the sum of weights is in both, and cancels out.
    """
    np.maximum(scaled, _LEAST_SCALED, out=scaled)
    mean = float(np.dot(weights.reshape(-1), scaled.reshape(-1))) / float(weights.sum(dtype=np.float64))
    scaled -= np.float32(mean)
    np.abs(scaled, out=scaled)
    return np.negative(scaled, out=scaled)


def _keep_least(keys: Floats, weights: Floats, share: float) -> None:
    """Set the weights [n] to 0 but of the tokens with the least keys, until those come to that share of all.

    Ties: lower id first. One stays at least. All keys are never sorted.
    """
    missing = max(share * float(weights.sum(dtype=np.float64)), LEAST)
    low, high = _bracket(keys, weights, share)
    sure = keys <= low
    mass = float(np.dot(weights, sure))
    if mass >= missing:
        within, sure = sure, np.zeros_like(sure)
    else:
        upto = keys <= high
        more = float(np.dot(weights, upto))
        if more >= missing:
            within = upto ^ sure
            missing -= mass
        else:
            within, sure = ~upto, upto
            missing -= more
    places = np.flatnonzero(within)
    sure[_least(places, keys[places], weights[places], missing)] = True
    weights *= sure


def _bracket(keys: Floats, weights: Floats, share: float) -> tuple[float, float]:
    """Two keys between which the end probably is; nothing and everything where that is not worth looking for."""
    if keys.size <= SORT_BELOW or keys.size % ROWS:
        return -np.inf, np.inf
    rows = weights.reshape(ROWS, -1)
    columns = np.cumsum(rows.sum(axis=0), dtype=np.float64)
    at = (np.arange(_PICKS) + 0.5) * (columns[-1] / _PICKS)
    chosen = np.minimum(np.searchsorted(columns, at), columns.size - 1)
    within = np.cumsum(rows[:, chosen], axis=0)  # (ROWS, picks)
    offset = (at - columns[chosen] + within[-1]).astype(np.float32)
    row = np.minimum((within < offset).sum(axis=0), ROWS - 1)
    picked = np.sort(keys.reshape(ROWS, -1)[row, chosen])
    middle = int(share * _PICKS)
    low, high = middle - _SLACK, middle + _SLACK
    return float(picked[low]) if low >= 0 else -np.inf, float(picked[high]) if high < _PICKS else np.inf


def _least(places: Ids, keys: Floats, weights: Floats, missing: float) -> Ids:
    """Of these places those with the least keys, until their weights come to what is missing."""
    kept: list[Ids] = []
    while (size := places.size) > SORT_BELOW:
        some = np.argsort(keys[:: size // _SOME])
        picked = keys[:: size // _SOME][some]
        mass = np.cumsum(weights[:: size // _SOME][some], dtype=np.float64)
        middle = int(np.searchsorted(mass, missing / float(weights.sum(dtype=np.float64)) * mass[-1]))
        low, high = picked[max(0, middle - _SLACK)], picked[min(picked.size - 1, middle + _SLACK)]
        if low == high and keys.min() == keys.max():
            return np.concatenate([*kept, places[: _reach(weights, missing) + 1]])
        for bound in (np.nextafter(low, -np.inf), high):
            under = keys <= bound
            more = float(weights[under].sum(dtype=np.float64))
            part = under if more >= missing else ~under
            if more < missing:
                missing -= more
                kept.append(places[under])
            places, keys, weights = places[part], keys[part], weights[part]
        if places.size == size:
            break  # there are a few different ones only
    order = np.argsort(keys, kind="stable")
    return np.concatenate([*kept, places[order[: _reach(weights[order], missing) + 1]]])


def _reach(weights: Floats, missing: float) -> int:
    """The place at which the running total comes to what is missing; or the last one."""
    starts = np.arange(0, weights.size, ROWS)
    if not starts.size:
        return 0
    totals = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    block = min(int(np.searchsorted(totals, missing)), starts.size - 1)
    here = np.cumsum(weights[starts[block] : starts[block] + ROWS], dtype=np.float64)
    before = totals[block - 1] if block else 0.0
    return int(starts[block]) + min(int(np.searchsorted(here, missing - before)), here.size - 1)
