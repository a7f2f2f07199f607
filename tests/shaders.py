"""Shaders of the wgpu runtime, dispatched once by tests: their arrays, the words of a call, and numpy beside them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ssmd_wgpu.device import Gpu, adapters, choose_adapter, shader
from ssmd_wgpu.pack import VALUES, Format, blocks, decoded, encode
from ssmd_wgpu.products import Slices, slices_of
from ssmd_wgpu.recorder import Region, dispatch
from ssmd_wgpu.resident import DeviceMatrix
from ssmd_wgpu.slots import CONTROL

Array = NDArray[Any]
TOLERANCE = 1e-5  # of the largest value
FORMATS: tuple[Format, ...] = ("f32", "f16", "int8", "int4")
EPS = "f32(1e-5)"
TABLES = CONTROL + 64  # where the pages begin in these tests' words
PAGE, PAGES = 64, 5  # rows of a page, pages of a slot
PAGED = {"page": PAGE, "tables": TABLES, "most_pages": PAGES}


_rng = np.random.default_rng(0)


def reseed(test: str) -> None:
    """Give each test its own numbers, whatever ran before it: a sum whose terms cancel is not a matter of chance."""
    global _rng
    _rng = np.random.default_rng(zlib.crc32(test.encode()))


def opened(name: str) -> Gpu:
    if name not in {found.name for found in adapters() if not found.why_not}:
        pytest.skip(f"no adapter {name} here: apt install mesa-vulkan-drivers libvulkan1 libgl1-mesa-dri")
    return Gpu(choose_adapter(name))


def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (_rng.standard_normal(shape) * scale).astype(np.float32)


def run(gpu: Gpu, text: str, arrays: Mapping[str, Array], grid: tuple[int, ...], *wanted: str) -> list[Array]:
    """Dispatch once; what the wanted arrays hold then, in their shapes."""
    kernel = gpu.kernel(text)
    regions: dict[str, Region] = {}
    groups: list[Any] = [None, None]
    for i, names in enumerate(kernel.bindings):
        regions |= {name: gpu.uploaded(np.ascontiguousarray(arrays[name])) for name in names}
        groups[i] = gpu.bound(kernel, i, regions)
    x, y = (*grid, 1)[:2]
    found = gpu.recorder.read(
        [dispatch(kernel.pipeline, groups[0], groups[1], x, y)],
        [Region(regions[n].buffer, 0, -(-arrays[n].nbytes // 4) * 4) for n in wanted],
    )
    return [
        f[: arrays[n].nbytes].view(arrays[n].dtype).reshape(arrays[n].shape) for n, f in zip(wanted, found, strict=True)
    ]


def control(
    position: int, count: int, tokens: Array | None = None, slot: int = 0, tables: Array | None = None
) -> NDArray[np.uint32]:
    """The words of a prefill of `count` tokens."""
    words = stepped([position], [slot], tables)
    words[1] = count
    if tokens is not None:
        words[CONTROL : CONTROL + count] = tokens
    return words


def stepped(positions: Sequence[int], slots: Sequence[int], tables: Array | None = None) -> NDArray[np.uint32]:
    """The words of a decode step. `tables` (slots, PAGES): the pages of every slot."""
    words = np.zeros(TABLES, np.uint32)
    for i, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        words[4 * i : 4 * i + 3] = position, len(positions), slot
    return np.concatenate([words, np.zeros(0, np.uint32) if tables is None else tables.reshape(-1).astype(np.uint32)])


def scattered(slots: int) -> NDArray[np.uint32]:
    """Pages (slots, PAGES) in no order: caches of (slots * PAGES * PAGE) rows."""
    return _rng.permutation(slots * PAGES).reshape(slots, PAGES).astype(np.uint32)


def rows_of(cache: Array, pages: Array) -> Array:
    """The rows of a slot's cache in order."""
    return np.asarray(cache.reshape(-1, PAGE, *cache.shape[1:])[pages].reshape(-1, *cache.shape[1:]))


def close(found: Array, expected: Array, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= tolerance * max(float(np.abs(expected).max()), 1e-30)


def packed(**vectors: Array | None) -> tuple[NDArray[np.float32], dict[str, int | None]]:
    """Vectors one after another, as the model packs them, and where each stands."""
    at, places, parts = 0, dict[str, int | None](), []
    for name, vector in vectors.items():
        places[name] = None if vector is None else at
        if vector is not None:
            size = -(-vector.size // 4) * 4
            parts.append(np.pad(vector.reshape(-1), (0, size - vector.size)))
            at += size
    return (np.concatenate(parts) if parts else np.zeros(4, np.float32)).astype(np.float32), places


def matrix(rows: int, columns: int, fmt: Format) -> tuple[dict[str, Array], NDArray[np.float64], dict[str, Any]]:
    """Bindings, the weights in float64, and what a shader is told of them."""
    values, *scales = encode(normal(rows, columns, scale=columns**-0.5), fmt)
    sizes = {"format": fmt, "blocks": blocks(columns, fmt), "values": VALUES[fmt], "columns": columns, "rows": rows}
    return (
        {"W": values, **({"S": scales[0]} if scales else {})},
        decoded(columns, fmt, values, *scales).astype(np.float64),
        sizes,
    )


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x.astype(np.float64))))


def softplus(x: Array) -> Array:
    return np.logaddexp(x.astype(np.float64), 0.0)


def normed(x: Array, gain: Array | None) -> Array:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * (1 if gain is None else gain))


def matvec(sizes: dict[str, Any], **more: Any) -> str:
    """The text of a plain product, where `more` says nothing else."""
    plain = {
        "gain": None,
        "bias": None,
        "eps": EPS,
        "end": "store",
        "first": 0,
        "last_row": False,
        "streams": 1,
        "unit": 1,
        "threads": 64,
        "ahead": 1,
    }
    plain["stride"] = sizes["rows"] // 2 if more.get("end") == "swiglu" else sizes["rows"]
    tiling = {"threads_per_row": 16, "rows_per_thread": 4, "subgroups": False}
    return shader("matvec", **plain | tiling | sizes | more)


def going_on(v: dict[str, Any], cut: Slices, eps: bool = False, **tiling: Any) -> dict[str, Any]:
    """Return a kernel's parameters for the product that it goes on with."""
    lanes = {"threads_per_row": 16, "subgroups": False, **tiling}
    sizes = {"v_unit": cut.unit, "v_slices": cut.count, "v_bias": None, "v_eps": EPS if eps else None}
    return {**sizes, **lanes, "v": {**v, **lanes}}


def sums_of(v: dict[str, Any], cut: Slices) -> dict[str, Array]:
    """Where workgroups leave their sums, with what others left there, and the count of arrivals."""
    return {"SUMS": normal(4 * cut.count * (-(-v["rows"] // 4) + 1)), "COUNT": np.zeros(64, np.uint32)}


def cut_of(v: dict[str, Any], width: int = 0) -> Slices:
    cut = slices_of(DeviceMatrix(v["rows"], v["columns"], v["format"], ()), width)
    assert cut is not None
    return cut


def attended(q: Array, key: Array, value: Array) -> Array:
    """q (H, D) over the rows of key and value (n, G, D)."""
    k, v = (np.repeat(c.astype(np.float64), q.shape[0] // c.shape[1], 1) for c in (key, value))
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), v))


def gated(y: Array, qkv: Array, gate: bool) -> Array:
    """y (..., H, D) by the sigmoid of the gate, which is the last H heads of qkv, where there is one."""
    return np.asarray(y / (1 + np.exp(-qkv[..., -y.shape[-2] :, :].astype(np.float64)))) if gate else y


def caches(half: bool, kv: int, dim: int, slots: int) -> tuple[Array, Array, Array]:
    """Keys, values, and in which pages each slot has them."""
    key, value = (normal(slots * PAGES * PAGE, kv, dim).astype(np.float16 if half else np.float32) for _ in range(2))
    return key, value, scattered(slots)


def stepping(
    half: bool, heads: int, kv: int, dim: int, qk_norm: bool, rotated: int, gate: bool = False
) -> tuple[Any, dict[str, Array]]:
    """Return the parameters of a step's attention, and its tables and vectors."""
    angles = normal(PAGES * PAGE, rotated // 2)
    gains = (1 + normal(dim, scale=0.1), 1 + normal(dim, scale=0.1)) if qk_norm else (None, None)
    p, at = packed(q_norm=gains[0], k_norm=gains[1])
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv, "head_dim": dim, "half": half, "rotated": rotated}
    sizes |= {**PAGED, **at, "qk_eps": EPS if qk_norm else None, "per_thread": -(-dim // 64), "gate": gate}
    return sizes, {"P": p, "COS": np.cos(angles), "SIN": np.sin(angles)}
