"""Falcon-H1 as a flat-IO module; parameters in ssmd/families/falcon_h1.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import mixer, ops
from ssmd.authoring.flat import FlatModule
from ssmd.families.falcon_h1 import Config, state_spec


class FalconH1(FlatModule):
    def __init__(self, config: Config, parameters: Mapping[str, NDArray[np.float32]], context: int) -> None:
        super().__init__(parameters, state_spec(config), context, (config.rope, config.attention.head_dim))
        self.config = config

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, **states: Tensor) -> dict[str, Tensor]:
        c, length = self.config, tokens.shape[1]
        h = F.embedding(tokens, self.embedding)  # (1, T, hidden)
        rows = mixer.rows(self, c.mixer, n_valid, length)
        rotation = self.rotation(pos, length)
        masks = ops.slot_mask(pos, self.capacity(states)), ops.causal_mask(length, c.attention.each)
        out: dict[str, Tensor] = {}
        for i in range(c.layers):
            conv, ssm, key, value = (f"{kind}_{i}" for kind in ("conv", "ssm", "key", "value"))
            x = self.normed(i, "norm1", h, c.eps)
            recurred, out[conv], out[ssm] = mixer.mamba2(self, c.mixer, i, x, states[conv], states[ssm], rows)
            attended, out[key], out[value] = self.attention(i, x, states[key], states[value], masks, rotation)
            h = h + recurred + attended
            h = h + self.swiglu(i, self.normed(i, "norm2", h, c.eps))
        out["logits"] = self.logits(h, n_valid, c.eps)
        return out
