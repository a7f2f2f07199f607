"""A slot: the device memory of one handle's state, in canonical layout, and the bind groups over it.

All recurrent tensors stand in one buffer, one after another; all keys and values in another, for each tensor `capacity`
rows of (kv_heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import StateSpec, TensorSpec
from ssmd_wgpu.device import ALIGNMENT, Gpu, Kernel
from ssmd_wgpu.op import Op
from ssmd_wgpu.recorder import Copy, Dispatch, Region, dispatch

_BINDINGS = {"CONV": "conv", "SSM": "ssm", "KEY": "key", "VALUE": "value"}
CONTROL = 4  # words before the tokens of a call: position, count, 0, 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def row_bytes(t: TensorSpec) -> int:
    return t.shape[0] * t.shape[1] * t.numpy_dtype.itemsize


class Slot:
    def __init__(self, gpu: Gpu, spec: StateSpec, most_tokens: int, capacity: int) -> None:
        self._gpu, self._spec = gpu, spec
        self.control = gpu.region(4 * (CONTROL + most_tokens))
        self._words = np.zeros(CONTROL + most_tokens, np.uint32)
        total = sum(_aligned(t.nbytes_at(0)) for t in spec.recurrent)
        self._recurrent = gpu.buffer(total) if total else None
        self.regions: dict[str, Region] = {}
        at = 0
        for t in spec.recurrent:
            self.regions[t.name] = Region(self._recurrent, at, t.nbytes_at(0))
            at += _aligned(t.nbytes_at(0))
        self._rows: Any = None
        self.capacity = 0
        self._groups: dict[tuple[Any, ...], Any] = {}
        self.decode: list[Dispatch] = []  # of a decode step, once they were asked for
        self._make_rows(capacity)

    def _make_rows(self, capacity: int) -> None:
        sizes = [_aligned(capacity * row_bytes(t)) for t in self._spec.rows]
        self._rows = self._gpu.buffer(sum(sizes)) if sizes else None
        at = 0
        for t, size in zip(self._spec.rows, sizes, strict=True):
            self.regions[t.name] = Region(self._rows, at, size)
            at += size
        self.capacity = capacity

    def grow(self, capacity: int, rows: int) -> None:
        """Move, with the first `rows` rows, into memory for `capacity` of them."""
        before = dict(self.regions)
        self._make_rows(capacity)
        self._groups.clear()
        self.decode = []
        self._gpu.recorder.submit([], self._row_copies(before, self.regions, rows))

    def take(self, other: Slot, rows: int) -> None:
        """Copy another slot's state, with its first `rows` rows, for which there must be room."""
        copies = self._row_copies(other.regions, self.regions, rows)
        if self._recurrent is not None:
            copies.append(Copy(other._recurrent, 0, self._recurrent, 0, self._recurrent.size))
        self._gpu.recorder.submit([], copies)

    def _row_copies(self, source: dict[str, Region], target: dict[str, Region], rows: int) -> list[Copy]:
        made = []
        for t in self._spec.rows if rows else ():
            a, b = source[t.name], target[t.name]
            size = -(-rows * row_bytes(t) // 4) * 4  # copies are of whole words
            made.append(Copy(a.buffer, a.offset, b.buffer, b.offset, size))
        return made

    def clear(self) -> None:
        """Make the slot as if new. Rows are never read before they were written."""
        if self._recurrent is not None:
            self._gpu.recorder.submit([], clears=[Region(self._recurrent, 0, self._recurrent.size)])

    def feed(self, position: int, tokens: NDArray[np.int32]) -> None:
        """Write what the next dispatches are to read: position, number of tokens, and the tokens."""
        self._words[:2] = position, len(tokens)
        self._words[CONTROL : CONTROL + len(tokens)] = tokens
        self._gpu.write(self.control, self._words[: CONTROL + len(tokens)])

    def group(self, kernel: Kernel, layer: int) -> Any:
        """Group 1 of a kernel over this slot, or None where the kernel has none."""
        if len(kernel.layouts) < 2:
            return None
        key = (id(kernel.layouts[1]), layer, *kernel.bindings[1])
        if key not in self._groups:
            state = {
                name: self.regions[f"{kind}_{layer}"] for name, kind in _BINDINGS.items() if name in kernel.bindings[1]
            }
            self._groups[key] = self._gpu.bound(kernel, 1, {"CTL": self.control, **state})
        return self._groups[key]

    def dispatches(self, ops: Sequence[Op], count: int) -> list[Dispatch]:
        """Make the dispatches of some operations over `count` tokens."""
        made = []
        for op in ops:
            x, y = op.grid
            if op.tokens:
                y = -(-count // op.tokens)
            if op.rows:
                y = -(-self.capacity // op.rows)
            made.append(dispatch(op.kernel.pipeline, op.group0, self.group(op.kernel, op.layer), x, y))
        return made

    def recurrent_regions(self) -> list[Region]:
        return [self.regions[t.name] for t in self._spec.recurrent]

    def row_regions(self, first: int, last: int) -> list[Region]:
        """The regions of rows [first, last) of every cache, which must be whole words."""
        made = []
        for t in self._spec.rows:
            r, size = self.regions[t.name], row_bytes(t)
            made.append(Region(r.buffer, r.offset + first * size, (last - first) * size))
        return made
