"""Handles, the slots they have on the device, and the ones that wait in host memory because there are too many."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from ssmd.model.state import State, StateSpec
from ssmd.runtime.checked import CheckedHandle
from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu.model import Model
from ssmd_wgpu.slots import RESIDENT, Slot


@dataclass(eq=False, slots=True)
class WgpuHandle(CheckedHandle):
    """A handle. With a slot, it is on the device; with `away`, its state is in host memory; with neither, it was
    released or lost.
    """

    slot: Slot | None
    away: State | None = None


class Handles:
    """The handles of one model on a device. Every call may raise GraphError."""

    def __init__(self, spec: StateSpec) -> None:
        self._spec = spec
        self.resident = RESIDENT
        self.live: OrderedDict[WgpuHandle, None] = OrderedDict()  # those on the device, the one used last is the last

    def new(self, model: Model, program: object, tokens: int, keep: WgpuHandle | None = None) -> WgpuHandle:
        """Make a handle with room for `tokens` tokens. `keep` stays on the device."""
        handle = WgpuHandle(program, self._new_slot(model, tokens, keep))
        self.live[handle] = None
        return handle

    def at_hand(self, model: Model, handle: WgpuHandle, more: int) -> Slot:
        """Return the handle's slot, copied back to the device if needed, with room for `more` tokens."""
        if handle.slot is None:
            assert handle.away is not None
            slot = self._new_slot(model, handle.position + more, None)
            self._load(model, slot, handle.away)
            handle.slot, handle.away = slot, None
        self.live[handle] = None
        self.live.move_to_end(handle)
        self._reserve(model, handle.slot, handle.position + more, handle)
        return handle.slot

    def release(self, model: Model | None, handle: WgpuHandle) -> None:
        """Free a handle. `model`: where its slot is, if that is still there."""
        self.live.pop(handle, None)
        slot, handle.slot, handle.away = handle.slot, None, None
        if slot is not None and model is not None:
            model.slots.give(slot)

    def forget(self) -> None:
        """Drop all slots on the device, which is lost or about to be closed."""
        for handle in self.live:
            handle.slot, handle.lost = None, True
        self.live.clear()

    def read(self, model: Model, handle: WgpuHandle, since: int) -> State:
        """Read a canonical copy of the state with the rows from `since` on."""
        position = handle.position
        if handle.away is not None:
            rows = {t.name: handle.away.tensors[t.name][:, since:] for t in self._spec.rows}
            return State(position, since, {**handle.away.tensors, **rows})
        slot = handle.slot
        assert slot is not None
        tensors = [*self._spec.recurrent, *self._spec.rows]
        regions = [[model.slots.region(slot, t)] for t in self._spec.recurrent]
        regions += [list(model.slots.rows(slot, t, since, position)) for t in self._spec.rows]
        arrays = {}
        for t, raw in zip(tensors, model.gpu.recorder.gathered(regions), strict=True):
            whole = raw.view(t.numpy_dtype)
            if t.recurrent:
                arrays[t.name] = whole.reshape(t.shape)
            else:
                arrays[t.name] = whole.reshape(position - since, *t.shape).transpose(1, 0, 2)
            arrays[t.name].flags.writeable = False
        return State(position, since, arrays)

    def _load(self, model: Model, slot: Slot, state: State) -> None:
        for t in self._spec.recurrent:
            model.gpu.write(model.slots.region(slot, t), np.ascontiguousarray(state.tensors[t.name]))
        rows = {t.name: state.tensors[t.name] for t in self._spec.rows}
        model.slots.write(slot, 0, state.position, rows)

    def _new_slot(self, model: Model, tokens: int, keep: WgpuHandle | None) -> Slot:
        while len(self.live) >= self.resident and self._send_away(model, keep):
            pass
        while True:
            try:
                slot = model.slots.take()
                break
            except GraphError:
                if not self._send_away(model, keep):
                    raise
        try:
            self._reserve(model, slot, tokens, keep)
        except GraphError:
            model.slots.give(slot)
            raise
        return slot

    def _reserve(self, model: Model, slot: Slot, tokens: int, keep: WgpuHandle | None) -> None:
        while True:
            try:
                model.slots.reserve(slot, tokens)
                return
            except GraphError:
                if not self._send_away(model, keep):
                    raise

    def _send_away(self, model: Model, keep: WgpuHandle | None) -> bool:
        """Move the least recently used whole handle off the device. Returns False if no handle can move."""
        for handle in self.live:
            if handle.missing is None and handle is not keep and handle.slot is not None:
                handle.away = self.read(model, handle, 0)
                slot, handle.slot = handle.slot, None
                del self.live[handle]
                model.slots.give(slot)
                return True
        return False
