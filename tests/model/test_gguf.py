"""GGUF files: the default model's against the library of the format's authors, and files that lie."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from ssmd.model import smollm2
from ssmd.model.gguf import GGUF

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def made(folder: Path, kind: int, shape: tuple[int, ...], data: bytes, **counts: int) -> Path:
    """A file with one field and one tensor, whose header may lie."""
    head = struct.pack("<4sIQQ", b"GGUF", counts.get("version", 3), counts.get("tensors", 1), counts.get("fields", 1))
    head += text("n") + struct.pack("<IIQ", 9, counts.get("of", 4), counts.get("items", 2)) + struct.pack("<II", 7, 8)
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    head += text("w") + dimensions + struct.pack("<IQ", kind, counts.get("offset", 0))
    file = folder / "a.gguf"
    file.write_bytes(head.ljust(-(-len(head) // 32) * 32, b"\0") + data)
    return file


@pytest.mark.parametrize("kind", [F32, Q4_1, Q8_0])
def test_weights_are_those_that_the_library_reads(kind: int, tmp_path: Path) -> None:
    """Bit for bit, on random blocks."""
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    rng = np.random.default_rng(kind)
    weights = rng.normal(size=(6, 64)).astype(np.float32)
    raw = quants.quantize(weights, gguf.GGMLQuantizationType(kind))
    read = GGUF(made(tmp_path, kind, weights.shape, raw.tobytes()))
    assert read.fields == {"n": [7, 8]}
    [(name, found)] = read.tensors()
    expected = quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    assert (name, found.dtype.name, found.shape) == ("w", "float32", (6, 64))
    assert found.tobytes() == np.asarray(expected, np.float32).tobytes()
    assert kind == F32 or not np.array_equal(found, weights)


def test_the_default_models_file_is_read_as_the_library_reads_it() -> None:
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    file = smollm2.installed_gguf()
    if file is None:
        pytest.skip(f"{smollm2.PACKAGE} is not installed: scripts/setup installs it for tests")
    read, theirs = GGUF(file), gguf.GGUFReader(file)
    assert read.fields == {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    found = dict(read.tensors())
    assert len(found) == len(theirs.tensors) == 272
    for tensor in theirs.tensors:
        assert list(found[tensor.name].shape) == tensor.shape.tolist()[::-1]
        if re.match(r"blk\.\d*[1-9]\.", tensor.name):  # of thirty layers that are made alike, three
            continue
        expected = np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        assert found[tensor.name].tobytes() == expected.tobytes(), tensor.name


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"version": 2}, "no GGUF file of version 3"),
        ({"tensors": 1 << 60}, "within its header"),
        ({"fields": 1 << 60}, "within its header"),
        ({"items": 1 << 60}, "within its header"),
        ({"of": 9}, "a list of lists"),
        ({"of": 99}, "type 99"),
        ({"offset": 1}, "ends after the file"),
        ({"offset": (1 << 64) - 1}, "ends after the file"),
    ],
)
def test_files_that_lie(counts: dict[str, int], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        list(GGUF(made(tmp_path, F32, (2, 4), bytes(32), **counts)).tensors())


@pytest.mark.parametrize(
    ("kind", "shape"), [(F16, (2, 32)), (Q8_0, (2, 8)), (Q4_1, ()), (F32, (1, 1, 1, 1, 1)), (F32, (1 << 60, 8))]
)
def test_tensors_that_are_not_read(kind: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor 'w'"):
        list(GGUF(made(tmp_path, kind, shape, bytes(64))).tensors())


def test_a_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    whole = made(tmp_path, F32, (2, 4), bytes(32)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for nbytes in range(len(whole)):
        cut.write_bytes(whole[:nbytes])
        with pytest.raises(ValueError, match=r"header|no GGUF|after the file|empty"):
            list(GGUF(cut).tensors())
