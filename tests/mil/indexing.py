"""Operations of MIL that take elements by their place: slices, gathering, the largest ones."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from mil.operations import REQUIRED, Parameters, Run, Unsupported, integers, operation
from mil.weights import Array

_MASKS: dict[str, Any] = {"stride": None, "begin_mask": None, "end_mask": None, "squeeze_mask": None}


def _places(
    begin: Array,
    end: Array,
    stride: Array | None,
    begin_mask: Array | None,
    end_mask: Array | None,
    squeeze_mask: Array | None,
) -> tuple[slice | int, ...]:
    """Python's slices: a masked begin or end reaches to that end of the dimension, a squeezed one is an index."""
    rank = len(begin)
    if len(end) != rank:
        raise ValueError(f"begin {begin} and end {end} are of different lengths")
    strides = (1,) * rank if stride is None else integers(stride)

    def masked(mask: Array | None, axis: int) -> bool:
        return mask is not None and bool(mask[axis])

    return tuple(
        int(begin[axis])
        if masked(squeeze_mask, axis)
        else slice(
            None if masked(begin_mask, axis) else int(begin[axis]),
            None if masked(end_mask, axis) else int(end[axis]),
            strides[axis],
        )
        for axis in range(rank)
    )


@operation("slice_by_index", "x begin:int end:int", **_MASKS, exact=True)
def slice_by_index(**masks: Array | None) -> Run:
    """x[begin[0]:end[0]:stride[0], ...]."""

    def run(x: Array, begin: Array, end: Array) -> Array:
        if len(begin) != x.ndim:
            raise ValueError(f"begin {begin} is not of the rank of {x.shape}")
        return np.asarray(x[_places(begin, end, **masks)])

    return run


@operation("slice_update", "x update begin:int end:int", alike="x update", **_MASKS, exact=True)
def slice_update(**masks: Array | None) -> Run:
    """x with x[begin[0]:end[0]:stride[0], ...] = update, which must be of that slice's shape."""

    def run(x: Array, update: Array, begin: Array, end: Array) -> Array:
        places = _places(begin, end, **masks)
        result = x.copy()
        if len(begin) != x.ndim or update.ndim == 0 or result[places].shape != update.shape:
            raise ValueError(f"an update of shape {update.shape} for the slice {places} of {x.shape}")
        result[places] = update
        return result

    return run


@operation("slice_by_size", "x begin:int size:int", exact=True)
def slice_by_size() -> Run:
    """`size` elements from `begin` on in each dimension; a size of -1 is all there are."""

    def run(x: Array, begin: Array, size: Array) -> Array:
        starts = [
            first + extent if first < 0 else first for first, extent in zip(integers(begin), x.shape, strict=True)
        ]
        ends = [None if n == -1 else first + n for first, n in zip(starts, integers(size), strict=True)]
        return x[tuple(slice(first, last) for first, last in zip(starts, ends, strict=True))]

    return run


def _checked(indices: Array, size: int) -> Array:
    """From iOS 17 on, an index below 0 or past the end is undefined: a model that gives one is wrong."""
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise IndexError(f"indices from {indices.min()} to {indices.max()} into a dimension of {size}")
    return indices


@operation("gather", "x indices:int", axis=0, batch_dims=0, validate_indices=False, exact=True)
def gather(axis: Any, batch_dims: Any, validate_indices: Any) -> Run:
    """x[..., indices, ...] at `axis`; the first `batch_dims` dimensions of both go side by side."""
    at, batch = int(axis), int(batch_dims)

    def run(x: Array, indices: Array) -> Array:
        place = at % x.ndim
        _checked(indices, x.shape[place])
        if batch == 0:
            return np.take(x, indices, place)
        if x.shape[:batch] != indices.shape[:batch] or place < batch:
            raise ValueError(f"batch_dims {batch} of {x.shape} and {indices.shape} at axis {place}")
        rows = x.reshape(-1, *x.shape[batch:])
        wanted = indices.reshape(-1, *indices.shape[batch:])
        taken = np.stack([np.take(row, which, place - batch) for row, which in zip(rows, wanted, strict=True)])
        return taken.reshape(*x.shape[:batch], *taken.shape[1:])

    return run


@operation("gather_along_axis", "x indices:int", axis=0, validate_indices=False, exact=True)
def gather_along_axis(axis: Any, validate_indices: Any) -> Run:
    """The elements along `axis` at `indices`, which has x's other dimensions."""
    at = int(axis)

    def run(x: Array, indices: Array) -> Array:
        place = at % x.ndim
        others = [n for axis, n in enumerate(x.shape) if axis != place]
        if indices.ndim != x.ndim or [n for axis, n in enumerate(indices.shape) if axis != place] != others:
            raise ValueError(f"indices of shape {indices.shape} into {x.shape} along {place}")
        return np.take_along_axis(x, _checked(indices, x.shape[place]).astype(np.int64), place)

    return run


_MODES: dict[str, Any] = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
    "update": operator.setitem,
}


def _mode(mode: str) -> Any:
    if mode not in _MODES:
        raise Unsupported(f"the mode {mode!r}")
    return _MODES[mode]


# The specification says two things of the default mode, so it must be given.
@operation(
    "scatter",
    "data:number indices:int updates:number",
    alike="data updates",
    axis=0,
    mode=REQUIRED,
    validate_indices=False,
)
def scatter(axis: Any, mode: str, validate_indices: Any) -> Run:
    """`data` with its slices at `indices` (n,) of `axis` updated by those of `updates`, of which there are n."""
    at, apply = int(axis), _mode(mode)

    def run(data: Array, indices: Array, updates: Array) -> Array:
        place = at % data.ndim
        if updates.shape != (*data.shape[:place], *indices.shape, *data.shape[place + 1 :]) or indices.ndim != 1:
            raise ValueError(f"updates of shape {updates.shape} at {indices.shape} of {data.shape} along {place}")
        result = data.copy()
        apply(np.moveaxis(result, place, 0), _checked(indices, data.shape[place]), np.moveaxis(updates, place, 0))
        return result

    return run


@operation(
    "scatter_along_axis",
    "data:number indices:int updates:number",
    alike="data updates",
    axis=0,
    mode=REQUIRED,
    validate_indices=False,
)
def scatter_along_axis(axis: Any, mode: str, validate_indices: Any) -> Run:
    """`data` with its elements along `axis` at `indices` updated by `updates`, which is of indices' shape."""
    at, apply = int(axis), _mode(mode)

    def run(data: Array, indices: Array, updates: Array) -> Array:
        place = at % data.ndim
        if indices.ndim != data.ndim or updates.shape != indices.shape:
            raise ValueError(f"updates of shape {updates.shape} at {indices.shape} of {data.shape}")
        result = data.copy()
        where = list(np.indices(indices.shape))
        where[place] = _checked(indices, data.shape[place])
        apply(result, tuple(where), updates)
        return result

    return run


def _topk_types(types: Mapping[str, str], given: Parameters) -> tuple[str, ...]:
    indices = (str(given["output_indices_dtype"]),) if given["return_indices"] else ()
    return (types["x"], *indices)


@operation(
    "topk",
    "x:number",
    result=_topk_types,
    k=1,
    axis=-1,
    ascending=False,
    sort=True,
    return_indices=True,
    output_indices_dtype="int32",
    exact=True,
)
def topk(k: Any, axis: Any, ascending: Any, sort: Any, return_indices: Any, output_indices_dtype: str) -> Run:
    """The k largest elements along `axis` and their indices; of equal ones the first. Not sorted: in any order."""
    if output_indices_dtype not in ("int32", "uint16"):
        raise Unsupported(f"indices of type {output_indices_dtype}")
    count, at = int(k), int(axis)

    def run(x: Array) -> Array | tuple[Array, Array]:
        order = _order(x, at, bool(ascending)).take(np.arange(count), at)
        values = np.take_along_axis(x, order, at)
        return (values, order.astype(output_indices_dtype)) if return_indices else values

    return run


def _order(x: Array, axis: int, ascending: bool) -> Array:
    """The indices that sort x along `axis`, equal elements in the order of their places."""
    if ascending:
        return np.argsort(x, axis, kind="stable")
    backwards = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    return np.asarray(x.shape[axis] - 1 - backwards)


@operation("argsort", "x:number", result="int32", axis=-1, ascending=False, exact=True)
def argsort(axis: Any, ascending: Any) -> Run:
    """The indices that sort x along `axis`."""
    return lambda x: _order(x, int(axis), bool(ascending)).astype(np.int32)
