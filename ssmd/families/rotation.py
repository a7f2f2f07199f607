"""Hadamard rotation: what makes int8 hard is spread over many channels beforehand (QuaRot, arXiv:2404.00456).

A few channels of the residual stream, and of what `out` and `down` read, are many times larger than the others; an
activation's 8 bits are spent on them. With H_b the Hadamard matrix of b channels over sqrt(b), symmetric and its own
inverse, and R the block diagonal of as many as there are (b: at most 64), the same function is computed by

    h' = h R                       what the layers add to, as RMSNorm's factor does not change by it
    W' = W diag(norm) R            of what reads it: q, k, v, in, gate_up, up and an untied head; the norms are gone
    W' = R W, bias' = bias R       of what adds to it: o, out, down
    embedding' = embedding R
    W' = W R                       of out and down once more, on the other side: their input is multiplied by H_b in
                                   the graph (`spread_out`, `spread_down`), 64 products for each channel

A tied head reads with the embedding's matrix: the graph undoes the rotation (`spread_norm`), applies the last norm,
which stays, and rotates again. Sums and differences alone, always in one order: the same bits anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ssmd.families.weights import Array, Binding, mapped

BLOCK = 64  # b; the graph's matrices of it, 64 x 64, are too small to be quantized
_MIXERS, _MLPS = ("q", "k", "v", "in"), ("gate_up", "up")
READERS = {"norm1": _MIXERS, "norm2": _MLPS, "norm": _MIXERS + _MLPS}  # by the norm they read through
WRITERS = ("o", "out", "down")
SPREAD = ("out", "down")
_ELEMENTS = 48 << 10  # rotated at a time, so that they stay in the processor's cache


def block_of(channels: int) -> int:
    """The block b of so many channels: the largest power of two that divides them, at most BLOCK."""
    return min(channels & -channels, BLOCK)


def hadamard(size: int) -> Array:
    """H_b as float32 (b, b); `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: Array = (matrix / np.sqrt(size)).astype(np.float32)
    return scaled


def turned(array: Array, scale: Array | None = None) -> Array:
    """array diag(scale) R: the last axis of (n,) or (rows, n), as float32."""
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
    """H_b x for x (b, n), whose memory is used up. Each sum is of long runs."""
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
    """The bindings of a family's module, rotated. Parameters are named alike in all families."""
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
    """W diag(norm) R."""
    return mapped(turned, weight, norm, by_rows=True)


def _added(weight: Array) -> Array:
    """R weight, of a matrix."""
    rows, columns = weight.shape
    size = block_of(rows)
    out = np.empty(weight.shape, np.float32)
    step = max(1, _ELEMENTS // size)
    for block in range(0, rows, size):
        for first in range(0, columns, step):
            place = np.s_[block : block + size, first : first + step]
            out[place] = _product(weight[place].copy())
    return out


def _matrix(reader: Binding) -> Binding:
    """The H_b for what a parameter reads: as many channels as its last axis is long."""
    return mapped(lambda weight: hadamard(block_of(weight.shape[-1])), reader)
