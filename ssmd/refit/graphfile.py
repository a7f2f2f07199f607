"""Stripped graphs: an artifact's files without the weights, and the weights' places (docs/stripped-graph.md).

A graph fits one config exactly. With a checkpoint of that config it gives the artifact's files, without PyTorch and
without a converter (ssmd/refit/refit.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ssmd.model.artifact import NAME_PATTERN, PositiveInt
from ssmd.refit.encodings import ENCODINGS

VERSION = 1
MAX_FILE_BYTES = 16 << 20  # size of a compressed graph
MAX_BYTES = 256 << 20  # size of header and literal bytes
LEVEL = 19  # compression level of zstd
_FIRST = re.compile(rb"ssmd stripped graph (\d{1,9})\n")
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8

Count = Annotated[int, Field(ge=0, strict=True)]


class StrippedError(ValueError):
    """A stripped graph that is damaged or of a newer format; the message says what to do."""


class Hole(BaseModel):
    """The place of rows `first` to `first + rows` of a parameter, encoded: `length` bytes at `offset` of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    offset: Count
    length: PositiveInt
    parameter: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
    encoding: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]
    first: Count
    rows: PositiveInt


class StrippedFile(BaseModel):
    """A file of `size` bytes. name: with its folders. holes: in ascending order; the bytes between them are literal."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}(/{NAME_PATTERN})*$", max_length=255)]
    size: Annotated[int, Field(ge=0, lt=1 << 40, strict=True)]
    holes: Annotated[tuple[Hole, ...], Field(max_length=100_000)]

    @model_validator(mode="after")
    def _fits(self) -> StrippedFile:
        end = 0
        for hole in self.holes:
            if hole.offset < end:
                raise ValueError(f"{self.name}: the hole at {hole.offset} begins before {end}")
            if hole.encoding not in ENCODINGS:
                raise ValueError(f"{self.name}: no encoding is named {hole.encoding!r}; a newer ssmd may know it")
            end = hole.offset + hole.length
        if end > self.size:
            raise ValueError(f"{self.name}: holes reach to {end}, the file has {self.size} bytes")
        return self

    @property
    def encodings(self) -> dict[str, set[str]]:
        """Return the encodings of each parameter in this file."""
        found: dict[str, set[str]] = {}
        for hole in self.holes:
            found.setdefault(hole.parameter, set()).add(hole.encoding)
        return found

    @property
    def literal_bytes(self) -> int:
        return self.size - sum(h.length for h in self.holes)


class Golden(BaseModel):
    """The model's logits with the weights of SeededSource(config, seed), by the re-authored module in float32.

    At each of `positions`, after feeding tokens[: position + 1], they are some of the logits, spread over the
    vocabulary, with the weights as encoded. rms: the runtime's error at each position where the graph was made, in
    standard deviations of the logits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    seed: Count
    tokens: Annotated[tuple[Count, ...], Field(min_length=1, max_length=1000)]
    positions: Annotated[tuple[Count, ...], Field(min_length=1, max_length=100)]
    logits: tuple[tuple[float, ...], ...]
    rms: tuple[Annotated[float, Field(ge=0, le=1)], ...]

    @model_validator(mode="after")
    def _fits(self) -> Golden:
        if list(self.positions) != sorted(set(self.positions)) or self.positions[-1] >= len(self.tokens):
            raise ValueError(f"positions {self.positions} do not ascend within the {len(self.tokens)} tokens")
        if {len(self.logits), len(self.rms)} != {len(self.positions)} or len({len(row) for row in self.logits}) != 1:
            raise ValueError("there are not as many values at each position")
        return self


class Header(BaseModel):
    """The description of a graph.

    config: the source's, without fields that do not affect its function. provenance: where the config is from.
    origin: the model's name on a hub, or "". recipe, conversion, builders: as in the artifact's manifest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    origin: Annotated[str, Field(max_length=100)]
    provenance: Annotated[str, Field(max_length=2000)]
    family: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
    config: dict[str, Any]
    runtime: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
    device_class: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
    quantization: Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,32}$")]
    recipe: dict[str, Any]
    conversion: dict[str, Any]
    buckets: Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=32)]
    tiers: Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=64)]
    builders: dict[str, str]
    golden: Golden
    files: Annotated[tuple[StrippedFile, ...], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _names_differ(self) -> Header:
        names = {f.name for f in self.files}
        if len(names) != len(self.files):
            raise ValueError("two files have one name")
        if any(str(folder) in names for name in names for folder in PurePosixPath(name).parents):
            raise ValueError("a file has the name of another's folder")
        return self


class StrippedGraph:
    """A header, and the literal bytes of each of its files in order."""

    def __init__(self, header: Header, literals: Sequence[bytes]) -> None:
        self.header = header
        self.literals = tuple(literals)

    def save(self, file: Path) -> None:
        """Write the graph as one file, the same bytes for the same graph."""
        header = self.header.model_dump_json().encode()
        content = b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *self.literals])
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(content)
        first = f"ssmd stripped graph {VERSION}\n".encode()
        file.write_bytes(b"".join([first, hashlib.sha256(packed).digest(), packed]))

    @staticmethod
    def open(file: Path) -> StrippedGraph:
        """Read and check a graph, which may be untrusted. Raises StrippedError."""

        def damaged(what: str) -> StrippedError:
            return StrippedError(f"{file} is not whole: {what}; get it again")

        try:
            if file.stat().st_size > MAX_FILE_BYTES:
                raise StrippedError(f"{file} is larger than {MAX_FILE_BYTES} bytes, which no stripped graph is")
            data = file.read_bytes()
        except OSError as err:
            raise StrippedError(f"{file} cannot be read ({err.strerror})") from err
        found = _FIRST.match(data)
        if found is None:
            raise StrippedError(f"{file} is not a stripped graph")
        if int(found[1]) != VERSION:
            raise StrippedError(f"{file} has format {int(found[1])}, this ssmd reads {VERSION}; install a newer ssmd")
        packed = data[found.end() + _DIGEST_BYTES :]
        if hashlib.sha256(packed).digest() != data[found.end() : found.end() + _DIGEST_BYTES]:
            raise damaged("its bytes do not hash to what it says")
        try:
            content = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_BYTES)
        except zstandard.ZstdError as err:
            raise damaged(str(err)) from err
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        try:
            header = Header.model_validate(json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        except ValidationError as err:
            error = err.errors()[0]
            raise damaged(f"{'.'.join(str(p) for p in error['loc'])}: {error['msg']}") from err
        except (ValueError, RecursionError) as err:
            raise damaged(f"its header is not JSON ({err})") from err
        literals, at = [], _LENGTH_BYTES + length
        for part in header.files:
            literals.append(content[at : at + part.literal_bytes])
            at += part.literal_bytes
        if at != len(content):
            raise damaged(f"it holds {len(content)} bytes, its header describes {at}")
        return StrippedGraph(header, literals)
