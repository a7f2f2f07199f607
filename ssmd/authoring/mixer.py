"""Mamba-2's mixer as a part of flat-IO modules; parameters and glossary in ssmd/families/mixer.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssmd.authoring import ops
from ssmd.authoring.flat import FlatModule
from ssmd.families.mixer import Mamba2Mixer

Rows = tuple[Tensor, Tensor]


def rows(mixer: Mamba2Mixer, n_valid: Tensor, length: int) -> Rows | None:
    """What tells tokens from pads, once for all layers: valid (1, T, 1), tail (1, K-1, K-1+T). None when T = 1."""
    if length == 1:
        return None
    return ops.valid_rows(n_valid, length), ops.tail_rows(n_valid, length, mixer.d_conv)


def mamba2(
    module: FlatModule, mixer: Mamba2Mixer, layer: int, x: Tensor, conv: Tensor, ssm: Tensor, rows: Rows | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, C), new ssm (1, H, P, N)."""
    m, states = mixer, mixer.groups * mixer.d_state
    gate, xbc, dt = module.linear(layer, "in", x).split([m.inner, m.channels, m.heads], -1)
    y, sequence = ops.causal_conv(
        conv, xbc, module.weight(layer, "conv"), getattr(module, f"layer{layer}_conv_bias", None)
    )
    new_conv = sequence[:, 1:] if rows is None else torch.matmul(rows[1], sequence)
    xs, b, c = ops.silu(y).split([m.inner, states, states], -1)
    dt = ops.softplus(dt + module.weight(layer, "dt_bias"))  # (1, T, H)
    low, high = m.time_step_limit
    if low > 0 or high < math.inf:
        dt = torch.clamp(dt, low, high)
    a, d = module.weight(layer, "A"), module.weight(layer, "D")
    if rows is None:
        y, new_ssm = ops.ssd_step(xs, dt, a, b, c, d, ssm)
    else:
        y, new_ssm = ops.ssd_chunked(xs, dt * rows[0], a, b, c, d, ssm)
    if m.norm == "before the gate":
        y = _norm(module, m, layer, y) * ops.silu(gate)
    else:
        y = y * ops.silu(gate)
        y = y if m.norm == "none" else _norm(module, m, layer, y)
    return module.linear(layer, "out", y), new_conv, new_ssm


def _norm(module: FlatModule, mixer: Mamba2Mixer, layer: int, y: Tensor) -> Tensor:
    return ops.group_rms_norm(y, module.weight(layer, "gated_norm"), mixer.eps, mixer.groups)
