"""A source checkpoint: a Hugging Face folder of config.json, safetensors and a tokenizer, read without torch.

Everything in such a folder is untrusted and checked before it is used. Tensors are mapped, not read: an array is made
only when `tensor` is called.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ssmd.model.formats import in_its_place, unread

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
ITEMSIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEMSIZES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_JSON_BYTES = 64 << 20
READ_BYTES = 1 << 20
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
# Fields that do not affect the model's function: the program that saved it, its training's dtype, defaults for runs.
VOLATILE = ("transformers_version", "_name_or_path", "_commit_hash", "torch_dtype", "dtype", "use_cache")
SPECIAL = ("bos", "eos", "pad", "unk")


class SourceError(ValueError):
    """A source checkpoint that is missing, damaged or of an unsupported kind; the message names the file."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file. begin, end: offsets in the file, in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Tensors(Protocol):
    """A source of weights: a Source, or one that generates them (random_source.py). path: for messages."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    def tensor(
        self, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None
    ) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Source:
    """An opened source checkpoint. special_tokens: the texts of bos, eos, pad, unk, if they are defined."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer_json: bytes = field(repr=False)
    chat_template: str | None = field(repr=False)
    special_tokens: Mapping[str, str]
    stop_tokens: tuple[int, ...]

    @staticmethod
    def open(path: Path) -> Source:
        """Read and check all but the tensors' values. Raises SourceError."""
        if not path.is_dir():
            raise SourceError(f"{path} is not a folder; a source checkpoint is a folder with config.json")
        if not (path / "config.json").exists() and (why := in_its_place(path)):
            raise SourceError(f"{path} has no config.json; {why}")
        config = read_json(path / "config.json")
        if why := unread(config):
            raise SourceError(f"{path / 'config.json'}: {why}")
        tokenizer_json = _tokenizer(path)
        settings = read_json(path / "tokenizer_config.json", optional=True)
        special = _special_tokens(settings, read_json(path / "special_tokens_map.json", optional=True))
        generation = read_json(path / "generation_config.json", optional=True)
        stops = _stop_tokens(path, generation.get("eos_token_id", _end_of_config(config)))
        eos = _token_ids(tokenizer_json).get(special.get("eos", ""))
        return Source(
            path=path,
            config=config,
            tensors=_tensors(path),
            tokenizer_json=tokenizer_json,
            chat_template=_chat_template(path, settings),
            special_tokens=special,
            stop_tokens=tuple(sorted({*stops, *(() if eos is None else (eos,))})),
        )

    def tensor(self, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None) -> NDArray[np.float32]:
        """Return tensor `name`, or its rows `first` to `last`, as float32; bf16 is widened exactly.

        The array may be a read-only view of the file. Raises SourceError if the tensor is missing, if its shape is not
        the one that the config implies, or if a value is not finite.
        """
        entry = self.entry(name, shape)
        dtype = DTYPES[entry.dtype]
        if (first, last) == (0, None):
            raw = np.frombuffer(_map(entry.file), dtype, math.prod(shape), entry.begin).reshape(shape)
        else:
            part = (len(range(*slice(first, last).indices(shape[0]))), *shape[1:])
            begin = entry.begin + first * math.prod(shape[1:]) * dtype.itemsize
            raw = np.fromfile(entry.file, dtype, math.prod(part), offset=begin).reshape(part)
        if entry.dtype == "BF16":  # bf16 is the upper half of a float32
            widened = raw.astype("<u4")
            widened <<= 16
            array = widened.view("<f4")
        else:
            array = raw.astype("<f4", copy=False)
        if not np.isfinite(array).all():
            raise SourceError(f"{entry.file}: tensor {name!r} holds values that are not finite")
        return array

    def entry(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the place of tensor `name` of that shape. Raises SourceError, as `tensor` before it reads a value."""
        entry = self.tensors.get(name)
        if entry is None:
            raise SourceError(f"{self.path}: there is no tensor {name!r}, which config.json calls for")
        if entry.shape != shape:
            raise SourceError(f"{entry.file}: tensor {name!r} has shape {entry.shape}, config.json says {shape}")
        if entry.dtype not in DTYPES:
            raise SourceError(
                f"{entry.file}: tensor {name!r} is {entry.dtype}; ssmd reads {', '.join(sorted(DTYPES))}: "
                "take the checkpoint that is not quantized"
            )
        return entry

    @cached_property
    def lineage(self) -> str:
        """Return the sha256 of the model's function: the config without VOLATILE fields, and every tensor.

        A tensor's name, dtype, shape and bytes count, but not its file. The tokenizer and the chat template do not
        count. Reads all weights once.
        """
        stable = {k: v for k, v in self.config.items() if k not in VOLATILE}
        whole = hashlib.sha256(json.dumps(stable, sort_keys=True, separators=(",", ":")).encode())
        for name, entry in sorted(self.tensors.items()):
            content = _sha256(entry)
            whole.update(json.dumps([name, entry.dtype, list(entry.shape), content], separators=(",", ":")).encode())
        return whole.hexdigest()


def _read(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise SourceError(f"{file} has {size} bytes; no more than {MAX_JSON_BYTES} are read")
        return file.read_bytes()
    except OSError as err:
        raise SourceError(f"{file} cannot be read: {err.strerror}") from err


def read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint; {} if an optional one is absent. Raises SourceError."""
    if optional and not file.exists():
        return {}
    if not file.is_file():
        raise SourceError(f"{file.parent} is no source checkpoint: it has no {file.name}")
    try:
        value = json.loads(_read(file))
    except (ValueError, RecursionError) as err:
        raise SourceError(f"{file} is not JSON ({err})") from err
    if not isinstance(value, dict):
        raise SourceError(f"{file} is not a JSON object")
    return value


def _tokenizer(path: Path) -> bytes:
    if not (path / "tokenizer.json").is_file():
        raise SourceError(
            f"{path} has no tokenizer.json; with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return _read(path / "tokenizer.json")


def _token_ids(tokenizer_json: bytes) -> dict[str, int]:
    """Return the ids of the added tokens by text, and those of the vocabulary if it is a plain map."""
    try:
        whole = json.loads(tokenizer_json)
        vocabulary = whole["model"].get("vocab", {})
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        ids.update({t["content"]: t["id"] for t in whole.get("added_tokens", [])})
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as err:
        raise SourceError(f"tokenizer.json is malformed: {err!r}") from err
    return ids


def _special_tokens(*settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in SPECIAL:
        for fields in settings:
            value = fields.get(f"{kind}_token")
            text = value.get("content") if isinstance(value, dict) else value  # an AddedToken is written as an object
            if isinstance(text, str):
                found.setdefault(kind, text)
    return found


def _end_of_config(config: Mapping[str, Any]) -> Any:
    """Return config.json's eos_token_id, or that of its `text_config`, where a nested config has it."""
    text = config.get("text_config")
    beside = config.get("eos_token_id")
    return text.get("eos_token_id") if beside is None and isinstance(text, dict) else beside


def _stop_tokens(path: Path, value: object) -> list[int]:
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise SourceError(f"{path}: eos_token_id is {value!r}, expected a token id or a list of them")
    return ids


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """Return chat_template.jinja, else the template in tokenizer_config.json: a text, or `default` of named ones."""
    file = path / "chat_template.jinja"
    try:
        template: Any = _read(file).decode() if file.is_file() else settings.get("chat_template")
        if isinstance(template, list):
            template = {t["name"]: t["template"] for t in template}["default"]
    except (UnicodeDecodeError, KeyError, TypeError) as err:
        raise SourceError(f"{path}: the chat template cannot be read: {err!r}") from err
    if not (template is None or isinstance(template, str)):
        raise SourceError(f"{path}: the chat template is a {type(template).__name__}, expected a text")
    return template


def _tensors(path: Path) -> dict[str, Tensor]:
    if (path / WEIGHTS).is_file():
        return safetensors_header(path / WEIGHTS)
    if not (path / INDEX).is_file():
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise SourceError(
                f"{path} has its weights in {pickles[0]}, a pickle, which can run any code when it is read; ssmd reads "
                "safetensors only: with transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)"
            )
        raise SourceError(f"{path} has neither {WEIGHTS} nor {INDEX}")
    shards: dict[str, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for name, shard in weight_map(path / INDEX).items():
        if shard not in shards:
            if not (path / shard).is_file():
                raise SourceError(f"{path / INDEX} names {shard}, which is missing: download the checkpoint again")
            shards[shard] = safetensors_header(path / shard)
        if name not in shards[shard]:
            raise SourceError(f"{path / INDEX} places tensor {name!r} in {shard}, which does not hold it")
        tensors[name] = shards[shard][name]
    return tensors


def weight_map(index: Path) -> dict[str, str]:
    """Return each tensor's shard, a plain file name. Raises SourceError."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise SourceError(f"{index} has no weight_map")
    for name, shard in shards.items():
        if not (isinstance(shard, str) and SHARD_NAME.fullmatch(shard)):
            raise SourceError(f"{index} places tensor {name!r} in {shard!r}, which is no plain safetensors name")
    return shards


def _sha256(entry: Tensor) -> str:
    """Return the sha256 of a tensor's bytes, read in parts: mapped pages would count as memory of this process."""
    digest, left = hashlib.sha256(), entry.end - entry.begin
    try:
        with entry.file.open("rb") as f:
            f.seek(entry.begin)
            while left > 0 and (part := f.read(min(left, READ_BYTES))):
                digest.update(part)
                left -= len(part)
    except OSError as err:
        raise SourceError(f"{entry.file} cannot be read: {err.strerror}") from err
    return digest.hexdigest()


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as f:
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as err:
        raise SourceError(f"{file} cannot be mapped: {err}") from err


def safetensors_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises SourceError.

    All entries must lie in the file, side by side, and have their shape's size.
    """
    data = _map(file)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise SourceError(f"{file} is no safetensors file, or is cut off: its header would have {length} bytes")
    base, size = 8 + length, len(data) - 8 - length
    try:
        entries = json.loads(data[8:base], object_pairs_hook=_unique)
        entries.pop("__metadata__", None)
        tensors = {n: _entry(e, file, base) for n, e in entries.items()}
    except SourceError:
        raise
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as err:
        raise SourceError(f"{file}: the header is malformed: {err!r}") from err
    at = base
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if t.begin != at or t.end - t.begin != math.prod(t.shape) * ITEMSIZES[t.dtype]:
            raise SourceError(f"{file}: tensor {name!r} claims bytes [{t.begin}, {t.end}) that do not fit its shape")
        at = t.end
    if at != base + size:
        raise SourceError(f"{file} should have {at} bytes and has {len(data)}: download the checkpoint again")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) != len(pairs):
        raise ValueError("a name stands twice")
    return whole


def _entry(entry: dict[str, Any], file: Path, base: int) -> Tensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in ITEMSIZES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not all(type(n) is int and n >= 0 for n in (*shape, *offsets)) or len(offsets) != 2 or len(shape) > 8:
        raise ValueError(f"shape {shape!r}, data_offsets {offsets!r}")
    return Tensor(file, dtype, tuple(shape), base + offsets[0], base + offsets[1])
