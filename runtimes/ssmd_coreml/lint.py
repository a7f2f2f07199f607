"""Rules for programs on Apple's Neural Engine. They come from others' tests; no program here was run on one.

The rules: float16 throughout, tensors of four dimensions at most, widths that are multiples of 32, products with
weights as convolutions of 1x1, and nothing below -1e4 as a mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from ssmd_coreml.package import Package

MOST_DIMENSIONS = 4
WIDTH = 32  # values; of what a product with weights reads and writes
MASK = -1e4  # below it a float16 softmax was seen to give no numbers
RULES = (
    "operations in float32",
    f"tensors of more than {MOST_DIMENSIONS} dimensions",
    "products with weights that are no convolutions of 1x1",
    f"products of widths that are no multiples of {WIDTH}",
    f"masks below {MASK:g}",
)
_FLOAT32 = 11  # of the protobuf's data types
_FREE = frozenset(("const", "cast", "constexpr_blockwise_shift_scale"))  # computed before, or no computation


def lint(package: Package) -> list[str]:
    """Return a sentence for each broken rule, with its count over all functions; empty if none is broken."""
    broken: Counter[str] = Counter()
    for name in package.functions:
        operations = list(package.operations(name))
        shapes = {o.name: shape_of(o.type) for op in operations for o in op.outputs}
        for op in operations:
            broken.update(_broken(op, shapes))
    return [f"{broken[rule]} {rule}" for rule in RULES if broken[rule]]


def _broken(op: Any, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the rules that an operation breaks."""
    float32, deep, product, odd, mask = RULES
    if op.type not in _FREE and any(_is_float32(o.type) for o in op.outputs):
        yield float32
    if any(len(shape_of(o.type)) > MOST_DIMENSIONS for o in op.outputs):
        yield deep
    if op.type == "linear":
        yield product
        if any(width % WIDTH for width in _widths(op, shapes)):
            yield odd
    if op.type == "const" and _lowest(op) < MASK:
        yield mask


def shape_of(value_type: Any) -> tuple[int, ...]:
    """Return the shape of a value; () if it is not a tensor."""
    if value_type.WhichOneof("type") != "tensorType":
        return ()
    return tuple(d.constant.size for d in value_type.tensorType.dimensions)


def _is_float32(value_type: Any) -> bool:
    return bool(value_type.WhichOneof("type") == "tensorType" and value_type.tensorType.dataType == _FLOAT32)


def _widths(op: Any, shapes: dict[str, tuple[int, ...]]) -> Iterator[int]:
    """Yield the last dimensions of a product's input and outputs."""
    read = shapes.get(op.inputs["x"].arguments[0].name, ())
    for shape in (read, *(shape_of(o.type) for o in op.outputs)):
        if shape:
            yield shape[-1]


def _lowest(op: Any) -> float:
    """Return the lowest value of a constant that is in the program itself, as masks made of zeros and ones are."""
    value = op.attributes["val"]
    if value.WhichOneof("value") != "immediateValue" or not value.immediateValue.WhichOneof("value"):
        return 0.0
    tensor = value.immediateValue.tensor
    kind = tensor.WhichOneof("value")
    if kind == "floats":
        return min(tensor.floats.values, default=0.0)
    if kind == "bytes" and value.type.tensorType.dataType == 10:  # float16
        return float(np.frombuffer(tensor.bytes.values, np.float16).min(initial=0.0))
    return 0.0
