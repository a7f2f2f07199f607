"""The encodings of parameters in runtimes' files: the same bytes as the converters', made with numpy alone.

Every scale belongs to one row (an output channel), so that rows can be encoded a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    matrices: bool = False  # whether it is for weights of two axes alone


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


def _litert_int8(rows: Array) -> tuple[Encoded, ...]:
    """Encode as ai-edge-quantizer 0.10, min_max_uniform_quantize, symmetric by channel.

    Returns int8 (n, k) in -127..127 and float32 scales (n, 1).
    """
    bound = np.maximum(np.abs(rows).max(-1, keepdims=True), _SMALLEST)
    scale = bound / np.float32(127)
    return np.clip(np.rint(rows / scale), -127, 127).astype(np.int8), scale.astype("<f4")


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
    "litert-int8": Encoding(_litert_int8, 0, matrices=True),
    "litert-int8-scale": Encoding(_litert_int8, 1, matrices=True),
    "coreml-int8": Encoding(_coreml_int8, 0, matrices=True),
    "coreml-int8-scale": Encoding(_coreml_int8, 1, matrices=True),
}


def decoded(array: Array, encodings: Iterable[str]) -> Array:
    """Return a parameter as a runtime reads it from its file in these encodings."""
    for name in encodings:
        encoding = ENCODINGS[name]
        if encoding.matrices:
            values, scales = encoding.form(array)
            return values.astype(np.float32) * scales.astype(np.float32)
        if name == "f16":
            return encoding.form(array)[0].astype(np.float32)
    return array
