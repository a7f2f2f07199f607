"""Mamba-2 (arXiv:2405.21060): only mixers (transformers' `Mamba2ForCausalLM`).

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm                 (hidden,)
    those of mixer.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families.decoder import decoder
from ssmd.families.fields import Fields
from ssmd.families.mixer import Names, mamba2, mamba2_of
from ssmd.families.weights import Binding, tensor
from ssmd.model.plan import Layer, Mamba2, Plan

NAMES = Names(
    heads="num_heads",
    head_dim="head_dim",
    d_state="state_size",
    groups="n_groups",
    d_conv="conv_kernel",
    expand="expand",
    conv_bias="use_conv_bias",
    bias="use_bias",
    default_d_state=128,
    default_groups=8,
)


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    layers: int
    mixer: Mamba2
    eps: float
    tied: bool
    max_position: int = sys.maxsize  # no layer knows a position

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field.

        `norm_before_gate` of published configs is not read: transformers always gates first, and the published weights
        were trained so. `residual_in_fp32` has no effect here: everything is float32.
        """
        f = Fields(config)
        f.silu("hidden_act")
        f.only("rms_norm", True, True)
        eps = f.number("layer_norm_epsilon", 1e-5)
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=f.size("hidden_size"),
            layers=f.size("num_hidden_layers"),
            mixer=mamba2_of(f, eps, NAMES),
            eps=eps,
            tied=f.flag("tie_word_embeddings", False),
        )


def plan(config: Config) -> Plan:
    """Describe the model."""
    c = config
    return Plan(
        hidden=c.hidden,
        vocabulary=c.vocabulary,
        eps=c.eps,
        embedding_scale=1.0,
        tied=c.tied,
        layers=(Layer(mixers=(c.mixer,), mlp=None),) * c.layers,
    )


def bindings(config: Config) -> dict[str, Binding]:
    """Bind every parameter to a source's tensors."""
    c = config
    embedding = tensor("backbone.embeddings.weight", c.vocabulary, c.hidden)
    norm = tensor("backbone.norm_f.weight", c.hidden)
    return decoder(c, embedding, norm, (_layer(c, f"backbone.layers.{i}.") for i in range(c.layers)))


def _layer(c: Config, source: str) -> dict[str, Binding]:
    norm = tensor(source + "norm.weight", c.hidden)
    return {"norm": norm, **mamba2(c.mixer, c.hidden, source + "mixer.")}
