"""The calls of a Program over the signatures of a graph with flat IO (ssmd/authoring/flat.py), for any runtime.

If the graph can, a step writes a handle's recurrent state where it read it; a failed step then loses the state. If
not, it reads one arena and writes the other, and committing the step swaps them. Either way nothing is copied.
Attention layers put out only their new rows, which the host appends to the caches.

A step attends over all slots, so the caches may have several capacities (tiers). A step runs in the smallest one that
has room for the tokens after it. There is a signature for each tier, or one for any capacity, with an input that says
which slots count. A conversation moves up by a copy of its rows. The arithmetic of a token depends only on its
position and its call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssmd.model.state import Part, State
from ssmd.runtime.checked import CheckedHandle, CheckedProgram
from ssmd.runtime.hoststate.batches import Batch, Batches, LanesGraph, Notes, Stream
from ssmd.runtime.hoststate.buffers import Memory, Snapshots, carve
from ssmd.runtime.hoststate.graph import Array, Call, Graph, GraphError
from ssmd.runtime.hoststate.signatures import check_signatures, is_open, signature_name
from ssmd.runtime.hoststate.slot import NewRows, Slot, recurrent_tensors, row_groups
from ssmd.runtime.hoststate.step import Step
from ssmd.runtime.protocol import Logits, ProgramError, StateLost

if TYPE_CHECKING:
    from ssmd.model.artifact import Manifest

_SPARE_BYTES = 96 << 20  # most bytes of idle snapshots
_NOISE = 65_537  # random numbers that the self-test repeats: as many as a state has would take 0.1 s
_SPARE_SLOT_BYTES = 192 << 20  # most bytes of released handles that are kept for new ones; one is kept in any case


@dataclass(eq=False, slots=True)
class _Handle(CheckedHandle):
    """A handle. side: the arena that holds the state now. A released handle has no slot."""

    slot: Slot
    side: int = 0


class FlatProgram(CheckedProgram[_Handle]):
    """A loaded artifact whose state lies in the host's memory, as a Program.

    pad_token: fills the rest of a bucket after the prompt's tokens. It may be any id of the vocabulary and never
    changes a result: the contract suite sets it to test that.
    """

    def __init__(
        self,
        graph: Graph,
        manifest: Manifest,
        producer: str,
        threads: int,
        lanes: Callable[[int], LanesGraph] | None = None,
        sizes: Sequence[int] = (),
        notes: Notes | None = None,
    ) -> None:
        """lanes: opens the graph of a decode step for a number of streams. sizes: the numbers that it supports.

        notes: results of earlier trials of these graphs.
        """
        super().__init__(manifest)
        self.producer = producer
        self.threads = threads
        self.pad_token = 0
        if len({t.dtype for t in self.spec.rows}) > 1:
            raise ProgramError("keys and values of more than one dtype are not supported; build the artifact again")
        self._tiers = manifest.tiers or (manifest.context or 1,)
        check_signatures(graph.signatures, manifest, self.spec, self._tiers)
        self.graph = graph
        self.open_capacity = is_open(graph.signatures)
        self.any_capacity = self.open_capacity or graph.any_capacity
        self._capacity = 0  # capacity of the last handle in the last step of several
        self._groups = row_groups(self.spec)
        self._in_place = graph.in_place and bool(self.spec.recurrent)
        self._began = False  # True once a step has begun to write
        self._steps = [Step(length, self.vocabulary, self._groups) for length in sorted({1, *self.buckets})]
        self._slots: set[Slot] = set()  # slots of live handles
        self._spare: list[Slot] = [self._make_slot(self._tiers[0])]  # the most recently used one is last
        arena = self._spare[0].arenas[0].nbytes
        self._snapshots = Snapshots(arena, ready=1, spare_bytes=_SPARE_BYTES)
        self._open_lanes = lanes
        self._idle: Slot | None = None  # for lanes without a stream
        self.batches = Batches(sizes, self._make_batch, self._scratch, self._alone, self._lock, notes)

    def close(self) -> None:
        with self._lock:
            self.batches.close()
        self.batches.join()  # before closing the graph that their graphs depend on
        super().close()

    def prepare(self) -> None:
        """Open and try all batches."""
        self.batches.open_all()

    def step_cost(self, streams: int) -> float:
        return self.batches.step_cost(streams)

    # steps of the contract

    def _new(self, tokens: int) -> _Handle:
        """Return a handle, in a spare slot if one fits: used memory has its pages already, new memory does not."""
        capacity = self._tier(tokens) if self.spec.rows else self._tiers[0]
        spare = [s for s in reversed(self._spare) if s.caches.has_room(capacity)]
        slot = next((s for s in spare if s.caches.capacity == capacity), spare[0] if spare else None)
        if slot is None:
            slot = self._make_slot(capacity)
            slot.begin()
        else:
            self._fit(slot, capacity, 0)
            slot.begin()
            self._spare.remove(slot)  # only now: after a failure the slot is still spare, and known to the graph
        self._slots.add(slot)
        return _Handle(self, slot)

    def _prefill(self, handle: _Handle, ids: NDArray[np.int32]) -> Logits:
        step = next(s for s in self._steps if s.length >= len(ids))
        with self._at_stake([handle]):
            self._run(step, handle, ids)
        self._commit(handle, len(ids))
        return step.logits.copy()

    def _decode(self, handles: Sequence[_Handle], ids: NDArray[np.int32], logits: Logits) -> None:
        for handle in handles:  # for all handles, before a step that writes in place computes any of them
            self._make_room(handle.slot, handle.position + 1, handle.position)
        step, order = self._steps[0], self._in_order(handles) if len(handles) > 1 else [0]
        with self._at_stake(handles):
            for lanes, seated in self.batches.parts(len(handles)):
                chosen, order = order[:seated], order[seated:]
                streams = [(handles[i], int(ids[i])) for i in chosen]
                if lanes > 1 and self._run_together(lanes, streams, [logits[i] for i in chosen]):
                    continue
                for i in chosen:
                    self._run(step, handles[i], ids[i : i + 1])
                    logits[i] = step.logits
        for handle in handles:  # all of them, or none if a call raised
            self._commit(handle, 1)

    def _save(self, handle: _Handle, since: int) -> State:
        slot = handle.slot
        tensors: dict[str, Array] = slot.canonical_rows(since, handle.position)
        if self.spec.recurrent:
            copy = self._snapshots.copy(slot.arenas[handle.side])
            arrays = carve(recurrent_tensors(self.spec), copy)[1]
            for t in self.spec.recurrent:
                tensors[t.name] = t.canonical(arrays[t.name])
                tensors[t.name].flags.writeable = False
        return State(handle.position, since, tensors)

    def _fill(self, handle: _Handle, recurrent: Mapping[str, Array], rows: Part | None) -> None:
        for t in self.spec.recurrent:
            if t.name in recurrent:
                t.canonical(handle.slot.recurrent[0][t.name])[...] = recurrent[t.name]
        if rows is not None:
            handle.slot.load_rows(rows.tensors, rows.first, rows.last)

    def _clone(self, handle: _Handle) -> _Handle:
        twin = self._new(handle.position)
        np.copyto(twin.slot.arenas[0], handle.slot.arenas[handle.side])
        twin.slot.copy_rows(handle.slot, handle.position)
        return twin

    def _release(self, handle: _Handle) -> None:
        slot = handle.slot
        del handle.slot
        self._slots.discard(slot)
        slot.clear()
        self._spare.append(slot)
        while len(self._spare) > 1 and sum(s.nbytes for s in self._spare) > _SPARE_SLOT_BYTES:
            largest = max(self._spare, key=lambda s: s.nbytes)
            self._spare.remove(largest)
            self._forget(largest)

    def _close(self) -> None:
        self._slots.clear()
        self._spare.clear()
        self.graph.close()

    # helpers of these steps

    def _tier(self, tokens: int) -> int:
        """Return the smallest capacity that has room for `tokens` in all."""
        return next(t for t in self._tiers if t >= tokens)

    @contextmanager
    def _at_stake(self, handles: Sequence[_Handle]) -> Iterator[None]:
        """Guard the steps computed inside. A failed step leaves the handles as they were, unless it writes in place.

        Then their states are lost, and GraphError and MemoryError are raised as StateLost.
        """
        self._began = False
        try:
            yield
        except BaseException as err:
            if not (self._in_place and self._began):
                raise
            for handle in handles:
                handle.lost = True
            if isinstance(err, GraphError | MemoryError):
                raise StateLost(f"a step failed ({err}); ask once more, it goes on from what is stored") from err
            raise

    def _make_slot(self, capacity: int) -> Slot:
        return Slot(self.spec, self._groups, self.context or 0, capacity, self.open_capacity, self._in_place)

    def _make_room(self, slot: Slot, tokens: int, rows: int) -> None:
        """Move a slot, with its first `rows` rows, up to the smallest tier that has room for `tokens` in all."""
        if self._groups and tokens > slot.caches.capacity:
            self._fit(slot, self._tier(tokens), rows)

    def _fit(self, slot: Slot, capacity: int, rows: int) -> None:
        """Give a slot's caches another capacity. They keep the first `rows` rows."""
        if slot.caches.capacity != capacity:
            self._forget_blocks(slot.resize(capacity, rows))

    def _in_order(self, handles: Sequence[_Handle]) -> list[int]:
        """Return the order of handles in a step: those of one capacity are adjacent.

        Those of the graph's present capacity come first if they would otherwise be last.
        """
        order = sorted(range(len(handles)), key=lambda i: handles[i].slot.caches.capacity)
        if handles[order[-1]].slot.caches.capacity == self._capacity:
            order.reverse()
        self._capacity = handles[order[-1]].slot.caches.capacity
        return order

    def _forget(self, slot: Slot) -> None:
        slot.unbind()
        self.batches.leave(slot)
        self._forget_blocks(slot.blocks)

    def _forget_blocks(self, blocks: Sequence[Memory]) -> None:
        for block in blocks:
            self.graph.forget(block)
            self.batches.forget(block)

    def _make_batch(self, lanes: int) -> Batch:
        """Open a batch. Raises GraphError."""
        assert self._open_lanes is not None  # without it there are no sizes
        if self._idle is None:
            self._idle = Slot(self.spec, self._groups, 1, 1, self.open_capacity)
        graph = self._open_lanes(lanes)
        try:
            return Batch(graph, lanes, self.vocabulary, self._groups, self._idle)
        except BaseException:
            graph.close()
            raise

    @contextmanager
    def _scratch(self) -> Iterator[Slot]:
        """Lend a slot for a trial. Called without the lock."""
        slot = self._make_slot(self._tiers[0])
        try:
            yield slot
        finally:
            with self._lock:
                if not self._closed:
                    self._forget(slot)

    def _alone(self, stream: Stream) -> tuple[Logits, NewRows]:
        """Compute a stream's step without committing it."""
        slot, side, position, token = stream
        step = self._steps[0]
        step.tokens[0], step.pos[0], step.n_valid[0] = token, position, 1
        slot.caches.show(position)
        self._call(step, slot, side).run()
        return step.logits, step.rows

    def _run_together(self, lanes: int, streams: Sequence[tuple[_Handle, int]], logits: Sequence[Logits]) -> bool:
        """Compute a step of several handles in one call, without committing it, and fill the logits of each.

        Returns False if it failed and left the handles as they were. Raises GraphError if it failed and writes in
        place.
        """
        given = [(h.slot, h.side, h.position, token) for h, token in streams]
        self._began = True
        computed = self.batches.run(lanes, given, logits)
        if self._in_place and not computed:
            raise GraphError(f"the step of {lanes} streams together")
        return computed

    def _call(self, step: Step, slot: Slot, side: int) -> Call:
        """Return the signature bound to a slot, reading recurrent state on `side`. The binding is made once."""
        key = (step.length, side)
        if key not in slot.calls:
            inputs = {**step.arrays, **slot.recurrent[side], **slot.caches.arrays}
            outputs = {**step.arrays, **slot.recurrent[slot.other(side)], **step.rows.arrays}
            slot.calls[key] = self.graph.bind(self._signature(step, slot), inputs, outputs)
        return slot.calls[key]

    def _signature(self, step: Step, slot: Slot) -> str:
        capacity = slot.caches.capacity
        return signature_name(step.length, capacity, capacity if self.open_capacity else self._tiers[0])

    def _run(self, step: Step, handle: _Handle, ids: NDArray[np.int32]) -> None:
        """Compute a step without committing it."""
        slot, count = handle.slot, len(ids)
        step.tokens[:count] = ids
        if count < step.length:
            step.tokens[count:] = self.pad_token
        step.pos[0] = handle.position
        step.n_valid[0] = count
        self._make_room(slot, handle.position + count, handle.position)
        slot.caches.show(handle.position)
        call = self._call(step, slot, handle.side)
        self._began = True
        call.run()
        slot.append(step.rows.taken(count), handle.position, count)

    def _commit(self, handle: _Handle, count: int) -> None:
        handle.side = handle.slot.other(handle.side)
        handle.position += count

    def self_test(self) -> None:
        """Test with this model that the graph and numpy share memory: each reads the values that the other writes.

        Two steps over the same memory with different contents must give the same bits as the runtime with its own
        memory. Raises GraphError if not.
        """
        step, slot = self._steps[0], self._spare[0]
        call = self._call(step, slot, 0)
        written = slot.recurrent[slot.other(0)]
        others: dict[str, Array] = {"logits": step.arrays["logits"], **step.rows.arrays}
        outputs = {**others, **written}
        read: dict[str, Array] = slot.recurrent[0]
        noise = np.random.default_rng(0)
        try:
            for last, token in enumerate((self.vocabulary - 1, 0)):
                step.tokens[0], step.pos[0], step.n_valid[0] = token, 0, 1
                for array in (others if self._in_place else outputs).values():
                    array.fill(np.nan)
                some = noise.standard_normal(_NOISE, np.float32) * 0.1
                for array in slot.recurrent[0].values():
                    array[...] = np.resize(some, array.shape)
                if last and self._in_place:
                    read = {name: array.copy() for name, array in read.items()}
                call.run()
            known = {**step.arrays, **read, **slot.caches.arrays}
            for name, expected in self.graph.run_managed(self._signature(step, slot), known).items():
                if not np.isfinite(expected).all():
                    raise GraphError(f"its {name} are not finite numbers: the weights are damaged")
                if not np.array_equal(expected, outputs[name]):
                    raise GraphError(f"the self-test of shared memory failed at {name!r}")
            call.run()  # binds this memory again: the runtime's own is freed, and the graph must not keep it
        finally:
            slot.clear()
        slot.caches.prepare()
