"""The gated delta rule (arXiv:2412.06464), with a plain `ref` beside the fast forms.

    S = exp(g) S;  S += beta (v - S k) k^T;  y = S q

Shapes of all forms: q and k (1, T, G K) of G key heads; v (1, T, H V) of H value heads, of which H / G consecutive ones
read one key head; g and beta (1, T, H), both 0 on pads; state (1, H, V, K). They normalize q and k by head, and return
y (1, T, H V) and the new state. A token with g = beta = 0 leaves the state as it is, bit for bit.

Glossary: T tokens of this call, Q tokens of a chunk, Z chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ssmd.authoring.ops import CHUNK

EPS = 1e-6  # of l2, beside the sum of squares, whatever epsilon the model's norms have


def l2(x: Tensor) -> Tensor:
    """Divide the last axis by its length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a step, T = 1. The old state is read for both sums before it changes: with d = exp(g),

    S' = d S + u k^T, u = beta (v - d S k), y = S' q = d S q + u (k q).
    """
    y, (new,) = step_by_lane(q, k, v, g, beta, [state])
    return y, new


def step_by_lane(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Compute `step` of a token of each of B lanes: q, k, v, g, beta (1, B, ...), state (1, H, V, K) each.

    Operations that read no state are done for all lanes at once.
    """
    _, heads, size, width = state[0].shape
    lanes, groups = q.shape[1], k.shape[-1] // width
    qh, kh = _heads(q, groups, width) * width**-0.5, _heads(k, groups, width)  # (B, G, K)
    qk = (qh * kh).sum(-1, keepdim=True)  # (B, G, 1)
    qs, ks, dots = (_to_heads(t, heads) for t in (qh, kh, qk))  # (B, H, 1, K), (B, H, 1, 1)
    dots = dots.reshape(lanes, heads, 1)
    decay = torch.exp(g).reshape(lanes, heads, 1)
    values, rate = v.reshape(lanes, heads, size), beta.reshape(lanes, heads, 1)
    ys, made = [], []
    for i, old in enumerate(state):
        row = slice(i, i + 1)
        read, seen = (old * ks[row]).sum(-1), (old * qs[row]).sum(-1)  # (1, H, V)
        u = (values[row] - read * decay[row]) * rate[row]
        ys.append(seen * decay[row] + u * dots[row])
        made.append(old * decay[row].unsqueeze(-1) + u.unsqueeze(-1) * ks[row])  # (1, H, V, K)
    y = torch.cat(ys, 0) if lanes > 1 else ys[0]
    return y.reshape(1, lanes, heads * size), made


def masks(length: int) -> list[Tensor]:
    """Return what `chunked` needs for chunks of up to `length` tokens, each (Q, Q).

    These are ones on and below the diagonal, ones on it, and for each block size s = 1, 2, 4, ... below Q ones in the
    lower left quarters of the blocks of 2 s on the diagonal. They are made outside of a graph: LiteRT has no operator
    for what torch.eye and torch.arange become in it.
    """
    at = np.arange(length)
    rows, columns = at[:, None], at[None]
    made, size = [rows >= columns, rows == columns], 1
    while size < length:
        same = rows // (2 * size) == columns // (2 * size)
        made.append(same & (rows % (2 * size) >= size) & (columns % (2 * size) < size))
        size *= 2
    return [torch.tensor(mask.astype(np.float32)) for mask in made]


def open_masks(length: int) -> list[Tensor]:
    """Return `masks` of a call whose T <= CHUNK tokens are left open, cut from those of CHUNK tokens."""
    return [mask[:length, :length] for mask in masks(CHUNK)]


def unit_lower_inverse(a: Tensor, eye: Tensor, quarters: Sequence[Tensor]) -> Tensor:
    """Invert I + the part of a (..., Q, Q) below the diagonal, by blocks that double: two products for each size.

    The inverse X of the blocks of size s on the diagonal is known. Those of size 2 s follow: X - X a' X, a' the lower
    left quarter of each in a. This is forward substitution by blocks. The series (I - a)(I + a^2)(I + a^4)... takes as
    many products, and is off by 1e8 times the largest value where keys repeat.
    """
    if not quarters:
        return eye
    inverse = eye - a * quarters[0]
    for quarter in quarters[1:]:
        inverse = inverse - torch.matmul(torch.matmul(inverse, a * quarter), inverse)
    return inverse


def unit_lower_inverse_ref(a: Tensor) -> Tensor:
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    return torch.linalg.solve_triangular(eye + torch.tril(a, -1), eye, upper=False, unitriangular=True)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, masks: Sequence[Tensor], chunks: int = 1
) -> tuple[Tensor, Tensor]:
    """Compute T steps at once in chunks of Q tokens (arXiv:2412.06464, section 3.3).

    masks: (Q, Q) each, from `masks`. T may be open in a graph if there is one chunk. All products have rank 3, as
    XNNPACK refuses others whose first axis is 1.
    """
    _, heads, size, width = (int(n) for n in state.shape)
    lower, eye, *quarters = masks
    groups = int(k.shape[-1]) // width
    each = heads // groups

    def by_chunk(x: Tensor, n: int) -> Tensor:
        """Reshape (T, n, size) -> (Z n, Q, size)."""
        last = int(x.shape[-1])
        if chunks == 1:
            return x.reshape(-1, n, last).permute(1, 0, 2)
        return x.reshape(chunks, -1, n, last).permute(0, 2, 1, 3).reshape(chunks * n, -1, last)

    def spread(x: Tensor) -> Tensor:
        """Repeat (Z G, Q, K) -> (Z H, Q, K): a key head's rows for each of its value heads."""
        if each == 1:
            return x
        repeated = x.reshape(chunks * groups, 1, -1, width) * torch.ones(1, each, 1, 1)
        return repeated.reshape(chunks * heads, -1, width)

    qh = spread(by_chunk(_heads(q, groups, width) * width**-0.5, groups))  # (Z H, Q, K)
    kh = spread(by_chunk(_heads(k, groups, width), groups))
    vh = by_chunk(v.reshape(-1, heads, size), heads)  # (Z H, Q, V)
    rate = by_chunk(beta.reshape(-1, heads, 1), heads)  # (Z H, Q, 1)
    logs = by_chunk(g.reshape(-1, heads, 1), heads)  # (Z H, Q, 1)
    sums = torch.matmul(lower, logs)  # (Z H, Q, 1): log of the decay
    decays = torch.exp(torch.clamp(sums - sums.transpose(1, 2), max=0.0)) * lower  # (Z H, Q, Q)
    since, kept = torch.exp(sums), torch.exp(sums[:, -1:])  # (Z H, Q, 1), (Z H, 1, 1)
    # A sum of its own, (Z H, Q, 1): the difference of two large ones loses the digits of the last tokens' decay.
    until = torch.exp(torch.matmul(1.0 - lower, logs))

    keys = kh.transpose(1, 2)  # (Z H, K, Q)
    inverse = unit_lower_inverse(torch.matmul(kh, keys) * (decays * rate), eye, quarters)  # (Z H, Q, Q)
    weights = torch.matmul(qh, keys) * decays
    values = torch.matmul(inverse, vh * rate)  # (Z H, Q, V)
    read = torch.matmul(inverse, kh * (rate * since))  # (Z H, Q, K): keys that read the state at the chunk's start
    asked, written = qh * since, kh * until
    ys, s = [], state.reshape(heads, size, width)
    for i in range(chunks):
        part = slice(i * heads, (i + 1) * heads)
        old = s.transpose(1, 2)  # (H, K, V)
        u = values[part] - torch.matmul(read[part], old)  # (H, Q, V)
        ys.append((torch.matmul(asked[part], old) + torch.matmul(weights[part], u)).permute(1, 0, 2))  # (Q, H, V)
        s = s * kept[part] + torch.matmul(u.transpose(1, 2), written[part])  # (H, V, K)
    y = torch.cat(ys, 0) if chunks > 1 else ys[0]  # (T, H, V)
    return y.reshape(1, -1, heads * size), s.reshape(1, heads, size, width)


def ref(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token, by its definition."""
    _, heads, size, width = state.shape
    groups = k.shape[-1] // width
    s, ys = state[0], []
    for t in range(q.shape[1]):
        qt, kt = (l2(x[0, t].reshape(groups, width)).repeat_interleave(heads // groups, 0) for x in (q, k))  # (H, K)
        s = s * torch.exp(g[0, t])[:, None, None]
        u = (v[0, t].reshape(heads, size) - torch.einsum("hvk,hk->hv", s, kt)) * beta[0, t][:, None]
        s = s + torch.einsum("hv,hk->hvk", u, kt)
        ys.append(torch.einsum("hvk,hk->hv", s, qt) / width**0.5)
    return torch.stack(ys).reshape(1, -1, heads * size), s.unsqueeze(0)


def _heads(x: Tensor, heads: int, width: int) -> Tensor:
    """Reshape (1, T, heads width) -> (T, heads, width), each head of length 1."""
    return l2(x.reshape(-1, heads, width))


def _to_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (B, G, n) -> (B, H, 1, n): a key head's values for each of its value heads."""
    lanes, groups, width = x.shape
    if groups != heads:
        x = x.reshape(lanes * groups, 1, width) * torch.ones(1, heads // groups, 1)  # (B G, H/G, n)
    return x.reshape(lanes, heads, 1, width)
