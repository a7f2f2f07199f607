"""Bindings, which make each parameter of a re-authored module from a source's tensors.

All arithmetic that involves only weights is in bindings, so that every constant of an exported graph is one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssmd.model.source import Tensors

Array = NDArray[np.float32]
BLOCK_ELEMENTS = 1 << 18  # 1 MB: what is made of a block stays in a processor's cache


@dataclass(frozen=True)
class Binding:
    """The way to make a parameter: `whole` at once, or `blocks` of its rows in order, in little memory.

    Both raise SourceError if a tensor is absent, has another shape, or holds a value that is not finite.
    reads: the tensors that it is made from, with their shapes.
    """

    whole: Callable[[Tensors], Array]
    blocks: Callable[[Tensors], Iterator[Array]]
    reads: Mapping[str, tuple[int, ...]]

    def __call__(self, source: Tensors) -> Array:
        return self.whole(source)


def tensor(name: str, *shape: int, scale: float = 1.0) -> Binding:
    """Return the binding of the tensor `name`, times `scale`."""

    def scaled(array: Array) -> Array:
        return array if scale == 1.0 else array * np.float32(scale)

    def blocks(source: Tensors) -> Iterator[Array]:
        step = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
        for first in range(0, shape[0], step):
            yield scaled(source.tensor(name, shape, first, min(first + step, shape[0])))

    return Binding(lambda source: scaled(source.tensor(name, shape)), blocks, {name: shape})


def stacked(*parts: Binding) -> Binding:
    """Return the binding of several matrices stacked by rows: one larger product instead of several."""

    def whole(source: Tensors) -> Array:
        return np.concatenate([part(source) for part in parts], axis=0)

    def blocks(source: Tensors) -> Iterator[Array]:
        for part in parts:
            yield from part.blocks(source)

    return Binding(whole, blocks, {name: shape for part in parts for name, shape in part.reads.items()})


def mapped(function: Callable[..., Array], part: Binding, *others: Binding, by_rows: bool = False) -> Binding:
    """Return the binding of `function` applied to `part` and the whole `others`.

    by_rows: applied to some rows of `part`, the function gives the same rows of the whole result.
    """

    def whole(source: Tensors) -> Array:
        return np.ascontiguousarray(function(part(source), *(other(source) for other in others)))

    def blocks(source: Tensors) -> Iterator[Array]:
        if not by_rows:
            yield whole(source)
            return
        beside = [other(source) for other in others]
        for rows in part.blocks(source):
            yield np.ascontiguousarray(function(rows, *beside))

    return Binding(whole, blocks, {name: shape for one in (part, *others) for name, shape in one.reads.items()})


def given(make: Callable[[], Array]) -> Binding:
    """Return the binding of an array that is made without tensors."""
    return Binding(lambda _: make(), lambda _: iter([make()]), {})
