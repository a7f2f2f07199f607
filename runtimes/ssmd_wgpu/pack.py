"""The form of weights in an artifact's file: safetensors, with matrices as rows of whole 16-byte blocks.

    f32   F32 (N, 4 KB)
    f16   F16 (N, 8 KB)
    int8  I8 (N, 16 KB), name.scale F32 (N,): symmetric, the largest value of a row is 127
    int4  U8 (N, 16 KB), name.scale F16 (N, KB): 32 values a block, symmetric, levels -8 to 7 stored from 0 to 15. Of
          each 4 bytes the low halves are 4 values and the high halves the next 4
Rows are padded with zeros to whole blocks. Vectors are F32.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ssmd.model.source import SourceError, Tensor, safetensors_header
from ssmd.runtime.protocol import ProgramError

FILE = "weights.safetensors"
Format = Literal["f32", "f16", "int8", "int4"]
Array = NDArray[Any]
VALUES: dict[Format, int] = {"f32": 4, "f16": 8, "int8": 16, "int4": 32}  # of a block
_DTYPES: dict[Format, str] = {"f32": "F32", "f16": "F16", "int8": "I8", "int4": "U8"}
_SCALES: dict[Format, str] = {"int8": "F32", "int4": "F16"}
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
_DECODED_VALUES = 1 << 20  # at a time
_SMALL = ("x", "dt")  # Mamba-1's: few bytes, and what they give stands in an exponent
# Gated DeltaNet's, likewise: it decides on what a state forgets. A router, as a rounded one chooses other experts.
_EXACT = ("ba", "router")
_BYTEWISE = ("embedding", "head")


class PackError(ValueError):
    """Values that a format cannot hold; the message says which."""


def format_of(name: str, quantization: Format) -> Format:
    """Return the format of a matrix in an artifact of that quantization."""
    own = name.rpartition("_")[2]
    if own in _EXACT:
        return "f32"
    if quantization in ("f32", "f16"):
        return quantization
    if own in _SMALL:
        return "f16"
    return "int8" if name in _BYTEWISE else quantization


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return True if a parameter is packed in a format; small tables of two axes are not."""
    return len(shape) == 2 and name.rpartition("_")[2] not in ("conv", "A", "cos", "sin")


def blocks(columns: int, fmt: Format) -> int:
    """Count the blocks of 16 bytes in a packed row: KB."""
    return -(-columns // VALUES[fmt])


def nbytes(rows: int, columns: int, fmt: Format) -> int:
    """Return the bytes of a packed matrix (rows, columns), with its scales."""
    scale = {"int8": 4, "int4": 2 * blocks(columns, fmt)}.get(fmt, 0)
    return rows * (16 * blocks(columns, fmt) + scale)


def encode(rows: NDArray[np.float32], fmt: Format) -> tuple[Array, ...]:
    """Encode rows (n, K) for the file: values and, if the format has them, scales. Raises PackError."""
    padded = np.zeros((len(rows), blocks(rows.shape[1], fmt) * VALUES[fmt]), np.float32)
    padded[:, : rows.shape[1]] = rows
    if fmt == "f32":
        return (padded,)
    if fmt == "f16":
        return (_half(padded),)
    if fmt == "int8":
        scale = np.abs(padded).max(1) / np.float32(127)
        scale[scale < np.finfo(np.float32).tiny] = 1.0
        return np.rint(padded / scale[:, None]).astype(np.int8), scale
    groups = padded.reshape(len(rows), -1, 32)
    at = np.abs(groups).argmax(-1)[..., None]
    scale16 = _half(np.take_along_axis(groups, at, -1)[..., 0] / np.float32(-8))  # (n, KB), signed: uses level -8
    scale16[scale16 == 0] = 1.0
    levels = np.clip(np.rint(groups / scale16[..., None].astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    halves = levels.reshape(len(rows), -1, 2, 4)  # of each 8 values the first 4 and the next 4
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(rows), -1), scale16


def decoded(columns: int, fmt: Format, values: Array, *scales: Array) -> NDArray[np.float32]:
    """Decode rows to the kernels' values (n, K): the inverse of `encode`."""
    if fmt == "int4":
        parts = values.reshape(len(values), -1, 4)
        levels = np.stack([parts & 15, parts >> 4], 2).reshape(len(values), -1, 32)
        whole = (levels.astype(np.float32) - 8) * scales[0].astype(np.float32)[..., None]
        return whole.reshape(len(values), -1)[:, :columns]
    whole = values.astype(np.float32)
    return (whole * scales[0][:, None] if scales else whole)[:, :columns]


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half).all():
        raise PackError(f"values up to {float(np.abs(values).max()):.3g} are beyond float16, which ends at 65,504")
    return half


@dataclass(frozen=True)
class Matrix:
    """Where a matrix of a mapped file stands; `values` and `scales` are views of it."""

    rows: int
    columns: int
    fmt: Format
    values: Array
    scales: Array | None

    @property
    def blocks(self) -> int:
        return blocks(self.columns, self.fmt)


class Weights:
    """An artifact's mapped file of weights. Every tensor has its shape in `parameters`."""

    def __init__(self, file: Path, parameters: Mapping[str, tuple[int, ...]]) -> None:
        """Map a file of packed weights. Raises ProgramError if a tensor is missing, one too many, or does not fit."""
        try:
            self._tensors = safetensors_header(file)
            with file.open("rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (SourceError, OSError, ValueError) as err:
            raise ProgramError(f"{file} cannot be read ({err}); build the artifact again") from err
        self._file = file
        self.vectors: dict[str, NDArray[np.float32]] = {}
        self.matrices: dict[str, Matrix] = {}
        known = set()
        for name, shape in parameters.items():
            tensor = self._tensor(name)
            known |= {name, f"{name}.scale"}
            if is_matrix(name, shape):
                self.matrices[name] = self._matrix(name, tensor, *shape)
            else:
                self._check(name, tensor, "F32", shape)
                self.vectors[name] = self._view(tensor)
        if strangers := sorted(self._tensors.keys() - known):
            raise ProgramError(
                f"{file} holds {strangers[0]!r}, which the plan has no use for; build the artifact again"
            )

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Yield a parameter's values in the kernels as float32, some rows at a time."""
        if name in self.vectors:
            yield self.vectors[name]
            return
        m = self.matrices[name]
        step = max(1, _DECODED_VALUES // m.columns)
        for first in range(0, m.rows, step):
            part = slice(first, first + step)
            yield decoded(m.columns, m.fmt, m.values[part], *(() if m.scales is None else (m.scales[part],)))

    def _matrix(self, name: str, tensor: Tensor, rows: int, columns: int) -> Matrix:
        fmt = next((f for f, dtype in _DTYPES.items() if dtype == tensor.dtype), None)
        if fmt is None:
            raise ProgramError(f"{self._file}: {name} is {tensor.dtype}; this ssmd packs {', '.join(_DTYPES.values())}")
        width = blocks(columns, fmt) * (16 if fmt == "int4" else VALUES[fmt])
        self._check(name, tensor, _DTYPES[fmt], (rows, width))
        if fmt not in _SCALES:
            return Matrix(rows, columns, fmt, self._view(tensor), None)
        scale = self._tensor(f"{name}.scale")
        self._check(f"{name}.scale", scale, _SCALES[fmt], (rows,) if fmt == "int8" else (rows, blocks(columns, fmt)))
        return Matrix(rows, columns, fmt, self._view(tensor), self._view(scale))

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ProgramError(f"{self._file} has no {name!r}, which the plan calls for; build the artifact again")
        return self._tensors[name]

    def _check(self, name: str, tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> None:
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise ProgramError(
                f"{self._file}: {name} is {tensor.dtype} {list(tensor.shape)}, the plan says {dtype} {list(shape)}; "
                "it was packed by another version or altered: build the artifact again"
            )

    def _view(self, tensor: Tensor) -> Array:
        dtype = _NUMPY[tensor.dtype]
        return np.frombuffer(self._map, dtype, math.prod(tensor.shape), tensor.begin).reshape(tensor.shape)


Rows = Callable[[], Iterator[NDArray[np.float32]]]  # a parameter's rows in order, block by block


def write(
    file: Path, parameters: Mapping[str, tuple[int, ...]], rows: Mapping[str, Rows], formats: Mapping[str, Format]
) -> None:
    """Write the file in little memory. `formats`: of matrices; all else is F32. Raises PackError naming the tensor."""
    header: dict[str, Any] = {}
    at = 0

    def place(name: str, dtype: str, shape: tuple[int, ...]) -> int:
        nonlocal at
        size = math.prod(shape) * _NUMPY[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
        return at - size

    places: dict[str, list[int]] = {}
    # Safetensors lie side by side, so that the scales, whose sizes are no multiples of 16 bytes, come last.
    for name, shape in parameters.items():
        fmt = formats.get(name)
        whole = shape if fmt is None else (shape[0], blocks(shape[1], fmt) * (16 if fmt == "int4" else VALUES[fmt]))
        places[name] = [place(name, "F32" if fmt is None else _DTYPES[fmt], whole)]
    for name, fmt in formats.items():
        if fmt in _SCALES:
            n, columns = parameters[name]
            places[name].append(
                place(f"{name}.scale", _SCALES[fmt], (n,) if fmt == "int8" else (n, blocks(columns, fmt)))
            )
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # so that values lie at whole cache lines
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        base = f.tell()
        f.truncate(base + at)
        for name in parameters:
            offsets = [base + offset for offset in places[name]]
            for block in rows[name]():
                fmt = formats.get(name)
                try:
                    parts = (np.ascontiguousarray(block, "<f4"),) if fmt is None else encode(block, fmt)
                except PackError as err:
                    raise PackError(f"{name}: {err}; take int8 or f32") from err
                for i, part in enumerate(parts):
                    f.seek(offsets[i])
                    f.write(np.ascontiguousarray(part).data)
                    offsets[i] += part.nbytes
