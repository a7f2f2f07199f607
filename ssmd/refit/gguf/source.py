"""A GGUF file as a source checkpoint: config, tokenizer and weights as transformers has them, read block by block.

The texts that ssmd reads of a source are written into a folder, the weights stay in the file. No tensor is ever whole
in float32 unless a binding asks for it whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ssmd.families.registry import FAMILIES
from ssmd.families.unbuilt import in_gguf
from ssmd.model.ggml import ENCODINGS
from ssmd.model.gguf import GGUF, GGUFTensor, shown
from ssmd.model.source import READ_BYTES, VOLATILE, Source, SourceError, Tensor
from ssmd.refit.gguf.architectures import ARCHITECTURES, PLAIN, ROPE_FREQS, Form, Metadata
from ssmd.refit.gguf.tokenizer import vocabulary_of

LINEAGE = "gguf-1"  # begins the lineage of these sources: raise it if the values that are made of a file change
# Architectures whose experts are served, but not read from GGUF: a published checkpoint of each.
WITH_EXPERTS = {"lfm2moe": "LiquidAI/LFM2-8B-A1B", "granitehybrid": "ibm-granite/granite-4.0-h-tiny"}
_INSTEAD = "Experts are read from safetensors only: take a checkpoint such as {}, and ssmd build for runtime openvino"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.IGNORECASE)


@dataclass(frozen=True)
class StackedTensor:
    """A source's tensor as the file holds it: `parts` stacked by rows, in one form."""

    parts: tuple[GGUFTensor, ...]
    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the source's tensor."""
        rows = sum(part.shape[0] for part in self.parts)
        return self.form.shape((rows, *self.parts[0].shape[1:]))


@dataclass(frozen=True)
class GGUFSource(Source):
    """An opened GGUF file. path: the folder of its texts. stored: its tensors, by the source's names."""

    file: Path
    read: GGUF = field(repr=False)
    stored: Mapping[str, StackedTensor] = field(repr=False)

    @staticmethod
    def make(file: Path, folder: Path) -> GGUFSource:
        """Read and check all of a file but its tensors' values; write its texts into `folder`. Raises SourceError."""
        try:
            read = GGUF(file)
            _is_whole_model(read)
            name = read.fields.get("general.architecture")
            if not isinstance(name, str) or name not in ARCHITECTURES:
                raise SourceError(f"{file}: its architecture is {shown(str(name))}{_why_not(name)}")
            architecture, metadata = ARCHITECTURES[name], Metadata(read, name)
            _has_no_experts(metadata)
            config = architecture.config(metadata)
            if unknown := metadata.unknown():
                value = repr(read.fields[f"{name}.{unknown[0]}"])[:60]
                raise SourceError(f"{file}: {name}.{shown(unknown[0])[1:-1]} is {value}, which is not supported")
            vocabulary = vocabulary_of(read)
            stored = _stored(read, architecture.names(config), architecture.top, architecture.layer)
        except SourceError:
            raise
        except OSError as err:
            raise SourceError(f"{file} cannot be read: {err.strerror}") from err
        except ValueError as err:
            raise SourceError(f"{file}: {err}") from err
        vocabulary.write(folder)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", newline="\n")
        return GGUFSource(
            path=folder,
            config=config,
            tensors={n: Tensor(file, s.parts[0].kind_name, s.shape, s.parts[0].begin, 0) for n, s in stored.items()},
            tokenizer_json=vocabulary.tokenizer_json,
            chat_template=vocabulary.chat_template,
            special_tokens=vocabulary.special_texts,
            stop_tokens=vocabulary.stops,
            file=file,
            read=read,
            stored=stored,
        )

    def entry(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the first place of tensor `name` of that shape. Raises SourceError."""
        entry = self.tensors.get(name)
        if entry is None:
            raise SourceError(f"{self.file}: there is no tensor for {name!r}, which its fields call for")
        if entry.shape != shape:
            raise SourceError(f"{self.file}: the tensor for {name!r} has shape {entry.shape}, its fields say {shape}")
        return entry

    def tensor(self, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None) -> NDArray[np.float32]:
        """Return tensor `name`, or its rows `first` to `last`, as float32, as `Source.tensor` does."""
        self.entry(name, shape)
        first, last, _ = slice(first, last).indices(shape[0])
        last = max(first, last)
        stored = self.stored[name]
        try:
            array = _rows(self.read, stored, shape, first, last)
        except OSError as err:
            raise SourceError(f"{self.file} cannot be read: {err.strerror}") from err
        except ValueError as err:
            raise SourceError(f"{self.file}: {err}") from err
        if not np.isfinite(array).all():
            inside = " (or are not below 0, as A has to be)" if stored.form.exp else ""
            raise SourceError(
                f"{self.file}: tensor {shown(stored.parts[0].name)} holds values that are not finite{inside}"
            )
        return array

    @cached_property
    def lineage(self) -> str:
        """Return the sha256 of the model's function: LINEAGE, the config, and every tensor's name, type and bytes.

        It is never that of the safetensors checkpoint which the file was made from: the values are others.
        """
        stable = {k: v for k, v in self.config.items() if k not in VOLATILE}
        whole = hashlib.sha256(json.dumps([LINEAGE, stable], sort_keys=True, separators=(",", ":")).encode())
        for name, stored in sorted(self.stored.items()):
            for part in stored.parts:
                whole.update(json.dumps([name, part.kind, list(part.shape), self._sha256(part)]).encode())
        return whole.hexdigest()

    def _sha256(self, part: GGUFTensor) -> str:
        digest, left = hashlib.sha256(), part.nbytes
        try:
            with self.file.open("rb") as opened:
                opened.seek(part.begin)
                while left > 0 and (data := opened.read(min(left, READ_BYTES))):
                    digest.update(data)
                    left -= len(data)
        except OSError as err:
            raise SourceError(f"{self.file} cannot be read: {err.strerror}") from err
        return digest.hexdigest()

    @property
    def kinds(self) -> str:
        """The types of its tensors in words, those with the most values first, such as "Q4_K, Q6_K, F32"."""
        values: dict[str, int] = {}
        for stored in self.stored.values():
            for part in stored.parts:
                values[part.kind_name] = values.get(part.kind_name, 0) + math.prod(part.shape)
        return ", ".join(sorted(values, key=lambda name: -values[name]))


def _why_not(architecture: object) -> str:
    """Return why an architecture is not read, as the end of a message."""
    name = architecture if isinstance(architecture, str) else ""
    if name in WITH_EXPERTS:
        return f", a mixture of experts. {_INSTEAD.format(WITH_EXPERTS[name])}"
    if (unbuilt := in_gguf(name)) is not None:
        return f": {unbuilt.why(FAMILIES)}"
    return f"; from GGUF ssmd reads {', '.join(ARCHITECTURES)}"


def _has_no_experts(m: Metadata) -> None:
    """Raise SourceError, with the advice, if a file of a supported architecture has experts."""
    if not (count := m.get("expert_count")):
        return
    said = f"{m.read.file} has experts ({m.architecture}.expert_count is {repr(count)[:60]})"
    if m.architecture in WITH_EXPERTS:
        raise SourceError(f"{said}. {_INSTEAD.format(WITH_EXPERTS[m.architecture])}")
    raise SourceError(f"{said}, which ssmd does not have for {m.architecture}")


def _is_whole_model(read: GGUF) -> None:
    """Raise SourceError if a file is a part of a model, or none."""
    parts = read.fields.get("split.count", 0)
    named = _PART.search(read.file.name)
    if (type(parts) is int and parts > 1) or (named is not None and int(named[2]) > 1):
        raise SourceError(
            f"{read.file} is one of several parts of a model: join them first, with llama.cpp's llama-gguf-split "
            "--merge FIRST-PART WHOLE.gguf"
        )
    kind = read.fields.get("general.type", "model")
    if kind != "model":
        raise SourceError(f"{read.file} is of the type {shown(str(kind))}, not a model")


def _stored(
    read: GGUF, names: Mapping[str, tuple[str, Form]], top: Mapping[str, str], layer: str
) -> dict[str, StackedTensor]:
    """Return the tensors by the source's names. Raises SourceError naming one that is unknown or not read."""
    order = {own: place for place, own in enumerate(names)}
    found: dict[str, list[tuple[int, GGUFTensor, Form]]] = {}
    for name, entry in read.listed.items():
        if entry.kind not in ENCODINGS:
            known = ", ".join(e.name for e in ENCODINGS.values())
            raise SourceError(f"{read.file}: tensor {shown(name)} is {entry.kind_name}; ssmd reads {known}")
        if name == ROPE_FREQS:
            continue
        number = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)", name, re.ASCII)
        if number is None and name in top:
            found.setdefault(top[name], []).append((0, entry, PLAIN))
        elif number is not None and number[2] in names:
            own, form = names[number[2]]
            found.setdefault(f"{layer}{number[1]}.{own}", []).append((order[number[2]], entry, form))
        else:
            raise SourceError(f"{read.file}: its architecture has no tensor {shown(name)} that ssmd knows")
    made = {}
    for name, parts in found.items():
        parts.sort(key=lambda part: part[0])
        several = tuple(entry for _, entry, _ in parts)
        if len({entry.shape[1:] for entry in several}) > 1:
            raise SourceError(f"{read.file}: the tensors for {name} have rows of different length")
        if len(several) > 2 or (len(several) == 2 and not name.endswith("input_linear.weight")):
            raise SourceError(f"{read.file} has two tensors for {name}")
        form = parts[0][2]
        rows = several[0].shape[0]
        if form.heads and rows % (2 * form.heads):
            raise SourceError(f"{read.file}: {shown(several[0].name)} has {rows} rows, not pairs in {form.heads} heads")
        made[name] = StackedTensor(several, form)
    return made


def _rows(read: GGUF, stored: StackedTensor, shape: tuple[int, ...], first: int, last: int) -> NDArray[np.float32]:
    """Return rows of a tensor with what the converter did undone."""
    form = stored.form
    if form.heads:
        [part] = stored.parts
        each = part.shape[0] // form.heads
        begin, end = first // each * each, -(-last // each) * each  # whole heads
        heads = read.rows(part.name, begin, end).reshape(-1, each // 2, 2, *part.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(-1, *part.shape[1:])[first - begin : last - begin]
    if len(stored.parts) == 1 and stored.parts[0].shape[0] != shape[0]:  # a norm in groups: few values
        whole = read.rows(stored.parts[0].name, 0, stored.parts[0].shape[0]).reshape(shape)
        return whole[first:last]
    pieces, before = [], 0
    for part in stored.parts:
        rows = part.shape[0]
        begin, end = max(first - before, 0), min(last - before, rows)
        if begin < end:
            pieces.append(read.rows(part.name, begin, end))
        before += rows
    array = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty((0,), np.float32)
    if form.exp:
        with np.errstate(invalid="ignore", divide="ignore"):
            array = np.log(-array)
    return array.reshape(last - first, *shape[1:])
