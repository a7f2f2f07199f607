"""Source checkpoints of real shape with random weights, for measuring speed and memory without a download.

    python benchmarks/true_shape.py SHAPE FOLDER [--tokenizer FOLDER]    then: ssmd build FOLDER, ssmd bench NAME

SHAPE: granite-350m, mamba-130m, mamba2-130m or lfm2-350m. The text that such a model writes has no meaning; time and
memory do not depend on it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ssmd import smollm2
from ssmd.families.registry import family_of
from ssmd.source import Source

# As published; granite-4.0-h-350m has dense layers (num_local_experts 0).
GRANITE_350M: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 2048,
    "mamba_n_heads": 48,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.246,
    "attention_multiplier": 0.015625,
    "logits_scaling": 3.0,
    "position_embedding_type": "nope",
    "eos_token_id": 2,
}
MAMBA_130M: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": 50280,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_rank": 48,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
MAMBA2_130M: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": 50288,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
LFM2_350M: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "block_ff_dim": 6656,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128_000,
    "tie_embedding": True,
    "eos_token_id": 7,
}
SHAPES = {
    "granite-350m": GRANITE_350M,
    "mamba-130m": MAMBA_130M,
    "mamba2-130m": MAMBA2_130M,
    "lfm2-350m": LFM2_350M,
}


class Weights:
    """Stands for a Source: makes up each tensor that a family's bindings ask for, at the scale of a trained one."""

    def __init__(self, seed: int = 0) -> None:
        self.tensors: dict[str, NDArray[np.float16]] = {}
        self._rng = np.random.default_rng(seed)

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        made = self._rng.standard_normal(shape, np.float32)
        if name.endswith("A_log"):
            rows = np.log(np.arange(1, shape[-1] + 1))
            made = np.broadcast_to(rows, shape) + made * 0.05
        elif name.endswith(".D") or "norm" in name:
            made = 1 + made * 0.1
        elif name.endswith("bias"):
            made *= 0.1
        elif "conv" in name and len(shape) == 3:
            made *= 0.5
        elif "embed" in name:
            made *= 0.02
        else:
            made *= shape[-1] ** -0.5
        self.tensors[name] = made.astype(np.float16)
        return self.tensors[name].astype(np.float32)


def write(shape: str, folder: Path, tokenizer: Path) -> None:
    """Write the checkpoint in float16 with the tokenizer and template of the source checkpoint `tokenizer`."""
    config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    family, weights = family_of(config), Weights()
    for binding in family.bindings(family.parse(config)).values():
        binding(cast(Source, weights))
    save_file(weights.tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a source checkpoint; else SmolLM2's from its package")
    asked = parser.parse_args()
    if asked.tokenizer is not None:
        write(asked.shape, asked.folder, asked.tokenizer)
        return
    with tempfile.TemporaryDirectory() as temporary:
        smollm2.write_source(Path(temporary))
        write(asked.shape, asked.folder, Path(temporary))


if __name__ == "__main__":
    main()
