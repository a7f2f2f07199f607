"""The calls of a Program over a model on a GPU: handles whose state stays there.

A handle's state is changed in place, by kernels that read nothing of other handles. Only tokens go to the device, only
logits come back. Handles beyond what is kept on the device wait in host memory, the one used least recently first.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssmd.flat.graph import GraphError
from ssmd.runtime import Handle, Logits, ProgramError, RuntimeUnavailable, StateLost
from ssmd.state import DTYPES, Part, State, StateError
from ssmd_wgpu.handles import Handled, Handles, Missing
from ssmd_wgpu.model import Model

if TYPE_CHECKING:
    from ssmd.artifact import Manifest

log = logging.getLogger(__name__)
_FLOAT16_MAX = 65504.0
_AT_ONCE = 64  # dispatches of a prefill that are submitted together


class WgpuProgram:
    """A loaded artifact. Every method may be called from any thread; calls wait for one another."""

    def __init__(self, load: Callable[[], Model], manifest: Manifest) -> None:
        """`load`: the artifact onto a device that is opened for it; once more when that device is lost."""
        self.spec = manifest.spec
        self.buckets = manifest.buckets
        self.context = manifest.context
        self.vocabulary = manifest.vocabulary
        self.threads = 1  # of the processor: it only records
        self._load_model = load
        self._loaded: Model | None = load()
        self.producer = self._loaded.producer
        self._lock = threading.RLock()
        self._closed = False
        self.handles = Handles(self.spec, self.context)

    # calls of the contract

    def new_state(self) -> Handle:
        with self._lock, self._device() as model:
            return self.handles.new(model, self, 0)

    def prefill(self, handle: Handle, tokens: Sequence[int]) -> Logits:
        ids = self._check_tokens(tokens)
        if not 1 <= len(ids) <= self.buckets[-1]:
            raise ProgramError(f"a prefill takes 1 to {self.buckets[-1]} tokens, not {len(ids)}")
        with self._lock:
            self._check_handle(handle, len(ids))
            with self._device() as model:
                slot = self.handles.at_hand(model, handle, len(ids))
                slot.feed(handle.position, ids)
                head, region = model.head(0)
                ops = [*model.embed, *model.prefill(len(ids)), *head]
                dispatches = slot.dispatches(ops, len(ids))
                # Not all at once: a driver takes what runs for seconds for a hang, and no window moves meanwhile.
                while len(dispatches) > _AT_ONCE:
                    model.gpu.recorder.submit(dispatches[:_AT_ONCE])
                    dispatches = dispatches[_AT_ONCE:]
                [row] = model.gpu.recorder.read(dispatches, [region])
            handle.position += len(ids)
            return row.view(np.float32)

    def decode(self, handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        ids = self._check_tokens(tokens)
        if not len(handles) == len(ids) >= 1:
            raise ProgramError(f"decode takes one token for each handle, not {len(ids)} for {len(handles)}")
        if len({id(h) for h in handles}) != len(handles):
            raise ProgramError("decode was given the same handle twice")
        with self._lock:
            for handle in handles:
                self._check_handle(handle, 1)
            logits = np.empty((len(handles), self.vocabulary), np.float32)
            for first in range(0, len(handles), self.handles.resident):  # no more than can be on the device at once
                part = slice(first, first + self.handles.resident)
                with self._device() as model:
                    self._decode(model, handles[part], ids[part], logits[part])
            return logits

    def _decode(self, model: Model, handles: Sequence[Handled], ids: NDArray[np.int32], logits: Logits) -> None:
        dispatches, regions = [], []
        slots = [self.handles.at_hand(model, handle, 1) for handle in handles]
        if any(handle.slot is not slot for handle, slot in zip(handles, slots, strict=True)):
            half = len(handles) // 2  # one took another's memory
            self._decode(model, handles[:half], ids[:half], logits[:half])
            self._decode(model, handles[half:], ids[half:], logits[half:])
            return
        heads = [model.head(row) for row in reversed(range(len(handles)))][::-1]  # the last one makes room
        for handle, slot, (head, region), i in zip(handles, slots, heads, range(len(ids)), strict=True):
            slot.feed(handle.position, ids[i : i + 1])
            if not slot.decode:
                slot.decode = slot.dispatches([*model.embed, *model.decode], 1)
            dispatches += slot.decode
            dispatches += slot.dispatches(head, 1)
            regions.append(region)
        for i, row in enumerate(model.gpu.recorder.read(dispatches, regions, probed=True)):
            logits[i] = row.view(np.float32)
        for handle in handles:
            handle.position += 1

    def position(self, handle: Handle) -> int:
        with self._lock:
            self._check_handle(handle, 0, whole=False)
            position: int = handle.position
            return position

    def save(self, handle: Handle, since: int = 0) -> State:
        with self._lock:
            self._check_handle(handle, 0)
            if not 0 <= since <= handle.position:
                raise ProgramError(f"cannot save rows since {since} of a state at position {handle.position}")
            with self._device() as model:
                return self.handles.read(model, handle, since)

    def restore(self, state: State) -> Handle:
        if state.since:
            raise StateError(f"a state that holds rows since {state.since} only cannot be restored: all are needed")
        state.check(self.spec)
        handle = self.reserve(state.position)
        self.fill(handle, Part(0, state.position, state.tensors))
        return handle

    def reserve(self, position: int) -> Handle:
        if position < 0 or (self.context is not None and position > self.context):
            raise StateError(f"the state has {position} tokens, the context is {self.context}")
        with self._lock:
            with self._device() as model:
                handle = self.handles.new(model, self, position)
            handle.position = position if not self.spec.rows else 0
            handle.missing = Missing(position, {t.name for t in self.spec.recurrent})
            return handle

    def fill(self, handle: Handle, part: Part) -> None:
        part.check(self.spec)
        with self._lock:
            self._check_handle(handle, 0, whole=False)
            missing: Missing | None = handle.missing
            if missing is None:
                raise StateError("the handle is whole already")
            recurrent = part.tensors.keys() - self.spec.row_columns.keys()
            if strangers := recurrent - missing.recurrent:
                raise StateError(f"state tensors {sorted(strangers)} were given already")
            has_rows = part.last > part.first and bool(self.spec.rows)
            if has_rows and not (part.first == handle.position and part.last <= missing.position):
                raise StateError(
                    f"rows [{part.first}, {part.last}) do not fit: those from {handle.position} to {missing.position} "
                    "are missing"
                )
            slot = handle.slot
            assert slot is not None  # a handle that is not whole is never sent away
            with self._device() as model:
                for name in recurrent:
                    model.gpu.write(slot.regions[name], np.ascontiguousarray(part.tensors[name], np.float32))
                for t, region in zip(self.spec.rows, slot.row_regions(part.first, part.last), strict=True):
                    if has_rows:
                        rows = part.tensors[t.name].transpose(1, 0, 2)  # (n, G, D) as it stands there
                        if t.numpy_dtype != DTYPES["float32"] and rows.dtype == DTYPES["float32"]:
                            rows = rows.clip(-_FLOAT16_MAX, _FLOAT16_MAX)
                        model.gpu.write(region, np.ascontiguousarray(rows, t.numpy_dtype))
            if has_rows:
                handle.position = part.last
            missing.recurrent -= recurrent
            if handle.position == missing.position and not missing.recurrent:
                handle.missing = None

    def clone(self, handle: Handle) -> Handle:
        with self._lock:
            self._check_handle(handle, 0)
            with self._device() as model:
                slot = self.handles.at_hand(model, handle, 0)
                twin = self.handles.new(model, self, handle.position, keep=handle)
                assert twin.slot is not None
                twin.slot.take(slot, handle.position)
            twin.position = handle.position
            return twin

    def release(self, handle: Handle) -> None:
        with self._lock:
            if not isinstance(handle, Handled) or handle.program is not self:
                raise ProgramError("the handle belongs to another program")
            self.handles.release(handle)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.handles.forget()
            self._loaded = None

    # what is inside

    @contextmanager
    def _device(self) -> Iterator[Model]:
        """The model on its device. If that is lost inside, it is loaded again, and StateLost raised."""
        if self._closed:
            raise ProgramError("the program is closed")
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

    def _check_tokens(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Raises ProgramError for what is no id of the vocabulary, before anything runs."""
        try:
            ids = [operator.index(t) for t in tokens]
        except TypeError as err:
            raise ProgramError(f"token ids must be whole numbers ({err})") from err
        for i in ids:
            if not 0 <= i < self.vocabulary:
                raise ProgramError(f"token id {i} is outside the vocabulary of {self.vocabulary}")
        return np.array(ids, np.int32)

    def _check_handle(self, handle: Handle, more: int, *, whole: bool = True) -> None:
        if self._closed:
            raise ProgramError("the program is closed")
        if not isinstance(handle, Handled) or handle.program is not self:
            raise ProgramError("the handle belongs to another program")
        if handle.lost:
            raise StateLost("this state was lost with its device")
        if handle.slot is None and handle.away is None:
            raise ProgramError("the handle was released")
        if whole and handle.missing is not None:
            raise ProgramError("the handle is not whole: parts of its state are missing")
        if self.context is not None and handle.position + more > self.context:
            raise ProgramError(
                f"{handle.position} tokens are in the context of {self.context}: there is no room for {more} more"
            )
