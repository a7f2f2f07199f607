"""Operations of MIL that give a constant from a smaller one: quantized by an affine map, or by a table of values."""

from __future__ import annotations

from typing import Any

import numpy as np
from mil.operations import REQUIRED, Run, integers, operation
from mil.weights import Array, elements


def _blocks(a: Array, shape: tuple[int, ...]) -> Array:
    """Each element repeated over its block, so that `a` becomes of `shape`."""
    if a.ndim != len(shape) or any(whole % part for whole, part in zip(shape, a.shape, strict=True)):
        raise ValueError(f"blocks of {a.shape} do not divide {shape}")
    for axis, (whole, part) in enumerate(zip(shape, a.shape, strict=True)):
        a = np.repeat(a, whole // part, axis)
    return a


@operation(
    "constexpr_blockwise_shift_scale",
    "scale:float data:stored offset?:stored",
)
def constexpr_blockwise_shift_scale() -> Run:
    """scale (data - offset), where an element of scale and offset holds for a block of data."""

    def run(scale: Array, data: Array, offset: Array | None) -> Array:
        values = data.astype(np.float32)
        if offset is not None:
            if offset.shape != scale.shape:
                raise ValueError(f"an offset of shape {offset.shape} with a scale of {scale.shape}")
            values = values - _blocks(offset.astype(np.float32), data.shape)
        return values * _blocks(scale, data.shape)

    return run


@operation(
    "constexpr_affine_dequantize",
    "scale:float quantized_data:stored zero_point:stored",
    axis=REQUIRED,
)
def constexpr_affine_dequantize(axis: Any) -> Run:
    """scale (quantized_data - zero_point), each a scalar or one value for each place of `axis`."""

    def run(scale: Array, quantized_data: Array, zero_point: Array) -> Array:
        sizes = [1] * quantized_data.ndim
        sizes[int(axis)] = -1
        shift = zero_point.astype(np.float32).reshape(sizes)
        return (quantized_data.astype(np.float32) - shift) * scale.reshape(sizes)

    return run


@operation("constexpr_lut_to_dense", "lut indices:index", shape=None, vector_axis=None, exact=True)
def constexpr_lut_to_dense(shape: Array | None, vector_axis: Any) -> Run:
    """The values of a table at `indices`.

    Before iOS 18: indices are packed into bytes, lut (values,), and `shape` is the shape of the result. Since: lut is
    of indices' rank and two more, (tables for each block of indices, ..., values, vector), and the elements of a
    vector lie along `vector_axis`.
    """

    def packed(lut: Array, indices: Array) -> Array:
        bits = int(np.log2(lut.size))
        sizes = integers(shape)
        count = int(np.prod(sizes, dtype=np.int64))
        return lut[elements(indices, f"uint{bits}", count)].reshape(sizes)

    def dense(lut: Array, indices: Array) -> Array:
        *tables, values, vector = lut.shape
        which = _blocks(np.arange(int(np.prod(tables))).reshape(tables), indices.shape)
        chosen = lut.reshape(-1, values, vector)[which, indices]  # (*indices, vector)
        if vector == 1:
            return chosen[..., 0]
        axis = int(vector_axis) % indices.ndim
        sizes = list(indices.shape)
        sizes[axis] *= vector
        return np.moveaxis(chosen, -1, axis + 1).reshape(sizes)

    return dense if shape is None else packed
