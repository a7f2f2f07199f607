"""GGUF files (version 3): their fields, and their weights as float32. Only the types of ssmd's default model.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the blocks of Q4_1 and Q8_0: ggml-common.h there.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
BLOCK = 32  # weights that share a scale
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK_BYTES = {_F32: 4 * BLOCK, _Q4_1: 2 + 2 + BLOCK // 2, _Q8_0: 2 + BLOCK}
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS


def is_gguf(file: Path) -> bool:
    """Return True if a file is GGUF by its first bytes or its name."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC or file.suffix.lower() == ".gguf"
    except OSError:
        return file.suffix.lower() == ".gguf"


class GGUF:
    """A file that was read up to its weights. fields: its metadata, which are numbers, texts and lists of them."""

    def __init__(self, file: Path) -> None:
        """Read the header. Raises OSError, and ValueError if the file is not GGUF 3 or is cut off."""
        with file.open("rb") as opened:
            self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._take(4) != MAGIC or self._number("I") != VERSION:
            raise ValueError(f"no GGUF file of version {VERSION}")
        tensors, fields = self._number("Q"), self._number("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            name = self._text()
            self.fields[name] = self._value(self._number("I"))
        listed = [self._listed() for _ in range(tensors)]
        begin = -(-self._at // ALIGNMENT) * ALIGNMENT
        self._tensors = [(name, shape, kind, begin + offset) for name, shape, kind, offset in listed]

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield each tensor's name and its weights, row-major, one at a time. Raises ValueError."""
        for name, shape, kind, at in self._tensors:
            if kind not in _BLOCK_BYTES or not shape or (kind != _F32 and shape[-1] % BLOCK):
                raise ValueError(f"tensor {name!r} has type {kind} and shape {shape}")
            nbytes = math.prod(shape) * _BLOCK_BYTES[kind] // BLOCK
            if at + nbytes > len(self._data):
                raise ValueError(f"tensor {name!r} ends after the file")
            yield name, _widened(kind, np.frombuffer(self._data, np.uint8, nbytes, at)).reshape(shape)

    def _listed(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the name, shape (the slowest dimension first), type and offset of a tensor."""
        name, dimensions = self._text(), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            of, count = self._number("I"), self._number("Q")
            if of == _ARRAY:
                raise ValueError("a list of lists")
            return [self._value(of) for _ in range(count)]  # ends with the file, however many are said
        if kind not in _NUMBERS:
            raise ValueError(f"a field of type {kind}")
        return self._number(_NUMBERS[kind])

    def _text(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, nbytes: int) -> bytes:
        if nbytes > len(self._data) - self._at:
            raise ValueError(f"it ends at byte {len(self._data)}, within its header")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]


def _widened(kind: int, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the weights of blocks: d * q + m (Q4_1), d * q (Q8_0), or float32 unchanged."""
    if kind == _F32:
        return data.view("<f4").astype(np.float32)
    blocks = data.reshape(-1, _BLOCK_BYTES[kind])  # (blocks, bytes)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)  # (blocks, 1)
    if kind == _Q8_0:
        return np.asarray(scale * blocks[:, 2:].view(np.int8), np.float32)
    least = np.ascontiguousarray(blocks[:, 2:4]).view("<f2").astype(np.float32)
    packed = blocks[:, 4:]
    levels = np.concatenate([packed & 15, packed >> 4], axis=1)  # (blocks, BLOCK)
    return np.asarray(scale * levels.astype(np.float32) + least, np.float32)
