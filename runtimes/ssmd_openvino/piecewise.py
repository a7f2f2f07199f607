"""SiLU and softplus as piecewise linear functions: where their knots lie, and their slopes between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Function = Callable[[Array], Array]

RANGES = np.arange(4.0, 17.0)  # R that are tried: outside [-R, R] the function is its asymptotes, relu(x)


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def softplus(x: Array) -> Array:
    result: Array = np.logaddexp(0, x)
    return result


@cache
def terms(function: Function, segments: int) -> tuple[Array, Array]:
    """Ends c (n + 1,) from R down to 0 and slopes s (n,) of the piecewise linear f(x) - relu(x), a function of |x|.

    Both functions have f(x) - f(-x) = x, so half of the segments, one more if their number is odd, tell all. The knots
    lie where the integral of sqrt|f''| is a multiple of its n-th part, which makes the errors of all segments equal;
    they are numbers of 16 bits. Of RANGES that is taken whose function is nearest to f.
    """
    grid = np.linspace(-20.0, 0.0, 20001)
    best = np.inf
    for end in RANGES:
        knots = _knots(function, segments, float(end))
        values = function(knots)
        values[0] = 0.0  # the asymptote
        if segments % 2:  # a segment of slope 1/2 over zero
            values = np.append(values, values[-1] - knots[-1] / 2)
            knots = np.append(knots, 0.0)
        error = np.abs(np.interp(grid, knots, values) - function(grid)).max()
        if error < best:
            best, ends, slopes = error, -knots, np.diff(values) / np.diff(knots)
    return ends, slopes


def _knots(function: Function, segments: int, end: float) -> Array:
    """Those from -end to 0, in float16's numbers."""
    x = np.linspace(-end, end, 40001)
    weight = np.sqrt(np.abs(np.gradient(np.gradient(function(x), x), x)))
    area = np.concatenate([[0.0], np.cumsum((weight[1:] + weight[:-1]) / 2)])
    knots = np.interp(np.linspace(0.0, area[-1], segments + 1), area, x)
    return ((knots - knots[::-1])[: segments // 2 + 1] / 2).astype(np.float16).astype(np.float64)
