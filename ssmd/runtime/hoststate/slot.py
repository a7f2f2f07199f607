"""The memory of one handle: arenas of recurrent state, caches of keys and values, and the canonical rows.

Shapes as the graph has them (L layers of one shape, S = capacity of the caches, T = bucket):

    conv   (1, K-1, C)      ssm    (1, H, P, N); Mamba-1: (1, N, D)
    key    (Hkv, S, D)      new rows of a step: (Hkv, T, D)
    value  (Hkv, D, S)      new rows of a step: (Hkv, D, T)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import FLOAT16_MAX, StateSpec, TensorSpec, narrowed
from ssmd.runtime.hoststate.buffers import Memory, aligned, carve, stack_bytes, stacked
from ssmd.runtime.hoststate.caches import Caches, RowGroup, room_for
from ssmd.runtime.hoststate.graph import Array, Call, Tensor

_FLOAT32 = np.dtype(np.float32)
_NO_ROWS: Array = np.empty((0, 0))


def graph_shape(tensor: TensorSpec, rows: int) -> tuple[int, ...]:
    """The shape of a state tensor in the graph, when its token axis is `rows` long."""
    if tensor.channels_first:
        channels, width = tensor.shape
        return (1, width, channels)
    if tensor.kind == "ssm":
        return (1, *tensor.shape)
    heads, dim = tensor.shape
    return (heads, rows, dim) if tensor.kind == "key" else (heads, dim, rows)


def recurrent_tensors(spec: StateSpec) -> dict[str, Tensor]:
    return {t.name: Tensor(graph_shape(t, 0), _FLOAT32) for t in spec.recurrent}


_F16_BITS = np.array(0x8FFFE000, np.uint32).view(np.int32)[()]


def widened(rows: Array) -> NDArray[np.float32]:
    """Finite float16 as float32, exactly; float32 as it is. By integer arithmetic: numpy's cast takes twice as long.

    A float16's bits, moved up by 13 with their sign and freed of its copies, make a float32 that is 2^112 too small,
    subnormal or not.
    """
    if rows.dtype != np.float16:
        return np.ascontiguousarray(rows, _FLOAT32)
    bits = np.ascontiguousarray(rows).view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _F16_BITS
    wide = bits.view(_FLOAT32)
    wide *= np.float32(2.0**112)
    return wide


class NewRows:
    """What one signature puts out for all attention layers: shared by all handles, valid until its next run.

    A step of several streams puts theirs out one beside another, along the axis of the heads.
    """

    def __init__(self, groups: tuple[RowGroup, ...], bucket: int, lanes: int = 1) -> None:
        self._groups = groups
        shapes = [(len(g.names), g.shape(bucket, lanes)) for g in groups]
        self.stacks = [stacked(aligned(stack_bytes(n, shape)), n, shape) for n, shape in shapes]
        self.arrays: dict[str, Array] = {
            n: s[i] for g, s in zip(groups, self.stacks, strict=True) for i, n in enumerate(g.names)
        }

    def lane(self, lane: int) -> list[Array]:
        """What a lane's step put out, as it is: (L, Hkv, ...) of each group."""
        return [s[:, lane * g.heads : (lane + 1) * g.heads] for g, s in zip(self._groups, self.stacks, strict=True)]

    def taken(self, count: int) -> list[tuple[Array, Array]]:
        """The first `count` rows, of each group (L, Hkv or all lanes' Hkv, ...): as float32, and as they are kept. The
        former are rounded to the latter: a cache holds what is stored."""
        found = []
        for group, fresh in zip(self._groups, self.stacks, strict=True):
            rows = group.tokens(fresh, 0, count)
            kept = rows
            if group.dtype != _FLOAT32:
                rows.clip(-FLOAT16_MAX, FLOAT16_MAX, out=rows)  # rounding must not overflow to infinity
                kept = rows.astype(group.dtype)
                rows[...] = kept  # here: a cache's columns are far apart, and a cast there takes twice as long
            found.append((rows, kept))
        return found


class Slot:
    """Memory that one handle owns until its release, and another one afterwards."""

    def __init__(
        self,
        spec: StateSpec,
        groups: tuple[RowGroup, ...],
        context: int,
        capacity: int,
        masked: bool = False,
        in_place: bool = False,
    ) -> None:
        """`context`: the most tokens there can be; `capacity`: those that the caches have room for at first; `masked`:
        whether the graph is told which slots count; `in_place`: there is one arena, which a step reads and writes."""
        self.groups = groups
        self.caches = Caches(groups, capacity, context, masked)
        self._context = context
        self._used = 0  # rows that may hold something else than zero
        sides = 1 if in_place or not spec.recurrent else 2
        pairs = [carve(recurrent_tensors(spec)) for _ in range(sides)]
        self.arenas: list[Memory] = [memory for memory, _ in pairs]
        self.recurrent: list[dict[str, Array]] = [arrays for _, arrays in pairs]
        self.calls: dict[tuple[int, int], Call] = {}  # by length and the side that is read
        self.bounds: dict[tuple[int, int], Any] = {}  # what a step of so many streams needs to read that side
        # Canonical rows (S, values of a row), in the dtype of the state, from `_kept_from` on. None is written twice,
        # and the next handle has others: a save copies no rows, and its views may outlive this one. They have room for
        # what the caches have room for, so that their address space grows with use, too.
        self._spec = spec
        self._kept_from = 0
        self._store: Array = _NO_ROWS
        self._group_stores: list[Array] = []

    def other(self, side: int) -> int:
        """The side that a step writes which reads this one."""
        return (side + 1) % len(self.arenas)

    @property
    def blocks(self) -> list[Memory]:
        """All memory that calls are bound to."""
        return [*self.arenas, *self.caches.blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a slot keeps when it is clear."""
        return sum(arena.nbytes for arena in self.arenas) + self.caches.nbytes

    def resize(self, capacity: int, rows: int) -> list[Memory]:
        """Have caches of another capacity that hold the first `rows` rows, for which there must be room.

        Returns the memory that no call may be bound to any more. Raises MemoryError before anything is changed.
        """
        left = self.caches.blocks
        store = self._new_store(capacity) if 0 < len(self._store) < capacity else None
        if not self._used and self.caches.has_room(capacity):
            self.caches.fit(capacity)
        else:
            self.caches.grow(capacity, rows)
        self.unbind()
        self._used = rows
        if store is not None:  # views keep the one before; what it held stands in the caches
            self._take_store(store)
            self._kept_from = rows
        return left

    def unbind(self) -> None:
        """Drop the calls that are bound to the memory."""
        self.calls.clear()
        self.bounds.clear()

    def begin(self) -> None:
        """Have memory for a handle's rows. It is not there before it is written: a handle that was restored writes its
        new rows only. Raises MemoryError."""
        self._take_store(self._new_store(self.caches.capacity))

    def _new_store(self, capacity: int) -> Array:
        dtype = self.groups[0].dtype if self.groups else _FLOAT32
        return np.empty((room_for(capacity, self._context), self._spec.row_values), dtype)

    def _take_store(self, store: Array) -> None:
        columns = self._spec.row_columns
        self._store = store
        self._group_stores = [
            store[:, columns[g.names[0]].start : columns[g.names[-1]].stop].reshape(
                len(store), len(g.names), g.heads, g.dim
            )
            for g in self.groups
        ]

    def clear(self) -> None:
        """Make the slot as if new: nothing of the last conversation is left where a graph reads before it writes."""
        self.arenas[0].fill(0)  # the first step reads this one; the whole of another is written before it is read
        for cache, group in zip(self.caches.stacks, self.groups, strict=True):
            group.tokens(cache, 0, self._used)[...] = 0
        self._used = self._kept_from = 0
        self._store = _NO_ROWS  # it is left to the views that outlive the handle, or to the system
        self._group_stores = []

    def append(self, new: Sequence[tuple[Array, Array]], position: int, count: int, lane: int = 0) -> None:
        """Take in at `position` what `NewRows.taken` gave of a step's first `count` rows, those of one lane."""
        stop = position + count
        self._used = max(self._used, stop)
        for group, (rows, kept), cache, store in zip(
            self.groups, new, self.caches.stacks, self._group_stores, strict=True
        ):
            own = slice(lane * group.heads, (lane + 1) * group.heads)
            group.tokens(cache, position, stop)[...] = rows[:, own]
            store[position:stop] = group.canonical(kept[:, own])

    def canonical_rows(self, since: int, stop: int) -> dict[str, Array]:
        """Views (Hkv, n, D) of the canonical rows, read-only, over one array in the order of StateSpec.row_columns."""
        if not self.groups:
            return {}
        self._keep(since)
        rows = self._store[since:stop]
        rows.flags.writeable = False
        views: dict[str, Array] = {}
        for t in self._spec.rows:
            part = rows[:, self._spec.row_columns[t.name]]
            views[t.name] = part.reshape(stop - since, *t.shape).transpose(1, 0, 2)
        return views

    def _keep(self, since: int) -> None:
        """Have the rows from `since` on in the store: those of a restored state stand in the caches only at first."""
        low, high = since, self._kept_from
        if low >= high:
            return
        for group, cache, store in zip(self.groups, self.caches.stacks, self._group_stores, strict=True):
            store[low:high] = group.canonical(group.tokens(cache, low, high))  # the cache holds rounded values: exact
        self._kept_from = low

    def load_rows(self, tensors: Mapping[str, Array], first: int, stop: int) -> None:
        """Take in canonical rows [first, stop), of either dtype; `first` is where those taken in so far end."""
        self._used = self._kept_from = stop
        for group, cache in zip(self.groups, self.caches.stacks, strict=True):
            target = group.tokens(cache, first, stop)
            for layer, name in enumerate(group.names):  # one at a time stays in the processor's cache
                rows = narrowed(tensors[name], group.dtype)  # (Hkv, n, D)
                wide = widened(rows.transpose(1, 0, 2)).transpose(1, 0, 2)  # contiguous as it is stored
                target[layer] = wide if group.kind == "key" else wide.transpose(0, 2, 1)

    def copy_rows(self, other: Slot, count: int) -> None:
        """Take over rows [0, count) of another slot of the program. This slot must be clear and have room for them."""
        self._used = self._kept_from = count
        for group, cache, theirs in zip(self.groups, self.caches.stacks, other.caches.stacks, strict=True):
            group.tokens(cache, 0, count)[...] = group.tokens(theirs, 0, count)
