"""Which tiling an adapter is fastest with: measured once for each format of weights, and kept in the cache folder.

Another tiling sums in another order, so it is part of what an exact resume needs (`producer`): one that was measured
anew may make a resume portable, never wrong.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.cache import cache_folder
from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu import library
from ssmd_wgpu.device import SHADERS, Gpu, digest, shader
from ssmd_wgpu.pack import VALUES, Format, blocks, encode
from ssmd_wgpu.products import HARDWARE, MOST_SLICES, MOST_SUMS, SOFTWARE, Products, Tiling
from ssmd_wgpu.recorder import Dispatch, Region, dispatch
from ssmd_wgpu.resident import Part, Placed, Vectors
from ssmd_wgpu.ssd import CHUNK, recurrence, spread

log = logging.getLogger(__name__)
ROWS, COLUMNS, TOKENS = 8192, 2048, 256  # of what is measured
MAMBA2 = 48, 32, 128  # heads, head_dim, states
MLP = 768, 2048  # hidden, intermediate
ROUNDS, REPEATS = 5, 8  # medians of rounds, each of so many dispatches
WARM_S = 0.1
_BUSY = """
@group(0) @binding(0) var<storage, read_write> Y: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {
  var s = f32(at.x);
  for (var i = 0u; i < 8192u; i++) { s = fma(s, 0.999, 0.5); }
  Y[at.x % 1024u] = s;
}"""
_AGREE = 1e-4  # of the largest value: a candidate that computes something else is no candidate


def tuned(gpu: Gpu, fmt: Format) -> Tiling:
    """The fastest that was found; on software adapters one that is known to do."""
    if gpu.found.software:
        return SOFTWARE
    file = _file(gpu, fmt)
    known = _read(file)
    if known is not None and replace(known, fused=False, together=True) in candidates(gpu):
        return known
    try:
        best = measured(gpu, fmt)
    except GraphError as err:
        log.warning("the tiling could not be measured (%s): the usual one it is", err)
        return HARDWARE
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(json.dumps(vars(best)))
    except OSError as err:
        log.warning("the tiling could not be kept in %s (%s): it is measured at every start", file, err)
    return best


def candidates(gpu: Gpu) -> list[Tiling]:
    return [
        Tiling(threads, rows, tile, quads, subgroups, chunked)
        for threads in (8, 16, 32, 64)
        for rows in (2, 4, 8)
        for tile, quads in tiles(gpu)
        for subgroups in (False, True)
        for chunked in (False, True)
        if rows <= threads and (not subgroups or threads <= gpu.subgroup)
    ]


def tiles(gpu: Gpu) -> list[tuple[int, int]]:
    """The tiles of a matmul that this GPU can hold, each with the quads of a thread. Tiles of tokens and of rows, 32
    values deep, lie in shared memory.
    """
    most = gpu.limits["max-compute-workgroup-storage-size"] // (2 * 32 * 4)
    return [(tile, quads) for tile, quads in ((32, 1), (64, 1), (64, 2), (128, 2)) if tile <= most]


def measured(gpu: Gpu, fmt: Format) -> Tiling:
    """The fastest matvec, the fastest tile of a matmul, and what else is worth it. Raises GraphError."""
    bench = _Bench(gpu, fmt)
    times: dict[tuple[int, int, bool], float] = {}
    expected: NDArray[np.float32] | None = None
    for t in (t for t in candidates(gpu) if (t.tile, t.quads, t.chunked) == (32, 1, False)):
        seconds, found = bench.matvec(t)
        expected = found if expected is None else expected
        if np.abs(found - expected).max() <= _AGREE * np.abs(expected).max():
            times[t.threads_per_row, t.rows_per_thread, t.subgroups] = seconds
    threads, rows, subgroups = min(times, key=lambda key: times[key])
    tile, quads = min(tiles(gpu), key=lambda cut: bench.matmul(*cut))
    chunked = min((False, True), key=bench.mamba2)
    best = Tiling(threads, rows, tile, quads, subgroups, chunked)
    if gpu.coherent:
        (apart, expected), (whole, found) = (bench.mlp(replace(best, fused=fused)) for fused in (False, True))
        best = replace(best, fused=whole < apart and found.tobytes() == expected.tobytes())
    log.info("measured %d tilings for %s on %s: %s", len(times), fmt, gpu.found.description, best)
    return best


class _Bench:
    """A matrix of ROWS by COLUMNS and TOKENS tokens to multiply it with."""

    def __init__(self, gpu: Gpu, fmt: Format) -> None:
        self._gpu, self._fmt = gpu, fmt
        rng = np.random.default_rng(0)
        values, *scales = encode(rng.standard_normal((ROWS, COLUMNS), np.float32), fmt)
        x = rng.standard_normal((TOKENS, COLUMNS), np.float32)
        self._regions = {"W": gpu.uploaded(values), "X": gpu.uploaded(x), "P": gpu.uploaded(np.ones(4, np.float32))}
        if scales:
            self._regions["S"] = gpu.uploaded(scales[0])
        self._regions["Y"] = gpu.region(4 * TOKENS * ROWS)
        self._control = gpu.uploaded(np.array([0, TOKENS, 0, 0], np.uint32))
        self._sizes: dict[str, Any] = {
            "format": fmt,
            "blocks": blocks(COLUMNS, fmt),
            "values": VALUES[fmt],
            "columns": COLUMNS,
        }
        self._sizes |= {"rows": ROWS, "gain": None, "bias": None, "end": "store"}

    def matvec(self, t: Tiling) -> tuple[float, NDArray[np.float32]]:
        """Measure a matvec: seconds, and what it gives (ROWS,)."""
        text = shader(
            "matvec",
            **self._sizes,
            threads_per_row=t.threads_per_row,
            rows_per_thread=t.rows_per_thread,
            subgroups=t.subgroups,
            streams=1,
            stride=ROWS,
            unit=1,
            threads=64,
            first=0,
            eps="f32(0.0)",
            last_row=False,
        )
        one = self._dispatch(text, *spread(-(-ROWS // (64 // t.threads_per_row * t.rows_per_thread))))
        [found] = self._gpu.recorder.read([one], [Region(self._regions["Y"].buffer, 0, 4 * ROWS)])
        return self._seconds(one), found.view(np.float32)

    def matmul(self, tile: int, quads: int) -> float:
        text = shader("matmul", **self._sizes, tile=tile, quads=quads, stride=COLUMNS, offset=0)
        return self._seconds(self._dispatch(text, -(-ROWS // tile), -(-TOKENS // tile)))

    def mlp(self, t: Tiling) -> tuple[float, NDArray[np.float32]]:
        """Measure an MLP of one token: seconds, and what it adds to x (hidden,)."""
        hidden, inner = MLP
        rng = np.random.default_rng(1)
        placed, to = {}, "layer0_"
        for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            parts = encode(rng.standard_normal((rows, columns), np.float32) * columns**-0.5, self._fmt)
            values, scales = self._gpu.uploaded(parts[0]), self._gpu.uploaded(parts[1]) if len(parts) > 1 else None
            placed[to + name] = Placed(rows, columns, self._fmt, (Part(values, scales, 0, rows),))
        x = rng.standard_normal(hidden, np.float32)
        buffers = {"x": self._gpu.uploaded(x), "wide": self._gpu.region(4 * inner), "u": self._regions["X"]}
        buffers |= {"sums": self._gpu.region(4 * (MOST_SUMS + 8 * MOST_SLICES)), "count": self._gpu.region(16)}
        vectors = {"mlp": Vectors(self._gpu.uploaded(np.ones(hidden, np.float32)), {"norm2": 0})}
        products = Products(self._gpu, placed, vectors, buffers, 1e-5, t)
        cut = products.slices(to + "down")
        whole = products.mlp(to + "gate_up", to + "down", "mlp", 0, "swiglu", cut)
        ops = [whole] if whole is not None else []
        if whole is None:
            unit = 1 if cut is None else cut.unit
            ops += products.of(to + "gate_up", "mlp", "x", "wide", 1, gain=0, end="swiglu")
            ops += products.of(to + "down", "mlp", "wide", "x", 1, end="add", unit=unit)
        step = [dispatch(op.kernel.pipeline, op.group0, None, *op.grid) for op in ops]
        [found] = self._gpu.recorder.read(step, [buffers["x"]])
        return self._seconds(*step), found.view(np.float32)

    def mamba2(self, chunked: bool) -> float:
        """Measure the recurrence of one Mamba-2 layer, seconds."""
        heads, head_dim, states = MAMBA2
        inner = heads * head_dim
        made = {"u": inner + 2 * states, "z": 2 * inner + 2 * states + heads, "y": inner, "dt": heads, "logs": heads}
        regions = {name.upper(): self._gpu.region(4 * TOKENS * width) for name, width in made.items()}
        regions["SSM"] = self._gpu.region(4 * inner * states)
        regions["CHUNKS"] = self._gpu.region(-(-TOKENS // CHUNK) * regions["SSM"].size)
        regions["P"] = self._gpu.uploaded(np.zeros(heads + 4, np.float32))
        sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "states": states, "groups": 1, "gate": True}
        sizes |= {"a": 0, "dt_bias": 0, "d": 0, "dt_low": "f32(0.0)", "dt_high": "f32(1.0)"}
        sizes |= {"u_stride": made["u"], "z_stride": made["z"], "dt_offset": made["z"] - heads}
        steps = recurrence(sizes, chunked=chunked)
        return self._seconds(
            *(self._dispatch(text, x, -(-TOKENS // tokens) if tokens else y, regions) for text, (x, y), tokens in steps)
        )

    def _dispatch(self, text: str, x: int, y: int, regions: Mapping[str, Region] | None = None) -> Dispatch:
        kernel = self._gpu.kernel(text)
        group0, group1 = self._gpu.bound(kernel, 0, regions or self._regions), None
        if len(kernel.layouts) > 1:
            group1 = self._gpu.bound(kernel, 1, {**(regions or {}), "CTL": self._control})
        return dispatch(kernel.pipeline, group0, group1, x, y)

    def _seconds(self, *dispatches: Dispatch) -> float:
        taken = []
        for _ in range(ROUNDS + 1):
            begin = time.perf_counter()
            self._gpu.recorder.read([*dispatches] * REPEATS, [Region(self._regions["Y"].buffer, 0, 16)])
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[1:])


def warm(gpu: Gpu, seconds: float = WARM_S) -> None:
    """Keep the adapter busy for so long: one that was idle computes at a fraction of its clocks. Software has none."""
    if gpu.found.software:
        return
    kernel, region = gpu.kernel(_BUSY), gpu.region(4 * 1024)
    busy = [dispatch(kernel.pipeline, gpu.bound(kernel, 0, {"Y": region}), None, 2048, 1)]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        gpu.recorder.read(busy, [Region(region.buffer, 0, 16)])


def _file(gpu: Gpu, fmt: Format) -> Path:
    what = [gpu.found.description, library.package_version(), digest(SHADERS), fmt]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache_folder() / "wgpu" / f"tiling-{name}.json"


def _read(file: Path) -> Tiling | None:
    try:
        return Tiling(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
