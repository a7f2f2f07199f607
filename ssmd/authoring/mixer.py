"""Mamba-2's mixer as a part of flat-IO modules; parameters and glossary in ssmd/families/mixer.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmd.authoring import ops, ops_open
from ssmd.authoring.flat import FlatModule
from ssmd.families.mixer import Mamba2Mixer


@dataclass(frozen=True)
class Rows:
    """What tells tokens from pads, and other tensors that are made once for all layers.

    valid (1, T, 1); tail (1, K-1, K-1+T), or where T is open (K-1,) and lower (1, T, T).
    """

    valid: Tensor
    tail: Tensor
    lower: Tensor | None


def rows(module: FlatModule, mixer: Mamba2Mixer, n_valid: Tensor, length: int) -> Rows | None:
    """None when T = 1."""
    if length == 1:
        return None
    lower = ops_open.lower_ones(length) if module.open else None
    return Rows(ops.valid_rows(n_valid, length), module.tail(n_valid, length, mixer.d_conv), lower)


def mamba2(
    module: FlatModule, mixer: Mamba2Mixer, layer: int, x: Tensor, conv: Tensor, ssm: Tensor, rows: Rows | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, C), new ssm (1, H, P, N)."""
    m, states = mixer, mixer.groups * mixer.d_state
    gate, xbc, dt = module.linear(layer, "in", x).split([m.inner, m.channels, m.heads], -1)
    y, new_conv = module.causal_conv(layer, conv, xbc, None if rows is None else rows.tail)
    xs, b, c = ops.silu(y).split([m.inner, states, states], -1)
    dt = ops.softplus(dt + module.weight(layer, "dt_bias"))  # (1, T, H)
    low, high = m.time_step_limit
    if low > 0 or high < math.inf:
        dt = torch.clamp(dt, low, high)
    a, d = module.weight(layer, "A"), module.weight(layer, "D")
    if rows is None:
        y, new_ssm = ops.ssd_step(xs, dt, a, b, c, d, ssm)
    elif rows.lower is None:
        form = ops.ssd_naive if module.naive else ops.ssd_chunked
        y, new_ssm = form(xs, dt * rows.valid, a, b, c, d, ssm)
    else:
        y, new_ssm = ops_open.ssd(xs, dt * rows.valid, a, b, c, d, ssm, rows.lower)
    if m.norm == "before the gate":
        y = _norm(module, m, layer, y) * ops.silu(gate)
    else:
        y = y * ops.silu(gate)
        y = y if m.norm == "none" else _norm(module, m, layer, y)
    return module.linear(layer, "out", y), new_conv, new_ssm


def _norm(module: FlatModule, mixer: Mamba2Mixer, layer: int, y: Tensor) -> Tensor:
    return ops.group_rms_norm(y, module.weight(layer, "gated_norm"), mixer.eps, mixer.groups)
