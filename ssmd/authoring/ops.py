"""The operations of re-authored modules, in forms that every converter keeps fast.

Beside each is a plain `_ref`: the definition, for tests. Two rules hold. The decode path runs no operation that moves a
state or a cache (reshape, transpose). Products of activations are batched: a plain product would become a fully
connected layer with a weight that is not constant, which no delegate supports.

Glossary: T tokens of this call, S context; G key/value heads, R query heads for each, D head_dim;
C channels and K width of the convolution; H heads, P head_dim, N d_state, g groups of a Mamba-2 layer; Q chunk;
E experts of J channels each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # Q: the fastest of 32, 64, 128, 256 on CPU (docs/notes/log.md)
NAIVE_CHUNK = 256  # Q of the published models


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def silu_ref(x: Tensor) -> Tensor:
    return F.silu(x)


def relu2(x: Tensor) -> Tensor:
    """Compute relu(x)^2 (arXiv:2109.08668)."""
    x = torch.relu(x)
    return x * x


def relu2_ref(x: Tensor) -> Tensor:
    return F.relu(x).pow(2)


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of the last axis and their places; of equal ones those that come first.

    No traced operation promises that order: a converter has to make it of aten::topk.
    """
    if torch.jit.is_tracing():
        return torch.topk(scores, count, dim=-1)
    values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :count], places[..., :count]


def shares(scores: Tensor, bias: Tensor | None, chosen: int, *, sigmoid: bool, normed: bool) -> Tensor:
    """Return the share of each expert in each token's output, 0 of those that are not chosen: (T, E) -> (T, E).

    scores: products of the router. The other arguments are those of Experts in ssmd/model/plan.py.
    """
    if sigmoid:
        scores = torch.sigmoid(scores)
        _, places = best(scores if bias is None else scores + bias, chosen)  # (T, k)
        weights = torch.gather(scores, 1, places)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6) if normed else weights
    else:
        values, places = best(scores if bias is None else scores + bias, chosen)
        weights = torch.softmax(values if bias is None else torch.gather(scores, 1, places), -1)
    return torch.zeros_like(scores).scatter(1, places, weights)


def experts(x: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute the sum of all experts' outputs by their shares: x (T, hidden), shares (T, E) -> (1, T, hidden).

    gate, up (E, J, hidden), down (E, hidden, J). It is the form that OpenVINO's plugin makes products of the chosen
    experts from (its ConvertTiledMoeBlockTo3GatherMatmuls); as it stands here all experts are computed. The plugin
    looks for both reshapes at the end. They add an axis, as reshapes that change nothing are removed before.
    """
    count, hidden = gate.shape[0], int(x.shape[1])
    each = x.repeat(count, 1).reshape(count, -1, hidden)  # (E, T, hidden)
    inner = silu(torch.bmm(each, gate.transpose(1, 2))) * torch.bmm(each, up.transpose(1, 2))  # (E, T, J)
    made = torch.bmm(inner, down.transpose(1, 2)).reshape(count, 1, -1, hidden)  # (E, 1, T, hidden)
    return (made * shares.transpose(0, 1).reshape(count, 1, -1).unsqueeze(-1)).sum(0)


def experts_ref(x: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for row, each in zip(x, shares, strict=True):
        parts = [
            share * F.linear(F.silu(F.linear(row, g)) * F.linear(row, u), d)
            for share, g, u, d in zip(each, gate, up, down, strict=True)
            if share
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows).unsqueeze(0)


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)) without overflow. The absolute error is 6e-8, as log1p cannot be exported."""
    return torch.relu(x) + torch.log(1.0 + torch.exp(-torch.abs(x)))


def softplus_ref(x: Tensor) -> Tensor:
    return F.softplus(x)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalize over the last axis (arXiv:1910.07467)."""
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def group_rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Compute Mamba-2's norm, in each of `groups` parts of the last axis separately. x (1, T, inner)."""
    if groups == 1:
        return rms_norm(x, weight, eps)
    inner = int(x.shape[-1])
    parts = x.reshape(-1, groups, inner // groups)
    parts = parts * torch.rsqrt((parts * parts).mean(-1, keepdim=True) + eps)
    return parts.reshape(1, -1, inner) * weight


def group_rms_norm_ref(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    parts = zip(x.chunk(groups, -1), weight.chunk(groups), strict=True)
    return torch.cat([rms_norm_ref(part, w, eps) for part, w in parts], -1)


def causal_conv(conv: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute a depthwise causal convolution with one multiply and one sum.

    conv (1, K-1, C) oldest first, x (1, T, C), weight (K, 1, C), bias (C,).
    Returns y (1, T, C) and the sequence (1, K-1+T, C), which contains the new conv state.
    """
    width, _, channels = weight.shape
    length = x.shape[1]
    sequence = torch.cat([conv, x], 1)  # (1, K-1+T, C)
    if length == 1:
        windows = sequence.reshape(width, 1, channels)  # (K, 1, C)
    else:
        windows = torch.cat([sequence[:, k : k + length] for k in range(width)], 0)  # (K, T, C)
    y = (windows * weight).sum(0, keepdim=True)  # (1, T, C)
    return (y if bias is None else y + bias), sequence


def causal_conv_by_lane(
    conv: Sequence[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Compute `causal_conv` of a token of each of B lanes: conv (1, K-1, C) each, x (1, B, C).

    Returns y (1, B, C) and the sequences (1, K, C).
    """
    sequences = [torch.cat([state, x[:, i : i + 1]], 1) for i, state in enumerate(conv)]  # (1, K, C) each
    width, _, channels = weight.shape
    y = (torch.cat(sequences, 0) * weight.reshape(1, width, channels)).sum(1)  # (B, C)
    y = y.reshape(1, len(sequences), channels)
    return (y if bias is None else y + bias), sequences


def causal_conv_ref(conv: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    sequence = torch.cat([conv, x], 1)
    y = F.conv1d(sequence.transpose(1, 2), weight.permute(2, 1, 0), bias, groups=weight.shape[2])
    return y.transpose(1, 2), sequence


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a step of the recurrence (arXiv:2405.21060, section 3): S' = exp(dt A) S + dt x B^T, y = S' C + D x.

    x (1, 1, H P), dt (1, 1, H) after softplus, a and d (H,), b and c (1, 1, g N), ssm (1, H, P, N).
    Returns y (1, 1, H P) and the new ssm.
    """
    _, heads, size, states = ssm.shape
    xh = x.reshape(1, heads, size, 1)
    decay = torch.exp(dt * a).reshape(1, heads, 1, 1)
    new = ssm * decay + (xh * dt.reshape(1, heads, 1, 1)) * _to_heads(b, heads, states)  # (1, H, P, N)
    y = (new * _to_heads(c, heads, states)).sum(-1)  # (1, H, P): a product and a sum leave the state where it is
    y = y + x.reshape(1, heads, size) * d.reshape(1, heads, 1)
    return y.reshape(1, 1, heads * size), new


def ssd_step_by_lane(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Compute `ssd_step` of a token of each of B lanes.

    x (1, B, H P), dt (1, B, H), b and c (1, B, g N); ssm (1, H, P, N) each. Operations that read no state are done for
    all lanes at once.
    """
    _, heads, size, states = ssm[0].shape
    lanes = x.shape[1]
    decay = torch.exp(dt * a).reshape(lanes, heads, 1, 1)
    added = x.reshape(lanes, heads, size, 1) * dt.reshape(lanes, heads, 1, 1)  # (B, H, P, 1)
    bs, cs = (_lanes_to_heads(t, lanes, heads, states) for t in (b, c))  # (B, 1 or H, 1, N)
    ys, made = [], []
    for i in range(lanes):
        row = slice(i, i + 1)
        new = ssm[i] * decay[row] + added[row] * bs[row]  # (1, H, P, N)
        ys.append((new * cs[row]).sum(-1))  # (1, H, P)
        made.append(new)
    y = torch.cat(ys, 0) + x.reshape(lanes, heads, size) * d.reshape(1, heads, 1)  # (B, H, P)
    return y.reshape(1, lanes, heads * size), made


def _lanes_to_heads(x: Tensor, lanes: int, heads: int, states: int) -> Tensor:
    """Reshape (1, B, g N) -> (B, 1, 1, N) for one group, else (B, H, 1, N), as `_to_heads`."""
    groups = x.shape[-1] // states
    if groups == 1:
        return x.reshape(lanes, 1, 1, states)
    spread = x.reshape(lanes * groups, 1, states) * torch.ones(1, heads // groups, 1)  # (B g, H/g, N)
    return spread.reshape(lanes, heads, 1, states)


def _to_heads(x: Tensor, heads: int, states: int) -> Tensor:
    """Reshape (1, 1, g N) -> (1, 1, 1, N) for one group, else (1, H, 1, N): a group's vector for each of its heads."""
    groups = x.shape[-1] // states
    if groups == 1:
        return x.reshape(1, 1, 1, states)
    spread = x.reshape(groups, 1, states) * torch.ones(1, heads // groups, 1)  # (g, H/g, N)
    return spread.reshape(1, heads, 1, states)


def chunk_length(length: int, most: int = CHUNK) -> int:
    """Return Q for a call of T tokens. Raises ValueError if T does not divide into chunks."""
    chunk = min(most, length)
    if length % chunk:
        raise ValueError(f"a bucket of {length} tokens is above {most} and no multiple of it")
    return chunk


def ssd_chunked(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute T steps at once by blocks of Q tokens (arXiv:2405.21060, section 6 and listing 1).

    x (1, T, H P), dt (1, T, H) after softplus and 0 on pads, a and d (H,).
    b and c (1, T, g N), ssm (1, H, P, N).
    Returns y (1, T, H P) and the new ssm. A token with dt = 0 changes no state.
    """
    _, heads, size, states = ssm.shape
    length = x.shape[1]
    chunk = chunk_length(length)
    chunks, groups = length // chunk, b.shape[-1] // states
    each = heads // groups  # heads of a group; group and chunk form one batch axis below: M = chunks g
    lower = torch.tril(torch.ones(chunk, chunk))

    def by_group(t: Tensor, width: int) -> Tensor:
        """Reshape (1, T, g width) -> (M, Q, width)."""
        return t.reshape(chunks, chunk, groups, width).permute(0, 2, 1, 3).reshape(chunks * groups, chunk, width)

    logs = by_group(dt * a, each).permute(0, 2, 1)  # (M, H/g, Q)
    sums = torch.matmul(logs, lower.T)  # (M, H/g, Q): log of the decay since the chunk's start
    decays = torch.exp(torch.clamp(sums.unsqueeze(-1) - sums.unsqueeze(-2), max=0.0)) * lower  # (M, H/g, Q, Q)
    last = sums[..., -1:]  # (M, H/g, 1)

    bg, cg = by_group(b, states), by_group(c, states)  # (M, Q, N)
    scores = torch.matmul(cg, bg.transpose(1, 2)).unsqueeze(1)  # (M, 1, Q, Q)
    xd = x.reshape(length, heads, size) * dt.reshape(length, heads, 1)
    xd = by_group(xd.reshape(1, length, heads * size), each * size)  # (M, Q, H/g P)
    xd = xd.reshape(chunks * groups, chunk, each, size).permute(0, 2, 1, 3)  # (M, H/g, Q, P)
    within = torch.matmul(scores * decays, xd)  # (M, H/g, Q, P)

    kept = (xd * torch.exp(last - sums).unsqueeze(-1)).permute(0, 1, 3, 2)  # (M, H/g, P, Q)
    added = torch.matmul(kept.reshape(chunks * groups, each * size, chunk), bg)  # (M, H/g P, N)
    added = added.reshape(chunks, heads, size, states)
    decay = torch.exp(last).reshape(chunks, heads, 1, 1)
    starts = []
    for i in range(chunks):
        starts.append(ssm)
        ssm = ssm * decay[i : i + 1] + added[i : i + 1]  # (1, H, P, N)
    start = torch.cat(starts, 0) if chunks > 1 else starts[0]  # (chunks, H, P, N)
    start = start.reshape(chunks * groups, each * size, states)
    before = torch.matmul(start, cg.transpose(1, 2)).reshape(chunks * groups, each, size, chunk)
    before = before.permute(0, 1, 3, 2) * torch.exp(sums).unsqueeze(-1)  # (M, H/g, Q, P)

    y = (within + before).reshape(chunks, heads, chunk, size).permute(0, 2, 1, 3)  # (chunks, Q, H, P)
    y = y.reshape(length, heads, size) + x.reshape(length, heads, size) * d.reshape(1, heads, 1)
    return y.reshape(1, length, heads * size), ssm


def ssd_naive(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute T steps as `ssd_chunked`, in the form of listing 1 of arXiv:2405.21060.

    XAMBA (arXiv:2502.06924) starts from this form. It has the listing's three cumulative sums, that of `_segment_sum`
    over Q x Q as in the published code, and its contractions as products and sums. Only B and C are not repeated for
    each head of a group.
    """
    _, heads, size, states = ssm.shape
    length = x.shape[1]
    chunk = chunk_length(length, NAIVE_CHUNK)
    chunks, groups = length // chunk, b.shape[-1] // states
    each = heads // groups  # J: heads of a group

    logs = (dt * a).reshape(chunks, chunk, groups, each).permute(0, 2, 3, 1)  # (Z, g, J, Q), Z chunks
    bg, cg = (t.reshape(chunks, chunk, groups, states).permute(0, 2, 1, 3) for t in (b, c))  # (Z, g, Q, N)
    xd = x.reshape(length, heads, size) * dt.reshape(length, heads, 1)
    xd = xd.reshape(chunks, chunk, groups, each, size).permute(0, 2, 3, 4, 1)  # (Z, g, J, P, Q)
    sums = torch.cumsum(logs, -1)  # (Z, g, J, Q)

    # 1. within a chunk
    scores = (cg.unsqueeze(3) * bg.unsqueeze(2)).sum(-1)  # (Z, g, Q, Q)
    weights = scores.unsqueeze(2) * _segment_sum(logs)  # (Z, g, J, Q, Q)
    within = (weights.unsqueeze(4) * xd.unsqueeze(3)).sum(-1)  # (Z, g, J, Q, P)
    # 2. what each chunk adds to the state
    kept = xd * torch.exp(sums[..., -1:] - sums).unsqueeze(3)  # (Z, g, J, P, Q)
    added = (kept.permute(0, 1, 2, 4, 3).unsqueeze(-1) * bg[:, :, None, :, None]).sum(3)  # (Z, g, J, P, N)
    # 3. the states between chunks
    starts = torch.cat([ssm.reshape(1, groups, each, size, states), added], 0)  # (Z+1, g, J, P, N)
    last = sums[..., -1].permute(1, 2, 0)  # (g, J, Z)
    last = torch.cat([torch.zeros(groups, each, 1), last], -1)  # (g, J, Z+1)
    decays = _segment_sum(last).permute(3, 2, 0, 1).unsqueeze(-1).unsqueeze(-1)  # (from Z+1, to Z+1, g, J, 1, 1)
    starts = (decays * starts.unsqueeze(1)).sum(0)  # (Z+1, g, J, P, N)
    # 4. what the states give
    before = (cg[:, :, None, :, None] * starts[:-1].unsqueeze(3)).sum(-1)  # (Z, g, J, Q, P)
    before = before * torch.exp(sums).unsqueeze(-1)

    y = (within + before).permute(0, 3, 1, 2, 4).reshape(length, heads, size)  # (T, H, P)
    y = y + x.reshape(length, heads, size) * d.reshape(1, heads, 1)
    return y.reshape(1, length, heads * size), starts[-1].reshape(1, heads, size, states)


def _segment_sum(logs: Tensor) -> Tensor:
    """Return (..., Q, Q) of (..., Q): the decay from each step (column) to each later one (row), 0 to earlier ones."""
    n = logs.shape[-1]
    below = torch.tril(torch.ones(n, n), diagonal=-1)
    return torch.exp(torch.cumsum(logs.unsqueeze(-1) * below, -2)) * torch.tril(torch.ones(n, n))


def ssd_ref(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token. Shapes are as in `ssd_chunked`."""
    _, heads, size, states = ssm.shape
    groups = b.shape[-1] // states
    state, ys = ssm[0], []
    for t in range(x.shape[1]):
        xt, dtt = x[0, t].reshape(heads, size), dt[0, t]
        bt, ct = (v[0, t].reshape(groups, states).repeat_interleave(heads // groups, 0) for v in (b, c))
        state = torch.einsum("h,hpn->hpn", torch.exp(dtt * a), state) + torch.einsum("h,hp,hn->hpn", dtt, xt, bt)
        ys.append(torch.einsum("hpn,hn->hp", state, ct) + d[:, None] * xt)
    return torch.stack(ys).reshape(1, -1, heads * size), state.unsqueeze(0)


def valid_rows(n_valid: Tensor, length: int) -> Tensor:
    """Return (1, T, 1): 1 for tokens, 0 for pads."""
    return (torch.arange(length, dtype=torch.int32) < n_valid).to(torch.float32).reshape(1, length, 1)


def tail_rows(n_valid: Tensor, length: int, width: int) -> Tensor:
    """Return (1, K-1, K-1+T), which selects the last K-1 rows of conv state and new rows that are not pads."""
    wanted = (n_valid + torch.arange(width - 1, dtype=torch.int32)).reshape(width - 1, 1)
    rows = torch.arange(width - 1 + length, dtype=torch.int32).reshape(1, -1)
    return (rows == wanted).to(torch.float32).unsqueeze(0)


def last_row(n_valid: Tensor, length: int) -> Tensor:
    """Return (1, 1, T), which selects the last token that is not a pad."""
    rows = torch.arange(length, dtype=torch.int32)
    return (rows == n_valid - 1).to(torch.float32).reshape(1, 1, length)
