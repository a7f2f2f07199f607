"""The memory of one handle: two arenas of recurrent state, caches of keys and values, and the canonical rows.

Shapes as the graph has them (L layers of one shape, S = context, T = bucket):

    conv   (1, K-1, C)      ssm    (1, H, P, N)
    key    (Hkv, S, D)      new rows of a step: (Hkv, T, D)
    value  (Hkv, D, S)      new rows of a step: (Hkv, D, T)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.state import StateSpec, TensorSpec
from ssmd_litert.buffers import Memory, carve, stack
from ssmd_litert.graph import Array, Call, Tensor

_FLOAT32 = np.dtype(np.float32)
_FLOAT16_MAX = np.float32(65504.0)


def graph_shape(tensor: TensorSpec, rows: int) -> tuple[int, ...]:
    """The shape of a state tensor in the graph, when its token axis is `rows` long."""
    if tensor.kind == "conv":
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

    def rows(self, array: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
        """The token range of a stacked array, as a view in canonical order: (rows, L, Hkv, D)."""
        if self.kind == "key":  # (L, Hkv, S, D)
            return array[:, :, start:stop].transpose(2, 0, 1, 3)
        return array[:, :, :, start:stop].transpose(3, 0, 1, 2)  # (L, Hkv, D, S)


def row_groups(spec: StateSpec) -> tuple[RowGroup, ...]:
    names: dict[tuple[str, tuple[int, ...], np.dtype[Any]], list[str]] = {}
    for t in spec.rows:
        names.setdefault((t.kind, t.shape, t.numpy_dtype), []).append(t.name)
    return tuple(RowGroup(kind, s[0], s[1], dtype, tuple(found)) for (kind, s, dtype), found in names.items())


class NewRows:
    """What one signature puts out for all attention layers: shared by all handles, valid until its next run."""

    def __init__(self, groups: tuple[RowGroup, ...], bucket: int) -> None:
        self.stacks = [stack(len(g.names), g.shape(bucket))[1] for g in groups]
        self.arrays: dict[str, Array] = {
            n: s[i] for g, s in zip(groups, self.stacks, strict=True) for i, n in enumerate(g.names)
        }


class Slot:
    """Memory that one handle owns until its release, and another one afterwards."""

    def __init__(self, spec: StateSpec, groups: tuple[RowGroup, ...], context: int) -> None:
        self.groups = groups
        self._context = context
        self._used = 0  # rows that may hold something else than zero
        pairs = [carve(recurrent_tensors(spec)) for _ in range(2)]
        self.arenas: list[Memory] = [memory for memory, _ in pairs]
        self.recurrent: list[dict[str, Array]] = [arrays for _, arrays in pairs]
        stacks = [stack(len(g.names), g.shape(context)) for g in groups]
        self._caches = [array for _, array in stacks]
        self.caches: dict[str, Array] = {
            n: c[i] for g, c in zip(groups, self._caches, strict=True) for i, n in enumerate(g.names)
        }
        self.blocks: list[Memory] = [*self.arenas, *(memory for memory, _ in stacks)]
        self.calls: dict[tuple[str, int], Call] = {}
        self._store: list[Array] = []
        self._new_store()

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def _new_store(self) -> None:
        """Canonical rows (S, L, Hkv, D) in the state's own dtype. Appended to, never written twice: `save` hands out
        views. Fresh for every handle, because such views outlive it; pages are taken only as rows arrive."""
        self._store = [np.empty((self._context, len(g.names), g.heads, g.dim), g.dtype) for g in self.groups]

    def clear(self) -> None:
        """As if new: nothing of the last conversation is left where a graph could read it."""
        for arena in self.arenas:
            arena.fill(0)
        for cache, group in zip(self._caches, self.groups, strict=True):
            group.rows(cache, 0, self._used)[...] = 0
        self._used = 0
        self._new_store()

    def append(self, new: NewRows, position: int, count: int) -> None:
        """Take the first `count` new rows of a step in at `position`. The cache holds what the store holds."""
        stop = position + count
        self._used = max(self._used, stop)
        for group, fresh, cache, store in zip(self.groups, new.stacks, self._caches, self._store, strict=True):
            rows = group.rows(fresh, 0, count)
            if group.dtype != _FLOAT32:  # rounding must not overflow to infinity
                np.minimum(rows, _FLOAT16_MAX, out=rows)
                np.maximum(rows, -_FLOAT16_MAX, out=rows)
            kept = store[position:stop]
            kept[...] = rows
            group.rows(cache, position, stop)[...] = kept

    def canonical_rows(self, since: int, stop: int) -> dict[str, Array]:
        """Views (Hkv, n, D) of the canonical rows, read-only."""
        views: dict[str, Array] = {}
        for group, store in zip(self.groups, self._store, strict=True):
            part = store[since:stop].transpose(1, 2, 0, 3)  # (L, Hkv, n, D)
            part.flags.writeable = False
            views.update(zip(group.names, part, strict=True))
        return views

    def load_rows(self, tensors: Mapping[str, Array], count: int) -> None:
        """Take in whole canonical rows [0, count). The slot must be clear."""
        self._used = count
        for group, cache, store in zip(self.groups, self._caches, self._store, strict=True):
            kept = store[:count]
            for layer, name in enumerate(group.names):
                rows = tensors[name].transpose(1, 0, 2)  # (n, Hkv, D)
                if rows.dtype != group.dtype and group.dtype != _FLOAT32:
                    rows = np.clip(rows, -_FLOAT16_MAX, _FLOAT16_MAX)
                kept[:, layer] = rows
            group.rows(cache, 0, count)[...] = kept
