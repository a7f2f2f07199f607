"""Decode steps of several streams in one call: when they are taken, what is thrown away, and what a failure leaves."""

from __future__ import annotations

import gc
import itertools
import logging
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssmd.machine.cache import cache_folder
from ssmd.model.artifact import Artifact
from ssmd.runtime.hoststate.batches import Batch, Batches
from ssmd.runtime.hoststate.costs import Cost, cheapest
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.protocol import ProgramError
from ssmd_litert.calls import LanesCall, LibraryCall
from ssmd_litert.library import LibraryGraph
from ssmd_litert.runtime import LiteRTRuntime


@pytest.fixture(params=["granite-f32", "llama-int8", "llama-int4"])
def artifact(request: pytest.FixtureRequest, artifacts: Mapping[str, Path]) -> Artifact:
    return Artifact.open(artifacts[request.param])


@pytest.fixture(params=["granite-f32", "llama-int8", "llama-int4"])
def apart(request: pytest.FixtureRequest, artifacts: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """Return an artifact whose states are not written where they are read."""
    monkeypatch.setattr(LibraryGraph, "_metadata", lambda *_: b"")
    return Artifact.open(artifacts[request.param])


def loaded(artifact: Artifact, monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int] = (4, 8)) -> FlatProgram:
    """A program whose steps are taken together by so many, whatever they cost on this machine."""
    monkeypatch.setattr(Batches, "_timed", timed(1.0, 1.0, lambda lanes: 1.0 + lanes / 100))
    program = LiteRTRuntime().load(artifact)
    program.batches.open(max(sizes))
    assert sorted(program.batches.costs) == [1, *sizes]
    return program


def timed(
    alone: float, one: float, full: Callable[[int], float], quiet: bool = True
) -> Callable[..., tuple[Cost, Cost, bool]]:
    """Return a stand-in for a trial: the costs of a step alone, and of lanes with one stream or one in each."""
    return lambda batches, batch, slots: (Cost(alone, alone), Cost(one, full(batch.lanes)), quiet)


def begun(program: FlatProgram, count: int, length: int = 5) -> list[Any]:
    handles = [program.new_state() for _ in range(count)]
    for i, handle in enumerate(handles):
        program.prefill(handle, [(i + j) % 300 for j in range(length)])
    return handles


def alone(program: FlatProgram, count: int, tokens: int, length: int = 5) -> list[list[bytes]]:
    """The logits of each stream, one after another."""
    found = []
    for i, handle in enumerate(begun(program, count, length)):
        found.append([program.decode([handle], [(i + t) % 300])[0].tobytes() for t in range(tokens)])
        program.release(handle)
    return found


def together(program: FlatProgram, handles: Sequence[Any], tokens: Sequence[int]) -> list[list[bytes]]:
    rows = [program.decode(handles, [(i + t) % 300 for i in range(len(handles))]) for t in tokens]
    return [[row[i].tobytes() for row in rows] for i in range(len(handles))]


@pytest.mark.parametrize("count", [2, 4, 5, 8, 9, 17])
def test_each_gets_what_it_gets_alone(artifact: Artifact, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = loaded(artifact, monkeypatch)
    runs: list[LanesCall] = []
    run = LanesCall.run

    def counted(call: LanesCall) -> None:
        runs.append(call)
        run(call)

    monkeypatch.setattr(LanesCall, "run", counted)
    assert together(program, begun(program, count), range(6)) == alone(program, count, 6)
    assert len(runs) == 6 * {2: 1, 4: 1, 5: 1, 8: 1, 9: 1, 17: 2}[count]


def test_capacities_change_within_a_batch(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream moves up at a step of its own; the others go on in their lanes."""
    program = loaded(artifact, monkeypatch)
    first = program._tiers[0]
    lengths = [first - 9 + 2 * i for i in range(4)]

    def starts() -> Iterator[Any]:
        for i, length in enumerate(lengths):
            handle = program.new_state()
            for at in range(0, length, 64):
                program.prefill(handle, [(i + j) % 300 for j in range(at, min(at + 64, length))])
            yield handle

    expected = []
    for i, handle in enumerate(starts()):
        expected.append([program.decode([handle], [(i + t) % 300])[0].tobytes() for t in range(12)])
    handles = list(starts())
    assert together(program, handles, range(12)) == expected
    assert {h.slot.caches.capacity for h in handles} == {program._tiers[1]}


def test_lanes_are_kept(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are exchanged for streams that come or go, and for sides of recurrent states, not for those that stay."""
    program = loaded(granite, monkeypatch)
    handles = begun(program, 6)
    together(program, handles, range(2))
    batch = program.batches._opened[8]
    seats = batch.seats([h.slot for h in handles])
    together(program, list(reversed(handles)), range(2))
    assert batch.seats([h.slot for h in handles]) == seats
    del handles[2]
    handles.append(begun(program, 1)[0])
    together(program, handles, range(2))
    assert batch.seats([h.slot for h in handles]) == [s for s in seats if s != seats[2]] + [seats[2]]


def test_without_recurrent_states_nothing_is_exchanged(
    artifacts: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = loaded(Artifact.open(artifacts["llama-int8"]), monkeypatch)
    handles = begun(program, 3)
    together(program, handles, range(1))
    puts: list[int] = []
    monkeypatch.setattr(LanesCall, "put", lambda call, lane, bound: puts.append(lane))
    together(program, handles, range(5))
    assert not puts


@pytest.mark.parametrize(("lane", "what"), [(0, "logits"), (3, "logits"), (1, "rows"), (2, "state")])
def test_a_graph_whose_lane_computes_otherwise_is_not_used(
    granite: Artifact, lane: int, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By one bit of one number."""
    program, compute = LiteRTRuntime().load(granite), Batch.compute

    def otherwise(batch: Batch, seated: Mapping[int, Any]) -> None:
        compute(batch, seated)
        found = {"logits": batch.logits[lane], "rows": batch.rows.lane(lane)[0][0, 0]}
        if lane in seated:
            slot = seated[lane][0]
            found["state"] = slot.recurrent[slot.other(0)]["ssm_0"][0, 0, 0]
        if what in found:
            numbers = found[what].reshape(-1)
            numbers[-1:] = np.nextafter(numbers[-1:], np.float32(np.inf))
            assert np.shares_memory(numbers, found[what])

    monkeypatch.setattr(Batch, "compute", otherwise)
    with caplog.at_level(logging.WARNING):
        program.batches.open(4)
    assert f"lane {lane} gives other numbers" in caplog.text
    assert list(program.batches.costs) == [1]
    monkeypatch.undo()
    assert together(program, begun(program, 4), range(3)) == alone(program, 4, 3)


def test_a_graph_that_is_no_faster_is_not_used(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Batches, "_timed", timed(1.0, 3.0, lambda lanes: 4.0 if lanes == 4 else 7.9))
    program = LiteRTRuntime().load(granite)
    with caplog.at_level(logging.WARNING):
        program.batches.open(8)
    assert "4 streams are computed one after another: together they take 4.0 ms, one 1.0" in caplog.text
    assert program.batches.costs == {1: Cost(1.0, 1.0), 8: Cost(3.0, 7.9)}
    assert program.batches.parts(2) == ((1, 1), (1, 1))
    assert program.batches.parts(8) == ((8, 8),)


def test_a_graph_that_cannot_be_opened_is_done_without(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = LiteRTRuntime().load(artifact)

    def none(*_: object) -> None:
        raise GraphError("no such signature")

    monkeypatch.setattr(LibraryGraph, "bind_lanes", none)
    with caplog.at_level(logging.WARNING):
        program.batches.open(8)
    assert caplog.text.count("no such signature") == 2
    assert together(program, begun(program, 3), range(3)) == alone(program, 3, 3)
    assert not program.batches._wanted(8)  # it is not tried again


def test_it_is_opened_beside_steps_that_go_on(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batches, "_timed", timed(1.0, 1.0, lambda lanes: 1.1))
    program, begin = LiteRTRuntime().load(artifact), threading.Event()
    make = program.batches._make

    def waits(lanes: int) -> Any:
        assert begin.wait(20)
        return make(lanes)

    program.batches._make = waits
    expected, handles = alone(program, 3, 40), begun(program, 3)
    first = together(program, handles, range(5))
    assert list(program.batches.costs) == [1]
    begin.set()
    rest = together(program, handles, range(5, 20))
    program.batches.join()
    assert sorted(program.batches.costs) == [1, 4]
    last = together(program, handles, range(20, 40))
    assert [a + b + c for a, b, c in zip(first, rest, last, strict=True)] == expected


def test_a_graph_that_fails_in_the_middle_is_not_used_any_more(
    apart: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = loaded(apart, monkeypatch)
    handles, expected = begun(program, 5), alone(program, 5, 6)
    first, run = together(program, handles, range(2)), LanesCall.run

    def failing(call: LanesCall) -> None:
        run(call)
        raise GraphError("it broke")

    monkeypatch.setattr(LanesCall, "run", failing)
    with caplog.at_level(logging.WARNING):
        rest = together(program, handles, range(2, 6))
    assert [a + b for a, b in zip(first, rest, strict=True)] == expected
    assert caplog.text.count("one after another from now on: it broke") == 2  # that of 8, then that of 4
    assert list(program.batches.costs) == [1]


def test_a_failed_step_leaves_all_of_them_as_they_were(apart: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    program = loaded(apart, monkeypatch)
    handles, expected = begun(program, 6), alone(program, 6, 2)

    def failing(call: LibraryCall) -> None:
        raise GraphError("it broke")

    with monkeypatch.context() as patch:
        patch.setattr(LanesCall, "run", failing)
        patch.setattr(LibraryCall, "run", failing)
        with pytest.raises(GraphError, match="it broke"):
            program.decode(handles, [1, 2, 3, 4, 5, 6])
    assert [program.position(h) for h in handles] == [5] * 6
    assert together(program, handles, range(2)) == expected


def test_closing_ends_a_trial(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    program, tried = LiteRTRuntime().load(granite), threading.Event()
    differing = Batches._differing

    def held(batches: Batches, batch: Any, slots: Any) -> str:
        tried.set()
        while not batches._closed:
            pass
        return differing(batches, batch, slots)

    monkeypatch.setattr(Batches, "_differing", held)
    handles = begun(program, 2)
    together(program, handles, range(1))
    assert tried.wait(20)
    program.close()
    assert list(program.batches.costs) == [1]
    with pytest.raises(ProgramError, match="closed"):
        program.decode(handles, [1, 2])


def test_memory_of_those_who_left_is_used_again(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that moved up, was released and serves another stream is bound anew."""
    program = loaded(artifact, monkeypatch)
    long = begun(program, 4, length=60)
    for t in range(0, program._tiers[0], 8):
        program.decode(long, [t] * 4)
        for handle in long:
            program.prefill(handle, [t] * 7)
    for handle in long:
        program.release(handle)
    del long
    assert together(program, begun(program, 4), range(4)) == alone(program, 4, 4)


def test_memory_of_those_who_left_is_given_back(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no stream has taken their lanes since."""
    program = loaded(granite, monkeypatch)
    monkeypatch.setattr("ssmd.runtime.hoststate.program._SPARE_SLOT_BYTES", 0)
    handles = begun(program, 8)
    together(program, handles, range(1))
    slots = [weakref.ref(handle.slot) for handle in handles]
    for handle in handles:
        program.release(handle)
    gc.collect()
    assert sum(slot() is not None for slot in slots) == 1  # which is kept for the next conversation
    assert together(program, begun(program, 3), range(2)) == alone(program, 3, 2)


def test_memory_of_a_trial_is_nobody_s_afterwards(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that comes to lie there is bound by its own sizes."""
    program = loaded(granite, monkeypatch)
    for batch in program.batches._opened.values():
        bound = list(batch.graph._buffers)  # type: ignore[attr-defined]
        own = [batch._memory, *batch._idle.blocks, *(np.asarray(s.base) for s in batch.rows.stacks)]
        spans = [(b.ctypes.data, b.ctypes.data + b.nbytes) for b in own]
        assert [a for a in bound if not any(start <= a < stop for start, stop in spans)] == []


def test_it_is_opened_once_whoever_asks(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batches, "_timed", timed(1.0, 1.0, lambda lanes: 1.1))
    program = LiteRTRuntime().load(granite)
    make, made = program.batches._make, list[int]()

    def counted(lanes: int) -> Batch:
        made.append(lanes)
        return make(lanes)

    program.batches._make = counted
    threads = [threading.Thread(target=program.batches.open, args=(8,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [4, 8]


def test_a_trial_is_remembered(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By build, version, processor and threads; only from a file that no other user can write."""
    first = loaded(granite, monkeypatch)
    expected = alone(first, 4, 2)
    [notes] = (cache_folder() / "litert").glob("*.lanes.json")
    assert notes.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(Batches, "_differing", lambda *_: pytest.fail("tried again"))
    again = LiteRTRuntime().load(granite)
    again.batches.open(8)
    assert again.batches.costs == first.batches.costs
    assert together(again, begun(again, 4), range(2)) == expected
    other = LiteRTRuntime().load(granite, threads=again.threads + 1)
    monkeypatch.setattr(Batches, "_differing", lambda *_: "it is tried")
    for damage in (
        None,
        "{",
        "[1, 2]",
        '{"4": [1, 2]}',
        '{"4": [1.0, NaN, 2.0]}',
        '{"4": [1.0, 1.0, 9.0]}',
        '{"4": [Infinity, 1.0, 2.0]}',
        '{"4": [1e-300, 1e-300, 2e-300]}',
        "{" * 5000,
    ):
        if damage is not None:
            notes.write_text(damage)
        program = other if damage is None else LiteRTRuntime().load(granite)
        caplog.clear()
        program.batches.open(4)
        assert "it is tried" in caplog.text, damage
    notes.write_text('{"4": [1.0, 1.0, 1.1]}')
    notes.chmod(0o622)
    program = LiteRTRuntime().load(granite)
    program.batches.open(4)
    assert list(program.batches.costs) == [1]


def test_a_trial_without_memory_leaves_nothing(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[LibraryGraph] = []
    close = LibraryGraph.close

    def counted(graph: LibraryGraph) -> None:
        closed.append(graph)
        close(graph)

    def none(*_: object) -> None:
        raise MemoryError

    program = LiteRTRuntime().load(granite)
    monkeypatch.setattr(LibraryGraph, "close", counted)
    monkeypatch.setattr(program, "_make_slot", none)
    program.batches.open(4)
    assert len(closed) == 1
    monkeypatch.setattr(Batch, "__init__", none)
    program.batches.open(8)
    assert len(closed) == 2
    assert list(program.batches.costs) == [1]
    assert caplog.text.count("streams are computed one after another") == 2


def test_a_graph_of_another_number_of_lanes_is_not_opened(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be given too little memory for what all lanes share."""
    monkeypatch.setattr("ssmd.runtime.hoststate.batches.lanes_name", lambda lanes: "decode_b8")
    monkeypatch.setattr("ssmd_litert.lanes.lanes_name", lambda lanes: "decode_b8")
    program = LiteRTRuntime().load(granite)
    program.batches.open(4)
    assert list(program.batches.costs) == [1]
    assert "decode_b8: tensor" in caplog.text


def test_a_file_that_is_gone_is_not_opened(
    artifacts: Mapping[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(artifacts["llama-int8"], tmp_path / "m")
    program = LiteRTRuntime().load(Artifact.open(tmp_path / "m"))
    shutil.rmtree(tmp_path / "m")
    program.prepare()
    assert list(program.batches.costs) == [1]
    assert "streams are computed one after another" in caplog.text


def test_each_trial_counts_by_itself(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was made beside others' work says nothing of another's ms, and lanes that are hardly quicker than a step
    alone are not taken for one stream."""
    trials = {4: (Cost(10.0, 10.0), Cost(9.7, 11.0), True), 8: (Cost(30.0, 30.0), Cost(27.0, 60.0), True)}
    monkeypatch.setattr(Batches, "_timed", lambda batches, batch, slots: trials[batch.lanes])
    program = LiteRTRuntime().load(granite)
    program.prepare()
    expected = {1: Cost(1.0, 1.0), 4: Cost(1.0, 1.1), 8: Cost(0.9, 2.0)}
    assert program.batches.costs == expected
    again = LiteRTRuntime().load(granite)
    again.prepare()
    assert again.batches.costs == expected
    assert program.batches.parts(4) == ((4, 4),)
    assert program.batches.parts(1) == ((8, 1),)


def test_a_trial_beside_others_work_is_not_remembered(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batches, "_timed", timed(1.0, 1.0, lambda lanes: 1.1, quiet=False))
    program = LiteRTRuntime().load(granite)
    program.prepare()
    assert sorted(program.batches.costs) == [1, 4, 8]
    assert not list((cache_folder() / "litert").glob("*.lanes.json"))


@pytest.mark.parametrize("busy", [False, True])
def test_a_busy_machine_does_not_make_lanes_quicker(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """Of a step alone no one has the machine to itself here, of lanes with one stream a single one."""
    program = LiteRTRuntime().load(granite)
    alone, one, full = [9.0] * 6, [9.0] * 5 + [7.0], [11.0] * 6
    if not busy:
        one = [7.0] * 6
    ticks = itertools.chain.from_iterable((0.0, t / 1e3) for step in zip(alone, one, full, strict=True) for t in step)
    monkeypatch.setattr("ssmd.runtime.hoststate.batches.time.perf_counter", lambda: next(ticks))
    batch = program._make_batch(4)
    with program._scratch() as first, program._scratch() as second:
        found = program.batches._timed(batch, [first, second])
    assert found == (Cost(9.0, 9.0), Cost(9.0 if busy else 7.0, 11.0), not busy)
    batch.graph.close()


def test_the_cheapest_calls_are_taken() -> None:
    rng = np.random.default_rng(0)

    for _ in range(20):
        costs = {1: Cost(1.0, 1.0)}
        for lanes in (4, 8):
            one = float(rng.uniform(0.5, 3))
            costs[lanes] = Cost(one, float(rng.uniform(one, max(one, lanes))))
        calls = [(lanes, seated) for lanes in costs for seated in range(1, lanes + 1)]

        def total(taken: Sequence[tuple[int, int]], costs: Mapping[int, Cost] = costs) -> float:
            return sum(costs[lanes].of(seated, lanes) for lanes, seated in taken)

        for streams in range(1, 10):
            found = cheapest(streams, tuple(sorted(costs.items())))
            assert sum(seated for _, seated in found) == streams
            assert list(found) == sorted(found, reverse=True)
            best = min(
                total(taken)
                for n in range(1, 4)
                for taken in itertools.combinations_with_replacement(calls, n)
                if sum(seated for _, seated in taken) == streams
            )
            assert total(found) <= best + 1e-9


def test_what_a_step_costs(granite: Artifact) -> None:
    program = LiteRTRuntime().load(granite)
    assert [program.step_cost(n) for n in (1, 3, 8)] == [1, 3, 8]
    program.batches.costs = {1: Cost(2.0, 2.0), 4: Cost(2.4, 3.0), 8: Cost(3.6, 5.0)}
    assert [round(program.step_cost(n), 6) for n in (1, 2, 4, 5, 8, 9)] == [1, 1.3, 1.5, 2.2, 2.5, 3.5]


def test_a_file_that_was_replaced_is_not_opened(
    artifacts: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By that of another build, with the same signatures and other weights; what a trial found was noted."""
    monkeypatch.setattr(Batches, "_timed", timed(1.0, 1.0, lambda lanes: 1.0 + lanes / 100))
    folder, other = tmp_path / "m", tmp_path / "other"
    for copy in (folder, other):
        shutil.copytree(artifacts["llama-int8"], copy)
    model = other / "model.tflite"
    held = bytearray(model.read_bytes())
    start, size = max(large_buffers(held), key=lambda one: one[1])
    held[start : start + size] = held[start : start + size][::-1]
    model.write_bytes(held)
    first = LiteRTRuntime().load(Artifact.open(folder))
    first.prepare()
    assert 8 in first.batches.costs
    first.close()
    program = LiteRTRuntime().load(Artifact.open(folder))
    expected = alone(program, 4, 3)
    folder.rename(tmp_path / "old")
    other.rename(folder)
    program.prepare()
    assert list(program.batches.costs) == [1]
    assert "was replaced since it was loaded" in caplog.text
    assert together(program, begun(program, 4), range(3)) == expected


def large_buffers(model: bytearray) -> list[tuple[int, int]]:
    """Where the buffers of a .tflite that lie outside of its tables begin, and how many bytes they have."""
    from ai_edge_litert import schema_py_generated as schema

    root = schema.Model.GetRootAs(model, 0)
    found = [root.Buffers(i) for i in range(root.BuffersLength())]
    return [(b.Offset(), b.Size()) for b in found if b.Offset() > 1]
