"""The module of every family, which executes a plan. Converters trace it, and golden values come from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import attention, mixers
from ssmd.authoring.flat import FlatModule, Held
from ssmd.authoring.mixers import Rows
from ssmd.families.registry import Family
from ssmd.model.plan import Attention, Mamba1, Mamba2, Plan, ShortConv
from ssmd.model.state import of_lane


@dataclass(frozen=True)
class _Shared:
    """The tensors that the layers of one call share. Causal masks: by the query heads that read one key/value head."""

    rows: Rows | None
    rotation: tuple[Tensor, Tensor] | None
    slots: Held | None
    causal: Mapping[int, Tensor]


class Model(FlatModule):
    """A module that executes `plan` for up to `context` tokens. family: its name, which converted files may contain."""

    def __init__(
        self, plan: Plan, parameters: Mapping[str, NDArray[np.float32]], context: int, family: str = ""
    ) -> None:
        super().__init__(parameters, plan.spec("float32"), context, plan.tables(context))
        self.plan, self.family = plan, family

    def forward(
        self, tokens: Tensor, pos: Tensor, n_valid: Tensor | None = None, **states: Tensor
    ) -> dict[str, Tensor]:
        plan, length = self.plan, tokens.shape[1]
        h = F.embedding(tokens, self.embedding)  # (1, T, hidden)
        if plan.embedding_scale != 1.0:
            h = h * plan.embedding_scale
        held: Mapping[str, Held] = states if n_valid is not None else self._by_lane(states, length)
        shared = self._shared(pos, n_valid, length, held)
        out: dict[str, Any] = {}
        for i, layer in enumerate(plan.layers):
            if layer.mixers:
                x = self.normed(i, layer.norms[0], h, plan.eps)
                mixed = [self._mixed(mixer, i, x, held, out, shared) for mixer in layer.mixers]
                if len(mixed) == 1:
                    (y,) = mixed
                    h = h + y
                else:
                    recurred, attended = mixed
                    h = h + recurred + attended
            if layer.experts is not None:
                x = self.normed(i, layer.norms[-1], h, plan.eps)
                y = self.experts(i, layer.experts, x)
                h = h + (y if layer.mlp is None else y + self.swiglu(i, x))
            elif layer.mlp is not None:
                mlp = self.swiglu if layer.mlp.activation == "swiglu" else self.relu2
                h = h + mlp(i, self.normed(i, layer.norms[-1], h, plan.eps))
        out["logits"] = self.logits(h, n_valid, plan.eps)
        return out if n_valid is not None else _with_lanes(out)

    def _by_lane(self, states: Mapping[str, Tensor], lanes: int) -> dict[str, Held]:
        """Return the states of a step of several streams, and their slots, under the names of a step of one."""
        names = [t.name for t in self.spec.tensors] + ["slots"] * (of_lane("slots", 0) in states)
        return {name: [states[of_lane(name, lane)] for lane in range(lanes)] for name in names}

    def _shared(self, pos: Tensor, n_valid: Tensor | None, length: int, states: Mapping[str, Held]) -> _Shared:
        """Make the tensors that the layers of one call share, but only those that a layer reads."""
        rows = mixers.rows(self, self.plan, n_valid, length)
        rotation = None
        if self.plan.rotated:
            rotation = self.lane_rotation(pos) if n_valid is None else self.rotation(pos, length)
        each = dict.fromkeys(m.heads // m.kv_heads for m in self.plan.mixers if isinstance(m, Attention))
        slots = states.get("slots")  # a host that gives it says which slots of the caches count
        if n_valid is None:
            if each and slots is None:
                slots = self.lane_slots(pos, states)
            return _Shared(rows, rotation, slots, {})
        if each and slots is None:
            slots = attention.slot_mask(pos, self.capacity(states))
        return _Shared(rows, rotation, slots, {n: attention.causal_mask(length, n) for n in each})

    def _mixed(
        self,
        m: Mamba1 | Mamba2 | ShortConv | Attention,
        i: int,
        x: Tensor,
        states: Mapping[str, Held],
        out: dict[str, Any],
        shared: _Shared,
    ) -> Tensor:
        """Compute mixer `m` of layer `i`, x (1, T, hidden) -> (1, T, hidden), and put its new states in `out`."""
        conv, ssm, key, value = (f"{kind}_{i}" for kind in ("conv", "ssm", "key", "value"))
        if isinstance(m, Attention):
            masks = shared.slots, shared.causal.get(m.heads // m.kv_heads)
            made = self.attention(i, x, states[key], states[value], masks, shared.rotation, m.qk_eps)
            y, out[key], out[value] = made
        elif isinstance(m, ShortConv):
            y, out[conv] = mixers.short_conv(self, m, i, x, states[conv], shared.rows)
        elif isinstance(m, Mamba1):
            y, out[conv], out[ssm] = mixers.mamba1(self, m, i, x, states[conv], states[ssm], shared.rows)
        else:
            y, out[conv], out[ssm] = mixers.mamba2(self, m, i, x, states[conv], states[ssm], shared.rows)
        return y


def _with_lanes(out: Mapping[str, Held]) -> dict[str, Tensor]:
    """Return the outputs of a step of several streams, with each lane's own tensors under names of their own."""
    tensors: dict[str, Tensor] = {}
    for name, made in out.items():
        tensors |= {name: made} if isinstance(made, Tensor) else {of_lane(name, i): t for i, t in enumerate(made)}
    return tensors


def author(family: Family, config: Any, parameters: Mapping[str, NDArray[np.float32]], context: int) -> Model:
    """Make the module of a family's config and bound parameters, for at most `context` tokens. Raises FamilyError."""
    model = Model(family.plan(config), parameters, context, family.name)
    model.eval()
    return model
