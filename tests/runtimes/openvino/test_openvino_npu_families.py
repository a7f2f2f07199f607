"""Every family for the NPU, by the command that a user types: built, verified, and held against transformers.

Core ML and the NPU cannot execute here: OpenVINO's CPU plugin runs what was built.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
import tiny
from conftest import ONE_EACH
from contract.driving import decode, error
from typer.testing import CliRunner

from ssmd.cli import app
from ssmd.model.artifact import Artifact
from ssmd_openvino.runtime import OpenVINORuntime

# Largest error in standard deviations: what a family multiplies its weights by, it does before they become float16.
# Measured 3e-5 (mamba) to 3.6e-3 (falcon-h1-norm).
TOLERANCE = 5e-3
USUAL = ("bamba-last",)  # a hybrid with RoPE: of each kind of state one, and its tables


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[] if v in USUAL else [pytest.mark.full]) for v in ONE_EACH])
def test_a_family_for_the_npu(variant: str, tmp_path: Path) -> None:
    source, models = tiny.write_source(tmp_path / "tiny", variant), str(tmp_path / "models")
    asked = ("--runtime", "npu", "--models-dir", models)
    made = CliRunner().invoke(app, ["build", str(source), *asked, "--buckets", "16", "--context", "64"])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(app, ["verify", "tiny", *asked, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "passed" in done.stdout
    program = OpenVINORuntime().load(Artifact.open(tmp_path / "models/tiny/openvino-npu-f16"), device="cpu")
    try:
        ids = np.random.default_rng(11).integers(0, program.vocabulary, 40).tolist()
        handle = program.new_state()
        rows = [program.prefill(handle, ids[at:end])[None] for at, end in ((0, 16), (16, 25))]
        found = np.concatenate([*rows, decode(program, handle, ids[25:])])
    finally:
        program.close()
    half = tiny.official(variant, len(found[0])).half().float()  # the weights as they are stored
    expected, _ = oracle.continued(half, ids)
    assert error(found, expected[[15, 24, *range(25, 40)]]) <= TOLERANCE
