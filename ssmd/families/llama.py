"""Llama: attention with RoPE and grouped queries, SwiGLU, RMSNorm (transformers' `LlamaForCausalLM`).

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2  (hidden,)
    q, k, v, o    attention; the factor 1/sqrt(head_dim) stands in q
    q_norm, k_norm  (head_dim,) where the family normalizes queries and keys; the factor 1/sqrt(head_dim) stands here
    those of mlp.py
    *_bias        where the config has biases

Qwen3 is the same with norms of queries and keys: ssmd/families/qwen3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families.attention import attention, attention_of
from ssmd.families.decoder import decoder
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.layers import full_attention
from ssmd.families.mlp import mlp
from ssmd.families.weights import Binding, tensor
from ssmd.model.plan import Attention, Layer, Mlp, Plan
from ssmd.model.rope import Rope


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    mlp: Mlp
    layers: int
    attention: Attention
    eps: float
    rope: Rope
    tied: bool
    max_position: int

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field."""
        f = Fields(config)
        if not full_attention(f):  # what transformers' cache makes of windows without layer_types
            for name in ("sliding_window", "attention_chunk_size"):
                if f.get(name) is not None:
                    raise FamilyError(f"config.json: {name} is {f.get(name)!r}; windows are not supported")
        return Config.of(f)

    @staticmethod
    def of(f: Fields, *, qk_norm: bool = False) -> Config:
        """Read all fields but those of windows. qk_norm: queries and keys are normalized. Raises FamilyError."""
        f.silu("hidden_act")
        eps = f.number("rms_norm_eps", 1e-6)
        max_position = f.size("max_position_embeddings", 2048)
        attention, rope = attention_of(f, max_position, qk_eps=eps if qk_norm else None)
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=f.size("hidden_size"),
            mlp=Mlp(intermediate=f.size("intermediate_size"), bias=f.flag("mlp_bias", False)),
            layers=f.size("num_hidden_layers"),
            attention=attention,
            eps=eps,
            rope=rope,
            tied=f.flag("tie_word_embeddings", False),
            max_position=rope.reach(max_position),
        )


def plan(config: Config) -> Plan:
    """Describe the model."""
    c = config
    layer = Layer(mixers=(c.attention,), mlp=c.mlp)
    return Plan(
        hidden=c.hidden,
        vocabulary=c.vocabulary,
        eps=c.eps,
        embedding_scale=1.0,
        tied=c.tied,
        rope=c.rope,
        layers=(layer,) * c.layers,
    )


def bindings(config: Config) -> dict[str, Binding]:
    """Bind every parameter to a source's tensors."""
    c = config
    embedding = tensor("model.embed_tokens.weight", c.vocabulary, c.hidden)
    norm = tensor("model.norm.weight", c.hidden)
    return decoder(c, embedding, norm, (_layer(c, f"model.layers.{i}.") for i in range(c.layers)))


def _layer(c: Config, source: str) -> dict[str, Binding]:
    a, part, scale = c.attention, source + "self_attn.", c.attention.head_dim**-0.5
    made = {
        "norm1": tensor(source + "input_layernorm.weight", c.hidden),
        "norm2": tensor(source + "post_attention_layernorm.weight", c.hidden),
    }
    if a.qk_eps is not None:
        for name, factor in (("q_norm", scale), ("k_norm", 1.0)):
            made[name] = tensor(f"{part}{name}.weight", a.head_dim, scale=factor)
    made |= attention(a, c.hidden, part, q=scale if a.qk_eps is None else 1.0)
    return made | mlp(c.mlp, c.hidden, source + "mlp.")
