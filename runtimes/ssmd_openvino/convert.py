"""A re-authored module as an OpenVINO model: with open lengths, or for one number of tokens and one capacity."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from ssmd.authoring.flat import FlatModule, Positional
from ssmd.authoring.host import graph_shapes
from ssmd_openvino import library
from ssmd_openvino.graph import LOGITS, OUTPUT, TOKENS

TRACED = 16  # tokens of an open model's example: neither a decode step nor more than one block of anything


def converted(module: FlatModule, capacity: int, length: int | None = None) -> Any:
    """An openvino.Model of float32 whose tensors have the names of flat IO, outputs of states OUTPUT before them.

    Of `length` tokens and caches of `capacity`, or without a length with both left open: dimensions T and S of -1.
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
        slots = {t.name: 1 if t.kind == "key" else 2 for t in module.spec.rows}  # which axis of a cache has S slots
        for name, shape in zip(names, opened[len(TOKENS) :], strict=True):
            if name in slots:
                shape[slots[name]] = -1
    module.open = length is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer: which lengths are compared is known here
        model = openvino.convert_model(Positional(module, names).eval(), example_input=example, input=opened)
    if length is not None:
        _fold(model)
    _own_constants(model)
    for port, name in zip(model.inputs, (*TOKENS, *names), strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(model.outputs, (LOGITS, *(OUTPUT + name for name in names)), strict=True):
        port.get_tensor().set_names({name})
    return model


def _fold(model: Any) -> None:
    """Compute what depends on no input: of a model of fixed shapes every length and mask."""
    passes = importlib.import_module("openvino.passes")
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(model)


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
