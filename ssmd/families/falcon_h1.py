"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in every layer (`FalconH1ForCausalLM`).

Parameters (weights are (out, in)): embedding, norm, head unless tied; and for each layer i, `layer{i}_` +
    norm1, norm2            (hidden,)
    those of mlp.py
    those of mixer.py
    those of attention.py   the factor 1/sqrt(head_dim) is in q

All multipliers are in parameters. The embedding's multiplier is in it, though the head may be the same tensor: norm is
then divided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families.attention import attention, attention_of
from ssmd.families.decoder import decoder
from ssmd.families.fields import Fields
from ssmd.families.mixer import Norm, mamba2, mamba2_of
from ssmd.families.mlp import mlp
from ssmd.families.weights import Binding, tensor
from ssmd.model.plan import Attention, Layer, Mamba2, Mlp, Plan
from ssmd.model.rope import Rope


@dataclass(frozen=True)
class Multipliers:
    """Factors of the model's parts: `gate` and `down` of the MLP; `ssm` on the mixer's gate, x, B, C, dt."""

    embedding: float
    head: float
    gate: float
    down: float
    key: float
    attention_in: float
    attention_out: float
    ssm_in: float
    ssm: tuple[float, ...]
    ssm_out: float

    @staticmethod
    def parse(f: Fields) -> Multipliers:
        gate, down = f.numbers("mlp_multipliers", (1.0, 1.0))
        return Multipliers(
            embedding=f.number("embedding_multiplier", 1.0),
            head=f.number("lm_head_multiplier", 1.0),
            gate=gate,
            down=down,
            key=f.number("key_multiplier", 1.0),
            attention_in=f.number("attention_in_multiplier", 1.0),
            attention_out=f.number("attention_out_multiplier", 1.0),
            ssm_in=f.number("ssm_in_multiplier", 1.0),
            ssm=f.numbers("ssm_multipliers", (1.0,) * 5),
            ssm_out=f.number("ssm_out_multiplier", 1.0),
        )


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    mlp: Mlp
    layers: int
    mixer: Mamba2
    attention: Attention
    multipliers: Multipliers
    eps: float
    rope: Rope
    tied: bool
    max_position: int

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field."""
        f = Fields(config)
        f.silu("hidden_act")
        hidden, eps = f.size("hidden_size"), f.number("rms_norm_eps", 1e-5)
        max_position = f.size("max_position_embeddings", 8192)
        attention, rope = attention_of(f, max_position, kv_heads=8)
        norm: Norm = "none"
        if f.flag("mamba_rms_norm", False):
            norm = "before the gate" if f.flag("mamba_norm_before_gate", True) else "after the gate"
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=hidden,
            mlp=Mlp(intermediate=f.size("intermediate_size"), bias=f.flag("mlp_bias", False)),
            layers=f.size("num_hidden_layers"),
            mixer=mamba2_of(f, eps, inner=_inner(f), norm=norm, out_bias=f.flag("projectors_bias", False)),
            attention=attention,
            multipliers=Multipliers.parse(f),
            eps=eps,
            rope=rope,
            tied=f.flag("tie_word_embeddings", False),
            max_position=rope.reach(max_position),
        )


def _inner(f: Fields) -> tuple[str, int] | None:
    """Read `mamba_d_ssm`. If it is null, return None: the mixer is mamba_expand times as wide as the model."""
    if "mamba_d_ssm" in f.config and f.get("mamba_d_ssm") is None:
        return None
    return "mamba_d_ssm", f.size("mamba_d_ssm", 1024)


def plan(config: Config) -> Plan:
    """Describe the model."""
    c = config
    layer = Layer(mixers=(c.mixer, c.attention), mlp=c.mlp)
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
    c, m = config, config.multipliers
    embedding = tensor("model.embed_tokens.weight", c.vocabulary, c.hidden, scale=m.embedding)
    factor = m.head / (m.embedding if c.tied else 1.0)
    norm = tensor("model.final_layernorm.weight", c.hidden, scale=factor)
    return decoder(c, embedding, norm, (_layer(c, f"model.layers.{i}.") for i in range(c.layers)))


def _layer(c: Config, source: str) -> dict[str, Binding]:
    m = c.multipliers
    return {
        "norm1": tensor(source + "input_layernorm.weight", c.hidden),
        "norm2": tensor(source + "pre_ff_layernorm.weight", c.hidden),
        **mamba2(c.mixer, c.hidden, source + "mamba.", into=m.ssm_in, parts=m.ssm, out=m.ssm_out),
        **attention(
            c.attention,
            c.hidden,
            source + "self_attn.",
            q=c.attention.head_dim**-0.5,
            k=m.key,
            o=m.attention_out,
            into=m.attention_in,
        ),
        **mlp(c.mlp, c.hidden, source + "feed_forward.", gate=m.gate, down=m.down),
    }
