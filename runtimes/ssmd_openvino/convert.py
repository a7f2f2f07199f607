"""A re-authored module as an OpenVINO model: with open lengths, for one number of tokens and one capacity, or a decode
step of several streams."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import torch

from ssmd.authoring.flat import FlatModule, Positional, PositionalLanes
from ssmd.authoring.host import graph_shapes
from ssmd.model.state import of_lane
from ssmd_openvino import library
from ssmd_openvino.graph import LOGITS, OUTPUT, TOKENS

TRACED = 16  # tokens of an open model's example: neither a decode step nor more than one block of anything
TRACED_SLOTS = 48  # of the caches of a lane's example


def converted(module: FlatModule, capacity: int, length: int | None = None) -> Any:
    """Return a float32 openvino.Model whose tensors have the names of flat IO; outputs of states begin with OUTPUT.

    It is for `length` tokens and caches of `capacity`. Without a length both are open: dimensions T and S of -1.
    """
    openvino = library.openvino()
    shapes = graph_shapes(module.spec, capacity)
    example = (
        torch.zeros(1, length or TRACED, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        *(torch.zeros(shape) for shape in shapes.values()),
    )
    names = tuple(shapes)
    opened = [openvino.PartialShape(list(tensor.shape)) for tensor in example]
    if length is None:
        opened[0][1] = -1
        _open_slots(module, dict(zip(names, opened[len(TOKENS) :], strict=True)))
    module.open = length is None
    model = _traced(Positional(module, names), example, opened)
    if length is not None:
        _fold(model)
        _multiply_states(model)
    _own_constants(model)
    _order_equals(model)
    _name(model, (*TOKENS, *names), names)
    return model


def converted_lanes(module: FlatModule, lanes: int) -> Any:
    """Return a float32 openvino.Model of a decode step of `lanes` streams. Names are as in `converted`.

    Each stream gets the bits of a step of the open model. Each lane's caches have their own open capacity: a dimension
    of -1.
    """
    openvino = library.openvino()
    each = graph_shapes(module.spec, TRACED_SLOTS)
    shapes = {of_lane(name, lane): shape for lane in range(lanes) for name, shape in each.items()}
    recurrent = [of_lane(t.name, lane) for lane in range(lanes) for t in module.spec.recurrent]
    states = (*(t.name for t in module.spec.rows), *recurrent)
    example = (
        torch.zeros(1, lanes, dtype=torch.int32),
        torch.zeros(lanes, dtype=torch.int32),
        *(torch.zeros(shape) for shape in shapes.values()),
    )
    opened = [openvino.PartialShape(list(tensor.shape)) for tensor in example]
    for lane in range(lanes):
        first = 2 + lane * len(each)
        _open_slots(module, dict(zip(each, opened[first : first + len(each)], strict=True)))
    module.open = True
    model = _traced(PositionalLanes(module, tuple(shapes), states), example, opened)
    _own_constants(model)
    _order_equals(model)
    _name(model, (*TOKENS[:2], *shapes), states)
    return model


def _open_slots(module: FlatModule, shapes: dict[str, Any]) -> None:
    """Leave the capacity of caches open in the shapes of the states."""
    for t in module.spec.rows:
        shapes[t.name][1 if t.kind == "key" else 2] = -1


def _traced(module: torch.nn.Module, example: tuple[torch.Tensor, ...], opened: list[Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer: which lengths are compared is known here
        return library.openvino().convert_model(module.eval(), example_input=example, input=opened)


def _name(model: Any, inputs: tuple[str, ...], states: tuple[str, ...]) -> None:
    for port, name in zip(model.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(model.outputs, (LOGITS, *(OUTPUT + name for name in states)), strict=True):
        port.get_tensor().set_names({name})


def _fold(model: Any) -> None:
    """Fold constants. In a model of fixed shapes these are every length and mask."""
    passes = importlib.import_module("openvino.passes")
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(model)


def _multiply_states(model: Any) -> None:
    """Make products of matrices of sums over the last axis of a state times a row: S k in a step of the delta rule.

    The NPU's compiler computes such a product on the array. A broadcast product that is then summed goes through the
    vector processors (docs/npu-qwen3.5.md).
    """
    opset = importlib.import_module("openvino.opset13")
    for op in model.get_ordered_ops():
        if op.get_type_name() != "ReduceSum":
            continue
        product, axes = (op.input_value(i).get_node() for i in (0, 1))
        if product.get_type_name() != "Multiply":
            continue
        parts = [product.input_value(i) for i in (0, 1)]
        state = next((p for p in parts if p.get_node().get_type_name() == "Parameter"), None)
        if state is None:
            continue
        shape = list(product.get_output_shape(0))  # (..., n, K)
        row = parts[0] if parts[1] == state else parts[1]  # (..., 1, K)
        last, one_row = len(shape) - 1, list(row.get_shape())[-2:] == [1, shape[-1]]
        if not one_row or [n % len(shape) for n in np.ravel(axes.get_data())] != [last]:
            continue
        y = opset.matmul(state, row, False, True)  # (..., n, 1)
        if not op.get_attributes()["keep_dims"]:
            y = opset.squeeze(y, np.array([last], np.int64))
        y.set_friendly_name(op.get_friendly_name())
        op.output(0).replace(y.output(0))
    model.validate_nodes_and_infer_types()


def _order_equals(model: Any) -> None:
    """Let each choice of the largest values take equal ones in their order, which a traced choice leaves open."""
    opset = importlib.import_module("openvino.opset11")
    for op in model.get_ops():
        if op.get_type_name() == "TopK":
            given = op.get_attributes()
            named = {name: given[name] for name in ("axis", "mode", "sort", "index_element_type")}
            ordered = opset.topk(op.input_value(0), op.input_value(1), **named, stable=True)
            for port, other in zip(op.outputs(), ordered.outputs(), strict=True):
                port.replace(other)


def _own_constants(model: Any) -> None:
    """Let no body of a loop share constants with the graph around it, in which nncf then looks for their users."""
    openvino = library.openvino()
    for loop in model.get_ops():
        if loop.get_type_name() != "Loop":
            continue
        body = loop.get_function()
        for op in body.get_ops():
            for port in op.inputs():
                source = port.get_source_output().get_node()
                if source.get_type_name() == "Constant":
                    copy = openvino.op.Constant(openvino.Tensor(source.data.copy()))
                    port.replace_source_output(copy.output(0))
        _own_constants(body)
