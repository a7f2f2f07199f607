"""Slots: the states of all handles in a device's memory, in canonical layout, and the bind groups over them.

A recurrent tensor has one buffer for all slots, `index` after `index`. A key or value tensor has one buffer for all
pages of PAGE rows (kv_heads, head_dim). The control buffer holds each slot's pages in order, and the input of a call.
So one dispatch reaches the states of every handle, and a cache grows by a page without a copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import StateSpec, TensorSpec, narrowed
from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu.device import Gpu, Kernel
from ssmd_wgpu.op import Op
from ssmd_wgpu.recorder import Copy, Dispatch, Region, dispatch

RESIDENT = 16  # handles on the device at once
STREAMS = 8  # handles that one decode step takes
PAGE = 256  # rows of a cache: a decode step reads each page by a workgroup of its own
CONTROL = 4 * STREAMS  # words before the tokens of a call: of each stream its position, the rows of x, its slot, 0
_FIRST_PAGES = 2
_SPARE = 4  # slots that there is always room for, once there was
_BINDINGS = {"CONV": "conv", "SSM": "ssm", "KEY": "key", "VALUE": "value"}


@dataclass(eq=False)
class Slot:
    """A place for one handle's state."""

    index: int
    pages: list[int] = field(default_factory=list)


class Slots:
    """The slots of one model on a device. Calls raise GraphError if memory is short or the device is lost."""

    def __init__(self, gpu: Gpu, spec: StateSpec, most_tokens: int, context: int) -> None:
        self._gpu, self._spec = gpu, spec
        self.page, self.most_tokens = PAGE, max(STREAMS, most_tokens)  # rows of a call
        self.most_pages = -(-context // self.page) if spec.rows else 0  # of one slot
        self.tables = CONTROL + most_tokens  # where the pages of slot 0 begin in the control buffer, in words
        self.control = gpu.region(4 * (self.tables + RESIDENT * self.most_pages))
        self._words = np.zeros(self.tables, np.uint32)
        self._free: list[int] = []  # indices, a heap: the lowest first, so that the end of a buffer comes free
        self._free_pages: list[int] = []
        self._taken: set[Slot] = set()
        self._buffers: dict[str, Region] = {}
        self._count = self._page_count = 0  # that there is room for
        self._scratch: Region | None = None
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._made: dict[tuple[int, int, int], tuple[Sequence[Op], list[Dispatch]]] = {}

    # slots

    def take(self) -> Slot:
        """Return a slot with a state of zeros and no rows."""
        if not self._free:
            most = min([RESIDENT, *(self._gpu.binding_bytes // t.nbytes_at(0) for t in self._spec.recurrent)])
            self._resize(max(1, 2 * self._count), most, paged=False)
        slot = Slot(heapq.heappop(self._free))
        self._taken.add(slot)
        self._gpu.recorder.submit([], clears=[self.region(slot, t) for t in self._spec.recurrent])
        return slot

    def give(self, slot: Slot) -> None:
        """Take a slot back; buffers that are three quarters empty give half of their memory back."""
        self._taken.remove(slot)
        heapq.heappush(self._free, slot.index)
        for page in slot.pages:
            heapq.heappush(self._free_pages, page)
        if self._count > _SPARE and 4 * self._used <= self._count:
            self._resize(self._count // 2, RESIDENT, paged=False)
        if self._page_count > _SPARE * _FIRST_PAGES and 4 * self._used_pages <= self._page_count:
            self._resize(self._page_count // 2, self._page_count, paged=True)

    @property
    def _used(self) -> int:
        return max((slot.index + 1 for slot in self._taken), default=0)

    @property
    def _used_pages(self) -> int:
        return max((page + 1 for slot in self._taken for page in slot.pages), default=0)

    def trim(self) -> None:
        """Free the memory of unused slots and pages at the end."""
        self._resize(min(self._count, max(1, self._used)), self._count, paged=False)
        self._resize(min(self._page_count, max(_FIRST_PAGES, self._used_pages)), self._page_count, paged=True)

    def reserve(self, slot: Slot, rows: int) -> None:
        """Give a slot pages for a number of rows."""
        wanted = -(-rows // self.page) if self._spec.rows else 0
        while len(self._free_pages) < wanted - len(slot.pages):
            most = min(self._gpu.binding_bytes // self._page_bytes(t) for t in self._spec.rows)
            self._resize(max(_FIRST_PAGES, 2 * self._page_count), most, paged=True)
        if len(slot.pages) < wanted:
            first = len(slot.pages)
            slot.pages += [heapq.heappop(self._free_pages) for _ in range(first, wanted)]
            at = self.tables + slot.index * self.most_pages + first
            self._gpu.write(self.control, np.array(slot.pages[first:], np.uint32), 4 * at)

    def copy(self, source: Slot, target: Slot, rows: int) -> None:
        """Copy a state with its first `rows` rows, for which the target must have pages."""
        pairs = [(self.region(source, t), self.region(target, t)) for t in self._spec.recurrent]
        for t in self._spec.rows:
            pairs += zip(self.rows(source, t, 0, rows), self.rows(target, t, 0, rows), strict=True)
        largest = max((a.size for a, _ in pairs), default=0)
        if self._scratch is None or self._scratch.size < largest:
            self._scratch = self._gpu.region(largest)
        copies, between = [], self._scratch.buffer  # no copy's ends may lie in one buffer
        for a, b in pairs:
            copies.append(Copy(a.buffer, a.offset, between, 0, a.size))
            copies.append(Copy(between, 0, b.buffer, b.offset, b.size))
        self._gpu.recorder.submit([], copies)

    def region(self, slot: Slot, t: TensorSpec) -> Region:
        """Return the place of a slot's recurrent tensor."""
        size = t.nbytes_at(0)
        return Region(self._buffers[t.name].buffer, slot.index * size, size)

    def rows(self, slot: Slot, t: TensorSpec, first: int, last: int) -> Iterator[Region]:
        """Yield the places of rows [first, last) of a slot's key or value tensor, page by page."""
        size = row_bytes(t)
        while first < last:
            count = min(last, (first // self.page + 1) * self.page) - first
            at = slot.pages[first // self.page] * self.page + first % self.page
            yield Region(self._buffers[t.name].buffer, at * size, count * size)
            first += count

    def write(self, slot: Slot, first: int, last: int, rows: Mapping[str, NDArray[Any]]) -> None:
        """Write canonical rows [first, last) of every key and value tensor, each (kv_heads, rows, head_dim)."""
        for t in self._spec.rows:
            stored = narrowed(rows[t.name], t.numpy_dtype).transpose(1, 0, 2)  # (n, G, D)
            for region in self.rows(slot, t, first, last):
                count = region.size // row_bytes(t)
                self._gpu.write(region, np.ascontiguousarray(stored[:count], t.numpy_dtype))
                stored = stored[count:]

    def _resize(self, wanted: int, most: int, *, paged: bool) -> None:
        """Make room for `wanted` slots or pages; where that is not to be had, for one more than there are."""
        have = self._page_count if paged else self._count
        count = min(wanted, most)
        if wanted == have:
            return
        if have >= most and wanted > have:
            what = "pages of 256 rows" if paged else "states"
            raise GraphError(f"{have} {what} are all that {self._gpu.found.name} can bind at once")
        try:
            self._move(count, paged=paged)
        except GraphError:
            if count > have + 1:
                count = have + 1
                self._move(count, paged=paged)
            elif count > have:
                raise
        free = self._free_pages if paged else self._free
        free[:] = sorted([i for i in free if i < count] + list(range(have, count)))
        if paged:
            self._page_count = count
        else:
            self._count = count

    def _move(self, count: int, *, paged: bool) -> None:
        """Move tensors into buffers for `count` slots or pages, one by one, as memory may be short.

        Where it ends for one of them, those before it have room that is not used.
        """
        self._groups.clear()
        self._made.clear()
        for t in self._spec.rows if paged else self._spec.recurrent:
            size = count * (self._page_bytes(t) if paged else t.nbytes_at(0))
            before = self._buffers.get(t.name)
            self._buffers[t.name] = after = self._gpu.region(size)
            if before is not None:
                copy = Copy(before.buffer, 0, after.buffer, 0, min(before.size, after.size))
                self._gpu.recorder.submit([], [copy])
                self._gpu.recorder.poll()  # what was there before is free again

    def _page_bytes(self, t: TensorSpec) -> int:
        return self.page * row_bytes(t)

    # calls

    def feed(self, slots: Sequence[Slot], positions: Sequence[int], tokens: NDArray[np.int32]) -> None:
        """Write the input of the next dispatches: a slot and the tokens of a prefill, or slots with one token each."""
        streams = self._words[:CONTROL].reshape(STREAMS, 4)
        for i, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            streams[i, :3] = position, len(tokens), slot.index
        self._words[CONTROL : CONTROL + len(tokens)] = tokens
        self._gpu.write(self.control, self._words[: CONTROL + len(tokens)])

    def step(self, ops: Sequence[Op], count: int, parts: int) -> list[Dispatch]:
        """Return the cached dispatches of a decode step of `count` streams. parts: pages of the longest cache."""
        key = (id(ops), count, parts)
        if key not in self._made:
            self._made[key] = ops, self.dispatches(ops, count, parts)
        return self._made[key][1]

    def dispatches(self, ops: Sequence[Op], count: int, parts: int = 1) -> list[Dispatch]:
        """Make the dispatches of some operations over `count` rows of x: tokens or streams."""
        made = []
        for op in ops:
            x, y = op.grid
            if op.tokens:
                y = -(-count // op.tokens)
            if op.high is not None:
                y = op.high(count)
            if op.paged:
                y *= parts
            made.append(dispatch(op.kernel.pipeline, op.group0, self._group(op.kernel, op.layer), x, y))
        return made

    def _group(self, kernel: Kernel, layer: int) -> Any:
        """Return bind group 1 of a kernel over these slots; None if the kernel has none."""
        if len(kernel.layouts) < 2:
            return None
        key = (id(kernel.layouts[1]), layer, *kernel.bindings[1])
        if key not in self._groups:
            state = {
                name: self._buffers[f"{kind}_{layer}"] for name, kind in _BINDINGS.items() if name in kernel.bindings[1]
            }
            self._groups[key] = self._gpu.bound(kernel, 1, {"CTL": self.control, **state})
        return self._groups[key]


def row_bytes(t: TensorSpec) -> int:
    return t.shape[0] * t.shape[1] * t.numpy_dtype.itemsize
