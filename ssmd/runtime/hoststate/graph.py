"""A compiled graph, as a runtime gives it to a FlatProgram: named signatures with tensors bound to numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import of_lane

Array = NDArray[Any]
SLOTS = "slots"  # the input, (1, 1, S), of a signature whose caches may have any capacity S


class GraphError(RuntimeError):
    """A runtime refused to load or to run a graph."""


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs by name, in the runtime's order."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    @property
    def nominal(self) -> int | None:
        """The capacity in the shapes of the inputs, if it is open: a call may have another. None if it is fixed."""
        told = next((self.inputs[n] for n in (SLOTS, of_lane(SLOTS, 0)) if n in self.inputs), None)
        return None if told is None else told.shape[-1]

    def check(self, name: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Check that every tensor has an array of its shape and dtype. Raises GraphError."""
        self.check_tensors(name, self.inputs, inputs)
        self.check_tensors(name, self.outputs, outputs)

    def check_tensors(self, name: str, tensors: Mapping[str, Tensor], arrays: Mapping[str, Array]) -> None:
        """Check that each of these tensors has an array of its shape and dtype. Raises GraphError."""
        for key, tensor in tensors.items():
            array = arrays.get(key)
            if array is None or not self._fits(array.shape, tensor.shape) or array.dtype != tensor.dtype:
                have = None if array is None else (array.shape, array.dtype)
                raise GraphError(f"{name}: tensor {key!r} needs {tensor}, was given {have}")

    def _fits(self, shape: tuple[int, ...], known: tuple[int, ...]) -> bool:
        return len(shape) == len(known) and all(a == b or b == self.nominal for a, b in zip(shape, known, strict=True))


class Call(Protocol):
    def run(self) -> None:
        """Run the signature: read the bound inputs, write the bound outputs. Raises GraphError."""


class Graph(Protocol):
    signatures: dict[str, Signature]
    in_place: bool = False  # all signatures, those of lanes too, may write a state where they read it
    any_capacity: bool = False  # one model computes the signatures of all capacities

    def bind(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Call:
        """Return a call that reads and writes these very arrays, which must not move.

        An output may be an input only if it is a state and the graph is `in_place`.
        """

    def forget(self, memory: NDArray[np.uint8]) -> None:
        """Drop all bindings to arrays inside `memory`, which is about to be freed."""

    def run_managed(self, signature: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run once with the runtime's own memory and copies, for a test of `bind`."""

    def close(self) -> None:
        """Free the model. Bound calls must not be run any more."""
