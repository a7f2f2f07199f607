"""The evaluator of Core ML packages: states, several functions, what a prediction refuses, and damaged packages."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("coremltools") is None:
    pytest.skip("coremltools is not installed", allow_module_level=True)

from mil import schema, stateful_cases
from mil.damages import DAMAGES, MODEL, WEIGHTS, changed, edited, other_shape
from mil.model import Model
from mil.operations import Unsupported
from mil.program import round_to
from mil.schema import quiet
from mil.weights import Array, DamagedPackage, elements

pytestmark = [pytest.mark.full, pytest.mark.evaluator]  # as test_mil.py
# Relative to the largest element: float16 rounds the weights and some ten operations in a row by up to 2**-11 each.
# Measured after five predictions: 3e-4 in a state of up to 9, 1.2e-3 in the output, to which a linear layer adds those.
TOLERANCE = 3e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """prefill.mlpackage, decode.mlpackage and both.mlpackage."""
    folder = tmp_path_factory.mktemp("stateful")
    with quiet():
        stateful_cases.packages(folder)
    return folder


def taken(length: int = 1, first: int = 3, scale: float = 1.5) -> dict[str, Array]:
    ids = np.arange(first, first + length, dtype=np.int32).reshape(1, length)
    return {"ids": ids, "scale": np.array([scale], np.float32)}


# ---- states and functions


def test_a_stateful_model_goes_on_as_torch_does(folder: Path) -> None:
    import torch

    models = {name: Model(folder / "both.mlpackage", name) for name in stateful_cases.LENGTHS}
    state, module = models["prefill"].make_state(), stateful_cases.module()
    count = 0
    for turn, name in enumerate(["prefill", "decode", "decode", "prefill", "decode"]):
        data = taken(stateful_cases.LENGTHS[name], first=7 * turn)
        with torch.no_grad():
            y, twice = module(*(torch.from_numpy(array) for array in data.values()))
        got = models[name].predict(data, state)
        count += stateful_cases.LENGTHS[name]
        sums = module.sums.numpy()
        np.testing.assert_allclose(got["y"], y.numpy(), rtol=0, atol=TOLERANCE)
        assert got["twice"].item() == twice.item() == 2 * count
        np.testing.assert_allclose(state.read_state("sums"), sums, rtol=0, atol=TOLERANCE * np.abs(sums).max())
        assert state.read_state("count").item() == count


def test_a_state_is_saved_and_restored_exactly(folder: Path) -> None:
    model = Model(folder / "both.mlpackage")
    first, second = model.make_state(), model.make_state()
    for token in range(5):
        model.predict(taken(first=token), first)
    for name in stateful_cases.STATES:
        second.write_state(name, first.read_state(name))
    ours, theirs = (model.predict(taken(), state) for state in (first, second))
    np.testing.assert_array_equal(ours["y"], theirs["y"])
    fresh = model.predict(taken(), model.make_state())
    assert np.abs(fresh["y"] - ours["y"]).max() > 10 * TOLERANCE


def test_float16_rounds_and_overflows_between_the_operations(folder: Path) -> None:
    model = Model(folder / "both.mlpackage")
    state = model.make_state()
    state.write_state("count", np.array([[2048]], np.float32))
    model.predict(taken(scale=6e4), state)
    assert state.read_state("count").item() == 2048  # 2049 lies between two values of float16
    sums = stateful_cases.module().embedding.weight[3].detach().numpy() * 6e4
    np.testing.assert_array_equal(np.isinf(state.read_state("sums")[0]), np.abs(sums) > 65504)
    assert 0 < np.isinf(state.read_state("sums")).sum() < 8


def test_the_functions_share_constants_and_their_bytes(folder: Path) -> None:
    prefill, decode = (Model(folder / "both.mlpackage", name) for name in ("prefill", "decode"))
    assert prefill.package is decode.package
    arrays = [
        {id(c.value) for c in model.program.constants.values() if c.blob is not None} for model in (prefill, decode)
    ]
    assert arrays[0] == arrays[1]
    assert len(arrays[0]) == 2
    size = 2 * (64 * 8 + 8 * 8)  # the bias of 8 is small enough to lie in the program
    assert prefill.weight_bytes == decode.weight_bytes == size
    assert (folder / "both.mlpackage" / WEIGHTS).stat().st_size < 2 * size
    assert prefill.operations["write_state"] == 2
    assert prefill.operations["linear"] == 1


def test_the_default_function_and_those_there_are(folder: Path) -> None:
    assert Model(folder / "both.mlpackage").function_name == "decode"
    assert Model(str(folder / "prefill.mlpackage")).function_name == "main"
    with pytest.raises(ValueError, match=r"no function 'main': it has decode, prefill"):
        Model(folder / "both.mlpackage", "main")


def test_outputs_and_read_states_are_new_float32_arrays(folder: Path) -> None:
    model = Model(folder / "both.mlpackage")
    state, data = model.make_state(), taken()
    got = model.predict(data, state)
    assert {array.dtype.name for array in got.values()} == {"float32"}
    kept, sums = got["y"].copy(), state.read_state("sums")
    assert sums.dtype == np.float32
    got["y"][:] = sums[:] = 9
    data["scale"][:] = 0
    assert state.read_state("sums").max() < 9
    assert model.predict(taken(), model.make_state())["y"].tolist() == kept.tolist()


# ---- what is refused


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


REFUSED: dict[str, tuple[Callable[[dict[str, Array]], dict[str, Any]], type[Exception], str]] = {
    "a missing input": (lambda data: {"ids": data["ids"]}, RuntimeError, "'scale' of decode is missing"),
    "another name": (lambda data: data | {"position": data["ids"]}, KeyError, "position: no such input"),
    "another shape": (lambda data: data | {"ids": data["ids"][0]}, RuntimeError, r"\(1, 1\), not \(1,\)"),
    "int64": (lambda data: data | {"ids": data["ids"].astype(np.int64)}, RuntimeError, "int32, not int64"),
    "float ids": (lambda data: data | {"ids": data["ids"].astype(np.float32)}, RuntimeError, "int32, not float32"),
    "integer scale": (lambda data: data | {"scale": data["ids"][0]}, RuntimeError, "fp32, not int32"),
    "a list": (lambda data: data | {"scale": [1.0]}, RuntimeError, "fp32, not list"),
    "read-only": (lambda data: data | {"scale": read_only(data["scale"])}, RuntimeError, "read-only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_prediction_refuses(name: str, folder: Path) -> None:
    change, error, message = REFUSED[name]
    model = Model(folder / "both.mlpackage")
    with pytest.raises(error, match=message):
        model.predict(change(taken()), model.make_state())


def test_a_prediction_refuses_a_batch_and_takes_other_floats(folder: Path) -> None:
    model = Model(folder / "both.mlpackage")
    with pytest.raises(TypeError, match="dict, not list"):
        model.predict([taken()], model.make_state())  # type: ignore[arg-type]
    expected = model.predict(taken(), model.make_state())["y"]
    for dtype in (np.float16, np.float64):
        data = taken() | {"scale": np.array([1.5], dtype)}
        np.testing.assert_array_equal(model.predict(data, model.make_state())["y"], expected)


def test_a_prediction_refuses_a_state_that_is_not_its_own(folder: Path) -> None:
    model, other = Model(folder / "both.mlpackage"), Model(folder / "decode.mlpackage")
    with pytest.raises(RuntimeError, match="must be an MLState"):
        model.predict(taken())
    with pytest.raises(RuntimeError, match="of another package"):
        model.predict(taken(), other.make_state())


def test_a_state_refuses(folder: Path) -> None:
    state = Model(folder / "both.mlpackage").make_state()
    good = np.ones((1, 8), np.float32)
    with pytest.raises(RuntimeError, match="no state 'sum': there are count, sums"):
        state.read_state("sum")
    with pytest.raises(RuntimeError, match="no state 'sum'"):
        state.write_state("sum", good)
    with pytest.raises(RuntimeError, match="not from float16"):
        state.write_state("sums", good.astype(np.float16))
    with pytest.raises(RuntimeError, match="not from list"):
        state.write_state("sums", [[1.0] * 8])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"shape \(1, 8\), not \(8,\)"):
        state.write_state("sums", good[0])
    with pytest.raises(RuntimeError, match="read-only"):
        state.write_state("sums", read_only(good.copy()))
    assert not state.read_state("sums").any()
    good[0, :3] = 1 / 3, 1, 1e5
    state.write_state("sums", good)
    stored = state.read_state("sums")[0]
    assert stored[0] == np.float32(np.float16(1 / 3))
    assert stored[2] == np.inf


def test_nobody_touches_a_state_while_a_prediction_has_it(folder: Path) -> None:
    model = Model(folder / "both.mlpackage")
    state, value = model.make_state(), np.ones((1, 8), np.float32)
    touches: list[Callable[[], Any]] = [
        lambda: state.read_state("sums"),
        lambda: state.write_state("sums", value),
        lambda: model.predict(taken(), state),
    ]
    with state.using():
        for touch in touches:
            with pytest.raises(RuntimeError, match="a prediction on this state runs"):
                touch()
    with pytest.raises(IndexError, match="into a dimension of 64"):
        model.predict(taken(first=64), state)  # a prediction that fails gives the state back
    for touch in touches:
        touch()


def test_a_written_value_is_no_output(tmp_path: Path) -> None:
    """Core ML crashes on loading a package whose output is the very value that a state is set to."""
    path = tmp_path / "aliased.mlpackage"
    with quiet():
        stateful_cases.convert(1).save(str(path))
    with changed(path) as model:
        (block,) = model.mlProgram.functions["main"].block_specializations.values()
        (write,) = [o for o in block.operations if o.type == "write_state" and "sums" in str(o.inputs["input"])]
        block.outputs[0] = write.inputs["data"].arguments[0].name
        model.description.output[0].name = block.outputs[0]
        model.description.output[0].type.multiArrayType.dataType = schema.features.ArrayFeatureType.FLOAT16
    with pytest.raises(Unsupported, match="is an output as well"):
        Model(path)


def test_values_are_rounded_to_the_declared_type() -> None:
    values = np.array([2049, 1 / 3, 70000, -1e-9], np.float32)
    with np.errstate(over="ignore"):
        assert round_to("fp16", values).tolist() == [2048, float(np.float16(1 / 3)), np.inf, -0.0]
    assert round_to("fp32", values) is values
    assert round_to("int32", np.array([3])).dtype == np.int32
    for dtype, array in (("int32", values), ("bool", values), ("fp16", np.array([1])), ("int32", values > 0)):
        with pytest.raises(TypeError, match=f"values of .* as {dtype}"):
            round_to(dtype, array)


def test_elements_smaller_than_a_byte_lie_from_the_lowest_bit_up() -> None:
    raw = np.array([0x1F, 0x8E], np.uint8)
    assert elements(raw, "int4", 4).tolist() == [-1, 1, -2, -8]
    assert elements(raw, "uint4", 3).tolist() == [15, 1, 14]
    assert elements(raw, "uint3", 5).tolist() == [7, 3, 0, 7, 0]
    with pytest.raises(DamagedPackage, match="5 elements of uint4 take 3 bytes, not 2"):
        elements(raw, "uint4", 5)


# ---- damage


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told(name: str, folder: Path, tmp_path: Path) -> None:
    damage, error, message = DAMAGES[name]
    path = tmp_path / "damaged.mlpackage"
    shutil.copytree(folder / "decode.mlpackage", path)
    Model(path)
    damage(path)
    with pytest.raises(error, match=message):
        Model(path)


def test_another_shape_than_the_declared_one_is_told(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.mlpackage"
    shutil.copytree(folder / "decode.mlpackage", path)
    edited(other_shape)(path)
    model = Model(path)
    with pytest.raises(DamagedPackage, match=r"tanh .* of shape \(1, 8\), but declares \(1, 9\)"):
        model.predict(taken(), model.make_state())


def test_a_manifest_may_not_lead_out_of_the_package(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.mlpackage"
    shutil.copytree(folder / "decode.mlpackage", path)
    manifest = json.loads((path / "Manifest.json").read_text())
    manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = "../../decode.mlpackage/" + str(MODEL)
    (path / "Manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedPackage, match="lies outside"):
        Model(path)
