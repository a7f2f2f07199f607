"""Every shader of the wgpu runtime against plain numpy in float64, at odd sizes, on every software adapter there is.

Quantized kernels are held against the weights that their bytes stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from shaders import (
    EPS,
    FORMATS,
    PAGE,
    PAGED,
    PAGES,
    TOLERANCE,
    Array,
    attended,
    caches,
    close,
    control,
    cut_of,
    gated,
    going_on,
    matrix,
    matvec,
    normal,
    normed,
    packed,
    rows_of,
    run,
    scattered,
    silu,
    softplus,
    stepped,
    stepping,
    sums_of,
)

from ssmd_wgpu.device import Gpu, shader
from ssmd_wgpu.pack import VALUES, Format
from ssmd_wgpu.products import slices_of
from ssmd_wgpu.recorder import Region, dispatch
from ssmd_wgpu.resident import DeviceMatrix
from ssmd_wgpu.slots import CONTROL
from ssmd_wgpu.ssd import CHUNK, recurrence, spread


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (7, 60), (530, 97), (640, 96), (70_003, 33)])
@pytest.mark.parametrize("dressed", [False, True])
def test_matvec(gpu: Gpu, fmt: Format, rows: int, columns: int, dressed: bool) -> None:
    """`dressed`: with a norm and a bias, added to what is there."""
    arrays, w, sizes = matrix(rows, columns, fmt)
    x, y = normal(columns), normal(rows)
    gain, bias = (normal(columns), normal(rows)) if dressed else (None, None)
    arrays["P"], at = packed(gain=gain, bias=bias)
    text = matvec(sizes, **at, end="add" if dressed else "store")
    [found] = run(gpu, text, {**arrays, "X": x, "Y": y}, spread(-(-rows // 16)), "Y")
    close(found, w @ x.astype(np.float64) if bias is None else w @ normed(x, gain) + bias + y)


def test_more_workgroups_than_a_dimension_holds(gpu: Gpu) -> None:
    arrays, w, sizes = matrix(140_003, 8, "int8")
    arrays["P"], _ = packed()
    x = normal(8)
    text = matvec(sizes, threads_per_row=64, rows_per_thread=2)
    grid = spread(70_002)
    assert grid == (35_001, 2)
    [found] = run(gpu, text, {**arrays, "X": x, "Y": np.zeros(140_003, np.float32)}, grid, "Y")
    close(found, w @ x.astype(np.float64))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("end", ["store", "swiglu"])
@pytest.mark.parametrize(("threads", "rows_each"), [(2, 2), (4, 4), (4, 2), (8, 8), (8, 2)])
def test_matvec_by_subgroups(gpu: Gpu, fmt: Format, end: str, threads: int, rows_each: int) -> None:
    if threads > gpu.subgroup:
        pytest.skip(f"subgroups of {gpu.found.name} may have {gpu.subgroup} threads")
    arrays, w, sizes = matrix(66, 97, fmt)
    x, gain, bias = normal(97), normal(97), normal(66)
    arrays["P"], at = packed(gain=gain, bias=bias)
    text = matvec(sizes, **at, threads_per_row=threads, rows_per_thread=rows_each, subgroups=True, end=end)
    y = np.zeros(33 if end == "swiglu" else 66, np.float32)
    [found] = run(gpu, text, {**arrays, "X": x, "Y": y}, (-(-66 // (64 // threads * rows_each)),), "Y")
    wanted = w @ normed(x, gain) + bias
    close(found, silu(wanted[:33]) * wanted[33:] if end == "swiglu" else wanted)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("end", "streams", "live"), [("store", 2, 2), ("add", 4, 3), ("swiglu", 8, 8), ("relu2", 8, 5)]
)
def test_matvec_of_streams(any_gpu: Gpu, fmt: Format, end: str, streams: int, live: int) -> None:
    """Bit for bit what each stream gives alone; of those that are not there, nothing is written."""
    rows, columns, stride = 66, 97 if end == "store" else 96, 80
    arrays, _, sizes = matrix(rows, columns, fmt)
    x, y, gain, bias = normal(streams, columns), normal(streams, stride), normal(columns), normal(rows)
    x[live:] = np.nan
    arrays["P"], at = packed(gain=gain, bias=bias)
    more = {**at, "end": end, "stride": stride}
    arrays["CTL"] = stepped([3] * live, range(live))
    text = matvec(sizes, **more, streams=streams, rows_per_thread=4)
    [found] = run(any_gpu, text, {**arrays, "X": x, "Y": y}, (5,), "Y")
    for i in range(live):
        [alone] = run(any_gpu, matvec(sizes, **more, rows_per_thread=8), {**arrays, "X": x[i], "Y": y[i]}, (3,), "Y")
        assert (found[i] == alone).all()
        assert not (alone[:33] == y[i, :33]).any()
    assert (found[live:] == y[live:]).all()


@pytest.mark.parametrize("fmt", ["f32", "f16", "int8"])
@pytest.mark.parametrize(("columns", "unit", "ahead"), [(813, 2, 2), (97, 1, 3)])
def test_matvec_that_reads_ahead(any_gpu: Gpu, fmt: Format, columns: int, unit: int, ahead: int) -> None:
    """Bit for bit what a matvec gives that does not, alone and of several streams."""
    arrays, w, sizes = matrix(66, columns, fmt)
    x, y, gain = normal(2, columns), normal(2, 66), normal(columns)
    arrays["P"], at = packed(gain=gain)
    arrays["CTL"] = stepped([3, 3], [0, 1])
    more = {**at, "bias": None, "end": "add", "unit": unit, "threads_per_row": 4}
    one = {**arrays, "X": x[0], "Y": y[0]}
    [plain] = run(any_gpu, matvec(sizes, **more), one, (2,), "Y")
    [found] = run(any_gpu, matvec(sizes, **more, ahead=ahead, rows_per_thread=2), one, (3,), "Y")
    text = matvec(sizes, **more, streams=2)
    [both] = run(any_gpu, text, {**arrays, "X": x, "Y": y}, (2,), "Y")
    assert found.tobytes() == plain.tobytes() == both[0].tobytes()
    close(found, w @ normed(x[0], gain) + y[0])


@pytest.mark.parametrize("columns", [64, 50])
def test_matvec_of_the_last_token(gpu: Gpu, columns: int) -> None:
    arrays, w, sizes = matrix(37, columns, "int8")
    arrays["P"], _ = packed()
    x = normal(5, columns)
    text = matvec(sizes, threads_per_row=8, rows_per_thread=2, first=3, last_row=True)
    arrays |= {"X": x, "Y": np.zeros(40, np.float32), "CTL": control(9, 4)}
    [found] = run(gpu, text, arrays, (3,), "Y")
    close(found[3:], w @ x[3].astype(np.float64))
    assert not found[:3].any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("inner", [1, 33, 96])
def test_matvec_of_swiglu(any_gpu: Gpu, fmt: Format, inner: int) -> None:
    arrays, w, sizes = matrix(2 * inner, 60, fmt)
    x, bias = normal(60), normal(2 * inner)
    arrays["P"], at = packed(bias=bias)
    text = matvec(sizes, **at, end="swiglu")
    [found] = run(any_gpu, text, {**arrays, "X": x, "Y": np.zeros(inner, np.float32)}, (-(-2 * inner // 16),), "Y")
    gate, up = np.split(w @ x.astype(np.float64) + bias, 2)
    close(found, silu(gate) * up)


@pytest.mark.parametrize("fmt", FORMATS)
def test_matvec_of_relu2(gpu: Gpu, fmt: Format) -> None:
    arrays, w, sizes = matrix(33, 60, fmt)
    x, bias = normal(60), normal(33)
    arrays["P"], at = packed(bias=bias)
    text = matvec(sizes, **at, end="relu2")
    [found] = run(gpu, text, {**arrays, "X": x, "Y": np.zeros(33, np.float32)}, (-(-33 // 16),), "Y")
    close(found, np.maximum(w @ x.astype(np.float64) + bias, 0) ** 2)


@pytest.mark.parametrize("end", ["mamba1", "mamba2"])
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matvec_into_a_convolution(gpu: Gpu, end: str, width: int, with_bias: bool) -> None:
    """Rows of mamba1: conv input, gate; of mamba2: gate, conv input, dt."""
    inner, channels = 21, 21 if end == "mamba1" else 33
    rows = 2 * inner if end == "mamba1" else inner + channels + 3
    arrays, w, sizes = matrix(rows, 64, "f32")
    x, conv, states = normal(64), normal(channels, width), normal(3, channels, width - 1)
    state = states[2]
    bias = normal(channels) if with_bias else None
    arrays["P"], at = packed(conv=conv, conv_bias=bias)
    text = matvec(sizes, **at, threads_per_row=8, end=end, channels=channels, inner=inner, width=width)
    arrays |= {"X": x, "Y": np.zeros(rows, np.float32), "U": np.zeros(channels, np.float32), "CONV": states}
    arrays["CTL"] = stepped([7], [2])
    y, u, new = run(gpu, text, arrays, (-(-rows // 32),), "Y", "U", "CONV")
    wanted = w @ x.astype(np.float64)
    close(y, wanted)
    first = 0 if end == "mamba1" else inner
    window = np.concatenate([state, wanted[first : first + channels, None]], 1)
    close(u, silu((window * conv).sum(1) + (0 if bias is None else bias)))
    close(new[2], window[:, 1:])
    assert (new[:2] == states[:2]).all()  # of other slots


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 4, 1), (70, 60, 45), (128, 64, 64)])
@pytest.mark.parametrize("end", ["store", "add", "swiglu", "relu2"])
def test_matmul(gpu: Gpu, fmt: Format, rows: int, columns: int, count: int, end: str) -> None:
    multiplied(gpu, fmt, rows, columns, count, end, tile=32, quads=1)


@pytest.mark.parametrize("fmt", ["f32", "int4"])
@pytest.mark.parametrize("end", ["store", "swiglu"])
@pytest.mark.parametrize(("tile", "quads"), [(64, 1), (64, 2), (128, 2)])
def test_matmul_in_other_tiles(gpu: Gpu, fmt: Format, end: str, tile: int, quads: int) -> None:
    multiplied(gpu, fmt, 140, 97, 133, end, tile=tile, quads=quads)


def multiplied(gpu: Gpu, fmt: Format, rows: int, columns: int, count: int, end: str, *, tile: int, quads: int) -> None:
    if end == "swiglu":
        rows *= 2
    arrays, w, sizes = matrix(rows, columns, fmt)
    stride, offset = columns + 5, 3
    x, gain, bias = normal(count + 2, stride), normal(columns), normal(rows)
    y = normal(count + 2, rows // 2 if end == "swiglu" else rows)
    part = x[:count, offset : offset + columns]
    arrays["P"], at = packed(gain=gain, bias=bias)
    scale = 1 / np.sqrt((part.astype(np.float64) ** 2).mean(-1) + 1e-5)
    text = shader("matmul", **sizes, **at, tile=tile, quads=quads, stride=stride, offset=offset, end=end)
    arrays |= {"X": x, "Y": y, "R": scale.astype(np.float32), "CTL": control(0, count)}
    [found] = run(gpu, text, arrays, (-(-rows // tile), -(-count // tile)), "Y")
    wanted = normed(part, gain) @ w.T + bias
    if end == "swiglu":
        gate, up = np.split(wanted, 2, -1)
        wanted = silu(gate) * up
    elif end == "relu2":
        wanted = np.maximum(wanted, 0) ** 2
    close(found[:count], wanted + y[:count] if end == "add" else wanted)
    assert (found[count:] == y[count:]).all()  # nothing is written beyond the tokens that there are


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("columns", [64, 50, 33])
def test_embed(any_gpu: Gpu, fmt: Format, columns: int) -> None:
    """A part of the embedding that begins at row 10: tokens outside it are left to others."""
    arrays, w, sizes = matrix(20, columns, fmt)
    tokens = np.array([10, 29, 9, 30, 13, 4_000_000_000])
    before = normal(7, columns)
    text = shader("embed", **sizes, control=CONTROL, first=10, scale="f32(12.0)")
    arrays |= {"X": before, "CTL": control(3, len(tokens), tokens)}
    [found] = run(any_gpu, text, arrays, (-(-sizes["blocks"] // 64), len(tokens)), "X")
    for t, token in enumerate(tokens):
        if 10 <= token < 30:
            close(found[t], w[token - 10] * 12)
        else:
            assert (found[t] == before[t]).all()
    assert (found[6] == before[6]).all()


@pytest.mark.parametrize("columns", [1, 64, 100, 1000])
def test_rms(gpu: Gpu, columns: int) -> None:
    x = normal(3, columns)
    [found] = run(gpu, shader("rms", columns=columns, eps=EPS), {"X": x, "R": np.zeros(3, np.float32)}, (1, 3), "R")
    close(found, 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1) + 1e-5))


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_group_norm(gpu: Gpu, groups: int, gated: bool, weighted: bool) -> None:
    size, stride, offset = 70, 70 * groups + 9, 4
    y, z = normal(3, stride), normal(3, size * groups + 2)
    gain = normal(size * groups)
    p, _ = packed(gain=gain)
    gate, where = (size * groups + 2 if gated else None), (0 if weighted else None)
    text = shader(
        "group_norm", columns=size, stride=stride, offset=offset, eps=EPS, gain=where, gate=gate, shared=False
    )
    [found] = run(gpu, text, {"Y": y, "P": p, "Z": z}, (groups, 3), "Y")
    part = y[:, offset : offset + size * groups].reshape(3, groups, size)
    wanted = normed(part, None).reshape(3, -1) * (gain if weighted else 1)
    wanted = wanted * silu(z[:, : size * groups]) if gated else wanted
    close(found[:, offset : offset + size * groups], wanted)
    assert (found[:, :offset] == y[:, :offset]).all()
    assert (found[:, offset + size * groups :] == y[:, offset + size * groups :]).all()


@pytest.mark.parametrize("width", [2, 3, 4, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("gated", [False, True])
def test_conv(gpu: Gpu, width: int, count: int, gated: bool) -> None:
    channels, offset = 45, 0 if gated else 7
    stride = 3 * channels if gated else channels + 11
    x, conv, bias = normal(count + 1, stride), normal(channels, width), normal(channels)
    states = normal(2, channels, width - 1)
    p, at = packed(conv=conv, conv_bias=bias)
    sizes = {"channels": channels, "width": width, "stride": stride, "offset": offset, "gated": gated, **at}
    arrays: dict[str, Array] = {"X": x, "P": p, "U": np.zeros((count + 1, channels), np.float32), "CONV": states}
    grid = (-(-channels // 32),)
    arrays["CTL"] = control(5, count, slot=1)
    u, new = run(gpu, shader("conv", one=False, **sizes), arrays, grid, "U", "CONV")
    fed = x[:count, offset : offset + channels].astype(np.float64)
    if gated:
        fed = fed * x[:count, 2 * channels :]
    sequence = np.concatenate([states[1].T, fed])
    y = sum(sequence[k : k + count] * conv[:, k] for k in range(width)) + bias
    close(u[:count], y * x[:count, channels : 2 * channels] if gated else silu(y))
    close(new[1], sequence[count:].T)
    assert (new[0] == states[0]).all()
    assert not u[count:].any()


@pytest.mark.parametrize("gated", [False, True])
def test_conv_of_streams(any_gpu: Gpu, gated: bool) -> None:
    """Each with the state in its slot, bit for bit what it is alone."""
    channels, width, slots = 45, 4, [3, 0, 2]
    x, conv, states = normal(3, 3 * channels), normal(channels, width), normal(4, channels, width - 1)
    p, at = packed(conv=conv, conv_bias=None)
    sizes = {"channels": channels, "width": width, "stride": 3 * channels, "offset": 0, "gated": gated, **at}
    text = shader("conv", one=True, **sizes)
    arrays = {
        "X": x,
        "P": p,
        "U": np.zeros((3, channels), np.float32),
        "CONV": states,
        "CTL": stepped([1, 2, 3], slots),
    }
    u, new = run(any_gpu, text, arrays, (2, 3), "U", "CONV")
    for i, slot in enumerate(slots):
        one = {**arrays, "X": x[i], "U": np.zeros(channels, np.float32), "CTL": control(1, 1, slot=slot)}
        alone, state = run(any_gpu, shader("conv", one=False, **sizes), one, (2,), "U", "CONV")
        assert (u[i] == alone).all()
        assert (new[slot] == state[slot]).all()
    assert (new[1] == states[1]).all()


def scanned(x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, state: Array) -> tuple[Array, Array]:
    """Token by token: x, dt (T, C); a (C, N); b, c (T, C, N); d (C,); state (C, N)."""
    state, ys = state.astype(np.float64), []
    for t in range(len(x)):
        state = np.exp(dt[t][:, None] * a) * state + (dt[t] * x[t])[:, None] * b[t]
        ys.append((state * c[t]).sum(-1) + d * x[t])
    return np.array(ys), state


@pytest.mark.parametrize("states", [1, 5, 16, 64, 128])
@pytest.mark.parametrize("count", [1, 16, 37])
def test_scan_of_mamba1(gpu: Gpu, states: int, count: int) -> None:
    channels, rank = 22, 3
    u, dt, bc, z = (normal(count, n) for n in (channels, channels, rank + 2 * states, 2 * channels))
    a, bias, d, state = -np.exp(normal(channels, states)), normal(channels), normal(channels), normal(channels, states)
    p, at = packed(a=a, dt_bias=bias, d=d)
    text = shader(
        "scan",
        source="BC",
        per_thread=-(-states // 16),
        **at,
        channels=channels,
        states=states,
        heads=None,
        groups=1,
        rank=rank,
        u_stride=channels,
        z_stride=2 * channels,
        z_offset=channels,
        gate=True,
    )
    kept = np.stack([normal(channels, states), state])  # slots
    arrays = {"U": u, "Z": z, "P": p, "BC": bc, "DT": dt, "SSM": kept, "CTL": control(1, count, slot=1)}
    arrays["Y"] = np.zeros((count, channels), np.float32)
    y, new = run(gpu, text, arrays, (-(-channels // 4),), "Y", "SSM")
    b, c = (np.repeat(v[:, None], channels, 1) for v in (bc[:, rank : rank + states], bc[:, rank + states :]))
    wanted, after = scanned(u, softplus(dt + bias), a, b, c, d, state)
    close(y, wanted * silu(z[:, channels:]))
    close(new[1], after)
    assert (new[0] == kept[0]).all()


def of_heads() -> dict[str, Array]:
    """A, dt_bias and D of 4 heads."""
    return {"a": -np.exp(normal(4)), "dt_bias": normal(4), "d": normal(4)}


def mamba2(
    size: int, states: int, groups: int, count: int, high: float, vectors: dict[str, Array] | None = None
) -> tuple[Any, dict[str, Array], Array, Array]:
    """Of 4 heads of this size, in slot 1: what `recurrence` is told, the arrays, and the y and the state wanted."""
    heads, vectors = 4, vectors or of_heads()
    inner = heads * size
    channels, stride = inner + 2 * groups * states, 2 * inner + 2 * groups * states + heads
    u, z = normal(count, channels), normal(count, stride)
    kept = normal(2, inner, states)
    p, at = packed(**vectors)
    sizes: dict[str, Any] = {**at, "heads": heads, "head_dim": size, "states": states, "groups": groups}
    sizes |= {"u_stride": channels, "z_stride": stride, "dt_offset": inner + channels, "gate": True}
    sizes |= {"dt_low": "f32(0.1)", "dt_high": f"f32({high!r})"}
    arrays: dict[str, Array] = {"U": u, "Z": z, "P": p, "SSM": kept, "CTL": control(1, count, slot=1)}
    arrays["Y"] = np.zeros((count, inner), np.float32)
    dt = np.clip(softplus(z[:, inner + channels :] + vectors["dt_bias"]), 0.1, high)
    spread_b, spread_c = (
        np.repeat(v.reshape(count, groups, states), inner // groups, 1)
        for v in (u[:, inner : inner + groups * states], u[:, inner + groups * states :])
    )
    per_channel = [np.repeat(v, size, -1) for v in (dt, vectors["a"], vectors["d"])]
    decay = np.repeat(per_channel[1][:, None], states, 1)
    wanted, after = scanned(u[:, :inner], per_channel[0], decay, spread_b, spread_c, per_channel[2], kept[1])
    return sizes, arrays, wanted * silu(z[:, :inner]), after


@pytest.mark.parametrize("states", [9, 16, 64, 128])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("count", "high"), [(1, 3.0e38), (40, 0.5)])
def test_scan_of_mamba2(gpu: Gpu, states: int, groups: int, count: int, high: float) -> None:
    sizes, arrays, wanted, after = mamba2(7, states, groups, count, high)
    [(text, grid, _)] = recurrence(sizes, chunked=False)
    y, new = run(gpu, text, arrays, grid, "Y", "SSM")
    close(y, wanted)
    close(new[1], after)
    assert (new[0] == arrays["SSM"][0]).all()


@pytest.mark.parametrize(("states", "groups", "size"), [(9, 2, 7), (16, 1, 40), (128, 2, 40)])
def test_mamba2_step(any_gpu: Gpu, states: int, groups: int, size: int) -> None:
    """Of three streams, each in a slot of its own."""
    slots, vectors = [3, 0, 2], of_heads()
    made = [mamba2(size, states, groups, 1, 0.5, vectors) for _ in slots]
    sizes, inner = made[0][0], 4 * size
    kept = normal(4, inner, states)
    for (_, arrays, _, _), slot in zip(made, slots, strict=True):
        kept[slot] = arrays["SSM"][1]
    arrays = {name: np.concatenate([one[1][name] for one in made]) for name in ("U", "Z", "Y")}
    arrays |= {"P": made[0][1]["P"], "SSM": kept, "CTL": stepped([7, 8, 9], slots)}
    more = {"inner": inner, "wide": 32, "threads": 256, "per_thread": -(-states // 16), "v": None}
    y, new = run(any_gpu, shader("mamba2_step", **sizes, **more), arrays, (-(-inner // 32), 3), "Y", "SSM")
    for i, slot in enumerate(slots):
        _, _, wanted, after = made[i]
        close(y[i], wanted[0])
        close(new[slot], after)
    assert (new[1] == kept[1]).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("scaled", "rows", "threads", "subgroups"), [(True, 60, 16, False), (False, 37, 8, False), (True, 37, 8, True)]
)
def test_mamba2_step_that_goes_on(
    any_gpu: Gpu, fmt: Format, scaled: bool, rows: int, threads: int, subgroups: bool
) -> None:
    """Bit for bit the step, and the product after it."""
    if subgroups and threads > any_gpu.subgroup:
        pytest.skip(f"subgroups of {any_gpu.found.name} may have {any_gpu.subgroup} threads")
    tiling = {"threads_per_row": threads, "subgroups": subgroups}
    vectors, inner = of_heads(), 160
    sizes, arrays, _, _ = mamba2(40, 16, 1, 1, 0.5, vectors)
    weights, _, v = matrix(rows, inner, fmt)
    cut = cut_of(v)
    gain, bias = normal(inner), normal(rows)
    arrays["P"], at = packed(**vectors, gain=gain, bias=bias)
    x = normal(rows)
    arrays |= {"X": x, "CTL": stepped([7], [1])}
    wide = cut.unit * VALUES[fmt]
    more: dict[str, Any] = {"inner": inner, "wide": wide, "threads": 256, "per_thread": 1}
    grid = (-(-inner // wide),)
    y, plain = run(any_gpu, shader("mamba2_step", **sizes, **more, v=None), arrays, grid, "Y", "SSM")
    end = {"gain": at["gain"] if scaled else None, "bias": at["bias"], "unit": cut.unit, "end": "add"}
    text = matvec(v, **end, **tiling, rows_per_thread=4)
    [wanted] = run(
        any_gpu, text, {**weights, "P": arrays["P"], "X": y, "Y": x}, (-(-rows // (64 // threads * 4)),), "Y"
    )

    arrays |= {"V": weights["W"], "T": weights.get("S", x), **sums_of(v, cut)}
    spread = {**going_on(v, cut, scaled, **tiling), "v_gain": at["gain"] if scaled else None, "v_bias": at["bias"]}
    text = shader("mamba2_step", **sizes, **more, **spread)
    found, state, count = run(any_gpu, text, arrays, grid, "X", "SSM", "COUNT")
    assert (found == wanted).all()
    assert (state == plain).all()
    assert not (found == x).any()
    assert not count.any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("end", "inner", "hidden", "threads", "rows_each"),
    [("swiglu", 33, 60, 8, 2), ("relu2", 320, 37, 16, 4), ("swiglu", 2100, 64, 16, 4)],
)
def test_mlp(any_gpu: Gpu, fmt: Format, end: str, inner: int, hidden: int, threads: int, rows_each: int) -> None:
    """Bit for bit its two products, and what numpy gives."""
    up, w, sizes = matrix(2 * inner if end == "swiglu" else inner, hidden, fmt)
    down, w_down, v = matrix(hidden, inner, fmt)
    cut = cut_of(v)
    x, gain, bias, last = normal(hidden), normal(hidden), normal(sizes["rows"]), normal(hidden)
    p, at = packed(gain=gain, bias=bias, last=last)
    tiling: dict[str, Any] = {"threads_per_row": threads, "rows_per_thread": rows_each}
    groups = 64 // threads * rows_each
    first = {"gain": at["gain"], "bias": at["bias"], "end": end}
    arrays = {**up, "P": p, "X": x, "Y": np.zeros(inner, np.float32)}
    [h] = run(any_gpu, matvec(sizes, **first, **tiling), arrays, (-(-sizes["rows"] // groups),), "Y")
    text = matvec(v, end="add", bias=at["last"], unit=cut.unit, **tiling)
    [plain] = run(any_gpu, text, {**down, "P": p, "X": h, "Y": x}, (-(-hidden // groups),), "Y")

    more = {"threads": 16 * threads, "streams": 1, "unit": 1, "ahead": 1, "eps": EPS, **first}
    more |= going_on(v, cut, **tiling)
    text = shader("mlp", **sizes, **more | {"v_bias": at["last"]})
    arrays = {**up, "P": p, "X": x, "V": down["W"], "T": down.get("S", x), **sums_of(v, cut)}
    found, count = run(any_gpu, text, arrays, (cut.count,), "X", "COUNT")
    assert (found == plain).all()
    assert not count.any()
    wide = w @ normed(x, gain) + bias
    act = np.maximum(wide, 0) ** 2 if end == "relu2" else silu(wide[:inner]) * wide[inner:]
    close(found, w_down @ act + last + x)


def test_slices_of_a_product() -> None:
    """Granite's down, out and o are cut into 64 slices at most; what makes too many sums, or breaks blocks, is not."""

    def cut(rows: int, columns: int, fmt: Format, width: int = 0) -> tuple[int, int] | None:
        found = slices_of(DeviceMatrix(rows, columns, fmt, ()), width)
        return None if found is None else (found.unit, found.count)

    assert cut(768, 2048, "int8") == (2, 64)
    assert cut(768, 2048, "int4") == (2, 32)
    assert cut(768, 2048, "f16") == (4, 64)
    assert cut(576, 8192, "int8") == (8, 64)
    assert cut(768, 33, "f32") == (8, 2)
    assert cut(768, 768, "int8", 64) == (4, 12)
    assert cut(768, 768, "int4", 32) is None
    assert cut(768, 720, "int8", 60) is None
    assert cut(4096, 2048, "int8") is None
    assert cut(64, 65 * 64, "int8", 64) is None


@pytest.mark.parametrize("states", [9, 32, 128])
@pytest.mark.parametrize("size", [7, 40])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("count", "high"), [(1, 3.0e38), (32, 0.5), (75, 3.0e38)])
def test_mamba2_by_chunks(gpu: Gpu, states: int, size: int, groups: int, count: int, high: float) -> None:
    """Four shaders one after another, against the recurrence."""
    sizes, arrays, wanted, after = mamba2(size, states, groups, count, high)
    heads, inner, untouched = sizes["heads"], sizes["heads"] * size, arrays["SSM"][0]
    arrays |= {name: np.zeros((count, heads), np.float32) for name in ("DT", "LOGS")}
    arrays["CHUNKS"] = np.full((-(-count // CHUNK), inner, states), np.nan, np.float32)
    changed = (("DT", "LOGS"), ("CHUNKS",), ("CHUNKS", "SSM"), ("Y",))
    for (text, (x, y), tokens), names in zip(recurrence(sizes, chunked=True), changed, strict=True):
        grid = (x, -(-count // tokens) if tokens else y)
        arrays |= dict(zip(names, run(gpu, text, arrays, grid, *names), strict=True))
    close(arrays["Y"], wanted)
    close(arrays["SSM"][1], after)
    assert (arrays["SSM"][0] == untouched).all()


@pytest.mark.parametrize("fmt", ["f32", "f16"])
@pytest.mark.parametrize("states", [1, 7, 16, 64])
@pytest.mark.parametrize("mixer_eps", [None, 0.3])
def test_selective_step(gpu: Gpu, fmt: Format, states: int, mixer_eps: float | None) -> None:
    """Of two streams, in slots 2 and 0."""
    channels, rank = 22, 19
    arrays, w, sizes = matrix(channels, rank, fmt)
    bc, u, z = normal(2, rank + 2 * states), normal(2, channels), normal(2, 2 * channels)
    a, bias, d = -np.exp(normal(channels, states)), normal(channels), normal(channels)
    kept = normal(3, channels, states)
    arrays["P"], at = packed(a=a, dt_bias=bias, d=d)
    text = shader(
        "selective_step",
        format=fmt,
        blocks=sizes["blocks"],
        channels=channels,
        states=states,
        rank=rank,
        mixer_eps=None if mixer_eps is None else f"f32({mixer_eps})",
        **at,
    )
    arrays |= {"BC": bc, "U": u, "Z": z, "Y": np.zeros((2, channels), np.float32), "SSM": kept}
    arrays["CTL"] = stepped([5, 6], [2, 0])
    y, new = run(gpu, text, arrays, (-(-channels // 4), 2), "Y", "SSM")
    for i, slot in enumerate((2, 0)):
        parts = np.split(bc[i].astype(np.float64), (rank, rank + states))
        if mixer_eps is not None:
            parts = [part / np.sqrt((part**2).mean() + mixer_eps) for part in parts]
        dt = softplus(w @ parts[0] + bias)
        b, c = (np.repeat(v[None, None], channels, 1) for v in parts[1:])
        wanted, after = scanned(u[i : i + 1], dt[None], a, b, c, d, kept[slot])
        close(y[i], wanted[0] * silu(z[i, channels:]))
        close(new[slot], after)
    assert (new[1] == kept[1]).all()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (14, 0), (24, 6), (128, 128)])
@pytest.mark.parametrize(("qk_norm", "gate"), [(False, False), (True, False), (True, True)])
def test_rotate(gpu: Gpu, half: bool, dim: int, rotated: int, qk_norm: bool, gate: bool) -> None:
    """Of three tokens, whose rows go into two pages."""
    heads, kv, count, position, slot = 6, 2, 3, PAGE - 2, 1
    qkv, tables = normal(count, (2 if gate else 1) * heads + 2 * kv, dim), scattered(2)
    angles = normal(PAGE + 5, rotated // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    gains = (normal(dim), normal(dim)) if qk_norm else (None, None)
    p, at = packed(q_norm=gains[0], k_norm=gains[1])
    text = shader(
        "rotate",
        **PAGED,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        rotated=rotated,
        half=half,
        qk_eps=EPS if qk_norm else None,
        gate=gate,
        **at,
    )
    kept = np.float16 if half else np.float32
    key, value = (normal(2 * PAGES * PAGE, kv, dim).astype(kept) for _ in range(2))
    arrays = {"QKV": qkv, "P": p, "COS": cos, "SIN": sin, "KEY": key, "VALUE": value}
    arrays["CTL"] = control(position, count, slot=slot, tables=tables)
    q, *caches = run(gpu, text, arrays, (heads + 2 * kv, count), "QKV", "KEY", "VALUE")
    new_key, new_value = (rows_of(cache, tables[slot]) for cache in caches)
    whole = qkv.astype(np.float64)
    parts = [whole[:, :heads], whole[:, heads : heads + kv]]
    if qk_norm:
        parts = [normed(part, gain) for part, gain in zip(parts, gains, strict=True)]
    part_cos, part_sin = (v[position : position + count, None].astype(np.float64) for v in (cos, sin))
    turned = []
    for part in parts:
        one, two = part[..., : rotated // 2], part[..., rotated // 2 : rotated]
        rows = [one * part_cos - two * part_sin, two * part_cos + one * part_sin, part[..., rotated:]]
        turned.append(np.concatenate(rows, -1))
    close(q[:, :heads], turned[0])
    assert (q[:, heads:] == qkv[:, heads:]).all()
    rounding = 6e-4 if half else TOLERANCE
    close(new_key[position : position + count], turned[1], rounding)
    close(new_value[position : position + count], whole[:, heads + kv : heads + 2 * kv], rounding)
    for before, after in zip((key, value), caches, strict=True):  # a key or a value of any other row
        assert (before != after).any((1, 2)).sum() == count


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(6, 2, 16), (5, 5, 14), (4, 1, 128), (3, 1, 70)])
@pytest.mark.parametrize(("position", "count", "gate"), [(0, 1, True), (0, 5, False), (63, 2, True), (130, 3, False)])
def test_attention(gpu: Gpu, half: bool, heads: int, kv: int, dim: int, position: int, count: int, gate: bool) -> None:
    """Values in the cache after a token's own row do not count, whatever they are."""
    qkv = normal(count, (2 if gate else 1) * heads + 2 * kv, dim, scale=dim**-0.25)
    key, value, tables = caches(half, kv, dim, 2)
    for cache in (key, value):
        cache.reshape(-1, PAGE, kv, dim)[tables[0]] = np.nan  # another slot's
        at = np.repeat(tables[1], PAGE) * PAGE + np.tile(np.arange(PAGE), PAGES)
        cache[at[position + count :]] = np.nan
    sizes = {"heads": heads, "kv_heads": kv, "head_dim": dim, "half": half, "gate": gate}
    text = shader("attention", **sizes, **PAGED, one=False, per_thread=-(-dim // 64))
    arrays = {"QKV": qkv, "KEY": key, "VALUE": value, "CTL": control(position, count, slot=1, tables=tables)}
    [found] = run(gpu, text, {**arrays, "Y": np.zeros((count, heads, dim), np.float32)}, (heads, count), "Y")
    for t in range(count):
        rows = slice(position + t + 1)
        y = attended(qkv[t, :heads], rows_of(key, tables[1])[rows], rows_of(value, tables[1])[rows])
        close(found[t], gated(y, qkv[t], gate))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "rotated", "qk_norm", "gate", "positions"),
    [
        (6, 2, 16, 16, False, False, (0, 63, 64)),
        (3, 1, 70, 0, True, True, (255, 256, 31)),
        (2, 2, 24, 6, True, False, (0, 319, 128)),
        (4, 2, 256, 64, True, True, (5, 64, 200)),
    ],
)
def test_attention_of_streams(
    any_gpu: Gpu,
    half: bool,
    heads: int,
    kv: int,
    dim: int,
    rotated: int,
    qk_norm: bool,
    gate: bool,
    positions: Sequence[int],
) -> None:
    """Bit for bit as by the shaders of a prefill in what goes into the caches, and as if it had come out of them."""
    slots = [2, 0, 3]
    sizes, tables = stepping(half, heads, kv, dim, qk_norm, rotated, gate)
    qkv = normal(3, (2 if gate else 1) * heads + 2 * kv, dim, scale=dim**-0.25)
    *before, pages = caches(half, kv, dim, 4)
    for cache in before:
        for position, slot in zip(positions, slots, strict=True):  # what comes after its own row does not count
            at = np.repeat(pages[slot], PAGE) * PAGE + np.tile(np.arange(PAGE), PAGES)
            cache[at[position:]] = np.nan
    words = stepped(positions, slots, pages)
    left = np.full((3, heads, PAGES, dim + 2), 1e9, np.float32)
    arrays: dict[str, Array] = {"QKV": qkv, "KEY": before[0], "VALUE": before[1], "CTL": words, "PARTS": left, **tables}
    text = shader("attention", **sizes, one=True, end="apart")
    grid = (heads, 3 * PAGES)
    found, key, value = run(any_gpu, text, arrays, grid, "PARTS", "KEY", "VALUE")
    merging = {"PARTS": found, "QKV": qkv, "CTL": words, "Y": np.zeros((3, heads, dim), np.float32)}
    [merged] = run(any_gpu, shader("attention_merge", **sizes), merging, (heads, 3), "Y")
    here = {**arrays, "Y": np.zeros((3, heads, dim), np.float32), "COUNT": np.zeros(64, np.uint32)}
    text = shader("attention", **sizes, one=True, end="here")
    y, count, *again = run(any_gpu, text, here, grid, "Y", "COUNT", "KEY", "VALUE")
    assert (y == merged).all()
    assert not count.any()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(again, (key, value), strict=True))
    for i, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        assert (found[i, :, position // PAGE + 1 :] == 1e9).all()
        one = {**arrays, "QKV": qkv[i : i + 1], "CTL": control(position, 1, slot=slot, tables=pages)}
        q, *own = run(any_gpu, shader("rotate", **sizes), one, (heads + 2 * kv, 1), "QKV", "KEY", "VALUE")
        rows = [rows_of(cache, pages[slot])[: position + 1] for cache in (key, value)]
        for made, wanted in zip(rows, own, strict=True):
            assert made.tobytes() == rows_of(wanted, pages[slot])[: position + 1].tobytes()
        close(merged[i], gated(attended(q[0, :heads], *rows), qkv[i], gate))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("position", "hidden", "gate"), [(5, 60, False), (200, 37, True)])
def test_attention_that_goes_on(any_gpu: Gpu, fmt: Format, position: int, hidden: int, gate: bool) -> None:
    """Bit for bit the attention, and the product after it."""
    heads, kv, dim = 6, 2, 64
    sizes, tables = stepping(True, heads, kv, dim, False, 64, gate)
    weights, _, v = matrix(hidden, heads * dim, fmt)
    cut, x, bias = cut_of(v, dim), normal(hidden), normal(hidden)
    tables["P"], at = packed(o=bias)
    key, value, pages = caches(True, kv, dim, 2)
    arrays = {
        "QKV": normal(1, (2 if gate else 1) * heads + 2 * kv, dim, scale=dim**-0.25),
        "KEY": key,
        "VALUE": value,
        **tables,
    }
    arrays |= {"CTL": stepped([position], [1], pages), "PARTS": np.full((heads, PAGES, dim + 2), 1e9, np.float32)}
    arrays |= {"Y": np.zeros((heads, dim), np.float32), "COUNT": np.zeros(64, np.uint32)}
    grid = (heads, PAGES)
    y, plain = run(any_gpu, shader("attention", **sizes, one=True, end="here"), arrays, grid, "Y", "KEY")
    text = matvec(v, end="add", bias=at["o"], unit=cut.unit)
    [wanted] = run(any_gpu, text, {**weights, "P": tables["P"], "X": y, "Y": x}, (-(-hidden // 16),), "Y")

    arrays |= {"X": x, "V": weights["W"], "T": weights.get("S", x), **sums_of(v, cut)}
    spread = going_on(v, cut) | {"v_bias": at["o"]}
    text = shader("attention", **sizes, **spread, one=True, end="spread")
    found, new, count = run(any_gpu, text, arrays, grid, "X", "KEY", "COUNT")
    assert (found == wanted).all()
    assert (new == plain).all()
    assert not count.any()


def test_scores_of_any_size_are_weighed(gpu: Gpu) -> None:
    """An online softmax must not overflow, nor lose the one row that counts."""
    key = np.zeros((PAGES * PAGE, 1, 16), np.float32)
    key[:200, 0, 0] = np.linspace(-3e4, 3e4, 200)
    value = normal(PAGES * PAGE, 1, 16)
    qkv = np.zeros((1, 3, 16), np.float32)
    qkv[0, 0, 0] = 10.0
    sizes = {"heads": 1, "kv_heads": 1, "head_dim": 16, "half": False, "gate": False}
    text = shader("attention", **sizes, **PAGED, one=False, per_thread=1)
    words = control(199, 1, tables=np.arange(PAGES))
    arrays = {"QKV": qkv, "KEY": key, "VALUE": value, "CTL": words, "Y": np.zeros((1, 16), np.float32)}
    [found] = run(gpu, text, arrays, (1, 1), "Y")
    close(found[0], value[199, 0])


def test_an_index_beyond_a_binding_reads_and_writes_nothing_else(any_gpu: Gpu) -> None:
    """The last line of defence: what stands beside a binding in its buffer is out of reach of any index."""
    whole = any_gpu.region(768)
    any_gpu.write(whole, np.full(192, 7.0, np.float32))
    part = Region(whole.buffer, 256, 256)
    any_gpu.write(part, np.zeros(64, np.float32))
    text = """
@group(0) @binding(0) var<storage, read_write> A: array<f32>;
@group(0) @binding(1) var<storage, read_write> Y: array<f32>;
@group(0) @binding(2) var<storage, read> I: array<u32>;

@compute @workgroup_size(1)
fn main() {
  for (var k = 0u; k < 6u; k++) {
    Y[k] = A[I[k]];
    A[I[k]] = 9.0;
  }
}"""
    kernel, y = any_gpu.kernel(text), any_gpu.region(64)
    indices = any_gpu.uploaded(np.array([64, 100, 4294967232, 4294967295, 1 << 20, 192], np.uint32))
    group = any_gpu.bound(kernel, 0, {"A": part, "Y": y, "I": indices})
    read, after = any_gpu.recorder.read(
        [dispatch(kernel.pipeline, group, None, 1, 1)], [y, Region(whole.buffer, 0, 768)]
    )
    assert not (read.view(np.float32)[:6] == 7.0).any()
    around = after.view(np.float32)
    assert (around[:64] == 7.0).all()
    assert (around[128:] == 7.0).all()
