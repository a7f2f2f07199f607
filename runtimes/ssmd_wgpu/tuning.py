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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.cache import cache_folder
from ssmd.flat.graph import GraphError
from ssmd_wgpu import library
from ssmd_wgpu.device import SHADERS, Gpu, shader
from ssmd_wgpu.operations import HARDWARE, SOFTWARE, Tiling, spread
from ssmd_wgpu.pack import VALUES, Format, blocks, encode
from ssmd_wgpu.recorder import Dispatch, Region

log = logging.getLogger(__name__)
ROWS, COLUMNS, TOKENS = 8192, 2048, 256  # of what is measured
ROUNDS, REPEATS = 5, 8  # medians of rounds, each of so many dispatches
_AGREE = 1e-4  # of the largest value: a candidate that computes something else is no candidate


def tuned(gpu: Gpu, fmt: Format) -> Tiling:
    """The fastest that was found; on software adapters one that is known to do."""
    if gpu.found.software:
        return SOFTWARE
    file = _file(gpu, fmt)
    known = _read(file)
    if known is not None and known in candidates(gpu):
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
        Tiling(threads, rows, tile, quads, subgroups)
        for threads in (8, 16, 32, 64)
        for rows in (2, 4, 8)
        for tile, quads in tiles(gpu)
        for subgroups in (False, True)
        if rows <= threads and (not subgroups or threads <= gpu.subgroup)
    ]


def tiles(gpu: Gpu) -> list[tuple[int, int]]:
    """Of a matmul, and the quads of a thread. Tiles of tokens and of rows, 32 values deep, lie in shared memory."""
    most = gpu.limits["max-compute-workgroup-storage-size"] // (2 * 32 * 4)
    return [(tile, quads) for tile, quads in ((32, 1), (64, 1), (64, 2), (128, 2)) if tile <= most]


def measured(gpu: Gpu, fmt: Format) -> Tiling:
    """The fastest matvec, and the fastest tile of a matmul. Raises GraphError."""
    bench = _Bench(gpu, fmt)
    times: dict[tuple[int, int, bool], float] = {}
    expected: NDArray[np.float32] | None = None
    for t in (t for t in candidates(gpu) if (t.tile, t.quads) == (32, 1)):
        seconds, found = bench.matvec(t)
        expected = found if expected is None else expected
        if np.abs(found - expected).max() <= _AGREE * np.abs(expected).max():
            times[t.threads_per_row, t.rows_per_thread, t.subgroups] = seconds
    threads, rows, subgroups = min(times, key=lambda key: times[key])
    tile, quads = min(tiles(gpu), key=lambda cut: bench.matmul(*cut))
    best = Tiling(threads, rows, tile, quads, subgroups)
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
        """Seconds, and what it gives (ROWS,)."""
        text = shader(
            "matvec",
            **self._sizes,
            threads_per_row=t.threads_per_row,
            rows_per_thread=t.rows_per_thread,
            subgroups=t.subgroups,
            first=0,
            eps="f32(0.0)",
            last_row=False,
        )
        dispatch = self._dispatch(text, *spread(-(-ROWS // (64 // t.threads_per_row * t.rows_per_thread))))
        [found] = self._gpu.recorder.read([dispatch], [Region(self._regions["Y"].buffer, 0, 4 * ROWS)])
        return self._seconds(dispatch), found.view(np.float32)

    def matmul(self, tile: int, quads: int) -> float:
        text = shader("matmul", **self._sizes, tile=tile, quads=quads, stride=COLUMNS, offset=0)
        return self._seconds(self._dispatch(text, -(-ROWS // tile), -(-TOKENS // tile)))

    def _dispatch(self, text: str, x: int, y: int) -> Dispatch:
        kernel = self._gpu.kernel(text)
        self._groups = [self._gpu.bound(kernel, 0, self._regions)]  # alive until the dispatch is done
        if len(kernel.layouts) > 1:
            self._groups.append(self._gpu.bound(kernel, 1, {"CTL": self._control}))
        groups = [*(group._internal for group in self._groups), None]
        return kernel.pipeline._internal, groups[0], groups[1], x, y, 1

    def _seconds(self, dispatch: Dispatch) -> float:
        taken = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            self._gpu.recorder.read([dispatch] * REPEATS, [Region(self._regions["Y"].buffer, 0, 16)])
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)


def _file(gpu: Gpu, fmt: Format) -> Path:
    whole = hashlib.sha256(json.dumps([gpu.found.description, library.package_version(), fmt]).encode())
    for file in sorted(SHADERS.glob("mat*.wgsl")):
        whole.update(file.read_bytes())
    return cache_folder() / "wgpu" / f"tiling-{whole.hexdigest()[:16]}.json"


def _read(file: Path) -> Tiling | None:
    try:
        return Tiling(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
