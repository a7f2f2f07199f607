"""An artifact of OpenVINO whose prefills give the inputs of its matrices (ssmd/runtime/activations.py)."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.runtime.activations import Activations, Place, length_of
from ssmd.runtime.hoststate.graph import Array, GraphError
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd_openvino import library
from ssmd_openvino.compile import compile_model
from ssmd_openvino.graph import OpenVINOCall, OpenVINOGraph, signatures
from ssmd_openvino.runtime import ON_CPU, OPEN, WEIGHTS

_CONSTANT = re.compile(r'<layer id="\d+" name="([^"]*)" type="Const"[^>]*>\s*<data [^>]*offset="(\d+)"')
_PRODUCT = "MatMul"
_BETWEEN = ("Convert", "Multiply", "Reshape")  # operations from a constant of blocks to its product


def activations(artifact: Artifact, places: Mapping[str, Place]) -> Activations:
    """Load an artifact on the processor. places: of the matrices. Raises GraphError if one is not found."""
    core, manifest = library.openvino().Core(), artifact.manifest
    file = artifact.file(f"{OPEN}.xml")
    constants = {int(offset): name for name, offset in _CONSTANT.findall(file.read_text())}
    # A copy: the model maps its file, which cannot be written on Windows meanwhile.
    with tempfile.TemporaryDirectory(dir=artifact.path.parent, ignore_cleanup_errors=True) as folder:
        model = core.read_model(file, shutil.copyfile(artifact.file(WEIGHTS), Path(folder) / WEIGHTS))
    operations = {op.get_friendly_name(): op for op in model.get_ops()}
    known, sources, ports = len(model.outputs), dict[str, str](), dict[str, Any]()
    for name, place in places.items():
        constant = operations.get(constants.get(place.offset, ""))
        port = None if constant is None or place.file != WEIGHTS else _input_of(constant)
        if port is None:
            raise GraphError(f"{file.name} has no product with {name}")
        sources[name] = f"{port.get_node().get_friendly_name()} {port.get_index()}"
        ports.setdefault(sources[name], port)
    model.add_outputs(list(ports.values()))
    threads = default_threads()
    compiled = compile_model(core, model, "CPU", {**ON_CPU, "INFERENCE_NUM_THREADS": threads})
    names = signatures((1, *manifest.buckets), manifest.tiers or (manifest.context or 1,))
    states = [t.name for t in manifest.spec.tensors]
    graph = _ReadGraph(dict.fromkeys(names, _Cut(compiled, known)), names, states)
    places_of = {name: known + i for i, name in enumerate(ports)}

    def read(name: str) -> NDArray[np.float32]:
        data = graph.last.get_output_tensor(places_of[name]).data
        rows: NDArray[np.float32] = data.reshape(-1, data.shape[-1])
        return rows

    return Activations(FlatProgram(graph, manifest, "", threads), length_of(manifest.buckets), sources, read)


def _input_of(constant: Any) -> Any:
    """Return the port that a constant's product reads beside it; None if there is no product."""
    port = constant.output(0)
    while True:
        [target, *others] = port.get_target_inputs() or [None]
        if target is None or others:
            return None
        node = target.get_node()
        if node.get_type_name() == _PRODUCT:
            return node.input(1 - target.get_index()).get_source_output()
        if node.get_type_name() not in _BETWEEN:
            return None
        port = node.output(0)


class _Cut:
    """A compiled model without the outputs that were added."""

    def __init__(self, compiled: Any, outputs: int) -> None:
        self.inputs: Sequence[Any] = compiled.inputs
        self.outputs: Sequence[Any] = compiled.outputs[:outputs]
        self.create_infer_request = compiled.create_infer_request


class _ReadGraph(OpenVINOGraph):
    """A graph that knows the request which ran last."""

    last: Any

    def bind(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> OpenVINOCall:
        return _ReadCall(super().bind(signature, inputs, outputs), self)


class _ReadCall(OpenVINOCall):
    def __init__(self, call: OpenVINOCall, graph: _ReadGraph) -> None:
        super().__init__(call._request)
        self._graph = graph

    def run(self) -> None:
        super().run()
        self._graph.last = self._request
