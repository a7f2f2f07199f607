"""The host's half of a flat-IO graph, in plain torch: it keeps the states and writes the new KV rows.

It is the simple form of a runtime's work, and computes golden values and parity tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssmd.authoring import attention
from ssmd.authoring.flat import FlatModule
from ssmd.authoring.model import Model
from ssmd.model.state import WINDOWS, State, StateError, StateSpec, of_lane


def graph_shapes(spec: StateSpec, context: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a graph's state inputs, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for t in spec.tensors:
        if t.channels_first:
            shapes[t.name] = (1, t.shape[1], t.shape[0])  # (1, K-1, C), (1, N, D)
        elif t.kind == "ssm":
            shapes[t.name] = (1, *t.shape)  # (1, H, P, N)
        elif t.kind in WINDOWS:
            heads, window, size = t.shape
            shapes[t.name] = (heads, window, size) if t.kind == "window_key" else (heads, size, window)
        else:
            heads, size = t.shape
            shapes[t.name] = (heads, context, size) if t.kind == "key" else (heads, size, context)
    return shapes


class Host:
    """A module with its states, from position 0 on."""

    def __init__(self, module: FlatModule, capacity: int | None = None) -> None:
        """capacity: the most tokens, if fewer than the module's context: each step attends over all of them."""
        self.module = module
        self.capacity = module.context if capacity is None else capacity
        self.position = 0
        self.states = {name: torch.zeros(s) for name, s in graph_shapes(module.spec, self.capacity).items()}

    def feed(self, tokens: Sequence[int], bucket: int, pad: int = 0) -> NDArray[np.float32]:
        """Feed 1 <= n <= bucket tokens in one call; the rest of it is filled with `pad`. Returns logits (V,)."""
        call = self._call(tokens, bucket, pad)
        with torch.no_grad():
            out: dict[str, Tensor] = self.module(*call, **self.states)
        self._take(out, len(tokens), self.position)
        self.position += len(tokens)
        return self._logits(out["logits"], len(tokens))

    def feed_all(self, parts: Sequence[Sequence[int]], buckets: Sequence[int]) -> list[NDArray[np.float32]]:
        """Feed several calls, each with its bucket. Returns the logits of each, as `feed` does, to the last bit.

        Of a module whose large parameters are made when they are used, each layer is made once: it computes all calls
        before the next one.
        """
        module = self.module
        if not isinstance(module, Model) or module.late is None:
            return [self.feed(part, bucket) for part, bucket in zip(parts, buckets, strict=True)]
        calls, starts = [], []
        for part, bucket in zip(parts, buckets, strict=True):
            starts.append(self.position)
            calls.append(self._call(part, bucket))
            self.position += len(part)
        with torch.no_grad(), module.present("spread_"):
            with module.present("embedding"):
                hidden = [module.embedded(tokens) for tokens, _, _ in calls]
            shared = [module.shared(at, n, tokens.shape[1], self.states) for tokens, at, n in calls]
            for i in range(len(module.plan.layers)):
                with module.present(f"layer{i}_"):
                    for j, part in enumerate(parts):
                        out: dict[str, Tensor] = {}
                        hidden[j] = module.layer(i, hidden[j], self.states, out, shared[j])
                        self._take(out, len(part), starts[j])
            with module.present("head" if hasattr(module, "head") else "embedding"):
                made = [module.logits(h, n, module.plan.eps) for h, (_, _, n) in zip(hidden, calls, strict=True)]
        return [self._logits(logits, len(part)) for logits, part in zip(made, parts, strict=True)]

    def _call(self, tokens: Sequence[int], bucket: int, pad: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens, position and number of valid tokens of a call. Raises ValueError."""
        n = len(tokens)
        if not 1 <= n <= bucket or self.position + n > self.capacity:
            raise ValueError(f"{n} tokens at position {self.position} do not fit a bucket of {bucket} or the context")
        padded = torch.tensor([[*tokens, *[pad] * (bucket - n)]], dtype=torch.int32)
        return padded, torch.tensor([self.position], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)

    def _logits(self, logits: Tensor, n: int) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = logits.numpy()[:n]
        return rows if self.module.every else rows[0]

    def _take(self, out: Mapping[str, Tensor], n: int, start: int) -> None:
        """Take the new states of a call of `n` tokens from position `start` on, those that are in `out`."""
        rows = slice(start, start + n)
        for t in self.module.spec.tensors:
            if t.name not in out:
                continue
            if t.recurrent:
                self.states[t.name] = out[t.name]
            elif t.kind == "key":
                self.states[t.name][:, rows] = out[t.name][:, :n]
            else:
                self.states[t.name][..., rows] = out[t.name][..., :n]

    def rows(self, tokens: Sequence[int], bucket: int) -> NDArray[np.float32]:
        """Feed any number of tokens, `bucket` at a time. Returns the logits after each: (n, V)."""
        self.module.every = True
        try:
            cuts = [tokens[i : i + bucket] for i in range(0, len(tokens), bucket)]
            parts = self.feed_all(cuts, [bucket] * len(cuts))
        finally:
            self.module.every = False
        return np.concatenate(parts)

    def state(self) -> State:
        """Return a canonical copy of the state."""
        n = self.position
        tensors = {}
        for t in self.module.spec.tensors:
            x = self.states[t.name]
            rows = x[:, :n] if t.kind == "key" else x[..., :n].transpose(-2, -1)
            tensors[t.name] = (t.canonical(x) if t.recurrent else rows).numpy().copy()
        return State(n, 0, tensors)

    def restore(self, state: State) -> None:
        """Continue from a canonical state. Raises StateError if it is not one of this module."""
        state.check(self.module.spec)
        if state.since or state.position > self.capacity:
            raise StateError(f"rows [{state.since}, {state.position}) are not a whole state within the context")
        self.position = state.position
        for t in self.module.spec.tensors:
            array = torch.from_numpy(state.tensors[t.name].astype(np.float32))  # a copy
            held = self.states[t.name].zero_()
            if t.recurrent:
                t.canonical(held)[...] = array
            elif t.kind == "key":
                held[:, : state.position] = array
            else:
                held[..., : state.position] = array.transpose(1, 2)


def step_together(hosts: Sequence[Host], tokens: Sequence[int]) -> NDArray[np.float32]:
    """Feed a token to each of several hosts of one module in one call. Returns logits (B, V).

    Their capacities may differ. A module of open lengths has no input for the slots that count.
    """
    module = hosts[0].module
    given: dict[str, Tensor] = {}
    for lane, host in enumerate(hosts):
        given |= {of_lane(name, lane): state for name, state in host.states.items()}
        if module.spec.rows and not module.open:
            given[of_lane("slots", lane)] = attention.slot_mask(torch.tensor([host.position]), host.capacity)
    at = torch.tensor([host.position for host in hosts], dtype=torch.int32)
    with torch.no_grad():
        out: dict[str, Tensor] = module(torch.tensor([tokens], dtype=torch.int32), at, **given)
    for lane, host in enumerate(hosts):
        rows = {t.name: out[t.name].tensor_split(len(hosts))[lane] for t in module.spec.rows}
        host._take(rows | {t.name: out[of_lane(t.name, lane)] for t in module.spec.recurrent}, 1, host.position)
        host.position += 1
    logits: NDArray[np.float32] = out["logits"].numpy()
    return logits
