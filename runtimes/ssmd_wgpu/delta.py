"""The recurrence of gated DeltaNet's layers as shaders: of a token of each stream, or of T tokens of one.

T tokens go one by one, with rows of the state in registers: keys that repeat lose nothing, as no triangle of a chunk is
inverted, and every cut of a prompt gives the same bits. The products of such a layer multiply 25 times as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ssmd.model.plan import GatedDeltaNet
from ssmd_wgpu.device import shader
from ssmd_wgpu.op import f32

LANES = 8  # threads of a row of the state, or of a key: 128 bytes of it at once
_HELD = 32, 64  # values of the state in a thread of a step, and of T tokens
Step = tuple[str, tuple[int, int], int]  # a shader's text, its workgroups, and the tokens that one's y takes, if any


def step(m: GatedDeltaNet, at: Mapping[str, int], v: Mapping[str, Any] | None) -> str:
    """Make the shader of a token of each stream. at: places in small vectors. v: a product that follows, if any."""
    sizes = _sizes(m, at)
    more = {"gated_norm": at["gated_norm"], "eps": f32(m.eps), "each": _rows(m, sizes, 256, _HELD[0])}
    return shader("delta_step", **sizes, **more, **({"v": None} if v is None else v))


def recurrence(m: GatedDeltaNet, at: Mapping[str, int]) -> Iterator[Step]:
    """Make the shaders of T tokens of a stream."""
    sizes = _sizes(m, at)
    each = _rows(m, sizes, 64, _HELD[1])
    across = -(-m.value_dim // (64 // LANES * each))
    yield shader("delta_keys", **sizes), (-(-m.key_heads * LANES // 64), 1), 1
    yield shader("delta_scan", **sizes, across=across, each=each), (m.heads * across, 1), 0


def _rows(m: GatedDeltaNet, sizes: Mapping[str, Any], threads: int, held: int) -> int:
    """Return the rows of the state that a thread has at once: each key that it reads is of use to all of them."""
    fitting: int = held // (sizes["per_thread"] * (4 if sizes["quads"] else 1))
    return max(1, min(4, fitting, -(-m.value_dim * LANES // threads)))


def _sizes(m: GatedDeltaNet, at: Mapping[str, int]) -> dict[str, Any]:
    quads = m.key_dim % 4 == 0 and m.value_dim % 4 == 0
    units = m.key_dim // 4 if quads else m.key_dim
    return {
        **{name: getattr(m, name) for name in ("heads", "key_heads", "key_dim", "value_dim")},
        "quads": quads,
        "unit": "vec4<f32>" if quads else "f32",
        "units": units,
        "lanes": LANES,
        "per_thread": -(-units // LANES),
        "query_scale": f32(m.key_dim**-0.5),
        "u_stride": m.channels,
        "z_stride": m.rows,
        "a": at["A"],
        "dt_bias": at["dt_bias"],
    }
