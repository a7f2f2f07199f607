"""The layers of a plan in float32, from a state to a new one: nothing is changed in place.

Glossary: T tokens, C channels, K conv width, N states, H heads, G key/value heads, D head_dim, S rows of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.plan import Attention, Mamba1, Plan

Array = NDArray[Any]
Tensors = Mapping[str, Array]  # a canonical state


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalize the last axis (arXiv:1910.07467)."""
    return np.asarray(weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)))


class Model:
    """A plan with its weights."""

    def __init__(self, plan: Plan, weights: Tensors, context: int) -> None:
        """Take it. Raises ValueError for what is not computed here."""
        if any(layer.mlp is not None and layer.mlp.activation != "swiglu" for layer in plan.layers):
            raise ValueError("runtime plain knows no MLP but SwiGLU")
        if strangers := {m.kind for m in plan.mixers if not isinstance(m, Attention | Mamba1)}:
            raise ValueError(f"runtime plain knows attention and mamba1, not {', '.join(sorted(strangers))}")
        self.plan, self.weights = plan, weights
        self.tables = plan.tables(context)

    def forward(self, ids: NDArray[np.int32], position: int, state: Tensors) -> tuple[Array, dict[str, Array]]:
        """Feed T ids after `position` others. Returns the last one's logits [vocab], and the state after it."""
        plan, w = self.plan, self.weights
        new: dict[str, Array] = {}
        h = w["embedding"][ids] * np.float32(plan.embedding_scale)  # (T, hidden)
        for i, layer in enumerate(plan.layers):
            first, last = layer.norms[0], layer.norms[-1]
            if layer.mixers:
                x = rms_norm(h, w[f"layer{i}_{first}"], plan.eps)
                for mixer in layer.mixers:
                    mix = self._attention if isinstance(mixer, Attention) else self._mamba
                    h = h + mix(i, mixer, x, position, state, new)  # type: ignore[arg-type]
            if layer.mlp is not None:
                x = rms_norm(h, w[f"layer{i}_{last}"], plan.eps)
                gate, up = np.split(self._linear(i, "gate_up", x), 2, -1)
                h = h + self._linear(i, "down", silu(gate) * up)
        logits = w["embedding" if plan.tied else "head"] @ rms_norm(h[-1], w["norm"], plan.eps)
        return logits.astype(np.float32), new

    def _attention(self, i: int, m: Attention, x: Array, position: int, state: Tensors, new: dict[str, Array]) -> Array:
        q, k, v = (
            self._linear(i, n, x).reshape(len(x), -1, m.head_dim).swapaxes(0, 1) for n in "qkv"
        )  # (H or G, T, D)
        if m.qk_eps is not None:
            q, k = (rms_norm(t, self.weights[f"layer{i}_{n}_norm"], m.qk_eps) for t, n in ((q, "q"), (k, "k")))
        if m.rotated and self.tables is not None:
            cos, sin = (table[position : position + len(x)] for table in self.tables)
            q, k = (rotated(t, cos, sin) for t in (q, k))
        k = new[f"key_{i}"] = np.concatenate([state[f"key_{i}"], k], 1)  # (G, S, D)
        v = new[f"value_{i}"] = np.concatenate([state[f"value_{i}"], v], 1)
        k, v = (np.repeat(t, m.heads // m.kv_heads, 0) for t in (k, v))  # (H, S, D)
        scores = q @ k.swapaxes(1, 2)  # (H, T, S)
        scores = np.where(np.arange(k.shape[1]) <= position + np.arange(len(x))[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True)) @ v  # (H, T, D)
        return self._linear(i, "o", out.swapaxes(0, 1).reshape(len(x), -1))

    def _mamba(self, i: int, m: Mamba1, x: Array, position: int, state: Tensors, new: dict[str, Array]) -> Array:
        """arXiv:2312.00752, algorithm 2."""
        w = {n: self.weights[f"layer{i}_{n}"] for n in ("conv", "A", "D", "dt", "dt_bias")}
        x, gate = np.split(self._linear(i, "in", x), 2, -1)  # (T, C)
        past = np.concatenate([state[f"conv_{i}"].T, x])  # (K - 1 + T, C)
        new[f"conv_{i}"] = np.ascontiguousarray(past[len(x) :].T)
        x = np.sum([past[k : k + len(x)] * w["conv"][k, 0] for k in range(m.width)], axis=0)
        x = silu(x + self.weights.get(f"layer{i}_conv_bias", np.float32(0)))
        dt, b, c = np.split(self._linear(i, "x", x), (m.rank, m.rank + m.states), -1)
        if m.mixer_eps is not None:
            dt, b, c = (rms_norm(t, np.float32(1), m.mixer_eps) for t in (dt, b, c))  # type: ignore[arg-type]
        dt = np.logaddexp(dt @ w["dt"].T + w["dt_bias"], np.float32(0))  # (T, C)
        ssm, ys = state[f"ssm_{i}"], []  # (C, N)
        for t in range(len(x)):
            ssm = np.exp(dt[t][:, None] * w["A"].T) * ssm + np.outer(dt[t] * x[t], b[t])
            ys.append(ssm @ c[t] + w["D"] * x[t])
        new[f"ssm_{i}"] = ssm
        return self._linear(i, "out", np.stack(ys) * silu(gate))

    def _linear(self, i: int, name: str, x: Array) -> Array:
        y = x @ self.weights[f"layer{i}_{name}"].T
        bias = self.weights.get(f"layer{i}_{name}_bias")
        return y if bias is None else y + bias


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the first values of each head by RoPE (arXiv:2104.09864). x (heads, T, D), tables (T, R/2)."""
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
