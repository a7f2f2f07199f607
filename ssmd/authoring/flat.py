"""A module with flat IO: the graph that every converter reads, and the parts that execute a plan.

in   tokens i32[1, T], pos i32[1], n_valid i32[1]; each state tensor by its name
out  logits f32[1, V] of the last valid token; each state tensor by its name

conv   f32[1, K-1, C]   in and out whole (canonical: [C, K-1])
ssm    f32[1, H, P, N]  in and out whole; Mamba-1: f32[1, N, D] (canonical: [D, N])
key    f32[G, S, D]     in: the cache; out: only the T new rows, f32[G, T, D]
value  f32[G, D, S]     in: the cache, transposed; out: only the T new columns, f32[G, D, T]
slots  f32[1, 1, S]     in, if S is open: added to the scores of the slots; otherwise it is computed from pos

A decode step of B streams ("lanes") has tokens i32[1, B] and pos i32[B], no n_valid, and logits f32[B, V]. Each lane
has its own states, and its own slots if they are given (`of_lane`). The new rows of all lanes come out together:
key f32[B G, 1, D], value f32[B G, D, 1]. Products with weights have B rows. Operations on a lane's state are done for
each lane, as in a step of one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ssmd.authoring import attention, ops, ops_open
from ssmd.families.offsets import BLOCK, SUFFIX
from ssmd.model.plan import Experts
from ssmd.model.state import StateSpec

Held: TypeAlias = "Tensor | Sequence[Tensor]"  # a state of one stream, or of each lane


def by_lane(step: Callable[..., tuple[Tensor, Tensor]], *rows: int) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Turn a step of one token, (y (1, 1, width), new state), into a step of one token for each lane.

    Arguments at the places `rows` have a row for each lane, (1, B, width). States are sequences. Other arguments are
    the same for all lanes.
    """

    def steps(*given: Any) -> tuple[Tensor, list[Tensor]]:
        def own(lane: int, place: int) -> Any:
            value = given[place]
            if place in rows:
                return value[:, lane : lane + 1]
            return value if isinstance(value, Tensor | None) else value[lane]

        lanes = next(len(value) for value in given if not isinstance(value, Tensor | None))
        made = [step(*(own(lane, place) for place in range(len(given)))) for lane in range(lanes)]
        return torch.cat([y for y, _ in made], 1), [new for _, new in made]

    return steps


class BlockOffsets(nn.Module):
    """The term of a product from the blocks' offsets. It is a module so that converters recognise it by name."""

    def forward(self, sums: Tensor, offset: Tensor) -> Tensor:
        return F.linear(sums, offset)


class FlatModule(nn.Module):
    """A module whose parameters are exactly `parameters`, made by a family's bindings.

    A forward adds no other constants than masks and the tables of RoPE. context: the most tokens, which is the length
    of these tables. A forward's caches may have room for fewer (S).
    """

    def __init__(
        self,
        parameters: Mapping[str, NDArray[np.float32]],
        spec: StateSpec,
        context: int,
        tables: tuple[NDArray[np.float32], NDArray[np.float32]] | None,
    ) -> None:
        """tables: RoPE's cosines and sines, each (S, R/2); None without RoPE."""
        super().__init__()
        self.spec = spec
        self.context = context
        self.open = False  # whether a trace of it is to hold for any number of tokens, or a lane's to give those bits
        self.naive = False  # whether a trace of Mamba-2 layers is as published: what graph passes start from
        self.offsets = BlockOffsets()
        self.every = False  # whether a forward gives the logits of every token, (T, V): for references, never exported
        for name, array in parameters.items():
            own = np.require(array, np.float32, ["C", "W"])  # copied only if it is a read-only view of a file
            self.register_parameter(name, nn.Parameter(torch.from_numpy(own), requires_grad=False))
        if tables is not None:
            for name, table in zip(("cos", "sin"), tables, strict=True):
                self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def weight(self, layer: int, name: str) -> Tensor:
        return getattr(self, f"layer{layer}_{name}")

    def normed(self, layer: int, name: str, x: Tensor, eps: float) -> Tensor:
        """Apply RMSNorm. A rotated model's norm has no weight: its readers contain it (ssmd/families/rotation.py)."""
        return ops.rms_norm(x, getattr(self, f"layer{layer}_{name}", None), eps)

    def linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        x = self.spread(name, x)
        y = F.linear(x, self.weight(layer, name), getattr(self, f"layer{layer}_{name}_bias", None))
        offset = getattr(self, f"layer{layer}_{name}{SUFFIX}", None)
        return y if offset is None else y + self.offsets(x.reshape(1, -1, offset.shape[1], BLOCK).sum(-1), offset)

    def spread(self, name: str, x: Tensor) -> Tensor:
        """Multiply blocks of channels by a rotated model's Hadamard matrix of that name; without one return x."""
        matrix = getattr(self, f"spread_{name}", None)
        return x if matrix is None else F.linear(x.reshape(-1, len(matrix)), matrix).reshape(x.shape)

    def tail(self, n_valid: Tensor, length: int, width: int) -> Tensor:
        """Return the selection of the new conv state: (1, K-1, K-1+T), or (K-1,) if T is open."""
        return ops_open.tail_rows(n_valid, width) if self.open else ops.tail_rows(n_valid, length, width)

    def causal_conv(self, layer: int, conv: Held, x: Tensor, tail: Tensor | None) -> tuple[Tensor, Held]:
        """Convolve: conv (1, K-1, C), x (1, T, C) -> (1, T, C) and the new conv. tail: None when T = 1."""
        bias = getattr(self, f"layer{layer}_conv_bias", None)
        form: Callable[..., tuple[Tensor, Any]] = ops_open.causal_conv if self.open else ops.causal_conv
        if not isinstance(conv, Tensor):
            form = by_lane(form, 1) if self.open else ops.causal_conv_by_lane
        y, sequence = form(conv, x, self.weight(layer, "conv"), bias)  # sequence (1, K-1+T, C)
        if tail is None:
            return y, sequence[:, 1:] if isinstance(sequence, Tensor) else [s[:, 1:] for s in sequence]
        return y, torch.index_select(sequence, 1, tail) if self.open else torch.matmul(tail, sequence)

    def capacity(self, states: Mapping[str, Any]) -> int:
        """Return S, the slots of a forward's KV caches; 0 without attention."""
        return next((states[t.name].shape[1] for t in self.spec.rows if t.kind == "key"), 0)

    def lane_slots(self, pos: Tensor, states: Mapping[str, Held]) -> list[Tensor]:
        """Return each lane's mask of cache slots, (1, 1, S), from its position. Each lane has its own S."""
        key = next(t.name for t in self.spec.rows if t.kind == "key")
        return [attention.slot_mask(pos[b : b + 1], cache.shape[1]) for b, cache in enumerate(states[key])]

    def rotation(self, pos: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the T positions from `pos` on, each (T, 1, R/2)."""
        # Pads may lie beyond the context. An index outside the table would be an error in some runtimes.
        rows = torch.clamp(pos + torch.arange(length, dtype=torch.int32), max=self.context - 1)
        cos, sin = (torch.index_select(t, 0, rows).reshape(length, 1, -1) for t in (self.cos, self.sin))
        return cos, sin

    def lane_rotation(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of each lane's position, each (B, 1, R/2)."""
        rows = torch.clamp(pos, max=self.context - 1)
        cos, sin = (torch.index_select(t, 0, rows).reshape(len(pos), 1, -1) for t in (self.cos, self.sin))
        return cos, sin

    def attention(
        self,
        layer: int,
        x: Tensor,
        key: Held,
        value: Held,
        masks: tuple[Held | None, Tensor | None],
        rotation: tuple[Tensor, Tensor] | None,
        qk_eps: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute attention: x (1, T, hidden) -> (1, T, hidden) and the new rows of key and value.

        masks: slots and causal. qk_eps: epsilon of the norms of each head's query and key before RoPE; None without
        them.
        """
        shape = (key if isinstance(key, Tensor) else key[0]).shape
        groups, size = int(shape[0]), int(shape[2])  # numbers to a tracer that leaves S open, too
        heads = int(self.weight(layer, "q").shape[0]) // size
        q = self.linear(layer, "q", x).reshape(-1, heads, size)  # (T, G R, D)
        k = self.linear(layer, "k", x).reshape(-1, groups, size)
        v = self.linear(layer, "v", x).reshape(-1, groups, size)
        if qk_eps is not None:
            q, k = (ops.rms_norm(x, self.weight(layer, n), qk_eps) for x, n in ((q, "q_norm"), (k, "k_norm")))
        if rotation is not None:
            q, k = attention.rope(q, *rotation), attention.rope(k, *rotation)
        q = q.reshape(-1, groups, heads // groups, size)  # (T, G, R, D)
        attend: Callable[..., tuple[Tensor, Tensor, Tensor]] = attention.attention
        if not isinstance(key, Tensor):
            attend = ops_open.attention_by_lane if self.open else attention.attention_by_lane
        out, new_key, new_value = attend(q, k, v, key, value, *masks)
        return self.linear(layer, "o", out), new_key, new_value

    def swiglu(self, layer: int, x: Tensor) -> Tensor:
        """Compute a gated MLP: x (1, T, hidden) -> (1, T, hidden)."""
        gate, up = self.linear(layer, "gate_up", x).chunk(2, -1)  # (1, T, I)
        return self.linear(layer, "down", ops.silu(gate) * up)

    def relu2(self, layer: int, x: Tensor) -> Tensor:
        """Compute an MLP with squared ReLU and no gate: x (1, T, hidden) -> (1, T, hidden)."""
        return self.linear(layer, "down", ops.relu2(self.linear(layer, "up", x)))

    def experts(self, layer: int, m: Experts, x: Tensor) -> Tensor:
        """Compute a mixture of experts: x (1, T, hidden) -> (1, T, hidden)."""
        hidden = int(self.embedding.shape[1])
        rows = x.reshape(-1, hidden)  # (T, hidden)
        bias = self.weight(layer, "router_bias") if m.bias else None
        scores = F.linear(rows, self.weight(layer, "router"))  # (T, E)
        shares = ops.shares(scores, bias, m.chosen, sigmoid=m.sigmoid, normed=m.normed)
        gate, up, down = (self.weight(layer, f"experts_{name}") for name in ("gate", "up", "down"))
        return ops.experts(rows, shares, gate, up, down)

    def logits(self, h: Tensor, n_valid: Tensor | None, eps: float) -> Tensor:
        """Compute logits: h (1, T, hidden) -> (1, V) of the last valid token, or (B, V) of each lane."""
        length = h.shape[1]
        if length > 1 and not self.every and n_valid is not None:
            h = torch.matmul(ops.last_row(n_valid, length), h)  # (1, 1, hidden)
        if hasattr(self, "spread_norm"):
            h = self.spread("norm", self.spread("norm", ops.rms_norm(h, None, eps)) * self.norm)
        else:
            h = ops.rms_norm(h, getattr(self, "norm", None), eps)
        return F.linear(h, getattr(self, "head", self.embedding)).reshape(h.shape[1], -1)


class Positional(nn.Module):
    """A module in the form for a trace, which supports no keyword arguments.

    (tokens, pos, n_valid, *states) -> (logits, *states), both in the order of `states`.
    """

    def __init__(self, module: FlatModule, states: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._states = states

    def forward(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        out = self.module(tokens, pos, n_valid, **dict(zip(self._states, states, strict=True)))
        return (out["logits"], *(out[name] for name in self._states))


class PositionalLanes(nn.Module):
    """A decode step of several streams in the form for a trace.

    (tokens, pos, *states) -> (logits, *new states), in the order of `inputs` and of `outputs`.
    """

    def __init__(self, module: FlatModule, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._inputs, self._outputs = inputs, outputs

    def forward(self, tokens: Tensor, pos: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        out = self.module(tokens, pos, **dict(zip(self._inputs, states, strict=True)))
        return (out["logits"], *(out[name] for name in self._outputs))
