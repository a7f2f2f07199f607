"""Bamba: Mamba-2 and attention layers with partial RoPE (transformers' `BambaForCausalLM`).

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2            (hidden,)
    those of swiglu.py
    those of mixer.py       Mamba layers
    those of attention.py   attention layers; the factor 1/sqrt(head_dim) stands in q
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families.attention import Attention
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.layers import LayerKind, layer_kinds
from ssmd.families.mixer import Mamba2Mixer
from ssmd.families.rope import Rope
from ssmd.families.swiglu import swiglu
from ssmd.families.weights import Binding, tensor
from ssmd.model.state import StateSpec

ROTATED = 0.5  # of head_dim, unless rope_parameters says otherwise


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: tuple[LayerKind, ...]
    mixer: Mamba2Mixer
    attention: Attention
    eps: float
    rope: Rope
    tied: bool
    mlp_bias: bool
    max_position: int

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """From config.json. Raises FamilyError naming the field."""
        f = Fields(config)
        f.only("hidden_act", "silu", "silu")
        eps = f.number("rms_norm_eps", 1e-5)
        attention, rope = Attention.parse(f, kv_heads=8), Rope.parse(f, partial=ROTATED)
        rotated = rope.rotated(attention.head_dim)
        f.only("attn_rotary_emb", rotated, rotated)
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=f.size("hidden_size"),
            intermediate=f.size("intermediate_size"),
            layers=_layer_kinds(f),
            mixer=Mamba2Mixer.parse(f, eps),
            attention=attention,
            eps=eps,
            rope=rope,
            tied=f.flag("tie_word_embeddings", False),
            mlp_bias=f.flag("mlp_bias", False),
            max_position=f.size("max_position_embeddings", 262_144),
        )


def _layer_kinds(f: Fields) -> tuple[LayerKind, ...]:
    """From `attn_layer_indices`; a list of kinds beside it must say the same."""
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


def state_spec(config: Config, kv_dtype: str = "float32") -> StateSpec:
    """conv and ssm of Mamba layers (always float32), key and value of attention layers."""
    c = config
    return StateSpec(
        tuple(
            t
            for i, kind in enumerate(c.layers)
            for t in (c.mixer.state(i) if kind == "mamba" else c.attention.state(i, kv_dtype))
        )
    )


def bindings(config: Config) -> dict[str, Binding]:
    c = config
    made: dict[str, Binding] = {
        "embedding": tensor("model.embed_tokens.weight", c.vocabulary, c.hidden),
        "norm": tensor("model.final_layernorm.weight", c.hidden),
    }
    if not c.tied:
        made["head"] = tensor("lm_head.weight", c.vocabulary, c.hidden)
    for i, kind in enumerate(c.layers):
        source = f"model.layers.{i}."
        layer = {
            "norm1": tensor(source + "input_layernorm.weight", c.hidden),
            "norm2": tensor(source + "pre_ff_layernorm.weight", c.hidden),
        }
        layer |= swiglu(source + "feed_forward.", c.hidden, c.intermediate, c.mlp_bias)
        if kind == "mamba":
            layer |= c.mixer.bindings(source + "mamba.")
        else:
            layer |= c.attention.bindings(source + "self_attn.", q=c.attention.head_dim**-0.5)
        made |= {f"layer{i}_{name}": binding for name, binding in layer.items()}
    return made
