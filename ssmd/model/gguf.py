"""GGUF files (versions 2 and 3): their fields, and rows of their tensors as float32.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All of such a file is untrusted: counts, lengths,
offsets and names are checked before memory is taken for them. Bytes are read, not mapped, as a mapped file that is cut
off meanwhile ends the process.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.ggml import ENCODINGS, NAMES

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
MAX_HEADER_BYTES = 64 << 20  # fields and the list of tensors; the largest vocabularies take some 15 MB
MAX_ITEMS = 1 << 22  # items of all lists: tokens, their types, merges
MAX_FIELDS, MAX_TENSORS = 1 << 14, 1 << 16
MAX_ALIGNMENT = 1 << 20
MAX_SHOWN = 60  # characters of an untrusted name in a message
DECODED_AT_ONCE = 1 << 18  # values, so that what is computed of them stays in a processor's cache
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS


def is_gguf(file: Path) -> bool:
    """Return True if a file is GGUF by its first bytes or its name."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC or file.suffix.lower() == ".gguf"
    except OSError:
        return file.suffix.lower() == ".gguf"


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file. kind: its type's number. shape: the slowest dimension first. begin, nbytes: of its bytes.

    nbytes is 0 for a type that is not read.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def kind_name(self) -> str:
        return NAMES.get(self.kind, f"type {self.kind}")


class GGUF:
    """A file whose header was read.

    fields: its metadata, which are numbers, texts and lists of them. listed: its tensors by name.
    """

    def __init__(self, file: Path) -> None:
        """Read the header. Raises OSError, and ValueError if the file is not GGUF, is cut off, or lies about itself."""
        self.file = file
        with file.open("rb") as opened:
            self._size = opened.seek(0, 2)
            opened.seek(0)
            head = _Header(opened, min(self._size, MAX_HEADER_BYTES), self._size)
            tensors, fields = head.begin()
            self.fields: dict[str, Any] = {}
            for _ in range(fields):
                name = head.text()
                if name in self.fields:
                    raise ValueError(f"the field {shown(name)} stands twice")
                self.fields[name] = head.value(head.number("I"))
            alignment = self.fields.get("general.alignment", ALIGNMENT)
            if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
                raise ValueError(f"general.alignment is {str(alignment)[:MAX_SHOWN]}, expected a power of two")
            entries = [head.tensor() for _ in range(tensors)]
            begin = -(-head.at // alignment) * alignment
        self.listed: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            if name in self.listed:
                raise ValueError(f"tensor {shown(name)} stands twice")
            if offset % alignment:
                raise ValueError(f"tensor {shown(name)} begins at byte {offset}, no multiple of {alignment}")
            self.listed[name] = GGUFTensor(name, kind, shape, begin + offset, _nbytes(name, shape, kind))
        self._side_by_side()

    def _side_by_side(self) -> None:
        """Check that tensors end within the file and do not overlap. Raises ValueError."""
        before, end = "", 0
        for entry in sorted(self.listed.values(), key=lambda e: (e.begin, e.nbytes)):
            if entry.begin < end:
                raise ValueError(f"tensor {shown(entry.name)} begins within {shown(before)}")
            before, end = entry.name, entry.begin + entry.nbytes
            if end > self._size:
                raise ValueError(
                    f"tensor {shown(entry.name)} ends after the file, which has {self._size} bytes: it is cut off, "
                    "download it again"
                )

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield each tensor's name and its values, row-major, one at a time. Raises ValueError."""
        for name, entry in self.listed.items():
            yield name, self.rows(name, 0, entry.shape[0])

    def rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Return rows `first` to `last`, along the slowest dimension, of a tensor. Raises ValueError."""
        entry = self.listed[name]
        encoding = ENCODINGS.get(entry.kind)
        if encoding is None:
            read = ", ".join(e.name for e in ENCODINGS.values())
            raise ValueError(f"tensor {shown(name)} is {entry.kind_name}; ssmd reads {read}")
        shape = (last - first, *entry.shape[1:])
        each = encoding.nbytes * DECODED_AT_ONCE // encoding.values
        row = entry.nbytes // entry.shape[0]
        out = np.empty(math.prod(shape), np.float32)
        with self.file.open("rb") as opened:
            opened.seek(entry.begin + first * row)
            for at in range(0, shape[0] * row, each):
                data = opened.read(min(each, shape[0] * row - at))
                if len(data) != min(each, shape[0] * row - at):
                    raise ValueError(f"it was cut off meanwhile, within tensor {shown(name)}")
                blocks = np.frombuffer(data, np.uint8).reshape(-1, encoding.nbytes)
                start = at // encoding.nbytes * encoding.values
                with np.errstate(invalid="ignore", over="ignore"):  # the caller refuses values that are not finite
                    out[start : start + len(blocks) * encoding.values] = encoding.decode(blocks).reshape(-1)
        return out.reshape(shape)


def shown(name: str) -> str:
    """Return an untrusted name for a message: quoted, escaped and cut."""
    return ascii(name[:MAX_SHOWN])


def _nbytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    """Return the bytes of a tensor; 0 for a type that is not read. Raises ValueError if the shape is impossible."""
    encoding = ENCODINGS.get(kind)
    if not shape or not all(shape) or (encoding is not None and shape[-1] % encoding.values):
        raise ValueError(f"tensor {shown(name)} has type {NAMES.get(kind, kind)} and shape {shape}")
    return 0 if encoding is None else math.prod(shape) // encoding.values * encoding.nbytes


class _Header:
    """The header's bytes in order. at: the next one. limit: the last one that may be read. size: the file's bytes."""

    def __init__(self, opened: IO[bytes], limit: int, size: int) -> None:
        self._opened, self._limit, self._size = opened, limit, size
        self._items = 0
        self.at = 0

    def begin(self) -> tuple[int, int]:
        """Read what a file begins with. Returns the numbers of its tensors and of its fields. Raises ValueError."""
        if self._size < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise ValueError("it is not a GGUF file: it does not begin with GGUF")
        version = self.number("I")
        if version & 0xFFFF == 0 and version:
            raise ValueError(
                "it is big-endian; ssmd reads little-endian GGUF files: convert it with gguf_convert_endian"
            )
        if version not in VERSIONS:
            raise ValueError(f"it is GGUF version {version}; ssmd reads versions 2 and 3: make it again with llama.cpp")
        tensors, fields = self.number("Q"), self.number("Q")
        for count, most, what in ((tensors, MAX_TENSORS, "tensors"), (fields, MAX_FIELDS, "fields")):
            if count > most:
                raise ValueError(f"its header says {count} {what}; at most {most} are read")
        return tensors, fields

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the name, shape (the slowest dimension first), type and offset of a tensor."""
        name, dimensions = self.text(), self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._list()
        if kind not in _NUMBERS:
            raise ValueError(f"a field of type {kind}")
        return self.number(_NUMBERS[kind])

    def _list(self) -> list[Any]:
        of, count = self.number("I"), self.number("Q")
        if of == _ARRAY:
            raise ValueError("a list of lists")
        if of != _STRING and of not in _NUMBERS:
            raise ValueError(f"a list of type {of}")
        self._items += count
        if self._items > MAX_ITEMS:
            raise ValueError(f"its lists have {self._items} items and more; at most {MAX_ITEMS} are read")
        if of == _STRING:
            return [self.text() for _ in range(count)]
        code = f"<{count}{_NUMBERS[of]}"
        return list(struct.unpack(code, self._take(struct.calcsize(code))))

    def text(self) -> str:
        try:
            return self._take(self.number("Q")).decode()
        except UnicodeDecodeError as err:
            raise ValueError(f"the text before byte {self.at} is not UTF-8") from err

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, nbytes: int) -> bytes:
        if nbytes > self._limit - self.at:
            if self._limit < self._size:
                raise ValueError(f"its header has more than {MAX_HEADER_BYTES} bytes")
            raise ValueError(f"it ends at byte {self._size}, within its header: it is cut off, download it again")
        data = self._opened.read(nbytes)
        if len(data) != nbytes:
            raise ValueError("it was cut off meanwhile, within its header")
        self.at += nbytes
        return data
