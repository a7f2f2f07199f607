"""Mamba (arXiv:2312.00752; transformers' `MambaForCausalLM`): layers of a selective state-space model, nothing else.

Parameters (weights are (out, in)): embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm          (hidden,)
    in, out       (2 D, hidden), (hidden, D); rows of `in`: conv input, gate
    conv          (K, 1, D)
    x             (R + 2 N, D); rows: the time step's input, B, C
    dt, dt_bias   (D, R), (D,)
    A             (N, D) = -exp(A_log), turned round: graphs have the channels last
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

from ssmd.families.fields import FamilyError, Fields
from ssmd.families.weights import Binding, mapped, tensor
from ssmd.model.state import StateSpec, TensorSpec


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    inner: int
    states: int
    rank: int
    conv: int
    layers: int
    conv_bias: bool
    proj_bias: bool
    eps: float
    tied: bool
    mixer_eps: float | None = None  # of the norms of dt, B and C
    max_position: int = sys.maxsize  # no layer knows a position

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """From config.json. Raises FamilyError naming the field."""
        f = Fields(config)
        f.only("hidden_act", "silu", "silu")
        hidden = f.size("hidden_size")
        # As transformers does: a checkpoint that names both is built with intermediate_size (Falcon-Mamba 7B has
        # another `expand`, which nothing was trained with).
        inner = f.size("intermediate_size", f.size("expand", 2) * hidden)
        conv = f.size("conv_kernel", 4)
        if conv < 2:
            raise FamilyError(f"config.json: conv_kernel is {conv}, expected at least 2")
        automatic = f.get("time_step_rank") in (None, "auto")
        return Config(
            vocabulary=f.size("vocab_size"),
            hidden=hidden,
            inner=inner,
            states=f.size("state_size", 16),
            rank=-(-hidden // 16) if automatic else f.size("time_step_rank"),
            conv=conv,
            layers=f.size("num_hidden_layers"),
            conv_bias=f.flag("use_conv_bias", True),
            proj_bias=f.flag("use_bias", False),
            eps=f.number("layer_norm_epsilon", 1e-5),
            tied=f.flag("tie_word_embeddings", True),
        )


def state_spec(config: Config, kv_dtype: str = "float32") -> StateSpec:
    """conv and ssm of every layer, always float32."""
    c = config
    return StateSpec(
        tuple(
            t
            for i in range(c.layers)
            for t in (
                TensorSpec(f"conv_{i}", "conv", i, (c.inner, c.conv - 1)),
                TensorSpec(f"ssm_{i}", "ssm", i, (c.inner, c.states)),
            )
        )
    )


def bindings(config: Config) -> dict[str, Binding]:
    c = config
    made: dict[str, Binding] = {
        "embedding": tensor("backbone.embeddings.weight", c.vocabulary, c.hidden),
        "norm": tensor("backbone.norm_f.weight", c.hidden),
    }
    if not c.tied:
        made["head"] = tensor("lm_head.weight", c.vocabulary, c.hidden)
    for i in range(c.layers):
        source, to = f"backbone.layers.{i}.", f"layer{i}_"
        mixer = source + "mixer."
        made |= {
            to + "norm": tensor(source + "norm.weight", c.hidden),
            to + "in": tensor(mixer + "in_proj.weight", 2 * c.inner, c.hidden),
            to + "out": tensor(mixer + "out_proj.weight", c.hidden, c.inner),
            to + "conv": mapped(lambda w: w.transpose(2, 1, 0), tensor(mixer + "conv1d.weight", c.inner, 1, c.conv)),
            to + "x": tensor(mixer + "x_proj.weight", c.rank + 2 * c.states, c.inner),
            to + "dt": tensor(mixer + "dt_proj.weight", c.inner, c.rank),
            to + "dt_bias": tensor(mixer + "dt_proj.bias", c.inner),
            to + "A": mapped(lambda a: -np.exp(a.T), tensor(mixer + "A_log", c.inner, c.states)),
            to + "D": tensor(mixer + "D", c.inner),
        }
        if c.conv_bias:
            made[to + "conv_bias"] = tensor(mixer + "conv1d.bias", c.inner)
        if c.proj_bias:
            made[to + "in_bias"] = tensor(mixer + "in_proj.bias", 2 * c.inner)
            made[to + "out_bias"] = tensor(mixer + "out_proj.bias", c.hidden)
    return made
