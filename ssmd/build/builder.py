"""The build of artifacts: source checkpoint -> re-authored module -> a runtime's own quantized files -> sealed folder.

A runtime's own part is its Converter, in the `build.py` of each runtime.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from ssmd.build import quality
from ssmd.build.stripping import Constants, makes_late
from ssmd.families.offsets import with_offsets
from ssmd.families.registry import Family, family_of
from ssmd.families.rotation import BLOCK, rotated
from ssmd.families.weights import Binding, make_parameters
from ssmd.machine.installation import extra, to_add, to_install
from ssmd.machine.memory import available, return_big_blocks
from ssmd.machine.progress import Progress, Stage, staged
from ssmd.machine.size import show_size
from ssmd.model.artifact import Artifact, seal
from ssmd.model.source import Source
from ssmd.refit.install import check_parts, checked_tokenizer, config_of, fields_of, placed, save_texts
from ssmd.runtime.info import target_for
from ssmd.runtime.protocol import Program, RuntimeUnavailable
from ssmd.text.tokenizer import Tokenizer

Quantization = Literal["int8", "int4", "f16", "f32"]
Shapes = Mapping[str, tuple[int, ...]]  # of a module's parameters, by name
# Capacities of KV caches where one graph takes any. Empty slots cost a conversation time at each token. Moving up costs
# it once: 3 to 20 ms for SmolLM2, as its rows move within their memory; with OpenVINO, which makes kernels, 10 to 40.
TIERS = (*range(128, 1024, 128), *(part << power for power in range(7, 14) for part in range(8, 16)))
_BYTES = {"int8": 1.01, "int4": 0.72, "f16": 2.0, "f32": 4.0}  # of the files, for each value
_BASE_BYTES = 600 << 20  # of a build's memory beside the weights: PyTorch and a converter
_COPIES = 3  # of the largest parameter in float32 at a time: as read, as changed, and its products
if TYPE_CHECKING:
    from ssmd.authoring.model import Model
    from ssmd.build.reference import Reference  # which loads PyTorch


class BuildError(ValueError):
    """A build that is not possible as requested; the message says what to change."""


@dataclass(frozen=True)
class Target:
    """The form of an artifact. Buckets and tiers, both in tokens, ascend."""

    quantization: Quantization
    buckets: tuple[int, ...]  # prefill lengths
    tiers: tuple[int, ...]  # capacities of the KV caches; without attention only the most tokens of a reference

    @property
    def context(self) -> int:
        return self.tiers[-1]


class Usual(Protocol):
    """The possible forms of a runtime's artifacts, and the default one."""

    runtime: str
    device_class: str
    quantizations: tuple[Quantization, ...]  # the usual one first
    buckets: tuple[int, ...] | None  # None: those of the family
    most_tokens: int | None  # of a prefill
    context: int
    tiers: tuple[int, ...]  # capacities of the KV caches below the one asked for: a step attends over all slots


@runtime_checkable
class Packer(Usual, Protocol):
    """A packer of weights, for a runtime whose artifacts hold weights and a plan: no module is converted."""

    def build(
        self,
        source: Source,
        out: Path,
        *,
        name: str,
        quantization: Quantization | None = None,
        buckets: Sequence[int] | None = None,
        tiers: Sequence[int] | None = None,
        replace: bool = False,
        progress: Progress = lambda line: None,
    ) -> Artifact:
        """Build an artifact, as the function `build` below does."""


class Converter(Usual, Protocol):
    """A converter from a module to a runtime's files. The runtime's `build.py` has one, named CONVERTER."""

    packages: ClassVar[Mapping[str, str]]  # by the name to import: the distribution
    late: tuple[Quantization, ...]  # for which `write` itself makes large parameters, one at a time
    holds: ClassVar[bool]  # whether it then has all quantized weights in memory at once
    encodings: ClassVar[str]  # first word of the encodings that its matrices have (ssmd/refit/encodings.py)

    def prepare(self) -> None:
        """Import packages whose import takes seconds."""

    def rotates(self, quantization: Quantization) -> bool:
        """Return True if the weights are rotated first (ssmd/families/rotation.py)."""

    def offsets(self, shapes: Shapes, quantization: Quantization) -> list[str]:
        """Return the names of the parameters that get offsets (ssmd/families/offsets.py)."""

    def recipe(self, quantization: Quantization) -> dict[str, Any]:
        """Return the manifest's description of the quantization."""

    def write(self, module: Model, target: Target, folder: Path, stage: Stage) -> dict[str, Any]:
        """Write the model into `folder`. The module is not used after this. Raises BuildError.

        Returns the manifest's entry on the conversion.
        """

    def constants(self, folder: Path) -> Constants:
        """Return the places of the constants in each file of the model that `write` wrote."""

    def load(self, artifact: Artifact) -> Program:
        """Load the artifact to measure it. Raises RuntimeUnavailable where it can be built but not run."""


def check_packages(converter: Converter) -> None:
    """Check that the packages of a conversion are installed. Raises BuildError."""
    missing = [p for p in converter.packages if find_spec(p) is None]
    if missing:
        ours = bool(extra(converter.runtime))
        advice = to_add(converter.runtime, "build") if ours else to_install(*(converter.packages[p] for p in missing))
        raise BuildError(f"building needs {', '.join(missing)}: {advice}")


@dataclass(frozen=True)
class Needs:
    """The estimated peak of a build, in bytes. memory: without pages of files, which the system takes back.

    disk: beside the source.
    """

    memory: int
    disk: int


def needs_of(converter: Converter, bindings: Mapping[str, Binding], target: Target) -> Needs:
    """Return what a build of these parameters takes."""
    reads = {name: math.prod(shape) for one in bindings.values() for name, shape in one.reads.items()}
    values, largest = sum(reads.values()), max(sum(map(math.prod, one.reads.values())) for one in bindings.values())
    artifact = int(values * _BYTES[target.quantization])
    if not makes_late(converter, target.quantization, bindings):
        return Needs(_BASE_BYTES + 4 * values, 2 * artifact)
    return Needs(_BASE_BYTES + max(4 * _COPIES * largest, artifact * converter.holds), 2 * artifact)


def check_needs(needs: Needs, folder: Path) -> None:
    """Check that the machine has free what a build in `folder` takes. Raises BuildError."""
    memory = available()
    if memory is not None and memory < needs.memory:
        raise BuildError(
            f"this build takes about {show_size(needs.memory)} of memory, and {show_size(memory)} are free: close "
            "other programs, build on a machine with more, see with `ssmd pull` whether ssmd has the model's graph, "
            "which takes less, or try it with `ssmd build --anyway`"
        )
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needs.disk:
        raise BuildError(
            f"this build takes about {show_size(needs.disk)} of the disk of {there}, and {show_size(free)} are free: "
            "make room, or choose another disk with --models-dir"
        )


def build(
    converter: Converter,
    source: Source,
    out: Path,
    *,
    name: str,
    quantization: Quantization | None = None,
    buckets: Sequence[int] | None = None,
    tiers: Sequence[int] | None = None,
    replace: bool = False,
    anyway: bool = False,
    progress: Progress = lambda line: None,
) -> Artifact:
    """Build the artifact folder `out`, which appears whole or not at all. An existing one is refused unless `replace`.

    quantization: None is the converter's default. buckets: prefill lengths in tokens; None: the family's. tiers:
    capacities of the KV caches in tokens; None: the converter's. The largest tier is the context. Smaller ones make
    short conversations fast, as a step attends over all of its cache. anyway: build even if memory seems too small.
    progress: gets lines of text. Raises BuildError,
    SourceError or FamilyError before anything is converted if the parts do not fit.
    """
    if out.exists() and not replace:
        raise BuildError(f"{out} exists already; remove it, replace it or choose another name")
    check_packages(converter)
    return_big_blocks()  # else what one stage frees stands beside what the next one needs
    family = family_of(source.config)
    config = config_of(family, source, progress)
    family.plan(config)  # raises before anything is converted
    target = targeted(converter, family, config, quantization, buckets, tiers)
    needs = needs_of(converter, family.bindings(config), target)
    check_needs(Needs(0, needs.disk) if anyway else needs, out.parent)
    tokenizer = checked_tokenizer(source, config.vocabulary)

    def stage(what: str) -> AbstractContextManager[None]:
        return staged(progress, what)

    with placed(out) as made:
        with stage("hash the source"):
            lineage = source.lineage
        reference, conversion = _write(converter, source, tokenizer, family, config, target, made, stage)
        turned = {"rotation": BLOCK} if converter.rotates(target.quantization) else {}
        fields = fields_of(
            family,
            config,
            name=name,
            lineage=lineage,
            runtime=converter.runtime,
            device_class=converter.device_class,
            quantization=target.quantization,
            recipe={**turned, **converter.recipe(target.quantization)},
            conversion=conversion,
            buckets=target.buckets,
            tiers=target.tiers,
            builders={p: version(p) for p in ("ssmd-daemon", *converter.packages.values())},
            special_tokens=source.special_tokens,
            stop_tokens=source.stop_tokens,
        )
        not_compared = ""
        with stage("compare with the f32 module"):
            artifact = seal(made, fields)
            try:
                program = converter.load(artifact)
            except RuntimeUnavailable as err:
                not_compared = str(err)
            else:
                try:
                    measured = quality.measure(artifact, program, reference.text, reference.text_logits)
                finally:
                    program.close()
                seal(made, fields | {"quality": measured}, artifact.manifest.files)
        if not_compared:
            progress(f"    not compared: {not_compared}")
    return Artifact.open(out)


def _shapes(module: Model) -> Shapes:
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def targeted(
    converter: Usual,
    family: Family,
    config: Any,
    quantization: Quantization | None,
    buckets: Sequence[int] | None,
    tiers: Sequence[int] | None,
) -> Target:
    """Return the requested target, with defaults where arguments are None. Raises BuildError if it is impossible.

    Raises FamilyError if the runtime does not serve a part of the model.
    """
    check_parts(family, config, target_for(converter.runtime, converter.device_class))
    most = converter.most_tokens
    usual = converter.buckets or family.buckets
    lengths = [n for n in usual if most is None or n <= most] if buckets is None else buckets
    if tiers is None:
        context = min(converter.context, config.max_position)
        tiers = (*(n for n in converter.tiers if n < context), context)
    target = Target(quantization or converter.quantizations[0], tuple(sorted(lengths)), tuple(sorted(tiers)))
    buckets, tiers = target.buckets, target.tiers
    if target.quantization not in converter.quantizations:
        raise BuildError(
            f"runtime {converter.runtime} ({converter.device_class}) has no {target.quantization}; it has: "
            f"{', '.join(converter.quantizations)}"
        )
    if not buckets or len(set(buckets)) != len(buckets) or min(buckets) < 2:
        raise BuildError(f"buckets {list(buckets)} must be different lengths of at least 2 tokens")
    if any(b > 64 and b % 64 for b in buckets):
        raise BuildError(f"buckets {list(buckets)}: those above 64 must be multiples of 64")
    if converter.most_tokens is not None and max(buckets) > converter.most_tokens:
        raise BuildError(
            f"buckets {list(buckets)}: a prefill of runtime {converter.runtime} takes {converter.most_tokens} tokens "
            "at most; longer prompts are read in several"
        )
    if not tiers or len(set(tiers)) != len(tiers):
        raise BuildError(f"capacities {list(tiers)} must be different numbers of tokens")
    if target.context < max(buckets):
        raise BuildError(f"a context of {target.context} tokens does not hold the largest bucket, {max(buckets)}")
    if target.context > config.max_position:
        raise BuildError(
            f"a context of {target.context} tokens is more than the model was made for: config.json says "
            f"max_position_embeddings = {config.max_position}"
        )
    return target


def _write(
    converter: Converter,
    source: Source,
    tokenizer: Tokenizer,
    family: Family,
    config: Any,
    target: Target,
    folder: Path,
    stage: Stage,
) -> tuple[Reference, dict[str, Any]]:
    """Write all but the manifest. Returns the f32 module's results, and the manifest's entry on the conversion."""
    with stage("load PyTorch and the converter"):
        converter.prepare()

        from ssmd.authoring.model import author
        from ssmd.build.reference import Reference

    save_texts(source, folder)
    bindings = family.bindings(config)

    def module_of(bindings: Mapping[str, Binding]) -> Model:
        late = makes_late(converter, target.quantization, bindings)
        return author(family, config, make_parameters(bindings, source, late=late), target.context)

    with stage("bind the weights"):
        module = module_of(bindings)
    shapes = _shapes(module)
    with stage("compute golden values"):
        reference = Reference.of(module, tokenizer)
        reference.save(folder / "golden.safetensors")
    if converter.rotates(target.quantization):
        with stage("rotate the weights"):
            del module  # before the other form of all its weights is made
            module = module_of(rotated(bindings))
            reference.check(module)
    elif weights := converter.offsets(shapes, target.quantization):
        with stage("divide the weights into blocks"):
            del module
            module = module_of(with_offsets(bindings, weights))
    return reference, converter.write(module, target, folder, stage)
