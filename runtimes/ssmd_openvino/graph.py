"""OpenVINO models as a graph: one model with open lengths, or one of fixed shapes for every signature.

An open model is compiled once, so that decode and every prefill length share one copy of the weights. The number of
tokens T and the capacity S of the caches are open dimensions. A signature is the model at one T and one S, and the
plugin caches its kernels for each. Processors run it; the NPU supports only fixed shapes.

A decode step of several streams is a model of its own, in which each lane's caches have their own S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import of_lane
from ssmd.runtime.hoststate.batches import LanesGraph
from ssmd.runtime.hoststate.graph import Array, Graph, GraphError, Signature, Tensor
from ssmd.runtime.hoststate.signatures import signature_name
from ssmd_openvino import library

TOKENS = ("tokens", "pos", "n_valid")  # inputs that every model has; states follow
LOGITS = "logits"  # an output that every model has
OUTPUT = "new_"  # before the name of a state in the outputs: no two tensors of a model have one name
_DTYPES = {"f32": np.dtype(np.float32), "i32": np.dtype(np.int32)}


class OpenVINOGraph(Graph):
    """A compiled OpenVINO model as a Graph. Not thread-safe: the program makes one call at a time."""

    def __init__(
        self, compiled: Mapping[str, Any], lengths: Mapping[str, tuple[int, int]], states: Sequence[str]
    ) -> None:
        """compiled: a compiled model for each signature, or one for several. lengths: T and S of each signature.
        states: the names of the state's tensors.

        Raises GraphError if a tensor has no name, or is of an element type, that a program knows.
        """
        self._tensor = library.openvino().Tensor
        self._compiled = dict(compiled)
        ports = {id(model): _Ports(model, states) for model in {id(m): m for m in compiled.values()}.values()}
        self.any_capacity = len(ports) == 1
        self.signatures: dict[str, Signature] = {
            name: ports[id(compiled[name])].signature(*lengths_of) for name, lengths_of in lengths.items()
        }

    def bind(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> OpenVINOCall:
        known = self.signatures[signature]
        known.check(signature, inputs, outputs)
        request = self._compiled[signature].create_infer_request()
        for i, name in enumerate(known.inputs):
            request.set_input_tensor(i, self._tensor(inputs[name], shared_memory=True))
        for i, name in enumerate(known.outputs):
            request.set_output_tensor(i, self._tensor(outputs[name], shared_memory=True))
        return OpenVINOCall(request)

    def forget(self, memory: NDArray[np.uint8]) -> None:
        """Do nothing: requests hold the arrays that they are bound to, and are freed with the calls."""

    def run_managed(self, signature: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        known = self.signatures[signature]
        request = self._compiled[signature].create_infer_request()
        for i, name in enumerate(known.inputs):
            request.set_input_tensor(i, self._tensor(inputs[name]))
        OpenVINOCall(request).run()
        return {name: request.get_output_tensor(i).data.copy() for i, name in enumerate(known.outputs)}

    def close(self) -> None:
        self.signatures = {}
        self._compiled = {}


class OpenVINOCall:
    """An inference request bound to memory of ours. The GIL is free while it computes."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def run(self) -> None:
        """Compute the outputs from the inputs. Raises GraphError if OpenVINO reports a failure."""
        try:
            self._request.start_async()  # `infer` would look its arguments through and wrap every output
            self._request.wait()
        except RuntimeError as err:
            raise GraphError(f"OpenVINO failed: {reason(err)}") from err


class OpenVINOLanes(LanesGraph):
    """A compiled decode step of several streams."""

    def __init__(self, compiled: Any, lanes: int, states: Sequence[str]) -> None:
        """states: the names of the state's tensors, without the lanes'. Raises GraphError as OpenVINOGraph does."""
        self._compiled = compiled
        known = [of_lane(name, lane) for lane in range(lanes) for name in states]
        self._inputs = named(compiled.inputs, (*TOKENS[:2], *known))
        ports = named(compiled.outputs, (LOGITS, *(OUTPUT + name for name in (*states, *known))))
        self._outputs = {name.removeprefix(OUTPUT): port for name, port in ports.items()}
        if missing := [name for name in known if name not in self._inputs]:
            raise GraphError(f"a decode step of {lanes} streams has no {missing[0]!r}")

    def bind_lanes(
        self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array], lanes: int
    ) -> OpenVINOLanesCall:
        return OpenVINOLanesCall(self._compiled.create_infer_request(), self._inputs, self._outputs, inputs, outputs)

    def forget(self, memory: NDArray[np.uint8]) -> None:
        """Do nothing: a lane is given other memory before its next run."""

    def close(self) -> None:
        self._compiled = None


@dataclass(frozen=True)
class LaneBinding:
    """A lane's own tensors, by the states' names."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]


class OpenVINOLanesCall(OpenVINOCall):
    """A decode step of several streams, whose tensors are exchanged lane by lane."""

    def __init__(
        self,
        request: Any,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        read: Mapping[str, Array],
        written: Mapping[str, Array],
    ) -> None:
        """inputs, outputs: all ports by name, in their order. read, written: the arrays of all lanes together.

        Raises GraphError if an array does not fit.
        """
        super().__init__(request)
        self._tensor = library.openvino().Tensor
        self._inputs, self._outputs = inputs, outputs
        self._places = {n: i for i, n in enumerate(inputs)}, {n: i for i, n in enumerate(outputs)}
        for name, tensor in self._bound(inputs, read).items():
            request.set_input_tensor(self._places[0][name], tensor)
        for name, tensor in self._bound(outputs, written).items():
            request.set_output_tensor(self._places[1][name], tensor)

    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> LaneBinding:
        """Bind a lane to these arrays, by the states' names. Raises GraphError."""
        read = self._bound({name: self._inputs[of_lane(name, 0)] for name in inputs}, inputs)
        return LaneBinding(read, self._bound({name: self._outputs[of_lane(name, 0)] for name in outputs}, outputs))

    def put(self, lane: int, bound: LaneBinding) -> None:
        """Have a lane read and write this from the next run on."""
        for name, tensor in bound.inputs.items():
            self._request.set_input_tensor(self._places[0][of_lane(name, lane)], tensor)
        for name, tensor in bound.outputs.items():
            self._request.set_output_tensor(self._places[1][of_lane(name, lane)], tensor)

    def _bound(self, ports: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, Any]:
        for name, array in arrays.items():
            port = ports[name]
            kind = _DTYPES.get(port.element_type.get_type_name())
            if array.dtype != kind or not port.partial_shape.compatible(library.openvino().PartialShape(array.shape)):
                raise GraphError(f"tensor {name!r} needs {port.partial_shape}, was given {array.shape} {array.dtype}")
        return {name: self._tensor(array, shared_memory=True) for name, array in arrays.items()}


def signatures(lengths: Sequence[int], tiers: Sequence[int]) -> dict[str, tuple[int, int]]:
    """List T and S of every signature. lengths: 1 and the buckets."""
    return {signature_name(n, capacity, tiers[0]): (n, capacity) for capacity in tiers for n in lengths}


def reason(err: Exception) -> str:
    """Return the message of an OpenVINO error, without the places in its sources."""
    lines = [line.strip() for line in str(err).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Exception from", "Check '", "Converting input"))]
    return said[0] if said else str(err)


def named(ports: Sequence[Any], known: Sequence[str]) -> dict[str, Any]:
    """Return the ports by name, each name one of `known`. Raises GraphError.

    A plugin adds names of its own to those of the model in no fixed order, so a port's "any name" is random.
    """
    found: dict[str, Any] = {}
    for port in ports:
        name = next((n for n in known if n in port.names and n not in found), None)
        if name is None:
            raise GraphError(f"a tensor is named {sorted(port.names)}; known are {list(known)}, each once")
        found[name] = port
    return found


@dataclass(frozen=True)
class _Port:
    """A tensor of a compiled model: the size of each dimension, None where it is open."""

    dims: tuple[int | None, ...]
    dtype: np.dtype[Any]

    def tensor(self, opened: int) -> Tensor:
        return Tensor(tuple(opened if size is None else size for size in self.dims), self.dtype)


class _Ports:
    """The tensors of a compiled model, in their order, of which signatures differ in T and S."""

    def __init__(self, compiled: Any, states: Sequence[str]) -> None:
        """Raises GraphError if a tensor has no name, or is of an element type, that a program knows."""
        self.inputs = _ports(named(compiled.inputs, (*TOKENS, *states)))
        outputs = _ports(named(compiled.outputs, (LOGITS, *(OUTPUT + name for name in states))))
        self.outputs = {name.removeprefix(OUTPUT): port for name, port in outputs.items()}
        for name, port in self.outputs.items():  # a loop leaves dimensions of a state open: what goes in comes out
            if name in self.inputs and None in port.dims and None not in self.inputs[name].dims:
                self.outputs[name] = self.inputs[name]

    def signature(self, length: int, capacity: int) -> Signature:
        """Open dimensions are T in `tokens` and in outputs, S in caches."""
        inputs = {n: port.tensor(length if n == "tokens" else capacity) for n, port in self.inputs.items()}
        return Signature(inputs, {n: port.tensor(length) for n, port in self.outputs.items()})


def _ports(ports: Mapping[str, Any]) -> dict[str, _Port]:
    known: dict[str, _Port] = {}
    for name, port in ports.items():
        kind = port.element_type.get_type_name()
        if kind not in _DTYPES:
            raise GraphError(f"tensor {name!r} has element type {kind}, expected f32 or i32")
        known[name] = _Port(tuple(_size(d) for d in port.partial_shape), _DTYPES[kind])
    return known


def _size(dimension: Any) -> int | None:
    """Return the size of a dimension; 1 for an open one of at most 1, as a batch computed block by block has."""
    if dimension.is_dynamic:
        return 1 if dimension.get_max_length() == 1 else None
    size: int = dimension.get_length()
    return size
