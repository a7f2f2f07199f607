"""Qwen3.5's text model, dense (transformers' `Qwen3_5ForCausalLM`): gated DeltaNet and gated attention.

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2       (hidden,)
    gate_up, down      SwiGLU; gate's rows come first
    in, ba, out, conv, A, dt_bias, gated_norm
                       layers of gated DeltaNet; rows of `in`: z, q, k, v; of `ba`: b, a; A = -exp(A_log)
    q, gate, k, v, o   layers of attention, with *_bias; q_proj has for each head the rows of q, then of gate
    q_norm, k_norm     (head_dim,); the factor 1/sqrt(head_dim) stands in q_norm
All norms but gated_norm multiply by 1 + w: the 1 is in the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssmd.families.attention import attention, attention_of
from ssmd.families.decoder import decoder
from ssmd.families.fields import FamilyError, Fields, divides
from ssmd.families.layers import LayerKind, layer_kinds
from ssmd.families.mlp import mlp
from ssmd.families.weights import Array, Binding, mapped, stacked, tensor
from ssmd.model.plan import Attention, GatedDeltaNet, Layer, Mixer, Mlp, Plan
from ssmd.model.rope import Rope
from ssmd.model.source import Tensors

ROTATED = 0.25  # of head_dim, unless partial_rotary_factor says otherwise
INTERVAL = 4  # layers to each layer of attention, unless layer_types or full_attention_interval says otherwise
DEFAULTS = {"head_dim": 256, "max_position_embeddings": 32_768}  # what transformers takes where a config names none


@dataclass(frozen=True)
class Config:
    """A config.json's fields. prefix: begins the names of the text model's tensors, but for the head's."""

    vocabulary: int
    hidden: int
    mlp: Mlp
    layers: tuple[LayerKind, ...]
    mixer: GatedDeltaNet
    attention: Attention
    eps: float
    rope: Rope
    tied: bool
    max_position: int
    prefix: str = "model."

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field."""
        f = Fields(config, DEFAULTS, fixed={"layers_block_type": None})  # which transformers does not read
        f.silu("hidden_act")
        f.only("attn_output_gate", True, True)  # transformers has no other
        f.only("mlp_only_layers", [], [])  # of the config with experts
        f.size("num_key_value_heads")  # has no default that any checkpoint relies on
        eps = f.number("rms_norm_eps", 1e-6)
        max_position = f.size("max_position_embeddings")
        attention, rope = attention_of(f, max_position, partial=f.number("partial_rotary_factor", ROTATED), qk_eps=eps)
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=f.size("hidden_size"),
            mlp=Mlp(intermediate=f.size("intermediate_size"), bias=False),
            layers=_layer_kinds(f),
            mixer=_mixer(f, eps),
            attention=attention.model_copy(update={"gate": "values"}),
            eps=eps,
            rope=rope,
            tied=f.flag("tie_word_embeddings", False),
            max_position=rope.reach(max_position),
        )


def _layer_kinds(f: Fields) -> tuple[LayerKind, ...]:
    listed, interval = layer_kinds(f), f.size("full_attention_interval", INTERVAL)
    if listed is not None:  # as in transformers, whatever the interval
        return listed
    return tuple("mamba" if (i + 1) % interval else "attention" for i in range(f.size("num_hidden_layers")))


def _mixer(f: Fields, eps: float) -> GatedDeltaNet:
    heads, key_heads = f.size("linear_num_value_heads", 32), f.size("linear_num_key_heads", 16)
    divides(key_heads, heads, "linear_num_key_heads", "linear_num_value_heads")
    width = f.size("linear_conv_kernel_dim", 4)
    if width < 2:
        raise FamilyError(f"config.json: linear_conv_kernel_dim is {width}, expected at least 2")
    return GatedDeltaNet(
        heads=heads,
        key_heads=key_heads,
        key_dim=f.size("linear_key_head_dim", 128),
        value_dim=f.size("linear_value_head_dim", 128),
        width=width,
        eps=eps,
    )


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
    embedding = tensor(c.prefix + "embed_tokens.weight", c.vocabulary, c.hidden)
    norm = _norm(c.prefix + "norm.weight", c.hidden)
    return decoder(c, embedding, norm, (_layer(c, kind, f"{c.prefix}layers.{i}.") for i, kind in enumerate(c.layers)))


def _layer(c: Config, kind: LayerKind, source: str) -> dict[str, Binding]:
    return {
        "norm1": _norm(source + "input_layernorm.weight", c.hidden),
        "norm2": _norm(source + "post_attention_layernorm.weight", c.hidden),
        **mlp(c.mlp, c.hidden, source + "mlp."),
        **(_deltanet(c, source + "linear_attn.") if kind == "mamba" else _attention(c, source + "self_attn.")),
    }


def _norm(name: str, size: int, scale: float = 1.0) -> Binding:
    """Bind (1 + w) scale."""
    return mapped(lambda w: (1 + w) * np.float32(scale), tensor(name, size))


def _deltanet(c: Config, source: str) -> dict[str, Binding]:
    m, hidden = c.mixer, c.hidden
    z, qkv, b, a = (
        tensor(f"{source}in_proj_{name}.weight", rows, hidden)
        for name, rows in (("z", m.inner), ("qkv", m.channels), ("b", m.heads), ("a", m.heads))
    )
    return {
        "in": stacked(z, qkv),
        "ba": stacked(b, a),
        "out": tensor(source + "out_proj.weight", hidden, m.inner),
        "conv": mapped(lambda w: w.transpose(2, 1, 0), tensor(source + "conv1d.weight", m.channels, 1, m.width)),
        "A": mapped(lambda a: -np.exp(a), tensor(source + "A_log", m.heads)),
        "dt_bias": tensor(source + "dt_bias", m.heads),
        "gated_norm": tensor(source + "norm.weight", m.value_dim),
    }


def _attention(c: Config, source: str) -> dict[str, Binding]:
    a, hidden = c.attention, c.hidden
    made = attention(a, hidden, source, q=1.0)
    for part, name in enumerate(("q", "gate")):
        made[name] = _of_each_head(a, part, source + "q_proj.weight", hidden)
        if a.bias:
            made[name + "_bias"] = _of_each_head(a, part, source + "q_proj.bias")
    made["q_norm"] = _norm(source + "q_norm.weight", a.head_dim, a.head_dim**-0.5)
    made["k_norm"] = _norm(source + "k_norm.weight", a.head_dim)
    return made


def _of_each_head(a: Attention, part: int, name: str, *columns: int) -> Binding:
    """Bind a half of each head's rows of a tensor: `part` 0 is the query's, 1 the gate's."""
    shape = (2 * a.heads * a.head_dim, *columns)

    def blocks(source: Tensors) -> Iterator[Array]:
        for first in range(part * a.head_dim, shape[0], 2 * a.head_dim):
            yield source.tensor(name, shape, first, first + a.head_dim)

    return Binding(lambda source: np.concatenate(list(blocks(source))), blocks, {name: shape})
