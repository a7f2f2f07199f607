"""GGML's encodings of weights in blocks, as GGUF files hold them, and their values as float32.

The layouts: ggml/src/ggml-common.h of https://github.com/ggml-org/llama.cpp. The arithmetic is, to the last bit, that
of dequantize_row_* in ggml-quants.c there. A block is a run of values of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
Values = NDArray[np.float32]
# The names of all types, for messages: enum ggml_type in ggml.h.
_TYPES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
)
NAMES: Mapping[int, str] = dict(enumerate(_TYPES.split())) | {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}


@dataclass(frozen=True)
class Encoding:
    """An encoding: values and bytes of a block. decode: makes float32 (n, values) of bytes (n, nbytes)."""

    name: str
    values: int
    nbytes: int
    decode: Callable[[Blocks], Values]


def _half(blocks: Blocks, at: int) -> Values:
    """Return the float16 at byte `at` of each block, as (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """Return the low halves of bytes (n, b), then the high ones, as (n, 2 b)."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: Blocks, at: int) -> Blocks:
    """Return the 32 bits at byte `at` of each block, the lowest first, each worth 16, as (n, 32)."""
    bits: Blocks = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _f32(blocks: Blocks) -> Values:
    return np.asarray(blocks.view("<f4"), np.float32)


def _f16(blocks: Blocks) -> Values:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Blocks) -> Values:
    return np.asarray((blocks.view("<u2").astype("<u4") << 16).view("<f4"), np.float32)


def _q4_0(blocks: Blocks) -> Values:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Blocks) -> Values:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Values:
    levels = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (levels.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Blocks) -> Values:
    levels = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * levels.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Values:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _six_bits(packed: Blocks) -> tuple[Values, Values]:
    """Return the 8 scales and the 8 minima of 6 bits in 12 bytes (n, 12), each as (n, 8, 1)."""
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return scales.astype(np.float32)[..., None], minima.astype(np.float32)[..., None]


def _k_levels(blocks: Blocks, levels: Blocks) -> Values:
    """Return the values of levels (n, 8, 32): d * scale * level - dmin * minimum, of eight parts of a block."""
    scales, minima = _six_bits(blocks[:, 4:16])
    step, least = _half(blocks, 0)[..., None] * scales, _half(blocks, 2)[..., None] * minima
    return (step * levels.astype(np.float32) - least).reshape(len(blocks), -1)


def _q4_k(blocks: Blocks) -> Values:
    packed = blocks[:, 16:].reshape(-1, 32)  # (4 n, 32): the low halves are one part, the high ones the next
    return _k_levels(blocks, _nibbles(packed).reshape(len(blocks), 8, 32))


def _q5_k(blocks: Blocks) -> Values:
    levels = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(len(blocks), 8, 32)
    fifth: Blocks = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # (n, 8, 32)
    return _k_levels(blocks, levels | fifth << np.uint8(4))  # bit p of a byte is of part p


def _q6_k(blocks: Blocks) -> Values:
    count = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(-1, 64))  # (2 n, 128): a half of a block
    packed = blocks[:, 128:192].reshape(-1, 1, 32)
    high = (packed >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 128)
    levels = (low | high << 4).astype(np.float32) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)  # (n, 16), each of 16 values
    step = (_half(blocks, 208) * scales)[..., None]
    return (step * levels.reshape(count, 16, 16)).reshape(count, -1)


ENCODINGS: Mapping[int, Encoding] = {
    0: Encoding("F32", 1, 4, _f32),
    1: Encoding("F16", 1, 2, _f16),
    2: Encoding("Q4_0", 32, 18, _q4_0),
    3: Encoding("Q4_1", 32, 20, _q4_1),
    6: Encoding("Q5_0", 32, 22, _q5_0),
    7: Encoding("Q5_1", 32, 24, _q5_1),
    8: Encoding("Q8_0", 32, 34, _q8_0),
    12: Encoding("Q4_K", 256, 144, _q4_k),
    13: Encoding("Q5_K", 256, 176, _q5_k),
    14: Encoding("Q6_K", 256, 210, _q6_k),
    30: Encoding("BF16", 1, 2, _bf16),
}
