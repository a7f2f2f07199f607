"""Granite 4.0 H (dense) as a flat-IO module; parameters and glossary in ssmd/families/granitemoehybrid.py."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import ops
from ssmd.authoring.flat import FlatModule
from ssmd.families.granitemoehybrid import Config, state_spec


class GraniteMoeHybrid(FlatModule):
    def __init__(self, config: Config, parameters: Mapping[str, NDArray[np.float32]], context: int) -> None:
        rope = None if config.rope is None else (config.rope, config.head_dim)
        super().__init__(parameters, state_spec(config), context, rope)
        self.config = config

    def mamba(
        self, layer: int, x: Tensor, conv: Tensor, ssm: Tensor, valid: Tensor | None, tail: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mamba-2's mixer: x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, C), new ssm (1, H, P, N).

        `valid` (1, T, 1) and `tail` (1, K-1, K-1+T) are None when T = 1.
        """
        c = self.config
        states = c.mamba_groups * c.mamba_state
        gate, xbc, dt = self.linear(layer, "in", x).split([c.inner, c.conv_channels, c.mamba_heads], -1)
        y, sequence = ops.causal_conv(
            conv, xbc, self.weight(layer, "conv"), getattr(self, f"layer{layer}_conv_bias", None)
        )
        new_conv = sequence[:, 1:] if tail is None else torch.matmul(tail, sequence)
        xs, b, cc = ops.silu(y).split([c.inner, states, states], -1)
        dt = ops.softplus(dt + self.weight(layer, "dt_bias"))  # (1, T, H)
        low, high = c.time_step_limit
        if low > 0 or high < math.inf:
            dt = torch.clamp(dt, low, high)
        a, d = self.weight(layer, "A"), self.weight(layer, "D")
        if valid is None:
            y, new_ssm = ops.ssd_step(xs, dt, a, b, cc, d, ssm)
        else:
            y, new_ssm = ops.ssd_chunked(xs, dt * valid, a, b, cc, d, ssm)
        y = ops.gated_rms_norm(y, gate, self.weight(layer, "gated_norm"), c.eps, c.mamba_groups)
        return self.linear(layer, "out", y), new_conv, new_ssm

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, **states: Tensor) -> dict[str, Tensor]:
        c, length = self.config, tokens.shape[1]
        h = F.embedding(tokens, self.embedding)  # (1, T, hidden)
        if c.embedding_multiplier != 1.0:
            h = h * c.embedding_multiplier
        valid = ops.valid_rows(n_valid, length) if length > 1 else None
        tail = ops.tail_rows(n_valid, length, c.mamba_conv) if length > 1 else None
        rotation = None if c.rope is None else self.rotation(pos, length)
        masks = ops.slot_mask(pos, self.capacity(states)), ops.causal_mask(length, c.heads // c.kv_heads)
        out: dict[str, Tensor] = {}
        for i, kind in enumerate(c.layers):
            x = ops.rms_norm(h, self.weight(i, "norm1"), c.eps)
            if kind == "mamba":
                conv, ssm = f"conv_{i}", f"ssm_{i}"
                y, out[conv], out[ssm] = self.mamba(i, x, states[conv], states[ssm], valid, tail)
            else:
                key, value = f"key_{i}", f"value_{i}"
                y, out[key], out[value] = self.attention(i, x, states[key], states[value], masks, rotation)
            h = h + y
            h = h + self.swiglu(i, ops.rms_norm(h, self.weight(i, "norm2"), c.eps))
        out["logits"] = self.logits(h, n_valid, c.eps)
        return out
