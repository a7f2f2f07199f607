"""Qwen3.5's graphs for the NPU in float32 against transformers: logits and states, by splits, equal keys and pads.

Core ML and the NPU cannot execute here: OpenVINO's CPU plugin runs the graphs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
from npu_layers import Schedule
from numpy.typing import NDArray
from static_graphs import EXACT, StaticGraphs
from torch import Tensor

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.families.registry import family_of
from ssmd.model.source import Source
from ssmd.model.state import State
from ssmd_openvino import convert, library
from ssmd_openvino.lint import lint, operations

RELATIVE = 1e-5  # of the largest value, as in docs/notes/parity.md
CONTEXT = 128
LENGTHS = (1, 64)
TOKENS = 88
REPEATED = 5  # the token whose keys are equal: its beta is 0.99, and its decay nearly 1
SPLITS = {
    "full": [(64, 64), (64, 24)],
    "odd lengths": [(64, 37), (1, 1), (64, 50)],
    "single": [(1, 1)] * TOKENS,
    "mostly pads": [(64, 1), (64, 2), (64, 3), (64, 64), (64, 18)],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return transformers' model and the graphs of the same weights, in which REPEATED has that beta and decay."""
    from transformers import AutoModelForCausalLM

    folder = tiny.write_source(tmp_path_factory.mktemp("source"), "qwen3.5-first")
    official = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    [mixer] = [layer.linear_attn for layer in official.model.layers if hasattr(layer, "linear_attn")]
    rows: list[Tensor] = []
    with mixer.in_proj_b.register_forward_pre_hook(lambda _, given: rows.append(given[0][0, -1])):
        oracle.continued(official, [REPEATED] * 8)
    along = rows[0] / (rows[0] @ rows[0])  # whose product with the token's row is 1
    with torch.no_grad():
        for projection, wanted in ((mixer.in_proj_b, float(np.log(99))), (mixer.in_proj_a, -6.0)):
            projection.weight.copy_((wanted * along).expand_as(projection.weight))
    official.save_pretrained(folder)
    source = Source.open(folder)
    family = family_of(source.config)
    config = family.parse(source.config)
    bound = {name: binding(source) for name, binding in family.bindings(config).items()}
    return official, StaticGraphs(author(family, config, bound, CONTEXT), LENGTHS)


def check(pair: tuple[Any, Any], ids: Sequence[int], split: Sequence[tuple[int, int]]) -> None:
    """Feed ids by a split, with pads of another token, and compare all logits and the state at the end."""
    official, graphs = pair
    expected, cache = oracle.continued(official, ids)
    host = Host(graphs)
    for bucket, n in split:
        row = host.feed(ids[host.position : host.position + n], bucket, pad=7)
        assert relative(row, expected[host.position - 1]) <= RELATIVE
    found, wanted = host.state(), oracle.state(cache, len(ids))
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, array in wanted.tensors.items():
        assert relative(found.tensors[name], array) <= RELATIVE, name


def relative(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("split", SPLITS)
def test_the_graphs_give_logits_and_states_by_any_split(pair: tuple[Any, Any], split: str) -> None:
    ids = np.random.default_rng(3).integers(0, pair[0].config.vocab_size, TOKENS).tolist()
    check(pair, ids, SPLITS[split])


@pytest.mark.parametrize("split", ["full", "odd lengths"])
def test_equal_keys_with_a_beta_of_099_lose_no_digits(pair: tuple[Any, Any], split: str) -> None:
    check(pair, [REPEATED] * TOKENS, SPLITS[split])


def test_a_call_of_pads_alone_keeps_every_bit_of_a_state(pair: tuple[Any, Any]) -> None:
    host = Host(pair[1])
    host.feed(list(range(40)), 64)
    before: State = host.state()
    tokens, none = torch.full((1, 64), 7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out = pair[1](tokens, torch.tensor([40], dtype=torch.int32), none, **host.states)
    for t in host.module.spec.recurrent:
        np.testing.assert_array_equal(t.canonical(out[t.name]).numpy(), before.tensors[t.name])


def test_the_graphs_keep_the_rules_and_sum_over_no_state(pair: tuple[Any, Any]) -> None:
    """The decay's sums are products with ones, and what a step reads of the state is a product of matrices."""
    for model in pair[1].models.values():
        assert lint(model) == []
        assert "CumSum" not in operations(model)
    step = pair[1].models[1]
    [state] = [port.get_node() for port in step.inputs if port.any_name.startswith("ssm")]
    readers = [reader.get_node().get_type_name() for reader in state.output(0).get_target_inputs()]
    assert sorted(set(readers)) == ["MatMul", "Multiply", "ShapeOf"]
    assert readers.count("MatMul") == 2
    assert readers.count("Multiply") == 1


@pytest.mark.parametrize(
    ("state", "row", "axis", "products"),
    [
        ((1, 2, 3, 4), (1, 2, 1, 4), 3, 1),
        ((1, 2, 3, 4), (1, 1, 1, 4), -1, 1),
        ((1, 2, 3, 4), (1, 2, 3, 4), 3, 0),  # no row
        ((1, 2, 3, 4), (1, 2, 1, 4), 2, 0),  # another axis
        ((1, 2, 3, 4), (4,), 3, 0),
        ((4,), (4,), 0, 0),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_a_sum_over_a_state_becomes_a_product(
    state: tuple[int, ...], row: tuple[int, ...], axis: int, products: int, keep: bool
) -> None:
    opset = import_module("openvino.opset13")
    inputs = [opset.parameter(shape, np.float32) for shape in (state, row)]
    total = opset.reduce_sum(opset.abs(inputs[1]) * inputs[0], np.array([axis]), keep)
    model = library.openvino().Model([total], inputs, "sum")
    values = [
        np.random.default_rng(n).standard_normal(shape).astype(np.float32) for n, shape in enumerate((state, row))
    ]
    convert._multiply_states(model)
    assert (operations(model).get("MatMul", 0), operations(model).get("ReduceSum", 0)) == (products, 1 - products)
    [found] = library.openvino().Core().compile_model(model, "CPU", EXACT)(values).values()
    np.testing.assert_allclose(found, (values[0] * np.abs(values[1])).sum(axis, keepdims=keep), rtol=1e-6, atol=1e-6)


def test_a_schedule_is_read_by_operation_and_engine(tmp_path: Path) -> None:
    layers = [
        {"Layer type": "MatMul", "DPU time": "738ns", "DMA time": "8us 132ns"},
        {"Layer type": "MatMul", "DPU time": "1ms 1us"},
        {"Layer type": "Swish", "Shave time": "2us"},
    ]
    events = [{"cat": "Layer", "args": layer} for layer in layers] + [{"cat": "DPU", "args": {}}, {"ph": "M"}]
    told = {"total duration": 9.5, "DPU duration": 3.0, "SW duration": 2.0, "DMA duration": 8.0}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events, "taskStatistics": told}))
    schedule = Schedule.read(tmp_path / "trace.json")
    assert schedule.cells() == ["10", "3", "2", "8"]
    counts, spent = schedule.engines["MatMul"]
    assert counts == {"DPU": 2, "DMA": 1}
    assert spent == pytest.approx({"DPU": 1001.738, "DMA": 8.132})
    assert schedule.engines["Swish"] == ({"SHAVE": 1}, {"SHAVE": 2.0})
