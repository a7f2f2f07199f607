"""The LiteRT runtime: artifacts of one .tflite file, run on the CPU through XNNPACK."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ssmd.machine.processor import cpu_name
from ssmd.machine.threads import default_threads
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.protocol import Device, ProgramError, RuntimeUnavailable, check_threads
from ssmd_litert import greeting, lanes
from ssmd_litert.interface import package_version, problem
from ssmd_litert.library import LibraryGraph
from ssmd_litert.managed import ManagedGraph
from ssmd_litert.weight_cache import WeightCache, check_room

if TYPE_CHECKING:
    from ssmd.model.artifact import Artifact, Manifest

log = logging.getLogger(__name__)
SUFFIX = ".tflite"


class LiteRTRuntime:
    """LiteRT on the CPU. `zero_copy=False` lets it own the tensors and copies them: slower, for where sharing fails."""

    name = "litert"

    def __init__(self, *, zero_copy: bool = True) -> None:
        self.version = package_version()
        self._zero_copy = zero_copy

    def devices(self) -> list[Device]:
        return [
            Device("cpu", f"{cpu_name()}, {default_threads()} threads by default", problem()),
            Device("gpu", "LiteRT on WebGPU", "ssmd runs LiteRT artifacts on the CPU only; use --runtime wgpu"),
            Device("npu", "LiteRT on an NPU", "needs the maker's SDK and an artifact compiled for it; not built yet"),
        ]

    def load(self, artifact: Artifact, *, device: str | None = None, threads: int | None = None) -> FlatProgram:
        """Load on `device` ("cpu" is the only one) with `threads` (default: the physical cores).

        Raises ProgramError if the artifact is for another runtime or does not match its manifest, and
        RuntimeUnavailable for another device.
        """
        manifest = artifact.manifest
        if manifest.runtime != self.name:
            raise ProgramError(f"artifact {artifact.path} is for the runtime {manifest.runtime!r}, not {self.name!r}")
        if why := {d.name: d.why_not for d in self.devices()}.get(device or "cpu", "there is no such device"):
            raise RuntimeUnavailable(f"runtime {self.name!r} cannot use device {device or 'cpu'!r}: {why}")
        check_threads(threads)
        models = [n for n in manifest.files if n.endswith(SUFFIX)]
        if len(models) != 1:
            raise ProgramError(f"artifact {artifact.path} must hold one {SUFFIX} file, it lists {models}")
        # LiteRT trusts a model's inner offsets. The artifact's hashes keep damaged files out; this, other formats.
        with artifact.file(models[0]).open("rb") as f:
            if f.read(8)[4:] != b"TFL3":
                raise ProgramError(f"{artifact.file(models[0])} is no {SUFFIX} model; build the artifact again")
        path, count, cpu = artifact.file(models[0]), threads or default_threads(), cpu_name()
        try:
            check_room(path)
        except GraphError as err:
            raise ProgramError(f"artifact {artifact.path} cannot be loaded: {err}") from err
        producer = f"litert {package_version()}; cpu {cpu}; {count} threads"
        unshared = ""
        if self._zero_copy:
            greeting.heard(lambda file: LibraryGraph(file, threads=1, weight_cache=None).close())
            try:
                cache = WeightCache(manifest.build, package_version(), cpu)
                return _load_shared(manifest, path, count, producer, cache)
            except GraphError as err:
                unshared = str(err)
        try:
            program = FlatProgram(ManagedGraph(path, threads=count), manifest, producer, count)
        except GraphError as err:
            raise ProgramError(f"artifact {artifact.path} cannot be loaded ({err}); build it again") from err
        if unshared:
            log.warning("LiteRT cannot work in memory of ours (%s): tensors are copied, which is slower", unshared)
        return program


def _load_shared(manifest: Manifest, path: Path, threads: int, producer: str, cache: WeightCache) -> FlatProgram:
    """Load the graph, with the weight cache if that works. Raises GraphError if it fails without it too."""
    for weights in dict.fromkeys((cache.path(path.stat().st_size), None)):
        graph: LibraryGraph | None = None
        try:
            graph = LibraryGraph(path, threads=threads, weight_cache=weights, wanted=lanes.of_one_stream)
            graph.drop_file()  # before the packed weights come to memory beside it
            opener, notes = lanes.LanesFile(path, graph, threads, cache), lanes.LanesNotes(cache.name, threads)
            program = FlatProgram(graph, manifest, producer, threads, opener.open, lanes.sizes(graph), notes)
            program.self_test()
        except GraphError:
            if graph is not None:
                graph.close()
            cache.drop()
            if weights is None:
                raise
        except MemoryError:
            if graph is not None:
                graph.close()
            cache.drop_fresh()
            raise
        except ProgramError:
            if graph is not None:
                graph.close()
            raise
        else:
            cache.keep()
            graph.drop_file()
            return program
    raise AssertionError("unreachable")
