"""Decode steps of several handles in one call, so that the weights are read once for all of them.

A signature takes a fixed number of streams, in lanes. Each lane has its own state, of its own capacity; a lane without
a handle works on a spare state. No lane's result depends on the others.

A graph is tried before it is used. Its results must be those of single steps, bit for bit, and it must be faster.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ssmd.runtime.hoststate.buffers import carve
from ssmd.runtime.hoststate.costs import Calls, Cost, cheapest
from ssmd.runtime.hoststate.graph import Array, GraphError, Tensor
from ssmd.runtime.hoststate.signatures import lanes_name
from ssmd.runtime.hoststate.slot import NewRows, RowGroup, Slot
from ssmd.runtime.protocol import Logits

log = logging.getLogger(__name__)
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)
_TIMES = 6  # times that a step is measured; the least counts
_QUIET = 1.2  # bound of the median in least times, else another process computes as well
_CLEARLY = 0.95  # bound of a lanes' step for one stream, in single steps, to be used for one stream
Stream = tuple[Slot, int, int, int]  # slot, the side of it that is read, position, token to feed there
Alone = Callable[[Stream], tuple[Logits, NewRows]]  # computes the step of one stream without committing it


class Notes(Protocol):
    """Results of trials, kept from one start to the next."""

    def read(self, lanes: int) -> tuple[Cost, Cost] | None:
        """Return the ms of a single step and of one of `lanes`, if noted for this graph on this machine."""

    def write(self, lanes: int, alone: Cost, together: Cost) -> None:
        """Note the costs of a trial. Never raises."""


class LanesCall(Protocol):
    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Any:
        """Bind a lane to these arrays, by the states' names. Raises GraphError."""

    def put(self, lane: int, bound: Any) -> None:
        """Make a lane read and write this binding from the next run on."""

    def run(self) -> None:
        """Compute a step of all lanes. Raises GraphError."""


class LanesGraph(Protocol):
    def bind_lanes(
        self, signature: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array], lanes: int
    ) -> LanesCall:
        """Return a call that reads and writes these arrays for all lanes together.

        The arrays of a single lane are given with `LanesCall.put`.
        """

    def forget(self, memory: NDArray[np.uint8]) -> None:
        """Drop all bindings to arrays inside `memory`, which is about to be freed."""

    def close(self) -> None:
        """Free the graph."""


class Batch:
    """The signature of a step in `lanes` lanes. idle: a slot for lanes without a stream; its contents are not used."""

    def __init__(
        self, graph: LanesGraph, lanes: int, vocabulary: int, groups: tuple[RowGroup, ...], idle: Slot
    ) -> None:
        self.graph, self.lanes, self._idle = graph, lanes, idle
        tensors = {"tokens": Tensor((1, lanes), _INT32), "pos": Tensor((lanes,), _INT32)}
        self._memory, arrays = carve({**tensors, "logits": Tensor((lanes, vocabulary), _FLOAT32)})
        self._tokens, self._pos, self.logits = arrays["tokens"][0], arrays["pos"], arrays["logits"]
        self.rows = NewRows(groups, 1, lanes)
        outputs = {"logits": arrays["logits"], **self.rows.arrays}
        self._call = graph.bind_lanes(lanes_name(lanes), {n: arrays[n] for n in tensors}, outputs, lanes)
        self._slots: list[Slot] = [idle] * lanes  # the last to be in each lane
        self._bounds: list[Any] = [None] * lanes

    def run(self, streams: Sequence[Stream], logits: Sequence[Logits]) -> None:
        """Compute a step of at most `lanes` streams, without committing it, and fill the logits of each."""
        lanes = self.seats([slot for slot, *_ in streams])
        self.compute(dict(zip(lanes, streams, strict=True)))
        new = self.rows.taken(1)
        for lane, (slot, _, position, _), row in zip(lanes, streams, logits, strict=True):
            slot.append(new, position, 1, lane)
            row[...] = self.logits[lane]

    def compute(self, seated: Mapping[int, Stream]) -> None:
        """Compute a step of streams by lane. Their slots' rows are not changed."""
        for lane in range(self.lanes):
            slot, side, position, token = seated.get(lane, (self._idle, 0, 0, 0))
            self._tokens[lane], self._pos[lane] = token, position
            slot.caches.show(position)
            bound = self._bound(slot, side)
            if bound is not self._bounds[lane]:
                self._call.put(lane, bound)
                self._bounds[lane] = bound
            self._slots[lane] = slot
        self._call.run()

    def seats(self, slots: Sequence[Slot]) -> list[int]:
        """Return a lane for each of these slots: its lane in the last step, or else a free one."""
        had = {id(slot): lane for lane, slot in enumerate(self._slots)}
        kept = [had.get(id(slot)) for slot in slots]
        free = iter([lane for lane in range(self.lanes) if lane not in kept])
        return [next(free) if lane is None else lane for lane in kept]

    def drop(self, slot: Slot) -> None:
        """Drop a slot, and all bindings to its memory."""
        self.leave(slot)
        for block in slot.blocks:
            self.graph.forget(block)

    def leave(self, slot: Slot) -> None:
        """Take a slot out of its lane. Its memory would be held until another slot got the lane."""
        for lane in [lane for lane, held in enumerate(self._slots) if held is slot]:
            self._slots[lane], self._bounds[lane] = self._idle, None

    def _bound(self, slot: Slot, side: int) -> Any:
        key = (self.lanes, side)
        if key not in slot.bounds:
            inputs = {**slot.recurrent[side], **slot.caches.arrays}
            slot.bounds[key] = self._call.bound(inputs, slot.recurrent[slot.other(side)])
        return slot.bounds[key]


class Batches:
    """The batches of a program, opened by a thread on first need."""

    def __init__(
        self,
        sizes: Sequence[int],
        make: Callable[[int], Batch],
        scratch: Callable[[], AbstractContextManager[Slot]],
        alone: Alone,
        turn: AbstractContextManager[object],
        notes: Notes | None = None,
    ) -> None:
        """Open nothing yet.

        sizes: lanes of each batch, ascending. make: opens a graph and binds it; raises GraphError. scratch: lends a
        slot for a trial. turn: held while a step is computed, as in every call of the program. notes: save trials.
        """
        self._sizes = tuple(sizes)
        self._make, self._scratch, self._alone, self._turn = make, scratch, alone, turn
        self._notes = notes
        self._opened: dict[int, Batch] = {}
        self._tried: set[int] = set()
        self.costs: dict[int, Cost] = {1: Cost(1.0, 1.0)}  # of a call, by lanes, where a step alone is 1
        self._thread: threading.Thread | None = None
        self._opening = threading.Lock()
        self._closed = False

    def parts(self, streams: int) -> Calls:
        """Return the cheapest calls for a step of `streams` streams. Never waits: a thread opens missing graphs."""
        wanted = self._wanted(streams)
        if wanted and not self._closed and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.open, args=(streams,), name="ssmd-batches", daemon=True)
            self._thread.start()
        return cheapest(streams, tuple(sorted(self.costs.items())))

    def step_cost(self, streams: int) -> float:
        """Return the cost of a step of `streams` streams; a step of one costs 1."""
        costs = self.costs
        calls = cheapest(streams, tuple(sorted(costs.items())))
        return sum(costs[lanes].of(seated, lanes) for lanes, seated in calls) / costs[1].one

    def run(self, lanes: int, streams: Sequence[Stream], logits: Sequence[Logits]) -> bool:
        """Compute a step in `lanes` lanes, a number from `parts`, and fill the logits of each stream.

        Returns False if it fails: the graph is not used any more.
        """
        try:
            self._opened[lanes].run(streams, logits)
        except GraphError as err:
            log.warning("steps of %d streams are computed one after another from now on: %s", lanes, err)
            self._opened.pop(lanes).graph.close()
            self.costs = {n: cost for n, cost in self.costs.items() if n != lanes}
            return False
        return True

    def open(self, streams: int) -> None:
        """Open and try the batches for a step of `streams` streams. The caller must hold no lock: it takes 0.5 s."""
        with self._opening:
            for size in self._wanted(streams):
                if self._closed:
                    return
                self._tried.add(size)
                try:
                    batch = self._make(size)
                except (GraphError, MemoryError) as err:
                    log.warning("steps of %d streams are computed one after another: %s", size, err)
                    continue
                noted = None if self._notes is None else self._notes.read(size)
                if noted is None:
                    self._try(batch)
                else:
                    self._take(batch, *noted)

    def open_all(self) -> None:
        """Open and try all batches."""
        self.open(max(self._sizes, default=1))

    def forget(self, memory: NDArray[np.uint8]) -> None:
        """Drop all bindings to arrays inside `memory`."""
        for batch in self._opened.values():
            batch.graph.forget(memory)

    def leave(self, slot: Slot) -> None:
        """Drop a slot that is not used any more, though it was the last in its lane."""
        for batch in self._opened.values():
            batch.leave(slot)

    def close(self) -> None:
        """Close the graphs. The caller holds the turn, so a trial in progress finds them closed."""
        self._closed = True
        for batch in self._opened.values():
            batch.graph.close()
        self._opened.clear()
        self.costs = {1: Cost(1.0, 1.0)}

    def join(self) -> None:
        """Wait for graphs that are being opened or tried. Called without the turn, after `close`."""
        if self._thread is not None:
            self._thread.join()
        with self._opening:
            pass

    def _wanted(self, streams: int) -> list[int]:
        """List the sizes not tried yet, up to the first that has a lane for each stream."""
        upto = next((i for i, size in enumerate(self._sizes) if size >= streams), len(self._sizes) - 1)
        return [size for size in self._sizes[: upto + 1] if size not in self._tried] if streams > 1 else []

    def _try(self, batch: Batch) -> None:
        """Take a batch into use if each lane gives the bits of a single step, in less time."""
        try:
            with self._scratch() as first, self._scratch() as second:
                why = self._differing(batch, [first, second])
                if not why:
                    alone, together, quiet = self._timed(batch, [first, second])
                    if together.full >= batch.lanes * alone.one:
                        why = f"together they take {together.full:.1f} ms, one {alone.one:.1f}"
                for slot in (first, second):  # another slot may get their memory
                    batch.drop(slot)
        except (GraphError, MemoryError) as err:
            why = str(err) or "there is no memory"
        if why:
            batch.graph.close()
            if not self._closed:
                log.warning("steps of %d streams are computed one after another: %s", batch.lanes, why)
            return
        if self._notes is not None and quiet:
            self._notes.write(batch.lanes, alone, together)
        self._take(batch, alone, together)

    def _take(self, batch: Batch, alone: Cost, together: Cost) -> None:
        """Take a batch into use.

        Its costs are noted relative to the single step of the same trial: another trial may have had the machine to
        itself.
        """
        one, full = together.one / alone.one, together.full / alone.one
        cost = Cost(one if one <= _CLEARLY else max(1.0, one), max(one, full))
        with self._turn:
            if self._closed:
                batch.graph.close()
            else:
                self._opened[batch.lanes] = batch
                self.costs = {**self.costs, batch.lanes: cost}

    def _differing(self, batch: Batch, slots: Sequence[Slot]) -> str:
        """Return how a lane's results differ from those of a single step, or "".

        Two streams with different numbers go through all lanes.
        """
        noise = np.random.default_rng(0)
        for slot in slots:
            for array in (*slot.recurrent[0].values(), *slot.caches.stacks):
                array[...] = noise.standard_normal(array.shape, np.float32) * 0.1
        streams: list[Stream] = [(slots[0], 0, 3, 1), (slots[1], 0, slots[1].caches.capacity - 1, 2)]
        written = [list(slot.recurrent[slot.other(0)].values()) for slot in slots]
        began = [slot.arenas[0].copy() for slot in slots]
        expected = []
        for stream, states in zip(streams, written, strict=True):
            with self._turn:
                self._check_open()
                logits, rows = self._alone(stream)
                expected.append([a.copy() for a in (logits, *rows.lane(0), *states)])
        for first in range(0, batch.lanes, 2):
            for slot, memory in zip(slots, began, strict=True):  # a step may have written in place
                np.copyto(slot.arenas[0], memory)
            with self._turn:
                self._check_open()
                batch.compute({first + i: stream for i, stream in enumerate(streams)})
            for lane, states, wanted in zip((first, first + 1), written, expected, strict=True):
                found = (batch.logits[lane], *batch.rows.lane(lane), *states)
                if not all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)):
                    return f"lane {lane} gives other numbers than a step alone"
        return ""

    def _timed(self, batch: Batch, slots: Sequence[Slot]) -> tuple[Cost, Cost, bool]:
        """Return (cost of a single step, cost of a lanes' step, True if the machine was quiet). Costs are in ms.

        If it was not quiet, lanes count as no faster than a single step, even if the measured times are shorter.
        """
        full: dict[int, Stream] = {lane: (slots[lane % 2], 0, 3, 1) for lane in range(batch.lanes)}
        steps: tuple[Callable[[], object], ...] = (
            lambda: self._alone(full[0]),
            lambda: batch.compute({0: full[0]}),
            lambda: batch.compute(full),
        )
        took: list[list[float]] = [[] for _ in steps]
        for _ in range(_TIMES):
            for times, step in zip(took, steps, strict=True):
                with self._turn:
                    self._check_open()
                    step()  # untimed, as it may change sizes
                    began = time.perf_counter()
                    step()
                    times.append((time.perf_counter() - began) * 1e3)
                time.sleep(0)  # a worker that waits for its turn gets it
        alone, one, all_ = map(min, took)
        quiet = all(statistics.median(times) <= _QUIET * min(times) for times in took)
        if not quiet:
            one, all_ = max(one, alone), max(all_, alone)
        return Cost(alone, alone), Cost(min(one, all_), all_), quiet

    def _check_open(self) -> None:
        if self._closed:
            raise GraphError("the program is closed")
