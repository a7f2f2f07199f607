"""An artifact of LiteRT whose prefills give the inputs of its matrices (ssmd/runtime/activations.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.runtime.activations import Activations, Place, length_of
from ssmd.runtime.hoststate.buffers import carve
from ssmd.runtime.hoststate.graph import Array, GraphError, Signature
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.hoststate.signatures import signature_name
from ssmd_litert import lanes
from ssmd_litert.calls import LibraryCall
from ssmd_litert.library import LibraryGraph
from ssmd_litert.modelfile import Edited, edit

_READ = "input_"  # begins the names of the outputs that are added


def activations(artifact: Artifact, places: Mapping[str, Place]) -> Activations:
    """Load an artifact on the processor. places: of the matrices, all in its model's file.

    Raises GraphError if a matrix is not found.
    """
    manifest, threads = artifact.manifest, default_threads()
    [name] = {place.file for place in places.values()}
    length, tiers = length_of(manifest.buckets), manifest.tiers or (manifest.context or 1,)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=artifact.path.parent, ignore_cleanup_errors=True) as folder:
        file = Path(folder) / name
        signature = signature_name(length, tiers[0], tiers[0])
        edit(artifact.file(name), lambda edited: found.update(_added(edited, signature, places)), target=file)
        graph = _ReadGraph(file, threads, file.with_suffix(".cache"))
        graph.drop_file()  # before the packed weights come to memory beside it
    return Activations(FlatProgram(graph, manifest, "", threads), length, found, lambda name: graph.rows[name])


def _added(edited: Edited, signature: str, places: Mapping[str, Place]) -> dict[str, str]:
    """Add what matrices are multiplied with to a signature's outputs. Returns the outputs' names by matrix."""
    [signed] = [s for s in edited.model.signatureDefs if s.signatureKey.decode() == signature]
    graph = edited.model.subgraphs[signed.subgraphIndex]
    read: dict[int, int] = {}  # by the offset of a matrix, the tensor that it is multiplied with
    for operator in graph.operators:
        if edited.code(operator) == schema.BuiltinOperator.FULLY_CONNECTED:
            buffer = edited.model.buffers[graph.tensors[int(operator.inputs[1])].buffer]
            read[int(buffer.offset)] = int(operator.inputs[0])
    if missing := [name for name, place in places.items() if place.offset not in read]:
        raise GraphError(f"the signature {signature} has no product with {missing[0]}")
    names = {name: f"{_READ}{read[place.offset]}" for name, place in places.items()}
    for tensor in dict.fromkeys(read[place.offset] for place in places.values()):
        made = schema.TensorMapT()
        made.name, made.tensorIndex = f"{_READ}{tensor}".encode(), tensor
        signed.outputs.append(made)
        graph.outputs = np.append(graph.outputs, np.int32(tensor))
    return names


class _ReadGraph(LibraryGraph):
    """A graph whose added outputs are memory of its own. rows: by name, (T, K) of the last call."""

    def __init__(self, path: Path, threads: int, weights: Path) -> None:
        """weights: a new file for packed weights; without one each signature would have its own in memory."""
        super().__init__(path, threads=threads, weight_cache=weights, wanted=lanes.of_one_stream)
        self._whole = self.signatures
        self.signatures = {
            name: Signature(s.inputs, {n: t for n, t in s.outputs.items() if not n.startswith(_READ)})
            for name, s in self._whole.items()
        }
        added = {n: t for s in self._whole.values() for n, t in s.outputs.items() if n.startswith(_READ)}
        _, self._added = carve(added)
        self.rows = {name: array.reshape(-1, array.shape[-1]) for name, array in self._added.items()}

    def bind(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> LibraryCall:
        known, self.signatures = self.signatures, self._whole
        try:
            return super().bind(signature, inputs, {**outputs, **self._added})
        finally:
            self.signatures = known
