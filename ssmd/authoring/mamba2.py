"""Mamba-2 as a flat-IO module; parameters in ssmd/families/mamba2.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import mixer
from ssmd.authoring.flat import FlatModule
from ssmd.families.mamba2 import Config, state_spec


class Mamba2(FlatModule):
    def __init__(self, config: Config, parameters: Mapping[str, NDArray[np.float32]], context: int) -> None:
        super().__init__(parameters, state_spec(config), context, None)
        self.config = config

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, **states: Tensor) -> dict[str, Tensor]:
        c, length = self.config, tokens.shape[1]
        h = F.embedding(tokens, self.embedding)  # (1, T, hidden)
        rows = mixer.rows(self, c.mixer, n_valid, length)
        out: dict[str, Tensor] = {}
        for i in range(c.layers):
            conv, ssm = f"conv_{i}", f"ssm_{i}"
            x = self.normed(i, "norm", h, c.eps)
            y, out[conv], out[ssm] = mixer.mamba2(self, c.mixer, i, x, states[conv], states[ssm], rows)
            h = h + y
        out["logits"] = self.logits(h, n_valid, c.eps)
        return out
