"""Tiny random source checkpoints of every family, written by transformers, the oracle of parity."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TEXT = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "A state-space model remembers the whole conversation in a few small tensors.",
    "Tell me a story about a river, a bridge and the people who cross it every morning.",
    "What is 12 + 30? It is 42. Why? Because arithmetic says so; ask me again tomorrow.",
    "Grüße aus Köln! 東京は日本の首都です。 Crème brûlée, naïve café, ½ cup of sugar.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRANITE: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 192,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.246,
    "attention_multiplier": 0.0625,
    "logits_scaling": 3.0,
    "position_embedding_type": None,
}
ROPE = {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
QWEN3: dict[str, Any] = LLAMA | {"head_dim": 24, "intermediate_size": 160}
MAMBA: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "state_size": 16,
    "time_step_min": 0.01,
    "time_step_max": 2.0,
    "time_step_scale": 0.25,
    "initializer_range": 0.02,  # at the default of 0.1 transformers itself is 5e-5 away from its float64 run
    "tie_word_embeddings": True,
}
LFM2: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 240,
    "block_multiple_of": 32,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
LFM2_MOE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
MAMBA2: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_heads": 12,
    "head_dim": 16,
    "state_size": 32,
    "n_groups": 1,
    "chunk_size": 32,
    "initializer_range": 0.02,
    "time_step_min": 0.01,
    "time_step_max": 2.0,
    "tie_word_embeddings": True,
}
BAMBA: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "attn_layer_indices": [2],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "mamba_n_heads": 12,
    "mamba_d_state": 32,
    "mamba_chunk_size": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
FALCON_H1: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_state": 32,
    "mamba_chunk_size": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.9, 0.6],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.6, 1.4, 0.7, 0.8, 0.5],
    "ssm_out_multiplier": 0.9,
}
NEMOTRON_H: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 12,
    "mamba_head_dim": 12,
    "ssm_state_size": 32,
    "n_groups": 2,
    "chunk_size": 32,
    "max_position_embeddings": 2048,
    "time_step_max": 2.0,
    "initializer_range": 0.02,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama-untied": ("llama", LLAMA | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama-rope3": ("llama", LLAMA | {"rope_parameters": LLAMA3_ROPE}),
    "granite": ("granitemoehybrid", GRANITE),
    "granite-groups": ("granitemoehybrid", GRANITE | {"mamba_n_groups": 2, "mamba_conv_bias": False}),
    "granite-rope": ("granitemoehybrid", GRANITE | ROPE | {"mamba_n_groups": 3, "tie_word_embeddings": False}),
    "granite-biases": ("granitemoehybrid", GRANITE | {"mamba_proj_bias": True, "attention_bias": True}),
    "qwen3": ("qwen3", QWEN3),
    "qwen3-untied": ("qwen3", QWEN3 | {"tie_word_embeddings": False, "attention_bias": True, "num_hidden_layers": 1}),
    "qwen3-odd": (
        "qwen3",
        QWEN3
        | {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 14, "vocab_size": 397},
    ),
    "mamba": ("mamba", MAMBA),
    "mamba-biases": (
        "mamba",
        MAMBA
        | {"tie_word_embeddings": False, "use_bias": True, "conv_kernel": 3, "state_size": 5, "time_step_rank": 7}
        | {"time_step_min": 0.001, "time_step_max": 0.1},
    ),
    "mamba-odd": (
        "mamba",
        MAMBA
        | {"hidden_size": 40, "expand": 16, "intermediate_size": 72, "use_conv_bias": False, "num_hidden_layers": 2}
        | {"layer_norm_epsilon": 1e-3, "vocab_size": 397, "residual_in_fp32": False, "state_size": 1},
    ),
    "falcon-mamba": ("falcon_mamba", MAMBA),
    "falcon-mamba-untied": (
        "falcon_mamba",
        MAMBA | {"tie_word_embeddings": False, "expand": 16, "intermediate_size": 80, "mixer_rms_eps": 0.3},
    ),
    "falcon-mamba-odd": (
        "falcon_mamba",
        MAMBA
        | {"vocab_size": 397, "use_bias": True, "use_conv_bias": False, "state_size": 7, "time_step_rank": 3}
        | {"num_hidden_layers": 1},
    ),
    "lfm2": ("lfm2", LFM2),
    "lfm2-first": (
        "lfm2",
        LFM2
        | {"layer_types": ["full_attention", "conv", "full_attention"], "num_hidden_layers": 3, "conv_L_cache": 4}
        | {"tie_word_embeddings": False, "conv_bias": True, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2-none": (
        "lfm2",
        LFM2
        | {"layer_types": ["conv"] * 3, "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-3},
    ),
    "lfm2-odd": (
        "lfm2",
        LFM2
        | {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 397, "conv_L_cache": 2}
        | {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    ),
    "lfm2-moe": ("lfm2_moe", LFM2_MOE),
    "lfm2-moe-all": (  # every expert is chosen
        "lfm2_moe",
        LFM2_MOE
        | {"num_experts": 5, "num_experts_per_tok": 5, "num_dense_layers": 0, "norm_topk_prob": False}
        | {"use_expert_bias": False, "tie_word_embeddings": False, "conv_bias": True, "conv_L_cache": 4}
        | {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 397}
        | {"moe_intermediate_size": 36},
    ),
    "lfm2-moe-single": (  # one expert is chosen; weights of one that is normed say nothing
        "lfm2_moe",
        LFM2_MOE | {"num_experts": 7, "num_experts_per_tok": 1, "num_dense_layers": 2, "norm_topk_prob": False},
    ),
    "lfm2-moe-one": (  # there is one expert
        "lfm2_moe",
        LFM2_MOE
        | {"num_experts": 1, "num_experts_per_tok": 1, "num_dense_layers": 0, "norm_eps": 1e-3}
        | {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2},
    ),
    "granite-moe": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40},
    ),
    "granite-moe-odd": (
        "granitemoehybrid",
        GRANITE
        | ROPE
        | {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size": 28, "mamba_n_groups": 2}
        | {"tie_word_embeddings": False, "vocab_size": 397, "shared_intermediate_size": 44},
    ),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2-groups": (
        "mamba2",
        MAMBA2 | {"n_groups": 2, "use_conv_bias": False, "tie_word_embeddings": False, "vocab_size": 397},
    ),
    "mamba2-odd": (
        "mamba2",
        MAMBA2
        | {"hidden_size": 60, "num_heads": 5, "head_dim": 24, "state_size": 9, "n_groups": 5, "conv_kernel": 3}
        | {"use_bias": True, "residual_in_fp32": False, "layer_norm_epsilon": 0.003},
    ),
    "bamba": ("bamba", BAMBA),
    "bamba-first": (
        "bamba",
        BAMBA
        | {"attn_layer_indices": [0], "hidden_size": 100, "num_attention_heads": 5, "num_key_value_heads": 5}
        | {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_conv_bias": False, "vocab_size": 397}
        | {"tie_word_embeddings": False, "num_hidden_layers": 2},
    ),
    "bamba-last": (
        "bamba",
        BAMBA
        | {"attn_layer_indices": [1, 3], "num_key_value_heads": 3, "mamba_n_groups": 3, "attention_bias": True}
        | {"mamba_proj_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1}
        | {"rope_parameters": LLAMA3_ROPE | {"partial_rotary_factor": 0.25}},
    ),
    "bamba-none": ("bamba", BAMBA | {"attn_layer_indices": None, "num_hidden_layers": 2, "mamba_d_conv": 2}),
    "falcon-h1": ("falcon_h1", FALCON_H1),
    "falcon-h1-norm": (
        "falcon_h1",
        FALCON_H1
        | {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_conv_bias": False, "tie_word_embeddings": True}
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 14, "vocab_size": 397},
    ),
    "falcon-h1-biases": (
        "falcon_h1",
        FALCON_H1
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None, "mamba_n_groups": 4}
        | {"projectors_bias": True, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}
        | {"num_hidden_layers": 2, "rms_norm_eps": 0.1},
    ),
    "falcon-h1-out-bias": (
        "falcon_h1",
        FALCON_H1 | {"projectors_bias": True, "num_key_value_heads": 3, "num_hidden_layers": 1, "mamba_d_conv": 3},
    ),
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "nemotron-h-biases": (
        "nemotron_h",
        NEMOTRON_H
        | {"layers_block_type": ["mlp", "full_attention", "linear_attention"], "n_groups": 4, "conv_kernel": 3}
        | {"mlp_bias": True, "use_bias": True, "layer_norm_epsilon": 0.003, "head_dim": 14, "vocab_size": 397},
    ),
}


def has_experts(variant: str) -> bool:
    """Return True if a variant has experts, which one runtime alone serves."""
    family, fields = VARIANTS[variant]
    return family == "lfm2_moe" or bool(fields.get("num_local_experts"))


def write_source(folder: Path, variant: str, seed: int = 0) -> Path:
    """Write a complete source checkpoint of `variant` into `folder`; the same for the same seed."""
    official(variant, write_tokenizer(folder), seed).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))  # transformers wrote its own
    return folder


def official(variant: str, vocabulary: int, seed: int = 0) -> Any:
    """transformers' model of `variant` with random weights that bring every part of it into play."""
    import transformers

    family, fields = VARIANTS[variant]
    fields = json.loads(json.dumps(fields))  # transformers writes into the objects in it
    config = transformers.AutoConfig.for_model(family, **{"vocab_size": vocabulary, **fields})
    return randomized(config, seed)


def randomized(config: Any, seed: int = 0) -> Any:
    """transformers' model of a config, with such weights."""
    import torch
    import transformers

    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("dt_bias", "dt_proj.bias", ".D", "A_log", "norm.weight", "norm_f.weight")):
                p.add_(torch.randn_like(p) * 0.2)
            elif name.endswith("bias"):
                p.copy_(torch.randn_like(p) * 0.1)
            elif "conv1d" in name or name.endswith("conv.weight"):
                p.copy_(torch.randn_like(p) * 0.3)
            else:
                p.mul_(4.0)
        for name, b in model.named_buffers():
            if name.endswith("expert_bias"):
                b.copy_(torch.randn_like(b) * 0.1)
    return model


def write_odd(folder: Path, fields: dict[str, Any], seed: int = 0) -> Any:
    """Write a source checkpoint whose config.json is `fields` as they stand. Returns transformers' model of it."""
    import transformers

    said = json.dumps({"vocab_size": write_tokenizer(folder), **fields})
    (folder / "config.json").write_text(said)
    model = randomized(transformers.AutoConfig.from_pretrained(folder), seed)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(said)  # transformers wrote its own
    return model


def write_tokenizer(folder: Path) -> int:
    """A byte-level BPE with ChatML's special tokens, its settings and chat template. Returns the vocabulary's size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2], "unk_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size: int = tokenizer.get_vocab_size()
    return size


if __name__ == "__main__":
    import sys

    # Of this process alone, before it imports PyTorch: without it logarithms, of which weights are made, depend on the
    # processor. A build that had it would add in another order than one without.
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    for variant in sys.argv[2:]:
        write_source(Path(sys.argv[1]) / variant, variant)
