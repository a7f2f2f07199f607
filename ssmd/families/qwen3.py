"""Qwen3, dense: Llama whose queries and keys are normalized before RoPE (transformers' `Qwen3ForCausalLM`).

Its head_dim does not depend on the hidden size. Parameters as in ssmd/families/llama.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssmd.families import llama
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.layers import full_attention

DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32_768}  # what transformers takes where a config names none


def parse(config: Mapping[str, Any]) -> llama.Config:
    """Read config.json. Raises FamilyError naming the field."""
    f = Fields(config, DEFAULTS, fixed={"mlp_bias": False})
    f.size("num_key_value_heads")  # has no default that any checkpoint relies on
    layers = f.size("num_hidden_layers")
    if not full_attention(f) and f.flag("use_sliding_window", False) and f.get("sliding_window") is not None:
        first = f.get("max_window_layers")
        if not (type(first) is int and first >= layers):
            raise FamilyError(
                f"config.json: use_sliding_window is true from layer {first!r} (max_window_layers) on; sliding windows "
                "are not supported"
            )
    return llama.Config.of(f, qk_norm=True)
