"""States that are written where they were read: in which order, with which numbers, and what a failed step leaves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from flat_programs import conversation

from ssmd.model.artifact import Artifact
from ssmd.model.state import of_lane
from ssmd.runtime.hoststate.batches import Batches
from ssmd.runtime.hoststate.costs import Cost
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.protocol import StateLost
from ssmd_litert.calls import LanesCall, LibraryCall
from ssmd_litert.inplace import write_states_last
from ssmd_litert.library import METADATA, LibraryGraph
from ssmd_litert.modelfile import Edited, edit
from ssmd_litert.runtime import LiteRTRuntime

RECURRENT = (
    "granite-f32",
    "granite-int8",
    "mamba2-groups-f32",
    "lfm2-f32",
    "lfm3-f32",
    "bamba-last-f32",
    "falcon-h1-norm-f32",
)
_Op = schema.BuiltinOperator


@pytest.fixture(params=RECURRENT)
def artifact(request: pytest.FixtureRequest, artifacts: Mapping[str, Path]) -> Artifact:
    return Artifact.open(artifacts[request.param])


def in_turn(graph: Any, source: int, target: int, views: set[int]) -> bool:
    """Report if all reads of a tensor's memory come before the operator that writes the other's."""
    reads, alias, owners = -1, {source}, {target}
    for operator in reversed(graph.operators):
        if int(operator.opcodeIndex) in views and int(operator.outputs[0]) in owners:
            owners.add(int(operator.inputs[0]))
    for place, operator in enumerate(graph.operators):
        if alias & {int(i) for i in operator.inputs}:
            reads = place
            if int(operator.opcodeIndex) in views:
                alias.add(int(operator.outputs[0]))
    return reads < min(i for i, o in enumerate(graph.operators) if owners & {int(t) for t in o.outputs})


def test_all_signatures_write_a_state_after_its_last_reader(artifact: Artifact) -> None:
    edited = Edited(artifact.file("model.tflite"))
    views = {i for i in range(len(edited.model.operatorCodes)) if edited._codes[i] == _Op.RESHAPE}
    names = {t.name for t in artifact.manifest.spec.recurrent}
    checked = 0
    for signature in edited.model.signatureDefs:
        outputs = {t.name: int(t.tensorIndex) for t in signature.outputs}
        for t in signature.inputs:
            if t.name.decode().partition("_lane")[0] in names:
                graph = edited.model.subgraphs[signature.subgraphIndex]
                assert in_turn(graph, int(t.tensorIndex), outputs[t.name], views), (signature.signatureKey, t.name)
                checked += 1
    assert checked == len(names) * (1 + len(artifact.manifest.buckets) + 4 + 8)


def test_the_numbers_are_those_of_two_arenas(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    program = LiteRTRuntime().load(artifact)
    assert program.graph.in_place
    assert len(program._spare[0].arenas) == 1
    with monkeypatch.context() as patch:
        patch.setattr(LibraryGraph, "_metadata", lambda *_: b"")
        other = LiteRTRuntime().load(artifact)
    assert len(other._spare[0].arenas) == 2
    assert conversation(program) == conversation(other)


def test_a_model_without_recurrent_states_says_nothing(artifacts: Mapping[str, Path]) -> None:
    program = LiteRTRuntime().load(Artifact.open(artifacts["llama-int8"]))
    assert not program.graph.in_place


def test_a_graph_whose_reader_needs_the_new_state_stays_as_it_is(granite: Artifact, tmp_path: Path) -> None:
    file = tmp_path / "model.tflite"
    file.write_bytes(granite.file("model.tflite").read_bytes())
    states = {t.name for t in granite.manifest.spec.recurrent}

    def old(edited: Edited) -> None:
        """As before it was told; and in one signature the old state is added to the new one in the end."""
        edited.model.metadata = [m for m in edited.model.metadata if m.name != METADATA.encode()]
        signature = next(s for s in edited.model.signatureDefs if s.signatureKey == b"prefill_16")
        graph = edited.model.subgraphs[signature.subgraphIndex]
        sides = (signature.inputs, signature.outputs)
        source, target = (next(int(t.tensorIndex) for t in side if t.name == b"ssm_0") for side in sides)
        add = schema.OperatorT()
        add.opcodeIndex = edited.place_of(_Op.ADD)
        add.inputs = np.array([source, target], np.int32)
        add.builtinOptions, add.builtinOptionsType = schema.AddOptionsT(), schema.BuiltinOptions.AddOptions
        graph.tensors.append(graph.tensors[target])
        add.outputs = np.array([len(graph.tensors) - 1], np.int32)
        graph.operators.append(add)

    edit(file, old)
    before = file.read_bytes()
    edit(file, lambda edited: write_states_last(edited, {*states, *(of_lane(n, b) for n in states for b in range(8))}))
    assert file.read_bytes() == before
    assert METADATA.encode() not in [m.name for m in Edited(file).model.metadata or ()]


def begun(program: FlatProgram, count: int) -> list[Any]:
    handles = [program.new_state() for _ in range(count)]
    for i, handle in enumerate(handles):
        program.prefill(handle, [i + 1] * 5)
    return handles


def together(monkeypatch: pytest.MonkeyPatch, artifact: Artifact) -> FlatProgram:
    monkeypatch.setattr(Batches, "_timed", lambda batches, batch, slots: (Cost(1.0, 1.0), Cost(1.0, 1.1), True))
    program = LiteRTRuntime().load(artifact)
    program.batches.open(4)
    assert sorted(program.batches.costs) == [1, 4]
    return program


@pytest.mark.parametrize("call", [LibraryCall, LanesCall])
def test_a_step_that_fails_half_way_loses_its_states_alone(
    call: type[LibraryCall], granite: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = together(monkeypatch, granite)
    handles, other, run = begun(program, 4), begun(program, 2)[1], call.run
    expected = program.decode([begun(program, 2)[1]], [3])[0].tobytes()
    if call is LibraryCall:  # one after another: the first has gone on when the second fails
        program.batches.costs.pop(4)
    runs: list[object] = []

    def failing(self: Any) -> None:
        runs.append(self)
        run(self)
        if call is LanesCall or len(runs) == 2:
            raise GraphError("it broke")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(call, "run", failing)
        with pytest.raises(StateLost, match=r"a step failed .*ask once more"):
            program.decode(handles, [1, 2, 3, 4])
    for handle in handles:
        with pytest.raises(StateLost):
            program.save(handle)
        program.release(handle)
    assert program.decode([other], [3])[0].tobytes() == expected
    fresh = begun(program, 4)  # in the memory of those that were lost
    assert program.decode(fresh, [1, 3, 3, 4])[1].tobytes() == expected


def test_what_fails_before_it_writes_loses_nothing(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    program = LiteRTRuntime().load(granite)
    [handle, twin] = [begun(program, 1)[0] for _ in range(2)]

    def full(*_: object) -> None:
        raise MemoryError("no room for larger caches")

    with monkeypatch.context() as patch:
        patch.setattr(FlatProgram, "_make_room", full)
        with pytest.raises(MemoryError, match="no room"):
            program.prefill(handle, [7] * 3)
    assert program.prefill(handle, [7] * 3).tobytes() == program.prefill(twin, [7] * 3).tobytes()


def test_a_step_without_room_for_one_of_two_loses_neither(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    program = LiteRTRuntime().load(granite)
    handles, twins = begun(program, 2), begun(program, 2)
    room = FlatProgram._make_room

    def full(self: FlatProgram, slot: Any, tokens: int, rows: int) -> None:
        if slot is handles[1].slot:
            raise MemoryError("no room for larger caches")
        room(self, slot, tokens, rows)

    with monkeypatch.context() as patch:
        patch.setattr(FlatProgram, "_make_room", full)
        with pytest.raises(MemoryError, match="no room"):
            program.decode(handles, [7, 8])
    assert program.decode(handles, [7, 8]).tobytes() == program.decode(twins, [7, 8]).tobytes()
