"""The recurrent mixers as parts of flat-IO modules; parameters and glossary in ssmd/model/plan.py.

A trace names its values by the local variables here and in model.py, and OpenVINO's files contain these names. With
other names the same model has other bytes, and its sessions resume as `portable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ssmd.authoring import delta, ops, ops_open, scan
from ssmd.authoring.flat import FlatModule, Held, by_lane
from ssmd.model.plan import Attention, GatedDeltaNet, Mamba1, Mamba2, Plan, ShortConv


@dataclass(frozen=True)
class Rows:
    """Tensors that are made once for all layers, such as the one that distinguishes tokens from pads.

    valid: (1, T, 1), if a layer has a recurrence. tails: by the width K of a convolution or a window, (1, K-1, K-1+T),
    or (K-1,) if T is open. lower: (1, T, T), if T is open and a layer is Mamba-2. delta: those of gated DeltaNet's
    chunks.
    """

    valid: Tensor | None
    tails: Mapping[int, Tensor]
    lower: Tensor | None
    delta: Sequence[Tensor] = ()


def rows(module: FlatModule, plan: Plan, n_valid: Tensor | None, length: int) -> Rows | None:
    """Return the tensors that the mixers of all layers share; None when T = 1, also in each of several lanes."""
    if length == 1 or n_valid is None:
        return None
    chunked = any(isinstance(m, Mamba2) for m in plan.mixers)
    lower = ops_open.lower_ones(length) if module.open and chunked else None
    deltas = any(isinstance(m, GatedDeltaNet) for m in plan.mixers)
    recurrent = chunked or deltas or any(isinstance(m, Mamba1) for m in plan.mixers)
    valid = ops.valid_rows(n_valid, length) if recurrent else None
    found = (m.window if isinstance(m, Attention) else m.width for m in plan.mixers)
    widths = dict.fromkeys(width for width in found if width is not None)  # not of attention without a window
    tails = {width: module.tail(n_valid, length, width) for width in widths}
    return Rows(valid, tails, lower, _delta_masks(module, length) if deltas else ())


def mamba1(
    module: FlatModule, m: Mamba1, layer: int, x: Tensor, conv: Held, ssm: Held, rows: Rows | None
) -> tuple[Tensor, Held, Held]:
    """Compute Mamba's mixer: x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, C), new ssm (1, N, C)."""
    x, gate = module.linear(layer, "in", x).chunk(2, -1)  # (1, T, C)
    y, new_conv = module.causal_conv(layer, conv, x, None if rows is None else rows.tails[m.width])
    x = ops.silu(y)
    dt, b, cc = module.linear(layer, "x", x).split([m.rank, m.states, m.states], -1)
    if m.mixer_eps is not None:
        dt, b, cc = (ops.rms_norm(t, None, m.mixer_eps) for t in (dt, b, cc))
    dt = ops.softplus(module.linear(layer, "dt", dt))  # (1, T, C)
    a, d = module.weight(layer, "A"), module.weight(layer, "D")
    if rows is None:
        step = scan.step if isinstance(ssm, Tensor) else by_lane(scan.step, 0, 1, 3, 4)
        y, new_ssm = step(x, dt, a, b, cc, d, ssm)
    else:
        form, valid = scan.loop() if module.open else scan.blocked, rows.valid
        y, new_ssm = form(x, dt * valid, a, b, cc, d, ssm)
    return module.linear(layer, "out", y * ops.silu(gate)), new_conv, new_ssm


def mamba2(
    module: FlatModule, m: Mamba2, layer: int, x: Tensor, conv: Held, ssm: Held, rows: Rows | None
) -> tuple[Tensor, Held, Held]:
    """Compute Mamba-2's mixer: x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, C), new ssm (1, H, P, N)."""
    states = m.groups * m.states
    gate, xbc, dt = module.linear(layer, "in", x).split([m.inner, m.channels, m.heads], -1)
    y, new_conv = module.causal_conv(layer, conv, xbc, None if rows is None else rows.tails[m.width])
    xs, b, c = ops.silu(y).split([m.inner, states, states], -1)
    dt = ops.softplus(dt + module.weight(layer, "dt_bias"))  # (1, T, H)
    low, high = m.dt_low, math.inf if m.dt_high is None else m.dt_high
    if low > 0 or high < math.inf:
        dt = torch.clamp(dt, low, high)
    a, d = module.weight(layer, "A"), module.weight(layer, "D")
    if rows is None:
        one = ops_open.ssd_step if module.open else ops.ssd_step
        ssd_step: Callable[..., tuple[Tensor, Held]] = one
        if not isinstance(ssm, Tensor):
            ssd_step = by_lane(one, 0, 1, 3, 4) if module.open else ops.ssd_step_by_lane
        y, new_ssm = ssd_step(xs, dt, a, b, c, d, ssm)
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


def gated_deltanet(
    module: FlatModule, m: GatedDeltaNet, layer: int, x: Tensor, conv: Held, ssm: Held, rows: Rows | None
) -> tuple[Tensor, Held, Held]:
    """Compute gated DeltaNet: x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, C), new ssm (1, H, V, K)."""
    b, a = module.exact(x, module.weight(layer, "ba")).split([m.heads, m.heads], -1)  # (1, T, H)
    g = module.weight(layer, "A") * ops.softplus(a + module.weight(layer, "dt_bias"))
    beta = torch.sigmoid(b)
    gate, qkv = module.linear(layer, "in", x).split([m.inner, m.channels], -1)
    y, new_conv = module.causal_conv(layer, conv, qkv, None if rows is None else rows.tails[m.width])
    q, k, v = ops.silu(y).split([m.keys, m.keys, m.inner], -1)
    if rows is not None:
        g, beta = g * rows.valid, beta * rows.valid
        chunks = 1 if module.open else -(-int(x.shape[1]) // ops.CHUNK)
        y, new_ssm = delta.chunked(q, k, v, g, beta, ssm, rows.delta, chunks)
    elif module.open:
        one = partial(delta.chunked, masks=delta.masks(1))
        y, new_ssm = (one if isinstance(ssm, Tensor) else by_lane(one, 0, 1, 2, 3, 4))(q, k, v, g, beta, ssm)
    elif isinstance(ssm, Tensor):
        y, new_ssm = delta.step(q, k, v, g, beta, ssm)
    else:
        y, new_ssm = delta.step_by_lane(q, k, v, g, beta, ssm)
    y = ops.rms_norm(y.reshape(-1, m.heads, m.value_dim), module.weight(layer, "gated_norm"), m.eps)  # (T, H, V)
    return module.linear(layer, "out", y.reshape(1, -1, m.inner) * ops.silu(gate)), new_conv, new_ssm


def short_conv(
    module: FlatModule, m: ShortConv, layer: int, x: Tensor, conv: Held, rows: Rows | None
) -> tuple[Tensor, Held]:
    """Compute LFM2's gated convolution: x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, C)."""
    b, gate, x = module.linear(layer, "in", x).chunk(3, -1)  # (1, T, C)
    y, new_conv = module.causal_conv(layer, conv, b * x, None if rows is None else rows.tails[m.width])
    return module.linear(layer, "out", gate * y), new_conv


def _delta_masks(module: FlatModule, length: int) -> Sequence[Tensor]:
    return delta.open_masks(length) if module.open else delta.masks(ops.chunk_length(length))


def _norm(module: FlatModule, m: Mamba2, layer: int, y: Tensor) -> Tensor:
    return ops.group_rms_norm(y, module.weight(layer, "gated_norm"), m.eps, m.groups)
