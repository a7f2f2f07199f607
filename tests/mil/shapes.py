"""Operations of MIL that move elements and change shapes, or that make a tensor of a shape: no value is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from mil.operations import REQUIRED, Run, Unsupported, integers, operation
from mil.weights import Array


@operation("reshape", "x shape:int", exact=True)
def reshape() -> Run:
    """To `shape`. A 0 takes the size of x's dimension that is as far from the last, or 1; a -1 takes what is left."""

    def run(x: Array, shape: Array) -> Array:
        sizes = list(integers(shape))
        for place, size in enumerate(sizes):
            if size == 0:
                behind = len(sizes) - place
                sizes[place] = x.shape[-behind] if behind <= x.ndim else 1
        return x.reshape(sizes)

    return run


@operation("transpose", "x", perm=REQUIRED, exact=True)
def transpose(perm: Array) -> Run:
    """The dimensions in the order `perm`."""
    order = integers(perm)
    return lambda x: x.transpose(order)


@operation("expand_dims", "x", axes=REQUIRED, exact=True)
def expand_dims(axes: Array) -> Run:
    """With dimensions of 1 at `axes` of the result."""
    places = integers(axes)
    return lambda x: np.expand_dims(x, places)


@operation("squeeze", "x", axes=None, exact=True)
def squeeze(axes: Array | None) -> Run:
    """Without its dimensions of 1, or those among `axes` (others among them stay)."""
    if axes is None:
        return np.squeeze
    places = integers(axes)
    return lambda x: np.squeeze(x, tuple(axis for axis in places if x.shape[axis] == 1))


@operation("concat", "values*", axis=REQUIRED, interleave=False, exact=True)
def concat(axis: Any, interleave: Any) -> Run:
    """One after the other along `axis`, or element by element in turn."""
    at = int(axis)
    if not interleave:
        return lambda *values: np.concatenate(values, at)

    def run(*values: Array) -> Array:
        place = at % values[0].ndim
        sizes = list(values[0].shape)
        sizes[place] *= len(values)
        return np.stack(values, place + 1).reshape(sizes)

    return run


@operation("stack", "values*", axis=REQUIRED, exact=True)
def stack(axis: Any) -> Run:
    """Along a new dimension `axis`."""
    at = int(axis)
    return lambda *values: np.stack(values, at)


@operation("split", "x", axis=REQUIRED, num_splits=None, split_sizes=None, exact=True)
def split(axis: Any, num_splits: Any, split_sizes: Array | None) -> Run:
    """Into `num_splits` equal parts along `axis`, or into parts of `split_sizes`."""
    at = int(axis)
    if split_sizes is None:
        if num_splits is None:
            raise Unsupported("neither num_splits nor split_sizes")
        parts = int(num_splits)
        return lambda x: np.split(x, parts, at)
    sizes = integers(split_sizes)
    if num_splits is not None and int(num_splits) != len(sizes):
        raise Unsupported(f"{num_splits} splits of {len(sizes)} sizes")
    ends = np.cumsum(sizes)

    def run(x: Array) -> list[Array]:
        if ends[-1] != x.shape[at]:
            raise ValueError(f"the sizes {sizes} do not add up to {x.shape[at]}")
        return np.split(x, ends[:-1], at)

    return run


@operation("tile", "x reps:int", exact=True)
def tile() -> Run:
    """Repeated `reps` times along each dimension."""
    return lambda x, reps: np.tile(x, integers(reps))


@operation("reverse", "x", axes=None, exact=True)
def reverse(axes: Array | None) -> Run:
    """From the end to the beginning, along `axes` or all dimensions."""
    places = None if axes is None else integers(axes)
    return lambda x: np.flip(x, places)


@operation("pad", "x pad:int", mode="constant", constant_val=0.0, exact=True)
def pad(mode: str, constant_val: Any) -> Run:
    """With pad[2i] elements before and pad[2i + 1] after each of the last dimensions that `pad` has pairs for."""
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    if mode not in modes:
        raise Unsupported(f"the mode {mode!r}")
    extra: dict[str, Any] = {"constant_values": constant_val} if mode == "constant" else {}

    def run(x: Array, pad: Array) -> Any:
        pairs = pad.reshape(-1, 2)
        widths: Any = [(0, 0)] * (x.ndim - len(pairs)) + [integers(pair) for pair in pairs]
        return np.pad(x, widths, modes[mode], **extra)  # type: ignore[call-overload]

    return run


@operation("fill", "shape:int", result=lambda types, given: (types.get("value", "fp32"),), value=0.0)
def fill(value: Any) -> Run:
    """A tensor of `shape` of one value."""
    return lambda shape: np.full(integers(shape), value)


@operation("fill_like", "ref_tensor", result=lambda types, given: (types.get("value", "fp32"),), value=0.0)
def fill_like(value: Any) -> Run:
    """A tensor of the shape of another, of one value."""
    return lambda ref_tensor: np.full(ref_tensor.shape, value)


@operation("range_1d", "start:number end:number step:number", alike="start end step")
def range_1d() -> Run:
    """From start by step, up to but without end, (n,)."""
    return lambda start, end, step: np.arange(start, end, step, dtype=start.dtype)


@operation("shape", "x", result="int32", exact=True)
def shape() -> Run:
    """The shape of x, (rank,)."""
    return lambda x: np.array(x.shape, np.int32)


@operation("band_part", "x", lower=-1, upper=-1, exact=True)
def band_part(lower: Any, upper: Any) -> Run:
    """With zeros where the row is more than `lower` below the diagonal or `upper` above it (a negative one: never)."""

    def run(x: Array) -> Array:
        rows, columns = np.indices(x.shape[-2:])
        kept = ((lower < 0) | (rows - columns <= lower)) & ((upper < 0) | (columns - rows <= upper))
        return np.where(kept, x, np.zeros_like(x))

    return run


@operation(
    "one_hot",
    "indices:int one_hot_vector_size:int",
    result=lambda types, given: (types.get("on_value", "int32"),),
    axis=-1,
    on_value=1,
    off_value=0,
    exact=True,
)
def one_hot(axis: Any, on_value: Any, off_value: Any) -> Run:
    """`on_value` at each index along a new dimension `axis`, `off_value` elsewhere."""
    at = int(axis)

    def run(indices: Array, one_hot_vector_size: Array) -> Array:
        marks = indices[..., None] == np.arange(int(one_hot_vector_size))
        return np.where(np.moveaxis(marks, -1, at), np.asarray(on_value), np.asarray(off_value))

    return run
