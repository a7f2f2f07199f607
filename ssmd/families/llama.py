"""Llama: attention with RoPE and grouped queries, SwiGLU, RMSNorm (transformers' `LlamaForCausalLM`).

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2  (hidden,)
    q, k, v, o    attention; the factor 1/sqrt(head_dim) stands in q
    q_norm, k_norm  (head_dim,) where the family normalizes queries and keys; the factor 1/sqrt(head_dim) stands here
    gate_up, down SwiGLU; gate's rows come first
    *_bias        where the config has biases

Qwen3 is the same with norms of queries and keys: ssmd/families/qwen3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families.fields import Fields, divides
from ssmd.families.rope import Rope
from ssmd.families.weights import Binding, stacked, tensor
from ssmd.model.state import StateSpec, TensorSpec


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    max_position: int
    qk_norm: bool = False

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """From config.json. Raises FamilyError naming the field."""
        f = Fields(config)
        f.only("hidden_act", "silu", "silu")
        hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
        kv_heads = f.size("num_key_value_heads", heads)
        divides(kv_heads, heads, "num_key_value_heads", "num_attention_heads")
        if f.get("head_dim") is None:
            head_dim = divides(heads, hidden, "num_attention_heads", "hidden_size")
        else:
            head_dim = f.size("head_dim")
        divides(2, head_dim, "2", "head_dim")
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=hidden,
            intermediate=f.size("intermediate_size"),
            layers=f.size("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=f.number("rms_norm_eps", 1e-6),
            rope=Rope.parse(f),
            tied=f.flag("tie_word_embeddings", False),
            attention_bias=f.flag("attention_bias", False),
            mlp_bias=f.flag("mlp_bias", False),
            max_position=f.size("max_position_embeddings", 2048),
        )


def state_spec(config: Config, kv_dtype: str = "float32") -> StateSpec:
    """KV of every layer, keys after RoPE."""
    shape = (config.kv_heads, config.head_dim)
    return StateSpec(
        tuple(
            TensorSpec(f"{kind}_{i}", kind, i, shape, kv_dtype)
            for i in range(config.layers)
            for kind in ("key", "value")
        )
    )


def bindings(config: Config) -> dict[str, Binding]:
    c = config
    made: dict[str, Binding] = {
        "embedding": tensor("model.embed_tokens.weight", c.vocabulary, c.hidden),
        "norm": tensor("model.norm.weight", c.hidden),
    }
    if not c.tied:
        made["head"] = tensor("lm_head.weight", c.vocabulary, c.hidden)
    for i in range(c.layers):
        source, to = f"model.layers.{i}.", f"layer{i}_"
        made[to + "norm1"] = tensor(source + "input_layernorm.weight", c.hidden)
        made[to + "norm2"] = tensor(source + "post_attention_layernorm.weight", c.hidden)
        scale = c.head_dim**-0.5
        if c.qk_norm:
            for name, factor in (("q_norm", scale), ("k_norm", 1.0)):
                made[to + name] = tensor(f"{source}self_attn.{name}.weight", c.head_dim, scale=factor)
        for name, rows, columns, factor in (
            ("q", c.heads * c.head_dim, c.hidden, 1.0 if c.qk_norm else scale),
            ("k", c.kv_heads * c.head_dim, c.hidden, 1.0),
            ("v", c.kv_heads * c.head_dim, c.hidden, 1.0),
            ("o", c.hidden, c.heads * c.head_dim, 1.0),
        ):
            part = f"{source}self_attn.{name}_proj."
            made[to + name] = tensor(part + "weight", rows, columns, scale=factor)
            if c.attention_bias:
                made[f"{to}{name}_bias"] = tensor(part + "bias", rows, scale=factor)
        gate, up, down = (f"{source}mlp.{name}_proj." for name in ("gate", "up", "down"))
        made[to + "gate_up"] = stacked(*(tensor(p + "weight", c.intermediate, c.hidden) for p in (gate, up)))
        made[to + "down"] = tensor(down + "weight", c.hidden, c.intermediate)
        if c.mlp_bias:
            made[to + "gate_up_bias"] = stacked(*(tensor(p + "bias", c.intermediate) for p in (gate, up)))
            made[to + "down_bias"] = tensor(down + "bias", c.hidden)
    return made
