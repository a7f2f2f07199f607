"""A weight file of a Core ML package (weight.bin), typed arrays by offset: the format of MILBlob's StorageFormat.hpp.

    header    64 bytes: uint32 count of blobs, uint32 version 2, reserved
    metadata  64 bytes, at a multiple of 64: uint32 sentinel, uint32 data type, uint64 size in bytes; uint64 offset of
              the data, uint64 unused bits at its end (of types smaller than a byte), reserved
    data      at a multiple of 64

Everything is little endian. A program refers to a blob by the offset of its metadata.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SENTINEL = 0xDEADBEEF
ALIGNMENT = 64  # bytes

# Data type of MIL -> its number in a weight file (enum BlobDataType).
NUMBERS = {
    "fp16": 1,
    "fp32": 2,
    "uint8": 3,
    "int8": 4,
    "int16": 6,
    "uint16": 7,
    "int4": 8,
    "uint1": 9,
    "uint2": 10,
    "uint4": 11,
    "uint3": 12,
    "uint6": 13,
    "int32": 14,
    "uint32": 15,
}
# Types of whole bytes -> as numpy reads them.
DTYPES: dict[str, str] = {
    "fp16": "<f2",
    "fp32": "<f4",
    "uint8": "u1",
    "int8": "i1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
}
# Types smaller than a byte -> bits of an element, whether it is signed.
PACKED = {"int4": (4, True), "uint4": (4, False)} | {f"uint{bits}": (bits, False) for bits in (1, 2, 3, 6)}


class DamagedPackage(ValueError):
    """A package does not hold what its own parts say it does."""


def size_in_bytes(dtype: str, count: int) -> int:
    """Bytes that `count` elements take in a file."""
    return -(-count * PACKED[dtype][0] // 8) if dtype in PACKED else count * np.dtype(DTYPES[dtype]).itemsize


def elements(raw: Array, dtype: str, count: int) -> Array:
    """The `count` elements in the bytes `raw` (uint8), (count,).

    Elements smaller than a byte lie one after the other from the lowest bit of the first byte upwards (in int4 and
    uint4: the low nibble first), and come out as int8 or uint8.
    """
    if raw.size != size_in_bytes(dtype, count):
        raise DamagedPackage(f"{count} elements of {dtype} take {size_in_bytes(dtype, count)} bytes, not {raw.size}")
    if dtype not in PACKED:
        return np.asarray(raw.view(DTYPES[dtype]))
    bits, signed = PACKED[dtype]
    flags = np.unpackbits(raw, bitorder="little", count=count * bits).reshape(count, bits)
    unsigned = (flags << np.arange(bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
    if not signed:
        return np.asarray(unsigned)
    half, full = 1 << (bits - 1), 1 << bits
    return np.where(unsigned >= half, unsigned.astype(np.int16) - full, unsigned).astype(np.int8)


class WeightFile:
    """A weight file, mapped into memory and read a blob at a time."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DamagedPackage(f"the weight file {path} is missing")
        if path.stat().st_size < ALIGNMENT:
            raise DamagedPackage(f"{path} has {path.stat().st_size} bytes: too few for the header of a weight file")
        self.path = path
        self.bytes: Array = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        version = struct.unpack("<II", self.bytes[:8].tobytes())[1]
        if version != 2:
            raise DamagedPackage(f"{path} is a weight file of version {version}, not 2")

    def _span(self, what: str, offset: int, size: int) -> Array:
        if offset % ALIGNMENT or offset < ALIGNMENT:
            raise DamagedPackage(f"{self.path}: {what} at offset {offset}, which is no multiple of {ALIGNMENT}")
        if offset + size > self.bytes.size:
            end = offset + size
            raise DamagedPackage(f"{self.path}: {what} goes to byte {end}, but the file has {self.bytes.size}")
        return self.bytes[offset : offset + size]

    def read(self, offset: int, dtype: str, count: int) -> Array:
        """The blob of `count` elements whose metadata is at `offset`, (count,), read-only.

        Raises DamagedPackage for a wrong sentinel, data type or size, and for what lies outside the file.
        """
        metadata = self._span("metadata", offset, ALIGNMENT)
        sentinel, number, size, data, unused = struct.unpack("<IIQQQ", metadata[:32].tobytes())
        at = f"{self.path} at {offset}"
        if sentinel != SENTINEL:
            raise DamagedPackage(f"{at}: the sentinel is {sentinel:#x}, not {SENTINEL:#x}: no blob begins here")
        if NUMBERS.get(dtype) != number:
            names = {number: name for name, number in NUMBERS.items()}
            raise DamagedPackage(f"{at}: the blob is of type {names.get(number, number)}, the program says {dtype}")
        if size != size_in_bytes(dtype, count):
            wanted = size_in_bytes(dtype, count)
            raise DamagedPackage(f"{at}: the blob has {size} bytes, but {count} elements of {dtype} take {wanted}")
        if dtype in PACKED and unused != size * 8 - count * PACKED[dtype][0]:
            raise DamagedPackage(f"{at}: {unused} bits are said to be unused after {count} elements of {dtype}")
        return elements(self._span("data", data, size), dtype, count)

    def size(self, offset: int) -> int:
        """Bytes of data of the blob whose metadata is at `offset`, which was read before."""
        return int(struct.unpack("<Q", self.bytes[offset + 8 : offset + 16].tobytes())[0])
