"""Rules for models that the compiler of Intel's NPU accepts: fixed shapes, float16, supported operations.

The rules were found with that compiler (docs/npu.md), which runs without an NPU. A model that keeps them is not
necessarily fast or right on an NPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

# Every type of operation in the graphs that it took.
OPERATIONS = frozenset(
    (
        *("Abs", "Add", "Broadcast", "Clamp", "Concat", "Constant", "Convert", "CumSum", "Divide", "Equal", "Exp"),
        *("Floor", "Gather", "Greater", "GreaterEqual", "Less", "LessEqual", "MatMul", "Maximum", "Minimum", "Mod"),
        *("Multiply", "Parameter", "Power", "Range", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Result", "Select"),
        *("ShapeOf", "Sigmoid", "SoftPlus", "Softmax", "Slice", "Sqrt", "Squeeze", "Subtract", "Swish", "Tile"),
        *("Transpose", "Unsqueeze", "VariadicSplit"),
    )
)
ELEMENTS = frozenset(("f32", "f16", "i64", "i32", "i8", "u8", "boolean"))
LARGEST = float(np.finfo(np.float16).max)


def lint(model: Any) -> list[str]:
    """Return a sentence for each operation of an openvino.Model that breaks a rule; empty if none does."""
    found = []
    for op in model.get_ordered_ops():
        kind, name = op.get_type_name(), op.get_friendly_name()
        if kind not in OPERATIONS:
            found.append(f"{name}: no graph with the operation {kind} was ever compiled")
        for output in op.outputs():
            if output.get_partial_shape().is_dynamic:
                found.append(f"{name}: its shape {output.get_partial_shape()} is not fixed")
            if output.get_element_type().get_type_name() not in ELEMENTS:
                found.append(f"{name}: its element type {output.get_element_type().get_type_name()} is not taken")
        rule = _RULES.get(kind)
        if rule is not None and (wrong := rule(op)):
            found.append(f"{name}: {wrong}")
    return found


def operations(model: Any) -> dict[str, int]:
    """Return the number of a model's operations by type, without constants, inputs and outputs."""
    left_out = ("Constant", "Parameter", "Result")
    counts = Counter(op.get_type_name() for op in model.get_ops())
    return {kind: counts[kind] for kind in sorted(counts) if kind not in left_out}


def _constant(op: Any) -> str:
    """Check a constant: float16 turns larger numbers into infinity, and zero times infinity is NaN."""
    if op.get_element_type().get_type_name() not in ("f32", "f16") or not op.get_output_size():
        return ""
    values = op.get_data()
    largest = float(np.abs(values).max()) if values.size else 0.0
    return "" if largest <= LARGEST else f"the constant {largest:g} is beyond float16"


def _slice(op: Any) -> str:
    """Check a slice: the compiler refused `x[:, :-k]` of a concatenation, and accepted `x[:, : T - k]`."""
    stop = op.input_value(2).get_node()
    if op.input_value(0).get_node().get_type_name() != "Concat" or stop.get_type_name() != "Constant":
        return ""
    return "a slice of a concatenation ends at a negative index" if (stop.get_data() < 0).any() else ""


def _matmul(op: Any) -> str:
    """Check a product: the compiler took one row of values times its weight for attention, and failed."""
    first = op.input_value(0)
    if first.get_partial_shape().is_dynamic or len(first.get_shape()) < 2:
        return ""
    inner = first.get_shape()[-2 if op.get_attributes()["transpose_a"] else -1]
    sliced = first.get_node()
    if inner != 1 or sliced.get_type_name() != "Slice":
        return ""
    return (
        "a product over one row of attention" if sliced.input_value(0).get_node().get_type_name() == "Softmax" else ""
    )


_RULES = {"Constant": _constant, "Slice": _slice, "MatMul": _matmul}
