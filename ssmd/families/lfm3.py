"""LFM3, dense (transformers' `Lfm3ForCausalLM`): short convolutions, attention within a window, and full attention.

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2            (hidden,)
    post_norm1, post_norm2  (hidden,) with sandwich norms: of what the mixer and the MLP put out
    in, out, conv           conv layers, as in lfm2.py
    q, k, v, o, gate        attention layers; gate (H, hidden), where heads have gates
    q_norm, k_norm          (head_dim,) before RoPE; the factor 1/sqrt(head_dim) stands in q_norm
    gate_up, down           SwiGLU; gate's rows come first
    *_bias                  where the config has biases

Layers with a window and those without have tables of RoPE of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ssmd.families.attention import attention, without_rope
from ssmd.families.decoder import decoder
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.lfm2 import plain_mlp, short_conv
from ssmd.families.rope import rope_by_layer_type
from ssmd.families.weights import Binding, tensor
from ssmd.model.plan import Attention, Layer, Mixer, Mlp, Plan, ShortConv
from ssmd.model.rope import Rope

LayerKind = Literal["conv", "full_attention", "sliding_attention"]
KINDS: tuple[LayerKind, ...] = ("conv", "full_attention", "sliding_attention")
THETA = 1_000_000.0
ROPES: dict[str, Any] = {  # of a config without rope_parameters
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class Config:
    """The fields of a config.json. ropes: by the kind of layer, of those that the model has."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: tuple[LayerKind, ...]
    attention: Attention
    window: int | None
    conv: ShortConv
    sandwich: bool
    eps: float
    ropes: Mapping[str, Rope]
    tied: bool
    max_position: int

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field."""
        f = Fields(config, {"head_dim": 128})
        hidden, eps = f.size("hidden_size"), _eps(f)
        f.size("num_key_value_heads")  # has no default that any checkpoint relies on
        layers, max_position = _layer_kinds(f), f.size("max_position_embeddings", 128_000)
        plain = without_rope(f)
        kinds: list[str] = [kind for kind in KINDS if kind != "conv" and kind in layers]
        ropes = {k: rope_by_layer_type(f, k, plain.head_dim, max_position, ROPES, THETA) for k in kinds}
        width = f.size("conv_L_cache", 7)
        if width < 2:
            raise FamilyError(f"config.json: conv_L_cache is {width}, expected at least 2")
        gate: Literal["none", "heads"] = "heads" if f.flag("use_attention_gate", True) else "none"
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=hidden,
            intermediate=f.size("intermediate_size"),
            layers=layers,
            attention=plain.model_copy(update={"rotated": plain.head_dim, "qk_eps": eps, "gate": gate}),
            window=_window(f, layers),
            conv=ShortConv(channels=hidden, width=width, bias=f.flag("conv_bias", False)),
            sandwich=f.flag("use_sandwich_norm", True),
            eps=eps,
            ropes=ropes,
            tied=f.flag("tie_word_embeddings", True),
            max_position=next((rope.reach(max_position) for rope in ropes.values()), max_position),
        )


def _eps(f: Fields) -> float:
    """Read `norm_eps`, which transformers also takes as `rms_norm_eps`."""
    eps = f.number("rms_norm_eps", f.number("norm_eps", 1e-5))
    if f.get("norm_eps") not in (None, eps):
        raise FamilyError(f"config.json: norm_eps is {f.get('norm_eps')!r} and rms_norm_eps {eps}: leave one out")
    return eps


def _layer_kinds(f: Fields) -> tuple[LayerKind, ...]:
    """Read `layer_types`; a config without it has the published model's pattern."""
    count, types = f.size("num_hidden_layers"), f.get("layer_types")
    if types is None:
        return tuple(
            "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"
            for i in range(count)
        )
    if not isinstance(types, list) or len(types) != count:
        raise FamilyError(f"config.json: layer_types is {types!r}, expected a list of num_hidden_layers = {count}")
    for kind in types:
        if not isinstance(kind, str) or kind not in KINDS:
            raise FamilyError(f"config.json: layer_types has {kind!r}; supported: {', '.join(KINDS)}")
    return tuple(types)


def _window(f: Fields, layers: tuple[LayerKind, ...]) -> int | None:
    """Read `sliding_window`, which matters only if a layer has one."""
    null = "sliding_window" in f.config and f.get("sliding_window") is None
    window = 0 if null else f.size("sliding_window", 256)
    if "sliding_attention" not in layers:
        return None
    if window < 2:
        said = f.get("sliding_window")
        raise FamilyError(
            f"config.json: sliding_window is {said!r}, expected at least 2 for layers of sliding_attention"
        )
    return window


def plan(config: Config) -> Plan:
    """Describe the model."""
    c = config
    mlp = Mlp(intermediate=c.intermediate, bias=False)
    kinds: dict[str, Mixer] = {"conv": c.conv, "full_attention": c.attention}
    if c.window is not None:
        kinds["sliding_attention"] = Attention.model_validate({**dict(c.attention), "window": c.window})
    return Plan(
        hidden=c.hidden,
        vocabulary=c.vocabulary,
        eps=c.eps,
        embedding_scale=1.0,
        tied=c.tied,
        rope=c.ropes.get("full_attention"),
        window_rope=c.ropes.get("sliding_attention"),
        layers=tuple(Layer(mixers=(kinds[kind],), mlp=mlp, sandwich=c.sandwich) for kind in c.layers),
    )


def bindings(config: Config) -> dict[str, Binding]:
    """Bind every parameter to a source's tensors."""
    c = config
    embedding = tensor("model.embed_tokens.weight", c.vocabulary, c.hidden)
    norm = tensor("model.embedding_norm.weight", c.hidden)  # its name notwithstanding, the last one
    return decoder(c, embedding, norm, (_layer(c, kind, f"model.layers.{i}.") for i, kind in enumerate(c.layers)))


def _layer(c: Config, kind: LayerKind, source: str) -> dict[str, Binding]:
    made = {
        "norm1": tensor(source + "operator_norm.weight", c.hidden),
        "norm2": tensor(source + "ffn_norm.weight", c.hidden),
        **plain_mlp(c.intermediate, c.hidden, source + "feed_forward."),
    }
    if c.sandwich:
        made["post_norm1"] = tensor(source + "post_operator_norm.weight", c.hidden)
        made["post_norm2"] = tensor(source + "post_ffn_norm.weight", c.hidden)
    if kind == "conv":
        return made | short_conv(c.conv, c.hidden, source + "conv.")
    return made | _attention(c, source + "self_attn.")


def _attention(c: Config, source: str) -> dict[str, Binding]:
    a = c.attention
    made = attention(a, c.hidden, source, q=1.0)
    if a.gate == "heads":
        made["gate"] = tensor(source + "gate_proj.weight", a.heads, c.hidden)  # g_proj in transformers' module
    made["q_norm"] = tensor(source + "q_norm.weight", a.head_dim, scale=a.head_dim**-0.5)
    made["k_norm"] = tensor(source + "k_norm.weight", a.head_dim)
    return made
