"""Stripped graphs at work: those that come with ssmd, whether one still computes what it did where it was made, and
the artifact that it gives with a source's weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ssmd.refit.graphfile import Header, StrippedGraph
from ssmd.refit.install import checked_tokenizer, fields_of, placed, save_texts
from ssmd.refit.refit import RefitError, bounded, differences, fits, refit, shown
from ssmd.runtime.protocol import RuntimeUnavailable, get_runtime, prepare
from ssmd.runtime.verify import GOLDEN_POSITIONS, GOLDEN_TOKENS, StepError, compare, golden_tokens, replay, save_golden

SEED = 1
SUFFIX = ".graph"
SHIPPED = Path(__file__).parent / "graphs"
RUNTIMES = ("litert", "openvino")  # of the processor, the faster one first (docs/notes/benchmarks.md)
CLASSES = {  # `--runtime`
    "litert": ("litert", "cpu"),
    "openvino": ("openvino", "cpu"),
    "npu": ("openvino", "npu"),
    "coreml": ("coreml", "gpu"),
}
ELSEWHERE = ("coreml",)  # of these: what is made of them anywhere and runs on some systems alone
_LOGITS = 128  # of a golden position
_FLOOR = 1e-4  # of what a runtime may differ, in standard deviations
_MOST = 1.5  # times as much as where the graph was made: another processor rounds otherwise


class GraphError(ValueError):
    """A graph that does not exist was asked for; the message names those that there are."""


def seeded_tokens(vocabulary: int) -> list[int]:
    """The ids that golden values are computed from: all over the vocabulary."""
    return [(i * 2654435761 + 12345) % 2**32 % vocabulary for i in range(GOLDEN_TOKENS)]


def seeded_ids(vocabulary: int, count: int = _LOGITS) -> NDArray[np.int64]:
    """The ids whose logits golden values hold."""
    return np.arange(count, dtype=np.int64) * vocabulary // count


def verified(graph: StrippedGraph, folder: Path) -> list[tuple[StepError, float]]:
    """What the graph's runtime computes here with the seeded weights, against the golden values: at each position the
    errors, and the most that `rms_relative` may be. `folder` is new, takes the model's files, and is left.

    Raises RefitError, ProgramError or RuntimeUnavailable.
    """
    header, golden = graph.header, graph.header.golden
    folder.mkdir()
    source = SeededSource(header.config, golden.seed)
    refit(graph, source, folder)
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / GOLDEN).write_bytes(b"")
    artifact = seal(folder, _fields(header, source.config, "verified", "0" * 64, header.tiers))
    with _cache_in(folder):
        program = get_runtime(header.runtime).load(artifact, device="cpu")  # an NPU's graphs too: any machine has one
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
    progress: Progress = lambda line: None,
) -> Artifact:
    """The artifact of a source, in the folder `out`, which is replaced if it exists: the same build that `ssmd build`
    makes. It appears whole or not at all. `context`: the most tokens that a conversation has, fewer than there can be.

    Its golden values are what it computes itself when it is new; it has none where its runtime executes on other
    systems alone. Raises RefitError, SourceError, ProgramError or
    RuntimeUnavailable.
    """
    header = graph.header
    fits(header, source)
    tiers = bounded(header, source.config, context)
    family = family_of(source.config)
    tokenizer = checked_tokenizer(source, family.parse(source.config).vocabulary)
    return_big_blocks()
    with placed(out) as made:
        with staged(progress, f"put the weights into the graph of {header.name} for {header.runtime}"):
            refit(graph, source, made)
        with staged(progress, "hash the source"):
            lineage = source.lineage
        save_texts(source, made)
        (made / GOLDEN).write_bytes(b"")
        fields = _fields(header, source.config, name, lineage, tiers, source.special_tokens, source.stop_tokens)
        executed = header.runtime not in ELSEWHERE or not unusable(header.runtime)
        fields["golden"] = "itself" if executed else "none"
        with staged(progress, "hash the artifact"):
            artifact = seal(made, fields)
        if executed:
            with staged(progress, "load it, and feed it a text"):
                tokens = golden_tokens(tokenizer)
                save_golden(made / GOLDEN, tokens, _computed(artifact, source, tokens))
                unchanged = {n: entry for n, entry in artifact.manifest.files.items() if n != GOLDEN}
                seal(made, fields, unchanged)
    return Artifact.open(out)


def _computed(artifact: Artifact, source: Source, tokens: Sequence[int]) -> NDArray[np.float32]:
    """The logits of a new artifact at the golden positions. Raises RefitError where they are no numbers."""
    program = get_runtime(artifact.manifest.runtime).load(artifact, device="cpu")  # an NPU need not be here
    try:
        logits = np.stack([row for _, row in replay(program, tokens, GOLDEN_POSITIONS)])
        prepare(program)  # now, not beside the first conversations
    finally:
        program.close()
    if not np.isfinite(logits).all():
        raise RefitError(f"{source.path}: the model computes no numbers with these weights; they are damaged")
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
    """What a runtime keeps of a model for the next start goes with the model."""
    before = os.environ.get("SSMD_CACHE_DIR")
    os.environ["SSMD_CACHE_DIR"] = str(folder / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ["SSMD_CACHE_DIR"]
        else:
            os.environ["SSMD_CACHE_DIR"] = before


def shipped(runtime: str | None = None) -> Iterator[StrippedGraph]:
    """The graphs that come with ssmd, by name; of one runtime, or "npu". Raises StrippedError."""
    for file in _files(runtime):
        yield StrippedGraph.open(file)


def names(runtime: str | None = None) -> list[str]:
    """The names of the models that ssmd has graphs of; for one runtime, or "npu"."""
    return sorted({file.name.partition("@")[0] for file in _files(runtime)})


def _files(runtime: str | None) -> list[Path]:
    made_for = "" if runtime is None else "-".join(CLASSES.get(runtime, (runtime, "cpu"))) + "-"
    return sorted(SHIPPED.glob(f"*@{made_for}*{SUFFIX}"))


def origin_of(name: str) -> str:
    """What a model is called on the hub of which ssmd has a graph. Raises GraphError with those that there are."""
    if name not in names():
        raise GraphError(
            f"{name!r} is no model's name; {meant(name, names())}expected owner/name, such as "
            f"ibm-granite/granite-4.0-h-350m, or one that ssmd has a graph of: {', '.join(names())}"
        )
    return StrippedGraph.open(next(SHIPPED.glob(f"{name}@*{SUFFIX}"))).header.origin


def choose(config: Mapping[str, Any], runtimes: Sequence[str]) -> tuple[StrippedGraph | None, str]:
    """The graph that a config fits, of the first of `runtimes` that can be used here, or whose artifacts are made
    anywhere; or None and why there is none.

    Raises FamilyError where the config is of no family.
    """
    why, lacking, nearest = [], [], ""
    least = None
    for runtime in runtimes:
        if said := uninstalled(runtime) if runtime in ELSEWHERE else unusable(runtime):
            why.append(said)
            continue
        found = [(differences(graph.header, config), graph) for graph in shipped(runtime)]
        for differing, graph in found:
            if not differing:
                return graph, ""
            if "model_type" not in differing and (least is None or len(differing) < least):
                least = len(differing)
                nearest = f"; it is nearly {graph.header.name}, but {shown(differing)}"
        lacking.append(f"{runtime}{'' if found else ', nor any for that'}")
    if lacking:
        why.append(f"ssmd has no stripped graph of this config for runtime {' or '.join(lacking)}")
    return None, "; ".join(why) + nearest


def unusable(runtime: str, device: str = "cpu") -> str:
    """Why a runtime, or "npu", cannot run on a device of this machine, or "". Imports it."""
    runtime, _ = CLASSES.get(runtime, (runtime, ""))
    try:
        devices = get_runtime(runtime).devices()
    except RuntimeUnavailable as err:
        return str(err)
    return next((d.why_not for d in devices if d.name == device), f"runtime {runtime} has no device {device}")


def uninstalled(runtime: str) -> str:
    """What to install for a runtime, or ""; whether it can run on this system is not asked. Imports it."""
    try:
        get_runtime(runtime)
    except RuntimeUnavailable as err:
        return str(err)
    return ""


def file_name(name: str, runtime: str, device_class: str, quantization: str) -> str:
    """The name of a graph's file among those that come with ssmd."""
    return f"{name}@{runtime}-{device_class}-{quantization}{SUFFIX}"
