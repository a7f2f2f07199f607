"""The codec of stored numbers: what goes in comes out, and damaged bytes are refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ssmd.sessions.rows.blobs import CodecError, planes, unpack


def pack(values: np.ndarray[Any, Any]) -> bytes:
    """Encode values as the first version did."""
    itemsize = values.dtype.itemsize
    octets = values.view(np.uint8).reshape(-1, itemsize)  # [n, itemsize]
    compressor = zstandard.ZstdCompressor(level=1)
    stored: list[bytes | memoryview] = []
    for i in range(itemsize):
        plane = np.ascontiguousarray(octets[:, i])
        frame = compressor.compress(plane.data)
        stored.append(frame if len(frame) < len(plane) else plane.data)
    return struct.pack(f"<{itemsize}I", *(len(p) for p in stored)) + b"".join(stored)


@given(st.binary(max_size=1200), st.sampled_from(["<f4", "<f2"]))
def test_round_trip_of_every_bit(octets: bytes, dtype: str) -> None:
    values: np.ndarray[Any, Any] = np.frombuffer(octets[: len(octets) // 4 * 4], dtype)
    out = np.empty_like(values)
    unpack(pack(values), out)
    assert out.tobytes() == values.tobytes()


def test_into_a_slice() -> None:
    values = np.arange(2 * 3 * 4, dtype=np.float16)
    whole = np.zeros((2, 9, 4), np.float16)
    unpack(pack(values), whole[:, 5:8])
    assert (whole[:, 5:8] == values.reshape(2, 3, 4)).all()
    assert not whole[:, :5].any()
    assert not whole[:, 8:].any()


def _bomb(count: int) -> bytes:
    """Frames that are tiny, declare `count` bytes and hold more."""
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50_000_000))
    return struct.pack("<2I", len(frame), len(frame)) + frame * 2


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "too few"),
        (pack(np.ones(100, np.float16))[:-1], "do not make"),
        (pack(np.ones(100, np.float16)) + b"x", "do not make"),
        (pack(np.ones(200, np.float16)), "declares 200 bytes, 100"),
        (struct.pack("<2I", 5, 5) + b"notzs" * 2, "zstd"),
        (_bomb(100), "declares"),
    ],
)
def test_damaged_bytes_are_refused(packed: bytes, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        planes(packed, 100, 2)


def test_any_altered_byte_of_the_table_is_refused_or_harmless() -> None:
    packed = bytearray(pack(np.ones(5000, np.float16)))
    for i in range(8):
        packed[i] ^= 0x40
        with pytest.raises(CodecError):
            planes(bytes(packed), 5000, 2)
        packed[i] ^= 0x40
