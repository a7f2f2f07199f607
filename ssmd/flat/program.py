"""The calls of a Program over the signatures of a graph with flat IO (ssmd/authoring/flat.py), whatever runs it.

A step reads a handle's recurrent state from one arena and writes it into the other; committing the step swaps them, so
nothing is copied. Attention layers put out only their new rows, which the host appends to the caches.

There may be signatures for several capacities of the caches (tiers), as each attends over all slots of its own: a step
runs in the smallest one that has room for the tokens after it. A conversation moves up by having its rows copied, and
which signature computes a token depends on nothing but its position and its call.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssmd.flat.buffers import Snapshots, carve
from ssmd.flat.graph import Array, Call, Graph, GraphError
from ssmd.flat.signatures import check_signatures, signature_name
from ssmd.flat.slot import Slot, recurrent_tensors, row_groups
from ssmd.flat.step import Step
from ssmd.runtime import Handle, Logits, ProgramError
from ssmd.state import Part, State, StateError

if TYPE_CHECKING:
    from ssmd.artifact import Manifest

_SPARE_BYTES = 48 << 20  # idle snapshots
_SPARE_SLOT_BYTES = 192 << 20  # memory of released handles that is kept for the next ones; one is kept in any case
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


@dataclass
class _Missing:
    """What a reserved handle waits for: KV rows up to `position`, and these recurrent tensors."""

    position: int
    recurrent: set[str]


class _Handle:
    """`side` is the arena that holds the state now. A released handle has no slot, a whole one misses nothing."""

    __slots__ = ("missing", "position", "program", "side", "slot")

    def __init__(self, program: FlatProgram, slot: Slot) -> None:
        self.program = program
        self.slot: Slot | None = slot
        self.position = 0
        self.side = 0
        self.missing: _Missing | None = None


class FlatProgram:
    """A loaded artifact. Every method may be called from any thread; calls wait for one another.

    `pad_token` fills the part of a bucket that has no token of the prompt. It may be any id of the vocabulary and
    never changes a result: the contract suite sets it to show that.
    """

    def __init__(self, graph: Graph, manifest: Manifest, producer: str, threads: int) -> None:
        self.spec = manifest.spec
        self.buckets = manifest.buckets
        self.context = manifest.context
        self.vocabulary = manifest.vocabulary
        self.producer = producer
        self.threads = threads
        self.pad_token = 0
        if len({t.dtype for t in self.spec.rows}) > 1:
            raise ProgramError("keys and values of more than one dtype are not supported; build the artifact again")
        self._tiers = manifest.tiers or (manifest.context or 1,)
        check_signatures(graph.signatures, manifest, self.spec, self._tiers)
        self.graph = graph
        self._groups = row_groups(self.spec)
        self._steps = [Step(length, self.vocabulary, self._groups) for length in sorted({1, *self.buckets})]
        self._lock = threading.Lock()
        self._closed = False
        self._slots: set[Slot] = set()  # of live handles
        self._spare: list[Slot] = [self._make_slot(self._tiers[0])]  # the one used last is the last
        arena = self._spare[0].arenas[0].nbytes
        self._snapshots = Snapshots(arena, ready=2, spare_bytes=_SPARE_BYTES)

    # calls of the contract

    def new_state(self) -> Handle:
        with self._lock:
            return self._new_handle(0)[0]

    def prefill(self, handle: Handle, tokens: Sequence[int]) -> Logits:
        ids = self._check_tokens(tokens)
        if not 1 <= len(ids) <= self.buckets[-1]:
            raise ProgramError(f"a prefill takes 1 to {self.buckets[-1]} tokens, not {len(ids)}")
        with self._lock:
            slot = self._check_handle(handle, len(ids))
            step = next(s for s in self._steps if s.length >= len(ids))
            self._run(step, handle, slot, ids)
            self._commit(handle, len(ids))
            return step.logits.copy()

    def decode(self, handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        ids = self._check_tokens(tokens)
        if not len(handles) == len(ids) >= 1:
            raise ProgramError(f"decode takes one token for each handle, not {len(ids)} for {len(handles)}")
        if len({id(h) for h in handles}) != len(handles):
            raise ProgramError("decode was given the same handle twice")
        with self._lock:
            slots = [self._check_handle(h, 1) for h in handles]
            step = self._steps[0]
            logits = np.empty((len(handles), self.vocabulary), np.float32)
            for i, (handle, slot) in enumerate(zip(handles, slots, strict=True)):
                self._run(step, handle, slot, ids[i : i + 1])
                logits[i] = step.logits
            for handle in handles:  # all of them, or none if a run raised
                self._commit(handle, 1)
            return logits

    def position(self, handle: Handle) -> int:
        with self._lock:
            self._check_handle(handle, 0)
            position: int = handle.position
            return position

    def save(self, handle: Handle, since: int = 0) -> State:
        with self._lock:
            slot = self._check_handle(handle, 0)
            position = handle.position
            if not 0 <= since <= position:
                raise ProgramError(f"cannot save rows since {since} of a state at position {position}")
            tensors: dict[str, Array] = slot.canonical_rows(since, position)
            if self.spec.recurrent:
                copy = self._snapshots.copy(slot.arenas[handle.side])
                arrays = carve(recurrent_tensors(self.spec), copy)[1]
                for t in self.spec.recurrent:
                    array = arrays[t.name][0]
                    tensors[t.name] = array.T if t.channels_first else array
                    tensors[t.name].flags.writeable = False
            return State(position, since, tensors)

    def restore(self, state: State) -> Handle:
        if state.since:
            raise StateError(f"a state that holds rows since {state.since} only cannot be restored: all are needed")
        state.check(self.spec)
        if self.context is not None and state.position > self.context:
            raise StateError(f"the state has {state.position} tokens, the context is {self.context}")
        handle = self.reserve(state.position)
        self.fill(handle, Part(0, state.position, state.tensors))
        return handle

    def reserve(self, position: int) -> Handle:
        if position < 0 or (self.context is not None and position > self.context):
            raise StateError(f"the state has {position} tokens, the context is {self.context}")
        with self._lock:
            handle = self._new_handle(position)[0]
            handle.position = position if not self.spec.rows else 0
            handle.missing = _Missing(position, {t.name for t in self.spec.recurrent})
            return handle

    def fill(self, handle: Handle, part: Part) -> None:
        part.check(self.spec)
        with self._lock:
            slot = self._check_handle(handle, 0, whole=False)
            missing: _Missing | None = handle.missing
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
            for t in self.spec.recurrent:
                if t.name in recurrent:
                    array = part.tensors[t.name]
                    slot.recurrent[0][t.name][0] = array.T if t.channels_first else array
            if has_rows:
                slot.load_rows(part.tensors, part.first, part.last)
                handle.position = part.last
            missing.recurrent -= recurrent
            if handle.position == missing.position and not missing.recurrent:
                handle.missing = None

    def clone(self, handle: Handle) -> Handle:
        with self._lock:
            slot = self._check_handle(handle, 0)
            twin, copy = self._new_handle(handle.position)
            np.copyto(copy.arenas[0], slot.arenas[handle.side])
            copy.copy_rows(slot, handle.position)
            twin.position = handle.position
            return twin

    def release(self, handle: Handle) -> None:
        with self._lock:
            if not isinstance(handle, _Handle) or handle.program is not self:
                raise ProgramError("the handle belongs to another program")
            slot, handle.slot = handle.slot, None
            if slot is None:
                return
            self._slots.discard(slot)
            slot.clear()
            self._spare.append(slot)
            while len(self._spare) > 1 and sum(s.nbytes for s in self._spare) > _SPARE_SLOT_BYTES:
                largest = max(self._spare, key=lambda s: s.capacity)
                self._spare.remove(largest)
                self._forget(largest)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._slots.clear()
            self._spare.clear()
            self.graph.close()

    # what they are made of

    def _check_tokens(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Raises ProgramError naming the first value that is not an id of the vocabulary."""
        for token in tokens:
            try:
                known = 0 <= operator.index(token) < self.vocabulary
            except TypeError:
                known = False
            if not known:
                raise ProgramError(f"{token!r} is not a token id: ids are 0 to {self.vocabulary - 1}")
        return np.asarray(tokens, np.int32).reshape(len(tokens))

    def _check_handle(self, handle: Handle, tokens: int, *, whole: bool = True) -> Slot:
        """The slot of a handle that can take `tokens` more. Raises ProgramError."""
        if self._closed:
            raise ProgramError("the program is closed")
        if not isinstance(handle, _Handle) or handle.program is not self:
            raise ProgramError("the handle belongs to another program")
        if handle.slot is None:
            raise ProgramError("the handle was released")
        if whole and handle.missing is not None:
            raise ProgramError("the handle is not whole: parts of its state are still missing")
        if self.context is not None and handle.position + tokens > self.context:
            raise ProgramError(f"{handle.position} + {tokens} tokens do not fit into a context of {self.context}")
        return handle.slot

    def _tier(self, tokens: int) -> int:
        """The smallest capacity that has room for so many tokens in all."""
        return next(t for t in self._tiers if t >= tokens)

    def _make_slot(self, capacity: int) -> Slot:
        return Slot(self.spec, self._groups, self.context or 0, capacity)

    def _new_handle(self, tokens: int) -> tuple[_Handle, Slot]:
        """With room for so many tokens: memory that was used before is there at once, new memory is not."""
        if self._closed:
            raise ProgramError("the program is closed")
        capacity = self._tier(tokens) if self.spec.rows else self._tiers[0]
        slot = next((s for s in reversed(self._spare) if s.capacity == capacity), None)
        if slot is None:
            slot = self._make_slot(capacity)
        else:
            self._spare.remove(slot)
        self._slots.add(slot)
        return _Handle(self, slot), slot

    def _make_room(self, slot: Slot, tokens: int, rows: int) -> None:
        """Move a slot, with its first `rows` rows, up to the smallest tier that has room for `tokens` in all."""
        if self.spec.rows and tokens > slot.capacity:
            for block in slot.resize(self._tier(tokens), rows):
                self.graph.forget(block)

    def _forget(self, slot: Slot) -> None:
        slot.calls.clear()
        for block in slot.blocks:
            self.graph.forget(block)

    def _call(self, step: Step, slot: Slot, side: int) -> Call:
        """The signature bound to a slot, reading recurrent state on `side` and writing it on the other. Made once."""
        key = (step.length, side)
        if key not in slot.calls:
            inputs = {**step.arrays, **slot.recurrent[side], **slot.caches}
            outputs = {**step.arrays, **slot.recurrent[1 - side], **step.rows.arrays}
            slot.calls[key] = self.graph.bind(self._signature(step, slot), inputs, outputs)
        return slot.calls[key]

    def _signature(self, step: Step, slot: Slot) -> str:
        return signature_name(step.length, slot.capacity, self._tiers[0])

    def _run(self, step: Step, handle: _Handle, slot: Slot, ids: NDArray[np.int32]) -> None:
        """Compute a step without committing it: until then the handle is what it was."""
        count = len(ids)
        step.tokens[:count] = ids
        if count < step.length:
            step.tokens[count:] = self.pad_token
        step.pos[0] = handle.position
        step.n_valid[0] = count
        self._make_room(slot, handle.position + count, handle.position)
        self._call(step, slot, handle.side).run()
        slot.append(step.rows, handle.position, count)

    def _commit(self, handle: _Handle, count: int) -> None:
        handle.side ^= 1
        handle.position += count

    def self_test(self) -> None:
        """Show on this very model that the graph reads what numpy writes, and numpy what the graph writes.

        Two steps over the same memory with other contents must give what the runtime gives with memory of its own, bit
        for bit. Raises GraphError if not.
        """
        step, slot = self._steps[0], self._spare[0]
        call = self._call(step, slot, 0)
        outputs: dict[str, Array] = {"logits": step.arrays["logits"], **slot.recurrent[1], **step.rows.arrays}
        known = {**step.arrays, **slot.recurrent[0], **slot.caches}
        noise = np.random.default_rng(0)
        try:
            for token in (self.vocabulary - 1, 0):
                step.tokens[0], step.pos[0], step.n_valid[0] = token, 0, 1
                for array in slot.recurrent[0].values():
                    array[...] = noise.standard_normal(array.shape, np.float32) * 0.1
                for array in outputs.values():
                    array.fill(np.nan)
                call.run()
            for name, expected in self.graph.run_managed(self._signature(step, slot), known).items():
                if not np.isfinite(expected).all():
                    raise GraphError(f"its {name} are no numbers: the weights are damaged")
                if not np.array_equal(expected, outputs[name]):
                    raise GraphError(f"the self-test of shared memory failed at {name!r}")
        finally:
            slot.clear()
        slot.prepare()
