"""Sums of weighted rows as additions: which are changed, and the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray

from ssmd_litert.modelfile import Edited, edit
from ssmd_litert.summed import LEAST, add_up

_Op, _Kind, _Type = schema.BuiltinOperator, schema.BuiltinOptions, schema.TensorType
PARTS, CHANNELS = 4, 24


def model(file: Path, rows: int, *, told: bool = False) -> None:
    """The sum over the first axis of PARTS inputs (1, rows, CHANNELS), each times its row of a constant. told: the
    product is an output too."""
    import flatbuffers

    whole, graph = schema.ModelT(), schema.SubGraphT()
    whole.version, whole.description, whole.operatorCodes, whole.subgraphs = 3, "", [], [graph]
    weights = np.random.default_rng(1).standard_normal((PARTS, 1, CHANNELS), np.float32)
    whole.buffers = [schema.BufferT() for _ in range(3)]
    whole.buffers[1].data = np.frombuffer(weights.tobytes(), np.uint8)
    whole.buffers[2].data = np.frombuffer(np.zeros(1, np.int32).tobytes(), np.uint8)
    graph.tensors, graph.operators = [], []

    def tensor(shape: tuple[int, ...], kind: int = _Type.FLOAT32, buffer: int = 0) -> int:
        made = schema.TensorT()
        made.shape, made.type, made.buffer, made.name = np.array(shape, np.int32), kind, buffer, b"tensor"
        graph.tensors.append(made)
        return len(graph.tensors) - 1

    def operator(code: int, inputs: list[int], shape: tuple[int, ...], options: Any, kind: int) -> int:
        known, made = schema.OperatorCodeT(), schema.OperatorT()
        known.builtinCode, known.deprecatedBuiltinCode, known.version = code, code, 1
        whole.operatorCodes.append(known)
        made.opcodeIndex, made.inputs = len(whole.operatorCodes) - 1, np.array(inputs, np.int32)
        made.builtinOptions, made.builtinOptionsType = options, kind
        made.outputs = np.array([tensor(shape)], np.int32)
        graph.operators.append(made)
        return len(graph.tensors) - 1

    inputs = [tensor((1, rows, CHANNELS)) for _ in range(PARTS)]
    constants = tensor((PARTS, 1, CHANNELS), buffer=1), tensor((1,), _Type.INT32, 2)
    joining, summing = schema.ConcatenationOptionsT(), schema.ReducerOptionsT()
    joined = operator(_Op.CONCATENATION, inputs, (PARTS, rows, CHANNELS), joining, _Kind.ConcatenationOptions)
    product = operator(_Op.MUL, [joined, constants[0]], (PARTS, rows, CHANNELS), schema.MulOptionsT(), _Kind.MulOptions)
    total = operator(_Op.SUM, [product, constants[1]], (rows, CHANNELS), summing, _Kind.ReducerOptions)
    if told:
        negative = operator(_Op.ABS, [product], (PARTS, rows, CHANNELS), None, 0)
        graph.outputs = np.array([total, negative], np.int32)
    else:
        graph.outputs = np.array([total], np.int32)
    graph.inputs, whole.signatureDefs, whole.metadata = np.array(inputs, np.int32), [], []
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(whole.Pack(builder), b"TFL3")
    file.write_bytes(bytes(builder.Output()))


def computed(file: Path) -> NDArray[np.float32]:
    interpreter = Interpreter(model_path=str(file))
    interpreter.allocate_tensors()
    noise = np.random.default_rng(2)
    for told in interpreter.get_input_details():
        interpreter.set_tensor(told["index"], noise.standard_normal(told["shape"], np.float32) * 1e3)
    interpreter.invoke()
    found: NDArray[np.float32] = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    return found


def codes(file: Path) -> list[int]:
    edited = Edited(file)
    return [edited.code(o) for graph in edited.model.subgraphs for o in graph.operators]


@pytest.mark.parametrize("rows", [LEAST, 100, 1024])
def test_the_additions_have_the_same_bits(rows: int, tmp_path: Path) -> None:
    file = tmp_path / "model.tflite"
    model(file, rows)
    before = computed(file)
    edit(file, add_up)
    assert _Op.SUM not in codes(file)
    assert codes(file).count(_Op.ADD) == PARTS - 1
    assert computed(file).tobytes() == before.tobytes()


@pytest.mark.parametrize(("rows", "told"), [(LEAST - 1, False), (LEAST, True)])
def test_few_rows_and_a_product_that_others_read_are_left_alone(rows: int, told: bool, tmp_path: Path) -> None:
    file = tmp_path / "model.tflite"
    model(file, rows, told=told)
    before = codes(file)
    edit(file, add_up)
    assert codes(file) == before


@pytest.mark.parametrize("name", ["granite-int8", "mamba2-groups-f32", "mamba-f32", "lfm2-f32", "falcon-h1-norm-f32"])
def test_no_prefill_that_is_built_sums_over_its_first_axis(name: str, artifacts: Mapping[str, Path]) -> None:
    edited = Edited(artifacts[name] / "model.tflite")
    for graph in edited.model.subgraphs:
        for operator in graph.operators:
            if edited.code(operator) == _Op.SUM and edited.numbers(graph.tensors[int(operator.inputs[1])]) == (0,):
                assert graph.tensors[int(operator.outputs[0])].shape[0] < LEAST
