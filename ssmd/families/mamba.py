"""Mamba (arXiv:2312.00752; transformers' `MambaForCausalLM`): layers of a selective state-space model, nothing else.

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm          (hidden,)
    in, out       (2 D, hidden), (hidden, D); rows of `in`: conv input, gate
    conv          (K, 1, D)
    x             (R + 2 N, D); rows: the time step's input, B, C
    dt, dt_bias   (D, R), (D,)
    A             (N, D) = -exp(A_log), transposed: graphs have the channels last
    D             (D,)
    *_bias        where the config has biases

FalconMamba (arXiv:2410.05355) is the same with norms, which have no weights, of dt's input, B and C:
ssmd/families/falcon_mamba.py.

Glossary: D inner channels, N d_state, R rank of the time step, K conv width.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssmd.families.decoder import decoder
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.weights import Binding, mapped, tensor
from ssmd.model.plan import Layer, Mamba1, Plan


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    layers: int
    mixer: Mamba1
    eps: float
    tied: bool
    max_position: int = sys.maxsize  # no layer knows a position

    @staticmethod
    def parse(config: Mapping[str, Any], *, mixer_eps: float | None = None) -> Config:
        """Read config.json. Raises FamilyError naming the field. mixer_eps: epsilon of the norms of dt, B and C."""
        f = Fields(config)
        f.silu("hidden_act")
        hidden = f.size("hidden_size")
        # As transformers does: if a checkpoint names both, intermediate_size counts (Falcon-Mamba 7B has another
        # `expand`, which it was not trained with).
        inner = f.size("intermediate_size", f.size("expand", 2) * hidden)
        width = f.size("conv_kernel", 4)
        if width < 2:
            raise FamilyError(f"config.json: conv_kernel is {width}, expected at least 2")
        automatic = f.get("time_step_rank") in (None, "auto")
        mixer = Mamba1(
            inner=inner,
            states=f.size("state_size", 16),
            rank=-(-hidden // 16) if automatic else f.size("time_step_rank"),
            width=width,
            conv_bias=f.flag("use_conv_bias", True),
            bias=f.flag("use_bias", False),
            mixer_eps=mixer_eps,
        )
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=hidden,
            layers=f.size("num_hidden_layers"),
            mixer=mixer,
            eps=f.number("layer_norm_epsilon", 1e-5),
            tied=f.flag("tie_word_embeddings", True),
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
    m, mixer = c.mixer, source + "mixer."
    made = {
        "norm": tensor(source + "norm.weight", c.hidden),
        "in": tensor(mixer + "in_proj.weight", 2 * m.inner, c.hidden),
        "out": tensor(mixer + "out_proj.weight", c.hidden, m.inner),
        "conv": mapped(lambda w: w.transpose(2, 1, 0), tensor(mixer + "conv1d.weight", m.inner, 1, m.width)),
        "x": tensor(mixer + "x_proj.weight", m.rank + 2 * m.states, m.inner),
        "dt": tensor(mixer + "dt_proj.weight", m.inner, m.rank),
        "dt_bias": tensor(mixer + "dt_proj.bias", m.inner),
        "A": mapped(lambda a: -np.exp(a.T), tensor(mixer + "A_log", m.inner, m.states)),
        "D": tensor(mixer + "D", m.inner),
    }
    if m.conv_bias:
        made["conv_bias"] = tensor(mixer + "conv1d.bias", m.inner)
    if m.bias:
        made["in_bias"] = tensor(mixer + "in_proj.bias", 2 * m.inner)
        made["out_bias"] = tensor(mixer + "out_proj.bias", c.hidden)
    return made
