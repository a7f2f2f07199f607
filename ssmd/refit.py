"""Writes the files of a stripped graph with the weights of a source: no PyTorch, no converter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from ssmd.families.encodings import ENCODINGS, Encoded, EncodingError
from ssmd.families.registry import family_of
from ssmd.families.rotation import rotated
from ssmd.families.weights import Array, Binding
from ssmd.source import VOLATILE, Tensors
from ssmd.stripped import Hole, StrippedGraph

BLOCK_ELEMENTS = 4 << 20  # of a parameter, encoded at a time


class RefitError(ValueError):
    """A source does not fit a stripped graph, or cannot be written as it says; the message says what is wrong."""


def refit(graph: StrippedGraph, source: Tensors, folder: Path) -> None:
    """Write all files of `graph` into `folder` with the weights of `source`, byte for byte as a build writes them.

    Raises RefitError if the source's config is not the graph's or its values cannot be encoded, SourceError if a tensor
    is missing, misshapen or not finite. What was written until then is left to the caller.
    """
    fits(graph, source)
    bindings = parameters(graph, source)
    places: dict[str, list[tuple[str, Hole]]] = {}
    for part in graph.header.files:
        for hole in part.holes:
            if hole.parameter not in bindings:
                raise RefitError(f"{part.name} asks for {hole.parameter!r}, which the family has not; get it again")
            places.setdefault(hole.parameter, []).append((part.name, hole))
    with ExitStack() as stack:
        files = {p.name: stack.enter_context((folder / p.name).open("xb")) for p in graph.header.files}
        for part, literal in zip(graph.header.files, graph.literals, strict=True):
            _write_literal(files[part.name], part.holes, literal, part.size)
        for name, holes in places.items():
            try:
                _write(bindings[name](source), [(files[file], hole) for file, hole in holes])
            except EncodingError as err:
                raise RefitError(f"{source.path}: the weight {name}: {err}") from err


def fits(graph: StrippedGraph, source: Tensors) -> None:
    """Raises RefitError naming the fields in which the source's config is not the graph's."""
    wanted, found = stable(graph.header.config), stable(source.config)
    differing = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    if differing:
        shown = "; ".join(f"{k} is {found.get(k)!r} there, {wanted.get(k)!r} here" for k in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise RefitError(f"{source.path} is not of the config that the graph was made for: {shown}{more}")


def stable(config: Mapping[str, object]) -> dict[str, object]:
    """What of a config.json counts: not who saved it."""
    return {k: v for k, v in config.items() if k not in VOLATILE}


def parameters(graph: StrippedGraph, source: Tensors) -> dict[str, Binding]:
    family = family_of(source.config)
    made = family.bindings(family.parse(source.config))
    return rotated(made) if "rotation" in graph.header.recipe else made


def _write_literal(file: BinaryIO, holes: tuple[Hole, ...], literal: bytes, size: int) -> None:
    file.truncate(size)
    at = read = 0
    for hole in holes:
        file.write(literal[read : read + hole.offset - at])
        read += hole.offset - at
        at = hole.offset + hole.length
        file.seek(at)
    file.write(literal[read:])


def _write(array: Array, holes: list[tuple[BinaryIO, Hole]]) -> None:
    """Encode a parameter by blocks of its rows, each once for all holes that need it."""
    step = max(1, BLOCK_ELEMENTS * len(array) // array.size)
    written = [0] * len(holes)
    for start in range(0, len(array), step):
        stop = min(start + step, len(array))
        made: dict[Callable[[Array], tuple[Encoded, ...]], tuple[Encoded, ...]] = {}
        for i, (file, hole) in enumerate(holes):
            first, last = max(start, hole.first), min(stop, hole.first + hole.rows)
            if first >= last:
                continue
            encoding = ENCODINGS[hole.encoding]
            if encoding.form not in made:
                made[encoding.form] = encoding.form(array[start:stop])
            part = made[encoding.form][encoding.part][first - start : last - start].tobytes()
            file.seek(hole.offset + written[i])
            written[i] += len(part)
            file.write(part if written[i] <= hole.length else b"")
    for (_, hole), nbytes in zip(holes, written, strict=True):
        if nbytes != hole.length:
            raise EncodingError(f"the graph has {hole.length} bytes for what takes {nbytes} as {hole.encoding}")
