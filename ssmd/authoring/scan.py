"""The selective scan of Mamba-1 (arXiv:2312.00752, algorithm 2), with a plain `ref` beside the fast forms.

Every channel and state has a decay of its own, so a product of matrices cannot compute it. A token's input is small
enough for a processor's cache, so a loop over tokens is faster than any form that works on all of them in parallel
(docs/notes/log.md).

Shapes of all forms: x and dt (1, T, D), dt after softplus and 0 on pads; a (N, D) negative; b and c (1, T, N); d (D,);
ssm (1, N, D). They return y (1, T, D) and the new ssm. A token with dt = 0 changes no state.

Glossary: T tokens of this call, D channels, N d_state, Q tokens of a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

BLOCK = 4  # Q: 1 costs 1.7 times as many operators, 8 no longer fits the cache


def step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a step, T = 1: S' = exp(dt A) S + B (dt x), y = C S' + D x."""
    states = ssm.shape[1]
    new = ssm * torch.exp(dt * a) + (dt * x) * b.reshape(1, states, 1)  # (1, N, D)
    y = (new * c.reshape(1, states, 1)).sum(1, keepdim=True)  # (1, 1, D)
    return y + d * x, new


def blocked(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token. Values that do not depend on the state are made for Q tokens at once."""
    length, (_, states, channels) = x.shape[1], ssm.shape
    dts, inputs = (t.reshape(length, 1, channels).split(BLOCK) for t in (dt, dt * x))  # each (Q, 1, D)
    bs, cs = (t.reshape(length, states, 1).split(BLOCK) for t in (b, c))  # each (Q, N, 1)
    ys = []
    for dtq, inputq, bq, cq in zip(dts, inputs, bs, cs, strict=True):
        new = []
        for decay, added in zip(torch.exp(dtq * a).split(1), (inputq * bq).split(1), strict=True):
            ssm = ssm * decay + added  # (1, N, D)
            new.append(ssm)
        ys.append((torch.cat(new, 0) * cq).sum(1, keepdim=True))  # (Q, 1, D)
    return torch.cat(ys, 0).reshape(1, length, channels) + d * x, ssm


def looped(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence in a plain loop, which `loop` turns into a loop of the graph."""
    ys: list[Tensor] = []
    for t in range(x.shape[1]):
        dtt = dt[:, t : t + 1]
        ssm = ssm * torch.exp(dtt * a) + (dtt * x[:, t : t + 1]) * b[:, t].unsqueeze(-1)  # (1, N, D)
        ys.append((ssm * c[:, t].unsqueeze(-1)).sum(1, keepdim=True))
    return torch.cat(ys, 1) + d * x, ssm


@cache
def loop() -> Callable[..., tuple[Tensor, Tensor]]:
    """Script `looped` for a graph that leaves T open: a trace then contains a loop, not its unrolled steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which the converter reads
        scripted: Callable[..., tuple[Tensor, Tensor]] = torch.jit.script(looped)
    return scripted


def ref(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence by its definition, on the canonical state (D, N)."""
    state, ys = ssm[0].T, []
    for t in range(x.shape[1]):
        state = torch.exp(dt[0, t, :, None] * a.T) * state + torch.outer(dt[0, t] * x[0, t], b[0, t])
        ys.append(state @ c[0, t] + d * x[0, t])
    return torch.stack(ys).unsqueeze(0), state.T.unsqueeze(0)
