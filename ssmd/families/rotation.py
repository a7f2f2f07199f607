"""Hadamard rotation: it spreads the outliers that make int8 hard over many channels (QuaRot, arXiv:2404.00456).

A few channels of the residual stream, and of the inputs of `out` and `down`, are many times larger than the others. An
activation's 8 bits are spent on them. H_b is the Hadamard matrix of b channels over sqrt(b), symmetric and its own
inverse; b is at most 64. R is the block diagonal matrix of as many H_b as the channels need. The same function is
computed by

    h' = h R                       residual stream: RMSNorm's factor does not change by R
    W' = W diag(norm) R            its readers: q, k, v, in, gate_up, up, router, experts_gate and experts_up, and an
                                   untied head; the norms are gone
    W' = R W, bias' = bias R       its writers: o, out, down, experts_down
    embedding' = embedding R
    W' = W R                       out and down once more, on the other side: their input is multiplied by H_b in
                                   the graph (`spread_out`, `spread_down`), 64 products for each channel

A tied head reads with the embedding's matrix. So the graph undoes the rotation (`spread_norm`), applies the last norm,
which stays, and rotates again. Only sums and differences are used, always in one order: the bits are the same anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ssmd.families.weights import Array, Binding, mapped

BLOCK = 64  # b; the graph's matrices of it, 64 x 64, are too small to be quantized
_MIXERS, _MLPS = ("q", "k", "v", "in"), ("gate_up", "up", "router", "experts_gate", "experts_up")
READERS = {"norm1": _MIXERS, "norm2": _MLPS, "norm": _MIXERS + _MLPS}  # by the norm they read through
WRITERS = ("o", "out", "down")
SPREAD = ("out", "down")
_ELEMENTS = 48 << 10  # rotated at a time, so that they stay in the processor's cache


def block_of(channels: int) -> int:
    """Return the block b for a number of channels: the largest power of two that divides it, at most BLOCK."""
    return min(channels & -channels, BLOCK)


def hadamard(size: int) -> Array:
    """Return H_b as float32 (b, b). size: b, a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: Array = (matrix / np.sqrt(size)).astype(np.float32)
    return scaled


def turned(array: Array, scale: Array | None = None) -> Array:
    """Return array diag(scale) R as float32, for an array (n,) or (rows, n)."""
    channels = array.shape[-1]
    size = block_of(channels)
    rows = array.reshape(-1, channels)
    out = np.empty(rows.shape, np.float32)
    step = max(1, _ELEMENTS // channels)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        blocks = (part if scale is None else part * scale).reshape(-1, size)
        out[start : start + step].reshape(-1, size)[:] = _product(blocks.T.copy()).T
    return out.reshape(array.shape)


def _product(x: Array) -> Array:
    """Return H_b x for x (b, n), which is overwritten. Each sum is over long runs of memory."""
    size = len(x)
    y, width = np.empty_like(x), 1
    while width < size:
        a, b = (v.reshape(-1, 2, width, x.shape[1]) for v in (x, y))
        np.add(a[:, 0], a[:, 1], out=b[:, 0])
        np.subtract(a[:, 0], a[:, 1], out=b[:, 1])
        x, y, width = y, x, 2 * width
    if size == BLOCK:
        x *= np.float32(0.125)  # as exact as a division by 8, and faster
    else:
        x /= np.float32(np.sqrt(size))
    return x


def rotated(bindings: Mapping[str, Binding]) -> dict[str, Binding]:
    """Return the rotated bindings of a family's module. Parameters have the same names in all families."""
    made = dict(bindings)
    made["embedding"] = mapped(turned, made["embedding"], by_rows=True)
    for key in bindings:
        layer, _, name = key.partition("_")
        if not layer.startswith("layer"):
            continue
        if name in READERS:
            norm = made.pop(key)
            for reader in (f"{layer}_{r}" for r in READERS[name]):
                if reader in made:
                    made[reader] = _through(norm, made[reader])
        elif name in SPREAD:
            made[key] = mapped(lambda weight: _added(turned(weight)), made[key])
            made.setdefault(f"spread_{name}", _matrix(bindings[key]))
        elif name == "experts_down":
            made[key] = mapped(_each_added, made[key], by_rows=True)
        elif name in WRITERS:
            made[key] = mapped(_added, made[key])
        elif name.removesuffix("_bias") in WRITERS:
            made[key] = mapped(turned, made[key])
    if "head" in made:
        made["head"] = _through(made.pop("norm"), made["head"])
    else:
        made["spread_norm"] = _matrix(bindings["norm"])
    return made


def _through(norm: Binding, weight: Binding) -> Binding:
    """Return the binding of W diag(norm) R."""
    return mapped(turned, weight, norm, by_rows=True)


def _added(weight: Array) -> Array:
    """Return R times a matrix."""
    rows, columns = weight.shape
    size = block_of(rows)
    out = np.empty(weight.shape, np.float32)
    step = max(1, _ELEMENTS // size)
    for block in range(0, rows, size):
        for first in range(0, columns, step):
            place = np.s_[block : block + size, first : first + step]
            out[place] = _product(weight[place].copy())
    return out


def _each_added(weights: Array) -> Array:
    """Return R times the matrix of each expert, (n, rows, columns)."""
    return np.stack([_added(weight) for weight in weights])


def _matrix(reader: Binding) -> Binding:
    """Return the binding of H_b for a parameter's input, which has as many channels as its last axis is long."""
    return mapped(lambda weight: hadamard(block_of(weight.shape[-1])), reader)
