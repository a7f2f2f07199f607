"""The caches of keys and values of one handle, which grow within their memory.

Shapes in the graph (L layers of one shape, S = capacity of the caches, T = tokens of a step):

    key    (Hkv, S, D)      new rows of a step: (Hkv, T, D)
    value  (Hkv, D, S)      new rows of a step: (Hkv, D, T)

A step attends over all S slots, so S stays near the position, and grows often. Growing within the same memory needs
new pages only for the added slots, and no second copy.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.memory import available
from ssmd.machine.size import show_size
from ssmd.model.state import StateSpec
from ssmd.runtime.hoststate.buffers import Memory, aligned, populate, stack_bytes, stacked
from ssmd.runtime.hoststate.graph import SLOTS, Array

_FLOAT32 = np.dtype(np.float32)
_MASKED = np.float32(-6e4)  # added to a score: its softmax is exactly 0
_ROOM = 2  # room of new memory, in capacities: only addresses, until they are written
_ASKED_BYTES = 64 << 20  # bytes above which free memory is checked first: the system gives addresses in any case


@dataclass(frozen=True)
class RowGroup:
    """All key or all value tensors of one shape. Their rows are written together, for any number of layers."""

    kind: str
    heads: int
    dim: int
    dtype: np.dtype[Any]
    names: tuple[str, ...]

    def shape(self, rows: int, lanes: int = 1) -> tuple[int, ...]:
        heads = lanes * self.heads
        return (heads, rows, self.dim) if self.kind == "key" else (heads, self.dim, rows)

    def tokens(self, array: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Return a token range of a stacked array (L, Hkv, S, D) or (L, Hkv, D, S), as a view."""
        return array[:, :, start:stop] if self.kind == "key" else array[:, :, :, start:stop]

    def canonical(self, part: NDArray[Any]) -> NDArray[Any]:
        """View such a range as (n, L, Hkv, D)."""
        return part.transpose(2, 0, 1, 3) if self.kind == "key" else part.transpose(3, 0, 1, 2)


def row_groups(spec: StateSpec) -> tuple[RowGroup, ...]:
    names: dict[tuple[str, tuple[int, ...], np.dtype[Any]], list[str]] = {}
    for t in spec.rows:
        names.setdefault((t.kind, t.shape, t.numpy_dtype), []).append(t.name)
    return tuple(RowGroup(kind, s[0], s[1], dtype, tuple(found)) for (kind, s, dtype), found in names.items())


def room_for(capacity: int, context: int) -> int:
    """Return the rows that new memory has room for. capacity: that of the caches now. context: the most slots."""
    return max(capacity, min(context, _ROOM * capacity))


class Caches:
    """Keys and values of all layers.

    capacity: slots that the graph sees. stacks: (L, *) for each group. arrays: the same by tensor, and the mask.
    """

    def __init__(self, groups: tuple[RowGroup, ...], capacity: int, context: int, masked: bool) -> None:
        """context: the most slots there can be. masked: the graph has an input that says which slots count."""
        self.groups = groups
        self._context = context
        self._masked = masked
        self._make(capacity)

    @property
    def blocks(self) -> list[Memory]:
        """All memory that calls are bound to."""
        return self._blocks

    @property
    def nbytes(self) -> int:
        """The bytes that were ever written."""
        return self._nbytes_at(self._highest)

    def _nbytes_at(self, capacity: int) -> int:
        return sum(stack_bytes(len(g.names), g.shape(capacity)) for g in self.groups)

    def has_room(self, capacity: int) -> bool:
        """Return True if the present memory has room for this capacity."""
        return capacity <= self._room

    def _ask(self, capacity: int, held: int) -> None:
        """Check that the system has memory for this capacity. held: bytes of it that are allocated already.

        Raises MemoryError. Otherwise the system would kill the process, with every conversation in it, once it writes
        to pages that cannot be provided.
        """
        more = self._nbytes_at(capacity) - held
        free = available() if more > _ASKED_BYTES else None
        if free is not None and more > free:
            sizes = show_size(more), show_size(free)
            raise MemoryError(
                f"a conversation of {capacity} tokens takes {sizes[0]} more memory, and {sizes[1]} are free"
            )

    def _make(self, capacity: int) -> None:
        self._ask(capacity, 0)
        room = room_for(capacity, self._context)
        blocks = [aligned(stack_bytes(len(g.names), g.shape(room))) for g in self.groups]
        if self._masked:
            blocks.append(aligned(room * _FLOAT32.itemsize))
        self._blocks, self._room, self._highest = blocks, room, 0  # not before there is memory for all
        self._fit(capacity)

    def fit(self, capacity: int) -> None:
        """Set another capacity, for which there must be room. The rows are lost.

        Raises MemoryError before anything is changed.
        """
        self._ask(capacity, self.nbytes)
        self._fit(capacity)

    def _fit(self, capacity: int) -> None:
        self.capacity = capacity
        self._highest = max(self._highest, capacity)
        self.stacks = [
            stacked(block, len(g.names), g.shape(capacity)) for g, block in zip(self.groups, self._blocks, strict=False)
        ]
        self.arrays: dict[str, Array] = {
            n: s[i] for g, s in zip(self.groups, self.stacks, strict=True) for i, n in enumerate(g.names)
        }
        self._shown = 0
        if self._masked:
            mask = self._blocks[-1].view(_FLOAT32)[:capacity]
            mask.fill(_MASKED)
            self.arrays[SLOTS] = mask.reshape(1, 1, capacity)

    def grow(self, capacity: int, rows: int) -> None:
        """Set a larger capacity. The first `rows` rows move to their new places, and zeros follow them.

        Pages that were never written stay unwritten. Raises MemoryError before anything is changed.
        """
        before, blocks = self.stacks, self._blocks
        if self.has_room(capacity):
            self.fit(capacity)
        else:
            self._make(capacity)
        for group, old, new in zip(self.groups, before, self.stacks, strict=True):
            if self._blocks is blocks:
                _spread(group, old, new, rows)
                _cleared(group, old, new, rows)
            else:
                group.tokens(new, 0, rows)[...] = group.tokens(old, 0, rows)

    def show(self, rows: int) -> None:
        """Set the mask, if the graph has one, so that it sees the first `rows` slots."""
        if self._masked and rows != self._shown:
            mask = self.arrays[SLOTS][0, 0]
            mask[self._shown : rows] = 0
            mask[rows : self._shown] = _MASKED
            self._shown = rows

    def prepare(self) -> None:
        """Ask the system to provide the pages of this capacity now."""
        sizes = [stack_bytes(len(g.names), g.shape(self.capacity)) for g in self.groups]
        populate([block[:size] for block, size in zip(self._blocks, sizes, strict=False)])


def _spread(group: RowGroup, old: Array, new: Array, rows: int) -> None:
    """Move rows to their places with a larger capacity, in the same memory.

    The last row moves first, so that none is overwritten before it was moved. Nothing is allocated, so this cannot
    fail half way.
    """
    size = group.dim * rows if group.kind == "key" else rows  # of a run of values that stays together
    lines = (len(group.names), group.heads, 1 if group.kind == "key" else group.dim)
    if not size:
        return
    for layer in reversed(range(lines[0])):
        target, source = new[layer].ctypes.data, old[layer].ctypes.data
        apart, was = (int(np.prod(a.shape[1:])) * 4 // (lines[1] * lines[2]) for a in (new, old))
        for line in reversed(range(lines[1] * lines[2])):
            ctypes.memmove(target + line * apart, source + line * was, size * 4)


def _cleared(group: RowGroup, old: Array, new: Array, rows: int) -> None:
    """Set the slots after the rows to zero where they lay inside the smaller caches: other rows were there."""
    layers = -(-len(old) * old.strides[0] // new.strides[0])  # those that begin there
    group.tokens(new[:layers], rows, new.shape[2 if group.kind == "key" else 3])[...] = 0
