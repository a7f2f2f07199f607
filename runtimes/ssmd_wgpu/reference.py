"""The reference of a plan's arithmetic, in numpy and float64: an artifact's golden values, from unpacked weights.

Written from the papers; a layer's weights are read when it is computed and then let go.
Glossary: T tokens, C channels, N d_state, H heads, G key/value heads or groups, D head_dim; K and V, values of gated
DeltaNet's keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ssmd.model.plan import Attention, Experts, GatedDeltaNet, Mamba1, Mixer, Mlp, ShortConv
from ssmd_wgpu.pack import Rows
from ssmd_wgpu.plan import PackedPlan

Array = NDArray[np.float64]  # in which the order of sums does not show in the golden values, float32


L2_EPS = 1e-6  # of gated DeltaNet's keys and queries


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is infinite, and the quotient 0
        return np.asarray(x / (1 + np.exp(-x)))


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def softplus(x: Array) -> Array:
    return np.logaddexp(x, 0.0)


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Normalize over the last axis (arXiv:1910.07467)."""
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x if weight is None else x * weight


def causal_conv(x: Array, weight: Array, bias: Array | None) -> Array:
    """Convolve x (T, C) with weight (C, width) -> (T, C), from an empty past."""
    length, width = len(x), weight.shape[1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    y = sum(padded[k : k + length] * weight[:, k] for k in range(width))
    return np.asarray(y if bias is None else y + bias)


def selective_scan(x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Array:
    """Compute algorithm 2 of arXiv:2312.00752: x and dt (T, C), a (C, N), b and c (T, N), d (C,) -> (T, C)."""
    state, ys = np.zeros_like(a), []
    for xt, dtt, bt, ct in zip(x, dt, b, c, strict=True):
        state = np.exp(dtt[:, None] * a) * state + np.outer(dtt * xt, bt)
        ys.append(state @ ct + d * xt)
    return np.stack(ys)


def ssd(x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Array:
    """Compute the quadratic form of arXiv:2405.21060, section 5, which holds no state.

    x (T, H, P), dt (T, H), a and d (H,), b and c (T, G, N) -> (T, H, P).
    """
    each = x.shape[1] // b.shape[1]
    logs = np.cumsum(dt * a, 0)  # (T, H): of the decay since the beginning
    decays = np.exp(np.minimum(logs[:, None] - logs[None], 0.0)) * np.tri(len(x))[..., None]  # (T, S, H)
    scores = np.repeat(np.einsum("tgn,sgn->tsg", c, b), each, -1)  # (T, S, H)
    y: Array = np.einsum("tsh,shp->thp", scores * decays * dt[None], x)
    return y + d[:, None] * x


def gated_delta_rule(q: Array, k: Array, v: Array, decay: Array, beta: Array) -> Array:
    """Compute the recurrence of arXiv:2412.06464, equation 10, token by token.

    q and k (T, G, K) of length 1, v (T, H, V), decay and beta (T, H) -> (T, H, V).
    """
    each = v.shape[1] // k.shape[1]
    state, ys = np.zeros((*v.shape[1:], k.shape[-1])), []  # (H, V, K)
    for qt, kt, vt, dt, bt in zip(np.repeat(q, each, 1), np.repeat(k, each, 1), v, decay, beta, strict=True):
        state *= dt[:, None, None]
        written = bt[:, None] * (vt - np.einsum("hvk,hk->hv", state, kt))
        state += written[..., None] * kt[:, None]
        ys.append(np.einsum("hvk,hk->hv", state, qt))
    return np.stack(ys)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the first R values of each head (arXiv:2104.09864): x (T, heads, D), cos and sin (T, R / 2)."""
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Attend with each token to those up to its own: q (T, H, D) scaled, k and v (T, G, D) -> (T, H, D)."""
    length, each = len(q), q.shape[1] // k.shape[1]
    k, v = np.repeat(k, each, 1), np.repeat(v, each, 1)
    scores = np.einsum("thd,shd->hts", q, k)
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: Array = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
    return out


def expert_shares(scores: Array, bias: Array | None, m: Experts) -> Array:
    """Return the share of each expert in each token's output, 0 of those that are not chosen: (T, E) -> (T, E)."""
    if m.sigmoid:
        scores = sigmoid(scores)
    order = np.argsort(-(scores if bias is None else scores + bias), axis=-1, kind="stable")
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, order[:, : m.chosen], True, -1)
    if m.sigmoid:
        shares = np.where(chosen, scores, 0.0)
        return shares / (shares.sum(-1, keepdims=True) + 1e-6) if m.normed else shares
    shares = np.where(chosen, np.exp(scores - np.where(chosen, scores, -np.inf).max(-1, keepdims=True)), 0.0)
    return np.asarray(shares / shares.sum(-1, keepdims=True))


def parts_of(blocks: Iterator[NDArray[np.float32]], rows: int) -> Iterator[NDArray[np.float32]]:
    """Cut a matrix that comes block by block into parts of so many rows."""
    held: NDArray[np.float32] | None = None
    for block in blocks:
        held = block if held is None else np.concatenate([held, block])
        while len(held) >= rows:
            yield held[:rows]
            held = held[rows:]


class Reference:
    """A model that reads one text from its beginning."""

    def __init__(self, plan: PackedPlan, rows: Mapping[str, Rows]) -> None:
        self._plan, self._rows = plan, rows
        self._cos = self._sin = np.empty((0, 0))

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Return logits (k, V) after the tokens at these positions."""
        plan = self._plan
        if plan.rotated:
            self._cos, self._sin = (self._whole(name)[: len(tokens)] for name in ("rope_cos", "rope_sin"))
        h = self._picked("embedding", tokens) * plan.embedding_scale  # (T, hidden)
        for i, layer in enumerate(plan.layers):
            if layer.mixers:
                x = rms_norm(h, self._whole(f"layer{i}_norm1"), plan.eps)
                h = h + sum(self._mixer(f"layer{i}_", mixer, x) for mixer in layer.mixers)
            if layer.followers:
                x = rms_norm(h, self._whole(f"layer{i}_norm2"), plan.eps)
            if layer.mlp is not None:
                h = h + self._mlp(f"layer{i}_", layer.mlp, x)
            if layer.experts is not None:
                h = h + self._mixture(f"layer{i}_", layer.experts, x)
        h = rms_norm(h[list(positions)], self._whole("norm"), plan.eps)
        made, first = np.empty((len(h), plan.vocabulary), np.float32), 0
        for block in self._rows["embedding" if plan.tied else "head"]():
            made[:, first : first + len(block)] = h @ block.T.astype(np.float64)
            first += len(block)
        return made

    def _mlp(self, to: str, mlp: Mlp, x: Array) -> Array:
        if mlp.activation == "relu2":
            return self._linear(to + "down", np.maximum(self._linear(to + "up", x), 0) ** 2)
        gate, up = np.split(self._linear(to + "gate_up", x), 2, -1)
        return self._linear(to + "down", silu(gate) * up)

    def _mixture(self, to: str, m: Experts, x: Array) -> Array:
        shares = expert_shares(self._linear(to + "router", x), self._maybe(to + "router_bias") if m.bias else None, m)
        out = np.zeros_like(x)
        names = (to + "experts_gate_up", to + "experts_down")
        rows = (2 * m.intermediate, x.shape[1])
        each = zip(*(parts_of(self._rows[name](), n) for name, n in zip(names, rows, strict=True)), strict=True)
        for e, (into, down) in enumerate(each):
            taken = shares[:, e] != 0
            gate, up = np.split(x[taken] @ into.T.astype(np.float64), 2, -1)
            out[taken] += shares[taken, e, None] * ((silu(gate) * up) @ down.T.astype(np.float64))
        return out

    def _mixer(self, to: str, mixer: Mixer, x: Array) -> Array:
        if isinstance(mixer, Attention):
            return self._attention(to, mixer, x)
        if isinstance(mixer, GatedDeltaNet):
            return self._gated_deltanet(to, mixer, x)
        y = self._linear(to + "in", x)
        conv, bias = self._whole(to + "conv"), self._maybe(to + "conv_bias")
        if isinstance(mixer, ShortConv):
            b, gate, x = np.split(y, 3, -1)
            return self._linear(to + "out", gate * causal_conv(b * x, conv, bias))
        a, d, dt_bias = (self._whole(to + name) for name in ("A", "D", "dt_bias"))
        if isinstance(mixer, Mamba1):
            x, gate = np.split(y, 2, -1)
            x = silu(causal_conv(x, conv, bias))
            parts = np.split(self._linear(to + "x", x), (mixer.rank, mixer.rank + mixer.states), -1)
            if mixer.mixer_eps is not None:
                parts = [rms_norm(part, None, mixer.mixer_eps) for part in parts]
            dt = softplus(self._linear(to + "dt", parts[0]) + dt_bias)
            return self._linear(to + "out", selective_scan(x, dt, a, parts[1], parts[2], d) * silu(gate))
        length, m = len(x), mixer
        gate, x, dt = np.split(y, (m.inner, m.inner + m.channels), -1)
        x, b, c = np.split(silu(causal_conv(x, conv, bias)), (m.inner, m.inner + m.groups * m.states), -1)
        dt = np.clip(softplus(dt + dt_bias), m.dt_low, m.dt_high)
        b, c = (v.reshape(length, m.groups, m.states) for v in (b, c))
        y = ssd(x.reshape(length, m.heads, m.head_dim), dt, a, b, c, d).reshape(length, m.inner)
        if m.norm != "before the gate":
            y = y * silu(gate)
        if m.norm != "none":
            y = rms_norm(y.reshape(length, m.groups, -1), None, m.eps).reshape(length, m.inner)
            y = y * self._whole(to + "gated_norm")
        if m.norm == "before the gate":
            y = y * silu(gate)
        return self._linear(to + "out", y)

    def _gated_deltanet(self, to: str, m: GatedDeltaNet, x: Array) -> Array:
        length, heads = len(x), (m.heads, m.value_dim)
        gate, qkv = np.split(self._linear(to + "in", x), [m.inner], -1)
        b, a = np.split(self._linear(to + "ba", x), 2, -1)  # (T, H)
        q, k, v = np.split(silu(causal_conv(qkv, self._whole(to + "conv"), None)), (m.keys, 2 * m.keys), -1)
        q, k = (t.reshape(length, m.key_heads, m.key_dim) for t in (q, k))
        q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + L2_EPS) for t in (q, k))
        decay = np.exp(self._whole(to + "A") * softplus(a + self._whole(to + "dt_bias")))
        y = gated_delta_rule(q * m.key_dim**-0.5, k, v.reshape(length, *heads), decay, sigmoid(b))
        y = rms_norm(y, self._whole(to + "gated_norm"), m.eps) * silu(gate.reshape(length, *heads))
        return self._linear(to + "out", y.reshape(length, m.inner))

    def _attention(self, to: str, m: Attention, x: Array) -> Array:
        heads = self._linear(to + "qkv", x).reshape(len(x), -1, m.head_dim)
        q, k, v, gate = np.split(heads, np.cumsum((m.heads, m.kv_heads, m.kv_heads)), 1)
        if m.qk_eps is not None:
            q, k = (rms_norm(t, self._whole(to + n), m.qk_eps) for t, n in ((q, "q_norm"), (k, "k_norm")))
        if m.rotated:
            q, k = (rope(t, self._cos, self._sin) for t in (q, k))
        y = attention(q, k, v)
        if m.gate != "none":
            y = y * sigmoid(gate)
        return self._linear(to + "o", y.reshape(len(x), -1))

    def _linear(self, name: str, x: Array) -> Array:
        y: Array = np.concatenate([x @ block.T.astype(np.float64) for block in self._rows[name]()], -1)
        # That of dt comes before its softplus, that of a router counts for the choice alone.
        bias = None if name.endswith(("_dt", "_router")) else self._maybe(f"{name}_bias")
        return y if bias is None else y + bias

    def _picked(self, name: str, rows: Sequence[int]) -> Array:
        made = np.empty((len(rows), self._plan.hidden))
        wanted, first = np.asarray(rows), 0
        for block in self._rows[name]():
            inside = (wanted >= first) & (wanted < first + len(block))
            made[inside] = block[wanted[inside] - first]
            first += len(block)
        return made

    def _whole(self, name: str) -> Array:
        return np.concatenate(list(self._rows[name]())).astype(np.float64)

    def _maybe(self, name: str) -> Array | None:
        return self._whole(name) if name in self._rows else None
