"""Gated DeltaNet's shaders against its definition in float64, at odd sizes, on every software adapter there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shaders import (
    FORMATS,
    Array,
    close,
    control,
    cut_of,
    going_on,
    matrix,
    matvec,
    normal,
    packed,
    run,
    silu,
    softplus,
    stepped,
    sums_of,
)

from ssmd.model.plan import GatedDeltaNet
from ssmd_wgpu import delta
from ssmd_wgpu.device import Gpu, shader
from ssmd_wgpu.pack import Format

# Key heads, value heads, values of a key, of a value: H / G of 1, 2 and 3, V above K and below, whole and odd units.
SIZES = [(1, 1, 4, 4), (2, 4, 16, 24), (1, 3, 7, 13), (3, 3, 128, 128), (2, 6, 12, 33), (1, 2, 256, 256), (5, 5, 1, 1)]
EPS = 1e-4


def mixer_of(groups: int, heads: int, key_dim: int, value_dim: int) -> GatedDeltaNet:
    return GatedDeltaNet(heads=heads, key_heads=groups, key_dim=key_dim, value_dim=value_dim, width=4, eps=EPS)


def inputs(m: GatedDeltaNet, count: int) -> dict[str, Array]:
    """u, behind the convolution; z, with the gate first; b and a."""
    return {"U": normal(count, m.channels), "Z": normal(count, m.rows), "BC": normal(count, 2 * m.heads)}


def vectors_of(m: GatedDeltaNet) -> tuple[dict[str, Array], Array, dict[str, int]]:
    """A, dt_bias and w; the same packed; and where each stands."""
    vectors = {"A": -np.exp(normal(m.heads)), "dt_bias": normal(m.heads), "gated_norm": normal(m.value_dim)}
    p, at = packed(**vectors)
    return vectors, p, {name: place for name, place in at.items() if place is not None}


def defined(m: GatedDeltaNet, x: dict[str, Array], vectors: dict[str, Array], state: Array) -> tuple[Array, Array]:
    """The definition, token by token: y (T, H, V) after norm and gate, and the state (H, V, K)."""
    wide = {name: array.astype(np.float64) for name, array in x.items()}
    state, ys = state.astype(np.float64), []
    each = m.heads // m.key_heads
    for u, z, ba in zip(wide["U"], wide["Z"], wide["BC"], strict=True):
        q, k, v = np.split(u, [m.keys, 2 * m.keys])
        q, k = (np.repeat(part.reshape(m.key_heads, m.key_dim), each, 0) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        b, a = np.split(ba, 2)
        state = state * np.exp(vectors["A"] * softplus(a + vectors["dt_bias"]))[:, None, None]
        left = v.reshape(m.heads, -1) - (state @ k[..., None])[..., 0]
        state = state + (left / (1 + np.exp(-b))[:, None])[..., None] * k[:, None]
        y = (state @ q[..., None])[..., 0] * m.key_dim**-0.5
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * vectors["gated_norm"]
        ys.append(y * silu(z[: m.inner].reshape(m.heads, -1)))
    return np.array(ys), state


def prefilled(gpu: Gpu, m: GatedDeltaNet, x: dict[str, Array], p: Array, at: dict[str, int], states: Array) -> Any:
    """Dispatch the shaders of a prefill over slot 1: y (T, H, V) after norm and gate, and the states."""
    count = len(x["U"])
    arrays = {**x, "P": p, "SSM": states, "CTL": control(3, count, slot=1)}
    arrays |= {name: np.zeros((count, m.heads), np.float32) for name in ("DT", "LOGS")}
    arrays["Y"] = np.zeros((count, m.heads, m.value_dim), np.float32)
    keys, scan = delta.recurrence(m, at)
    for (text, (groups, _), tokens), names in ((keys, ("U", "DT", "LOGS")), (scan, ("Y", "SSM"))):
        grid = (groups, count if tokens else 1)
        arrays |= dict(zip(names, run(gpu, text, arrays, grid, *names), strict=True))
    norm = {"columns": m.value_dim, "stride": m.inner, "offset": 0, "eps": f"f32({EPS})"}
    text = shader("group_norm", **norm, gain=at["gated_norm"], shared=True, gate=m.rows)
    [y] = run(gpu, text, arrays, (m.heads, count), "Y")
    return y, arrays["SSM"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("count", [2, 16, 37])
def test_tokens_one_by_one_are_the_definition(gpu: Gpu, sizes: tuple[int, int, int, int], count: int) -> None:
    m = mixer_of(*sizes)
    x, (vectors, p, at), states = inputs(m, count), vectors_of(m), normal(3, m.heads, m.value_dim, m.key_dim)
    y, new = prefilled(gpu, m, x, p, at, states)
    wanted, after = defined(m, x, vectors, states[1])
    close(y, wanted, 2e-5)
    close(new[1], after)
    assert (new[[0, 2]] == states[[0, 2]]).all()  # of other slots


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_step_of_streams_is_the_definition(gpu: Gpu, sizes: tuple[int, int, int, int]) -> None:
    """Each stream in its slot, and bit for bit what it is alone."""
    m, slots = mixer_of(*sizes), [3, 0, 2]
    x, (vectors, p, at), states = inputs(m, 3), vectors_of(m), normal(4, m.heads, m.value_dim, m.key_dim)
    arrays = {**x, "P": p, "SSM": states, "Y": np.zeros((3, m.heads, m.value_dim), np.float32)}
    text = delta.step(m, at, None)
    y, new = run(gpu, text, {**arrays, "CTL": stepped([7, 8, 9], slots)}, (m.heads, 3), "Y", "SSM")
    for i, slot in enumerate(slots):
        own = {name: array[i : i + 1] for name, array in x.items()}
        wanted, after = defined(m, own, vectors, states[slot])
        close(y[i], wanted[0], 2e-5)
        close(new[slot], after)
        one = {**arrays, **own, "Y": arrays["Y"][:1], "CTL": stepped([7], [slot])}
        alone, state = run(gpu, text, one, (m.heads, 1), "Y", "SSM")
        assert alone.tobytes() == y[i].tobytes()
        assert state[slot].tobytes() == new[slot].tobytes()
    assert (new[1] == states[1]).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("sizes", "rows"), [((2, 4, 12, 64), 37)], ids=str)
def test_a_step_that_goes_on_with_its_product(any_gpu: Gpu, fmt: Format, sizes: tuple[int, ...], rows: int) -> None:
    """Bit for bit the step, and the product after it."""
    m = mixer_of(*sizes)
    weights, _, v = matrix(rows, m.inner, fmt)
    cut = cut_of(v, m.value_dim)
    x, (_, p, at), residual = inputs(m, 1), vectors_of(m), normal(rows)
    arrays = {**x, "P": p, "SSM": normal(2, m.heads, m.value_dim, m.key_dim), "CTL": stepped([7], [1])}
    arrays["Y"] = np.zeros((m.heads, m.value_dim), np.float32)
    y, plain = run(any_gpu, delta.step(m, at, None), arrays, (m.heads, 1), "Y", "SSM")
    product = {**weights, "P": p, "X": y, "Y": residual}
    [wanted] = run(any_gpu, matvec(v, unit=cut.unit, end="add"), product, (-(-rows // 16),), "Y")

    arrays |= {"X": residual, "V": weights["W"], "T": weights.get("S", residual), **sums_of(v, cut)}
    text = delta.step(m, at, going_on(v, cut))
    found, state, count = run(any_gpu, text, arrays, (m.heads, 1), "X", "SSM", "COUNT")
    assert found.tobytes() == wanted.tobytes()
    assert state.tobytes() == plain.tobytes()
    assert not count.any()


def test_cuts_of_a_prefill_change_no_bit(any_gpu: Gpu) -> None:
    m = mixer_of(2, 4, 16, 24)
    x, (_, p, at), states = inputs(m, 53), vectors_of(m), normal(2, m.heads, m.value_dim, m.key_dim)
    whole, after = prefilled(any_gpu, m, x, p, at, states)
    ys = []
    for first, last in ((0, 1), (1, 18), (18, 50), (50, 53)):
        y, states = prefilled(any_gpu, m, {n: a[first:last] for n, a in x.items()}, p, at, states)
        ys.append(y)
    assert np.concatenate(ys).tobytes() == whole.tobytes()
    assert states.tobytes() == after.tobytes()


@pytest.mark.parametrize(("same", "beta", "decay"), [(1.0, 0.5, 0.99), (1.0, 0.99, 1.0), (0.9, 0.9, 0.999)])
def test_keys_that_repeat_lose_nothing(gpu: Gpu, same: float, beta: float, decay: float) -> None:
    """As of a text "aaaa": a chunk's inverse, made as a series, is wrong by 1e8 here."""
    m = mixer_of(1, 1, 128, 128)
    x, (vectors, p, at) = inputs(m, 64), vectors_of(m)
    k = x["U"][:, m.keys : 2 * m.keys]
    k[:] = same * k[:1] + (1 - same) * k
    x["BC"][:, 0] = np.log(beta / (1 - beta))
    x["BC"][:, 1] = np.log(np.expm1(np.log(decay) / vectors["A"][0])) if decay < 1 else -200
    x["BC"][:, 1] -= vectors["dt_bias"][0]
    states = normal(2, 1, 128, 128)
    y, new = prefilled(gpu, m, x, p, at, states)
    wanted, after = defined(m, x, vectors, states[1])
    close(y, wanted, 2e-5)
    close(new[1], after, 2e-5)


def test_small_and_large_rows_have_their_length(gpu: Gpu) -> None:
    """l2's epsilon stands beside the sum of squares: a row of 1e-4 does not get length 1, a row of zeros is none."""
    m = mixer_of(1, 1, 16, 16)
    x, (vectors, p, at), states = inputs(m, 4), vectors_of(m), normal(2, 1, 16, 16)
    x["U"][:, : 2 * m.keys] *= np.array([[1e-4], [0.0], [1e4], [3e-4]], np.float32)
    y, new = prefilled(gpu, m, x, p, at, states)
    wanted, after = defined(m, x, vectors, states[1])
    close(y, wanted, 2e-5)
    close(new[1], after)
    for i in range(4):
        own = {name: array[i : i + 1] for name, array in x.items()}
        arrays = {**own, "P": p, "SSM": states, "Y": np.zeros((1, 1, 16), np.float32), "CTL": stepped([3], [1])}
        y, states = run(gpu, delta.step(m, at, None), arrays, (1, 1), "Y", "SSM")
        close(y[0], wanted[i], 2e-5)
    close(states[1], after)
