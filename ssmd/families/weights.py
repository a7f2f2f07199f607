"""Bindings, which make each parameter of a re-authored module from a source's tensors.

All arithmetic that involves only weights is in bindings, so that every constant of an exported graph is one parameter.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssmd.model.source import Tensors

Array = NDArray[np.float32]
BLOCK_ELEMENTS = 1 << 18  # 1 MB: what is made of a block stays in a processor's cache
LATE_BYTES = 1 << 20  # bytes in float32 from which a parameter is made only when it is used
MARK = 4  # numbers that distinguish a parameter without values from all others


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


class Parameters(Mapping[str, Array]):
    """The parameters of a module, of which the large ones are made only when they are used.

    As a mapping it gives small parameters, and in place of large ones memory that takes no room until it is written:
    zeros after a few numbers of their own, of the right shape. A parameter whose values are all the same counts as
    small, because a converter stores one value for it. late: the shapes of the large ones, by name.
    """

    def __init__(self, bindings: Mapping[str, Binding], source: Tensors) -> None:
        """Raise SourceError if a tensor is absent or invalid: each parameter is made once."""
        self._bindings, self._source = bindings, source
        self._arrays: dict[str, Array] = {}
        self.late: dict[str, tuple[int, ...]] = {}
        for name, binding in bindings.items():
            value = binding(source)
            if value.nbytes >= LATE_BYTES and not (value == value.flat[0]).all():
                self.late[name] = value.shape
                value = _empty(name, value.shape)
            self._arrays[name] = value

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def whole(self, name: str) -> Array:
        """Make a parameter. Raises SourceError."""
        return self._bindings[name](self._source)

    def blocks(self, name: str) -> Iterator[Array]:
        """Make a parameter by blocks of its rows. Raises SourceError."""
        return self._bindings[name].blocks(self._source)


def make_parameters(bindings: Mapping[str, Binding], source: Tensors, *, late: bool) -> Mapping[str, Array]:
    """Make the parameters of a module: all values at once, each made one time, or with large ones `late`.

    Raises SourceError.
    """
    if late:
        return Parameters(bindings, source)
    return {name: binding(source) for name, binding in bindings.items()}


def _empty(name: str, shape: tuple[int, ...]) -> Array:
    """Return writable zeros that take no memory yet, after MARK numbers that depend on the name."""
    nbytes = 4 * math.prod(shape)
    if sys.platform == "win32":
        memory = mmap.mmap(-1, nbytes)
    else:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":  # a huge page would take 2 MB for the few numbers
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.float32).reshape(shape)
    digest = np.frombuffer(hashlib.sha256(name.encode()).digest(), np.uint16)
    array.flat[:MARK] = (digest[:MARK].astype(np.float32) + 1) / np.float32(1 << 16)
    return array
