"""Functions without states as a graph: the program keeps the states, each call is given them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ssmd.runtime.hoststate.graph import Array, Graph, GraphError, Signature
from ssmd_coreml.backend import Function
from ssmd_coreml.package import Interface

OUTPUT = "new_"  # before the name of a state in the outputs: no two values of a function have one name


class CoreMLGraph(Graph):
    """The functions of a Core ML package as a Graph. Not thread-safe: the program makes one call at a time."""

    def __init__(self, functions: Mapping[str, Function], interfaces: Mapping[str, Interface]) -> None:
        self._functions = dict(functions)
        self.signatures: dict[str, Signature] = {
            name: Signature(i.inputs, {n.removeprefix(OUTPUT): t for n, t in i.outputs.items()})
            for name, i in interfaces.items()
        }

    def bind(self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> CoreMLCall:
        known = self.signatures[signature]
        known.check(signature, inputs, outputs)
        return CoreMLCall(
            self._functions[signature], {n: inputs[n] for n in known.inputs}, {n: outputs[n] for n in known.outputs}
        )

    def forget(self, memory: NDArray[np.uint8]) -> None:
        """Do nothing: calls hold the arrays that they are bound to."""

    def run_managed(self, signature: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        known = self.signatures[signature]
        made = predicted(self._functions[signature], {n: inputs[n].copy() for n in known.inputs})
        return {n.removeprefix(OUTPUT): array for n, array in made.items()}

    def close(self) -> None:
        self.signatures = {}
        self._functions = {}


class CoreMLCall:
    """A function with the arrays that it reads and writes. Core ML copies both."""

    def __init__(self, function: Function, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        self._function, self._inputs, self._outputs = function, inputs, outputs

    def run(self) -> None:
        """Compute the outputs from the inputs. Raises GraphError if Core ML reports a failure."""
        made = predicted(self._function, self._inputs)
        for name, array in made.items():
            self._outputs[name.removeprefix(OUTPUT)][...] = array


def predicted(function: Function, inputs: dict[str, Array], state: object = None) -> dict[str, Array]:
    """Return the outputs of a function. Raises GraphError if Core ML reports a failure."""
    try:
        return function.predict(inputs, state)
    except Exception as err:  # coremltools raises RuntimeError and plain Exception
        raise GraphError(f"Core ML failed: {err}") from err
