"""XAMBA's graph passes on the CPU: each operation against numpy, functions against their formulas, tiny models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray

from ssmd_openvino import library, xamba
from ssmd_openvino.compile import compile_model
from ssmd_openvino.piecewise import LARGE, SMALL, Function, silu, softplus, step_unit
from ssmd_openvino.xamba import Passes, XambaError

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers' own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Tensors = Mapping[str, NDArray[Any]]
Traced = Callable[..., Any]
Plain = Callable[..., Tensors]
Build = Callable[[Any, Any], Any]  # of the operations and an input: an output

# A product adds up in another order: the largest error, of logits in their standard deviation, of a state in its
# largest value. Measured: 3e-6.
RELATIVE = 1e-5
LENGTH, CAPACITY = 16, 64
SEGMENTS = (4, 8, 16, 32, 64, 100, 256)
ERRORS = {8: 3.4e-2, 16: 7.9e-3, 32: 1.9e-3, 64: 4.5e-4}  # of SiLU
SHARES = {8: 0.5, 16: 0.125, 32: 0.033, 64: 0.0085}  # of a time step up to 0.1, by which softplus is off


def built(build: Build, shape: Sequence[int], kind: Any = np.float32) -> Any:
    """A model of one input "x" and one output "y"."""
    openvino = library.openvino()
    x = openvino.opset13.parameter(list(shape), kind, name="x")
    y = build(openvino.opset13, x.output(0))
    model = openvino.Model([y], [x], "small")
    model.outputs[0].get_tensor().set_names({"y"})
    return model


def ran(model: Any, inputs: Tensors) -> dict[str, NDArray[Any]]:
    """Outputs by name, of two threads and float32."""
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 2}
    compiled = compile_model(library.openvino().Core(), model, "CPU", properties)
    return {port.any_name: array.copy() for port, array in compiled(dict(inputs)).items()}


def rand(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """traced(variant, naive=, length=): a tiny model, converted once; a clone each time."""

    @cache
    def module(variant: str) -> Any:
        from ssmd.authoring.model import author
        from ssmd.families.registry import family_of
        from ssmd.model.source import Source

        source = Source.open(tiny.write_source(tmp_path_factory.mktemp("source"), variant))
        family = family_of(source.config)
        config = family.parse(source.config)
        bound = {name: binding(source) for name, binding in family.bindings(config).items()}
        return author(family, config, bound, CAPACITY)

    @cache
    def once(variant: str, naive: bool, length: int | None) -> Any:
        from ssmd_openvino.convert import converted

        module(variant).naive = naive
        return converted(module(variant), CAPACITY, length)

    return lambda variant, *, naive=False, length=LENGTH: once(variant, naive, length).clone()


@pytest.fixture(scope="module")
def plain(traced: Traced) -> Plain:
    """Return a function that gives a model's outputs without passes, computed once."""

    @cache
    def once(variant: str, **form: Any) -> dict[str, NDArray[Any]]:
        model = traced(variant, **form)
        return ran(model, fed(model))

    return once


def fed(model: Any) -> Tensors:
    """Tokens at position 8, the last five of them pads, and states of random values."""
    rng = np.random.default_rng(0)
    tokens = model.input("tokens").partial_shape[1]
    length = LENGTH if tokens.is_dynamic else tokens.get_length()
    given: dict[str, NDArray[Any]] = {
        "tokens": rng.integers(3, 300, (1, length)).astype(np.int32),
        "pos": np.array([8], np.int32),
        "n_valid": np.array([length - 5], np.int32),
    }
    for port in model.inputs:
        if port.any_name not in given:
            shape = [CAPACITY if d.is_dynamic else d.get_length() for d in port.partial_shape]
            given[port.any_name] = rng.standard_normal(shape).astype(np.float32)
    return given


def changed(found: Tensors, expected: Tensors) -> tuple[float, float]:
    """Errors of the logits, in their standard deviation, and of the worst state, in its largest value."""
    assert found.keys() == expected.keys()
    states = (np.abs(found[n] - x).max() / np.abs(x).max() for n, x in expected.items() if n != "logits")
    logits = np.abs(found["logits"] - expected["logits"]).max() / expected["logits"].std()
    return float(logits), float(max(states))


def test_parse() -> None:
    assert Passes.parse("cumba,reduba,actiba=32") == Passes(True, True, 32)
    assert Passes.parse(" actiba=4, cumba") == Passes(cumba=True, actiba=4)
    assert Passes.parse("reduba").to_json() == {"cumba": False, "reduba": True, "actiba": None}
    assert Passes.parse("actiba=256").actiba == 256


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "a pass is missing"),
        (" , ", "a pass is missing"),
        ("cumba,", "a pass is missing"),
        ("cumba,mumba", "no pass 'mumba'"),
        ("CumBA", "no pass 'CumBA'"),
        ("cumba,reduba,cumba", "cumba is named twice"),
        ("actiba=8,actiba=8", "actiba is named twice"),
        ("cumba=1", "cumba takes no number"),
        ("reduba=", "reduba takes no number"),
        ("actiba", "actiba has no number"),
        ("actiba=", "whole number of segments, not ''"),
        ("actiba=many", "whole number of segments, not 'many'"),
        ("actiba=8.5", "whole number of segments, not '8.5'"),
        ("actiba=-8", "whole number of segments, not '-8'"),
        ("actiba=\u0663\u0662", "whole number of segments, not"),  # digits, but not ours
        ("actiba=3", "actiba=3 is out of range"),
        ("actiba=257", "actiba=257 is out of range"),
        ("actiba=" + "9" * 5000, "whole number of segments"),
    ],
)
def test_parse_says_what_is_wrong_and_what_is_allowed(text: str, what: str) -> None:
    with pytest.raises(XambaError) as raised:
        Passes.parse(text)
    assert what in str(raised.value)
    assert "actiba=N with N segments, 4 to 256" in str(raised.value)


def cumsum(axis: int, exclusive: bool = False, reverse: bool = False) -> Build:
    return lambda op, p: op.cumsum(p, np.int64(axis), exclusive, reverse)


def reduce_sum(*axes: int, keep: bool = False) -> Build:
    return lambda op, p: op.reduce_sum(p, np.array(axes), keep)


@pytest.mark.parametrize(("exclusive", "reverse"), [*itertools.product([False, True], repeat=2)])
def test_cumba_is_a_cumulative_sum_over_any_axis(exclusive: bool, reverse: bool) -> None:
    for shape in ((7,), (3, 7), (2, 3, 4, 5)):
        for axis in range(-len(shape), len(shape)):
            x = rand(*shape)
            model = built(cumsum(axis, exclusive, reverse), shape)
            report = xamba.apply(model, Passes(cumba=True))
            assert report.replaced == {"cumba": 1}
            assert "CumSum" in report.before
            assert "CumSum" not in report.after
            turned = np.flip(x, axis) if reverse else x
            expected = np.cumsum(turned, axis, np.float64) - (turned if exclusive else 0)
            expected = np.flip(expected, axis) if reverse else expected
            np.testing.assert_allclose(ran(model, {"x": x})["y"], expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("keep", [False, True])
def test_reduba_is_a_sum_over_adjacent_axes(keep: bool) -> None:
    for shape in ((7,), (3, 7), (2, 3, 4, 5)):
        rank = len(shape)
        runs = [tuple(range(a, b)) for a in range(rank) for b in range(a + 1, rank + 1)]
        for axes in [*runs, (-1,), (-rank,)]:
            x = rand(*shape)
            model = built(reduce_sum(*axes, keep=keep), shape)
            report = xamba.apply(model, Passes(reduba=True))
            assert report.replaced == {"reduba": 1}
            assert "ReduceSum" not in report.after
            found = ran(model, {"x": x})["y"]
            expected = x.astype(np.float64).sum(axes, keepdims=keep)
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6)


def test_many_batches_are_swapped_not_unrolled() -> None:
    """The NPU's compiler would make a product for each batch; this checks only that the sum is the same."""
    shape = (2, 150, 3, 4, 2)
    x = rand(*shape)
    for build, expected in (
        (cumsum(2), x.cumsum(2, np.float64)),
        (reduce_sum(2), x.sum(2, np.float64)),
        (reduce_sum(2, 3, keep=True), x.sum((2, 3), np.float64, keepdims=True)),
    ):
        model = built(build, shape)
        report = xamba.apply(model, Passes(cumba=True, reduba=True))
        assert report.after["Transpose"] == 2
        products = [n for n in model.get_ops() if n.get_type_name() == "MatMul"]
        assert [n.input_value(1).get_node().get_type_name() for n in products] == ["Constant"]
        np.testing.assert_allclose(ran(model, {"x": x})["y"], expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("build", "kind", "why"),
    [
        (reduce_sum(0, 2), np.float32, "its axes [0, 2] are not adjacent"),
        (reduce_sum(1), np.int32, "it is of type i32"),
        (cumsum(1), np.int32, "it is of type i32"),
        (lambda op, p: op.cumsum(p, op.gather(op.shape_of(p), np.int64(0), np.int64(0))), np.float32, "not constant"),
        (lambda op, p: op.swish(p, np.float32(2)), np.float32, "its beta is not 1"),
        (lambda op, p: op.swish(p, op.reduce_max(p, np.array([0, 1, 2]), False)), np.float32, "its beta is not 1"),
    ],
)
def test_what_no_pass_can_do_stays_and_is_told(build: Build, kind: Any, why: str) -> None:
    model = built(build, (2, 3, 4), kind)
    x = (rand(2, 3, 4) * 10).astype(kind)
    expected = ran(model, {"x": x})["y"]
    report = xamba.apply(model, Passes(True, True, 8))
    assert report.replaced == {"cumba": 0, "reduba": 0, "actiba": 0}
    assert report.before == report.after
    assert [why in left.why for left in report.left] == [True]
    assert report.left[0].operation in report.after
    np.testing.assert_array_equal(ran(model, {"x": x})["y"], expected)


@pytest.mark.parametrize(
    ("shape", "axis", "replaced"),
    [
        ((-1, 3, 4), 0, False),
        ((-1, 3, 4), 1, True),
        ((-1, 3, 4), 2, True),
        ((3, -1), 0, True),
        ((3, -1), 1, False),
        ((3, 4, -1), 0, False),  # 4 and what comes after it would have to become one axis
        ((3, 4, -1), 1, True),
    ],
)
@pytest.mark.parametrize("kind", ["CumSum", "ReduceSum"])
def test_a_dynamic_axis_stays_others_do_not(shape: tuple[int, ...], axis: int, replaced: bool, kind: str) -> None:
    model = built(cumsum(axis) if kind == "CumSum" else reduce_sum(axis), shape)
    report = xamba.apply(model, Passes(cumba=True, reduba=True))
    assert (kind in report.after) is not replaced
    assert sum(report.replaced.values()) == replaced
    told = str(list(shape)).replace("-1", "?").replace(" ", "")
    assert [left.why for left in report.left] == [f"axis {axis} or one after it is dynamic: {told}"] * (not replaced)
    x = rand(*(5 if size < 0 else size for size in shape))
    expected = np.cumsum(x, axis, np.float64) if kind == "CumSum" else x.sum(axis, np.float64)
    np.testing.assert_allclose(ran(model, {"x": x})["y"], expected, rtol=1e-6, atol=2e-6)


def test_names_stay() -> None:
    """Of outputs, which a program finds by name, and of operations; the report goes into a manifest."""

    def build(op: Any, p: Any) -> Any:
        node = op.reduce_sum(op.swish(op.cumsum(p, np.int64(0))), np.array([0]), False)
        node.set_friendly_name("total")
        return node

    model = built(build, (3, 4))
    report = xamba.apply(model, Passes(True, True, 8))
    assert model.outputs[0].any_name == "y"
    assert model.get_results()[0].input_value(0).get_names() == {"y"}
    assert [n.get_friendly_name() for n in model.get_ops() if n.get_friendly_name() == "total"] == ["total"]
    assert report.replaced == {"cumba": 1, "reduba": 1, "actiba": 1}
    told = json.loads(json.dumps(report.to_json()))
    assert told["before"] == {"CumSum": 1, "ReduceSum": 1, "Swish": 1}
    assert told["after"]["MatMul"] == 2
    assert not {"CumSum", "ReduceSum", "Swish"} & told["after"].keys()
    assert told["left"] == []


def activation(function: Function) -> Build:
    return lambda op, p: (
        op.swish(p, op.convert(np.float32(1), p.get_element_type())) if function is silu else op.softplus(p)
    )


def piecewise(function: Function, segments: int, x: NDArray[Any]) -> NDArray[Any]:
    """Evaluate ActiBA's form of the function, on the CPU."""
    model = built(activation(function), x.shape, x.dtype)
    assert xamba.apply(model, Passes(actiba=segments)).replaced == {"actiba": 1}
    return ran(model, {"x": x})["y"]


def test_errors_of_silu() -> None:
    """Within 20 % of what interpolation at such knots gives over a fixed range; a range that suits is better yet."""
    x = np.linspace(-30, 30, 120_001, dtype=np.float32)
    errors = {n: np.abs(piecewise(silu, n, x) - silu(x.astype(np.float64))).max() for n in SEGMENTS}
    for segments, limit in ERRORS.items():
        assert errors[segments] < 1.2 * limit, errors
    assert errors[4] < 8e-2
    assert errors[100] < 2e-4
    assert errors[256] < 4e-5


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_small_time_steps_err_by_a_share_and_never_become_0(kind: Any) -> None:
    """From the time steps that trained Mambas begin with, 0.001 to 0.1, down to the smallest that there is."""
    least = float(np.log(np.expm1(SMALL)))
    x = np.linspace(least, 0, 20_001).astype(kind)
    exact = softplus(x.astype(np.float64))
    rounding = 0.0 if kind is np.float32 else 8e-3  # of x: at 8 float16 has steps of 2^-7
    for segments in SEGMENTS:
        found = piecewise(softplus, segments, x)
        assert found.min() > 0
        if segments in SHARES:
            assert (np.abs(found / exact - 1)[exact <= 0.1]).max() < SHARES[segments] + rounding
            far = (np.abs(found - exact) / step_unit(x.astype(np.float64)))[exact > 0.1]
            assert far.max() < SHARES[segments] + 8 * rounding


@pytest.mark.parametrize("segments", [4, 7, 65])  # odd numbers have a segment over zero
@pytest.mark.parametrize("function", [silu, softplus])
def test_asymptotes_are_exact_and_nothing_jumps(function: Function, segments: int) -> None:
    far = np.array([16, 17.3, 100, 1e4, 3e38], np.float32)
    np.testing.assert_array_equal(piecewise(function, segments, far), far)
    np.testing.assert_array_equal(piecewise(function, segments, -far), 0 * far)
    x = np.linspace(-20, 20, 100_001, dtype=np.float32)
    slopes = np.diff(piecewise(function, segments, x)) / np.diff(x.astype(np.float64))
    low, high = (-0.12, 1.12) if function is silu else (-0.01, 1.01)  # of f itself: -0.0998 and 1.0998, 0 and 1
    assert low < slopes.min()
    assert slopes.max() < high


@pytest.mark.parametrize("function", [silu, softplus])
def test_an_odd_number_of_segments_lies_between_its_neighbours(function: Function) -> None:
    x = np.linspace(-20, 20, 100_001, dtype=np.float32)
    errors = [np.abs(piecewise(function, n, x) - function(x.astype(np.float64))).max() for n in (8, 9, 10)]
    assert errors == sorted(errors, reverse=True)


def test_a_model_of_float16_keeps_its_type() -> None:
    x = np.linspace(-30, 30, 5001, dtype=np.float16)
    found = piecewise(silu, 32, x)
    assert found.dtype == np.float16
    exact = silu(x.astype(np.float64))
    assert (np.abs(found - exact) < 2.3e-3 + np.abs(exact) * 2**-10).all()


def stable(op: Any, p: Any) -> Any:
    """softplus(x) as relu(x) + softplus(-|x|), which is what fusing makes of a form that cannot overflow."""
    return op.add(op.relu(p), op.softplus(op.multiply(op.abs(p), np.float32(-1))))


def with_another_reader(op: Any, p: Any) -> Any:
    part = op.softplus(op.multiply(op.abs(p), np.float32(-1)))
    return op.concat([op.add(op.relu(p), part), part], 0)


def of_another_input(op: Any, p: Any) -> Any:
    return op.add(op.relu(op.add(p, np.float32(1))), op.softplus(op.multiply(op.abs(p), np.float32(-1))))


@pytest.mark.parametrize(("build", "whole"), [(stable, True), (with_another_reader, False), (of_another_input, False)])
def test_softplus_is_replaced_as_a_whole_where_it_is_one(build: Build, whole: bool) -> None:
    x = np.linspace(-20, 20, 10_001, dtype=np.float32)
    model = built(build, x.shape)
    expected = ran(model, {"x": x})["y"]
    report = xamba.apply(model, Passes(actiba=32))
    assert report.replaced == {"actiba": 1}
    assert "SoftPlus" not in report.after
    assert report.after["Abs"] == (1 if whole else 2)
    assert np.abs(ran(model, {"x": x})["y"] - expected).max() < SHARES[32] * LARGE


@pytest.mark.parametrize("passes", ["cumba", "reduba", pytest.param("cumba,reduba", marks=pytest.mark.full)])
def test_sums_of_a_naive_mamba2_become_products(traced: Traced, plain: Plain, passes: str) -> None:
    model = traced("mamba2-groups", naive=True, length=64)
    report = xamba.apply(model, Passes.parse(passes))
    layers = 3
    assert (report.before["CumSum"], report.before["ReduceSum"]) == (3 * layers, 6 * layers)
    assert report.after.get("CumSum", 0) == (0 if "cumba" in passes else 3 * layers)
    assert report.after.get("ReduceSum", 0) == (0 if "reduba" in passes else 6 * layers)
    assert report.after["MatMul"] == report.before["MatMul"] + sum(report.replaced.values())
    assert report.left == ()
    assert max(changed(ran(model, fed(model)), plain("mamba2-groups", naive=True, length=64))) < RELATIVE


@pytest.mark.parametrize(
    ("variant", "activations", "tried"),
    [
        pytest.param("granite", {"Swish": 10, "SoftPlus": 3}, (8, 16, 64), marks=pytest.mark.full),
        pytest.param("llama", {"Swish": 3}, (8, 16, 32, 64), marks=pytest.mark.full),
        ("mamba", {"Swish": 6, "SoftPlus": 3}, (8, 64)),
    ],
)
def test_actiba_replaces_all_activations_more_segments_err_less(
    traced: Traced, plain: Plain, variant: str, activations: dict[str, int], tried: tuple[int, ...]
) -> None:
    """softplus and SiLU as the modules write them: of what convert_model makes of their parts nothing may be left."""
    errors = []
    for segments in tried:
        model = traced(variant)
        report = xamba.apply(model, Passes(actiba=segments))
        assert {kind: report.before.get(kind) for kind in activations} == activations
        assert not {"Swish", "SoftPlus", "Sigmoid", "Log"} & report.after.keys()
        assert report.replaced == {"actiba": sum(activations.values())}
        assert report.after["Abs"] == report.after["Relu"] == sum(activations.values())
        assert report.left == ()
        errors.append(changed(ran(model, fed(model)), plain(variant)))
    for earlier, later in itertools.pairwise(errors):
        assert later[0] < earlier[0], errors
        assert later[1] < earlier[1], errors
    assert 0 < errors[-1][0] < errors[0][0] / 10, errors
    assert errors[-1][0] < 0.03, errors


@pytest.mark.parametrize(
    "segments", [pytest.param(n, marks=[] if n in (4, 256) else [pytest.mark.full]) for n in SEGMENTS]
)
def test_every_number_of_segments_compiles_within_a_model(traced: Traced, plain: Plain, segments: int) -> None:
    """Beside its neighbours, which the CPU plugin merges with it into one kernel, if it can."""
    model = traced("falcon-h1-out-bias")
    assert xamba.apply(model, Passes(actiba=segments)).replaced == {"actiba": 4}
    error = changed(ran(model, fed(model)), plain("falcon-h1-out-bias"))[0]
    assert 1 < error * segments**2 < 15  # 4.6 to 7.4


def test_an_open_model_has_activations_only(traced: Traced, plain: Plain) -> None:
    model = traced("granite", length=None)
    report = xamba.apply(model, Passes(True, True, 16))
    assert report.replaced == {"cumba": 0, "reduba": 0, "actiba": 13}
    assert report.left == ()
    assert {"CumSum", "ReduceSum"}.isdisjoint(report.before)  # its convolutions are products and additions
    assert 0 < changed(ran(model, fed(model)), plain("granite"))[0] < 0.1


def test_bodies_of_loops_are_rewritten(traced: Traced, plain: Plain) -> None:
    model = traced("mamba", length=None)
    report = xamba.apply(model, Passes(reduba=True))
    assert (report.before["ReduceSum"], report.after.get("ReduceSum", 0)) == (3, 0)  # one in the loop of each layer
    assert max(changed(ran(model, fed(model)), plain("mamba"))) < RELATIVE


def test_a_rewritten_model_is_saved_and_read(traced: Traced, tmp_path: Path) -> None:
    openvino = library.openvino()
    model = traced("mamba2-groups", naive=True, length=64)
    given = fed(model)
    xamba.apply(model, Passes(True, True, 8))
    expected = ran(model, given)
    openvino.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
    found = ran(openvino.Core().read_model(tmp_path / "model.xml"), given)
    assert max(changed(found, expected)) < RELATIVE
