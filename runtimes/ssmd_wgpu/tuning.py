"""The fastest tiling on an adapter, measured once for each build, with the shapes of its own matrices.

Another tiling sums in another order, so an exact resume needs the same one (`producer`). It is kept with the user's
data: emptying a cache must not turn an exact resume into a portable one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.cache import BUILD, tunings
from ssmd.model.plan import Mamba2
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.protocol import FormTime
from ssmd_wgpu import library
from ssmd_wgpu.device import ALIGNMENT, SHADERS, Gpu, digest, shader
from ssmd_wgpu.pack import VALUES, Format, blocks, format_of, is_matrix
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.products import (
    HARDWARE,
    MOST_SLICES,
    MOST_SUMS,
    OWN,
    SOFTWARE,
    Products,
    Tiling,
    ahead,
    rows_per_thread,
    shape,
    slices_of,
)
from ssmd_wgpu.recorder import Dispatch, Region, dispatch
from ssmd_wgpu.resident import DeviceMatrix, Part, Vectors
from ssmd_wgpu.ssd import CHUNK, recurrence, spread

log = logging.getLogger(__name__)
TOKENS = 256  # of a prompt that is measured
STREAMS = 8  # of a step of several that is measured
POOL_BYTES = 128 << 20  # of weights that a kernel reads in turn: more than a cache of any GPU keeps
ROUNDS, REPEATS, FEW = 5, 256, 4  # the shortest of rounds, each of so many dispatches; of a matmul few
MARGIN = 0.97  # of the time of the form before it, which another must beat
UNSEEN_S = 3e-7  # of a dispatch: a smaller difference is not measured, and no reason to leave the usual form
LIMIT_S = 8.0  # of measuring: shapes that are left then get what the one with the most bytes has
WARM_S = 0.1
FEW_ROWS, APART = 2, 3  # how far a tiling is simplified: 1, not fused; then two rows a thread; streams one by one
# Threads of a row, rows of a thread, by subgroups, units ahead: the usual one first.
FORMS = ((32, 2, True, 4), (32, 2, True, 1), (32, 4, True, 2), (16, 4, True, 2), (64, 2, False, 4), (16, 4, False, 1))
SEVERAL = (2, 4)  # rows of a thread in a step of several streams
_BUSY = """
@group(0) @binding(0) var<storage, read_write> Y: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {
  var s = f32(at.x);
  for (var i = 0u; i < 8192u; i++) { s = fma(s, 0.999, 0.5); }
  Y[at.x % 1024u] = s;
}"""
_KINDS = {"one": "matvec", "several": f"rows of a thread, {STREAMS} streams,", "tiles": "matmul"}  # of a shape's times
_AGREE = 1e-4  # of the largest value: a form that computes something else is no candidate


@dataclass
class Tuning:
    """The tiling of a build on an adapter.

    table: for each shape, the number of matrices and the measured microseconds. simpler: how far a trial simplified it.
    step_s: seconds of steps in the trial, None before it.
    """

    tiling: Tiling
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    simpler: int = 0
    step_s: dict[int, float] | None = None
    file: Path | None = None

    @property
    def simplified(self) -> Tiling:
        t = replace(self.tiling, fused=self.tiling.fused and not self.simpler, together=self.simpler < APART)
        if self.simpler != FEW_ROWS:
            return t
        few = {"rows_per_thread": 2, "ahead": 1, "rows_of_several": 2}
        shapes = [(name, {**dict(zip(OWN, own, strict=True)), **few}) for name, own in t.shapes]
        own = tuple((name, tuple(values[key] for key in OWN)) for name, values in shapes)
        return replace(t, rows_per_thread=2, ahead=1, rows_of_several=2, shapes=own)

    def form_times(self) -> list[FormTime]:
        """Return the times of the measured forms. A simplified tiling may have a form that was not measured."""
        t, found = self.simplified, list[FormTime]()
        for name, own in t.shapes:
            row = self.table.get(name, {})
            threads, rows, subgroups, units, of_several, tile, quads = own
            chosen = {"one": _form(threads, rows, bool(subgroups), units), "several": str(of_several)}
            chosen["tiles"] = f"{tile}/{quads}"
            for key in (key for key in _KINDS if key in row):
                kernel = f"{_KINDS[key]} {name}, {row['count']} in the model"
                found += [FormTime(kernel, form, float(us), form == chosen[key]) for form, us in row[key].items()]
        times = {key: us for key, us in self.table.get("mlp", {}).items() if key != "count"}
        chosen_mlp = "fused" if t.fused else "apart"
        found += [FormTime("MLP of a step", key, float(us), key == chosen_mlp) for key, us in times.items()]
        return found

    def keep(self) -> None:
        if self.file is None:
            return
        kept = {"tiling": vars(self.tiling), "table": self.table, "simpler": self.simpler, "step_s": self.step_s}
        part = self.file.with_suffix(".part")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_text(json.dumps(kept))
            part.replace(self.file)
        except OSError as err:
            log.warning("the tiling could not be kept in %s (%s): it is measured at every start", self.file, err)


def _form(threads: int, rows: int, subgroups: bool, units: int) -> str:
    """Name a form of a matvec: threads of a row x rows of a thread, s with subgroups / units ahead."""
    return f"{threads}x{rows}{'s' if subgroups else ''}/{units}"


def tuned(gpu: Gpu, plan: PackedPlan, fmt: Format, build: str = "") -> Tuning:
    """Return the fastest tiling for a plan; on software adapters a fixed one. It is kept if a build is named."""
    if gpu.found.software:
        return Tuning(SOFTWARE)
    file = kept_in(gpu, build) if build else None
    known = None if file is None else _read(file, gpu)
    if known is not None:
        return known
    try:
        made = measured(gpu, plan, fmt)
    except GraphError as err:
        log.warning("the tiling could not be measured (%s): the usual one it is", err)
        return Tuning(HARDWARE)
    made.file = file
    made.keep()
    return made


def forms(gpu: Gpu) -> list[tuple[int, int, bool, int]]:
    """Return the forms of a matvec that this GPU supports, with smaller subgroups if it has no larger ones."""
    narrow = [(gpu.subgroup, 4, True, 2)] if 4 <= gpu.subgroup < 16 else []
    return [*(form for form in FORMS if not form[2] or form[0] <= gpu.subgroup), *narrow]


def tiles(gpu: Gpu) -> list[tuple[int, int]]:
    """Return the tiles of a matmul that this GPU can hold, each with the quads of a thread.

    Tiles of tokens and of rows, 32 values deep, lie in shared memory.
    """
    most = gpu.limits["max-compute-workgroup-storage-size"] // (2 * 32 * 4)
    return [(tile, quads) for tile, quads in ((64, 1), (32, 1), (64, 2), (128, 2)) if tile <= most]


def shapes_of(plan: PackedPlan, quantization: Format) -> list[tuple[int, int, Format, int]]:
    """Return the shapes of a plan's matrices, those with the most bytes first: (rows, columns, format, number).

    The time step's own matrix is left out, as it is not a product of a step.
    """
    count = Counter(
        (*size, format_of(name, quantization)) for name, size in products_of(plan).items() if not name.endswith("_dt")
    )
    made = [(*key, n) for key, n in count.items()]
    return sorted(made, key=lambda one: (-one[0] * blocks(one[1], one[2]) * one[3], one))


def products_of(plan: PackedPlan) -> dict[str, tuple[int, int]]:
    """Return the shape of each matrix of a plan; of a layer's experts that of one."""
    experts = plan.expert_rows()
    return {n: (experts.get(n, size[0]), size[1]) for n, size in plan.packed().items() if is_matrix(n, size)}


def measured(gpu: Gpu, plan: PackedPlan, quantization: Format) -> Tuning:
    """Measure the forms of each shape, and the other choices of a tiling. Raises GraphError."""
    bench, begin = _Bench(gpu, plan), time.monotonic()
    warm(gpu)
    heads = {(plan.vocabulary, plan.hidden)}
    own: dict[str, tuple[int, ...]] = {}
    table: dict[str, dict[str, Any]] = {}
    for rows, columns, fmt, count in shapes_of(plan, quantization):
        if own and time.monotonic() - begin > LIMIT_S:
            log.warning("measuring took %.1f s: %s and smaller shapes have the usual form", LIMIT_S, (rows, columns))
            break
        w = _Shape(bench, rows, columns, fmt)
        one = w.matvecs(forms(gpu))
        threads, rows_each, subgroups, units = picked(one)
        several = w.matvecs([(threads, n, subgroups, 1) for n in SEVERAL], STREAMS)
        cuts = {} if (rows, columns) in heads else w.matmuls(tiles(gpu))
        tile, quads = picked(cuts) if cuts else (64, 1)
        of_several = picked(several)[1]
        name = shape(rows, columns, fmt)
        own[name] = (threads, rows_each, subgroups, units, of_several, tile, quads)
        table[name] = {
            "count": count,
            "one": {_form(*key): round(1e6 * taken, 2) for key, taken in one.items()},
            "several": {str(key[1]): round(1e6 * taken, 2) for key, taken in several.items()},
            "tiles": {f"{t}/{q}": round(1e6 * taken, 1) for (t, q), taken in cuts.items()},
        }
    first = next(iter(own.values()))
    tiles_of_products = [form[5:] for name, form in own.items() if table[name]["tiles"]]
    best = replace(HARDWARE.having(first), chunked=False, shapes=tuple(own.items()))
    if tiles_of_products:
        best = replace(best, tile=tiles_of_products[0][0], quads=tiles_of_products[0][1])
    mamba2 = next((m for m in plan.mixers if isinstance(m, Mamba2)), None)
    if mamba2 is not None:
        best = replace(best, chunked=bench.mamba2(mamba2, True) < MARGIN * bench.mamba2(mamba2, False))
    mlp = next((layer.mlp for layer in plan.layers if layer.mlp is not None), None)
    if gpu.coherent and mlp is not None:
        (apart, expected), (whole, found) = (bench.mlp(replace(best, fused=f), quantization) for f in (False, True))
        best = replace(best, fused=whole < MARGIN * apart and found.tobytes() == expected.tobytes())
        table["mlp"] = {"count": 1, "apart": round(1e6 * apart, 2), "fused": round(1e6 * whole, 2)}
    log.info("measured in %.1f s on %s: %s", time.monotonic() - begin, gpu.found.description, best)
    return Tuning(best, table)


def picked(times: Mapping[Any, float]) -> Any:
    """Return the first form that no other beats by the margin. So of two equal ones every run picks the same."""
    return next(key for key, taken in times.items() if MARGIN * taken - UNSEEN_S <= min(times.values()))


class _Bench:
    """Holds the buffers for measuring kernels: a pool of weights, values of x, and room for results."""

    def __init__(self, gpu: Gpu, plan: PackedPlan) -> None:
        self.gpu, self.plan = gpu, plan
        rng = np.random.default_rng(0)
        sizes = products_of(plan).values()
        most_rows, most = max(size[0] for size in sizes), max(size[1] for size in sizes)
        products = max([size[0] for size in sizes if size[0] != plan.vocabulary], default=1)
        # Halves without their exponent's first bit: small numbers in any format.
        piece = (rng.integers(0, 1 << 16, 1 << 19, np.uint16) & 0xBBFF).astype(np.uint16)
        self.pool = gpu.region(min(POOL_BYTES, gpu.binding_bytes))
        for at in range(0, self.pool.size, piece.nbytes):
            gpu.write(self.pool, piece.view(np.uint8)[: self.pool.size - at], at)
        self.x = gpu.uploaded(rng.standard_normal((TOKENS, most), np.float32))
        self.gain = gpu.uploaded(np.ones(most + 4, np.float32))
        self.y = gpu.region(4 * max(TOKENS * products, STREAMS * most_rows))
        self.control = [gpu.uploaded(np.array([0, n, 0, 0] * STREAMS, np.uint32)) for n in (TOKENS, STREAMS)]

    def bound(self, text: str, x: int, y: int, regions: Mapping[str, Region], several: bool = False) -> Dispatch:
        kernel = self.gpu.kernel(text)
        group0, group1 = self.gpu.bound(kernel, 0, regions), None
        if len(kernel.layouts) > 1:
            group1 = self.gpu.bound(kernel, 1, {**regions, "CTL": self.control[several]})
        return dispatch(kernel.pipeline, group0, group1, x, y)

    def seconds(self, made: Mapping[Any, Sequence[Dispatch]], repeats: int) -> dict[Any, float]:
        """Measure kernels, each by its dispatches in turn, `repeats` of them: seconds of one dispatch.

        Recording and submitting is taken off: the shortest round less the shortest of as many dispatches without
        workgroups. (The least of their differences would be the round whose recording was held up.)
        """
        whole = {key: [each[i % len(each)] for i in range(repeats)] for key, each in made.items()}
        empty = {key: [(p, a, b, 0, 0, w) for p, a, b, _, _, w in each] for key, each in whole.items()}
        taken, off = (dict.fromkeys(made, float("inf")) for _ in range(2))
        for _ in range(ROUNDS):
            for key in made:
                taken[key] = min(taken[key], self._taken(whole[key]))
                off[key] = min(off[key], self._taken(empty[key]))
        return {key: max(1e-9, taken[key] - off[key]) / repeats for key in made}

    def _taken(self, dispatches: Sequence[Dispatch]) -> float:
        begin = time.perf_counter()
        self.gpu.recorder.submit(dispatches)
        self.gpu.recorder.read([], [Region(self.y.buffer, 0, 16)])
        return time.perf_counter() - begin

    def mlp(self, t: Tiling, quantization: Format) -> tuple[float, NDArray[np.float32]]:
        """Measure an MLP of one token. Returns the seconds, and its contribution to x (hidden,)."""
        layer = next(layer for layer in self.plan.layers if layer.mlp is not None)
        assert layer.mlp is not None
        into, rows = layer.mlp.into
        hidden, inner, act, gpu = self.plan.hidden, layer.mlp.intermediate, layer.mlp.activation, self.gpu
        placed, to = {}, "layer0_"
        for name, shape_ in ((into, (rows, hidden)), ("down", (hidden, inner))):
            fmt = format_of(to + name, quantization)
            w = _Shape(self, *shape_, fmt)
            if w.rows < shape_[0]:
                return 0.0, np.empty(0, np.float32)  # larger than the pool: no kernel that small workgroups share
            values, scales = w.regions(0)
            placed[to + name] = DeviceMatrix(*shape_, fmt, (Part(values, scales, 0, shape_[0]),))
        x = np.random.default_rng(1).standard_normal(hidden).astype(np.float32)
        buffers = {"x": gpu.uploaded(x), "wide": gpu.region(4 * inner), "u": self.x}
        buffers |= {"sums": gpu.region(4 * (MOST_SUMS + 8 * MOST_SLICES)), "count": gpu.region(16)}
        products = Products(gpu, placed, {"mlp": Vectors(self.gain, {"norm2": 0})}, buffers, 1e-5, t)
        cut = products.slices(to + "down")
        whole = products.mlp(to + into, to + "down", "mlp", 0, act, cut)
        ops = [whole] if whole is not None else []
        if whole is None:
            unit = 1 if cut is None else cut.unit
            ops += products.of(to + into, "mlp", "x", "wide", 1, gain=0, end=act)
            ops += products.of(to + "down", "mlp", "wide", "x", 1, end="add", unit=unit)
        step = [dispatch(op.kernel.pipeline, op.group0, None, *op.grid) for op in ops]
        [found] = gpu.recorder.read(step, [buffers["x"]])
        return self.seconds({"": step}, REPEATS)[""] * len(step), found.view(np.float32)

    def mamba2(self, m: Mamba2, chunked: bool) -> float:
        """Measure the recurrence of a Mamba-2 layer, seconds."""
        made = {"u": m.channels, "z": m.rows, "y": m.inner, "dt": m.heads, "logs": m.heads}
        regions = {name.upper(): self.gpu.region(4 * TOKENS * width) for name, width in made.items()}
        regions["SSM"] = self.gpu.region(4 * m.inner * m.states)
        regions["CHUNKS"] = self.gpu.region(-(-TOKENS // CHUNK) * regions["SSM"].size)
        regions["P"] = self.gpu.uploaded(np.zeros(m.heads + 4, np.float32))
        sizes: dict[str, Any] = {"heads": m.heads, "head_dim": m.head_dim, "states": m.states, "groups": m.groups}
        sizes |= {"a": 0, "dt_bias": 0, "d": 0, "dt_low": "f32(0.0)", "dt_high": "f32(1.0)", "gate": True}
        sizes |= {"u_stride": m.channels, "z_stride": m.rows, "dt_offset": m.inner + m.channels}
        steps = [
            self.bound(text, x, -(-TOKENS // tokens) if tokens else y, regions)
            for text, (x, y), tokens in recurrence(sizes, chunked=chunked)
        ]
        return self.seconds({"": steps}, FEW * len(steps))[""] * len(steps)


class _Shape:
    """Matrices of one shape, one after another in the pool; of a large one as many rows as it holds."""

    def __init__(self, bench: _Bench, rows: int, columns: int, fmt: Format) -> None:
        self._bench, self._fmt, self._columns = bench, fmt, columns
        self._width = 16 * blocks(columns, fmt)
        self.rows = min(rows, bench.pool.size // self._width // 2 * 2 or 1)
        self._stride = -(-self.rows * self._width // ALIGNMENT) * ALIGNMENT
        self.count = max(1, min(REPEATS, bench.pool.size // self._stride))
        self._sizes: dict[str, Any] = {"format": fmt, "blocks": blocks(columns, fmt), "values": VALUES[fmt]}
        self._sizes |= {"columns": columns, "rows": self.rows, "bias": None, "end": "store"}
        self._regions = {"X": bench.x, "P": bench.gain, "Y": bench.y}

    def regions(self, i: int) -> tuple[Region, Region | None]:
        """Return the values and the scales of matrix `i`."""
        pool, nbytes = self._bench.pool.buffer, self.rows * self._width
        scales = {"int8": 4 * self.rows, "int4": 2 * self.rows * self._width // 16}.get(self._fmt)
        return Region(pool, i * self._stride, nbytes), None if scales is None else Region(pool, 0, -(-scales // 4) * 4)

    def _placed(self, text: str, x: int, y: int, several: bool = False) -> list[Dispatch]:
        made = []
        for i in range(self.count):
            values, scales = self.regions(i)
            own = {"W": values} if scales is None else {"W": values, "S": scales}
            made.append(self._bench.bound(text, x, y, {**self._regions, **own}, several))
        return made

    def matvecs(self, wanted: Sequence[tuple[int, int, bool, int]], streams: int = 1) -> dict[Any, float]:
        """Measure forms of a matvec that compute the same: seconds, in the order in which they are wanted."""
        gpu, made = self._bench.gpu, dict[Any, list[Dispatch]]()
        cut = slices_of(DeviceMatrix(self.rows, self._columns, self._fmt, ()))
        unit = 1 if cut is None or self.rows != self._bench.plan.hidden else cut.unit
        expected: NDArray[np.float32] | None = None
        for threads, rows, subgroups, units in wanted:
            t = Tiling(threads, rows, 64, 1, subgroups, ahead=units, rows_of_several=rows)
            each = rows_per_thread(t, streams)
            text = shader(
                "matvec",
                **self._sizes,
                threads_per_row=threads,
                rows_per_thread=each,
                subgroups=subgroups,
                ahead=ahead(t, self._fmt, streams, each, unit),
                gain=None if unit > 1 else 0,
                streams=streams,
                stride=self.rows,
                unit=unit,
                threads=64,
                first=0,
                eps="f32(0.00001)",
                last_row=False,
            )
            placed = self._placed(text, *spread(-(-self.rows // (64 // threads * each))), streams > 1)
            [raw] = gpu.recorder.read(placed[:1], [Region(self._bench.y.buffer, 0, 4 * self.rows)])
            found = raw.view(np.float32)
            expected = found if expected is None else expected
            if np.abs(found - expected).max() <= _AGREE * np.abs(expected).max():
                made[threads, rows, subgroups, units] = placed
        return self._times(made, REPEATS)

    def matmuls(self, wanted: Sequence[tuple[int, int]]) -> dict[Any, float]:
        made = {}
        for tile, quads in wanted:
            sizes = {**self._sizes, "gain": None, "tile": tile, "quads": quads, "stride": self._columns, "offset": 0}
            grid = -(-self.rows // tile), -(-TOKENS // tile)
            made[tile, quads] = self._placed(shader("matmul", **sizes), *grid)
        return self._times(made, FEW)

    def _times(self, made: Mapping[Any, Sequence[Dispatch]], repeats: int) -> dict[Any, float]:
        warm(self._bench.gpu, WARM_S / 10)
        return self._bench.seconds(made, repeats)


def warm(gpu: Gpu, seconds: float = WARM_S) -> None:
    """Keep the adapter busy for so long: one that was idle computes at a fraction of its clocks. Software has none."""
    if gpu.found.software:
        return
    kernel, region = gpu.kernel(_BUSY), gpu.region(4 * 1024)
    busy = [dispatch(kernel.pipeline, gpu.bound(kernel, 0, {"Y": region}), None, 2048, 1)]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        gpu.recorder.read(busy, [Region(region.buffer, 0, 16)])


def kept_in(gpu: Gpu, build: str) -> Path:
    """Return the file of a build's tuning for this adapter, its driver, this wgpu and these kernels."""
    what = [gpu.found.description, library.package_version(), digest(SHADERS)]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return tunings() / f"{build[:BUILD]}-{name}.json"


def _read(file: Path, gpu: Gpu) -> Tuning | None:
    """Return a kept tuning, if this GPU supports it."""
    try:
        kept = json.loads(file.read_text())
        shapes = tuple((str(name), tuple(own)) for name, own in kept["tiling"].pop("shapes"))
        tiling = Tiling(**kept["tiling"], shapes=shapes)
        for t in [tiling, *(tiling.having(own) for _, own in shapes)]:
            form = t.threads_per_row, t.rows_per_thread, bool(t.subgroups), t.ahead
            if form not in forms(gpu) or (t.tile, t.quads) not in tiles(gpu) or t.rows_of_several not in SEVERAL:
                return None
        step_s = None if kept["step_s"] is None else {int(n): float(taken) for n, taken in kept["step_s"].items()}
        known = Tuning(tiling, dict(kept["table"]), int(kept["simpler"]), step_s, file)
        known.form_times()  # a table that makes no sense raises
        return known
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
