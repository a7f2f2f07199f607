"""The encodings of parameters in runtimes' files: the same bytes as the converters', made with numpy alone.

Every scale belongs to one row (an output channel) or to a block of one, so that rows can be encoded a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.families.offsets import BLOCK
from ssmd.families.weights import Array

Encoded = NDArray[Any]
_TINY = np.float32(np.finfo(np.float32).eps)  # nncf's smallest scale
_SMALLEST = np.float32(1e-9)  # ai-edge-quantizer's smallest bound


class EncodingError(ValueError):
    """Values that the encoding cannot hold; the message says what is wrong with them."""


@dataclass(frozen=True)
class Encoding:
    """An encoding of rows. form: makes all parts at once (values and scales). part: the number of this part."""

    form: Callable[[Array], tuple[Encoded, ...]]
    part: int = 0
    matrices: bool = False  # whether it is for matrices alone, or several of one size: experts
    bits: int = 8  # of a value of a matrix


def _f32(rows: Array) -> tuple[Encoded, ...]:
    return (np.ascontiguousarray(rows, "<f4"),)


def _f16(rows: Array) -> tuple[Encoded, ...]:
    return (_half(rows),)


def _nncf_int8(rows: Array) -> tuple[Encoded, ...]:
    """Encode as nncf 3.4, INT8_SYM: int8 (n, k) in -128..127 and float16 scales (n, 1).

    A scale is negative if the largest value is positive, so that all 256 steps are used.
    """
    low, high = np.abs(rows.min(-1, keepdims=True)), rows.max(-1, keepdims=True)
    scale = np.where(low >= high, low, -high) / np.float32(128)
    scale = np.where(np.abs(scale) < _TINY, _TINY, scale)
    return np.clip(np.rint(rows / scale), -128, 127).astype(np.int8), _half(scale.astype(np.float32))


def _nncf_int4(rows: Array) -> tuple[Encoded, ...]:
    """Encode as nncf 3.4, INT4_SYM in groups of BLOCK: int4 (n, k / 2), two in a byte, the first in the low half.

    The scales are float16 (n, k / BLOCK). Of 8 steps the largest value has the scale, as in _nncf_int8.
    """
    blocks = _blocks(rows)
    low, high = np.abs(blocks.min(-1, keepdims=True)), blocks.max(-1, keepdims=True)
    scale = np.where(low >= high, low, -high) / np.float32(8)
    scale = np.where(np.abs(scale) < _TINY, _TINY, scale)
    return nibbles(blocks / scale), _half(scale[..., 0].astype(np.float32))


def _litert_int8(rows: Array) -> tuple[Encoded, ...]:
    """Encode as ai-edge-quantizer 0.10, min_max_uniform_quantize, symmetric by channel.

    Returns int8 (n, k) in -127..127 and float32 scales (n, 1).
    """
    bound = np.maximum(np.abs(rows).max(-1, keepdims=True), _SMALLEST)
    scale = bound / np.float32(127)
    return np.clip(np.rint(rows / scale), -127, 127).astype(np.int8), scale.astype("<f4")


def _litert_int4(rows: Array) -> tuple[Encoded, ...]:
    """Encode as ai-edge-quantizer 0.10, dequantized_weight_recovery in blocks of BLOCK: as _nncf_int4, other scales.

    Of a block of ssmd/families/offsets.py the scale is the least difference between its values without their signs, and
    zero. It is stored in float16, rounded to bfloat16 first.
    """
    blocks = _blocks(rows)
    low = blocks.min(-1)
    scale = low / np.float32(-8)
    others = (blocks.max(-1) != scale * np.float32(7)) | (low >= 0)  # most have levels -8 and 7, one step apart
    if others.any():
        scale[others] = _least_difference(blocks[others])
    return nibbles(blocks / scale[..., None]), _half(bfloat16(scale))


def _least_difference(blocks: Array) -> Array:
    """Return the scales of blocks (n, BLOCK): the least difference that is one, _SMALLEST of a block of zeros."""
    values = np.sort(np.concatenate([np.abs(blocks), np.zeros_like(blocks[:, :1])], -1), -1)
    differences = np.diff(values, axis=-1)
    least = np.where(differences > _SMALLEST, differences, np.float32(np.inf)).min(-1)
    return np.where(np.isinf(least), _SMALLEST, least)


def _coreml_int8(rows: Array) -> tuple[Encoded, ...]:
    """Encode as coremltools 9.0, linear_symmetric by channel, from float16 weights in float16 arithmetic.

    Returns int8 (n, k) in -127..127 and float16 scales (n, 1).
    """
    half = _half(rows)
    bound = np.abs(half).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # rows that are nothing in float16
        scale = (bound + bound) / np.float16(254)
        steps = np.clip(np.rint(half / scale), -127, 127)
    return np.nan_to_num(steps).astype(np.int8), scale.astype("<f2")


def _blocks(rows: Array) -> Array:
    """Return rows (n, k) as blocks (n, k / BLOCK, BLOCK). Raises EncodingError."""
    if rows.shape[-1] % BLOCK:
        raise EncodingError(f"rows of {rows.shape[-1]} values are not whole blocks of {BLOCK}")
    return rows.reshape(len(rows), -1, BLOCK)


def nibbles(blocks: Encoded) -> Encoded:
    """Round blocks (n, k / BLOCK, BLOCK) to levels -8..7, and pack them as bytes (n, k / 2): the first, low half."""
    levels = np.clip(np.rint(blocks), -8, 7).astype(np.int8).reshape(len(blocks), -1)
    halves = levels.view(np.uint8) & 15
    packed: Encoded = halves[:, ::2] | halves[:, 1::2] << 4
    return packed


def bfloat16(values: Array) -> Array:
    """Round finite values to bfloat16, half to even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def _half(values: Array) -> Encoded:
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half).all():
        largest = float(np.abs(values).max())
        raise EncodingError(f"values up to {largest:.3g} are beyond float16, which ends at 65,504; take int8 or f32")
    return half


ENCODINGS: Mapping[str, Encoding] = {
    "f32": Encoding(_f32),
    "f16": Encoding(_f16),
    "nncf-int8": Encoding(_nncf_int8, 0, matrices=True),
    "nncf-int8-scale": Encoding(_nncf_int8, 1, matrices=True),
    "nncf-int4": Encoding(_nncf_int4, 0, matrices=True, bits=4),
    "nncf-int4-scale": Encoding(_nncf_int4, 1, matrices=True, bits=4),
    "litert-int8": Encoding(_litert_int8, 0, matrices=True),
    "litert-int8-scale": Encoding(_litert_int8, 1, matrices=True),
    "litert-int4": Encoding(_litert_int4, 0, matrices=True, bits=4),
    "litert-int4-scale": Encoding(_litert_int4, 1, matrices=True, bits=4),
    "coreml-int8": Encoding(_coreml_int8, 0, matrices=True),
    "coreml-int8-scale": Encoding(_coreml_int8, 1, matrices=True),
}


def decoded(array: Array, encodings: Iterable[str]) -> Array:
    """Return a parameter as a runtime reads it from its file in these encodings."""
    for name in encodings:
        encoding = ENCODINGS[name]
        if encoding.bits == 4:
            packed, scales = encoding.form(array)
            levels = np.stack([packed << 4, packed], -1).astype(np.uint8).view(np.int8) >> 4  # (n, k / 2, 2)
            blocks = levels.reshape(len(array), -1, BLOCK).astype(np.float32)
            return (blocks * scales.astype(np.float32)[..., None]).reshape(array.shape)
        if encoding.matrices:
            values, scales = encoding.form(array)
            return values.astype(np.float32) * scales.astype(np.float32)
        if name == "f16":
            return encoding.form(array)[0].astype(np.float32)
    return array
