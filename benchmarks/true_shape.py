"""Source checkpoints of real shape with random weights, for measuring speed and memory without a download.

    python benchmarks/true_shape.py FOLDER [--tokenizer FOLDER]    then: ssmd build FOLDER --name granite-350m

The text that such a model writes has no meaning; time and memory do not depend on it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# granite-4.0-h-350m as published, with dense layers (num_local_experts 0).
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


def write_granite_350m(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """Write the checkpoint (float16, 680 MB) with the tokenizer and template of the source checkpoint `tokenizer`."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GRANITE_350M, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    save_file(dict(_weights(GRANITE_350M, np.random.default_rng(seed))), folder / "model.safetensors")
    return folder


def _weights(c: dict[str, Any], rng: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """Random values at the scales of a trained model; no two tensors are alike."""

    def normal(*shape: int, scale: float, mean: float = 0.0) -> NDArray[np.float16]:
        return (rng.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(mean)).astype(np.float16)

    hidden, inner, mlp = c["hidden_size"], c["mamba_expand"] * c["hidden_size"], c["shared_intermediate_size"]
    heads = c["mamba_n_heads"]
    channels = inner + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    yield "model.embed_tokens.weight", normal(c["vocab_size"], hidden, scale=0.02)
    yield "model.norm.weight", normal(hidden, scale=0.1, mean=1.0)
    for i, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", normal(hidden, scale=0.1, mean=1.0)
        yield layer + "post_attention_layernorm.weight", normal(hidden, scale=0.1, mean=1.0)
        yield layer + "shared_mlp.input_linear.weight", normal(2 * mlp, hidden, scale=hidden**-0.5)
        yield layer + "shared_mlp.output_linear.weight", normal(hidden, mlp, scale=mlp**-0.5)
        if kind == "attention":
            for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
                yield f"{layer}self_attn.{name}_proj.weight", normal(rows, hidden, scale=hidden**-0.5)
            continue
        mamba = layer + "mamba."
        yield mamba + "in_proj.weight", normal(inner + channels + heads, hidden, scale=hidden**-0.5)
        yield mamba + "out_proj.weight", normal(hidden, inner, scale=inner**-0.5)
        yield mamba + "conv1d.weight", normal(channels, 1, c["mamba_d_conv"], scale=0.5)
        yield mamba + "conv1d.bias", normal(channels, scale=0.1)
        yield mamba + "dt_bias", normal(heads, scale=0.5)
        yield mamba + "A_log", (np.log(np.arange(1, heads + 1)) + rng.normal(0, 0.05, heads)).astype(np.float16)
        yield mamba + "D", normal(heads, scale=0.1, mean=1.0)
        yield mamba + "norm.weight", normal(inner, scale=0.1, mean=1.0)


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a source checkpoint; else SmolLM2's from its package")
    asked = parser.parse_args()
    if asked.tokenizer is not None:
        write_granite_350m(asked.folder, asked.tokenizer)
        return
    from ssmd import smollm2

    with tempfile.TemporaryDirectory() as temporary:
        smollm2.write_source(Path(temporary))
        write_granite_350m(asked.folder, Path(temporary))


if __name__ == "__main__":
    main()
