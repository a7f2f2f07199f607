"""Products with a matrix: a matvec of one token, a matmul of T, and how they are cut into workgroups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu.device import Gpu, shader
from ssmd_wgpu.op import Op, f32, operation
from ssmd_wgpu.pack import VALUES, nbytes
from ssmd_wgpu.recorder import Region
from ssmd_wgpu.resident import Part, Resident
from ssmd_wgpu.ssd import spread


@dataclass(frozen=True)
class Tiling:
    """How products are cut: `threads_per_row` and `rows_per_thread` of a matvec, `tile` tokens and rows of a matmul
    of which a thread has `quads` times 4 each way.

    `subgroups`: whether threads add up among themselves, not in memory they share. `chunked`: whether a prefill of more
    than a chunk computes Mamba-2 by chunks.
    """

    threads_per_row: int
    rows_per_thread: int
    tile: int
    quads: int = 1
    subgroups: bool = False
    chunked: bool = False

    def __str__(self) -> str:
        matvec = f"{self.threads_per_row}x{self.rows_per_thread}{'s' if self.subgroups else ''}"
        return f"{matvec}, {self.tile}/{self.quads}{'c' if self.chunked else ''}"


SOFTWARE = Tiling(8, 4, 64, 2, chunked=True)  # measured on lavapipe and llvmpipe (docs/log.md)
HARDWARE = Tiling(16, 4, 64, 2, chunked=True)  # where nothing could be measured


def rows_per_thread(tiling: Tiling, streams: int) -> int:
    """Rows that a thread of a matvec has: fewer, where their sums over all streams would not fit into registers."""
    return max(2, min(tiling.rows_per_thread, 32 // streams))


class Products:
    """Makes the operations of products. `eps`: of the norms that stand before them."""

    def __init__(self, gpu: Gpu, weights: Resident, buffers: Mapping[str, Region], eps: float, tiling: Tiling) -> None:
        self._gpu, self._buffers, self._eps, self._tiling = gpu, buffers, eps, tiling
        self._matrices, self._parts = weights.matrices, weights.vectors

    def of(
        self,
        name: str,
        part: str,
        x: str,
        y: str,
        streams: int,
        *,
        gain: int | None = None,
        eps: float | None = None,
        end: str = "store",
        layer: int = 0,
        stride: int | None = None,
        biased: bool = True,
        **sizes: Any,
    ) -> Iterator[Op]:
        """The operations of a product y = W x: a matvec for a token of each of `streams`, or a matmul of T tokens where
        there are none. `gain`: of the norm of x.
        """
        bias = self._parts[part].at.get(name.partition("_")[2] + "_bias") if biased else None
        m, tile = self._matrices[name], self._tiling.tile
        if streams:
            rows = m.rows // 2 if end == "swiglu" else m.rows
            more: dict[str, Any] = {"gain": gain, "eps": f32(self._eps if eps is None else eps), "bias": bias, **sizes}
            parts, to = (self.whole(name),), self._buffers[y]
            yield from self.matvec(name, part, x, to, rows, streams, parts, end=end, layer=layer, **more)
            return
        whole = self.whole(name)
        text = shader(
            "matmul",
            **m.sizes,
            rows=m.rows,
            tile=tile,
            quads=self._tiling.quads,
            stride=m.columns if stride is None else stride,
            offset=0,
            gain=gain,
            bias=bias,
            end=end,
        )
        regions = {"W": whole.values, "S": whole.scales, "P": self._parts[part].region}
        regions |= {"X": self._buffers[x], "Y": self._buffers[y], "R": self._buffers["scale"]}
        yield operation(self._gpu, text, regions, (-(-m.rows // tile), 1), tokens=tile)

    def matvec(
        self,
        name: str,
        part: str,
        x: str,
        y: Region,
        y_stride: int,
        streams: int,
        parts: Sequence[Part],
        *,
        end: str = "store",
        layer: int = 0,
        last_row: bool = False,
        **sizes: Any,
    ) -> Iterator[Op]:
        """A matvec for each of these parts of a matrix, into rows of y that are `y_stride` values apart."""
        m, t = self._matrices[name], self._tiling
        for cut in parts:
            rows = rows_per_thread(t, streams) if cut.rows >= 512 else 2
            text = shader(
                "matvec",
                **m.sizes,
                rows=cut.rows,
                threads_per_row=t.threads_per_row,
                subgroups=t.subgroups,
                rows_per_thread=rows,
                streams=streams,
                stride=y_stride,
                first=cut.first,
                end=end,
                last_row=last_row,
                **sizes,
            )
            regions = {"W": cut.values, "S": cut.scales, "P": self._parts[part].region}
            regions |= {"X": self._buffers[x], "Y": y, "U": self._buffers["u"]}
            yield operation(self._gpu, text, regions, spread(-(-cut.rows // (64 // t.threads_per_row * rows))), layer)

    def whole(self, name: str) -> Part:
        """A matrix that must be one binding. Raises GraphError with what would fit."""
        m, most = self._matrices[name], self._gpu.binding_bytes
        if len(m.parts) > 1:
            fitting = [f for f in VALUES if nbytes(m.rows, m.columns, f) <= most]
            advice = f"build with --quant {fitting[0]}" if fitting else "take a smaller model"
            raise GraphError(
                f"{name} needs a binding of {16 * m.sizes['blocks'] * m.rows / 1e6:.0f} MB and {self._gpu.found.name} "
                f"gives {most / 1e6:.0f} MB (max-storage-buffer-binding-size): {advice}"
            )
        return m.parts[0]
