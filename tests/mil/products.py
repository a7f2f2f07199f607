"""Operations of MIL that multiply tensors: linear, matmul, einsum, conv and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mil.operations import REQUIRED, Parameters, Run, Unsupported, integers, operation
from mil.reductions import softmax_of
from mil.weights import Array
from numpy.lib.stride_tricks import sliding_window_view


@operation("linear", "x:number weight:number bias?:number")
def linear() -> Run:
    """x @ weight.T + bias: x (..., K), weight (N, K), bias (N,)."""

    def run(x: Array, weight: Array, bias: Array | None) -> Array:
        y = _product(x, weight.T)  # (..., N)
        return y if bias is None else y + bias

    return run


def _matmul_type(types: Mapping[str, str], given: Parameters) -> tuple[str, ...]:
    if types["x"] != types["y"]:
        raise Unsupported(f"a matmul of {types['x']} and {types['y']}")
    return (types["x"],)


@operation("matmul", "x:number y:number", result=_matmul_type, transpose_x=False, transpose_y=False)
def matmul(transpose_x: Any, transpose_y: Any) -> Run:
    """x @ y as numpy does it, either with its last two dimensions swapped if asked and if it has two."""

    def swapped(a: Array, wanted: Any) -> Array:
        return a.swapaxes(-1, -2) if wanted and a.ndim > 1 else a

    return lambda x, y: _product(swapped(x, transpose_x), swapped(y, transpose_y))


def _product(x: Array, y: Array) -> Array:
    """x @ y, each sum from its first term to its last: (..., M, K) @ (..., K, N) -> (..., M, N).

    Matrix kernels add so, with one accumulator for each output. numpy's library adds in an order that differs from
    processor to processor. Two cumulative sums, made as products with a triangle of ones, then no longer round
    their common terms alike. Their difference is as wrong as the larger one.
    """
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2] or not x.shape[-1] or x.dtype != np.float32:
        return np.asarray(x @ y)
    total = x[..., :, :1] * y[..., :1, :]
    term = np.empty_like(total)
    for k in range(1, x.shape[-1]):
        np.multiply(x[..., :, k : k + 1], y[..., k : k + 1, :], out=term)
        total += term
    return np.asarray(total)


@operation("einsum", "values*:float", equation=REQUIRED)
def einsum(equation: str) -> Run:
    """`bchw,bwhr->bchr` or the same without b: no other equation has a meaning. Dimensions of 1 are broadcast."""
    letters = dict.fromkeys(letter for letter in equation.replace(" ", "") if letter.isalpha())
    renamed = equation.replace(" ", "").translate({ord(old): new for old, new in zip(letters, "bchwr", strict=False)})
    if renamed not in ("bchw,bwhr->bchr", "bch,hcw->bcw"):
        raise Unsupported(f"the equation {equation!r}")

    def run(x: Array, y: Array) -> Array:
        if x.ndim != y.ndim or x.ndim != (4 if renamed.startswith("bchw") else 3):
            raise ValueError(f"{equation!r} of {x.shape} and {y.shape}")
        rows = np.swapaxes(x, -3, -2)  # (b, h, c, w)
        columns = np.swapaxes(y, -3, -2)  # (b, h, w, r)
        return np.swapaxes(rows @ columns, -3, -2)  # (b, c, h, r)

    return run


@operation(
    "conv",
    "x:float weight:float bias?:float",
    strides=None,
    pad_type="valid",
    pad=None,
    dilations=None,
    groups=1,
)
def conv(strides: Array | None, pad_type: str, pad: Array | None, dilations: Array | None, groups: Any) -> Run:
    """x (N, C, *D), weight (O, C / groups, *K), bias (O,) -> (N, O, *D'), of one to three spatial dimensions."""
    if pad_type not in ("valid", "custom", "same", "same_lower"):
        raise Unsupported(f"the pad_type {pad_type!r}")
    parts = int(groups)

    def run(x: Array, weight: Array, bias: Array | None) -> Array:
        rank = x.ndim - 2
        steps = (1,) * rank if strides is None else integers(strides)
        gaps = (1,) * rank if dilations is None else integers(dilations)
        reach = tuple((size - 1) * gap + 1 for size, gap in zip(weight.shape[2:], gaps, strict=True))
        if x.shape[1] != weight.shape[1] * parts or weight.shape[0] % parts:
            raise ValueError(f"a conv of {x.shape} with {weight.shape} in {parts} groups")
        widths = _padding(pad_type, pad, x.shape[2:], reach, steps)
        padded = np.pad(x, [(0, 0), (0, 0), *widths])
        axes: Any = tuple(range(2, 2 + rank))  # numpy takes several; its types know of one
        windows: Array = sliding_window_view(padded, reach, axes)  # (N, C, *D, *reach)
        every: Any = (..., *(slice(None, None, step) for step in steps), *(slice(None, None, gap) for gap in gaps))
        windows = windows[every]  # (N, C, *D', *K)
        n, sizes = x.shape[0], windows.shape[2 : 2 + rank]
        grouped = windows.reshape(n, parts, -1, *sizes, *weight.shape[2:])
        grouped = np.moveaxis(grouped, 2, 2 + rank)  # (N, G, *D', C / G, *K)
        rows = grouped.reshape(n, parts, int(np.prod(sizes)), -1)  # (N, G, positions, C / G * taps)
        columns = weight.reshape(parts, weight.shape[0] // parts, -1)  # (G, O / G, C / G * taps)
        y = rows @ columns.swapaxes(1, 2)  # (N, G, positions, O / G)
        y = y.swapaxes(2, 3).reshape(n, weight.shape[0], *sizes)
        return y if bias is None else y + bias.reshape(-1, *(1,) * rank)

    return run


def _padding(
    pad_type: str, pad: Array | None, sizes: tuple[int, ...], reach: tuple[int, ...], steps: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Zeros before and after each spatial dimension. `same`: as many as give ceil(size / step) outputs."""
    if pad_type == "valid":
        return [(0, 0)] * len(sizes)
    if pad_type == "custom":
        if pad is None or len(pad) != 2 * len(sizes):
            raise ValueError(f"a custom pad of {pad} for {len(sizes)} dimensions")
        return [integers(pair) for pair in pad.reshape(-1, 2)]
    widths: list[tuple[int, ...]] = []
    for size, extent, step in zip(sizes, reach, steps, strict=True):
        total = max(0, (-(-size // step) - 1) * step + extent - size)
        less, more = total // 2, total - total // 2
        widths.append((less, more) if pad_type == "same" else (more, less))
    return widths


@operation(
    "scaled_dot_product_attention",
    "query:float key:float value:float attn_mask?:mask",
    alike="query key value",
)
def scaled_dot_product_attention() -> Run:
    """softmax(query key^T / sqrt(E) + mask) value: query (B, *, L, E), key (B, *, S, E), value (B, *, S, V)."""

    def run(query: Array, key: Array, value: Array, attn_mask: Array | None) -> Array:
        if query.ndim < 3 or not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
            raise ValueError(f"attention of {query.shape}, {key.shape} and {value.shape}")
        scores = query @ key.swapaxes(-1, -2) / np.float32(np.sqrt(query.shape[-1]))  # (B, *, L, S)
        if attn_mask is not None and attn_mask.dtype == np.bool_:
            scores = np.where(attn_mask, scores, np.float32(-np.inf))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return softmax_of(scores, -1) @ value  # (B, *, L, V)

    return run
