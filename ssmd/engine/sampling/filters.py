"""Filters of likely tokens: locally typical sampling, and XTC, which leaves out the top choices.

typical_p: Meister et al., "Locally Typical Sampling" (arXiv:2202.00666, section 5), as in transformers. It keeps the
tokens whose surprise is nearest to the entropy, until their mass reaches typical_p. XTC ("exclude top choices", of
text-generation-webui and llama.cpp): of all tokens above a threshold only the least likely stays, with a probability.

If several filters are on, the set itself has to be computed. The order is that of llama.cpp: typical_p, top_p, min_p,
XTC. Each filters the set that the one before left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS = 64
SORT_BELOW = 2048  # keys up to which sorting is quicker than another split
MAX_XTC_THRESHOLD = 0.5  # no two tokens can both have more
_PICKS = 128  # tokens sampled by their probability, to estimate the key at the end of the set
_SLACK = 8  # of them, added on both sides of the estimate
_SOME = 256
LEAST = 1e-30  # least weight of a token that may be drawn
_LEAST_SCALED = np.float32(-1e4)  # in place of -inf, whose product with 0 is NaN

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]


@dataclass(frozen=True)
class Filters:
    """Options of the filters. typical_p 1, top_p 1, min_p 0, xtc_probability 0 and a threshold above 0.5 are off."""

    typical_p: float
    top_p: float
    min_p: float
    xtc_probability: float
    xtc_threshold: float

    @property
    def typical_alone(self) -> bool:
        """Return True if typical_p alone is on: then drawing from all tokens and rejecting is enough."""
        return self.top_p >= 1.0 and not self.min_p and not self.xtc_probability

    def apply(self, scaled: Floats, weights: Floats, random: np.random.Generator) -> None:
        """Set the weights of excluded tokens to 0. At least one token stays.

        scaled: (logit - highest) / temperature [V]; it is overwritten. weights: exp(scaled) [V].
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
            stays = top[np.flatnonzero(weights[top] == weights[top].min())[-1]]  # of equal ones the last
            weights[top[top != stays]] = 0


def nearness(scaled: Floats, weights: Floats) -> Floats:
    """Return how near each token's surprise is to the entropy, 0 or less. It is written over `scaled`, of any shape.

    The log of the sum of weights is in both, and cancels out.
    """
    np.maximum(scaled, _LEAST_SCALED, out=scaled)
    mean = float(np.dot(weights.reshape(-1), scaled.reshape(-1))) / float(weights.sum(dtype=np.float64))
    scaled -= np.float32(mean)
    np.abs(scaled, out=scaled)
    return np.negative(scaled, out=scaled)


def _keep_least(keys: Floats, weights: Floats, share: float) -> None:
    """Set the weights [n] to 0 of all but the tokens with the least keys whose mass comes to `share` of the total.

    Ties: lower id first. At least one token stays. The keys are never sorted as a whole.
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
    """Return two keys between which the end probably is; (-inf, inf) if an estimate does not pay."""
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
    """Return the places with the least keys whose weights come to `missing`."""
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
            break  # only a few keys differ
    order = np.argsort(keys, kind="stable")
    return np.concatenate([*kept, places[order[: _reach(weights[order], missing) + 1]]])


def _reach(weights: Floats, missing: float) -> int:
    """Return the index at which the running total of weights reaches `missing`, or the last index."""
    starts = np.arange(0, weights.size, ROWS)
    if not starts.size:
        return 0
    totals = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    block = min(int(np.searchsorted(totals, missing)), starts.size - 1)
    here = np.cumsum(weights[starts[block] : starts[block] + ROWS], dtype=np.float64)
    before = totals[block - 1] if block else 0.0
    return int(starts[block]) + min(int(np.searchsorted(here, missing - before)), here.size - 1)
