"""XAMBA (arXiv:2502.06924): an OpenVINO model rewritten in place for processors that are fast at products of matrices.

CumBA    CumSum -> product with a triangular matrix of ones
ReduBA   ReduceSum -> product with a row or column of ones
ActiBA   SiLU and softplus -> a piecewise linear function

Operations that no pass can rewrite stay unchanged, and the report lists them. docs/notes/xamba.md has the formulas,
errors and measurements.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ssmd_openvino import library
from ssmd_openvino.piecewise import Array, Function, silu, softplus, terms

MIN_SEGMENTS, MAX_SEGMENTS = 4, 256
WRITTEN = f"cumba, reduba and actiba=N with N segments, {MIN_SEGMENTS} to {MAX_SEGMENTS}, separated by commas"
TERMS = 16  # of a piecewise linear function between two changes of rank
MOST_BATCHES = 256  # of a product with the mask on the left: the NPU's compiler unrolls them (1,536: 53 s)
COUNTED = (
    *("CumSum", "ReduceSum", "ReduceMean", "Swish", "SoftPlus", "Sigmoid", "Exp", "Log", "MatMul", "Relu", "Abs"),
    *("Clamp", "Multiply", "Add", "Subtract", "Reshape", "Transpose", "Gather"),
)


class XambaError(ValueError):
    """An invalid list of passes; the message says which are allowed."""


@dataclass(frozen=True)
class Passes:
    """The passes that are asked for. `actiba`: the number of segments of its functions."""

    cumba: bool = False
    reduba: bool = False
    actiba: int | None = None

    @staticmethod
    def parse(text: str) -> Passes:
        """Read passes from a text like "cumba,reduba,actiba=32", in any order. Raises XambaError."""
        chosen: dict[str, Any] = {}
        for word in text.split(","):
            name, equals, number = word.strip().partition("=")
            if name not in ("cumba", "reduba", "actiba"):
                what = f"there is no pass {name!r}" if name else "a pass is missing"
            elif name in chosen:
                what = f"{name} is named twice"
            elif name != "actiba":
                what = f"{name} takes no number" if equals else ""
                chosen[name] = True
            elif not re.fullmatch("[0-9]{1,9}", number):
                what = f"actiba needs a whole number of segments, not {number!r}" if equals else "actiba has no number"
            else:
                chosen[name] = int(number)
                inside = MIN_SEGMENTS <= chosen[name] <= MAX_SEGMENTS
                what = "" if inside else f"actiba={number} is out of range"
            if what:
                raise XambaError(f"passes {text!r}: {what}; write {WRITTEN}")
        return Passes(**chosen)

    def single(self) -> list[Passes]:
        """List each pass alone, in the order in which they run."""
        return [Passes(**{name: asked}) for name, asked in self.to_json().items() if asked]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Left:
    """An operation that a pass would replace and could not."""

    operation: str
    name: str
    why: str


@dataclass(frozen=True)
class Report:
    """The operations that each pass replaced; operations by type (COUNTED) before and after; those that were left."""

    replaced: Mapping[str, int]
    before: Mapping[str, int]
    after: Mapping[str, int]
    left: tuple[Left, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def apply(model: Any, passes: Passes) -> Report:
    """Rewrite an openvino.Model, the bodies of its loops too. Names of inputs and outputs stay."""
    before, left = counts(model), []
    replaced = {name: 0 for name, asked in passes.to_json().items() if asked}
    for graph in _graphs(model):
        for node in graph.get_ordered_ops():
            name, rewrite = _pass_of(node.get_type_name(), passes)
            if rewrite is None:
                continue
            done = rewrite(node)
            if isinstance(done, str):
                left.append(Left(node.get_type_name(), node.get_friendly_name(), done))
                continue
            replaced[name] += 1
            done.of.replace(done.by)
            done.by.get_node().set_friendly_name(done.of.get_node().get_friendly_name())
        graph.validate_nodes_and_infer_types()
    return Report(replaced, before, counts(model), tuple(left))


def counts(model: Any) -> dict[str, int]:
    """Return the number of operations in a model and its loops, by type, of the types in COUNTED."""
    found = Counter(node.get_type_name() for graph in _graphs(model) for node in graph.get_ops())
    return {name: found[name] for name in COUNTED if found[name]}


class _Replacement(NamedTuple):
    of: Any
    by: Any


_Rewrite = Callable[[Any], _Replacement | str]  # an output and what stands for it, or why it stays


def _pass_of(kind: str, passes: Passes) -> tuple[str, _Rewrite | None]:
    if kind == "CumSum" and passes.cumba:
        return "cumba", _cumba
    if kind == "ReduceSum" and passes.reduba:
        return "reduba", _reduba
    segments = passes.actiba
    if kind in ("Swish", "SoftPlus") and segments:
        return "actiba", lambda node: _actiba(node, segments)
    return "", None


def _graphs(model: Any) -> Iterator[Any]:
    yield model
    for node in model.get_ops():
        if node.get_type_name() in ("Loop", "TensorIterator"):
            yield from _graphs(node.get_function())


def _cumba(node: Any) -> _Replacement | str:
    axis = _axes(node)
    if isinstance(axis, str):
        return axis
    attributes, x = node.get_attributes(), node.input_value(0)
    ones = np.ones((axis.length, axis.length))
    lower = np.tril(ones, -1 if attributes["exclusive"] else 0)  # row i adds up the columns up to i
    return _Replacement(node.output(0), _product(x, lower.T if attributes["reverse"] else lower, axis, True))


def _reduba(node: Any) -> _Replacement | str:
    axis = _axes(node)
    if isinstance(axis, str):
        return axis
    x, keep = node.input_value(0), bool(node.get_attributes()["keep_dims"])
    return _Replacement(node.output(0), _product(x, np.ones((1, axis.length)), axis, keep))


class _Axes(NamedTuple):
    """Adjacent axes as one: the number before them and the product of their sizes (1 where it is not known), their own
    sizes, the product of these and the sizes after them."""

    before: int
    batches: int
    sizes: tuple[int, ...]
    length: int
    after: tuple[int, ...]


def _axes(node: Any) -> _Axes | str:
    """Return the axes that a node reduces or accumulates along, or the reason why no product can replace it."""
    kind, shape = node.get_element_type(), node.input_value(0).get_partial_shape()
    constant = node.input_value(1).get_node()
    if not kind.is_real():
        return f"it is of type {kind.get_type_name()}"
    if constant.get_type_name() != "Constant":
        return "its axes are not constant"
    if shape.rank.is_dynamic:
        return "its rank is dynamic"
    sizes = [-1 if d.is_dynamic else d.get_length() for d in shape]
    axes = sorted({int(a) % len(sizes) for a in np.ravel(constant.get_data())})
    if not axes or axes != list(range(axes[0], axes[-1] + 1)):
        return f"its axes {axes} are not adjacent"
    first, last = axes[0], axes[-1] + 1
    alone = len(axes) == 1 and last >= len(sizes) - 1  # a product takes it as it is: the last axis or that before it
    if -1 in sizes[first : last if alone else None]:
        return f"axis {first} or one after it is dynamic: {shape}"
    batches = 1 if -1 in sizes[:first] else math.prod(sizes[:first])
    return _Axes(first, batches, tuple(sizes[first:last]), math.prod(sizes[first:last]), tuple(sizes[last:]))


def _product(x: Any, rows: Array, axis: _Axes, keep: bool) -> Any:
    """Return rows (M, length) times x along an axis, whose size becomes M; without `keep` it is removed (M = 1)."""
    op, lead = _ops(), [0] * axis.before  # a 0 of a Reshape is the size that there is
    last, folded = not axis.after, len(axis.sizes) > 1 or len(axis.after) > 1
    if folded:
        shape = [*lead, axis.length] if last else [*lead, axis.length, math.prod(axis.after)]
        x = op.reshape(x, _integers(shape), True).output(0)
    swap = _integers([*range(axis.before), axis.before + 1, axis.before])
    swapped = not last and axis.batches > MOST_BATCHES
    if swapped:
        x = op.transpose(x, swap).output(0)
    right = last or swapped
    matrix = op.constant(np.ascontiguousarray(rows.T if right else rows), x.get_element_type())
    y = op.matmul(x, matrix, False, False) if right else op.matmul(matrix, x, False, False)
    if swapped:
        y = op.transpose(y, swap)
    if folded:
        ones = [len(rows)] * len(axis.sizes) if keep else []
        y = op.reshape(y, _integers([*lead, *ones, *axis.after]), True)
    elif not keep:
        y = op.squeeze(y, _integers([axis.before]))
    return y.output(0)


def _actiba(node: Any, segments: int) -> _Replacement | str:
    x, of, function = node.input_value(0), node.output(0), softplus
    if node.get_type_name() == "Swish":
        beta = np.ones(1) if node.get_input_size() == 1 else _constant(node.input_value(1))
        if beta is None or not np.all(beta == 1):
            return "its beta is not 1"
        function = silu
    else:
        x, of = _whole_softplus(x, of)
    return _Replacement(of, piecewise_linear(x, function, segments))


def _whole_softplus(x: Any, of: Any) -> tuple[Any, Any]:
    """Return relu(x) + softplus(-|x|), the form without overflow, as one softplus(x)."""
    negated = x.get_node()
    if negated.get_type_name() != "Multiply":
        return x, of
    parts = [negated.input_value(i) for i in (0, 1)]
    absolute = next((p.get_node() for p in parts if p.get_node().get_type_name() == "Abs"), None)
    minus = next((c for c in map(_constant, parts) if c is not None), None)
    if absolute is None or minus is None or not np.all(minus == -1):
        return x, of
    inner = absolute.input_value(0)
    targets = list(of.get_target_inputs())
    total = targets[0].get_node()
    if len(targets) == 1 and total.get_type_name() == "Add":
        other = total.input_value(1 - targets[0].get_index()).get_node()
        if other.get_type_name() == "Relu" and other.input_value(0) == inner:
            return inner, total.output(0)
    return x, of


def piecewise_linear(x: Any, function: Function, segments: int) -> Any:
    """Return relu(x) + sum of s_i clamp(c_i - |x|, 0, c_i - c_{i+1}).

    Each term is small, and exactly 0 outside the range, so that no digits cancel in 16 bits or for a large x. After
    TERMS terms the sum and |x| change their rank, which moves no data. Otherwise the CPU plugin makes one kernel of all
    terms, and runs out of registers at some 27.
    """
    op, kind = _ops(), x.get_element_type()
    ends, slopes = terms(function, segments)

    def scalar(value: float) -> Any:
        return op.constant(np.array(value), kind)

    first = _integers([0])
    total, absolute = op.relu(x), op.abs(x)
    higher = False
    for i, slope in enumerate(slopes):
        if i and i % TERMS == 0:
            change = op.squeeze if higher else op.unsqueeze
            total, absolute, higher = change(total, first), change(absolute, first), not higher
        inside = op.clamp(op.subtract(scalar(ends[i]), absolute), 0.0, float(ends[i] - ends[i + 1]))
        total = op.add(total, op.multiply(inside, scalar(slope)))
    return (op.squeeze(total, first) if higher else total).output(0)


def _constant(value: Any) -> Array | None:
    node = value.get_node()
    if node.get_type_name() == "Convert":  # tracing leaves a number of another type so
        node = node.input_value(0).get_node()
    return np.ravel(node.get_data()) if node.get_type_name() == "Constant" else None


def _integers(values: list[int]) -> Any:
    return _ops().constant(np.array(values, np.int64))


def _ops() -> Any:
    return library.openvino().opset13
