"""Granite 4.0 H: Mamba-2 (arXiv:2405.21060) and attention layers (transformers' `GraniteMoeHybridForCausalLM`).

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2            (hidden,)
    gate_up, down           SwiGLU; gate's rows come first; with experts it is the shared part, added to them
    those of experts.py     all layers, if there are experts; weights are the softmax of the chosen logits
    those of mixer.py       Mamba layers
    those of attention.py   attention layers; the attention multiplier is in q
The residual multiplier is in o, out, down and experts_down, the logits' divisor in norm. Only the embedding multiplier
is left to the module, as the embedding may also be the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families.attention import attention, attention_of, without_rope
from ssmd.families.decoder import decoder
from ssmd.families.experts import chosen_of, stacks
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.layers import SPELLINGS, LayerKind, layer_kinds
from ssmd.families.mixer import mamba2, mamba2_of
from ssmd.families.weights import Binding, tensor
from ssmd.model.plan import Attention, Experts, Layer, Mamba2, Mixer, Mlp, Plan
from ssmd.model.rope import Rope


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: tuple[LayerKind, ...]
    mixer: Mamba2
    attention: Attention
    eps: float
    rope: Rope | None
    tied: bool
    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float
    max_position: int
    experts: Experts | None = None

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field."""
        f = Fields(config)
        f.silu("hidden_act")
        f.only("normalization_function", "rmsnorm", "rmsnorm")
        eps = f.number("rms_norm_eps", 1e-6)
        max_position = f.size("max_position_embeddings", 2048)
        attention, rope = _attention(f, max_position)
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=f.size("hidden_size"),
            intermediate=f.size("shared_intermediate_size", 1024),
            layers=layer_kinds(f) or (SPELLINGS["mamba"],) * f.size("num_hidden_layers"),
            mixer=mamba2_of(f, eps),
            attention=attention,
            eps=eps,
            rope=rope,
            tied=f.flag("tie_word_embeddings", False),
            embedding_multiplier=f.number("embedding_multiplier", 1.0),
            residual_multiplier=f.number("residual_multiplier", 1.0),
            attention_multiplier=f.number("attention_multiplier", 1.0),
            logits_scaling=f.number("logits_scaling", 1.0),
            max_position=max_position if rope is None else rope.reach(max_position),
            experts=_experts(f),
        )


def _experts(f: Fields) -> Experts | None:
    """Read the experts; None for a dense model, whose num_local_experts is 0. Raises FamilyError."""
    if f.get("num_local_experts") == 0:
        return None
    count = f.size("num_local_experts", 8)
    return Experts(
        count=count,
        chosen=chosen_of(f, count, "num_local_experts", 2),
        intermediate=f.size("intermediate_size", 11008),
        sigmoid=False,
        bias=False,
        normed=True,
    )


def _attention(f: Fields, max_position: int) -> tuple[Attention, Rope | None]:
    kind = f.get("position_embedding_type")
    if kind in (None, "nope"):
        return without_rope(f), None
    if kind != "rope":
        raise FamilyError(f"config.json: position_embedding_type is {kind!r}; supported: null, 'nope', 'rope'")
    return attention_of(f, max_position)


def plan(config: Config) -> Plan:
    """Describe the model."""
    c = config
    mlp = Mlp(intermediate=c.intermediate, bias=False)
    kinds: dict[str, Mixer] = {"mamba": c.mixer, "attention": c.attention}
    return Plan(
        hidden=c.hidden,
        vocabulary=c.vocabulary,
        eps=c.eps,
        embedding_scale=c.embedding_multiplier,
        tied=c.tied,
        rope=c.rope,
        layers=tuple(Layer(mixers=(kinds[kind],), mlp=mlp, experts=c.experts) for kind in c.layers),
    )


def bindings(config: Config) -> dict[str, Binding]:
    """Bind every parameter to a source's tensors."""
    c = config
    embedding = tensor("model.embed_tokens.weight", c.vocabulary, c.hidden)
    norm = tensor("model.norm.weight", c.hidden, scale=1.0 / c.logits_scaling)
    return decoder(c, embedding, norm, (_layer(c, kind, f"model.layers.{i}.") for i, kind in enumerate(c.layers)))


def _layer(c: Config, kind: LayerKind, source: str) -> dict[str, Binding]:
    shared, residual = source + "shared_mlp.", c.residual_multiplier
    made = {
        "norm1": tensor(source + "input_layernorm.weight", c.hidden),
        "norm2": tensor(source + "post_attention_layernorm.weight", c.hidden),
        "gate_up": tensor(shared + "input_linear.weight", 2 * c.intermediate, c.hidden),
        "down": tensor(shared + "output_linear.weight", c.hidden, c.intermediate, scale=residual),
    }
    if c.experts is not None:
        routed = source + "block_sparse_moe."
        made["router"] = tensor(routed + "router.layer.weight", c.experts.count, c.hidden)
        made |= stacks(c.experts, c.hidden, routed, down=residual)
    if kind == "mamba":
        return made | mamba2(c.mixer, c.hidden, source + "mamba.", out=residual)
    return made | attention(c.attention, c.hidden, source + "self_attn.", q=c.attention_multiplier, o=residual)
