"""Artifacts of odd configs: their golden values are those of transformers, not of ssmd's own reading alone, and their
programs give them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import numpy as np
import oracle
import pytest
import tiny
from far import check_far
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ssmd.model.artifact import GOLDEN, Artifact
from ssmd.runtime.protocol import get_runtime

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers' own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

RELATIVE = 1e-5  # of the largest logit
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
RUNTIMES = ["wgpu", "openvino", pytest.param("litert", marks=pytest.mark.full)]
CONTEXT = 8320  # tokens
SAID = "lm_head.weight is there and is not the embedding: it is used, as transformers 5 does"


def build(source: Path, runtime: str) -> tuple[Path, str]:
    """The artifact, in a process of its own, as converters warn and keep gigabytes; and what was said."""
    asked = ("--runtime", runtime, "--quant", "f32", "--buckets", "16", "--context", str(CONTEXT))
    done = subprocess.run(
        [sys.executable, "-m", "ssmd", "build", str(source), "--name", "odd", *asked, "--models-dir", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [artifact] = (source / "odd").iterdir()
    return artifact, done.stdout


def golden_error(artifact: Path, model: Any) -> float:
    golden = load_file(artifact / GOLDEN)
    expected: NDArray[np.float32] = oracle.continued(model, golden["tokens"].tolist())[0][golden["positions"]]
    return float(np.abs(golden["logits"] - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_config_that_says_two_things(tmp_path: Path, runtime: str) -> None:
    """`rope_scaling` beside `rope_parameters`, at positions up to 40, where the model was trained for 16; and tied
    embeddings beside a head of its own. Then far positions, in tiers beyond 2,048 and 8,192 tokens."""
    transformers = pytest.importorskip("transformers")
    fields = {**tiny.LLAMA, "rope_scaling": YARN, "max_position_embeddings": CONTEXT}
    tiny.write_odd(tmp_path, {"model_type": "llama", **fields, "qk_norm": True})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(96, np.float32)  # config.json says that there is none
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    artifact, said = build(tmp_path, runtime)
    assert SAID in said
    assert "config.json has fields that change nothing here, nor in transformers: qk_norm\n" in said
    assert "no use for these tensors, nor has transformers: model.layers.0.self_attn.q_proj.bias\n" in said
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert golden_error(artifact, model) < RELATIVE
    if runtime != "wgpu" or pytest.importorskip("ssmd_wgpu.device").adapters():
        done = commands.ssmd("verify", str(artifact), env=os.environ)
        assert done.returncode == 0, done.stdout + done.stderr
        program = get_runtime(runtime).load(Artifact.open(artifact))
        try:
            assert program.context == CONTEXT
            for position in (2040, CONTEXT - 21):
                check_far(program, model, position, rope=True)
        finally:
            program.close()
