"""Sums over the first axis of a product with a constant, as additions.

A causal convolution over T tokens is converted to the sum of its inputs, one behind another, times its weights. XNNPACK
copies the inputs together, and keeps zeros as large as the result for each such sum as long as the graph is open: of
granite-4.0-h-350m's prefill of 256 tokens 51 MB. The additions have the same bits: that sum is taken in order.
"""

from __future__ import annotations

from typing import Any

from ai_edge_litert import schema_py_generated as schema

from ssmd_litert.modelfile import Edited, Known, add_tensor

LEAST = 16  # rows of a result; below that, operators that are saved are worth more
_Op = schema.BuiltinOperator
_Kind = schema.BuiltinOptions


def add_up(edited: Edited) -> None:
    """Give every such sum of at least LEAST rows that form."""
    for graph in edited.model.subgraphs:
        makers = {int(i): operator for operator in graph.operators for i in operator.outputs}
        users: dict[int, int] = {}
        for operator in graph.operators:
            for i in operator.inputs:
                users[int(i)] = users.get(int(i), 0) + 1
        known: Known = {}
        replaced: dict[int, list[Any]] = {}
        for operator in graph.operators:
            found = _parts(edited, graph, operator, makers, users)
            if found is not None:
                joined, product, weights = found
                replaced |= {id(joined): [], id(product): []}
                replaced[id(operator)] = _added(edited, graph, operator, joined, weights, known)
        graph.operators = [made for operator in graph.operators for made in replaced.get(id(operator), [operator])]


def _parts(
    edited: Edited, graph: Any, operator: Any, makers: dict[int, Any], users: dict[int, int]
) -> tuple[Any, Any, int] | None:
    """Return the concatenation and the product with a constant under a sum, if only the sum reads them."""
    if edited.code(operator) != _Op.SUM or edited.numbers(graph.tensors[int(operator.inputs[1])]) != (0,):
        return None
    product = makers.get(int(operator.inputs[0]))
    if product is None or edited.code(product) != _Op.MUL or users[int(operator.inputs[0])] > 1:
        return None
    constant = [int(i) for i in product.inputs if edited.is_constant(graph.tensors[int(i)])]
    other = [int(i) for i in product.inputs if int(i) not in constant]
    joined = makers.get(other[0]) if len(other) == len(constant) == 1 else None
    if joined is None or edited.code(joined) != _Op.CONCATENATION or users[other[0]] > 1:
        return None
    shape, weights = graph.tensors[other[0]].shape, graph.tensors[constant[0]].shape
    fits = len(shape) == len(weights) == 3 and shape[0] == weights[0] == len(joined.inputs)
    if not fits or joined.builtinOptions.axis != 0 or shape[1] < LEAST:
        return None
    return joined, product, constant[0]


def _added(edited: Edited, graph: Any, operator: Any, joined: Any, weights: int, known: Known) -> list[Any]:
    """Return the replacement of a sum: each part times its row of the weights, added up in order, in its shape."""
    made: list[Any] = []

    def add(code: int, inputs: list[int], like: int, options: Any, kind: int) -> int:
        shape = tuple(map(int, graph.tensors[like].shape))
        output = add_tensor(graph, shape, schema.TensorType.FLOAT32, b"added")
        made.append(edited.operator(code, inputs, output, options, kind))
        return output

    _, _, channels = map(int, graph.tensors[weights].shape)
    size, rows, total = edited.add_numbers(graph, (1, 1, channels), known), int(joined.inputs[0]), -1
    for place, part in enumerate(map(int, joined.inputs)):
        begin = edited.add_numbers(graph, (place, 0, 0), known)
        row = add_tensor(graph, (1, 1, channels), schema.TensorType.FLOAT32, b"added")
        made.append(edited.operator(_Op.SLICE, [weights, begin, size], row, schema.SliceOptionsT(), _Kind.SliceOptions))
        product = add(_Op.MUL, [part, row], rows, schema.MulOptionsT(), _Kind.MulOptions)
        total = product if not place else add(_Op.ADD, [total, product], rows, schema.AddOptionsT(), _Kind.AddOptions)
    return [*made, edited.reshape(graph, total, int(operator.outputs[0]), known)]
