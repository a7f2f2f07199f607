"""The recurrence of Mamba-2's layers as shaders: one that goes token by token, or four that go by chunks.

Those (arXiv:2405.21060, section 6) multiply as much and wait for one another less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ssmd_wgpu.device import shader

CHUNK = 32  # tokens
MOST_GROUPS = 65535  # of a dimension of a dispatch
Step = tuple[str, tuple[int, int], int]  # a shader's text, its workgroups, and the tokens that one's y takes, if any


def recurrence(sizes: Mapping[str, Any], *, chunked: bool) -> Iterator[Step]:
    """Make the shaders of a Mamba-2 recurrence.

    sizes: heads, head_dim, states, groups; places in small vectors a, dt_bias, d; u_stride, z_stride, dt_offset,
    dt_low, dt_high; and a flag if there is a gate.
    """
    heads, head_dim, states = (sizes[name] for name in ("heads", "head_dim", "states"))
    inner = heads * head_dim
    if not chunked:
        more = {"channels": inner, "rank": 0, "z_offset": 0, "source": "U", "per_thread": -(-states // 16)}
        yield shader("scan", **sizes, **more), (-(-inner // 4), 1), 0
        return
    deep, wide = -(-states // 32), -(-head_dim // 32)
    cut = {**sizes, "chunk": CHUNK, "deep": deep, "wide": wide, "across": deep * wide}
    yield shader("ssd_logs", **cut), (-(-heads // 64), 1), CHUNK
    yield shader("ssd_states", **cut), (heads * wide * deep, 1), CHUNK
    yield shader("ssd_carry", **cut), spread(-(-inner * states // 64)), 0
    yield shader("ssd_output", **cut), (heads * wide, 1), CHUNK


def spread(groups: int) -> tuple[int, int]:
    """Spread `groups` workgroups over two dimensions."""
    high = -(-groups // MOST_GROUPS)
    return -(-groups // high), high
