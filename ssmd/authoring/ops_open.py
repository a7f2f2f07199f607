"""Operations for a graph that leaves the number of tokens T open: all tokens are one chunk, also for T = 1.

They compute no shapes: in a graph of open lengths each such number is an operation, and a decode step would spend more
time on them than on its states. Shapes and glossary are those of ssmd/authoring/ops.py.

The forms of one token in a step of several streams do the same arithmetic, so each stream gets the bits of its own
step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssmd.authoring import attention

MOST_TOKENS = 64  # T: a chunk's differences of cumulated logarithms lose digits as it grows, and its masks weigh T x T


def causal_conv(conv: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute a depthwise causal convolution as ops.causal_conv, with a product for each of the weight's K rows."""
    width = weight.shape[0]
    sequence = torch.cat([conv, x], 1)  # (1, K-1+T, C)
    y = sequence[:, width - 1 :] * weight[width - 1]  # (1, T, C)
    for k in range(width - 1):
        y = y + sequence[:, k : k + 1 - width] * weight[k]
    return (y if bias is None else y + bias), sequence


def lower_ones(length: int) -> Tensor:
    """Return (1, T, T): ones on and below the diagonal."""
    return torch.tril(torch.ones(length, length)).unsqueeze(0)


def tail_rows(n_valid: Tensor, width: int) -> Tensor:
    """Return (K-1,): the places of the last K-1 rows of conv state and new rows that are not pads."""
    return n_valid + torch.arange(width - 1, dtype=torch.int32)


def ssd(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor, lower: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute T steps as ops.ssd_chunked, in one chunk. lower: from `lower_ones`, made once for all layers."""
    _, heads, size, states = ssm.shape
    groups = int(b.shape[-1]) // int(states)
    each = heads // groups
    sums = torch.matmul(lower, dt * a)  # (1, T, H): log of the decay since the start
    by_head = sums.transpose(1, 2).reshape(groups, each, -1)  # (g, H/g, T)
    decays = torch.exp(torch.clamp(by_head.unsqueeze(-1) - by_head.unsqueeze(-2), max=0.0)) * lower  # (g, H/g, T, T)

    bg, cg = _by_group(b, groups, states), _by_group(c, groups, states)  # (g, T, N)
    scores = torch.matmul(cg, bg.transpose(1, 2)).unsqueeze(1)  # (g, 1, T, T)
    xh = x.reshape(-1, heads, size)  # (T, H, P)
    xd = xh * dt.reshape(-1, heads, 1)
    within = torch.matmul(scores * decays, xd.permute(1, 0, 2).reshape(groups, each, -1, size))  # (g, H/g, T, P)
    within = within.reshape(heads, -1, size).permute(1, 0, 2)  # (T, H, P)

    total = sums[:, -1:]  # (1, 1, H)
    kept = _by_group(xd * torch.exp(total - sums).reshape(-1, heads, 1), groups, each * size)  # (g, T, H/g P)
    added = torch.matmul(kept.transpose(1, 2), bg).reshape(1, heads, size, states)
    new = ssm * torch.exp(total).reshape(1, heads, 1, 1) + added
    start = ssm.reshape(groups, each * size, states)
    before = torch.matmul(start, cg.transpose(1, 2)).transpose(1, 2)  # (g, T, H/g P)
    before = (before if groups == 1 else before.permute(1, 0, 2)).reshape(-1, heads, size)  # (T, H, P)
    y = within + before * torch.exp(sums).reshape(-1, heads, 1) + xh * d.reshape(1, heads, 1)
    return y.reshape(1, -1, heads * size), new


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one step as `ssd` computes it."""
    return ssd(x, dt, a, b, c, d, ssm, lower_ones(1))


def attention_by_lane(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    slots: Sequence[Tensor],
    causal: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention.attention_by_lane with the products for any number of tokens, also for a token's own row."""
    lanes, groups, each, size = q.shape
    outs = []
    for lane in range(lanes):
        row = slice(lane, lane + 1)
        new_key, new_value = k[row].permute(1, 0, 2), v[row].permute(1, 2, 0)  # (G, 1, D), (G, D, 1)
        none = torch.zeros(1, each, 1)
        out = attention.attend(q[lane], new_key, new_value, key[lane], value[lane], slots[lane], none)  # (G, R, D)
        outs.append(out.reshape(1, 1, groups * each * size))
    return torch.cat(outs, 1), k.reshape(lanes * groups, 1, size), v.reshape(lanes * groups, size, 1)


def _by_group(t: Tensor, groups: int, width: int) -> Tensor:
    """Reshape T rows of `groups` parts of `width` -> (g, T, width). For one group no operation moves data."""
    return t.reshape(1, -1, width) if groups == 1 else t.reshape(-1, groups, width).permute(1, 0, 2)
