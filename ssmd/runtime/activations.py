"""The inputs of an artifact's matrices, as its own runtime computes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssmd.runtime.protocol import Program

_LENGTH = 64  # tokens of the calls that are read, at most: longer ones would take memory in every layer


@dataclass(frozen=True)
class Place:
    """Where the values of a matrix stand: a file of the artifact, and the offset in it."""

    file: str
    offset: int


@dataclass(frozen=True)
class Activations:
    """A loaded artifact whose prefills of `length` tokens give the inputs of its matrices.

    sources: by a matrix' name, the name of the tensor that it is multiplied with. Several matrices may share one.
    read: returns such a tensor (length, K) of the last prefill, a view that the next one changes.
    """

    program: Program
    length: int
    sources: Mapping[str, str]
    read: Callable[[str], NDArray[np.float32]]

    def fed(self, tokens: Sequence[int], names: Collection[str]) -> Iterator[dict[str, NDArray[np.float32]]]:
        """Feed tokens from position 0, in whole calls. Yields copies of the tensors of these names, call by call."""
        handle = self.program.new_state()
        try:
            for first in range(0, len(tokens) - self.length + 1, self.length):
                self.program.prefill(handle, tokens[first : first + self.length])
                yield {name: self.read(name).copy() for name in names}
        finally:
            self.program.release(handle)

    def close(self) -> None:
        self.program.close()


def length_of(buckets: Sequence[int]) -> int:
    """Return the bucket whose calls are read."""
    return max((b for b in buckets if b <= _LENGTH), default=buckets[0])
