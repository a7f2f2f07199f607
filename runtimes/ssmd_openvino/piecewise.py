"""SiLU and softplus as piecewise linear functions: where their knots lie, and their slopes between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Function = Callable[[Array], Array]

RANGES = np.arange(4.0, 17.0)  # R that are tried: outside [-R, R] SiLU is its asymptotes, relu(x)
# Softplus makes the time steps dt of a Mamba, which begin between 0.001 and 0.1 and never below SMALL (dt_init_floor of
# its authors): an error is a share of a step of up to LARGE, and of a larger one as that of LARGE.
SMALL, LARGE = 1e-4, 0.1
_LOWERED = 0.95  # at most, by so many units, so that no step down to SMALL becomes 0


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def softplus(x: Array) -> Array:
    result: Array = np.logaddexp(0, x)
    return result


def step_unit(x: Array) -> Array:
    """Return the unit of errors of softplus at x: dt / (1 + dt / LARGE)."""
    dt = softplus(x)
    return dt / (1 + dt / LARGE)


@cache
def terms(function: Function, segments: int) -> tuple[Array, Array]:
    """Return ends c (n + 1,) from R to 0 and slopes s (n,) of the piecewise linear f(x) - relu(x), a function of |x|.

    Both functions have f(x) - f(-x) = x, so half of the segments are enough, and one more if their number is odd. The
    knots lie where the integral of sqrt(|f''| / unit) is a multiple of its n-th part. So the errors of all segments are
    equal in that unit. Knots are numbers of 16 bits.
    """
    knots, values = _steps(segments) if function is softplus else _nearest(function, segments)
    return -knots, np.diff(values) / np.diff(knots)


def _nearest(function: Function, segments: int) -> tuple[Array, Array]:
    """Return the knots and values with the smallest error in units of 1, over all RANGES."""
    grid = np.linspace(-20.0, 0.0, 20001)
    best = np.inf
    for end in RANGES:
        knots = _knots(function, np.ones_like, segments, float(end))
        values = function(knots)
        values[0] = 0.0  # the asymptote
        knots, values = _closed(knots, values, segments)
        error = np.abs(np.interp(grid, knots, values) - function(grid)).max()
        if error < best:
            best, found = error, (knots, values)
    return found


def _steps(segments: int) -> tuple[Array, Array]:
    """Return knots and values of softplus with errors in units of `step_unit`, as large above as below it.

    The first segment continues below SMALL until it meets relu(x), so that no step above SMALL becomes 0.
    """
    knots = _knots(softplus, step_unit, segments, -float(np.log(np.expm1(SMALL))))
    grid = np.linspace(knots[0], 0.0, 20001)

    def lowered(by: float) -> tuple[Array, Array]:
        return _closed(knots, softplus(knots) - by * step_unit(knots), segments)

    def error(by: float) -> float:
        return float(np.abs((np.interp(grid, *lowered(by)) - softplus(grid)) / step_unit(grid)).max())

    knots, values = lowered(min(np.linspace(0.0, min(error(0.0), _LOWERED), 101), key=error))
    end = knots[0] - values[0] * (knots[1] - knots[0]) / (values[1] - values[0])
    knots[0], values[0] = np.float16(end), 0.0
    return knots, values


def _knots(function: Function, unit: Function, segments: int, end: float) -> Array:
    """Return the knots from -end to 0, rounded to float16."""
    x = np.linspace(-end, end, 40001)
    weight = np.sqrt(np.abs(np.gradient(np.gradient(function(x), x), x)) / unit(-np.abs(x)))
    area = np.concatenate([[0.0], np.cumsum((weight[1:] + weight[:-1]) / 2)])
    knots = np.interp(np.linspace(0.0, area[-1], segments + 1), area, x)
    return ((knots - knots[::-1])[: segments // 2 + 1] / 2).astype(np.float16).astype(np.float64)


def _closed(knots: Array, values: Array, segments: int) -> tuple[Array, Array]:
    """Return knots and values with 0 among them: with an odd number of segments, one of slope 1/2 contains it."""
    if segments % 2 == 0:
        return knots.copy(), values
    return np.append(knots, 0.0), np.append(values, values[-1] - knots[-1] / 2)
