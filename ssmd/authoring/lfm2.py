"""LFM2 as a flat-IO module; parameters and glossary in ssmd/families/lfm2.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import ops
from ssmd.authoring.flat import FlatModule
from ssmd.families.lfm2 import Config, state_spec


class Lfm2(FlatModule):
    def __init__(self, config: Config, parameters: Mapping[str, NDArray[np.float32]], context: int) -> None:
        super().__init__(parameters, state_spec(config), context, (config.rope, config.head_dim))
        self.config = config

    def short_conv(self, layer: int, x: Tensor, conv: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, C)."""
        b, gate, x = self.linear(layer, "in", x).chunk(3, -1)  # (1, T, C)
        y, new_conv = self.causal_conv(layer, conv, b * x, tail)
        return self.linear(layer, "out", gate * y), new_conv

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, **states: Tensor) -> dict[str, Tensor]:
        c, length = self.config, tokens.shape[1]
        h = F.embedding(tokens, self.embedding)  # (1, T, hidden)
        tail = self.tail(n_valid, length, c.conv) if length > 1 else None
        rotation = self.rotation(pos, length)
        masks = ops.slot_mask(pos, self.capacity(states)), ops.causal_mask(length, c.heads // c.kv_heads)
        out: dict[str, Tensor] = {}
        for i, kind in enumerate(c.layers):
            x = self.normed(i, "norm1", h, c.eps)
            if kind == "conv":
                conv = f"conv_{i}"
                y, out[conv] = self.short_conv(i, x, states[conv], tail)
            else:
                key, value = f"key_{i}", f"value_{i}"
                y, out[key], out[value] = self.attention(i, x, states[key], states[value], masks, rotation, c.eps)
            h = h + y
            h = h + self.swiglu(i, self.normed(i, "norm2", h, c.eps))
        out["logits"] = self.logits(h, n_valid, c.eps)
        return out
