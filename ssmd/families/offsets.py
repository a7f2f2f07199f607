"""Offsets: int4 with a scale and an offset for each block of a row, in graphs whose blocks have only scales.

A block of 32 values w is step (q - 8) + c, with q from 0 to 15: 16 levels from its least value to its largest. With s
the sums of x over the same blocks

    W x = L x + C s

L, whose blocks have only scales, takes the weight's place. C (rows, columns / 32) is a parameter of its own, `q_offset`
of `q`. Weights that came in such blocks, as in llama.cpp's Q4_1, keep their values. Other weights are rounded to 16
levels that fit their block; with only a scale the levels would lie around zero.

In each block of L the least value is -8 steps. So a scale by the largest value, of 8 steps, gives every level again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ssmd.families.weights import Array, Binding, mapped
from ssmd.model.source import SourceError

BLOCK = 32
SUFFIX = "_offset"  # of the parameter C of a weight
_MULTIPLIED = {
    "q",
    "k",
    "v",
    "o",
    "in",
    "out",
    "gate",
    "gate_up",
    "up",
    "down",
    "x",
    "dt",
}  # matrices of a layer, in all families
_EXACT = "_ba"  # of gated DeltaNet: few rows, and what they give stands in an exponent
LEAST_STEP = np.float32(2.0**-18)  # a step: below float16's normal numbers, yet right to 1 in 128


def is_multiplied(name: str) -> bool:
    """Return True if a parameter is a matrix in a layer's product. Mamba-1's A, for example, is not."""
    layer, _, own = name.partition("_")
    return layer.startswith("layer") and own in _MULTIPLIED


def is_exact(name: str) -> bool:
    """Return True if a matrix stays float32 in every quantization."""
    return name.endswith(_EXACT)


def with_offsets(bindings: Mapping[str, Binding], weights: Collection[str]) -> dict[str, Binding]:
    """Return the bindings of a family's module with offsets for these weights. Their rows are multiples of BLOCK."""
    made = dict(bindings)
    for name in weights:
        made[name] = mapped(lambda rows: divided(rows)[0], bindings[name], by_rows=True)
        made[name + SUFFIX] = mapped(lambda rows: divided(rows)[1], bindings[name], by_rows=True)
    return made


def divided(rows: Array) -> tuple[Array, Array]:
    """Return L (n, K) and C (n, K / 32) of rows (n, K). Steps are float16: raises SourceError if one is larger."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    low = blocks.min(-1, keepdims=True)
    step = np.maximum((blocks.max(-1, keepdims=True) - low) / np.float32(15), LEAST_STEP)
    if not step.max() <= np.finfo(np.float16).max:
        raise SourceError(
            f"weights 2^{np.log2(step.max() * 15):.0f} apart are too far for int4; build with --quant int8"
        )
    step = step.astype(np.float16).astype(np.float32)
    levels = np.clip(np.rint((blocks - low) / step), 0, 15) - np.float32(8)
    return (levels * step).reshape(rows.shape), (low + 8 * step)[..., 0]
