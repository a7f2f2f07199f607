"""Logits of many shapes, and whether what was drawn comes from a distribution."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

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
