"""The same graph through ai-edge-litert's own Python wrapper, which copies tensors in and out of LiteRT's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.narrow import narrow
from ssmd.runtime.hoststate.graph import SLOTS, Array, Graph, GraphError, Signature, Tensor


class ManagedGraph(Graph):
    """Slower and right: documented calls only. For versions whose C interface is not known, or refuses."""

    def __init__(self, path: Path, *, threads: int) -> None:
        from ai_edge_litert.compiled_model import CompiledModel, CpuOptions, HardwareAccelerator, Options

        options = Options(hardware_accelerators=HardwareAccelerator.CPU, cpu_options=CpuOptions(num_threads=threads))
        try:
            self._model: Any = CompiledModel.from_file(narrow(path), options=options)
            self.signatures = {
                name: Signature(
                    _tensors(self._model.get_input_tensor_details(name)),
                    _tensors(self._model.get_output_tensor_details(name)),
                )
                for name in self._model.get_signature_list()
            }
        except (RuntimeError, OSError, ValueError, TypeError, LookupError) as err:  # names and types may be nonsense
            raise GraphError(str(err)) from err
        self._buffers: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._capacities: dict[str, int] = {}  # by signature, where a call asked for another than the file's

    def bind(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> ManagedCall:
        known = self.signatures[signature]
        known.check(signature, inputs, outputs)
        return ManagedCall(
            self, signature, {n: inputs[n] for n in known.inputs}, {n: outputs[n] for n in known.outputs}
        )

    def run(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Run once, with copies. Raises RuntimeError."""
        known = self.signatures[signature]
        if known.nominal is not None and self._capacities.get(signature) != inputs[SLOTS].shape[-1]:
            self._capacities.pop(signature, None)
            self._buffers.pop(signature, None)
            for name, tensor in known.inputs.items():
                if known.nominal in tensor.shape:
                    self._model.resize_input_tensor_by_name(signature, name, inputs[name].shape, strict=False)
            self._capacities[signature] = inputs[SLOTS].shape[-1]
        if signature not in self._buffers:
            self._buffers[signature] = (
                {n: self._model.create_input_buffer_by_name(signature, n) for n in known.inputs},
                {n: self._model.create_output_buffer_by_name(signature, n) for n in known.outputs},
            )
        into, out = self._buffers[signature]
        for name, array in inputs.items():
            into[name].write(array)
        self._model.run_by_name(signature, into, out)
        for name, array in outputs.items():
            array[...] = out[name].read(array.size, array.dtype.type).reshape(array.shape)

    def forget(self, memory: NDArray[np.uint8]) -> None:
        """Do nothing: no call is bound to memory of ours."""

    def run_managed(self, signature: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        results: dict[str, Array] = {
            n: np.empty(t.shape, t.dtype) for n, t in self.signatures[signature].outputs.items()
        }
        self.bind(signature, inputs, results).run()
        return results

    def close(self) -> None:
        self._buffers.clear()
        self._model.close()


class ManagedCall:
    """A call that copies the bound arrays in, runs, and copies the results out."""

    def __init__(
        self, graph: ManagedGraph, signature: str, inputs: dict[str, Array], outputs: dict[str, Array]
    ) -> None:
        self._graph, self._signature, self._inputs, self._outputs = graph, signature, inputs, outputs

    def run(self) -> None:
        """Compute the outputs from the inputs. Raises GraphError if LiteRT reports a failure."""
        try:
            self._graph.run(self._signature, self._inputs, self._outputs)
        except RuntimeError as err:
            raise GraphError(str(err)) from err


def _tensors(details: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {n: Tensor(tuple(d["shape"]), np.dtype(d["dtype"])) for n, d in details.items()}
