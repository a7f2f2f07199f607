"""Rule 4: a state saved on one runtime goes on on another of the same lineage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from conftest import BUILT, FAMILIES, FOREIGN, RUNTIMES
from contract.driving import decode, feed
from evaluated import runtime_of
from numpy.typing import NDArray

from ssmd.model.artifact import Artifact
from ssmd.model.state import State
from ssmd.runtime.protocol import Program
from ssmd_wgpu.device import adapters

HERE = [r for r in RUNTIMES if r != "wgpu" or adapters()]  # scripts/setup says what a machine without one lacks
if FOREIGN:  # with the shipped one whose artifacts are made quickest
    HERE = [*FOREIGN, "wgpu" if adapters() else "openvino"]
F32 = (RUNTIMES[0], "f32")
NAMES = (
    [f"{f}-f32" for f in FAMILIES] if FOREIGN else [n for n, b in BUILT.items() if (b.runtime, b.quantization) == F32]
)
# Of the others test_parity.py says that states are PyTorch's.
USUAL = ("granite-f32", "falcon-mamba-f32", "lfm2-f32", "lfm3-f32")
PAIRS = [(a, b) for a in HERE for b in HERE if a != b]
TOLERANCE = 5e-5  # of float32 graphs, in standard deviations of the logits, as between two splits of a prompt


def artifact(artifacts: Mapping[str, Path], runtime: str, name: str) -> Artifact:
    return Artifact.open(artifacts[name if runtime == "litert" else f"{runtime}-{name}"])


@pytest.fixture(
    scope="module",
    params=NAMES if FOREIGN else [pytest.param(n, marks=[] if n in USUAL else [pytest.mark.full]) for n in NAMES],
)
def programs(request: pytest.FixtureRequest, artifacts: Mapping[str, Path]) -> Iterator[dict[str, Program]]:
    there = [r for r in HERE if r in FOREIGN or (request.param if r == "litert" else f"{r}-{request.param}") in BUILT]
    found = {r: runtime_of(r).load(artifact(artifacts, r, request.param)) for r in there}
    yield found
    for program in found.values():
        program.close()


@pytest.fixture(scope="module")
def moved(programs: dict[str, Program]) -> dict[str, tuple[State, NDArray[np.float32]]]:
    """By runtime: its state after 90 tokens, and its logits (30, V) of those that follow."""
    found = {}
    for runtime, program in programs.items():
        ids, handle = ids_of(program), program.new_state()
        feed(program, handle, ids[:90], (64, 16, 10))
        found[runtime] = program.save(handle), decode(program, handle, ids[90:])
    return found


def ids_of(program: Program) -> list[int]:
    ids: list[int] = np.random.default_rng(5).integers(0, program.vocabulary, 120).tolist()
    return ids


@pytest.mark.parametrize(("origin", "target"), PAIRS)
def test_a_state_goes_on_elsewhere(
    programs: dict[str, Program], moved: dict[str, tuple[State, NDArray[np.float32]]], origin: str, target: str
) -> None:
    if not {origin, target} <= programs.keys():
        pytest.skip("a runtime of the two does not compute attention within a window")
    other, (state, expected) = programs[target], moved[origin]
    there = other.restore(state)
    assert other.position(there) == 90
    found = decode(other, there, ids_of(other)[90:])
    assert np.abs(found - expected).max() <= TOLERANCE * expected.std()


def test_artifacts_of_one_source_share_lineage_and_layout(artifacts: Mapping[str, Path]) -> None:
    runtimes, name = (HERE, NAMES[0]) if FOREIGN else (RUNTIMES, "granite-int8")
    made = [artifact(artifacts, r, name).manifest for r in runtimes]
    assert len({m.lineage for m in made}) == 1
    assert len({m.spec.digest() for m in made}) == 1
    assert len({m.build for m in made}) == len(runtimes)
