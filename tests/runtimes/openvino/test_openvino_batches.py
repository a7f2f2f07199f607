"""OpenVINO's decode steps of several streams in one call: their model, and programs that have none or cannot use it."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from flat_programs import altered, conversation

from ssmd.build.builder import Quantization
from ssmd.model.artifact import Artifact
from ssmd.model.state import of_lane
from ssmd.runtime.hoststate.batches import Batches
from ssmd.runtime.hoststate.costs import Cost
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.hoststate.signatures import lanes_name
from ssmd_openvino import library
from ssmd_openvino.build import has_lanes
from ssmd_openvino.compile import Compiler
from ssmd_openvino.graph import OpenVINOLanesCall
from ssmd_openvino.runtime import LANES, OPEN, WEIGHTS, OpenVINORuntime

MODEL = f"{lanes_name(LANES[0])}.xml"
_PLACE = re.compile(r'offset="(\d+)" size="(\d+)"')


@pytest.fixture(
    params=["openvino-granite-int8", "openvino-granite-f32", "openvino-llama-int8", "openvino-lfm2-moe-f32"]
)
def artifact(request: pytest.FixtureRequest, artifacts: Mapping[str, Path]) -> Artifact:
    return Artifact.open(artifacts[request.param])


@pytest.fixture
def granite(artifacts: Mapping[str, Path]) -> Artifact:
    """It has KV tiers of 64 and 512 tokens."""
    return Artifact.open(artifacts["openvino-granite-f32"])


def loaded(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> FlatProgram:
    """A program whose steps are taken together, whatever they cost on this machine."""
    costs = Cost(1.0, 1.0), Cost(1.0, 1.04), True
    monkeypatch.setattr(Batches, "_timed", lambda batches, batch, slots: costs)
    program = OpenVINORuntime().load(artifact)
    program.batches.open(8)
    if [*program.batches.costs] == [1] and "avx512" not in Path("/proc/cpuinfo").read_text():
        program.close()
        pytest.skip(
            "without AVX-512 OpenVINO gives a row other bits in company: its lanes are refused, as they must be"
        )
    assert sorted(program.batches.costs) == [1, *LANES]
    return program


def without_lanes(artifact: Artifact, folder: Path) -> Artifact:
    """An artifact as it was built before there were steps of several streams."""
    shutil.copytree(artifact.path, folder)
    (folder / MODEL).unlink()
    return altered(artifact, folder)


def begun(program: FlatProgram, lengths: Sequence[int]) -> list[Any]:
    """Handles that have read so many tokens each."""
    handles = [program.new_state() for _ in lengths]
    for i, (handle, length) in enumerate(zip(handles, lengths, strict=True)):
        for at in range(0, length, 64):
            program.prefill(handle, [(i + j) % 300 for j in range(at, min(at + 64, length))])
    return handles


def bits(program: FlatProgram, handle: Any) -> dict[str, bytes]:
    state = program.save(handle)
    return {name: array.tobytes() for name, array in state.tensors.items()}


def alone(program: FlatProgram, lengths: Sequence[int], tokens: int) -> list[Any]:
    """The logits of each stream, one after another, and the state that it ends with."""
    found = []
    for i, handle in enumerate(begun(program, lengths)):
        rows = [program.decode([handle], [(i + t) % 300])[0].tobytes() for t in range(tokens)]
        found.append((rows, bits(program, handle)))
        program.release(handle)
    return found


def together(program: FlatProgram, lengths: Sequence[int], tokens: int) -> list[Any]:
    handles = begun(program, lengths)
    rows = [program.decode(handles, [(i + t) % 300 for i in range(len(handles))]) for t in range(tokens)]
    return [([row[i].tobytes() for row in rows], bits(program, handle)) for i, handle in enumerate(handles)]


@pytest.mark.parametrize("lengths", [(5, 9), (5, 60, 61, 3), (1, 64, 90, 63, 7, 62)])
def test_each_gets_what_it_gets_alone(
    artifact: Artifact, lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them move to another capacity on the way, each at a step of its own."""
    program, runs = loaded(artifact, monkeypatch), []
    run = OpenVINOLanesCall.run

    def counted(call: OpenVINOLanesCall) -> None:
        runs.append(call)
        run(call)

    monkeypatch.setattr(OpenVINOLanesCall, "run", counted)
    assert together(program, lengths, 6) == alone(program, lengths, 6)
    assert len(runs) == 6 * -(-len(lengths) // LANES[0])
    program.close()


def test_weights_stand_once(artifact: Artifact) -> None:
    """Every large constant of the second model is one of the first, in the same place."""
    places = [
        {(int(p[1]), int(p[2])) for p in _PLACE.finditer(artifact.file(name).read_text())}
        for name in (f"{OPEN}.xml", MODEL)
    ]
    assert {place for place in places[1] if place[1] > 4096} <= places[0]
    assert max(first + size for first, size in places[0] | places[1]) == artifact.file(WEIGHTS).stat().st_size


@pytest.mark.parametrize(
    ("shape", "quantization", "has"),
    [
        ((1536, 48), "int8", False),  # the time steps of mamba-130m
        ((1536, 48), "f32", True),
        ((1536, 64), "int8", True),
        ((1536, 64), "int4", False),
        ((64, 48), "int8", True),  # too small to be quantized
    ],
)
def test_where_steps_of_several_streams_are_of_use(
    shape: tuple[int, int], quantization: Quantization, has: bool
) -> None:
    assert has_lanes({"dt": shape, "in": (3072, 768)}, quantization) == has


def test_lanes_have_capacities_of_their_own(artifact: Artifact) -> None:
    model = library.openvino().Core().read_model(artifact.file(MODEL), artifact.file(WEIGHTS))
    for port in model.inputs:
        assert port.partial_shape.is_dynamic == any(n.startswith(("key_", "value_")) for n in port.names)
    inputs = {n for port in model.inputs for n in port.names}
    assert inputs >= {of_lane(t.name, lane) for t in artifact.manifest.spec.tensors for lane in range(LANES[0])}


def test_an_artifact_of_before_runs_as_it_did(
    granite: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the properties that it had, and one step after another."""
    told: list[Mapping[str, Any]] = []
    compiled = Compiler.compiled

    def seen(compiler: Compiler, model: Path, weights: Path) -> Any:
        told.append(compiler._properties)
        return compiled(compiler, model, weights)

    monkeypatch.setattr(Compiler, "compiled", seen)
    program = OpenVINORuntime().load(without_lanes(granite, tmp_path / "before"))
    program.batches.open(8)
    assert program.batches.parts(5) == ((1, 1),) * 5
    assert program.step_cost(5) == 5
    assert together(program, (5, 9), 3) == alone(program, (5, 9), 3)
    program.close()
    OpenVINORuntime().load(granite).close()
    assert ["SNIPPETS_MODE" in properties for properties in told] == [False, True]


def test_a_model_that_cannot_be_opened_is_done_without(
    granite: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(granite.path, tmp_path / "m")
    model = tmp_path / "m" / MODEL
    model.write_text(model.read_text().replace('type="MatMul"', 'type="MatMuul"'))
    program = OpenVINORuntime().load(altered(granite, tmp_path / "m"))
    with caplog.at_level(logging.WARNING):
        program.batches.open(8)
    assert "4 streams are computed one after another: OpenVINO cannot load decode_b4.xml" in caplog.text
    assert together(program, (5, 9, 3), 3) == alone(program, (5, 9, 3), 3)
    program.close()


def test_a_lane_that_computes_otherwise_is_found(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fused, operations of fixed shapes have other bits; the open model is compiled without."""
    monkeypatch.setattr("ssmd_openvino.runtime.WITH_LANES", {"SNIPPETS_MODE": "DISABLE"})
    program = OpenVINORuntime().load(artifact)
    monkeypatch.setattr("ssmd_openvino.runtime.WITH_LANES", {"SNIPPETS_MODE": "ENABLE"})
    with caplog.at_level(logging.WARNING):
        program.batches.open(8)
    assert "lane 0 gives other numbers than a step alone" in caplog.text
    assert list(program.batches.costs) == [1]
    program.close()


def test_what_does_not_fit_a_lane_is_refused(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    program = loaded(granite, monkeypatch)
    batch, handle = program.batches._opened[LANES[0]], program.new_state()
    states, caches = handle.slot.recurrent[0], handle.slot.caches.arrays
    for name in (program.spec.recurrent[0].name, program.spec.rows[0].name):
        wrong = {**states, **caches}
        wrong[name] = wrong[name][:, :, :-1]
        with pytest.raises(GraphError, match=rf"tensor '{name}' needs \[.*was given"):
            batch._call.bound(wrong, states)
    program.close()


def test_too_little_memory_for_the_weights_again(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = OpenVINORuntime().load(granite)
    monkeypatch.setattr("ssmd_openvino.runtime.available", lambda: granite.file(WEIGHTS).stat().st_size)
    with caplog.at_level(logging.WARNING):
        program.batches.open(8)
    assert "4 streams are computed one after another: their weights take" in caplog.text
    assert conversation(program)
    program.close()
