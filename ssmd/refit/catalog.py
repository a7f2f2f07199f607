"""Stripped graphs in use: the shipped ones, their verification here, and their artifacts with a source's weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.families.registry import family_of
from ssmd.machine.memory import return_big_blocks
from ssmd.machine.progress import Progress, staged
from ssmd.machine.spelling import meant
from ssmd.model.artifact import GOLDEN, Artifact, seal
from ssmd.model.random_source import SeededSource
from ssmd.model.source import Source
from ssmd.refit.calibration import calibrate, check_calibrates, recipe_of, tokens_of
from ssmd.refit.graphfile import Header, StrippedGraph
from ssmd.refit.install import checked_tokenizer, config_of, fields_of, placed, save_texts
from ssmd.refit.refit import RefitError, bounded, differences, differences_text, fits, refit
from ssmd.runtime.info import info_of, infos, target_for, target_of
from ssmd.runtime.protocol import RuntimeUnavailable, get_runtime, prepare
from ssmd.runtime.verify import GOLDEN_POSITIONS, GOLDEN_TOKENS, StepError, compare, golden_tokens, replay, save_golden

SEED = 1
SUFFIX = ".graph"
SHIPPED = Path(__file__).parent / "graphs"
_LOGITS = 128  # logits of a golden position
_FLOOR = 1e-4  # least tolerance of a runtime's error, in standard deviations
_MOST = 1.5  # tolerance, in errors measured where the graph was made: another processor rounds differently


# Memory of a pull, beside one of the artifact's size: Python, numpy, the runtime, and the rows of a parameter.
_BASE_BYTES = 400 << 20
WEIGHT_BYTES = 2  # of a weight on a hub: most are published in bfloat16


class GraphError(ValueError):
    """A request for a graph that does not exist; the message names the existing ones."""


def seeded_tokens(vocabulary: int) -> list[int]:
    """Return the ids that golden values are computed from, spread over the vocabulary."""
    return [(i * 2654435761 + 12345) % 2**32 % vocabulary for i in range(GOLDEN_TOKENS)]


def seeded_ids(vocabulary: int, count: int = _LOGITS) -> NDArray[np.int64]:
    """Return the ids whose logits golden values hold."""
    return np.arange(count, dtype=np.int64) * vocabulary // count


def verified(graph: StrippedGraph, folder: Path) -> list[tuple[StepError, float]]:
    """Compare the graph's runtime here, with the seeded weights, to the golden values.

    Returns the errors at each position, with the limit of `rms_relative`. folder: a new folder for the model's files,
    which is not removed. Raises RefitError, ProgramError or RuntimeUnavailable.
    """
    header, golden = graph.header, graph.header.golden
    folder.mkdir()
    source = SeededSource(header.config, golden.seed)
    refit(graph, source, folder)
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / GOLDEN).write_bytes(b"")
    artifact = seal(folder, _fields(header, source.config, "verified", "0" * 64, header.tiers))
    with _cache_in(folder):
        program = get_runtime(header.runtime).load(artifact, device="cpu")  # also an NPU's graph: every machine has one
        try:
            ids = seeded_ids(artifact.manifest.vocabulary, len(golden.logits[0]))
            calls = replay(program, golden.tokens, golden.positions)
            steps = [
                compare(position, call, logits[ids], np.array(expected, np.float32))
                for position, (call, logits), expected in zip(golden.positions, calls, golden.logits, strict=True)
            ]
        finally:
            program.close()
    return [(step, max(_FLOOR, _MOST * rms)) for step, rms in zip(steps, golden.rms, strict=True)]


def install(
    graph: StrippedGraph,
    source: Source,
    out: Path,
    *,
    name: str,
    context: int | None = None,
    text: str | None = None,
    progress: Progress = lambda line: None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> Artifact:
    """Make the artifact of a source in the folder `out`, the same build as by `ssmd build`.

    It appears whole or not at all, and replaces an existing one. context: most tokens of a conversation, if fewer than
    possible. text: round matrices of 4 bits for it, which is another build. finish: gets the folder before it is put in
    place. Its golden values are its own logits when it is new; it has none if its runtime does not run on this system.
    Raises RefitError, SourceError, ProgramError or RuntimeUnavailable.
    """
    header = graph.header
    fits(header, source)
    tiers = bounded(header, source.config, context)
    family = family_of(source.config)
    tokenizer = checked_tokenizer(source, family.parse(source.config).vocabulary)
    if text is not None:
        check_calibrates(header)
        read = tokens_of(text, tokenizer)
    return_big_blocks()
    with placed(out) as made:
        with staged(progress, f"put the weights into the graph of {header.name} for {header.runtime}"):
            refit(graph, source, made)
        config_of(family, source, progress)  # names what is left out
        with staged(progress, "hash the source"):
            lineage = source.lineage
        save_texts(source, made)
        (made / GOLDEN).write_bytes(b"")
        fields = _fields(header, source.config, name, lineage, tiers, source.special_tokens, source.stop_tokens)
        executed = not info_of(header.runtime).builds_anywhere or not why_runtime_unusable(header.runtime)
        fields["golden"] = "itself" if executed else "none"
        with staged(progress, "hash the artifact"):
            artifact = seal(made, fields)
        if text is not None:
            with staged(progress, f"round the matrices of 4 bits for {len(read)} tokens of the text"):
                done = calibrate(artifact, header, source, read)
            progress(f"    {done}")
            fields["quantization_recipe"] = {**header.recipe, "calibrated": recipe_of(text, read)}
            with staged(progress, "hash the artifact"):
                artifact = seal(made, fields)
        if executed:
            with staged(progress, "load it, and feed it a text"):
                tokens = golden_tokens(tokenizer)
                save_golden(made / GOLDEN, tokens, _computed(artifact, source, tokens))
                unchanged = {n: entry for n, entry in artifact.manifest.files.items() if n != GOLDEN}
                seal(made, fields, unchanged)
        finish(made)
    return Artifact.open(out)


def memory_of(header: Header) -> int:
    """Return the bytes of memory that `install` takes for a graph's artifact, without pages of files.

    Most is the runtime's: it packs the weights when the new artifact is run once. For an NPU each length is a model of
    its own, and the processor, where they are run once, keeps the float16 weights of each in float32.
    """
    copies = 1.0
    if header.device_class == "npu":
        copies = 2 * (1 + len(header.buckets))
    elif header.quantization == "int4":
        copies = target_for(header.runtime, header.device_class).int4_memory
    return _BASE_BYTES + int(copies * disk_of(header))


def _computed(artifact: Artifact, source: Source, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return a new artifact's logits at the golden positions. Raises RefitError if they are not finite."""
    program = get_runtime(artifact.manifest.runtime).load(artifact, device="cpu")  # this machine may have no NPU
    try:
        logits = np.stack([row for _, row in replay(program, tokens, GOLDEN_POSITIONS)])
        prepare(program)  # now, not beside the first conversations
    finally:
        program.close()
    if not np.isfinite(logits).all():
        raise RefitError(f"{source.path}: the model's logits are not finite with these weights; they are damaged")
    return logits


def _fields(
    header: Header,
    config: Mapping[str, Any],
    name: str,
    lineage: str,
    tiers: Sequence[int],
    special_tokens: Mapping[str, str] = MappingProxyType({}),
    stop_tokens: Sequence[int] = (),
) -> dict[str, Any]:
    family = family_of(config)
    return fields_of(
        family,
        family.parse(config),
        name=name,
        lineage=lineage,
        runtime=header.runtime,
        device_class=header.device_class,
        quantization=header.quantization,
        recipe=header.recipe,
        conversion=header.conversion,
        buckets=header.buckets,
        tiers=tiers,
        builders=header.builders,
        special_tokens=special_tokens,
        stop_tokens=stop_tokens,
    )


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Set the cache folder inside `folder` meanwhile, so that a runtime's cache of the model is removed with it."""
    before = os.environ.get("SSMD_CACHE_DIR")
    os.environ["SSMD_CACHE_DIR"] = str(folder / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ["SSMD_CACHE_DIR"]
        else:
            os.environ["SSMD_CACHE_DIR"] = before


def shipped(runtime: str | None = None, quantization: str | None = None) -> Iterator[StrippedGraph]:
    """Yield the shipped graphs in the order of `files`. runtime: only those of a value of `--runtime`.

    Raises StrippedError.
    """
    for file in files(runtime, quantization=quantization):
        yield StrippedGraph.open(file)


def names(runtime: str | None = None) -> list[str]:
    """Return the names of the models with shipped graphs. runtime: only those of a value of `--runtime`."""
    return sorted({file.name.partition("@")[0] for file in files(runtime)})


def files(runtime: str | None = None, name: str = "*", quantization: str | None = None) -> list[Path]:
    """List the files of stripped graphs, of ssmd and of runtimes that bring their own, by name; int4 comes last."""
    made_for, ending = "*", quantization or "*"
    if runtime is not None:
        info, target = target_of(runtime)
        made_for = f"{info.name}-{target.device_class}"
    folders = [SHIPPED, *(info.graphs for info in infos() if info.graphs is not None)]
    found = (f for folder in folders for f in folder.glob(f"{name}@{made_for}-{ending}{SUFFIX}"))
    return sorted(found, key=lambda f: (quantization_of(f) == "int4", f.name))


def quantization_of(file: Path) -> str:
    """Return the quantization in the name of a graph's file."""
    return file.stem.rpartition("-")[2]


def on_processor() -> list[str]:
    """Return the runtimes on the processor that a pull for "auto" may choose, the fastest first."""
    return [info.name for info in infos() if info.rank is not None]


def origin_of(name: str) -> str:
    """Return the hub's name of a model with a shipped graph. Raises GraphError, which lists these models."""
    if name not in names():
        raise GraphError(
            f"{name!r} is not a model's name; {meant(name, names())}expected owner/name, such as "
            f"ibm-granite/granite-4.0-h-350m, or one that ssmd has a graph of: {', '.join(names())}"
        )
    return StrippedGraph.open(files(name=name)[0]).header.origin


def config_of_graph(name: str) -> Mapping[str, Any]:
    """Return the config of a model with a shipped graph. Raises StrippedError."""
    return StrippedGraph.open(files(name=name)[0]).header.config


@cache
def download_of(name: str) -> int:
    """Return about the bytes that a pull of a model with a shipped graph fetches from a hub.

    They are WEIGHT_BYTES for each weight; a hub's own list has the exact number, and hub/wheel.py that of a package.
    Raises GraphError or StrippedError.
    """
    config = config_of_graph(name)
    family = family_of(config)
    bindings = family.bindings(family.parse(config)).values()
    return WEIGHT_BYTES * sum({n: math.prod(s) for one in bindings for n, s in one.reads.items()}.values())


def disk_of(header: Header) -> int:
    """Return the bytes of a graph and its weights on disk."""
    return sum(file.size for file in header.files)


@cache
def sizes_of(name: str, runtime: str, quantization: str | None = None) -> tuple[int, int] | None:
    """Return the bytes that a model takes for a runtime, on disk and of memory; None if there is no graph.

    quantization: None is the usual one.
    """
    found = files(runtime, name, quantization)
    if not found:
        return None
    header = StrippedGraph.open(found[0]).header
    return disk_of(header), memory_of(header)


def choose_graph(
    config: Mapping[str, Any], runtimes: Sequence[str], quantization: str | None = None
) -> tuple[StrippedGraph | None, str]:
    """Choose the graph that a config fits, of the first possible runtime of `runtimes`, of the usual quantization.

    Possible are runtimes that can be used here, and those whose artifacts can be made anywhere. Returns (graph, ""), or
    (None, the reason). Raises FamilyError if the config's family is not supported.
    """
    why, lacking, nearest = [], [], ""
    stored = "" if quantization is None else f" in {quantization}"
    least = None
    for runtime in runtimes:
        if said := uninstalled(runtime) if info_of(runtime).builds_anywhere else why_runtime_unusable(runtime):
            why.append(said)
            continue
        found = [(differences(graph.header, config), graph) for graph in shipped(runtime, quantization)]
        for differing, graph in found:
            if not differing:
                return graph, ""
            if "model_type" not in differing and (least is None or len(differing) < least):
                least = len(differing)
                nearest = f"; it is nearly {graph.header.name}, but {differences_text(differing)}"
        lacking.append(f"{runtime}{stored}{'' if found else ', nor any for that'}")
    if lacking:
        why.append(f"ssmd has no stripped graph of this config for runtime {' or '.join(lacking)}")
    return None, "; ".join(why) + nearest


def why_runtime_unusable(runtime: str, device: str = "cpu") -> str:
    """Return why a value of `--runtime` cannot run on a device of this machine, or "". Imports the runtime."""
    runtime = target_of(runtime)[0].name
    try:
        devices = get_runtime(runtime).devices()
    except RuntimeUnavailable as err:
        return str(err)
    return next((d.why_not for d in devices if d.name == device), f"runtime {runtime} has no device {device}")


def uninstalled(runtime: str) -> str:
    """Return what to install for a runtime, or "". Imports it, but does not check that it can run on this system."""
    try:
        get_runtime(runtime)
    except RuntimeUnavailable as err:
        return str(err)
    return ""


def file_name(name: str, runtime: str, device_class: str, quantization: str) -> str:
    """Return the file name of a shipped graph."""
    return f"{name}@{runtime}-{device_class}-{quantization}{SUFFIX}"
