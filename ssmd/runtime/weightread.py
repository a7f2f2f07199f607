"""A read of as many bytes of memory as a model's weights have: a lower bound of a decode step's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

_LARGEST_BUFFER = 1 << 30  # bytes; larger than any processor's cache, so that every read goes to memory


class WeightRead:
    """A number of bytes of memory that several threads stream through the processor at once."""

    def __init__(self, nbytes: int, threads: int) -> None:
        buffer = np.ones(max(1, min(nbytes, _LARGEST_BUFFER)), np.uint8)  # written, so that it has all its pages
        whole, rest = divmod(nbytes, buffer.size)
        self._passes = [buffer] * whole + [buffer[:rest]] * (rest > 0)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ssmd-read")

    def __enter__(self) -> WeightRead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def ms(self) -> float:
        """Read all the memory once. Returns the time in ms."""
        begin = time.perf_counter()
        list(self._pool.map(self._read, range(self._threads)))
        return (time.perf_counter() - begin) * 1e3

    def parts(self, thread: int) -> Iterator[NDArray[np.uint8]]:
        """Return the parts that one of the threads reads."""
        return (np.array_split(whole, self._threads)[thread] for whole in self._passes)

    def _read(self, thread: int) -> None:
        for part in self.parts(thread):
            np.maximum.reduce(part, initial=0)  # the only reduction of numpy that is limited by memory alone
