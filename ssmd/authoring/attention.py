"""Attention over a cache and new rows, RoPE and masks, in forms that every converter keeps fast.

The rules, the glossary and the plain `_ref` forms are as in ssmd/authoring/ops.py. W: rows of a window's state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

QUERY_BLOCK = 64  # tokens whose attention scores are computed together
MASKED = -6e4  # added to a score: its softmax is exactly 0; float16 has such a number, which not all have


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the first values of each head (arXiv:2104.09864), all of them or `2 * cos.shape[-1]`.

    x (T, heads, D), cos and sin (T, 1, R/2).
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, rest] if rest.shape[-1] else turned, -1)


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def slot_mask(pos: Tensor, context: int) -> Tensor:
    """Return (1, 1, S): MASKED for cache slots at or after `pos`, whose contents therefore have no effect."""
    return (torch.arange(context, dtype=torch.int32) >= pos).to(torch.float32).reshape(1, 1, context) * MASKED


def causal_mask(length: int, each: int) -> Tensor:
    """Return (1, T R, T): MASKED where the key (columns) comes after the query (rows, R heads for each token)."""
    mask = torch.triu(torch.ones(length, length), diagonal=1) * MASKED
    return mask.repeat_interleave(each, 0).unsqueeze(0)


def attention(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, slots: Tensor, causal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute grouped-query attention over a cache and T new rows.

    q (T, G, R, D) scaled, k and v (T, G, D); key (G, S, D), value (G, D, S); slots (1, 1, S), causal (1, T R, T).
    Returns (1, T, G R D) and the new rows: key (G, T, D), value (G, D, T).

    Both caches are laid out so that a product runs along their last axis. As they have rank 3, their transposes below
    become a flag of the product, never an operation. The queries are taken in blocks of QUERY_BLOCK tokens, so that
    scores stay small: for 256 tokens at once they take 21 MB a layer. A block sees no new rows after its own.
    """
    length, groups, each, size = q.shape
    rows = q.permute(1, 0, 2, 3).reshape(groups, -1, size)  # (G, T R, D)
    new_key, new_value = k.permute(1, 0, 2), v.permute(1, 2, 0)  # (G, T, D), (G, D, T)
    if causal is None or length <= QUERY_BLOCK:
        out = attend(rows, new_key, new_value, key, value, slots, None if length == 1 else causal)
    else:
        blocks = []
        for start in range(0, length, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, length)
            block, mask = rows[:, start * each : stop * each], causal[:, start * each : stop * each, :stop]
            blocks.append(attend(block, new_key[:, :stop], new_value[..., :stop], key, value, slots, mask))
        out = torch.cat(blocks, 1)  # (G, T R, D)
    out = out.reshape(groups, -1, each, size).permute(1, 0, 2, 3)  # (T, G, R, D)
    return out.reshape(1, -1, groups * each * size), new_key, new_value


def attention_by_lane(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    slots: Sequence[Tensor],
    causal: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention` of one token for each of B lanes, each over its own caches, of its own S.

    q (B, G, R, D) scaled, k and v (B, G, D). Returns (1, B, G R D) and the new rows of all: key (B G, 1, D), value
    (B G, D, 1). Operations that do not read a cache are done for all lanes at once, as in `attend`.
    """
    lanes, groups, each, size = q.shape
    rows, new_key, new_value = q.reshape(-1, each, size), k.reshape(-1, 1, size), v.reshape(-1, 1, size)
    new = (rows * new_key).sum(-1, keepdim=True)  # (B G, R, 1)
    outs = []
    for b in range(lanes):
        own, context = slice(b * groups, (b + 1) * groups), slots[b].shape[-1]
        old = torch.matmul(rows[own], key[b].transpose(1, 2)) + slots[b]  # (G, R, S)
        weights = torch.softmax(torch.cat([old, new[own]], -1), -1)  # (G, R, S + 1)
        seen = torch.matmul(weights[..., :context], value[b].transpose(1, 2))
        # Added here, as LiteRT's converter merges concatenated products into one product of concatenated caches.
        outs.append(seen + weights[..., context:] * new_value[own])  # (G, R, D)
    out = torch.cat(outs, 0).reshape(1, lanes, groups * each * size)
    return out, new_key, v.reshape(-1, size, 1)


def attend(
    rows: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, slots: Tensor, causal: Tensor | None
) -> Tensor:
    """Attend with queries (G, B R, D) of B tokens to the cache and n new rows, (G, n, D) and (G, D, n) -> (G, B R, D).

    Without `causal` (1, B R, n) there is one token. Its own row is then multiplied element by element: the compiler of
    Intel's NPU takes a matrix product for another attention and fails.
    """
    context = slots.shape[-1]
    old = torch.matmul(rows, key.transpose(1, 2)) + slots  # (G, B R, S)
    if causal is None:
        new = (rows * new_key).sum(-1, keepdim=True)  # (G, R, 1)
    else:
        new = torch.matmul(rows, new_key.transpose(1, 2)) + causal  # (G, B R, n)
    weights = torch.softmax(torch.cat([old, new], -1), -1)  # (G, B R, S + n)
    seen = torch.matmul(weights[..., :context], value.transpose(1, 2))
    if causal is None:
        return seen + weights[..., context:] * new_value.transpose(1, 2)
    return seen + torch.matmul(weights[..., context:], new_value.transpose(1, 2))


def window_slots(pos: Tensor, rows: int, length: int) -> Tensor:
    """Return (1, 1, W + T): MASKED for rows of a window before position 0. rows: W. The T new rows are never masked."""
    early = torch.arange(rows + length, dtype=torch.int32) < rows - pos
    return early.to(torch.float32).reshape(1, 1, -1) * MASKED


def window_masks(pos: Tensor, rows: int, length: int, each: int) -> list[Tensor]:
    """Return (1, B R, W + B) for each block of B = QUERY_BLOCK tokens, the last of which may be shorter.

    Token i of a block sees columns i to i + W of the rows from the block's first token on, less those before position
    0. rows: W. each: R.
    """
    slots = window_slots(pos, rows, length)
    if length <= QUERY_BLOCK:
        return [_band(length, rows, each) + slots]
    masks, band = [], _band(QUERY_BLOCK, rows, each)
    for start in range(0, length, QUERY_BLOCK):
        size = min(QUERY_BLOCK, length - start)
        masks.append(band[:, : size * each, : rows + size] + slots[..., start : start + rows + size])
    return masks


def _band(length: int, rows: int, each: int) -> Tensor:
    """Return (1, T R, W + T): MASKED outside columns i to i + W of token i."""
    ones = torch.ones(length, rows + length)
    band = (torch.triu(ones, diagonal=rows + 1) + torch.tril(ones, diagonal=-1)) * MASKED
    return band.repeat_interleave(each, 0).unsqueeze(0)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute grouped-query attention over a window, the W rows before this call, and T new rows.

    q (T, G, R, D) scaled, k and v (T, G, D); key (G, W, D), value (G, D, W), oldest first; masks from `window_masks`.
    Returns (1, T, G R D) and old and new rows together: key (G, W + T, D), value (G, D, W + T).

    A block of queries meets only the rows that one of them sees: B + W, however many tokens there are.
    """
    _, groups, each, size = q.shape
    rows = q.permute(1, 0, 2, 3).reshape(groups, -1, size)  # (G, T R, D)
    keys = torch.cat([key, k.permute(1, 0, 2)], 1)  # (G, W + T, D)
    values = torch.cat([value, v.permute(1, 2, 0)], 2)  # (G, D, W + T)
    blocks = []
    for i, mask in enumerate(masks):
        block, seen_keys, seen_values = rows, keys, values
        if len(masks) > 1:
            start, seen = i * QUERY_BLOCK, mask.shape[-1]
            block = rows[:, start * each : start * each + mask.shape[1]]  # (G, B R, D)
            seen_keys, seen_values = keys[:, start : start + seen], values[..., start : start + seen]
        scores = torch.matmul(block, seen_keys.transpose(1, 2)) + mask  # (G, B R, W + B)
        blocks.append(torch.matmul(torch.softmax(scores, -1), seen_values.transpose(1, 2)))  # (G, B R, D)
    out = torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]  # (G, T R, D)
    out = out.reshape(groups, -1, each, size).permute(1, 0, 2, 3)  # (T, G, R, D)
    return out.reshape(1, -1, groups * each * size), keys, values


def window_attention_ref(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, position: int) -> Tensor:
    """Return the output of `window_attention`: each token by itself, over the last W + 1 rows up to its own."""
    length, _, each, _ = q.shape
    window, held = key.shape[1], min(position, key.shape[1])
    keys = torch.cat([key[:, window - held :], k.transpose(0, 1)], 1).repeat_interleave(each, 0)  # (G R, n, D)
    values = torch.cat([value[..., window - held :].transpose(1, 2), v.transpose(0, 1)], 1)
    values, outs = values.repeat_interleave(each, 0), []
    for t in range(length):
        seen = slice(max(0, held + t - window), held + t + 1)
        scores = torch.einsum("hd,hnd->hn", q[t].flatten(0, 1), keys[:, seen])
        outs.append(torch.einsum("hn,hnd->hd", torch.softmax(scores, -1), values[:, seen]))
    return torch.stack(outs).reshape(1, length, -1)


def attention_ref(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, position: int) -> Tensor:
    """Return the output of `attention`, by a softmax over the `position` cached rows and the new ones."""
    length, _, each, _ = q.shape
    keys = torch.cat([key[:, :position], k.transpose(0, 1)], 1).repeat_interleave(each, 0)  # (G R, n, D)
    values = torch.cat([value[..., :position].transpose(1, 2), v.transpose(0, 1)], 1).repeat_interleave(each, 0)
    scores = torch.einsum("thd,hnd->htn", q.flatten(1, 2), keys)
    later = torch.arange(position + length) > (position + torch.arange(length))[:, None]  # (T, n)
    weights = torch.softmax(scores.masked_fill(later, -math.inf), -1)
    return torch.einsum("htn,hnd->thd", weights, values).reshape(1, length, -1)
