"""Handles, the slots they have on the device, and the ones that wait in host memory because there are too many."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from ssmd.model.state import State, StateSpec
from ssmd.runtime.checked import Held
from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu.model import Model
from ssmd_wgpu.slots import Slot

FIRST_CAPACITY = 512  # tokens that a handle's caches have room for at first; twice as many whenever that is too few
RESIDENT = 16  # handles on the device at once
_SPARE = 4  # slots of released handles that are kept for the next ones


@dataclass(eq=False, slots=True)
class Handled(Held):
    """A handle. With a slot, it is on the device; with `away`, its state is in host memory; with neither, it was
    released or lost.
    """

    slot: Slot | None
    away: State | None = None


class Handles:
    """The handles of one model on a device. Every call may raise GraphError."""

    def __init__(self, spec: StateSpec, context: int | None) -> None:
        self._spec, self._context = spec, context
        self.resident = RESIDENT
        self.live: OrderedDict[Handled, None] = OrderedDict()  # those on the device, the one used last is the last
        self.spare: list[Slot] = []

    def new(self, model: Model, program: object, tokens: int, keep: Handled | None = None) -> Handled:
        """Make a handle with room for `tokens` tokens. `keep` stays on the device."""
        handle = Handled(program, self._new_slot(model, tokens, keep))
        self.live[handle] = None
        return handle

    def at_hand(self, model: Model, handle: Handled, more: int) -> Slot:
        """The handle's slot, brought back to the device if need be, with room for `more` tokens."""
        if handle.slot is None:
            assert handle.away is not None
            slot = self._new_slot(model, handle.position + more, None)
            self._load(model, slot, handle.away)
            handle.slot, handle.away = slot, None
        self.live[handle] = None
        self.live.move_to_end(handle)
        if self._spec.rows and handle.position + more > handle.slot.capacity:
            handle.slot.grow(self._capacity(handle.position + more), handle.position)
        return handle.slot

    def release(self, handle: Handled) -> None:
        self.live.pop(handle, None)
        slot, handle.slot, handle.away = handle.slot, None, None
        if slot is not None:
            self._keep(slot)

    def forget(self) -> None:
        """Forget all that is on the device, which is gone, or about to go."""
        for handle in self.live:
            handle.slot, handle.lost = None, True
        self.live.clear()
        self.spare.clear()

    def read(self, model: Model, handle: Handled, since: int) -> State:
        """Read a canonical copy of the state with the rows from `since` on."""
        position = handle.position
        if handle.away is not None:
            rows = {t.name: handle.away.tensors[t.name][:, since:] for t in self._spec.rows}
            return State(position, since, {**handle.away.tensors, **rows})
        slot = handle.slot
        assert slot is not None
        tensors = [*self._spec.recurrent, *(self._spec.rows if position > since else ())]
        regions = slot.recurrent_regions()
        if position > since:
            regions += slot.row_regions(since, position)
        arrays = {t.name: np.empty((t.shape[0], 0, t.shape[1]), t.numpy_dtype) for t in self._spec.rows}
        for t, raw in zip(tensors, model.gpu.recorder.read([], regions) if regions else [], strict=True):
            if t.recurrent:
                arrays[t.name] = raw.view(t.numpy_dtype).reshape(t.shape)
            else:
                arrays[t.name] = raw.view(t.numpy_dtype).reshape(position - since, *t.shape).transpose(1, 0, 2)
            arrays[t.name].flags.writeable = False
        return State(position, since, arrays)

    def _load(self, model: Model, slot: Slot, state: State) -> None:
        for t in self._spec.recurrent:
            model.gpu.write(slot.regions[t.name], np.ascontiguousarray(state.tensors[t.name]))
        for t, region in zip(self._spec.rows, slot.row_regions(0, state.position), strict=True):
            model.gpu.write(region, np.ascontiguousarray(state.tensors[t.name].transpose(1, 0, 2)))

    def _new_slot(self, model: Model, tokens: int, keep: Handled | None) -> Slot:
        while len(self.live) >= self.resident and self._send_away(model, keep):
            pass
        capacity = self._capacity(tokens)
        fitting = [slot for slot in self.spare if slot.capacity >= capacity]
        if fitting:
            slot = min(fitting, key=lambda s: s.capacity)
            self.spare.remove(slot)
            slot.clear()
            return slot
        while True:
            try:
                return Slot(model.gpu, self._spec, model.most_tokens, capacity)
            except GraphError:
                if self.spare:
                    self.spare.clear()
                elif not self._send_away(model, keep):
                    raise

    def _capacity(self, tokens: int) -> int:
        if self._context is None:
            return 0
        capacity = FIRST_CAPACITY
        while capacity < tokens:
            capacity *= 2
        return min(capacity, self._context)

    def _send_away(self, model: Model, keep: Handled | None) -> bool:
        """Take the whole handle that was used least recently off the device. False if there is none."""
        for handle in self.live:
            if handle.missing is None and handle is not keep and handle.slot is not None:
                handle.away = self.read(model, handle, 0)
                slot, handle.slot = handle.slot, None
                del self.live[handle]
                self._keep(slot)
                return True
        return False

    def _keep(self, slot: Slot) -> None:
        if len(self.spare) < _SPARE:
            self.spare.append(slot)
