"""Bindings: how each parameter of a re-authored module is made from a source's tensors.

All arithmetic on weights alone stands in bindings, so that every constant of an exported graph is one parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ssmd.source import Tensors

Array = NDArray[np.float32]
Binding = Callable[[Tensors], Array]


def tensor(name: str, *shape: int, scale: float = 1.0) -> Binding:
    """The tensor `name`, times `scale`. The binding raises SourceError if it is absent or has another shape."""

    def bind(source: Tensors) -> Array:
        array = source.tensor(name, shape)
        return array if scale == 1.0 else array * np.float32(scale)

    return bind


def stacked(*parts: Binding) -> Binding:
    """Several matrices as one, row blocks in order: one larger product instead of several."""
    return lambda source: np.concatenate([part(source) for part in parts], axis=0)


def mapped(function: Callable[[Array], Array], part: Binding) -> Binding:
    return lambda source: np.ascontiguousarray(function(part(source)))
