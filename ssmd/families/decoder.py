"""The parameters of every decoder: embedding, norm, head unless tied, and for each layer i those of `layer{i}_`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from ssmd.families.weights import Binding, tensor


class Sizes(Protocol):
    """The part of a family's config that the embedding and the head depend on."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def tied(self) -> bool: ...


def decoder(c: Sizes, embedding: Binding, norm: Binding, layers: Iterable[Mapping[str, Binding]]) -> dict[str, Binding]:
    """Bind every parameter of a decoder. layers: the bindings of each, in order, by names without the layer's."""
    made = {"embedding": embedding, "norm": norm}
    if not c.tied:
        made["head"] = tensor("lm_head.weight", c.vocabulary, c.hidden)
    for i, layer in enumerate(layers):
        made |= {f"layer{i}_{name}": binding for name, binding in layer.items()}
    return made
