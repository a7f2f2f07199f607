"""A graph of OpenVINO that reports a step's operations and the time of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ssmd.model.artifact import Artifact
from ssmd.runtime.hoststate.graph import Array
from ssmd_openvino import library
from ssmd_openvino.graph import OpenVINOCall, OpenVINOGraph, signatures
from ssmd_openvino.runtime import OPEN, WEIGHTS, WITH_LANES, compiler_of, lanes_of

_WARM = 2  # steps before those that count: the first makes kernels
Node = tuple[str, float]  # its operation, and its share of the step


class ProfiledGraph(OpenVINOGraph):
    """An OpenVINOGraph whose steps are profiled, which costs each of them some time."""

    def __init__(
        self, compiled: Mapping[str, Any], lengths: Mapping[str, tuple[int, int]], states: Sequence[str]
    ) -> None:
        super().__init__(compiled, lengths, states)
        self.ran: list[Any] = []  # the requests, in the order in which they ran

    def bind(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> OpenVINOCall:
        return _ProfiledCall(super().bind(signature, inputs, outputs), self.ran)

    def nodes(self, step: Callable[[], object], repeats: int) -> list[Node]:
        """Run a step `repeats` times. Returns its nodes, each with its share of the time.

        Nodes are named as the plugin's operations. The plugin reports whole us over all runs, so a node's time may be
        off by one us.
        """
        for _ in range(_WARM):
            step()
        before, began = self._totals(), time.perf_counter()
        for _ in range(repeats):
            step()
        took = (time.perf_counter() - began) * 1e6
        return [(name, (b - a) / took) for (name, b), (_, a) in zip(self._totals(), before, strict=True)]

    def _totals(self) -> list[tuple[str, float]]:
        """Return the us of each node so far. They are counted for the model, over all requests."""
        runs = len(self.ran)
        return [(node.node_type, runs * node.real_time.total_seconds() * 1e6) for node in self.ran[-1].profiling_info]


class _ProfiledCall(OpenVINOCall):
    def __init__(self, call: OpenVINOCall, ran: list[Any]) -> None:
        super().__init__(call._request)
        self._ran = ran

    def run(self) -> None:
        super().run()
        self._ran.append(self._request)


def profiled(artifact: Artifact, threads: int) -> ProfiledGraph:
    """Return an artifact's model for processors, compiled as for use. Raises GraphError."""
    manifest = artifact.manifest
    more = {**(WITH_LANES if lanes_of(artifact) else {}), "PERF_COUNT": True}
    compiler = compiler_of(library.openvino().Core(), "cpu", threads, None, more=more)
    model = compiler.compiled(artifact.file(f"{OPEN}.xml"), artifact.file(WEIGHTS))
    names = signatures((1, *manifest.buckets), manifest.tiers or (manifest.context or 1,))
    return ProfiledGraph(dict.fromkeys(names, model), names, [t.name for t in manifest.spec.tensors])
