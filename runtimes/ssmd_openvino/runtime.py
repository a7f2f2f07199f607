"""The OpenVINO runtime: artifacts of IR files, on the CPU, an Intel GPU or the Intel NPU."""

from __future__ import annotations

import logging
import sys
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ssmd.machine.installation import to_install
from ssmd.machine.memory import available, drop_mapped, trim
from ssmd.machine.processor import cpu_name
from ssmd.machine.size import show_size
from ssmd.machine.threads import default_threads
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.hoststate.signatures import lanes_name
from ssmd.runtime.protocol import Device, ProgramError, RuntimeUnavailable, check_threads
from ssmd.runtime.trial import probed
from ssmd_openvino import library
from ssmd_openvino.compile import Compiler, can_be_weightless, chosen_products, identity
from ssmd_openvino.devices import devices
from ssmd_openvino.graph import OpenVINOGraph, OpenVINOLanes, signatures

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ssmd.model.artifact import Artifact, Manifest

log = logging.getLogger(__name__)
OPEN = "model"  # the name of a model whose lengths are open; others have the names of their signatures
WEIGHTS = "model.bin"
LANES = (4,)  # streams of a decode step that builds make models for: each model has the weights in memory once more
TRIAL = (sys.executable, "-m", "ssmd_openvino.trial")  # which loads an artifact for the first time
# float32 between the products; each product of int8 weights quantizes its activations in groups of so many values
# (docs/notes/log.md: smaller ones round less, larger ones are faster).
ON_CPU: dict[str, Any] = {
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": 1,
    "INFERENCE_PRECISION_HINT": "f32",
    "ENABLE_CPU_PINNING": True,
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 64,
    "CPU_DENORMALS_OPTIMIZATION": True,  # decays reach numbers so small that products of them take five times as long
}
# With a step of several streams: operations of fixed shapes are not fused, which in a lane are others than in the open
# model, and get other bits. (The open model has few, and is no slower without: docs/notes/log.md.)
WITH_LANES: dict[str, Any] = {"SNIPPETS_MODE": "DISABLE"}
ELSEWHERE: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
_WEIGHTS_AND_GRAPH = 2  # times the weights' bytes that a model of lanes takes (docs/notes/log.md)
PLUGINS = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU"}  # OpenVINO's names


class OpenVINORuntime:
    name = "openvino"

    def __init__(self, *, probe: bool = True, weightless: bool = False) -> None:
        """probe: try the first load on another device than the CPU in a process of its own.

        weightless: without `probe`, keep blobs without the weights.
        """
        self.version = library.package_version()
        self._core: Any = None
        self._probe = probe
        self._weightless = weightless

    def devices(self) -> list[Device]:
        return devices(self._started())

    def load(self, artifact: Artifact, *, device: str | None = None, threads: int | None = None) -> FlatProgram:
        """Load on `device`: "cpu", "gpu" or "npu"; by default the one that the artifact was built for.

        threads: those of the CPU (default: the physical cores). Raises ProgramError if the artifact is for another
        runtime, does not match its manifest or needs a newer OpenVINO. Raises RuntimeUnavailable for a device that is
        not here, refuses the artifact, or computes it wrongly.
        """
        manifest = artifact.manifest
        if manifest.runtime != self.name:
            raise ProgramError(f"artifact {artifact.path} is for the runtime {manifest.runtime!r}, not {self.name!r}")
        check_threads(threads)
        _not_newer(manifest)
        device = device or manifest.device_class
        opened = artifact.has(f"{OPEN}.xml")
        why = {d.name: d.why_not for d in self.devices()}.get(device, "there is no such device")
        if not why and device == "npu" and opened:
            why = "it takes fixed shapes only and this artifact has open ones; build one with: ssmd build --runtime npu"
        if why:
            raise RuntimeUnavailable(f"runtime {self.name!r} cannot use device {device!r}: {why}")
        count = threads or default_threads()
        try:
            graph = self._graph(artifact, device, count, opened)
        except GraphError as err:
            raise ProgramError(f"artifact {artifact.path} cannot be loaded ({err}); build it again") from err
        where = f"cpu {cpu_name()}; {count} threads" if device == "cpu" else identity(self._core, PLUGINS[device])
        producer, lanes = f"openvino {library.package_version()}; {where}", partial(self._lanes, artifact, count)
        sizes = lanes_of(artifact) if device == "cpu" else ()
        program = FlatProgram(graph, manifest, producer, count, lanes, sizes)
        try:
            program.self_test()
        except GraphError as err:
            program.close()
            raise ProgramError(f"artifact {artifact.path} does not run on {device} here ({err})") from err
        if device == "cpu":
            _pack(program)
        drop_mapped(artifact.file(WEIGHTS))
        trim()
        return program

    def _started(self) -> Any:
        if self._core is None:
            self._core = library.openvino().Core()
        return self._core

    def _compiler(self, artifact: Artifact, device: str, threads: int) -> Compiler:
        """Return the compiler of an artifact for a device that passed a trial load. Raises RuntimeUnavailable."""
        core, build = self._started(), artifact.manifest.build
        if device == "cpu":  # nothing is kept: an import holds the weights in memory twice (docs/notes/decisions.md)
            return compiler_of(core, device, threads, None, more=WITH_LANES if lanes_of(artifact) else {})
        if not self._probe:
            return compiler_of(core, device, threads, build, weightless=self._weightless)
        tried = []
        for name, weightless in ways(core, device).items():
            compiler = compiler_of(core, device, threads, build, weightless=weightless)
            assert compiler.folder is not None
            costs = _costs(artifact, compiler.folder, weightless)
            verdict = probed((*TRIAL, name), artifact, device, compiler.folder, costs)
            if verdict.passed:
                return compiler
            tried.append((verdict.why, compiler.folder))
            log.warning("artifact %s was tried on %s, %s, and %s", artifact.path, device, name, verdict.why)
        why, folder = tried[-1]
        raise RuntimeUnavailable(
            f"artifact {artifact.path} was tried on {device} and {why}; it will not be used there with this driver "
            f"(remove {folder} to have it tried again)"
        )

    def _graph(self, artifact: Artifact, device: str, threads: int, opened: bool) -> OpenVINOGraph:
        """Load an artifact's model on a device. Raises GraphError."""
        manifest = artifact.manifest
        names = signatures((1, *manifest.buckets), manifest.tiers or (manifest.context or 1,))
        compiler = self._compiler(artifact, device, threads)
        weights, states = artifact.file(WEIGHTS), [t.name for t in manifest.spec.tensors]
        if opened:
            model = compiler.compiled(artifact.file(f"{OPEN}.xml"), weights)
            if device == "cpu":
                _check_experts(manifest, model)
            return OpenVINOGraph(dict.fromkeys(names, model), names, states)
        models = {name: compiler.compiled(artifact.file(f"{name}.xml"), weights) for name in names}
        return OpenVINOGraph(models, names, states)

    def _lanes(self, artifact: Artifact, threads: int, lanes: int) -> OpenVINOLanes:
        """Open the model of a decode step of `lanes` streams on the CPU. Raises GraphError."""
        weights, free = artifact.file(WEIGHTS), available()
        wanted = _WEIGHTS_AND_GRAPH * weights.stat().st_size
        if free is not None and free < wanted:
            raise GraphError(f"their weights take about {show_size(wanted)} more, and {show_size(free)} are free")
        compiler = compiler_of(self._started(), "cpu", threads, None, more=WITH_LANES)
        model = compiler.compiled(artifact.file(f"{lanes_name(lanes)}.xml"), weights)
        drop_mapped(weights)
        trim()
        return OpenVINOLanes(model, lanes, [t.name for t in artifact.manifest.spec.tensors])


def lanes_of(artifact: Artifact) -> list[int]:
    """Return the numbers of streams for which an artifact has models of decode steps."""
    return [n for n in LANES if artifact.has(f"{lanes_name(n)}.xml")]


def compiler_of(
    core: Any,
    device: str,
    threads: int,
    build: str | None,
    *,
    weightless: bool = False,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Compiler:
    """Return the compiler of a device ("npu"). build: the artifact's, to keep blobs; None keeps none.

    more: properties beside the usual ones.
    """
    properties = {**ON_CPU, "INFERENCE_NUM_THREADS": threads} if device == "cpu" else ELSEWHERE
    return Compiler(core, PLUGINS[device], {**properties, **more}, build, weightless=weightless)


def _check_experts(manifest: Manifest, compiled: Any) -> None:
    """Warn if a model computes all experts for each token, as with an OpenVINO that does not know its form."""
    told = manifest.conversion.get("experts")
    needed = told.get("products") if isinstance(told, dict) else None
    if type(needed) is int and (found := chosen_products(compiled)) != needed:
        log.warning(
            "OpenVINO %s computes all experts of %s for each token: it has %d products of chosen experts, not %d; "
            "another release may be faster (built with %s)",
            library.package_version(),
            manifest.name,
            found,
            needed,
            manifest.builders.get("openvino", "an unknown one"),
        )


def ways(core: Any, device: str) -> dict[str, bool]:
    """Return the ways to keep blobs for a device, the better first: {name: True if without weights}."""
    return {"weightless": True, "whole": False} if can_be_weightless(core, PLUGINS[device]) else {"whole": False}


def _costs(artifact: Artifact, folder: Path, weightless: bool) -> str:
    """Return a phrase with the models that a first load compiles, and where it keeps them."""
    models = sum(name.endswith(".xml") for name in artifact.manifest.files) - len(lanes_of(artifact))
    weights = artifact.file(WEIGHTS).stat().st_size
    each = "without their weights" if weightless else f"with all weights in each, {show_size(models * weights)} or more"
    return f"{models} models, kept in {folder}, {each}"


def _pack(program: FlatProgram) -> None:
    """Run a first prefill of every length, in which the plugin packs the weights into its own memory."""
    handle = program.new_state()
    for length in program.buckets:
        program.prefill(handle, [0] * length)
    program.release(handle)


def _not_newer(manifest: Manifest) -> None:
    """Check that the artifact was not written by a newer release of OpenVINO than is installed. Raises ProgramError."""
    here, built = library.package_version(), manifest.builders.get("openvino", "")
    if _release(built) > _release(here):
        raise ProgramError(
            f"the artifact was built with OpenVINO {built}, {here} is installed and may not know all of it; "
            f"install a newer one: {to_install(f'openvino>={built}')}"
        )


def _release(version: str) -> tuple[int, ...]:
    """Return (2026, 4) for 2026.4.1; () if the text is not a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal() and len(part) < 10)
