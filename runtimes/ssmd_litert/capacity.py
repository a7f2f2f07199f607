"""Caches of any capacity: a .tflite with an open number of slots, though the converter supports only fixed sizes.

LiteRT computes all sizes again when an input gets another one. An attention's operations on S slots follow the sizes
of their inputs, except two slices. They cut the softmax over S old scores and n new ones, and the converter writes
their sizes down. They are replaced by slices that count from the end. Anything else that depends on S fails the build.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from ssmd.build.builder import BuildError
from ssmd_litert.late_weights import OTHER
from ssmd_litert.modelfile import OPERATORS, Edited, Known

_Op = schema.BuiltinOperator
_FOLLOW = (_Op.ADD, _Op.CONCATENATION, _Op.SOFTMAX, _Op.TRANSPOSE)  # whose sizes go by those of the inputs


def open_capacity(edited: Edited, nominal: int) -> None:
    """Let the inputs' size `nominal` be another one in each call; no other size of the file is this one. Raises
    BuildError."""
    for graph in edited.model.subgraphs:
        _open(edited, graph, nominal)


def _open(edited: Edited, graph: Any, nominal: int) -> None:
    """Follow tensors with S in their size from the inputs on. Raises BuildError at an unsupported operator."""
    constants: Known = {}  # tensors of this graph
    sized = {int(i) for i in graph.inputs if nominal in graph.tensors[i].shape}
    for operator in graph.operators:
        if not sized.intersection(map(int, operator.inputs)):
            continue
        code, [made] = edited.code(operator), [int(i) for i in operator.outputs]
        if code == _Op.SLICE:
            goes_on = _exchange(edited, graph, operator, nominal, constants)
        elif code == _Op.BATCH_MATMUL:
            goes_on = nominal in graph.tensors[made].shape
        elif code in _FOLLOW:
            goes_on = True
        else:
            raise _unknown(code)
        if goes_on:
            sized.add(made)


def _exchange(edited: Edited, graph: Any, operator: Any, nominal: int, constants: Known) -> bool:
    """Make a slice along the last axis count from its end. Returns True if it takes the S old slots."""
    source, begin, size = (graph.tensors[i] for i in operator.inputs)
    first, count = (edited.numbers(tensor) for tensor in (begin, size))
    rank, width = len(source.shape), int(source.shape[-1])
    others = (1 << (rank - 1)) - 1  # axes, as bits
    new = width - nominal
    old_ones = (first[-1], count[-1]) == (0, nominal)
    whole = all(b == 0 and c == int(n) for b, c, n in zip(first, count, source.shape[:-1], strict=False))
    if new < 1 or not whole or not (old_ones or (first[-1], count[-1]) == (nominal, new)):
        raise _unknown(_Op.SLICE)
    at_end, anywhere = (*[0] * (rank - 1), -new), (0,) * rank
    options = schema.StridedSliceOptionsT()
    options.beginMask = others | (old_ones << (rank - 1))
    options.endMask = others | ((not old_ones) << (rank - 1))
    bounds = (anywhere, at_end) if old_ones else (at_end, anywhere)
    made = (edited.add_numbers(graph, values, constants) for values in (*bounds, (1,) * rank))
    operator.inputs = np.array([int(operator.inputs[0]), *made], np.int32)
    operator.opcodeIndex = edited.place_of(_Op.STRIDED_SLICE)
    operator.builtinOptionsType, operator.builtinOptions = schema.BuiltinOptions.StridedSliceOptions, options
    return old_ones


def _unknown(code: int) -> BuildError:
    return BuildError(f"{OPERATORS[code]} has the capacity of the caches in its sizes otherwise than is known; {OTHER}")
