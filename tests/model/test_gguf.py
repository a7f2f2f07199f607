"""GGUF files: their values against the library of the format's authors, and files that lie."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from ssmd.model import ggml, smollm2
from ssmd.model import gguf as module
from ssmd.model.gguf import GGUF

F32, Q4_1, Q8_0, I32, IQ4_XS = 0, 3, 8, 26, 23


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


@pytest.mark.parametrize("kind", ggml.ENCODINGS, ids=lambda kind: ggml.NAMES[kind])
def test_weights_are_those_that_the_library_reads(kind: int, tmp_path: Path) -> None:
    """Bit for bit, on random blocks, whole and in rows."""
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    encoding = ggml.ENCODINGS[kind]
    assert gguf.GGMLQuantizationType(kind).name == encoding.name
    assert gguf.GGML_QUANT_SIZES[kind] == (encoding.values, encoding.nbytes)
    shape = (7, 2 * max(encoding.values, 64))
    raw = np.random.default_rng(kind).integers(
        0, 256, (7, shape[1] // encoding.values * encoding.nbytes), dtype=np.uint8
    )
    read = GGUF(made(tmp_path, kind, shape, raw.tobytes()))
    assert read.fields == {"n": [7, 8]}
    [(name, found)] = read.tensors()
    with np.errstate(all="ignore"):
        expected = np.asarray(quants.dequantize(raw, gguf.GGMLQuantizationType(kind)), np.float32)
    assert (name, found.dtype.name, found.shape) == ("w", "float32", shape)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.isfinite(found).mean() > 0.5
    assert np.array_equal(read.rows("w", 2, 5), expected[2:5], equal_nan=True)


def test_a_large_tensor_is_decoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(0).integers(0, 100, 6 * 2 * 34, dtype=np.uint8)
    read = GGUF(made(tmp_path, Q8_0, (6, 64), raw.tobytes()))
    whole = read.rows("w", 0, 6)
    monkeypatch.setattr(module, "DECODED_AT_ONCE", 96)  # three blocks: not a whole number of rows
    assert np.array_equal(read.rows("w", 0, 6), whole)
    assert np.array_equal(read.rows("w", 1, 4), whole[1:4])


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
        ({"version": 1}, "it is GGUF version 1; ssmd reads versions 2 and 3"),
        ({"version": 3 << 24}, "it is big-endian"),
        ({"tensors": 1 << 60}, f"its header says {1 << 60} tensors; at most 65536 are read"),
        ({"tensors": 2}, r"tensor '' has type F32 and shape \(\)"),
        ({"fields": 1 << 60}, f"its header says {1 << 60} fields; at most 16384 are read"),
        ({"fields": 1 << 14}, "within its header"),
        ({"items": 1 << 60}, "items and more; at most 4194304 are read"),
        ({"items": 1 << 22}, "within its header"),
        ({"of": 9}, "a list of lists"),
        ({"of": 99}, "type 99"),
        ({"offset": 1}, "begins at byte 1, no multiple of 32"),
        ({"offset": 32}, "ends after the file, which has 160 bytes: it is cut off, download it again"),
        ({"offset": (1 << 64) - 32}, "ends after the file"),
    ],
)
def test_files_that_lie(counts: dict[str, int], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        list(GGUF(made(tmp_path, F32, (2, 4), bytes(32), **counts)).tensors())


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        (I32, (2, 32), "tensor 'w' is I32; ssmd reads F32, F16, Q4_0, "),
        (IQ4_XS, (2, 256), "tensor 'w' is IQ4_XS; ssmd reads F32, F16, Q4_0, "),
        (4711, (2, 32), "tensor 'w' is type 4711; ssmd reads "),
        (Q8_0, (2, 8), r"tensor 'w' has type Q8_0 and shape \(2, 8\)"),
        (Q4_1, (), r"tensor 'w' has type Q4_1 and shape \(\)"),
        (F32, (0, 8), r"tensor 'w' has type F32 and shape \(0, 8\)"),
        (F32, (1, 1, 1, 1, 1), "tensor 'w' has 5 dimensions"),
        (F32, (1 << 60, 8), "tensor 'w' ends after the file"),
    ],
)
def test_tensors_that_are_not_read(kind: int, shape: tuple[int, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        list(GGUF(made(tmp_path, kind, shape, bytes(64))).tensors())


def two(names: tuple[str, str], offset: int, fields: bytes = b"", count: int = 0) -> bytes:
    """A file with two tensors of 8 numbers, the second at `offset`, and with these fields."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, 2, count) + fields
    for name, at in zip(names, (0, offset), strict=True):
        head += text(name) + struct.pack("<IQIQ", 1, 8, F32, at)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(96)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (two(("a", "a"), 32), "tensor 'a' stands twice"),
        (two(("a", "b"), 0), "tensor 'b' begins within 'a'|tensor 'a' begins within 'b'"),
        (two(("a", "b"), 32, (text("k") + struct.pack("<II", 4, 1)) * 2, 2), "the field 'k' stands twice"),
        (
            two(("a", "b"), 32, text("general.alignment") + struct.pack("<II", 4, 24), 1),
            "alignment is 24, expected a power",
        ),
        (
            two(("a", "b"), 32, text("general.alignment") + struct.pack("<II", 4, 0), 1),
            "alignment is 0, expected a power",
        ),
        (two(("a", "b"), 32, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(8), 1), "is not UTF-8"),
    ],
)
def test_entries_that_contradict_each_other(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=said):
        GGUF(tmp_path / "a.gguf")


def test_an_alignment_of_its_own_is_kept(tmp_path: Path) -> None:
    """With 64 the data begin at a multiple of 64, and so does each tensor."""
    head = struct.pack("<4sIQQ", b"GGUF", 2, 1, 1) + text("general.alignment") + struct.pack("<II", 4, 64)
    head += text("w") + struct.pack("<IQIQ", 1, 8, F32, 64)
    values = np.arange(8, dtype="<f4")
    (tmp_path / "a.gguf").write_bytes(head.ljust(-(-len(head) // 64) * 64, b"\0") + bytes(64) + values.tobytes())
    [(_, found)] = GGUF(tmp_path / "a.gguf").tensors()
    assert np.array_equal(found, values)


def test_a_header_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", 60)
    with pytest.raises(ValueError, match="its header has more than 60 bytes"):
        GGUF(made(tmp_path, F32, (2, 4), bytes(32)))


def test_a_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    whole = made(tmp_path, F32, (2, 4), bytes(32)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for nbytes in range(len(whole)):
        cut.write_bytes(whole[:nbytes])
        with pytest.raises(ValueError, match=r"within its header|not a GGUF file|after the file"):
            list(GGUF(cut).tensors())


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    file = made(tmp_path, F32, (2, 4), bytes(32))
    read = GGUF(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="it was cut off meanwhile, within tensor 'w'"):
        read.rows("w", 1, 2)
