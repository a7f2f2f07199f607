"""Error-compensated rounding of matrices to int4: GPTQ (arXiv:2210.17323), with a scale and an offset for each block.

The columns of a matrix are rounded in order. What a column is off by changes the targets of the columns after it, such
that the product with the inputs of a calibration text changes least. Rows do not depend on one another.

With H the inputs' products with one another and H = R R^T, R upper triangular, a row that is off by e costs |e R|^2.
Its term of column j is (e_j + the sum of e_i R_ij / R_jj over i < j)^2 R_jj^2: only columns before j stand in it. So
the target of column j is its weight plus that sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssmd.families.offsets import BLOCK, LEAST_STEP, divided
from ssmd.families.weights import Array
from ssmd.refit.encodings import bfloat16

_DAMPINGS = (0.01, 0.1, 1.0)  # added to the diagonal of H, in means of it: a text has fewer tokens than H has numbers
_COLUMNS, _ROWS = 256, 2048  # of H that are factored at once, and from which their part is taken at once
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a block's values that the 16 levels cover, which are tried
_AT_ONCE = 4  # blocks after which the targets of all later columns are renewed


@dataclass(frozen=True)
class Factor:
    """R of a matrix' inputs. upper: R_ij / R_jj (K, K); squares: R_jj^2 (K,)."""

    upper: Array
    squares: Array

    @staticmethod
    def of(gram: Array) -> Factor:
        """Factor the products (K, K) of inputs with one another, summed over tokens; finite numbers.

        Takes the memory of two more such matrices. Raises numpy.linalg.LinAlgError.
        """
        mean = float(gram.diagonal().mean()) or 1.0
        for damping in _DAMPINGS:
            upper = gram.copy()
            upper[np.diag_indices_from(upper)] += np.float32(damping * mean)
            try:
                _factor(upper)
            except np.linalg.LinAlgError:  # float32 has not enough digits for inputs that span so little
                if damping == _DAMPINGS[-1]:
                    raise
                continue
            break
        diagonal = upper.diagonal().copy()
        upper /= diagonal
        return Factor(upper, diagonal * diagonal)


def _factor(matrix: Array) -> None:
    """Replace H by R, upper triangular, with H = R R^T: block by block of columns, from the last one on.

    numpy's own factor is a copy in float64, of which several would not fit beside a large model.
    """
    for stop in range(len(matrix), 0, -_COLUMNS):
        first = max(0, stop - _COLUMNS)
        own = np.linalg.cholesky(matrix[first:stop, first:stop][::-1, ::-1])[::-1, ::-1]
        matrix[first:stop, first:stop] = own
        matrix[first:stop, :first] = 0
        above = matrix[:first, first:stop] @ np.linalg.inv(own).T.astype(np.float32)
        matrix[:first, first:stop] = above
        for row in range(0, first, _ROWS):
            rows = slice(row, min(row + _ROWS, first))
            matrix[rows, row:first] -= above[rows] @ above[row:].T


@dataclass(frozen=True)
class Rounding:
    """A matrix (n, K) in int4: step * level + offset, with steps that a runtime can store.

    levels: int8 (n, K) in -8..7; steps, offsets: float32 (n, K / BLOCK); costs: |e R|^2 of each row (n,).
    """

    levels: NDArray[np.int8]
    steps: Array
    offsets: Array
    costs: NDArray[np.float64]

    def values(self) -> Array:
        shape = self.levels.shape
        blocks = self.levels.reshape(len(self.levels), -1, BLOCK) * self.steps[..., None] + self.offsets[..., None]
        return blocks.reshape(shape).astype(np.float32)


def plain(rows: Array, factor: Factor, brief: bool) -> Rounding:
    """Round as a refit does without a text."""
    levelled, offsets = divided(rows)
    blocks = levelled.reshape(len(rows), -1, BLOCK)
    steps = blocks.min(-1) / np.float32(-8)
    levels = np.rint(blocks / steps[..., None]).astype(np.int8)
    stored = bfloat16(steps) if brief else steps
    made = Rounding(levels.reshape(rows.shape), stored, offsets, np.zeros(len(rows)))
    off = (rows - made.values()) @ factor.upper
    costs = np.square(off, dtype=np.float64) @ factor.squares.astype(np.float64)
    return Rounding(made.levels, stored, offsets, costs)


def compensated(rows: Array, factor: Factor, brief: bool) -> Rounding:
    """Round rows (n, K) such that their products with the factor's inputs change least.

    brief: the runtime stores steps in bfloat16, else in float16.
    """
    count, columns = rows.shape
    targets = rows.astype(np.float32)  # a copy
    levels = np.empty((count, columns), np.int8)
    steps = np.empty((count, columns // BLOCK), np.float32)
    offsets = np.empty_like(steps)
    off = np.empty((columns, count), np.float32)  # of each column, transposed
    costs = np.zeros(count)
    renewed = 0  # columns whose effect stands in all targets
    for first in range(0, columns, BLOCK):
        own = slice(first, first + BLOCK)
        if first - renewed == _AT_ONCE * BLOCK:
            targets[:, first:] += off[renewed:first].T @ factor.upper[renewed:first, first:]
            renewed = first
        elif first > renewed:
            targets[:, own] += off[renewed:first].T @ factor.upper[renewed:first, own]
        block = np.ascontiguousarray(targets[:, own].T)  # (BLOCK, n)
        step, middle = _range(block, factor.squares[own], brief)
        low = middle - np.float32(7.5) * step
        found = np.empty((BLOCK, count), np.float32)
        weights = rows[:, own].T
        for i in range(BLOCK):
            column = first + i
            found[i] = np.clip(np.rint((block[i] - low) / step), 0, 15)
            value = low + found[i] * step
            costs += np.square(block[i] - value, dtype=np.float64) * factor.squares[column]
            off[column] = weights[i] - value
            block[i + 1 :] += factor.upper[column, column + 1 : first + BLOCK, None] * off[column]
        levels[:, own] = (found - 8).T
        steps[:, first // BLOCK] = step
        offsets[:, first // BLOCK] = low + 8 * step
    return Rounding(levels, steps, offsets, costs)


def better(rows: Array, factor: Factor, brief: bool) -> tuple[Rounding, NDArray[np.float64]]:
    """Return the rounding of each row that costs less, and the costs of the plain one."""
    one, other = plain(rows, factor, brief), compensated(rows, factor, brief)
    mask = other.costs < one.costs
    chosen = [
        np.where(mask[:, None], b, a)
        for a, b in ((one.levels, other.levels), (one.steps, other.steps), (one.offsets, other.offsets))
    ]
    return Rounding(chosen[0], chosen[1], chosen[2], np.where(mask, other.costs, one.costs)), one.costs


def _range(block: Array, weights: Array, brief: bool) -> tuple[Array, Array]:
    """Return the step (n,) and the middle (n,) of the levels of a block (BLOCK, n) that cost least without the others.

    weights: of the squares of each column's error (BLOCK,).
    """
    low, high = block.min(0), block.max(0)
    middle = (low + high) / 2
    best, chosen = np.full(block.shape[1], np.inf, np.float32), np.empty(block.shape[1], np.float32)
    for part in _RANGES:
        step = np.maximum((high - low) * np.float32(part / 15), LEAST_STEP)
        step = bfloat16(step) if brief else step.astype(np.float16).astype(np.float32)
        level = np.clip(np.rint((block - middle) / step + np.float32(7.5)), 0, 15) - np.float32(7.5)
        cost = weights @ np.square(block - middle - level * step)
        less = cost < best
        best[less], chosen[less] = cost[less], step[less]
    return chosen, middle
