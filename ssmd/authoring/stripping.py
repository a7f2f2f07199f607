"""Makes stripped graphs: writes a model with weights made up from a seed and takes them out again.

Each constant is found among the encodings of the parameters, so that no two of these may be alike: an ordinary source
has norms of ones.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmd.families.encodings import ENCODINGS
from ssmd.families.registry import family_of
from ssmd.families.rotation import BLOCK, rotated
from ssmd.families.weights import Array
from ssmd.refit import stable
from ssmd.seeded import SeededSource
from ssmd.stripped import Header, Hole, StrippedFile, StrippedGraph

if TYPE_CHECKING:
    from ssmd.authoring.building import Converter, Plan

Constants = Mapping[str, Sequence[tuple[int, int]]]  # of files, by name: offset and length of each constant
MOST_PARTS = 8  # rows of a parameter that a graph may hold one by one: those of a convolution
MADE = "spread_"  # parameters that no source has a part in, and stay in the graph (ssmd/families/rotation.py)


class StripError(ValueError):
    """A graph cannot be stripped of its weights; the message names the parameter."""


def made(converter: Converter, config: Mapping[str, Any], plan: Plan, folder: Path, *, seed: int) -> StrippedGraph:
    """The stripped graph of a config, by way of the model's files in `folder`, which must be empty and is left full.

    Raises StripError, BuildError or FamilyError.
    """
    from ssmd.authoring.registry import author

    family = family_of(config)
    parsed = family.parse(config)
    bindings = family.bindings(parsed)
    turned = {"rotation": BLOCK} if converter.rotates(plan.quantization) else {}
    source = SeededSource(config, seed)
    parameters = {n: binding(source) for n, binding in (rotated(bindings) if turned else bindings).items()}
    converter.prepare()
    conversion = converter.write(author(family.name, parsed, parameters, plan.context), plan, folder, _silent)
    files, literals = strip(folder, converter.constants(folder), parameters)
    header = Header(
        family=family.name,
        config=stable(config),
        runtime=converter.runtime,
        device_class=converter.device_class,
        quantization=plan.quantization,
        recipe={**turned, **converter.recipe(plan.quantization)},
        conversion=conversion,
        buckets=plan.buckets,
        tiers=plan.tiers,
        builders={p: version(p) for p in ("ssmd-daemon", *converter.packages.values())},
        files=files,
    )
    return StrippedGraph(header, literals)


@contextmanager
def _silent(_: str) -> Iterator[None]:
    yield


def strip(
    folder: Path, constants: Constants, parameters: Mapping[str, Array]
) -> tuple[tuple[StrippedFile, ...], tuple[bytes, ...]]:
    """The model's files in `folder`, which hold `parameters`, and the literal bytes of each. Constants that are none of
    them stay. Raises StripError if a parameter is not found, or a constant could be either of two."""
    table = _table({n: a for n, a in parameters.items() if not n.startswith(MADE)})
    files: list[StrippedFile] = []
    literals: list[bytes] = []
    found: set[str] = set()
    for name in sorted(constants):
        path = folder / name
        with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            holes = []
            for offset, length in sorted(set(constants[name])):
                digest = hashlib.sha256(memoryview(data)[offset : offset + length]).digest()
                if (hole := table.get((length, digest))) is not None:
                    holes.append(hole.model_copy(update={"offset": offset}))
            at, literal = 0, b""
            for hole in holes:
                literal += data[at : hole.offset]
                at = hole.offset + hole.length
            literals.append(literal + data[at:])
            files.append(StrippedFile(name=name, size=len(data), holes=tuple(holes)))
        found |= {hole.parameter for hole in holes}
    missing = sorted(n for n in parameters if n not in found and not n.startswith(MADE))
    if missing:
        raise StripError(
            f"the graph does not hold {missing[0]} as it was given ({len(missing)} of {len(parameters)} parameters): "
            "the converter has combined it with something else"
        )
    return tuple(files), tuple(literals)


def _table(parameters: Mapping[str, Array]) -> dict[tuple[int, bytes], Hole]:
    """By length and sha256 of what could stand in a file. Raises StripError where that is the same of two."""
    table: dict[tuple[int, bytes], Hole] = {}
    for hole, content in (made for name, array in parameters.items() for made in _encoded(name, array)):
        key = hole.length, hashlib.sha256(content).digest()
        other = table.setdefault(key, hole)
        if other.parameter != hole.parameter:
            raise StripError(
                f"{other.parameter} and {hole.parameter} have the same values: which is which is not known"
            )
    return table


def _encoded(name: str, array: Array) -> Iterator[tuple[Hole, bytes]]:
    """Whole in every encoding that fits, then row by row where there are few."""
    rows = len(array)
    parts = [(0, rows), *((i, 1) for i in range(rows) if array.ndim > 2 and rows <= MOST_PARTS)]
    for encoding, form in ENCODINGS.items():
        if form.matrices and array.ndim != 2:
            continue
        try:
            whole = form.form(array)[form.part]
        except ValueError:
            continue  # of such values none stands in the graph
        for first, count in parts:
            content = np.ascontiguousarray(whole[first : first + count]).tobytes()
            yield (
                Hole(offset=0, length=len(content), parameter=name, encoding=encoding, first=first, rows=count),
                content,
            )
