"""Bamba: Mamba-2 and attention layers with partial RoPE (transformers' `BambaForCausalLM`).

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2            (hidden,)
    those of mlp.py
    those of mixer.py       Mamba layers
    those of attention.py   attention layers; the factor 1/sqrt(head_dim) stands in q
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families.attention import attention, attention_of
from ssmd.families.decoder import decoder
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.layers import LayerKind, layer_kinds
from ssmd.families.mixer import mamba2, mamba2_of
from ssmd.families.mlp import mlp
from ssmd.families.weights import Binding, tensor
from ssmd.model.plan import Attention, Layer, Mamba2, Mixer, Mlp, Plan
from ssmd.model.rope import Rope

ROTATED = 0.5  # of head_dim, unless rope_parameters says otherwise


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    mlp: Mlp
    layers: tuple[LayerKind, ...]
    mixer: Mamba2
    attention: Attention
    eps: float
    rope: Rope
    tied: bool
    max_position: int

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field."""
        f = Fields(config)
        f.silu("hidden_act")
        eps = f.number("rms_norm_eps", 1e-5)
        max_position = f.size("max_position_embeddings", 262_144)
        attention, rope = attention_of(f, max_position, kv_heads=8, partial=ROTATED)
        f.only("attn_rotary_emb", attention.rotated, attention.rotated)
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=f.size("hidden_size"),
            mlp=Mlp(intermediate=f.size("intermediate_size"), bias=f.flag("mlp_bias", False)),
            layers=_layer_kinds(f),
            mixer=mamba2_of(f, eps),
            attention=attention,
            eps=eps,
            rope=rope,
            tied=f.flag("tie_word_embeddings", False),
            max_position=rope.reach(max_position),
        )


def _layer_kinds(f: Fields) -> tuple[LayerKind, ...]:
    """Read the kinds of layers from `attn_layer_indices`; a list of kinds beside it must agree."""
    count, listed, indices = f.size("num_hidden_layers"), layer_kinds(f), f.get("attn_layer_indices")
    if indices is None and listed is not None:
        return listed
    indices = [] if indices is None else indices
    if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < count for i in indices):
        raise FamilyError(
            f"config.json: attn_layer_indices is {indices!r}, expected a list of numbers below "
            f"num_hidden_layers = {count}"
        )
    kinds: tuple[LayerKind, ...] = tuple("attention" if i in indices else "mamba" for i in range(count))
    if listed not in (None, kinds):
        raise FamilyError(f"config.json: attn_layer_indices is {indices!r}, but the list of layer types says otherwise")
    return kinds


def plan(config: Config) -> Plan:
    """Describe the model."""
    c = config
    kinds: dict[str, Mixer] = {"mamba": c.mixer, "attention": c.attention}
    return Plan(
        hidden=c.hidden,
        vocabulary=c.vocabulary,
        eps=c.eps,
        embedding_scale=1.0,
        tied=c.tied,
        rope=c.rope,
        layers=tuple(Layer(mixers=(kinds[kind],), mlp=c.mlp) for kind in c.layers),
    )


def bindings(config: Config) -> dict[str, Binding]:
    """Bind every parameter to a source's tensors."""
    c = config
    embedding = tensor("model.embed_tokens.weight", c.vocabulary, c.hidden)
    norm = tensor("model.final_layernorm.weight", c.hidden)
    return decoder(c, embedding, norm, (_layer(c, kind, f"model.layers.{i}.") for i, kind in enumerate(c.layers)))


def _layer(c: Config, kind: LayerKind, source: str) -> dict[str, Binding]:
    made = {
        "norm1": tensor(source + "input_layernorm.weight", c.hidden),
        "norm2": tensor(source + "pre_ff_layernorm.weight", c.hidden),
        **mlp(c.mlp, c.hidden, source + "feed_forward."),
    }
    if kind == "mamba":
        return made | mamba2(c.mixer, c.hidden, source + "mamba.")
    return made | attention(c.attention, c.hidden, source + "self_attn.", q=c.attention.head_dim**-0.5)
