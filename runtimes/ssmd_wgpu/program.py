"""The calls of a Program over a model on a GPU: handles whose state stays there.

A handle's state is changed in place. A step reads the weights once for all its handles, and sums for each in the order
that it would have alone. Only tokens go to the device, only logits come back. Handles beyond what is kept on the device
wait in host memory, the one used least recently first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import Part, State
from ssmd.runtime.checked import CheckedProgram
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.protocol import FormTime, Logits, RuntimeUnavailable, StateLost
from ssmd_wgpu.handles import Handles, WgpuHandle
from ssmd_wgpu.model import Model
from ssmd_wgpu.slots import STREAMS

if TYPE_CHECKING:
    from ssmd.model.artifact import Manifest

log = logging.getLogger(__name__)
_AT_ONCE = 64  # dispatches of a prefill that are submitted together


class WgpuProgram(CheckedProgram[WgpuHandle]):
    """A loaded artifact on a GPU, as a Program."""

    wide = True  # attention reads rows of the cache alone, 64 at a time; Mamba-2's chunks are 32 tokens of the call

    def __init__(self, load: Callable[[], Model], manifest: Manifest) -> None:
        """`load`: the artifact onto a device that is opened for it; once more when that device is lost."""
        super().__init__(manifest)
        self.threads = 1  # of the processor: it only records
        self._load_model = load
        self._loaded: Model | None = load()
        self.producer = self._loaded.producer
        self.handles = Handles(self.spec)

    def step_cost(self, streams: int) -> float:
        model = self._loaded
        return super().step_cost(streams) if model is None else model.step_cost(streams)

    def form_times(self) -> list[FormTime]:
        return [] if self._loaded is None else self._loaded.form_times

    # steps of the contract

    def _new(self, tokens: int) -> WgpuHandle:
        with self._device() as model:
            return self.handles.new(model, self, tokens)

    def _prefill(self, handle: WgpuHandle, ids: NDArray[np.int32]) -> Logits:
        with self._device() as model:
            slot = self.handles.at_hand(model, handle, len(ids))
            model.slots.feed([slot], [handle.position], ids)
            if len(ids) == 1:
                dispatches = model.step(1, len(slot.pages))
            else:
                dispatches = model.slots.dispatches(model.prefill(len(ids)), len(ids))
            # Not all at once: a driver treats work of several seconds as a hang, and the desktop freezes meanwhile.
            while len(dispatches) > _AT_ONCE:
                model.gpu.recorder.submit(dispatches[:_AT_ONCE])
                dispatches = dispatches[_AT_ONCE:]
            [row] = model.gpu.recorder.read(dispatches, [model.logits(0)])
        handle.position += len(ids)
        return row.view(np.float32)

    def _decode(self, handles: Sequence[WgpuHandle], ids: NDArray[np.int32], logits: Logits) -> None:
        first = 0
        while first < len(handles):
            with self._device() as model:
                most = min(STREAMS, self.handles.resident) if model.tiling.together else 1
                part = slice(first, first + most)
                self._step(model, handles[part], ids[part], logits[part])
            first = part.stop

    def _step(self, model: Model, handles: Sequence[WgpuHandle], ids: NDArray[np.int32], logits: Logits) -> None:
        slots = [self.handles.at_hand(model, handle, 1) for handle in handles]
        if any(handle.slot is not slot for handle, slot in zip(handles, slots, strict=True)):
            half = len(handles) // 2  # one took another's memory
            self._step(model, handles[:half], ids[:half], logits[:half])
            self._step(model, handles[half:], ids[half:], logits[half:])
            return
        model.slots.feed(slots, [handle.position for handle in handles], ids)
        dispatches = model.step(len(slots), max(len(slot.pages) for slot in slots))
        rows = model.gpu.recorder.read(dispatches, [model.logits(i) for i in range(len(slots))], probed=True)
        for i, row in enumerate(rows):
            logits[i] = row.view(np.float32)
        for handle in handles:
            handle.position += 1

    def _save(self, handle: WgpuHandle, since: int) -> State:
        with self._device() as model:
            return self.handles.read(model, handle, since)

    def _fill(self, handle: WgpuHandle, recurrent: Mapping[str, NDArray[Any]], rows: Part | None) -> None:
        slot = handle.slot
        assert slot is not None  # a handle that is not whole is never sent away
        with self._device() as model:
            for t in self.spec.recurrent:
                if t.name in recurrent:
                    array = np.ascontiguousarray(recurrent[t.name], np.float32)
                    model.gpu.write(model.slots.region(slot, t), array)
            if rows is not None:
                model.slots.write(slot, rows.first, rows.last, rows.tensors)

    def _clone(self, handle: WgpuHandle) -> WgpuHandle:
        with self._device() as model:
            slot = self.handles.at_hand(model, handle, 0)
            twin = self.handles.new(model, self, handle.position, keep=handle)
            assert twin.slot is not None
            model.slots.copy(slot, twin.slot, handle.position)
        return twin

    def _release(self, handle: WgpuHandle) -> None:
        self.handles.release(self._loaded, handle)

    def _close(self) -> None:
        self.handles.forget()
        self._loaded = None

    # what is inside

    @contextmanager
    def _device(self) -> Iterator[Model]:
        """Yield the model on its device. If the device is lost meanwhile, it is loaded again, and StateLost raised."""
        try:
            if self._loaded is None:
                self._loaded = self._load_model()
            yield self._loaded
        except GraphError as err:
            if self._loaded is not None and self._loaded.gpu.answers():
                raise
            log.exception("the device is lost; the program is loaded again")
            self.handles.forget()
            self._loaded = None
            try:
                self._loaded = self._load_model()
                self.producer = self._loaded.producer  # another adapter may have taken its place
            except (GraphError, RuntimeUnavailable) as again:
                raise StateLost(f"the GPU is lost ({again}); see ssmd doctor") from err
            raise StateLost(
                "the GPU was lost and is open again: ask once more, it goes on from what is stored"
            ) from err
