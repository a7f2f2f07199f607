"""StateSpec and State: sizes that the published figures fix, and every state that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ssmd.model.state import WINDOWS, Kind, State, StateError, StateSpec, TensorSpec

SPEC = StateSpec(
    (
        TensorSpec("conv_0", "conv", 0, (8, 3)),
        TensorSpec("ssm_0", "ssm", 0, (2, 4, 8)),
        TensorSpec("key_1", "key", 1, (2, 16), "float16"),
        TensorSpec("value_1", "value", 1, (2, 16), "float16"),
    )
)


def tensors(rows: int) -> dict[str, NDArray[Any]]:
    return {t.name: np.ones(t.shape_at(rows), t.numpy_dtype) for t in SPEC.tensors}


def test_bytes_of_the_known_models() -> None:
    """granite-4.0-h-350m: 22.6 MB + 4,096 n; SmolLM2-135M: 23,040 n (the design page's figures)."""
    attention = {10, 13, 17, 27}
    granite = StateSpec(
        tuple(
            t
            for i in range(32)
            for t in (
                [TensorSpec(f"{k}_{i}", k, i, (4, 64), "float16") for k in ("key", "value")]
                if i in attention
                else [TensorSpec(f"conv_{i}", "conv", i, (1792, 3)), TensorSpec(f"ssm_{i}", "ssm", i, (48, 32, 128))]
            )
        )
    )
    assert granite.nbytes_at(0) == 28 * (1792 * 3 + 48 * 32 * 128) * 4 == 22_622_208
    assert granite.nbytes_at(100) - granite.nbytes_at(0) == 4096 * 100
    smollm2 = StateSpec(
        tuple(TensorSpec(f"{k}_{i}", k, i, (3, 64), "float16") for i in range(30) for k in ("key", "value"))
    )
    assert smollm2.nbytes_at(1000, since=900) == 23_040 * 100


def test_digest_ignores_dtype_and_nothing_else() -> None:
    def changed(**change: Any) -> str:
        first = TensorSpec(**{"name": "conv_0", "kind": "conv", "layer": 0, "shape": (8, 3), **change})
        return StateSpec((first, *SPEC.tensors[1:])).digest()

    assert changed(dtype="float16") == SPEC.digest()
    others = {changed(name="conv_9"), changed(kind="ssm"), changed(layer=3), changed(shape=(8, 4))}
    assert len(others | {SPEC.digest()}) == 5


def test_json_round_trip() -> None:
    assert StateSpec.from_json(SPEC.to_json()) == SPEC
    with pytest.raises(StateError, match="malformed"):
        StateSpec.from_json([{"name": "x"}])


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("window_key", (2, 5)),
        ("window_value", (2, 5, 6, 1)),
        ("conv", (8,)),
        ("conv", (8, 3, 1)),
        ("ssm", (8,)),
        ("ssm", (1, 2, 4, 8)),
        ("ssm", (8, 0)),
        ("key", (2, 16, 1)),
    ],
)
def test_shapes_that_cannot_be(kind: Kind, shape: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match="not possible"):
        TensorSpec("x", kind, 0, shape)


def test_which_tensors_have_their_channels_first() -> None:
    """Mamba-1's ssm is [D, N], Mamba-2's [H, P, N]; key and value have two axes too, but none for tokens."""
    assert [t.channels_first for t in SPEC.tensors] == [True, False, False, False]
    assert TensorSpec("ssm_0", "ssm", 0, (8, 4)).channels_first


def test_an_unknown_kind_is_refused_by_name_and_says_what_to_do() -> None:
    with pytest.raises(StateError, match=r"'x' is of kind 'made_up', which this .* not know; .* Update ssmd"):
        StateSpec.from_json([{"name": "x", "kind": "made_up", "layer": 0, "shape": [2, 3], "dtype": "float32"}])


def test_a_window_is_whole_and_of_constant_size() -> None:
    key, value = (TensorSpec(f"{kind}_1", kind, 1, (2, 5, 6)) for kind in WINDOWS)
    assert [(t.recurrent, t.channels_first, t.shape_at(900)) for t in (key, value)] == [(True, False, (2, 5, 6))] * 2
    assert StateSpec((key, value)).rows == ()
    rows = np.arange(60, dtype=np.float32).reshape(2, 5, 6)
    for t, held in ((key, np.zeros((2, 5, 6), np.float32)), (value, np.zeros((2, 6, 5), np.float32))):
        t.canonical(held)[...] = rows
        np.testing.assert_array_equal(held if t is key else held.transpose(0, 2, 1), rows)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ssm_0": np.ones((2, 4, 9), np.float32)}, "shape"),
        ({"key_1": np.ones((2, 4, 16), np.float16)}, "shape"),
        ({"conv_0": np.ones((8, 3), np.float64)}, "dtype"),
        ({"conv_0": np.full((8, 3), np.nan, np.float32)}, "not finite"),
        ({"value_1": np.full((2, 5, 16), np.inf, np.float16)}, "not finite"),
        ({"more": np.ones(1, np.float32)}, "differ"),
    ],
)
def test_a_state_that_does_not_fit(change: dict[str, NDArray[Any]], says: str) -> None:
    State(5, 0, tensors(5)).check(SPEC)
    with pytest.raises(StateError, match=says):
        State(5, 0, {**tensors(5), **change}).check(SPEC)


def test_rows_must_be_a_range() -> None:
    State(7, 2, tensors(5)).check(SPEC)
    with pytest.raises(StateError, match="range"):
        State(2, 7, tensors(5)).check(SPEC)
