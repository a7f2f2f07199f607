"""Granite 4.0 H (dense) as a flat-IO module; parameters and glossary in ssmd/families/granitemoehybrid.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import mixer, ops
from ssmd.authoring.flat import FlatModule
from ssmd.families.granitemoehybrid import Config, state_spec


class GraniteMoeHybrid(FlatModule):
    def __init__(self, config: Config, parameters: Mapping[str, NDArray[np.float32]], context: int) -> None:
        rope = None if config.rope is None else (config.rope, config.attention.head_dim)
        super().__init__(parameters, state_spec(config), context, rope)
        self.config = config

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, **states: Tensor) -> dict[str, Tensor]:
        c, length = self.config, tokens.shape[1]
        h = F.embedding(tokens, self.embedding)  # (1, T, hidden)
        if c.embedding_multiplier != 1.0:
            h = h * c.embedding_multiplier
        rows = mixer.rows(self, c.mixer, n_valid, length)
        rotation = None if c.rope is None else self.rotation(pos, length)
        masks = ops.slot_mask(pos, self.capacity(states)), ops.causal_mask(length, c.attention.each)
        out: dict[str, Tensor] = {}
        for i, kind in enumerate(c.layers):
            x = self.normed(i, "norm1", h, c.eps)
            if kind == "mamba":
                conv, ssm = f"conv_{i}", f"ssm_{i}"
                y, out[conv], out[ssm] = mixer.mamba2(self, c.mixer, i, x, states[conv], states[ssm], rows)
            else:
                key, value = f"key_{i}", f"value_{i}"
                y, out[key], out[value] = self.attention(i, x, states[key], states[value], masks, rotation)
            h = h + y
            h = h + self.swiglu(i, self.normed(i, "norm2", h, c.eps))
        out["logits"] = self.logits(h, n_valid, c.eps)
        return out
