"""The recurrence of gated DeltaNet's layers as shaders: of a token of each stream, or of T tokens of one.

T tokens go one by one, with rows of the state in registers, so that keys that repeat lose nothing: a chunk's inverse is
never made. The products around them take ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ssmd.model.plan import GatedDeltaNet
from ssmd_wgpu.device import shader
from ssmd_wgpu.op import f32

LANES = 8  # threads of a row of the state, over T tokens
_HELD = 32  # values of the state in a thread of a step
Step = tuple[str, tuple[int, int], int]  # a shader's text, its workgroups, and the tokens that one's y takes, if any


def step(m: GatedDeltaNet, at: Mapping[str, int], v: Mapping[str, Any] | None) -> str:
    """Make the shader of a token of each stream. at: places in small vectors. v: a product that follows, if any."""
    sizes = _sizes(m, at)
    per_thread = -(-sizes["units"] // 16)
    each = max(1, min(_HELD // (per_thread * (4 if sizes["quads"] else 1)), -(-m.value_dim // 16)))
    more = {"gated_norm": at["gated_norm"], "eps": f32(m.eps), "per_thread": per_thread, "each": min(each, 4)}
    return shader("delta_step", **sizes, **more, **({"v": None} if v is None else v))


def recurrence(m: GatedDeltaNet, at: Mapping[str, int]) -> Iterator[Step]:
    """Make the shaders of T tokens of a stream."""
    sizes, across = _sizes(m, at), -(-m.value_dim // (64 // LANES))
    yield shader("delta_keys", **sizes), (m.key_heads, 1), 1
    more = {"lanes": LANES, "across": across, "per_thread": -(-sizes["units"] // LANES)}
    yield shader("delta_scan", **sizes, **more), (m.heads * across, 1), 0


def _sizes(m: GatedDeltaNet, at: Mapping[str, int]) -> dict[str, Any]:
    quads = m.key_dim % 4 == 0 and m.value_dim % 4 == 0
    return {
        **{name: getattr(m, name) for name in ("heads", "key_heads", "key_dim", "value_dim")},
        "quads": quads,
        "unit": "vec4<f32>" if quads else "f32",
        "units": m.key_dim // 4 if quads else m.key_dim,
        "query_scale": f32(m.key_dim**-0.5),
        "u_stride": m.channels,
        "z_stride": m.rows,
        "a": at["A"],
        "dt_bias": at["dt_bias"],
    }
