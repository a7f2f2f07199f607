"""Weights in a device's memory: all of it is allocated before anything is read, then filled piece by piece."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu.device import Gpu
from ssmd_wgpu.pack import VALUES, Format, Weights, blocks, nbytes
from ssmd_wgpu.plan import PackedPlan, packed_follower, packed_mixer
from ssmd_wgpu.recorder import Region

PIECE_BYTES = 8 << 20  # of an upload: what waits in host memory to be copied


@dataclass(frozen=True)
class Part:
    """Rows of a matrix from `first` on, as many as one binding can hold; of experts whole ones."""

    values: Region
    scales: Region | None
    first: int
    rows: int


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix (rows, columns) on the device; with experts one of each, the rows of one after those of another."""

    rows: int
    columns: int
    fmt: Format
    parts: tuple[Part, ...]

    @property
    def sizes(self) -> dict[str, Any]:
        """The constants that a shader needs to read any of its parts."""
        return {
            "format": self.fmt,
            "blocks": blocks(self.columns, self.fmt),
            "values": VALUES[self.fmt],
            "columns": self.columns,
        }


@dataclass(frozen=True)
class Vectors:
    """The vectors of a part of a layer one after another in a region; `at` counts values, a multiple of 4 each."""

    region: Region
    at: Mapping[str, int]


class DeviceWeights:
    """The weights of a plan. Vectors by the part of the model that reads them: "", "layer3_mixer0", "layer3_mlp"."""

    def __init__(self, gpu: Gpu, plan: PackedPlan, weights: Weights) -> None:
        """Place the weights in the device's memory. Raises GraphError, before any upload, if they do not fit."""
        self._gpu = gpu
        self._uploads: list[tuple[Region, NDArray[Any]]] = []
        try:
            experts = plan.expert_rows()
            self.matrices = {name: self._place(name, weights, experts.get(name)) for name in weights.matrices}
            self.vectors = dict(self._pack_vectors(plan, weights.vectors))
            self.tables: dict[str, Region] = {}
            if plan.rotated:
                self.tables = {n.upper(): self._region(weights.vectors[f"rope_{n}"]) for n in ("cos", "sin")}
        except GraphError as err:
            raise GraphError(f"{err}{_advice(weights)}") from err

    def upload(self) -> None:
        for region, array in self._uploads:
            raw = array.reshape(-1).view(np.uint8)
            for at in range(0, raw.nbytes, PIECE_BYTES):
                piece = raw[at : at + PIECE_BYTES]
                if piece.nbytes % 4:
                    piece = np.pad(piece, (0, -piece.nbytes % 4))
                self._gpu.write(region, piece, at)
                self._gpu.wait()
                drop_pages(raw[at : at + PIECE_BYTES])
        self._uploads.clear()

    def _place(self, name: str, weights: Weights, expert: int | None) -> DeviceMatrix:
        """expert: the rows of one, in a matrix that holds several: a part has whole ones."""
        m = weights.matrices[name]
        width = 16 * m.blocks
        most = self._gpu.binding_bytes // width
        if m.fmt == "int4" and most < m.rows:
            most -= most % 2  # two scales stand in a word
        if not most:
            raise GraphError(f"a row of {name}, {width} bytes, is more than a binding takes: {self._gpu.binding_bytes}")
        if expert is not None:
            if most < expert:
                takes, binds = (f"{size / 1e6:.3g} MB" for size in (expert * width, self._gpu.binding_bytes))
                raise GraphError(f"an expert of {name} takes {takes}, and {self._gpu.found.name} binds at most {binds}")
            most -= most % expert
        parts = []
        for first in range(0, m.rows, most):
            last = min(m.rows, first + most)
            scales = None if m.scales is None else self._region(m.scales[first:last])
            parts.append(Part(self._region(m.values[first:last]), scales, first, last - first))
        return DeviceMatrix(expert or m.rows, m.columns, m.fmt, tuple(parts))

    def _pack_vectors(
        self, plan: PackedPlan, vectors: Mapping[str, NDArray[np.float32]]
    ) -> Iterator[tuple[str, Vectors]]:
        yield "", self._packed({"norm": vectors["norm"]})
        for i, layer in enumerate(plan.layers):
            to = f"layer{i}_"
            for j, mixer in enumerate(layer.mixers):
                own = {n: vectors[to + n] for n, _ in packed_mixer(mixer, plan.hidden) if to + n in vectors}
                yield f"{to}mixer{j}", self._packed({"norm1": vectors[to + "norm1"], **own})
            if layer.followers:
                known = (n for part in layer.followers for n, _ in packed_follower(part, plan.hidden))
                names = ["norm2", *(n for n in known if to + n in vectors)]
                yield f"{to}mlp", self._packed({n: vectors[to + n] for n in names})

    def _packed(self, vectors: Mapping[str, NDArray[np.float32]]) -> Vectors:
        at, places = 0, {}
        for name, vector in vectors.items():
            places[name] = at
            at += -(-vector.size // 4) * 4
        whole = np.zeros(at, np.float32)
        for name, vector in vectors.items():
            whole[places[name] : places[name] + vector.size] = vector.reshape(-1)
        return Vectors(self._region(whole), places)

    def _region(self, array: NDArray[Any]) -> Region:
        region = self._gpu.region(array.nbytes)
        self._uploads.append((region, array))
        return region


def _advice(weights: Weights) -> str:
    """Return advice with a quantization that takes less memory, and how much."""
    sizes = {
        fmt: sum(nbytes(m.rows, m.columns, fmt) for m in weights.matrices.values()) for fmt in ("f16", "int8", "int4")
    }
    now = sum(nbytes(m.rows, m.columns, m.fmt) for m in weights.matrices.values())
    smaller = [f"--quant {fmt} takes {size / 1e6:.0f} MB" for fmt, size in sizes.items() if size < 0.9 * now]
    return f"; the weights take {now / 1e6:.0f} MB{''.join(', ' + s for s in smaller)}"


def drop_pages(array: NDArray[Any]) -> None:
    """Give back the pages of a mapped file that an array covers; they are read again if needed."""
    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mapped, "madvise"):
        return
    start = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
