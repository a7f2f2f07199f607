"""Rewrites of operators that XNNPACK does not support into forms that it does.

The converter turns a batched product whose batch is one into a fully connected layer; its weight is then not a
constant. It merges several concatenations in a row into one, with more parts than XNNPACK supports. It turns a product
with ones that repeats a tensor into a broadcast, which XNNPACK does not have. Each of them would leave the operator to
LiteRT's own kernels and split the graph in two: granite-4.0-h-350m lost an eighth of a prefill of 64 tokens to 56 such
layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from ssmd_litert.modelfile import Edited, Known, add_tensor

MOST_PARTS = 5  # of a concatenation in XNNPACK
_Op = schema.BuiltinOperator
_JOIN = schema.BuiltinOptions.ConcatenationOptions


def delegate_all(edited: Edited) -> None:
    """Give every operator of these kinds a form that XNNPACK takes."""
    forms = {_Op.FULLY_CONNECTED: _batched, _Op.CONCATENATION: _joined, _Op.BROADCAST_TO: _repeated}
    for graph in edited.model.subgraphs:
        known: Known = {}
        graph.operators = [
            made
            for operator in graph.operators
            for made in forms.get(edited.code(operator), _kept)(edited, graph, operator, known)
        ]


def _kept(edited: Edited, graph: Any, operator: Any, known: Known) -> list[Any]:
    return [operator]


def _joined(edited: Edited, graph: Any, operator: Any, known: Known) -> list[Any]:
    """Return a concatenation of more than MOST_PARTS parts as a concatenation of concatenations."""
    parts, axis = [int(i) for i in operator.inputs], operator.builtinOptions.axis
    found: list[Any] = []
    while len(parts) > MOST_PARTS:
        groups = [parts[i : i + MOST_PARTS] for i in range(0, len(parts), MOST_PARTS)]
        parts = []
        for group in groups:
            if len(group) == 1:
                parts += group
                continue
            shape = [int(n) for n in graph.tensors[group[0]].shape]
            shape[axis] = sum(int(graph.tensors[i].shape[axis]) for i in group)
            parts.append(add_tensor(graph, tuple(shape), graph.tensors[group[0]].type, b"joined"))
            found.append(edited.operator(_Op.CONCATENATION, group, parts[-1], operator.builtinOptions, _JOIN))
    operator.inputs = np.array(parts, np.int32)
    return [*found, operator]


def _repeated(edited: Edited, graph: Any, operator: Any, known: Known) -> list[Any]:
    """Return a broadcast as a product with ones."""
    source, target = graph.tensors[int(operator.inputs[0])], graph.tensors[int(operator.outputs[0])]
    shape = [int(n) for n in target.shape]
    own = [1] * (len(shape) - len(source.shape)) + [int(n) for n in source.shape]
    ones = np.ones([1 if n == m else n for n, m in zip(shape, own, strict=True)], np.float32)
    inputs = [int(operator.inputs[0]), edited.add_constant(graph, ones, known)]
    kind = schema.BuiltinOptions.MulOptions
    return [edited.operator(_Op.MUL, inputs, int(operator.outputs[0]), schema.MulOptionsT(), kind)]


def _batched(edited: Edited, graph: Any, operator: Any, known: Known) -> list[Any]:
    """Return a layer of x (..., K) and w (N, K) as a product (1, rows, K) x (1, N, K) -> (1, rows, N), with reshapes.

    A layer whose weight is a constant is returned unchanged.
    """
    x, weight, *bias = (int(i) for i in operator.inputs)
    if edited.is_constant(graph.tensors[weight]) or any(b >= 0 for b in bias):
        return [operator]
    [made] = (int(i) for i in operator.outputs)
    found: list[Any] = []

    def reshaped(tensor: int, shape: tuple[int, ...], into: int | None = None) -> int:
        if tuple(map(int, graph.tensors[tensor].shape)) == shape and into is None:
            return tensor
        target = add_tensor(graph, shape, schema.TensorType.FLOAT32, b"reshaped") if into is None else into
        found.append(edited.reshape(graph, tensor, target, known))
        return target

    outputs, inner = (int(n) for n in graph.tensors[weight].shape)
    rows = int(np.prod(graph.tensors[x].shape)) // inner
    left, right = reshaped(x, (1, rows, inner)), reshaped(weight, (1, outputs, inner))
    options = schema.BatchMatMulOptionsT()
    options.adjY = True
    shape = tuple(map(int, graph.tensors[made].shape))
    whole = (1, rows, outputs)
    product = made if shape == whole else add_tensor(graph, whole, schema.TensorType.FLOAT32, b"product")
    kind = schema.BuiltinOptions.BatchMatMulOptions
    found.append(edited.operator(_Op.BATCH_MATMUL, [left, right], product, options, kind))
    if product != made:
        reshaped(product, shape, made)
    return found
