"""Granite 4.0 H, dense: Mamba-2 (arXiv:2405.21060) and attention layers (transformers' `GraniteMoeHybridForCausalLM`).

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2            (hidden,)
    gate_up, down           SwiGLU; gate's rows come first
    q, k, v, o              attention layers; the attention multiplier stands in q
    in, out                 Mamba layers: (inner + C + H, hidden), (hidden, inner); rows of `in`: gate, conv input, dt
    conv                    (K, 1, C)
    A, D, dt_bias           (H,); A = -exp(A_log)
    gated_norm              (inner,)
    *_bias                  where the config has biases
The residual multiplier stands in o, out and down; the logits' divisor in norm. Only the embedding multiplier is left
to the module: the embedding may be the head as well.

Glossary: H heads, P head_dim and N d_state of the Mamba layers, G groups, K conv width, inner = H P, C = inner + 2 G N.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ssmd.families.fields import FamilyError, Fields, divides
from ssmd.families.rope import Rope
from ssmd.families.weights import Binding, mapped, tensor
from ssmd.state import Kind, StateSpec, TensorSpec

LayerKind = Literal["mamba", "attention"]
SPELLINGS: dict[str, LayerKind] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_state: int
    mamba_groups: int
    mamba_conv: int
    conv_bias: bool
    proj_bias: bool
    attention_bias: bool
    time_step_limit: tuple[float, float]
    eps: float
    rope: Rope | None
    tied: bool
    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float
    max_position: int

    @property
    def inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.mamba_groups * self.mamba_state

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """From config.json. Raises FamilyError naming the field."""
        f = Fields(config)
        experts = 8 if f.get("num_local_experts") is None else f.get("num_local_experts")  # transformers' default
        if experts != 0:
            raise FamilyError(
                f"config.json: num_local_experts is {experts!r}: mixture-of-experts layers are not supported, "
                "only dense models (num_local_experts 0)"
            )
        f.only("hidden_act", "silu", "silu")
        f.only("normalization_function", "rmsnorm", "rmsnorm")
        hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
        kv_heads = f.size("num_key_value_heads", heads)
        divides(kv_heads, heads, "num_key_value_heads", "num_attention_heads")
        if f.get("head_dim") is None:
            head_dim = divides(heads, hidden, "num_attention_heads", "hidden_size")
        else:
            head_dim = f.size("head_dim")
        mamba_heads, groups = f.size("mamba_n_heads", 128), f.size("mamba_n_groups", 1)
        inner = f.size("mamba_expand", 2) * hidden
        mamba_head_dim = divides(mamba_heads, inner, "mamba_n_heads", "mamba_expand * hidden_size")
        if f.get("mamba_d_head") not in (None, "auto") and f.size("mamba_d_head") != mamba_head_dim:
            raise FamilyError(
                f"config.json: mamba_d_head is {f.get('mamba_d_head')}, but mamba_expand * hidden_size / mamba_n_heads "
                f"is {mamba_head_dim}"
            )
        divides(groups, mamba_heads, "mamba_n_groups", "mamba_n_heads")
        kinds = _layer_kinds(f)
        rope = _rope(f)
        if rope is not None:
            divides(2, head_dim, "2", "head_dim")
        conv = f.size("mamba_d_conv", 4)
        if conv < 2:
            raise FamilyError(f"config.json: mamba_d_conv is {conv}, expected at least 2")
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=hidden,
            intermediate=f.size("shared_intermediate_size", 1024),
            layers=kinds,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mamba_heads=mamba_heads,
            mamba_head_dim=mamba_head_dim,
            mamba_state=f.size("mamba_d_state", 256),
            mamba_groups=groups,
            mamba_conv=conv,
            conv_bias=f.flag("mamba_conv_bias", True),
            proj_bias=f.flag("mamba_proj_bias", False),
            attention_bias=f.flag("attention_bias", False),
            time_step_limit=_time_step_limit(f),
            eps=f.number("rms_norm_eps", 1e-6),
            rope=rope,
            tied=f.flag("tie_word_embeddings", False),
            embedding_multiplier=f.number("embedding_multiplier", 1.0),
            residual_multiplier=f.number("residual_multiplier", 1.0),
            attention_multiplier=f.number("attention_multiplier", 1.0),
            logits_scaling=f.number("logits_scaling", 1.0),
            max_position=f.size("max_position_embeddings", 2048),
        )


def _layer_kinds(f: Fields) -> tuple[LayerKind, ...]:
    count = f.size("num_hidden_layers")
    name = "layer_types" if f.get("layer_types") is not None else "layers_block_type"
    types = f.get(name)
    if types is None:
        return tuple(SPELLINGS["mamba"] for _ in range(count))
    if not isinstance(types, list) or len(types) != count:
        raise FamilyError(f"config.json: {name} is {types!r}, expected a list of num_hidden_layers = {count}")
    for kind in types:
        if not isinstance(kind, str) or kind not in SPELLINGS:
            raise FamilyError(f"config.json: {name} has {kind!r}; supported: {', '.join(SPELLINGS)}")
    return tuple(SPELLINGS[kind] for kind in types)


def _rope(f: Fields) -> Rope | None:
    kind = f.get("position_embedding_type")
    if kind in (None, "nope"):
        return None
    if kind != "rope":
        raise FamilyError(f"config.json: position_embedding_type is {kind!r}; supported: null, 'nope', 'rope'")
    return Rope.parse(f)


def _time_step_limit(f: Fields) -> tuple[float, float]:
    value = f.get("time_step_limit")
    if value is None:
        return (0.0, math.inf)
    limits = [_float(v) for v in value] if isinstance(value, list) else []
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise FamilyError(f"config.json: time_step_limit is {value!r}, expected two numbers, 0 <= low < high")
    return (limits[0], limits[1])


def _float(value: object) -> float:
    """A number, or how transformers writes one that JSON has not: {"__float__": "Infinity"}. Else nan."""
    if isinstance(value, dict):
        value = {"Infinity": math.inf}.get(str(value.get("__float__")))
    return math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def state_spec(config: Config, kv_dtype: str = "float32") -> StateSpec:
    """conv and ssm of Mamba layers (always float32), key and value of attention layers."""
    c = config
    shapes: dict[LayerKind, tuple[tuple[Kind, tuple[int, ...], str], ...]] = {
        "mamba": (
            ("conv", (c.conv_channels, c.mamba_conv - 1), "float32"),
            ("ssm", (c.mamba_heads, c.mamba_head_dim, c.mamba_state), "float32"),
        ),
        "attention": (
            ("key", (c.kv_heads, c.head_dim), kv_dtype),
            ("value", (c.kv_heads, c.head_dim), kv_dtype),
        ),
    }
    return StateSpec(
        tuple(
            TensorSpec(f"{kind}_{i}", kind, i, shape, dtype)
            for i, layer in enumerate(c.layers)
            for kind, shape, dtype in shapes[layer]
        )
    )


def bindings(config: Config) -> dict[str, Binding]:
    c = config
    made: dict[str, Binding] = {
        "embedding": tensor("model.embed_tokens.weight", c.vocabulary, c.hidden),
        "norm": tensor("model.norm.weight", c.hidden, scale=1.0 / c.logits_scaling),
    }
    if not c.tied:
        made["head"] = tensor("lm_head.weight", c.vocabulary, c.hidden)
    for i, kind in enumerate(c.layers):
        source = f"model.layers.{i}."
        layer = {
            "norm1": tensor(source + "input_layernorm.weight", c.hidden),
            "norm2": tensor(source + "post_attention_layernorm.weight", c.hidden),
            "gate_up": tensor(source + "shared_mlp.input_linear.weight", 2 * c.intermediate, c.hidden),
            "down": tensor(
                source + "shared_mlp.output_linear.weight", c.hidden, c.intermediate, scale=c.residual_multiplier
            ),
        }
        layer |= _mamba(c, source + "mamba.") if kind == "mamba" else _attention(c, source + "self_attn.")
        made |= {f"layer{i}_{name}": binding for name, binding in layer.items()}
    return made


def _mamba(c: Config, source: str) -> dict[str, Binding]:
    channels, heads, taps = c.conv_channels, c.mamba_heads, c.mamba_conv
    made = {
        "in": tensor(source + "in_proj.weight", c.inner + channels + heads, c.hidden),
        "out": tensor(source + "out_proj.weight", c.hidden, c.inner, scale=c.residual_multiplier),
        "conv": mapped(lambda w: w.transpose(2, 1, 0), tensor(source + "conv1d.weight", channels, 1, taps)),
        "A": mapped(lambda a: -np.exp(a), tensor(source + "A_log", heads)),
        "D": tensor(source + "D", heads),
        "dt_bias": tensor(source + "dt_bias", heads),
        "gated_norm": tensor(source + "norm.weight", c.inner),
    }
    if c.conv_bias:
        made["conv_bias"] = tensor(source + "conv1d.bias", channels)
    if c.proj_bias:
        made["in_bias"] = tensor(source + "in_proj.bias", c.inner + channels + heads)
        made["out_bias"] = tensor(source + "out_proj.bias", c.hidden, scale=c.residual_multiplier)
    return made


def _attention(c: Config, source: str) -> dict[str, Binding]:
    made: dict[str, Binding] = {}
    for name, rows, columns, scale in (
        ("q", c.heads * c.head_dim, c.hidden, c.attention_multiplier),
        ("k", c.kv_heads * c.head_dim, c.hidden, 1.0),
        ("v", c.kv_heads * c.head_dim, c.hidden, 1.0),
        ("o", c.hidden, c.heads * c.head_dim, c.residual_multiplier),
    ):
        made[name] = tensor(f"{source}{name}_proj.weight", rows, columns, scale=scale)
        if c.attention_bias:
            made[name + "_bias"] = tensor(f"{source}{name}_proj.bias", rows, scale=scale)
    return made
