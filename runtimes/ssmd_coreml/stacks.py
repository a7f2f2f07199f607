"""The states of a stateful program: all tensors of one kind and shape in one, a layer after the other.

    conv_state   (L, K-1, C)      ssm_state    (L, H, P, N); Mamba-1: (L, N, D)
    key_state    (L, G, S, D)     value_state  (L, G, D, S)

All are float16, which is the only dtype that a state can have (macOS 15).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import StateSpec, TensorSpec, narrowed
from ssmd.runtime.hoststate.slot import graph_shape

Variant = Literal["stateful", "stateless"]  # of an artifact: where its states are
STATE_DTYPE = np.dtype(np.float16)


@dataclass(frozen=True)
class Stack:
    """A state of the package: the tensors of several layers stacked. `layers` are its tensors, first to last."""

    name: str
    layers: tuple[TensorSpec, ...]
    layer_shape: tuple[int, ...]  # as the graph has it, without a batch axis

    @property
    def kind(self) -> str:
        return self.layers[0].kind

    @property
    def recurrent(self) -> bool:
        return self.layers[0].recurrent

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.layers), *self.layer_shape)

    def canonical(self, array: NDArray[Any], layer: int, first: int, last: int) -> NDArray[Any]:
        """Return a view of a layer's tensor as in a State; of keys and values the rows [first, last)."""
        part: NDArray[Any] = array[layer]
        if self.kind == "key":
            return part[:, first:last]
        if self.kind == "value":
            return part[..., first:last].transpose(0, 2, 1)
        return part.T if self.layers[0].channels_first else part


def stacks(spec: StateSpec, capacity: int) -> tuple[Stack, ...]:
    """Group the tensors of a spec into stacks, in the order of their first tensors. `capacity`: tokens of the KV
    caches.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[TensorSpec]] = {}
    for t in spec.tensors:
        groups.setdefault((t.kind, t.shape), []).append(t)
    made: list[Stack] = []
    for (kind, _), layers in groups.items():
        shape = graph_shape(layers[0], capacity)
        before = sum(s.kind == kind for s in made)
        name = f"{kind}_state" if not before else f"{kind}_state_{before + 1}"
        made.append(Stack(name, tuple(layers), shape[1:] if layers[0].recurrent else shape))
    return tuple(made)


def rounded(array: NDArray[Any]) -> NDArray[np.float32]:
    """Round an array as a state holds it: float32 values that float16 has, none of them infinite."""
    return np.ascontiguousarray(narrowed(array, STATE_DTYPE), np.float32)
