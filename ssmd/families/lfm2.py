"""LFM2, dense (transformers' `Lfm2ForCausalLM`): short gated convolutions and a few layers of attention.

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2    (hidden,)
    in, out         conv layers: (3 C, hidden), (hidden, C); rows of `in`: B, gate, x: the conv input is B * x
    conv            (K, 1, C)
    q, k, v, o      attention layers
    q_norm, k_norm  (head_dim,) before RoPE; the factor 1/sqrt(head_dim) stands in q_norm
    gate_up, down   SwiGLU; gate's rows come first
    *_bias          conv layers, where the config has biases

Glossary: C channels = hidden, K conv width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ssmd.families.attention import attention_of
from ssmd.families.decoder import decoder
from ssmd.families.experts import singly
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.weights import Binding, mapped, stacked, tensor
from ssmd.model.plan import Attention, Experts, Layer, Mixer, Mlp, Plan, ShortConv
from ssmd.model.rope import Rope

LayerKind = Literal["conv", "attention"]
SPELLINGS: dict[str, LayerKind] = {"conv": "conv", "full_attention": "attention"}
THETA = 1_000_000.0


@dataclass(frozen=True)
class Mixture:
    """Experts in the MLPs' place, after the first `dense` layers. scaling: factor on their outputs."""

    experts: Experts
    dense: int
    scaling: float


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: tuple[LayerKind, ...]
    attention: Attention
    conv: ShortConv
    eps: float
    rope: Rope
    tied: bool
    max_position: int
    mixture: Mixture | None = None

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field."""
        f = Fields(config, fixed={"attention_bias": False})
        return Config.of(f, _intermediate(f))

    @staticmethod
    def of(f: Fields, intermediate: int, mixture: Mixture | None = None) -> Config:
        """Read the fields of LFM2 with and without experts. intermediate: channels of the MLPs. Raises FamilyError."""
        hidden, eps = f.size("hidden_size"), f.number("norm_eps", 1e-5)
        f.size("num_key_value_heads")  # has no default that any checkpoint relies on
        max_position = f.size("max_position_embeddings", 128_000)
        attention, rope = attention_of(f, max_position, theta=THETA, qk_eps=eps)
        width = f.size("conv_L_cache", 3)
        if width < 2:
            raise FamilyError(f"config.json: conv_L_cache is {width}, expected at least 2")
        tied = f.flag("tie_word_embeddings", True)
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=hidden,
            intermediate=intermediate,
            layers=_layer_kinds(f),
            attention=attention,
            conv=ShortConv(channels=hidden, width=width, bias=f.flag("conv_bias", False)),
            eps=eps,
            rope=rope,
            tied=f.flag("tie_embedding", tied),  # the older spelling goes first, as in transformers
            max_position=rope.reach(max_position),
            mixture=mixture,
        )


def _intermediate(f: Fields) -> int:
    """Return the rows of w1, as `Lfm2MLP` computes them."""
    size = f.size("intermediate_size") if f.get("block_ff_dim") is None else f.size("block_ff_dim")
    if not f.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = f.size("block_multiple_of", 256)
    size = int(f.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return multiple * -(-size // multiple)


def _layer_kinds(f: Fields) -> tuple[LayerKind, ...]:
    count = f.size("num_hidden_layers")
    types = f.get("layer_types")
    if types is None:
        indices = f.get("full_attn_idxs")
        if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < count for i in indices):
            raise FamilyError(
                f"config.json: full_attn_idxs is {indices!r}, expected a list of layers below num_hidden_layers = "
                f"{count}, or layer_types"
            )
        return tuple("attention" if i in indices else "conv" for i in range(count))
    if not isinstance(types, list) or len(types) != count:
        raise FamilyError(f"config.json: layer_types is {types!r}, expected a list of num_hidden_layers = {count}")
    for kind in types:
        if not isinstance(kind, str) or kind not in SPELLINGS:
            raise FamilyError(f"config.json: layer_types has {kind!r}; supported: {', '.join(SPELLINGS)}")
    return tuple(SPELLINGS[kind] for kind in types)


def plan(config: Config) -> Plan:
    """Describe the model."""
    c = config
    mlp = Mlp(intermediate=c.intermediate, bias=False)
    kinds: dict[str, Mixer] = {"conv": c.conv, "attention": c.attention}
    return Plan(
        hidden=c.hidden,
        vocabulary=c.vocabulary,
        eps=c.eps,
        embedding_scale=1.0,
        tied=c.tied,
        rope=c.rope,
        layers=tuple(
            Layer(mixers=(kinds[kind],), mlp=mlp)
            if (mixture := _mixture(c, i)) is None
            else Layer(mixers=(kinds[kind],), mlp=None, experts=mixture.experts)
            for i, kind in enumerate(c.layers)
        ),
    )


def _mixture(c: Config, layer: int) -> Mixture | None:
    return None if c.mixture is None or layer < c.mixture.dense else c.mixture


def bindings(config: Config) -> dict[str, Binding]:
    """Bind every parameter to a source's tensors."""
    c = config
    embedding = tensor("model.embed_tokens.weight", c.vocabulary, c.hidden)
    norm = tensor("model.embedding_norm.weight", c.hidden)  # its name notwithstanding, the last one
    return decoder(c, embedding, norm, (_layer(c, i, f"model.layers.{i}.") for i in range(len(c.layers))))


def _layer(c: Config, layer: int, source: str) -> dict[str, Binding]:
    ff = source + "feed_forward."
    made = {
        "norm1": tensor(source + "operator_norm.weight", c.hidden),
        "norm2": tensor(source + "ffn_norm.weight", c.hidden),
    }
    if (mixture := _mixture(c, layer)) is None:
        made |= plain_mlp(c.intermediate, c.hidden, ff)
    else:
        m = mixture.experts
        made["router"] = tensor(ff + "gate.weight", m.count, c.hidden)
        if m.bias:
            made["router_bias"] = tensor(ff + "expert_bias", m.count)
        made |= singly(m, c.hidden, ff + "experts.", down=mixture.scaling)
    if c.layers[layer] == "conv":
        return made | short_conv(c.conv, c.hidden, source + "conv.")
    return made | _attention(c, source + "self_attn.")


def plain_mlp(intermediate: int, hidden: int, source: str) -> dict[str, Binding]:
    """Bind SwiGLU to the tensors `source`{w1,w3,w2}: gate, up, down."""
    return {
        "gate_up": stacked(*(tensor(f"{source}{n}.weight", intermediate, hidden) for n in ("w1", "w3"))),
        "down": tensor(source + "w2.weight", hidden, intermediate),
    }


def short_conv(m: ShortConv, hidden: int, source: str) -> dict[str, Binding]:
    """Bind a short convolution to the tensors `source`{in_proj,out_proj,conv}."""
    made = {
        "in": tensor(source + "in_proj.weight", 3 * hidden, hidden),
        "out": tensor(source + "out_proj.weight", hidden, hidden),
        "conv": mapped(lambda w: w.transpose(2, 1, 0), tensor(source + "conv.weight", hidden, 1, m.width)),
    }
    if m.bias:
        made["in_bias"] = tensor(source + "in_proj.bias", 3 * hidden)
        made["out_bias"] = tensor(source + "out_proj.bias", hidden)
        made["conv_bias"] = tensor(source + "conv.bias", hidden)
    return made


def _attention(c: Config, source: str) -> dict[str, Binding]:
    a = c.attention
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return {
        "q": tensor(source + "q_proj.weight", queries, c.hidden),
        "k": tensor(source + "k_proj.weight", keys, c.hidden),
        "v": tensor(source + "v_proj.weight", keys, c.hidden),
        "o": tensor(source + "out_proj.weight", c.hidden, queries),
        "q_norm": tensor(source + "q_layernorm.weight", a.head_dim, scale=a.head_dim**-0.5),
        "k_norm": tensor(source + "k_layernorm.weight", a.head_dim),
    }
