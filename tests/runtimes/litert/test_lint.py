"""Graphs that XNNPACK computes whole: what is changed to get there, and what a build refuses."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from ssmd_litert.delegated import MOST_PARTS, delegate_all
from ssmd_litert.library import LibraryGraph
from ssmd_litert.lint import left_out, lint
from ssmd_litert.modelfile import Edited, add_tensor, edit

_Op = schema.BuiltinOperator


def named(edited: Edited, code: int) -> list[Any]:
    return [o for graph in edited.model.subgraphs for o in graph.operators if edited.code(o) == code]


@pytest.mark.parametrize(
    "name", ["granite-int8", "mamba2-groups-f32", "llama-f32", "llama-int4", "mamba-f32", "lfm2-f32", "lfm3-f32"]
)
def test_what_is_built_is_computed_whole(name: str, artifacts: Mapping[str, Path]) -> None:
    file = artifacts[name] / "model.tflite"
    assert lint(file) == []
    edited = Edited(file)
    assert all(len(o.inputs) <= MOST_PARTS for o in named(edited, _Op.CONCATENATION))
    weights = (graph.tensors[o.inputs[1]] for graph in edited.model.subgraphs for o in graph.operators
               if edited.code(o) == _Op.FULLY_CONNECTED)  # fmt: skip
    assert all(edited.is_constant(weight) for weight in weights)


def spoil(edited: Edited) -> None:
    """Make layers of the batched products of one batch, as the converter does."""
    for graph in edited.model.subgraphs:
        made = []
        for operator in graph.operators:
            if edited.code(operator) == _Op.BATCH_MATMUL and operator.builtinOptions.adjY:
                left, right = (tuple(map(int, graph.tensors[int(i)].shape)) for i in operator.inputs)
                if left[0] == right[0] == 1 and len(right) == 3:
                    made.append(flattened(edited, graph, operator, right[1:]))
                    as_layer(edited, operator, int(made[-1].outputs[0]))
            made.append(operator)
        graph.operators = made


def flattened(edited: Edited, graph: Any, operator: Any, shape: tuple[int, ...]) -> Any:
    """The right side of a product as what a layer takes."""
    reshape = schema.OperatorT()
    reshape.opcodeIndex = edited.place_of(_Op.RESHAPE)
    reshape.inputs = np.array([operator.inputs[1], edited.add_numbers(graph, shape, {})], np.int32)
    reshape.outputs = np.array([add_tensor(graph, shape, schema.TensorType.FLOAT32, b"flat")], np.int32)
    reshape.builtinOptions = schema.ReshapeOptionsT()
    reshape.builtinOptions.newShape = np.array(shape, np.int32)
    reshape.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
    return reshape


def as_layer(edited: Edited, operator: Any, weight: int) -> None:
    operator.inputs = np.array([operator.inputs[0], weight, -1], np.int32)
    operator.opcodeIndex = edited.place_of(_Op.FULLY_CONNECTED)
    operator.builtinOptions = schema.FullyConnectedOptionsT()
    operator.builtinOptions.keepNumDims = True
    operator.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions


def test_a_product_with_a_computed_weight_is_found_and_mended(artifacts: Mapping[str, Path], tmp_path: Path) -> None:
    """The other way round: a batched product of one batch becomes such a layer, and gives the same numbers after."""
    file = tmp_path / "model.tflite"
    shutil.copy(artifacts["granite-f32"] / "model.tflite", file)
    expected = outputs(file, "prefill_64")

    edit(file, spoil)
    [said, *_] = [line for line in lint(file) if line.startswith("prefill_64:")]
    assert "FULLY_CONNECTED to LiteRT, in the middle of the graph" in said
    edit(file, delegate_all)
    assert lint(file) == []
    for name, array in outputs(file, "prefill_64").items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5 * max(1.0, float(np.abs(expected[name]).max())))


def outputs(file: Path, signature: str) -> dict[str, Any]:
    """Return a signature's outputs for fixed random inputs."""
    graph, noise = LibraryGraph(file, threads=1, weight_cache=None), np.random.default_rng(0)
    try:
        known = graph.signatures[signature]
        given: dict[str, Any] = {n: noise.standard_normal(t.shape, np.float32) * 0.1 for n, t in known.inputs.items()}
        given |= {"tokens": np.arange(known.inputs["tokens"].shape[1], dtype=np.int32)[None]}
        given |= {"pos": np.array([5], np.int32), "n_valid": np.array([60], np.int32)}
        if "slots" in given:
            given["slots"] = np.where(np.arange(given["slots"].shape[-1]) < 5, 0, -6e4).astype(np.float32)[None, None]
        return graph.run_managed(signature, given)
    finally:
        graph.close()


def test_what_stands_before_xnnpack_is_no_split() -> None:
    nodes = [(n, 1) for n in ("RESHAPE", "EMBEDDING_LOOKUP", "Add (ND)", "Slice (ND, X32)", "Softmax (NC, F32)")]
    assert left_out(nodes) == []
    assert left_out([*nodes, ("CONCATENATION", 3), ("Add (ND)", 1), ("ADD", 0)]) == ["CONCATENATION", "ADD"]
    assert left_out([]) == []
