"""Logits of many shapes, and whether what was drawn comes from a distribution."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ssmd.engine.sampling.sampler import Sampler

Floats = NDArray[np.float32]


def chi_square_fits(counts: NDArray[np.int64], p: NDArray[np.float64]) -> bool:
    """Test if counts come from p, at a level of 1e-5. Rare outcomes are pooled so that each cell expects >= 8."""
    n = counts.sum()
    if counts[p == 0].any():
        return False
    order = np.argsort(p)
    cells: list[tuple[float, float]] = []
    expected = seen = 0.0
    for i in order:
        expected += p[i] * n
        seen += counts[i]
        if expected >= 8:
            cells.append((expected, seen))
            expected = seen = 0.0
    if expected and cells:
        cells[-1] = (cells[-1][0] + expected, cells[-1][1] + seen)
    k = len(cells) - 1
    if k < 1:
        return True
    statistic = sum((s - e) ** 2 / e for e, s in cells)
    # Wilson-Hilferty: the cube root of chi-square / k is nearly normal.
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return bool(z < 4.27)


SHAPES: dict[str, Floats] = {
    "flat": np.random.default_rng(1).normal(0, 0.3, 300).astype(np.float32),
    "peaked": np.random.default_rng(2).normal(0, 4, 1000).astype(np.float32),
    "ties": np.round(np.random.default_rng(3).normal(0, 1, 640)).astype(np.float32),
    "constant": np.zeros(200, np.float32),
    "masked": np.where(np.arange(500) % 7 == 0, np.random.default_rng(4).normal(0, 1, 500), -np.inf).astype(np.float32),
    "wide": np.random.default_rng(5).normal(0, 1, 9000).astype(np.float32),
}


class EvenDraws:
    """A source of chance whose values lie evenly, in place of a sampler's own: few draws show a whole distribution.

    Of n draws the first values are the midpoints of n equal parts of [0, 1). A token that one value decides comes
    n * p times then, but for less than one. Later values of a draw (a rejected token is drawn anew) are the midpoints
    in an order of their own, as in a Latin hypercube.
    """

    def __init__(self, n: int) -> None:
        self._n, self._draw, self._value = n, -1, 0
        self._orders = [np.arange(n)]
        self._random = np.random.default_rng(n)

    def begin(self) -> None:
        """Begin the next draw."""
        self._draw, self._value = self._draw + 1, 0

    def random(self) -> float:
        """Return the next value of this draw."""
        if self._value == len(self._orders):
            self._orders.append(self._random.permutation(self._n))
        at, self._value = self._value, self._value + 1
        return float(self._orders[at][self._draw] + 0.5) / self._n


def even_counts(sampler: Sampler, logits: Floats, n: int) -> NDArray[np.int64]:
    """Return how often each token comes in n draws of even values. The sampler has no other source afterwards."""
    source = EvenDraws(n)
    vars(sampler)["_random"] = source
    tokens = []
    for _ in range(n):
        source.begin()
        tokens.append(sampler.sample(logits).token)
    return np.bincount(tokens, minlength=logits.size)


def worst(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """Return the largest difference between a token's count and its share of all counts; infinite if p is 0."""
    if counts[p == 0].any():
        return math.inf
    return float(np.abs(counts - p * counts.sum()).max())
