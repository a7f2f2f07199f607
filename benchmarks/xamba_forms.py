"""Forms of a piecewise linear SiLU: which the CPU plugin compiles, how long it takes over it, and how fast they run.

    benchmarks/xamba_forms.py [SEGMENTS…]     default: 8 16 32 64 128 256

Alone: on float32[1, 256, 1792]. In the block: all three activations of that of benchmarks/xamba.py, in ssmd's own form.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import numpy as np
from daemon_process import conditions
from numpy.typing import NDArray
from xamba import BLOCK, PROPERTIES, ROUNDS, TOKENS, Compiled, random_module

from ssmd_openvino import library, xamba
from ssmd_openvino.convert import converted
from ssmd_openvino.piecewise import Function, silu, terms

Form = Callable[[Any, Function, int], Any]
Run = TypeVar("Run", "Alone", Compiled)
SHAPE = (1, TOKENS, 1792)
CELLS = 1024
op = library.openvino().opset13


def scalar(value: float) -> Any:
    return op.constant(np.array(value, np.float32))


def exact(x: Any, function: Function, segments: int) -> Any:
    return (op.swish(x, scalar(1.0)) if function is silu else op.softplus(x)).output(0)


def whole(function: Function, segments: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Knots (n,) from -R to R and slopes (n + 1,) before, between and after them."""
    ends, slopes = terms(function, segments)
    knots = np.concatenate([-ends, ends[-2::-1]])
    return knots, np.concatenate([[0.0], slopes, 1 - slopes[::-1], [1.0]])


def hinges(x: Any, function: Function, segments: int) -> Any:
    """The sum of d relu(x - k): as it is usually written."""
    knots, slopes = whole(function, segments)
    total = scalar(0.0)
    for knot, change in zip(knots, np.diff(slopes), strict=True):
        total = op.add(total, op.multiply(op.relu(op.subtract(x, scalar(knot))), scalar(change)))
    return total.output(0)


def even_hinges(x: Any, function: Function, segments: int) -> Any:
    """relu(x) + the sum of d relu(c - |x|): half as many."""
    ends, slopes = terms(function, segments)
    total, absolute = op.relu(x), op.abs(x)
    for end, change in zip(ends, np.diff(slopes, prepend=0.0), strict=False):
        total = op.add(total, op.multiply(op.relu(op.subtract(scalar(end), absolute)), scalar(change)))
    return total.output(0)


def one_run(x: Any, function: Function, segments: int) -> Any:
    """Return the product's form without changes of rank."""
    with mock.patch.object(xamba, "TERMS", 1_000_000):
        return OURS(x, function, segments)


def product(x: Any, function: Function, segments: int) -> Any:
    """relu(x) + relu(c - |x|) times the d, as a product of matrices over a last axis of its own."""
    ends, slopes = terms(function, segments)
    last = op.constant(np.array([-1], np.int64))
    each = op.relu(op.subtract(op.constant(ends[:-1].astype(np.float32)), op.unsqueeze(op.abs(x), last)))
    changes = op.constant(np.diff(slopes, prepend=0.0).astype(np.float32)[:, None])
    return op.add(op.relu(x), op.squeeze(op.matmul(each, changes, False, False), last)).output(0)


def table(x: Any, function: Function, segments: int) -> Any:
    """m[i] x + b[i], i out of x: CELLS equal cells, to whose borders the knots are moved. The paper's C-LUT."""
    knots, slopes = whole(function, segments)
    end = knots[-1]
    width = 2 * end / CELLS
    borders = np.round(knots / width) * width
    values = np.cumsum(np.concatenate([[0.0], slopes[1:-1] * np.diff(borders)]))
    middles = (np.arange(-1, CELLS + 1) + 0.5) * width - end
    segment = np.searchsorted(borders, middles)
    m = slopes[segment]
    b = np.concatenate([[0.0], values])[segment] - m * np.concatenate([[0.0], borders])[segment]
    m[[0, -1]], b[[0, -1]] = (0.0, 1.0), 0.0
    place = op.floor(op.add(op.multiply(x, scalar(1 / width)), scalar(1 + end / width)))
    i = op.convert(op.clamp(place, 0.0, CELLS + 1.0), "i32")
    zero = op.constant(np.array(0, np.int64))
    m_of, b_of = (op.gather(op.constant(v.astype(np.float32)), i, zero) for v in (m, b))
    return op.add(op.multiply(m_of, x), b_of).output(0)


OURS = xamba.piecewise_linear
FORMS: dict[str, Form] = {
    "exact operation": exact,
    "hinges of x": hinges,
    "hinges of abs(x)": even_hinges,
    "clamps of abs(x), in one run": one_run,
    "clamps of abs(x), 16 a run (ssmd's)": OURS,
    "product over an axis": product,
    "table of slopes": table,
}


class Alone:
    def __init__(self, form: Form, segments: int) -> None:
        """Compile the form. Raises RuntimeError where the plugin does not compile it."""
        openvino = library.openvino()
        x = op.parameter(SHAPE, np.float32)
        model = openvino.Model([form(x.output(0), silu, segments)], [x], "alone")
        started = time.perf_counter()
        self.request = openvino.Core().compile_model(model, "CPU", PROPERTIES).create_infer_request()
        given = (np.random.default_rng(0).standard_normal(SHAPE) * 4).astype(np.float32)
        self.request.set_input_tensor(0, openvino.Tensor(given))
        self.ms()
        self.seconds = time.perf_counter() - started
        self.error = np.abs(self.request.get_output_tensor(0).data - silu(given.astype(np.float64))).max()

    def ms(self) -> float:
        started = time.perf_counter()
        self.request.start_async()
        self.request.wait()
        return (time.perf_counter() - started) * 1e3


def in_block(block: Any, form: Form, segments: int) -> Compiled:
    model = block.clone()
    with mock.patch.object(xamba, "piecewise_linear", form):
        xamba.apply(model, xamba.Passes(actiba=segments))
    return Compiled(model, [1 + i % 200 for i in range(TOKENS)], 0.1)


def made(make: Callable[[Form, int], Run], name: str, segments: int) -> Run | None:
    """Make one form's run; None, and a line on stderr, where the plugin fails."""
    try:
        return make(FORMS[name], segments)
    except RuntimeError as err:
        print(f"{name}, {segments} segments: {str(err).strip().splitlines()[-1]}", file=sys.stderr)
        return None


def compare(block: Any, segments: int) -> None:
    alone = {name: made(Alone, name, segments) for name in FORMS}
    within = {name: made(partial(in_block, block), name, segments) for name in FORMS}
    runs = [run for kept in (alone, within) for run in kept.values()]
    times = [[run.ms() if run else math.nan for run in runs] for _ in range(ROUNDS)]
    medians = [statistics.median(row) for row in zip(*times, strict=True)]
    for name, ms, block_ms in zip(FORMS, medians, medians[len(FORMS) :], strict=False):
        one = alone[name]
        cells = [f"{ms:.2f}", f"{one.seconds:.2f}", f"{one.error:.1e}"] if one else ["-", "-", "-"]
        cells.append(f"{block_ms:.1f}" if within[name] else "-")
        print(f"| {segments} | {name} | {' | '.join(cells)} |", flush=True)


def main(counts: list[int]) -> None:
    block = converted(random_module(BLOCK), TOKENS, TOKENS)
    print(f"# piecewise linear SiLU on {SHAPE}; OpenVINO {library.package_version()}, {PROPERTIES}; {conditions()}")
    print(f"# medians of {ROUNDS} in turn; -: the plugin fails to compile it\n")
    print("| segments | form | alone: ms | compile s | error | block: ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for segments in counts:
        compare(block, segments)


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or [8, 16, 32, 64, 128, 256])
