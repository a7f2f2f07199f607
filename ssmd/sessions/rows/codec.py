"""The codec of the first version's numbers, `planes-zstd/1`: read, not written any more.

The bytes of an array are split into planes (a float32 array of n values: all lowest bytes, ..., all highest), each a
zstd frame or, where that is not smaller, as it is.

    packed = length of each plane as stored (u32 little-endian, one for each), then the planes
    a plane stored in n bytes is the plane itself, in fewer a zstd frame of it
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray


class CodecError(ValueError):
    """Packed bytes are damaged or are not what they were declared to be."""


def planes(packed: bytes, count: int, itemsize: int) -> list[NDArray[np.uint8]]:
    """The byte planes, [count] each, of `count` packed values. Raises CodecError; allocates no more than expected."""
    table = 4 * itemsize
    if len(packed) < table:
        raise CodecError(f"{len(packed)} bytes are too few for the table of planes")
    lengths = struct.unpack_from(f"<{itemsize}I", packed)
    if table + sum(lengths) != len(packed):
        raise CodecError(f"planes of {lengths} bytes do not make {len(packed)} bytes")
    decompressor = zstandard.ZstdDecompressor()
    view, at, found = memoryview(packed), table, []
    for length in lengths:
        stored = view[at : at + length]
        at += length
        plane = stored if length == count else _decompress(decompressor, stored, count)
        found.append(np.frombuffer(plane, np.uint8))
    return found


def _decompress(decompressor: zstandard.ZstdDecompressor, frame: memoryview, count: int) -> bytes:
    try:
        # The declared size is checked before anything of that size is allocated: a frame may lie.
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != count:
            raise CodecError(f"a frame declares {declared} bytes, {count} are expected")
        plane = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise CodecError(f"zstd: {err}") from err
    if len(plane) != count:
        raise CodecError(f"a frame holds {len(plane)} bytes, {count} are expected")
    return plane


def join(parts: list[NDArray[np.uint8]], out: NDArray[Any]) -> None:
    """Write planes into `out`, whose last axis is contiguous; the planes count as in `out`'s C order."""
    octets = out.view(np.uint8)  # [..., d * itemsize]
    for i, plane in enumerate(parts):
        octets[..., i :: len(parts)] = plane.reshape(out.shape)


def unpack(packed: bytes, out: NDArray[Any]) -> None:
    """Unpack into a whole array or a slice of one (last axis contiguous). Raises CodecError."""
    join(planes(packed, out.size, out.dtype.itemsize), out)
