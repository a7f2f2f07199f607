"""An excerpt of a model's file, with only some of its signatures.

LiteRT makes objects for the operators of every signature in a file, also of those that it never computes. Of the 42 MB
of one of SmolLM2's six signatures 26 are for the other five, and a load takes twice as long. So LiteRT gets the file in
memory, with its lists of signatures and graphs cut to the wanted ones. The changed pages belong to this process; the
file stays unchanged. Fields have the numbers of tensorflow/compiler/mlir/lite/schema.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ssmd.machine.memory import drop_pages
from ssmd.runtime.hoststate.graph import GraphError

_SUBGRAPHS, _SIGNATURES = 2, 7  # of Model
_KEY, _SUBGRAPH = 2, 4  # of SignatureDef
_MOST = 4096  # signatures, and bytes of a name


class Excerpt:
    """A file in memory. `names`: of all its signatures. `identity`: another file, or one written to, has another."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        """Keep the signatures that are `wanted`; all of them where they share graphs, or none is. Raises GraphError."""
        try:
            with path.open("rb") as file:
                known = os.fstat(file.fileno())
                self.identity = known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._bytes = np.frombuffer(self._memory, np.uint8)
            self._written: set[int] = set()  # bytes at the ends of the numbers that were changed
            self._cut(wanted)
        except (OSError, ValueError, struct.error) as err:  # struct's: an offset that leads out of the file
            raise GraphError(f"{path} cannot be read: {err}") from err

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies in memory until `close`, and how many bytes it has."""
        return self._bytes.ctypes.data, self._bytes.nbytes

    def drop(self) -> None:
        """Give its pages back to the system, which reads them again if they are needed (Linux)."""
        drop_pages(self._memory, self._written)

    def close(self) -> None:
        self._bytes = self._bytes[:0].copy()  # nothing may look into the memory that goes
        self._memory.close()

    def _cut(self, wanted: Callable[[str], bool]) -> None:
        model = self._number(0)
        graphs, signatures = self._list(model, _SUBGRAPHS), self._list(model, _SIGNATURES)
        tables = [self._at(entry) for entry in signatures[1:]]
        self.names = tuple(map(self._name, tables))
        numbers = [self._field(table, _SUBGRAPH) for table in tables]  # 0: it is the first, which is not written down
        targets = [self._at(entry) for entry in graphs[1:]]
        indices = [self._number(place) if place else 0 for place in numbers]
        kept = sorted((i for i, name in enumerate(self.names) if wanted(name)), key=lambda i: numbers[i] > 0)
        if not kept or sorted(indices) != list(range(len(targets))):
            return  # LiteRT has a name of its own for a graph without one
        for new, old in enumerate(kept):
            self._write(signatures[1 + new], tables[old] - signatures[1 + new])
            self._write(graphs[1 + new], targets[indices[old]] - graphs[1 + new])
            if numbers[old]:
                self._write(numbers[old], new)
        for counted in (signatures, graphs):
            self._write(counted[0], len(kept))

    def _number(self, place: int) -> int:
        return int(struct.unpack_from("<I", self._memory, place)[0])

    def _write(self, place: int, number: int) -> None:
        struct.pack_into("<I", self._memory, place, number)
        self._written |= {place, place + 3}

    def _at(self, place: int) -> int:
        """Return the place that the offset at a place points to."""
        return place + self._number(place)

    def _field(self, table: int, number: int) -> int:
        """Return the place of a table's field; 0 if the table does not have it."""
        known = table - int(struct.unpack_from("<i", self._memory, table)[0])
        [size] = struct.unpack_from("<H", self._memory, known)
        place = 4 + 2 * number
        offset = struct.unpack_from("<H", self._memory, known + place)[0] if place < size else 0
        return table + offset if offset else 0

    def _list(self, table: int, number: int) -> range:
        """Return the places of a list's length and of each entry; an empty range if there is no such list."""
        field = self._field(table, number)
        if not field:
            return range(0)
        start = self._at(field)
        if self._number(start) > _MOST:
            raise ValueError(f"it has {self._number(start)} signatures or graphs")
        return range(start, start + 4 * (1 + self._number(start)), 4)

    def _name(self, table: int) -> str:
        start = self._at(self._field(table, _KEY))
        return self._memory[start + 4 : start + 4 + min(_MOST, self._number(start))].decode()
