"""Calls of a graph of LiteRT: pointers to buffers over our own memory, and the sizes of tensors with open sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import of_lane
from ssmd.runtime.hoststate.graph import Array, GraphError, Signature, Tensor

if TYPE_CHECKING:
    from ssmd_litert.library import LibraryGraph

Sizes = dict[int, tuple[int, ...]]  # shapes of inputs by their place
_LANE = re.compile(r"_lane\d+$")  # as of_lane writes


def sizes_of(signature: Signature, inputs: Mapping[str, Array]) -> Sizes:
    """Return the sizes of a call's inputs that may differ from the file's, as they depend on the caches' capacity."""
    places = enumerate(signature.inputs.items())
    return {place: inputs[name].shape for place, (name, t) in places if signature.nominal in t.shape}


class LibraryCall:
    """One signature with its buffers bound: `run` is a single C call, during which the GIL is free.

    Before that come some for each input whose size differs from that of the signature's last call.
    """

    def __init__(
        self,
        graph: LibraryGraph,
        index: int,
        inputs: Sequence[c_void_p],
        outputs: Sequence[c_void_p],
        sizes: Sizes,
        memory: Sequence[Array] = (),
    ) -> None:
        """memory: the arrays under the buffers, kept alive as long as the call."""
        self._graph, self._index, self._sizes, self._memory = graph, index, sizes, memory
        self._tables = [np.array([b.value or 0 for b in side], np.uint64) for side in (inputs, outputs)]
        self._function = graph.functions.LiteRtRunCompiledModel
        given = (part for t in self._tables for part in (len(t), t.ctypes.data_as(POINTER(c_void_p))))
        self._arguments = (graph.compiled, index, *given)

    def run(self) -> None:
        """Compute the outputs from the inputs. Raises GraphError if LiteRT reports a failure."""
        if self._sizes and self._graph.sized(self._index) != self._sizes:
            self._graph.size(self._index, self._sizes)
        held, index = self._graph.held, self._index
        held[index] = (self, held.get(index))  # a run that fails may have left the pointers of the one before
        self._compute()
        held[index] = (self, None)

    def _compute(self) -> None:
        status = self._function(*self._arguments)
        if status:
            raise GraphError(f"LiteRtRunCompiledModel failed with status {status}")


@dataclass(frozen=True)
class LaneBinding:
    """A lane's own tensors: pointers to buffers, in the order of the lanes' places, and sizes."""

    inputs: NDArray[np.uint64]
    outputs: NDArray[np.uint64]
    shapes: tuple[tuple[int, ...], ...]


class LanesCall(LibraryCall):
    """A decode step of several streams, whose buffers are exchanged lane by lane."""

    def __init__(
        self,
        graph: LibraryGraph,
        signature: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        lanes: int,
    ) -> None:
        """inputs, outputs: the arrays that all lanes share."""
        known = graph.signatures[signature]
        for side, arrays in ((known.inputs, inputs), (known.outputs, outputs)):
            shared = {name: tensor for name, tensor in side.items() if name in arrays or not _LANE.search(name)}
            known.check_tensors(signature, shared, arrays)

        def all_of(arrays: Mapping[str, Array], tensors: Mapping[str, Tensor]) -> list[c_void_p]:
            return [graph.buffer(arrays[name]) if name in arrays else c_void_p() for name in tensors]

        super().__init__(
            graph, graph.indices[signature], all_of(inputs, known.inputs), all_of(outputs, known.outputs), {}
        )
        self._names = tuple(_of_first_lane(side, lanes) for side in (known.inputs, known.outputs))
        self._places = tuple(
            [np.array([list(side).index(of_lane(n, lane)) for n in names], np.intp) for lane in range(lanes)]
            for names, side in zip(self._names, (known.inputs, known.outputs), strict=True)
        )
        self._open = [i for i, n in enumerate(self._names[0]) if known.nominal in known.inputs[of_lane(n, 0)].shape]
        self._known, self._resized = known, False

    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> LaneBinding:
        """Bind a lane to these arrays, by the states' names. Raises GraphError."""
        for names, arrays, tensors in (
            (self._names[0], inputs, self._known.inputs),
            (self._names[1], outputs, self._known.outputs),
        ):
            self._known.check_tensors("a lane", {n: tensors[of_lane(n, 0)] for n in names}, arrays)

        def pointers(names: Sequence[str], arrays: Mapping[str, Array]) -> NDArray[np.uint64]:
            return np.array([self._graph.buffer(arrays[n]).value for n in names], np.uint64)

        shapes = tuple(inputs[self._names[0][i]].shape for i in self._open)
        return LaneBinding(pointers(self._names[0], inputs), pointers(self._names[1], outputs), shapes)

    def put(self, lane: int, bound: LaneBinding) -> None:
        """Have a lane read and write this from the next run on."""
        for table, places, pointers in zip(self._tables, self._places, (bound.inputs, bound.outputs), strict=True):
            table[places[lane]] = pointers
        for i, shape in zip(self._open, bound.shapes, strict=True):
            place = int(self._places[0][lane][i])
            if self._sizes.get(place) != shape:
                self._sizes[place], self._resized = shape, True

    def run(self) -> None:
        """Compute a step of all lanes. Raises GraphError if LiteRT reports a failure."""
        if self._resized:
            self._graph.size(self._index, self._sizes)
            self._resized = False
        self._compute()


def _of_first_lane(tensors: Mapping[str, Tensor], lanes: int) -> list[str]:
    """Return the names of each lane's states, without the lane's suffix."""
    end = of_lane("", 0)
    names = [name[: -len(end)] for name in tensors if name.endswith(end)]
    missing = [of_lane(n, b) for n in names for b in range(lanes) if of_lane(n, b) not in tensors]
    if missing:
        raise GraphError(f"a decode step of {lanes} streams has no {missing[0]!r}")
    return names
