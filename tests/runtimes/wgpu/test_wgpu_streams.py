"""Streams that decode together on wgpu: each bit for bit what it is alone, whichever others join and leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyArtifacts
from contract.driving import decode, same, started

from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd_wgpu.build import CONVERTER
from ssmd_wgpu.device import adapters
from ssmd_wgpu.pack import Format
from ssmd_wgpu.program import WgpuProgram
from ssmd_wgpu.runtime import WgpuRuntime

pytestmark = pytest.mark.skipif(not adapters(), reason="no adapter: apt install mesa-vulkan-drivers libvulkan1")
PROMPTS = (3, 40, 77, 1, 130, 64, 9, 255)  # tokens; some steps go into a second page
STEPS = 6
# A family of each kind of layer, and each format of weights.
CASES: list[tuple[str, Format]] = [
    *(("granite", q) for q in ("int8", "int4")),
    *((v, "f32") for v in ("falcon-mamba", "lfm2", "falcon-h1-norm", "qwen3", "qwen3.5", "lfm2-moe")),
]
MORE: list[tuple[str, Format]] = [
    *(("granite", q) for q in ("f16", "f32")),
    *((v, "int4") for v in ("falcon-mamba", "lfm2", "qwen3", "qwen3.5")),
    *((v, "int8") for v in ("nemotron-h-biases", "mamba2-groups", "mamba", "qwen3.5", "granite-moe")),
    ("lfm2-moe", "int4"),
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((*case, name), marks=[] if case in CASES and name == where else [pytest.mark.full])
        for i, case in enumerate(CASES + MORE)
        for where in [("vulkan", "gl")[i % 2]]
        for name in ("vulkan", "gl")
    ],
    ids="-".join,
)
def program(
    request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WgpuProgram]:
    variant, quantization, name = request.param
    if name not in {a.name for a in adapters() if not a.why_not}:
        pytest.skip(f"no adapter {name} here")
    folder: Path = artifacts[f"wgpu-{variant}-f32"]
    artifact = Artifact.open(folder)
    if quantization != "f32":
        source, to = Source.open(artifacts.source(f"wgpu-{variant}-f32")), tmp_path_factory.mktemp("built")
        artifact = CONVERTER.build(source, to / "artifact", name="tiny", quantization=quantization, tiers=[512])
    made = WgpuRuntime().load(artifact, device=name)
    yield made
    made.close()


def test_a_stream_is_the_same_in_any_company(program: WgpuProgram) -> None:
    """Logits of every step, and the state at the end."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, program.vocabulary, n).tolist() for n in PROMPTS]
    tokens = rng.integers(0, program.vocabulary, (len(PROMPTS), STEPS)).tolist()
    alone: list[tuple[Any, Any]] = []
    for prompt, own in zip(prompts, tokens, strict=True):
        handle = started(program, prompt)
        alone.append((decode(program, handle, own), program.save(handle)))
        program.release(handle)
    handles: dict[int, Any] = {}
    fed = [0] * len(PROMPTS)
    sizes = set()
    while min(fed) < STEPS:
        here = [i for i in range(len(PROMPTS)) if fed[i] < STEPS]
        together = rng.permutation(here)[: rng.integers(1, 9)].tolist()
        sizes.add(len(together))
        for i in together:
            if i not in handles:
                handles[i] = started(program, prompts[i])
        logits = program.decode([handles[i] for i in together], [tokens[i][fed[i]] for i in together])
        for row, i in zip(logits, together, strict=True):
            assert row.tobytes() == alone[i][0][fed[i]].tobytes(), (i, fed[i], together)
            fed[i] += 1
            if fed[i] == STEPS:
                assert same(program.save(handles[i]), alone[i][1])
                program.release(handles.pop(i))
    assert len(sizes) > 4


def test_more_streams_than_a_step_takes(artifacts: TinyArtifacts) -> None:
    program = WgpuRuntime().load(Artifact.open(artifacts["wgpu-granite-f32"]))
    handles = [started(program, list(range(3 + i))) for i in range(11)]
    twins = [program.clone(handle) for handle in handles[:3]]
    logits = program.decode(handles, list(range(11)))
    for i, twin in zip((0, 1, 2), twins, strict=True):
        assert program.decode([twin], [i])[0].tobytes() == logits[i].tobytes()
    assert [program.position(handle) for handle in handles] == [4 + i for i in range(11)]
    program.close()
