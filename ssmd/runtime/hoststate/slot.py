"""The memory of one handle: two arenas of recurrent state, caches of keys and values, and the canonical rows.

Shapes as the graph has them (L layers of one shape, S = capacity of the caches, T = bucket):

    conv   (1, K-1, C)      ssm    (1, H, P, N); Mamba-1: (1, N, D)
    key    (Hkv, S, D)      new rows of a step: (Hkv, T, D)
    value  (Hkv, D, S)      new rows of a step: (Hkv, D, T)
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import FLOAT16_MAX, StateSpec, TensorSpec, narrowed
from ssmd.runtime.hoststate.buffers import Lease, Memory, carve, populate, stack
from ssmd.runtime.hoststate.graph import SLOTS, Array, Call, Tensor

_FLOAT32 = np.dtype(np.float32)
_MASKED = np.float32(-6e4)  # added to a score: its softmax is exactly 0


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


@dataclass(frozen=True)
class RowGroup:
    """All key or all value tensors of one shape: their rows are written together, whatever the number of layers."""

    kind: str
    heads: int
    dim: int
    dtype: np.dtype[Any]
    names: tuple[str, ...]

    def shape(self, rows: int) -> tuple[int, ...]:
        return (self.heads, rows, self.dim) if self.kind == "key" else (self.heads, self.dim, rows)

    def tokens(self, array: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """The token range of a stacked array (L, Hkv, S, D) or (L, Hkv, D, S), as a view."""
        return array[:, :, start:stop] if self.kind == "key" else array[:, :, :, start:stop]

    def canonical(self, part: NDArray[Any]) -> NDArray[Any]:
        """View such a range as (n, L, Hkv, D)."""
        return part.transpose(2, 0, 1, 3) if self.kind == "key" else part.transpose(3, 0, 1, 2)


def row_groups(spec: StateSpec) -> tuple[RowGroup, ...]:
    names: dict[tuple[str, tuple[int, ...], np.dtype[Any]], list[str]] = {}
    for t in spec.rows:
        names.setdefault((t.kind, t.shape, t.numpy_dtype), []).append(t.name)
    return tuple(RowGroup(kind, s[0], s[1], dtype, tuple(found)) for (kind, s, dtype), found in names.items())


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
    """What one signature puts out for all attention layers: shared by all handles, valid until its next run."""

    def __init__(self, groups: tuple[RowGroup, ...], bucket: int) -> None:
        self.stacks = [stack(len(g.names), g.shape(bucket))[1] for g in groups]
        self.arrays: dict[str, Array] = {
            n: s[i] for g, s in zip(groups, self.stacks, strict=True) for i, n in enumerate(g.names)
        }


class Slot:
    """Memory that one handle owns until its release, and another one afterwards."""

    def __init__(
        self, spec: StateSpec, groups: tuple[RowGroup, ...], context: int, capacity: int, masked: bool = False
    ) -> None:
        """`context`: the most tokens there can be; `capacity`: those that the caches have room for at first; `masked`:
        whether the graph is told which slots count."""
        self.groups = groups
        self._masked = masked
        self._context = context
        self._used = 0  # rows that may hold something else than zero
        pairs = [carve(recurrent_tensors(spec)) for _ in range(2)]
        self.arenas: list[Memory] = [memory for memory, _ in pairs]
        self.recurrent: list[dict[str, Array]] = [arrays for _, arrays in pairs]
        self.calls: dict[tuple[int, int], Call] = {}  # by length and the side that is read
        self._make_caches(capacity)
        # Canonical rows (S, values of a row), in the dtype of the state, from `_kept_from` on; never written twice
        # while a view that `save` handed out is alive: a save copies no rows.
        self._spec = spec
        self._kept_from = 0
        self._lent: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._store: Array = np.empty((0, 0))
        self._group_stores: list[Array] = []
        self._new_store()

    @property
    def blocks(self) -> list[Memory]:
        """All memory that calls are bound to."""
        return [*self.arenas, *self._cache_blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a slot keeps when it is clear."""
        return sum(block.nbytes for block in self.blocks)

    def _make_caches(self, capacity: int) -> None:
        stacks = [stack(len(g.names), g.shape(capacity)) for g in self.groups]
        self.capacity = capacity  # not before there is memory for it
        self._cache_blocks = [memory for memory, _ in stacks]
        self._caches = [array for _, array in stacks]
        self.caches: dict[str, Array] = {
            n: c[i] for g, c in zip(self.groups, self._caches, strict=True) for i, n in enumerate(g.names)
        }
        if self._masked:
            block, mask = carve({SLOTS: Tensor((1, 1, capacity), _FLOAT32)})
            mask[SLOTS].fill(_MASKED)
            self._cache_blocks.append(block)
            self.caches |= mask
        self._shown = 0

    def show(self, rows: int) -> None:
        """Have a graph that is told which slots count see the first `rows` of them."""
        if self._masked and rows != self._shown:
            mask = self.caches[SLOTS][0, 0]
            mask[self._shown : rows] = 0
            mask[rows : self._shown] = _MASKED
            self._shown = rows

    def resize(self, capacity: int, rows: int) -> list[Memory]:
        """Move, with the first `rows` rows, into caches of another capacity.

        Returns the memory that was left, to which no call is bound any more.
        """
        left, old = self._cache_blocks, self._caches
        self._make_caches(capacity)
        self.calls.clear()
        self._used = rows
        for cache, before, group in zip(self._caches, old, self.groups, strict=True):
            group.tokens(cache, 0, rows)[...] = group.tokens(before, 0, rows)
        return left

    def _new_store(self) -> None:
        """Memory that is not there before it is written: a handle that was restored writes its new rows only."""
        dtype = self.groups[0].dtype if self.groups else _FLOAT32
        self._store = np.empty((self._context, self._spec.row_values), dtype)
        columns = self._spec.row_columns
        self._group_stores = [
            self._store[:, columns[g.names[0]].start : columns[g.names[-1]].stop].reshape(
                self._context, len(g.names), g.heads, g.dim
            )
            for g in self.groups
        ]
        self._lent = weakref.WeakSet()

    def prepare(self) -> None:
        """Have the system provide the memory of the caches now: a first restore takes half as long then."""
        populate(self._cache_blocks)

    def clear(self) -> None:
        """Make the slot as if new: nothing of the last conversation is left where a graph reads before it writes."""
        self.arenas[0].fill(0)  # the first step reads this one and writes the whole of the other
        for cache, group in zip(self._caches, self.groups, strict=True):
            group.tokens(cache, 0, self._used)[...] = 0
        self._used = self._kept_from = 0
        if self._store.size:  # leave its rows to the views that outlive the handle, and its memory to the system
            self._new_store()

    def append(self, new: NewRows, position: int, count: int) -> None:
        """Take the first `count` new rows of a step in at `position`. The cache holds what the store holds."""
        stop = position + count
        self._used = max(self._used, stop)
        for group, fresh, cache, store in zip(self.groups, new.stacks, self._caches, self._group_stores, strict=True):
            rows = group.tokens(fresh, 0, count)
            kept = rows
            if group.dtype != _FLOAT32:
                rows.clip(-FLOAT16_MAX, FLOAT16_MAX, out=rows)  # rounding must not overflow to infinity
                kept = rows.astype(group.dtype)
                rows[...] = (
                    kept  # here, not in the cache: its columns are far apart, and a cast there takes twice as long
                )
            group.tokens(cache, position, stop)[...] = rows
            store[position:stop] = group.canonical(kept)

    def canonical_rows(self, since: int, stop: int) -> dict[str, Array]:
        """Views (Hkv, n, D) of the canonical rows, read-only, over one array in the order of StateSpec.row_columns."""
        if not self.groups:
            return {}
        self._keep(since)
        lease = Lease(self._store[since:stop])
        self._lent.add(lease)
        rows = np.asarray(lease)
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
        for group, cache, store in zip(self.groups, self._caches, self._group_stores, strict=True):
            store[low:high] = group.canonical(group.tokens(cache, low, high))  # the cache holds rounded values: exact
        self._kept_from = low

    def load_rows(self, tensors: Mapping[str, Array], first: int, stop: int) -> None:
        """Take in canonical rows [first, stop), of either dtype; `first` is where those taken in so far end."""
        self._used = self._kept_from = stop
        for group, cache in zip(self.groups, self._caches, strict=True):
            target = group.tokens(cache, first, stop)
            for layer, name in enumerate(group.names):  # one at a time stays in the processor's cache
                rows = narrowed(tensors[name], group.dtype)  # (Hkv, n, D)
                wide = widened(rows.transpose(1, 0, 2)).transpose(1, 0, 2)  # contiguous as it is stored
                target[layer] = wide if group.kind == "key" else wide.transpose(0, 2, 1)

    def copy_rows(self, other: Slot, count: int) -> None:
        """Take over rows [0, count) of another slot of the program. This slot must be clear and have room for them."""
        self._used = self._kept_from = count
        for group, cache, theirs in zip(self.groups, self._caches, other._caches, strict=True):
            group.tokens(cache, 0, count)[...] = group.tokens(theirs, 0, count)
