"""Mamba and FalconMamba as a flat-IO module; parameters and glossary in ssmd/families/mamba.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import ops, scan
from ssmd.authoring.flat import FlatModule
from ssmd.families.mamba import Config, state_spec


class Mamba(FlatModule):
    def __init__(self, config: Config, parameters: Mapping[str, NDArray[np.float32]], context: int) -> None:
        super().__init__(parameters, state_spec(config), context, None)
        self.config = config

    def mixer(
        self, layer: int, x: Tensor, conv: Tensor, ssm: Tensor, valid: Tensor | None, tail: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (1, T, hidden) -> (1, T, hidden), new conv (1, K-1, D), new ssm (1, N, D).

        `valid` (1, T, 1) and `tail` are None when T = 1.
        """
        c = self.config
        x, gate = self.linear(layer, "in", x).chunk(2, -1)  # (1, T, D)
        y, new_conv = self.causal_conv(layer, conv, x, tail)
        x = ops.silu(y)
        dt, b, cc = self.linear(layer, "x", x).split([c.rank, c.states, c.states], -1)
        if c.mixer_eps is not None:
            dt, b, cc = (ops.rms_norm(t, None, c.mixer_eps) for t in (dt, b, cc))
        dt = ops.softplus(self.linear(layer, "dt", dt))  # (1, T, D)
        a, d = self.weight(layer, "A"), self.weight(layer, "D")
        if valid is None:
            y, new_ssm = scan.step(x, dt, a, b, cc, d, ssm)
        else:
            form = scan.loop() if self.open else scan.blocked
            y, new_ssm = form(x, dt * valid, a, b, cc, d, ssm)
        return self.linear(layer, "out", y * ops.silu(gate)), new_conv, new_ssm

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, **states: Tensor) -> dict[str, Tensor]:
        c, length = self.config, tokens.shape[1]
        h = F.embedding(tokens, self.embedding)  # (1, T, hidden)
        valid = ops.valid_rows(n_valid, length) if length > 1 else None
        tail = self.tail(n_valid, length, c.conv) if length > 1 else None
        out: dict[str, Tensor] = {}
        for i in range(c.layers):
            conv, ssm = f"conv_{i}", f"ssm_{i}"
            x = self.normed(i, "norm", h, c.eps)
            y, out[conv], out[ssm] = self.mixer(i, x, states[conv], states[ssm], valid, tail)
            h = h + y
        out["logits"] = self.logits(h, n_valid, c.eps)
        return out
