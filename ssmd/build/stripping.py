"""The making of stripped graphs: write a model with weights from a seed, then take the weights out again.

Each constant is looked up among the encodings of the parameters, so no two of these may be equal. In an ordinary
source, for example, norms are all ones.
"""

from __future__ import annotations

import filecmp
import hashlib
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmd.families.offsets import is_multiplied
from ssmd.families.registry import family_of
from ssmd.families.rotation import BLOCK
from ssmd.families.weights import Array, Binding, Parameters, make_parameters, mapped
from ssmd.model.random_source import SeededSource
from ssmd.model.source import Tensors
from ssmd.refit.catalog import SEED, seeded_ids, seeded_tokens, verified
from ssmd.refit.encodings import ENCODINGS, decoded
from ssmd.refit.graphfile import Golden, Header, Hole, StrippedFile, StrippedGraph
from ssmd.refit.refit import bindings_of, refit, stable
from ssmd.runtime.verify import GOLDEN_POSITIONS, tolerance_of

if TYPE_CHECKING:
    from ssmd.build.builder import Converter, Quantization, Target

Constants = Mapping[str, Sequence[tuple[int, int]]]  # of files, by name: offset and length of each constant
MOST_PARTS = 8  # rows of a parameter that a graph may hold one by one: those of a convolution
MADE = "spread_"  # parameters that no source has a part in, and stay in the graph (ssmd/families/rotation.py)
OTHER_SEED = SEED + 1


class StripError(ValueError):
    """A graph that cannot be stripped of its weights; the message names the parameter."""


@dataclass(frozen=True)
class Label:
    """A graph's label: the model's name, its name on a hub, and the source of its config."""

    name: str
    origin: str = ""
    provenance: str = ""


def make(
    converter: Converter,
    config: Mapping[str, Any],
    target: Target,
    scratch: Path,
    *,
    label: Label,
    stage: Callable[[str], AbstractContextManager[None]],
) -> StrippedGraph:
    """Make the stripped graph of a config, from two models with different weights, in the empty folder `scratch`.

    Three checks are made. The graph must be the same for both models. Refitted with the second's weights it must give
    the second's files. Its golden values, computed in PyTorch, must be those of the runtime. Raises StripError if not;
    also BuildError and FamilyError.
    """
    from ssmd.authoring.model import author
    from ssmd.build.reference import golden, one_thread

    made = []
    for seed in (SEED, OTHER_SEED):
        folder = scratch / str(seed)
        folder.mkdir(parents=True)
        with stage(f"write the model with the weights of seed {seed}"):
            made.append(written(converter, config, target, folder, seed, label))
    graph, other = made
    if (graph.header, graph.literals) != (other.header, other.literals):
        raise StripError(f"the graphs of two seeds differ; {scratch} has their files")
    with stage("refit and compare the bytes"):
        again = scratch / "again"
        again.mkdir()
        refit(graph, SeededSource(config, OTHER_SEED), again)
        for part in graph.header.files:
            if not filecmp.cmp(again / part.name, scratch / str(OTHER_SEED) / part.name, shallow=False):
                raise StripError(f"refitted, {part.name} has other bytes than its build")
    with stage("compute golden values"):
        header = graph.header
        source, family = SeededSource(config, SEED), family_of(config)
        parsed = family.parse(config)
        found: dict[str, set[str]] = {}
        for part in header.files:
            for name, encodings in part.encodings.items():
                found.setdefault(name, set()).update(encodings)
        tables = family.tables(parsed, target.context)
        bindings = bindings_of(config, header.recipe, target.context)
        read = {n: mapped(_decoder(found.get(n, ())), b) for n, b in bindings.items() if n not in tables}
        parameters = Parameters(read, source)
        tokens = seeded_tokens(parsed.vocabulary)
        with one_thread():
            logits = golden(author(family, parsed, parameters, target.context), tokens)
        rows = tuple(tuple(map(float, row)) for row in logits[:, seeded_ids(parsed.vocabulary)])
        values = Golden(
            seed=SEED, tokens=tuple(tokens), positions=GOLDEN_POSITIONS, logits=rows, rms=(0.0,) * len(rows)
        )
        graph = StrippedGraph(header.model_copy(update={"golden": values}), graph.literals)
    with stage("run it"):
        errors = tuple(step.rms_relative for step, _ in verified(graph, scratch / "run"))
    if not max(errors) <= tolerance_of(target.quantization):
        raise StripError(f"the runtime's logits are {max(errors):.2g} standard deviations off those of PyTorch")
    header = graph.header.model_copy(update={"golden": values.model_copy(update={"rms": errors})})
    return StrippedGraph(header, graph.literals)


def _decoder(encodings: Collection[str]) -> Callable[[Array], Array]:
    """Return the function that gives a parameter as a runtime reads it from these encodings."""
    return lambda array: decoded(array, encodings)


def written(
    converter: Converter, config: Mapping[str, Any], target: Target, folder: Path, seed: int, label: Label
) -> StrippedGraph:
    """Return the stripped graph of a model with weights from a seed, without golden values.

    The model's files stay in `folder`.
    """
    from ssmd.authoring.model import author

    family = family_of(config)
    parsed = family.parse(config)
    turned = {"rotation": BLOCK} if converter.rotates(target.quantization) else {}
    recipe = {**turned, **converter.recipe(target.quantization)}
    source, bindings = SeededSource(config, seed), bindings_of(config, recipe, target.context)
    tables = family.tables(parsed, target.context)
    converter.prepare()
    own = {n: b for n, b in bindings.items() if n not in tables}
    parameters = make_parameters(own, source, late=makes_late(converter, target.quantization, own))
    module = author(family, parsed, parameters, target.context)
    conversion = converter.write(module, target, folder, lambda _: nullcontext())
    files, literals = strip(folder, converter.constants(folder), bindings, source, converter.encodings)
    header = Header(
        name=label.name,
        origin=label.origin,
        provenance=label.provenance,
        family=family.name,
        config=stable(config),
        runtime=converter.runtime,
        device_class=converter.device_class,
        quantization=target.quantization,
        recipe=recipe,
        conversion=conversion,
        buckets=target.buckets,
        tiers=target.tiers,
        builders={p: version(p) for p in ("ssmd-daemon", *converter.packages.values())},
        golden=Golden(seed=SEED, tokens=(0,), positions=(0,), logits=((0.0,),), rms=(0.0,)),
        files=files,
    )
    return StrippedGraph(header, literals)


def makes_late(converter: Converter, quantization: Quantization, names: Collection[str]) -> bool:
    """Return True if a converter makes the large ones of these parameters one at a time.

    In int4 experts have zero points, which no encoding of ssmd/refit/encodings.py makes.
    """
    return quantization in converter.late and not (quantization == "int4" and any(map(_is_of_experts, names)))


def _is_of_experts(name: str) -> bool:
    """Return True if a parameter has a matrix of each expert of its layer: (experts, rows, columns)."""
    return "_experts_" in name


def strip(
    folder: Path, constants: Constants, bindings: Mapping[str, Binding], source: Tensors, encodings: str
) -> tuple[tuple[StrippedFile, ...], tuple[bytes, ...]]:
    """Strip the model's files in `folder` of the parameters that `bindings` make from `source`.

    encodings: as of a Converter. Returns the stripped files, and the literal bytes of each. Other constants stay.
    Raises StripError if a parameter is not found, or a constant could be either of two.
    """
    wanted = {n: b for n, b in bindings.items() if not n.startswith(MADE)}
    table = _table(wanted, source, encodings)
    files: list[StrippedFile] = []
    literals: list[bytes] = []
    found: set[str] = set()
    for name in sorted(constants):
        path = folder / name
        with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            holes = []
            for offset, length in sorted(set(constants[name])):
                digest = hashlib.sha256(memoryview(data)[offset : offset + length]).digest()
                possible = table.get((length, digest), ())
                if len(possible) > 1:  # an encoding that no constant of the graph has may be alike in many
                    raise StripError(
                        f"{possible[0].parameter} and {possible[1].parameter} have the same values in the graph: "
                        "which is which is not known"
                    )
                holes += [hole.model_copy(update={"offset": offset}) for hole in possible]
            at, literal = 0, b""
            for hole in holes:
                literal += data[at : hole.offset]
                at = hole.offset + hole.length
            literals.append(literal + data[at:])
            files.append(StrippedFile(name=name, size=len(data), holes=tuple(holes)))
        found |= {hole.parameter for hole in holes}
    missing = sorted(n for n in wanted if n not in found)
    if missing:
        raise StripError(
            f"the graph does not hold {missing[0]} as it was given ({len(missing)} of {len(wanted)} parameters): "
            "the converter has combined it with something else"
        )
    return tuple(files), tuple(literals)


def _table(
    bindings: Mapping[str, Binding], source: Tensors, encodings: str
) -> dict[tuple[int, bytes], tuple[Hole, ...]]:
    """Return the possible holes of a file by length and sha256: one for each parameter that has these bytes."""
    table: dict[tuple[int, bytes], dict[str, Hole]] = {}
    for hole, content in (
        made for name, binding in bindings.items() for made in _encoded(name, binding(source), encodings)
    ):
        key = hole.length, hashlib.sha256(content).digest()
        table.setdefault(key, {}).setdefault(hole.parameter, hole)
    return {key: tuple(holes.values()) for key, holes in table.items()}


def _encoded(name: str, array: Array, encodings: str) -> Iterator[tuple[Hole, bytes]]:
    """Yield a parameter's encodings: the whole in every encoding that fits, then single rows if there are few.

    encodings: the first word of those of a matrix.
    """
    rows, axes = len(array), 3 if _is_of_experts(name) else 2
    parts = [(0, rows), *((i, 1) for i in range(rows) if array.ndim > 2 and rows <= MOST_PARTS)]
    made: dict[Callable[[Array], tuple[Any, ...]], tuple[Any, ...]] = {}
    for encoding, form in ENCODINGS.items():
        of_others = array.ndim != axes or not encoding.startswith(f"{encodings}-")
        if (form.matrices and of_others) or (form.bits == 4 and not is_multiplied(name)):
            continue
        try:
            if form.form not in made:
                made[form.form] = form.form(array)
        except ValueError:
            continue  # of such values none stands in the graph
        whole = made[form.form][form.part]
        for first, count in parts:
            content = np.ascontiguousarray(whole[first : first + count]).tobytes()
            yield (
                Hole(offset=0, length=len(content), parameter=name, encoding=encoding, first=first, rows=count),
                content,
            )
