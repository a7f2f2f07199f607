"""The `.ssmd` file: one safetensors file that holds a session. The format is described in docs/session-file.md.

The reader distrusts the file: it is checked whole, and nothing is allocated on its word alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ssmd.machine.progress import tell
from ssmd.model.strict import too_many
from ssmd.sessions.files.document import FORMAT, Document
from ssmd.sessions.turn import StoreError

MAX_FILE_BYTES = 4 << 30
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 200_000
MAX_OBJECTS = 4 * MAX_TENSORS  # an object and two lists for each, and the contents of some
DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_HASH = "0" * 64
_BLOCK = 1 << 20
_SHOWN = 600  # characters of a reason


class SessionFileError(StoreError):
    """A session file that cannot be written or is invalid. The message says why."""


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor. `start` counts from the beginning of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _dumped(document: Document) -> str:
    """Return the document as JSON. Without a title of its own it has no `title`, as before there were titles."""
    untitled = document.session.title is None
    return document.model_dump_json(exclude_none=False, exclude={"session": {"title"}} if untitled else None)


class SessionFileWriter:
    """Writes tensors in any order into a file whose header is written already; `seal` puts the hash in."""

    def __init__(self, file: BinaryIO, document: Document, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Write the header. shapes: (dtype name such as "F32", shape) of every tensor, in the file's order."""
        header: dict[str, Any] = {"__metadata__": {"ssmd": _dumped(document), "sha256": _NO_HASH}}
        at = 0
        for name, (dtype, shape) in shapes.items():
            end = at + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise SessionFileError(f"its text is too long for one file: {len(text)} of {MAX_HEADER_BYTES} bytes")
        if 8 + len(text) + at > MAX_FILE_BYTES:
            raise SessionFileError(f"it is too large for one file: {at} of {MAX_FILE_BYTES} bytes")
        self._file = file
        self._written, self._nbytes = 0, at
        self._hash_at = 8 + text.rindex(_NO_HASH.encode())
        self._places = {
            name: TensorPlace(DTYPES[e["dtype"]], tuple(e["shape"]), 8 + len(text) + e["data_offsets"][0])
            for name, e in header.items()
            if name != "__metadata__"
        }
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)

    def write(self, name: str, values: NDArray[Any]) -> None:
        place = self._places.pop(name)
        if values.shape != place.shape:
            raise SessionFileError(f"tensor {name!r} has shape {values.shape}, {place.shape} was announced")
        self._file.seek(place.start)
        self._file.write(np.ascontiguousarray(values, place.dtype).data)
        self._written += place.nbytes
        tell(self._written, 2 * self._nbytes)

    def seal(self) -> None:
        if self._places:
            raise SessionFileError(f"tensors were not written: {sorted(self._places)[:3]}")
        self._file.flush()
        digest = _digest(self._file, None, 1)
        self._file.seek(self._hash_at)
        self._file.write(digest.encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def dtype_name(dtype: np.dtype[Any]) -> str:
    return _NAMES[dtype.newbyteorder("<")]


class SessionFileReader:
    """An open session file whose hash, header and tensor table were checked. Tensors are read on demand."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file, self._taken = file, 0
        self.nbytes = size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise self.error(f"it is larger than {MAX_FILE_BYTES} bytes")
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise self.error("it is cut off or not a session file")
        text = file.read(length)
        header = self._parse(text)
        metadata = header.pop("__metadata__", None)
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self.error("its header has no metadata")
        said = metadata.get("sha256", "")
        if not re.fullmatch("[0-9a-f]{64}", said) or text.count(said.encode()) != 1:
            raise self.error("its header does not carry one sha256")
        if _digest(file, 8 + text.index(said.encode()), 0) != said:
            raise self.error("it is cut off or was altered: its sha256 differs")
        self.document = self._document(metadata.get("ssmd", ""))
        self._places = self._table(header, 8 + length, size)

    def error(self, reason: str) -> SessionFileError:
        # Text from a file must neither steer a terminal nor fill a log.
        plain = "".join(c if c.isprintable() else "\ufffd" for c in reason[:_SHOWN])
        return SessionFileError(f"{self.path} cannot be imported: {plain}{'…' if len(reason) > _SHOWN else ''}")

    def _parse(self, text: bytes | str) -> dict[str, Any]:
        if too_many(text if isinstance(text, bytes) else text.encode("utf-8", "replace"), MAX_OBJECTS):
            raise self.error(f"its header has more than {MAX_OBJECTS} objects and lists")

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) != len(pairs):
                raise ValueError("a name occurs twice")
            return found

        try:
            header = json.loads(text, object_pairs_hook=unique)
        except (ValueError, RecursionError) as err:
            raise self.error(f"its header is not JSON ({err})") from err
        if not isinstance(header, dict):
            raise self.error("its header is not a JSON object")
        return header

    def _document(self, text: str) -> Document:
        fields = self._parse(text)
        said = fields.get("format")
        if type(said) is not int or said != FORMAT:
            raise self.error(
                f"it has format {str(said)[:20]}, this ssmd reads format {FORMAT} alone: "
                "import it with the version that wrote it, or a newer one"
            )
        try:
            return Document.model_validate(fields)
        except ValidationError as err:
            first = err.errors(include_input=False, include_url=False)[0]
            raise self.error(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from err

    def _table(self, header: dict[str, Any], start: int, size: int) -> dict[str, TensorPlace]:
        """Return the places of tensors. They must fill the rest of the file without gaps or overlaps (safetensors)."""
        if len(header) > MAX_TENSORS:
            raise self.error(f"it has {len(header)} tensors, {MAX_TENSORS} are possible")
        places: list[tuple[int, int, str, TensorPlace]] = []
        for name, entry in header.items():
            if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
                raise self.error(f"tensor {name[:80]!r} is not described as safetensors requires")
            dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not isinstance(dtype, str) or dtype not in DTYPES:
                raise self.error(f"tensor {name[:80]!r} has dtype {str(dtype)[:20]!r}, expected one of {list(DTYPES)}")
            if not (_counts(shape) and len(shape) <= 8 and _counts(offsets) and len(offsets) == 2):
                raise self.error(f"tensor {name[:80]!r} has an invalid shape or place")
            place = TensorPlace(DTYPES[dtype], tuple(shape), start + offsets[0])
            if place.nbytes != offsets[1] - offsets[0]:
                raise self.error(
                    f"tensor {name[:80]!r} has {place.nbytes} bytes by its shape, another size by its place"
                )
            places.append((*offsets, name, place))
        at = 0
        for first, last, name, _ in sorted(places, key=lambda p: p[:2]):
            if first != at:
                raise self.error(f"tensor {name[:80]!r} starts at {first}, the one before ends at {at}")
            at = last
        if start + at != size:
            raise self.error(f"its tensors end at {start + at}, the file at {size}")
        return {name: place for _, _, name, place in places}

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a tensor. Raises SessionFileError if there is no such tensor."""
        if name not in self._places:
            raise self.error(f"tensor {name!r} is missing")
        return self._places[name].dtype

    def ids(self, name: str, vocabulary: int | None) -> NDArray[np.int32]:
        """Read a list of token ids. Raises SessionFileError on an id outside the vocabulary."""
        if self.dtype(name) != DTYPES["I32"] or len(self._places[name].shape) != 1:
            raise self.error(f"tensor {name!r} is not a list of ids")
        ids: NDArray[np.int32] = self._read(name)
        last = 0x7FFFFFFF if vocabulary is None else vocabulary - 1
        if ids.size and (ids.min() < 0 or ids.max() > last):
            raise self.error(
                f"tensor {name!r} holds ids from {ids.min()} to {ids.max()}, the vocabulary is 0 to {last}"
            )
        return ids

    def state(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Read a state tensor. Raises SessionFileError if its shape is another or a value is not finite."""
        if self.dtype(name) == DTYPES["I32"] or self._places[name].shape != shape:
            raise self.error(f"tensor {name!r} does not hold numbers in the shape {list(shape)}")
        values = self._read(name)
        if not np.isfinite(values).all():
            raise self.error(f"tensor {name!r} holds values that are not finite")
        return values

    def _read(self, name: str) -> NDArray[Any]:
        place = self._places[name]
        self._file.seek(place.start)
        data = self._file.read(place.nbytes)
        self._taken += place.nbytes  # rows may be read more than once
        tell(self.nbytes + self._taken, 2 * self.nbytes)
        if len(data) != place.nbytes:
            raise self.error("it became shorter while it was read")
        return np.frombuffer(data, place.dtype).reshape(place.shape)


@contextmanager
def open_session_file(path: Path) -> Iterator[SessionFileReader]:
    """Open a session file. Raises SessionFileError if it is not a whole, unaltered session file of a known format."""
    try:
        # A pipe or device could block or never end.
        if not path.is_file():
            raise SessionFileError(f"{path} is not a file" if path.exists() else f"there is no file {path}")
        with path.open("rb") as file:
            yield SessionFileReader(path, file)
    except OSError as err:
        raise SessionFileError(f"{path} cannot be read: {err.strerror or err}") from err


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= MAX_FILE_BYTES for v in value)


def _digest(file: BinaryIO, hash_at: int | None, half: int) -> str:
    """Return the sha256 of the whole file, with zeros in place of the 64 digits at `hash_at`.

    half: 0 or 1, the half of the whole work that this is, for the progress report.
    """
    running, size = hashlib.sha256(), os.fstat(file.fileno()).st_size
    file.seek(0)
    at = 0
    while block := file.read(_BLOCK):
        if hash_at is not None and at < hash_at + 64 and hash_at < at + len(block):
            first, last = max(hash_at - at, 0), min(hash_at + 64 - at, len(block))
            block = block[:first] + b"0" * (last - first) + block[last:]
        running.update(block)
        at += len(block)
        tell(half * size + at, 2 * size)
    return running.hexdigest()
