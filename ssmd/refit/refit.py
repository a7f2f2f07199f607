"""The refit of a stripped graph: it writes the files with the weights of a source, without PyTorch or a converter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import BaseModel

from ssmd.families.fields import FamilyError
from ssmd.families.offsets import BLOCK, is_multiplied, with_offsets
from ssmd.families.registry import family_of
from ssmd.families.rotation import rotated
from ssmd.families.weights import Array, Binding
from ssmd.machine.progress import tell
from ssmd.model.source import VOLATILE, Source, Tensors
from ssmd.refit.encodings import ENCODINGS, Encoded, EncodingError
from ssmd.refit.graphfile import Header, Hole, StrippedGraph
from ssmd.refit.install import has_own_head, unused_tensors

Differences = dict[str, tuple[object, object]]  # by the field of config.json: a source's value, and a graph's
DIVIDED_ABOVE = 64 * 64  # values of a matrix that has 4 bits in int4; smaller ones stay float32
MOST_SHOWN = 3  # differing fields in a message


class RefitError(ValueError):
    """A source that does not fit a stripped graph, or whose values cannot be encoded; the message says why."""


def refit(graph: StrippedGraph, source: Tensors, folder: Path) -> None:
    """Write all files of `graph` into `folder` with the weights of `source`, byte for byte as a build writes them.

    All tensors' names, dtypes and shapes are checked before anything is written. Raises RefitError if the source's
    config is not the graph's, if it has a tensor too many, or if its values cannot be encoded. Raises SourceError if a
    tensor is missing, has another shape, or is not finite. The caller removes files written before an error.
    """
    header = graph.header
    fits(header, source)
    bindings = bindings_of(source.config, header.recipe, header.tiers[-1])
    places: dict[str, list[tuple[str, Hole]]] = {}
    for part in header.files:
        for hole in part.holes:
            if hole.parameter not in bindings:
                raise RefitError(f"{part.name} needs {hole.parameter!r}, unknown to the family; get the graph again")
            places.setdefault(hole.parameter, []).append((part.name, hole))
    _check_tables(header, places)
    if isinstance(source, Source):
        _check_tensors(source, bindings)
        if has_own_head(family := family_of(source.config), family.parse(source.config), source):
            raise RefitError(
                f"{source.path}: lm_head.weight is not the embedding, though config.json says tie_word_embeddings; "
                f"{header.name}'s graph has no head of its own: build it with `ssmd build`"
            )
    for part in header.files:
        (folder / part.name).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = {p.name: stack.enter_context((folder / p.name).open("xb")) for p in header.files}
        for part, literal in zip(header.files, graph.literals, strict=True):
            write_literal(files[part.name], part.holes, literal, part.size)
        written, total = 0, sum(hole.length for holes in places.values() for _, hole in holes)
        for name, holes in places.items():
            tell(written, total)
            written += sum(hole.length for _, hole in holes)
            try:
                write_blocks(bindings[name].blocks(source), [(files[file], hole) for file, hole in holes])
            except EncodingError as err:
                raise RefitError(f"{source.path}: the weight {name}: {err}") from err


def fits(header: Header, source: Tensors) -> None:
    """Check that the source's config is the graph's. Raises RefitError, which names the fields that differ."""
    if differing := differences(header, source.config):
        raise RefitError(
            f"{source.path} is not of the config that {header.name}'s graph is for: {differences_text(differing)}"
        )


def differences_text(differing: Differences) -> str:
    """Return the differing fields in words, for a message."""
    said = "; ".join(f"{k} is {found!r}, not {wanted!r}" for k, (found, wanted) in [*differing.items()][:MOST_SHOWN])
    return said + (f" and {len(differing) - MOST_SHOWN} more" if len(differing) > MOST_SHOWN else "")


def differences(header: Header, config: Mapping[str, Any]) -> Differences:
    """Return the fields by which a config.json does not fit a graph, with its value and the graph's.

    A graph executes a plan. Fields that only change how weights are made do not count, as Falcon-H1's multipliers, or
    the base and scaling of RoPE, of which the tables are made. Nor do those that the family does not read, nor the
    model's context if a prefill fits into it. Raises FamilyError if the config's family is not supported.
    """
    family, wanted = family_of(header.config), stable(header.config)
    if config.get("model_type") != header.family:
        return {"model_type": (config.get("model_type"), header.family)}
    least = _least(header)
    holes = {hole.parameter for file in header.files for hole in file.holes}
    tables_are_holes = family.tables(family.parse(wanted), least).keys() <= holes

    def function(fields: Mapping[str, Any]) -> object:
        parsed = family.parse(fields)
        plan = family.plan(parsed)
        ropes = [plan.rope, plan.window_rope]
        bare = plan.model_copy(update={"rope": None, "window_rope": None}) if tables_are_holes else plan
        return min(parsed.max_position, least), _rounded(bare), [rope is None for rope in ropes]

    here, there = function(wanted), function(config)
    if there == here:
        return {}
    if family.text is not None:  # name the fields in the text model's object, which no message has room for
        wanted, config = stable(family.text(wanted)), family.text(config)

    def matters(key: str) -> bool:
        for one, other, computed in ((wanted, config, here), (config, wanted, there)):
            changed = {k: v for k, v in {**one, key: other.get(key)}.items() if k in other or k != key}
            whole = changed if family.text is None else {"model_type": family.name, "text_config": changed}
            with contextlib.suppress(FamilyError):  # the other fields of this config forbid it: try the other way round
                return function(whole) != computed
        return True

    keys = sorted(k for k in wanted.keys() | stable(config).keys() if wanted.get(k) != config.get(k))
    return {k: (config.get(k), wanted.get(k)) for k in [k for k in keys if matters(k)] or keys}


def bounded(header: Header, config: Mapping[str, Any], context: int | None = None) -> tuple[int, ...]:
    """Return an artifact's KV tiers for a graph and a config that fits it. Raises RefitError if not possible.

    context: the most tokens; None: as many as both allow.
    """
    most = family_of(config).parse(config).max_position
    last = min(header.tiers[-1], most)
    if not _any_capacity(header):
        last = max(tier for tier in header.tiers if tier <= last)
    asked = last if context is None else context
    if asked > last:
        made = "config.json says so" if most < asked else "`ssmd build --context` makes more, with PyTorch"
        raise RefitError(f"{header.name} for {header.runtime} holds {last} tokens at most, not {asked}: {made}")
    if asked < _least(header):
        raise RefitError(
            f"a context of {asked} tokens is too short for {header.name} for {header.runtime}: {_least(header)} or more"
        )
    if not _any_capacity(header) and asked not in header.tiers:
        raise RefitError(
            f"the caches of {header.name} for {header.runtime} have a fixed size: --context {asked} is not possible, "
            f"only {', '.join(map(str, header.tiers))}"
        )
    return (*(tier for tier in header.tiers if tier < asked), asked)


def _any_capacity(header: Header) -> bool:
    """Return True if the graph's caches take any capacity. Its tiers are then a choice; else they are built in."""
    return header.device_class == "cpu" and len(header.tiers) > 1


def _least(header: Header) -> int:
    """Return the least number of tokens of a context."""
    return header.buckets[-1] if _any_capacity(header) else header.tiers[0]


def _rounded(value: object) -> object:
    """Round all numbers of a value to float32, as a graph holds them."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def stable(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json without VOLATILE fields, such as the version of the program that saved it."""
    return {k: v for k, v in config.items() if k not in VOLATILE}


def bindings_of(config: Mapping[str, Any], recipe: Mapping[str, Any], context: int) -> dict[str, Binding]:
    """Return all bindings that a graph of this recipe can have holes for: parameters and tables."""
    family = family_of(config)
    parsed = family.parse(config)
    made = family.bindings(parsed)
    if "rotation" in recipe:
        made = rotated(made)
    if "offsets" in recipe:
        made = with_offsets(made, [name for name in made if is_multiplied(name) and _is_divided(made[name], config)])
    return {**made, **family.tables(parsed, context)}


class _Zeros:
    """A source of a config whose tensors have their shapes and no values."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.path = config, Path("no source")

    def tensor(self, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None) -> Array:
        return np.broadcast_to(np.float32(0), (len(range(shape[0])[first:last]), *shape[1:]))


def _is_divided(binding: Binding, config: Mapping[str, Any]) -> bool:
    """Return True if a matrix has more than DIVIDED_ABOVE values in rows of whole blocks: int4 divides it so."""
    values = 0
    for rows in binding.blocks(_Zeros(config)):
        values += rows.size
        if rows.ndim != 2 or rows.shape[1] % BLOCK or values > DIVIDED_ABOVE:
            break
    return rows.ndim == 2 and rows.shape[1] % BLOCK == 0 and values > DIVIDED_ABOVE


def _check_tables(header: Header, places: Mapping[str, list[tuple[str, Hole]]]) -> None:
    """Check that tables have a row for each token of the graph: a token beyond them would get the last row."""
    family = family_of(header.config)
    for name in family.tables(family.parse(header.config), header.tiers[-1]):
        for file, hole in places.get(name, []):
            if (hole.first, hole.rows) != (0, header.tiers[-1]):
                raise RefitError(
                    f"{header.name}'s graph is for {header.tiers[-1]} tokens, and {name} in {file} has {hole.rows} "
                    "rows; get it again"
                )


def _check_tensors(source: Source, bindings: Mapping[str, Binding]) -> None:
    reads = {name: shape for binding in bindings.values() for name, shape in binding.reads.items()}
    for name, shape in reads.items():
        source.entry(name, shape)
    left_out = tuple(family_of(source.config).left_out)
    if more := [name for name in unused_tensors(source, bindings) if not name.startswith(left_out)]:
        others = f" and {len(more) - 1} more" if len(more) > 1 else ""
        raise RefitError(
            f"{source.path} has the tensor {more[0]!r}{others}, which its config.json does not use: it is not the "
            "config of these weights"
        )


def write_literal(file: BinaryIO, holes: Sequence[Hole], literal: bytes, size: int) -> None:
    """Write a file of `size` bytes with its literal bytes; the holes are not allocated on the disk."""
    file.truncate(size)
    at = read = 0
    for hole in holes:
        file.write(literal[read : read + hole.offset - at])
        read += hole.offset - at
        at = hole.offset + hole.length
        file.seek(at)
    file.write(literal[read:])


def write_blocks(blocks: Iterator[Array], holes: list[tuple[BinaryIO, Hole]]) -> None:
    """Encode a parameter by blocks of its rows, each once for all holes that need it."""
    written = [0] * len(holes)
    start = 0
    for block in blocks:
        stop = start + len(block)
        made: dict[Callable[[Array], tuple[Encoded, ...]], tuple[Encoded, ...]] = {}
        for i, (file, hole) in enumerate(holes):
            first, last = max(start, hole.first), min(stop, hole.first + hole.rows)
            if first >= last:
                continue
            encoding = ENCODINGS[hole.encoding]
            if encoding.form not in made:
                made[encoding.form] = encoding.form(block)
            part = np.ascontiguousarray(made[encoding.form][encoding.part][first - start : last - start])
            if written[i] + part.nbytes <= hole.length:
                file.seek(hole.offset + written[i])
                file.write(part.data)
            written[i] += part.nbytes
        start = stop
    for (_, hole), nbytes in zip(holes, written, strict=True):
        if nbytes != hole.length:
            raise EncodingError(f"the graph has {hole.length} bytes for what takes {nbytes} as {hole.encoding}")
