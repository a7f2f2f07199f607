"""The memory of one handle: arenas of recurrent state, caches of keys and values that grow, and the canonical rows.

Shapes in the graph (L layers of one shape, S = capacity of the caches, T = bucket, or tokens of a step):

    conv   (1, K-1, C)      ssm    (1, H, P, N); Mamba-1: (1, N, D)
    window_key (Hkv, W, D)  window_value (Hkv, D, W)
    key    (Hkv, S, D)      new rows of a step: (Hkv, T, D)
    value  (Hkv, D, S)      new rows of a step: (Hkv, D, T)

A step attends over all S slots, so S stays near the position, and grows often. Growing within the same memory needs
new pages only for the added slots, and no second copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.memory import available
from ssmd.machine.size import show_size
from ssmd.model.state import FLOAT16_MAX, WINDOWS, StateSpec, TensorSpec, narrowed
from ssmd.runtime.hoststate.buffers import Memory, aligned, carve, populate, stack_bytes, stacked
from ssmd.runtime.hoststate.graph import SLOTS, Array, Call, Tensor

_FLOAT32 = np.dtype(np.float32)
_NO_ROWS: Array = np.empty((0, 0))
_MASKED = np.float32(-6e4)  # added to a score: its softmax is exactly 0
_ROOM = 2  # room of new memory, in capacities: only addresses, until they are written
_TURNED = 1 << 15  # values that are transposed at a time: what is read and what is written stay in the cache
_ASKED_BYTES = 64 << 20  # bytes above which free memory is checked first: the system gives addresses in any case


def graph_shape(tensor: TensorSpec, rows: int) -> tuple[int, ...]:
    """Return the shape of a state tensor in the graph, with a token axis of length `rows`."""
    if tensor.channels_first:
        channels, width = tensor.shape
        return (1, width, channels)
    if tensor.kind == "ssm":
        return (1, *tensor.shape)
    if tensor.kind in WINDOWS:
        heads, window, dim = tensor.shape
        return (heads, window, dim) if tensor.kind == "window_key" else (heads, dim, window)
    heads, dim = tensor.shape
    return (heads, rows, dim) if tensor.kind == "key" else (heads, dim, rows)


def recurrent_tensors(spec: StateSpec) -> dict[str, Tensor]:
    return {t.name: Tensor(graph_shape(t, 0), _FLOAT32) for t in spec.recurrent}


_F16_BITS = np.array(0x8FFFE000, np.uint32).view(np.int32)[()]


def widened(rows: Array) -> NDArray[np.float32]:
    """Return finite float16 exactly as float32; float32 unchanged.

    It uses integer arithmetic, as numpy's cast takes twice as long. A float16's bits, shifted up by 13 and cleared of
    the copies of the sign, make a float32 that is 2^112 too small, subnormal or not.
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
    """One signature's new rows of all attention layers: shared by all handles, valid until its next run.

    A step of several streams puts their rows side by side, along the axis of the heads.
    """

    def __init__(self, groups: tuple[RowGroup, ...], bucket: int, lanes: int = 1) -> None:
        self._groups = groups
        shapes = [(len(g.names), g.shape(bucket, lanes)) for g in groups]
        self.stacks = [stacked(aligned(stack_bytes(n, shape)), n, shape) for n, shape in shapes]
        self.arrays: dict[str, Array] = {
            n: s[i] for g, s in zip(groups, self.stacks, strict=True) for i, n in enumerate(g.names)
        }

    def lane(self, lane: int) -> list[Array]:
        """Return the new rows of a lane, unrounded: (L, Hkv, ...) of each group."""
        return [s[:, lane * g.heads : (lane + 1) * g.heads] for g, s in zip(self._groups, self.stacks, strict=True)]

    def taken(self, count: int) -> list[tuple[Array, Array]]:
        """Return the first `count` rows of each group: (as float32, in the dtype of the state).

        Both are (L, Hkv or all lanes' Hkv, ...). The float32 rows are rounded to that dtype, so that the caches hold
        the stored values.
        """
        found = []
        for group, fresh in zip(self._groups, self.stacks, strict=True):
            rows = group.tokens(fresh, 0, count)
            kept = rows
            if group.dtype != _FLOAT32:
                rows.clip(-FLOAT16_MAX, FLOAT16_MAX, out=rows)  # rounding must not overflow to infinity
                kept = rows.astype(group.dtype)
                rows[...] = kept  # here, as a cast into a cache, with its columns far apart, takes twice as long
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
        """context: the most tokens there can be. capacity: tokens that the caches have room for at first.

        masked: the graph has an input that says which slots count. in_place: a step reads and writes a single arena.
        """
        self.groups = groups
        self.caches = Caches(groups, capacity, context, masked)
        self._context = context
        self._used = 0  # rows that may hold other values than zero
        sides = 1 if in_place or not spec.recurrent else 2
        pairs = [carve(recurrent_tensors(spec)) for _ in range(sides)]
        self.arenas: list[Memory] = [memory for memory, _ in pairs]
        self.recurrent: list[dict[str, Array]] = [arrays for _, arrays in pairs]
        self.calls: dict[tuple[int, int], Call] = {}  # by length and the side that is read
        self.bounds: dict[tuple[int, int], Any] = {}  # bindings of a lane, by number of lanes and the side that is read
        # Canonical rows (S, values of a row), in the dtype of the state, from `_kept_from` on. No row is written twice,
        # and the next handle gets a new store. So a save copies no rows, and its views may outlive this handle. The
        # store has as much room as the caches, so that its address space grows with use too.
        self._spec = spec
        self._kept_from = 0
        self._store: Array = _NO_ROWS
        self._group_stores: list[Array] = []

    def other(self, side: int) -> int:
        """Return the side that a step writes if it reads this one."""
        return (side + 1) % len(self.arenas)

    @property
    def blocks(self) -> list[Memory]:
        """All memory that calls are bound to."""
        return [*self.arenas, *self.caches.blocks]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that a slot keeps when it is clear."""
        return sum(arena.nbytes for arena in self.arenas) + self.caches.nbytes

    def resize(self, capacity: int, rows: int) -> list[Memory]:
        """Give the caches another capacity with room for `rows` rows, and keep the first `rows` rows.

        Returns the memory that must not be bound any more. Raises MemoryError before anything is changed.
        """
        left = self.caches.blocks
        store = self._new_store(capacity) if 0 < len(self._store) < capacity else None
        if not self._used and self.caches.has_room(capacity):
            self.caches.fit(capacity)
        else:
            self.caches.grow(capacity, rows)
        self.unbind()
        self._used = rows
        if store is not None:  # views keep the old store alive; its rows are in the caches
            self._take_store(store)
            self._kept_from = rows
        return left

    def unbind(self) -> None:
        """Drop the calls that are bound to the memory."""
        self.calls.clear()
        self.bounds.clear()

    def begin(self) -> None:
        """Allocate the store of a handle's rows. Raises MemoryError.

        Its pages come when they are written: a restored handle writes only its new rows.
        """
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
        """Reset the slot: no value of the last conversation is left where a graph reads before it writes."""
        self.arenas[0].fill(0)  # the first step reads this one; a second one is written whole before it is read
        for cache, group in zip(self.caches.stacks, self.groups, strict=True):
            group.tokens(cache, 0, self._used)[...] = 0
        self._used = self._kept_from = 0
        self._store = _NO_ROWS  # views that outlive the handle keep the old store; else it is freed
        self._group_stores = []

    def append(self, new: Sequence[tuple[Array, Array]], position: int, count: int, lane: int = 0) -> None:
        """Take in at `position` one lane's part of a step's first `count` rows, as `NewRows.taken` returns them."""
        stop = position + count
        self._used = max(self._used, stop)
        for group, (rows, kept), cache, store in zip(
            self.groups, new, self.caches.stacks, self._group_stores, strict=True
        ):
            own = slice(lane * group.heads, (lane + 1) * group.heads)
            group.tokens(cache, position, stop)[...] = rows[:, own]
            store[position:stop] = group.canonical(kept[:, own])

    def canonical_rows(self, since: int, stop: int) -> dict[str, Array]:
        """Return read-only views (Hkv, n, D) of the canonical rows, over one array in StateSpec.row_columns' order."""
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
        """Copy the rows from `since` on into the store: a restored state's rows are at first only in the caches."""
        low, high = since, self._kept_from
        if low >= high:
            return
        for group, cache, store in zip(self.groups, self.caches.stacks, self._group_stores, strict=True):
            for start, stop in group.blocks(low, high):
                rows = group.canonical(group.tokens(cache, start, stop))
                for layer in range(len(group.names)):
                    store[start:stop, layer] = rows[:, layer].astype(group.dtype)  # they are rounded already: exact
        self._kept_from = low

    def load_rows(self, tensors: Mapping[str, Array], first: int, stop: int) -> None:
        """Take in canonical rows [first, stop), of either dtype. The rows taken in so far must end at `first`."""
        self._used = self._kept_from = stop
        for group, cache in zip(self.groups, self.caches.stacks, strict=True):
            target = group.tokens(cache, first, stop)
            for layer, name in enumerate(group.names):  # one at a time stays in the processor's cache
                rows = narrowed(tensors[name], group.dtype).transpose(1, 0, 2)  # (n, Hkv, D), as they are stored
                if group.kind == "key":
                    target[layer] = widened(rows).transpose(1, 0, 2)
                    continue
                for low, high in group.blocks(0, stop - first):
                    near = np.ascontiguousarray(rows[low:high])  # rows lie far apart, as each has all layers
                    target[layer, :, :, low:high] = widened(near.transpose(1, 2, 0))

    def copy_rows(self, other: Slot, count: int) -> None:
        """Take over rows [0, count) of another slot of the program. This slot must be clear and have room for them."""
        self._used = self._kept_from = count
        for group, cache, theirs in zip(self.groups, self.caches.stacks, other.caches.stacks, strict=True):
            group.tokens(cache, 0, count)[...] = group.tokens(theirs, 0, count)


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

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a token range that are transposed one at a time."""
        step = max(16, _TURNED // (self.heads * self.dim) // 16 * 16)
        for low in range(start, stop, step):
            yield low, min(low + step, stop)

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
