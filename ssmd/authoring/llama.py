"""Llama and Qwen3 as a flat-IO module; parameters and glossary in ssmd/families/llama.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import ops
from ssmd.authoring.flat import FlatModule
from ssmd.families.llama import Config, state_spec


class Llama(FlatModule):
    def __init__(self, config: Config, parameters: Mapping[str, NDArray[np.float32]], context: int) -> None:
        super().__init__(parameters, state_spec(config), context, (config.rope, config.head_dim))
        self.config = config

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, **states: Tensor) -> dict[str, Tensor]:
        c, length = self.config, tokens.shape[1]
        qk_eps = c.eps if c.qk_norm else None
        h = F.embedding(tokens, self.embedding)  # (1, T, hidden)
        rotation = self.rotation(pos, length)
        masks = ops.slot_mask(pos, self.capacity(states)), ops.causal_mask(length, c.heads // c.kv_heads)
        out: dict[str, Tensor] = {}
        for i in range(c.layers):
            key, value = f"key_{i}", f"value_{i}"
            x = self.normed(i, "norm1", h, c.eps)
            y, out[key], out[value] = self.attention(i, x, states[key], states[value], masks, rotation, qk_eps)
            h = h + y
            h = h + self.swiglu(i, self.normed(i, "norm2", h, c.eps))
        out["logits"] = self.logits(h, n_valid, c.eps)
        return out
