"""The forms of the gated delta rule against its definition in float64: equal keys, pads, key heads, chunks, lanes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ssmd.authoring import delta

RELATIVE = 2e-6  # of the largest value: sums of float32 in another order
SIZES = {  # key heads, value heads, K, V
    "one head": (1, 1, 8, 8),
    "shared keys": (2, 6, 8, 12),
    "wide": (3, 3, 32, 10),
}


def inputs(
    length: int, sizes: str = "shared keys", *, alike: float = 0.0, g: float | None = None, beta: float | None = None
) -> list[Tensor]:
    """Random arguments of a form. alike: the part of every key that is the first one. g, beta: of every token."""
    groups, heads, width, size = SIZES[sizes]
    made = torch.Generator().manual_seed(length)
    q, k = (torch.randn(1, length, groups * width, generator=made) for _ in range(2))
    v = torch.randn(1, length, heads * size, generator=made)
    gs, betas = -torch.rand(1, length, heads, generator=made), torch.rand(1, length, heads, generator=made)
    return [
        *(q, k[:, :1] * alike + k * (1 - alike), v),
        gs if g is None else torch.full_like(gs, g),
        betas if beta is None else torch.full_like(betas, beta),
        torch.randn(1, heads, size, width, generator=made),
    ]


def chunked(*given: Tensor) -> tuple[Tensor, Tensor]:
    length = given[0].shape[1]
    form = partial(delta.chunked, masks=delta.masks(min(length, 64)), chunks=-(-length // 64))
    return form(*given)


def opened(*given: Tensor) -> tuple[Tensor, Tensor]:
    return partial(delta.chunked, masks=delta.open_masks(given[0].shape[1]))(*given)


def stepped(*given: Tensor) -> tuple[Tensor, Tensor]:
    *rows, state = given
    ys = []
    for t in range(rows[0].shape[1]):
        y, state = delta.step(*[*(row[:, t : t + 1] for row in rows), state])
        ys.append(y)
    return torch.cat(ys, 1), state


def check(form: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor]) -> None:
    """Compare y and the state with the definition in float64."""
    expected = delta.ref(*(t.double() for t in given))
    for found, wanted in zip(form(*given), expected, strict=True):
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max() / wanted.abs().max()) < RELATIVE


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("form", "length"), [(chunked, 16), (chunked, 37), (chunked, 192), (opened, 23), (stepped, 70)]
)
def test_a_form_follows_the_definition(form: Any, length: int, sizes: str) -> None:
    check(form, inputs(length, sizes))


@pytest.mark.parametrize("form", [chunked, opened, stepped])
@pytest.mark.parametrize(
    "case",
    [
        {"alike": 1.0, "beta": 0.9, "g": -0.001},
        {"alike": 0.9, "beta": 0.99, "g": -0.001},
        {"alike": 1.0, "beta": 1.0, "g": 0.0},
        {"g": 0.0, "beta": 1.0},
    ],
    ids=["equal keys", "keys nearly equal", "equal keys overwritten", "no decay"],
)
def test_repeated_keys_lose_no_digits(form: Any, case: dict[str, float]) -> None:
    check(form, inputs(64, "wide", **case))


def test_the_series_would_lose_them() -> None:
    """The doubled blocks exist for this: the usual product of powers is off by more than the values themselves."""
    x = delta.l2(inputs(64, "one head", alike=1.0)[1].reshape(64, -1))
    a = torch.tril(x @ x.T * 0.9, -1)
    eye, power = torch.eye(64), -a
    series = eye + power
    for _ in range(5):
        power = power @ power
        series = series @ (eye + power)
    exact = delta.unit_lower_inverse_ref(a.double())
    _, ones, *quarters = delta.masks(64)
    assert float((delta.unit_lower_inverse(a, ones, quarters) - exact).abs().max()) < 1e-5
    assert float((series - exact).abs().max()) > 1


@pytest.mark.parametrize("form", [chunked, opened])
def test_pads_leave_no_trace(form: Any) -> None:
    """Bit for bit, whatever stands in them, in the state and in what the tokens before them give."""
    given = inputs(64)
    results = []
    for factor in (0.0, 1e4):
        q, k, v, g, beta, state = (t.clone() for t in given)
        for t in (q, k, v):
            t[:, 41:] *= factor
        g[:, 41:] = beta[:, 41:] = 0
        y, new = form(q, k, v, g, beta, state)
        results.append((y[:, :41].numpy(), new.numpy()))
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("form", [chunked, opened, stepped])
def test_pads_alone_keep_every_bit_of_a_state(form: Any) -> None:
    given = inputs(64, g=0.0, beta=0.0)
    np.testing.assert_array_equal(form(*given)[1].numpy(), given[-1].numpy())


def test_lanes_have_the_bits_of_a_stream_alone() -> None:
    given = [inputs(1), inputs(1, alike=0.5), inputs(1, g=0.0)]
    q, k, v, g, beta = (torch.cat(parts, 1) for parts in list(zip(*given, strict=True))[:-1])
    states = [lane[-1] + i for i, lane in enumerate(given)]
    ys, made = delta.step_by_lane(q, k, v, g, beta, states)
    for i, lane in enumerate(given):
        y, new = delta.step(*[*lane[:-1], states[i]])
        np.testing.assert_array_equal(ys[:, i : i + 1].numpy(), y.numpy())
        np.testing.assert_array_equal(made[i].numpy(), new.numpy())
