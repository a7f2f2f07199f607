"""Artifacts that earlier versions built still open. What is in `data/` is never made again: new formats add to it.

wgpu-plans.json holds config.json and plan.json (format 1) of a tiny model of each family, wgpu-mamba a whole artifact
in int8, whose weights are packed otherwise than the family binds them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from ssmd.families.registry import family_of
from ssmd.model.artifact import Artifact
from ssmd.runtime.verify import verify
from ssmd_wgpu.build import packed_plan
from ssmd_wgpu.device import adapters
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.runtime import WgpuRuntime

DATA = Path(__file__).parents[2] / "data"
PLANS = json.loads((DATA / "wgpu-plans.json").read_text())


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_format_1_says_what_the_family_says_today(name: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLANS[name]["plan"]))
    config = PLANS[name]["config"]
    family = family_of(config)
    assert PackedPlan.open(file) == packed_plan(family, family.parse(config), 512).model_copy(update={"rope": None})


def test_a_plan_whose_rope_is_stretched_as_there_was_one_way(tmp_path: Path) -> None:
    """It did not say which."""
    config = {"vocab_size": 384, **PLANS["llama-untied"]["config"], "rope_scaling": tiny.LLAMA3_ROPE}
    family = family_of(config)
    plan = packed_plan(family, family.parse(config), 512)
    fields = json.loads(plan.model_dump_json())
    assert fields["rope"]["scaling"].pop("kind") == "llama3"
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    assert PackedPlan.open(tmp_path / "plan.json") == plan


@pytest.mark.skipif(not adapters(), reason="no adapter: apt install mesa-vulkan-drivers libvulkan1")
def test_an_old_artifact_computes_its_golden_values() -> None:
    artifact = Artifact.open(DATA / "wgpu-mamba")
    program = WgpuRuntime().load(artifact)
    try:
        assert verify(artifact, program).passed
    finally:
        program.close()
