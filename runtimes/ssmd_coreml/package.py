"""A saved .mlpackage as its protobuf describes it: functions, their tensors and states, operations and constants.

Read with coremltools' classes of the format, which work on every system.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssmd.runtime.hoststate.graph import GraphError, Tensor
from ssmd_coreml import library

_DTYPES: dict[str, np.dtype[Any]] = {
    "FLOAT32": np.dtype(np.float32),
    "FLOAT16": np.dtype(np.float16),
    "INT32": np.dtype(np.int32),
}
PROGRAM = "Data/com.apple.CoreML/model.mlmodel"  # of a package, as is
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
_ALIGNMENT, _SENTINEL, _VERSION = 64, 0xDEADBEEF, 2  # of a file of weights (MILBlob's StorageFormat.hpp)
_NO_WORK = ("const",)  # operations that compute nothing when a function runs


@dataclass(frozen=True)
class Interface:
    """A function's inputs, outputs and states, by name."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    states: dict[str, Tensor]


class Package:
    """A Core ML package on disk, read as protobuf. Raises GraphError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            with library.quiet():
                self._spec = library.coremltools().utils.load_spec(str(path))
        except Exception as err:  # of a file that is no protobuf or missing: as many types as there are causes
            raise GraphError(f"{path.name} cannot be read ({err})") from err
        if self._spec.WhichOneof("Type") != "mlProgram":
            raise GraphError(f"{path.name} is no ML program")

    @property
    def functions(self) -> dict[str, Interface]:
        return {f.name: _interface(f) for f in self._spec.description.functions}

    def operations(self, function: str) -> Iterator[Any]:
        """Yield the operations of a function as in the protobuf, constants included."""
        block = self._spec.mlProgram.functions[function]
        yield from block.block_specializations[block.opset].operations

    def counted(self, function: str) -> dict[str, int]:
        """Return the number of operations that a function runs, by type."""
        counts = Counter(op.type for op in self.operations(function))
        return {kind: counts[kind] for kind in sorted(counts) if kind not in _NO_WORK}

    def constants(self, function: str) -> dict[int, int]:
        """Return the bytes of each constant that a function reads from the file of weights, by its place there."""
        sizes: dict[int, int] = {}
        for op in self.operations(function):
            for value in [*op.attributes.values(), *(b.value for i in op.inputs.values() for b in i.arguments)]:
                if value.WhichOneof("value") == "blobFileValue":
                    shape = [d.constant.size for d in value.type.tensorType.dimensions]
                    bits = _BITS[value.type.tensorType.dataType]
                    sizes[value.blobFileValue.offset] = int(np.prod(shape, dtype=np.int64)) * bits // 8
        return sizes


def blobs(weights: Path) -> list[tuple[int, int]]:
    """Return the blobs of a file of weights: (offset of the data, bytes) of each. Raises GraphError.

    A header of 64 bytes, then each blob, at multiples of 64: uint32 sentinel, uint32 type, uint64 bytes, uint64 offset
    of the data, which follows 64 bytes later.
    """
    size = weights.stat().st_size
    found: list[tuple[int, int]] = []
    with weights.open("rb") as file:
        count, version = struct.unpack("<II", file.read(8).ljust(8, b"\0"))
        at = _ALIGNMENT
        while version == _VERSION and len(found) < count and at + _ALIGNMENT <= size:
            file.seek(at)
            sentinel, _, length, offset = struct.unpack("<IIQQ", file.read(24))
            if sentinel != _SENTINEL or offset != at + _ALIGNMENT or offset + length > size:
                break
            found.append((offset, length))
            at = -(-(offset + length) // _ALIGNMENT) * _ALIGNMENT
    if version != _VERSION or len(found) != count:
        raise GraphError(f"{weights.name} is no file of weights of version {_VERSION}: {len(found)} of {count} blobs")
    return found


# By the protobuf's numbers of DataType (MIL.proto).
_BITS = {1: 8, 10: 16, 11: 32, 12: 64, 21: 8, 22: 16, 23: 32, 24: 64, 25: 4, 31: 8, 32: 16, 33: 32, 34: 64, 35: 4}


def _interface(function: Any) -> Interface:
    return Interface(
        {f.name: _tensor(f.name, f.type.multiArrayType) for f in function.input},
        {f.name: _tensor(f.name, f.type.multiArrayType) for f in function.output},
        {f.name: _tensor(f.name, f.type.stateType.arrayType) for f in function.state},
    )


def _tensor(name: str, array: Any) -> Tensor:
    kind = array.ArrayDataType.Name(array.dataType)
    if kind not in _DTYPES:
        raise GraphError(f"tensor {name!r} is of type {kind}")
    return Tensor(tuple(array.shape), _DTYPES[kind])
