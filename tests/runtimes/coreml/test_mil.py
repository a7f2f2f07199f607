"""The evaluator of Core ML packages gives what coremltools' own inference, torch and coremltools' decompression give.

Tolerances, relative to the largest element of the expected values:
  float32  1e-6: sums in another order, an exponential of another library. Measured: 5e-7.
  float16  an operation by itself 1e-3: its operands are the same, so that only its result is rounded, by at most half
           of 2**-10. A torch case 2e-3: it is up to ten operations, each of which rounds. Measured: 1.1e-3.
Compressed weights are compared bit by bit: no sum is involved.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("coremltools") is None:
    pytest.skip("coremltools is not installed", allow_module_level=True)

from mil import builder_cases, compression_cases, torch_cases
from mil.compression_cases import COMPRESSIONS, CONSTEXPRS, IDS, WEIGHT_BYTES, compressed
from mil.model import Model
from mil.operations import DEFINITIONS, Unsupported, bind
from mil.package import Constant, Operation, TensorType
from mil.schema import quiet
from mil.weights import Array

# They test the evaluator, which is the tests' own: run with it (scripts/test --changed) and in full. By default it is
# held against transformers, with packages of every family (tests/contract/test_parity.py).
pytestmark = [pytest.mark.full, pytest.mark.evaluator]
PRECISIONS = ("float32", "float16")
TRACED = (("float32", "iOS18"), ("float16", "iOS18"), ("float16", "iOS17"))


def copies(arrays: dict[str, Array]) -> dict[str, Array]:
    """The same values in arrays of one's own, which is what a prediction takes."""
    return {name: array.copy() for name, array in arrays.items()}


def check(got: Array, expected: Array, tolerance: float) -> None:
    assert got.shape == expected.shape
    scale = max(1e-3, float(np.abs(expected).max()))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale)


# ---- operations one by one, against coremltools' value inference


@dataclass(frozen=True)
class Evaluated:
    """A package's model, and what it gave."""

    model: Model
    outputs: dict[str, Array]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evaluated]:
    """By precision."""
    folder, models = tmp_path_factory.mktemp("built"), {}
    for precision in PRECISIONS:
        with quiet():
            builder_cases.package(folder / f"{precision}.mlpackage", precision)
        model = Model(folder / f"{precision}.mlpackage")
        models[precision] = Evaluated(model, model.predict(copies(builder_cases.OPERANDS)))
    return models


@pytest.fixture(scope="module")
def inferred() -> dict[str, list[Array]]:
    with quiet():
        return builder_cases.inferred()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", builder_cases.CASES)
def test_an_operation_gives_what_coremltools_infers(
    case: str, precision: str, built: dict[str, Evaluated], inferred: dict[str, list[Array]]
) -> None:
    for index, expected in enumerate(inferred[case]):
        got = built[precision].outputs[f"out_{case}_{index}"]
        check(got, expected.astype(np.float32), 1e-6 if precision == "float32" else 1e-3)


# ---- what models do, against torch


@pytest.fixture(scope="module")
def from_torch() -> dict[str, Array]:
    with quiet():
        return torch_cases.expected(torch_cases.cases())


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Evaluated]:
    """By precision and target."""
    folder, models = tmp_path_factory.mktemp("traced"), {}
    for precision, target in TRACED:
        path = folder / f"{precision}-{target}.mlpackage"
        with quiet():
            torch_cases.package(path, torch_cases.cases(), precision, target)
        model = Model(path)
        models[precision, target] = Evaluated(model, model.predict(copies(torch_cases.OPERANDS)))
    return models


@pytest.mark.parametrize(("precision", "target"), TRACED)
@pytest.mark.parametrize("case", torch_cases.cases())
def test_a_traced_module_gives_what_torch_gives(
    case: str, precision: str, target: str, traced: dict[tuple[str, str], Evaluated], from_torch: dict[str, Array]
) -> None:
    got, expected = traced[precision, target].outputs[f"out_{case}"], from_torch[case]
    assert got.dtype == expected.dtype
    check(got, expected, 1e-6 if precision == "float32" else 2e-3)


# ---- compressed constants, against coremltools' decompression


@pytest.fixture(scope="module")
def uncompressed() -> dict[str, Any]:
    with quiet():
        return {target: compression_cases.converted(target) for target in ("iOS17", "iOS18")}


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressed_weights_are_what_coremltools_makes_of_them(
    name: str, uncompressed: dict[str, Any], tmp_path: Path
) -> None:
    target, kind, parameters = COMPRESSIONS[name]
    with quiet():
        import coremltools.optimize.coreml as cto

        small = compressed(uncompressed[target], kind, parameters)
        small.save(str(tmp_path / "small.mlpackage"))
        cto.decompress_weights(small).save(str(tmp_path / "whole.mlpackage"))
    model, whole = Model(tmp_path / "small.mlpackage"), Model(tmp_path / "whole.mlpackage")
    constants = [o for o in small._mil_program.functions["main"].operations if o.op_type.startswith("constexpr")]
    assert sum(operation.op_type == CONSTEXPRS[target, kind] for operation in constants) >= 3
    for operation in constants:
        value = None if parameters.get("enable_per_channel_scale") else operation.materialized_val_inference()
        if value is not None:
            np.testing.assert_array_equal(model.program.constants[operation.outputs[0].name].value, value)
    got, expected = (m.predict({"ids": IDS.copy()})["y"] for m in (model, whole))
    np.testing.assert_array_equal(got, expected)
    assert model.weight_bytes < whole.weight_bytes == WEIGHT_BYTES


# ---- what no inference covers


def evaluate(type_: str, result: TensorType, **inputs: Any) -> Any:
    """An operation on constants, declared to give `result`; a list or tuple is a list of tensors."""

    def constant(value: Any) -> Constant:
        if isinstance(value, str):
            return Constant(TensorType("string", ()), value, value)
        array = np.asarray(value)
        dtype = {"f": "fp32", "i": "int32", "b": "bool", "u": "uint8"}[array.dtype.kind]
        return Constant(TensorType(dtype, array.shape), array, id(array))

    operands = {
        name: tuple(map(constant, value)) if isinstance(value, tuple) else (constant(value),)
        for name, value in inputs.items()
    }
    bound = bind(Operation(type_, "tested", operands, (("y", result),), None), {}, {})
    return bound.run(*(operand and operand.value for operand in bound.operands))  # type: ignore[union-attr]


def test_the_examples_of_the_documentation() -> None:
    first, second = np.arange(1, 7, dtype=np.float32).reshape(3, 2), np.arange(7, 13, dtype=np.float32).reshape(3, 2)
    in_turn = evaluate("concat", TensorType("fp32", (6, 2)), values=(first, second), axis=0, interleave=True)
    assert in_turn.tolist() == [[1, 2], [7, 8], [3, 4], [9, 10], [5, 6], [11, 12]]
    indices = np.array([[2, 3], [3, 0], [1, 0], [3, 0], [2, 1], [0, 3]], np.uint8)
    tables = np.array([[1, 5, 9, 13], [2, 10, 18, 26]], np.float32).reshape(2, 1, 4, 1)
    dense = evaluate("constexpr_lut_to_dense", TensorType("fp32", (6, 2)), indices=indices, lut=tables)
    assert dense.tolist() == [[9, 13], [13, 1], [5, 1], [26, 2], [18, 10], [2, 26]]
    indices = np.array([[[0, 0], [1, 0]], [[1, 1], [0, 0]]], np.uint8)
    vectors = np.array([[1, 2, 3], [-1, -2, -3]], np.float32).reshape(1, 1, 1, 2, 3)
    along = {}
    for axis, sizes in {1: (2, 6, 2), 2: (2, 2, 6)}.items():
        result = TensorType("fp32", sizes)
        dense = evaluate("constexpr_lut_to_dense", result, indices=indices, lut=vectors, vector_axis=axis)
        along[axis] = dense.tolist()
    assert along[1][0] == [[1, 1], [2, 2], [3, 3], [-1, 1], [-2, 2], [-3, 3]]
    assert along[2] == [
        [[1, 2, 3, 1, 2, 3], [-1, -2, -3, 1, 2, 3]],
        [[-1, -2, -3, -1, -2, -3], [1, 2, 3, 1, 2, 3]],
    ]
    shaped = evaluate(
        "reshape", TensorType("fp32", (1, 1, 2, 50)), x=np.zeros((2, 50), np.float32), shape=[1, 0, -1, 0]
    )
    assert shaped.shape == (1, 1, 2, 50)


def test_cumsum_conv_padding_and_scatter_work_as_documented() -> None:
    row, four = TensorType("fp32", (3,)), TensorType("fp32", (1, 1, 4))
    x = np.array([1, 2, 3], np.float32)
    assert evaluate("cumsum", row, x=x, exclusive=True).tolist() == [0, 1, 3]
    assert evaluate("cumsum", row, x=x, exclusive=True, reverse=True).tolist() == [5, 3, 0]
    x = np.array([[[1, 2, 3, 4]]], np.float32)
    weight = np.array([[[1, 10]]], np.float32)
    padded = {kind: evaluate("conv", four, x=x, weight=weight, pad_type=kind) for kind in ("same", "same_lower")}
    assert padded["same"].tolist() == [[[21, 32, 43, 4]]]
    assert padded["same_lower"].tolist() == [[[10, 21, 32, 43]]]
    data, updates = np.arange(1, 7, dtype=np.float32).reshape(2, 3), np.arange(5, 11, dtype=np.float32).reshape(2, 3)
    scattered = {
        mode: evaluate("scatter", TensorType("fp32", (2, 3)), data=data, indices=[1, 0], updates=updates, mode=mode)
        for mode in ("add", "sub", "mul", "max", "min", "update")
    }
    swapped = updates[::-1]
    expected = {"sub": data - swapped, "mul": data * swapped, "max": swapped, "min": data, "update": swapped}
    assert scattered.pop("add").tolist() == [[9, 11, 13], [9, 11, 13]]
    assert {mode: array.tolist() for mode, array in scattered.items()} == {k: v.tolist() for k, v in expected.items()}


X = np.ones((2, 3, 4), np.float32)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "another input name": (lambda: evaluate("relu", TensorType("fp32", (2, 3, 4)), x=X, alpha=1.0), "alpha"),
    "no such operation": (lambda: evaluate("reluu", TensorType("fp32", (2, 3, 4)), x=X), "reluu 'tested' is unknown"),
    "a parameter is missing": (lambda: evaluate("transpose", TensorType("fp32", (4, 3, 2)), x=X), "has no perm"),
    "a tensor is missing": (lambda: evaluate("add", TensorType("fp32", (2, 3, 4)), x=X), "0 operands as y"),
    "types that differ": (lambda: evaluate("add", TensorType("fp32", (1,)), x=X, y=[1]), "operands of one type"),
    "a type not taken": (lambda: evaluate("exp", TensorType("int32", (1,)), x=[1]), "which it does not take"),
    "another type given": (lambda: evaluate("exp", TensorType("int32", (1,)), x=X), "is declared to give int32"),
    "an unknown equation": (
        lambda: evaluate("einsum", TensorType("fp32", (1,)), values=(X, X), equation="abc,abd->acd"),
        "'abc,abd->acd'",
    ),
    "an unknown mode": (lambda: evaluate("gelu", TensorType("fp32", (2, 3, 4)), x=X, mode="FAST"), "'FAST'"),
    "an unknown padding": (
        lambda: evaluate("conv", TensorType("fp32", (2, 1, 4)), x=X, weight=X[:1], pad_type="wide"),
        "'wide'",
    ),
    "a clip without a span": (lambda: evaluate("clip", TensorType("fp32", (1,)), x=X, alpha=1.0, beta=1.0), "alpha"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_is_an_error_that_names_it(name: str) -> None:
    run, message = WRONG[name]
    with pytest.raises(Unsupported, match=message):
        run()


def test_an_index_outside_is_an_error() -> None:
    for index in (-1, 3):
        with pytest.raises(IndexError, match="into a dimension of 3"):
            evaluate("gather", TensorType("fp32", (2, 1, 4)), x=X, indices=[index], axis=1)


def test_every_operation_that_is_defined_is_checked(
    built: dict[str, Evaluated], traced: dict[tuple[str, str], Evaluated]
) -> None:
    models = [evaluated.model for evaluated in (*built.values(), *traced.values())]
    checked = {type_ for model in models for type_ in model.operations} | set(CONSTEXPRS.values())
    assert DEFINITIONS.keys() - checked == set()
