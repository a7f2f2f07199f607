"""Products with a matrix: a matvec of one token, a matmul of T, and how they are cut into workgroups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu.device import Gpu, shader
from ssmd_wgpu.op import Op, f32, operation
from ssmd_wgpu.pack import VALUES, Format, nbytes
from ssmd_wgpu.recorder import Region
from ssmd_wgpu.resident import DeviceMatrix, Part, Vectors
from ssmd_wgpu.ssd import spread

SLICE = 32  # columns of a slice, at least
MOST_SLICES = 64
MOST_SUMS = 1 << 16  # of all slices: the workgroup that comes last adds them up


OWN = "threads_per_row", "rows_per_thread", "subgroups", "ahead", "rows_of_several", "tile", "quads"


def shape(rows: int, columns: int, fmt: str) -> str:
    """Return the name of a shape of matrices."""
    return f"{rows}x{columns} {fmt}"


@dataclass(frozen=True)
class Tiling:
    """The tiling of products.

    threads_per_row, rows_per_thread: of a matvec. tile: tokens and rows of a matmul; a thread has `quads` times 4 each
    way. subgroups: threads add up among themselves, not in shared memory. chunked: a prefill of more than a chunk
    computes Mamba-2 by chunks.

    These four change no bit. fused: in a step of one stream a kernel continues with the next product if it can.
    together: streams share a step. ahead: blocks that a thread of one stream's matvec reads before it uses the first.
    rows_of_several: rows of a thread in a step of several streams; 0: as many as in a step of one.

    shapes: other values for matrices of some shapes, named in OWN.
    """

    threads_per_row: int
    rows_per_thread: int
    tile: int
    quads: int = 1
    subgroups: bool = False
    chunked: bool = False
    fused: bool = False
    together: bool = True
    ahead: int = 1
    rows_of_several: int = 0
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        matvec = f"{self.threads_per_row}x{self.rows_per_thread}{'s' if self.subgroups else ''}"
        matvec += f"/{self.ahead}" if self.ahead > 1 else ""
        shapes = hashlib.sha256(repr(self.shapes).encode()).hexdigest()[:8] if self.shapes else ""
        own = f", shapes {shapes}" if shapes else ""
        return f"{matvec}, {self.tile}/{self.quads}{'c' if self.chunked else ''}{own}"

    def of(self, m: DeviceMatrix) -> Tiling:
        """Return the tiling of products with this matrix."""
        own = dict(self.shapes).get(shape(m.rows, m.columns, m.fmt))
        return self if own is None else self.having(own)

    def having(self, own: tuple[int, ...]) -> Tiling:
        """Return this tiling with a shape's own values. Raises ValueError if their number is wrong."""
        threads, rows, subgroups, units, several, tile, quads = own
        made = replace(self, threads_per_row=threads, rows_per_thread=rows, subgroups=bool(subgroups), ahead=units)
        return replace(made, rows_of_several=several, tile=tile, quads=quads, shapes=())


SOFTWARE = Tiling(8, 4, 64, 2, chunked=True, fused=True)  # measured on lavapipe and llvmpipe (docs/notes/log.md)
HARDWARE = Tiling(16, 4, 64, 2, chunked=True)  # where nothing could be measured


@dataclass(frozen=True)
class Slices:
    """The cut of a matrix's columns into `count` slices of `unit` blocks of 16 bytes."""

    unit: int
    count: int


@dataclass(frozen=True)
class SpreadProduct:
    """A kernel's continuation with a product x += V v, a slice of v to a workgroup (shaders/spread.wgsl)."""

    slices: Slices
    sizes: dict[str, Any]
    regions: dict[str, Region | None]


def slices_of(m: DeviceMatrix, width: int = 0) -> Slices | None:
    """Return the slices of a matrix, of `width` columns if given; None if they do not fit or are too many sums.

    A slice has at least two blocks of int4: a compiler might contract a single product with its scale and the addition
    that follows.
    """
    values, least = VALUES[m.fmt], 2 if m.fmt == "int4" else 1
    if width:
        unit, rest = divmod(width, values)
        if rest or unit < least:
            return None
    else:
        blocks = m.sizes["blocks"]
        unit = max(least, SLICE // values)
        unit *= -(-blocks // (unit * MOST_SLICES))
    count = -(-m.sizes["blocks"] // unit)
    return Slices(unit, count) if count <= MOST_SLICES and count * m.rows <= MOST_SUMS else None


def rows_per_thread(tiling: Tiling, streams: int) -> int:
    """Return the rows of a matvec's thread: fewer if their sums over all streams would not fit into registers."""
    wanted = tiling.rows_per_thread if streams == 1 else tiling.rows_of_several or tiling.rows_per_thread
    return max(2, min(wanted, 32 // streams))


def ahead(tiling: Tiling, fmt: Format, streams: int, rows: int, unit: int) -> int:
    """Return the units of blocks that a thread reads before it uses the first: at most as many as its registers hold.

    For int4 it is one, as Mesa's compiler sums unrolled units in another order than those of a loop.
    """
    return max(1, min(tiling.ahead, 16 // (rows * unit))) if streams == 1 and fmt != "int4" else 1


class Products:
    """Makes the operations of products. `eps`: of the norms that stand before them."""

    def __init__(
        self,
        gpu: Gpu,
        matrices: Mapping[str, DeviceMatrix],
        parts: Mapping[str, Vectors],
        buffers: Mapping[str, Region],
        eps: float,
        tiling: Tiling,
    ) -> None:
        self._gpu, self._buffers, self._eps, self._tiling = gpu, buffers, eps, tiling
        self._matrices, self._parts = matrices, parts

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
        unit: int = 1,
        stride: int | None = None,
        biased: bool = True,
        **sizes: Any,
    ) -> Iterator[Op]:
        """Yield the operations of a product y = W x: a matvec for a token of each stream, or a matmul of T tokens.

        streams: 0 for a matmul. gain: the place of the gain of x's norm.
        """
        bias = self._parts[part].at.get(name.partition("_")[2] + "_bias") if biased else None
        m = self._matrices[name]
        t = self._tiling.of(m)
        if streams:
            rows = m.rows // 2 if end == "swiglu" else m.rows
            more: dict[str, Any] = {"gain": gain, "eps": f32(self._eps if eps is None else eps), "bias": bias, **sizes}
            parts, to = (self.whole(name),), self._buffers[y]
            yield from self.matvec(name, part, x, to, rows, streams, parts, end=end, layer=layer, unit=unit, **more)
            return
        whole = self.whole(name)
        text = shader(
            "matmul",
            **m.sizes,
            rows=m.rows,
            tile=t.tile,
            quads=t.quads,
            stride=m.columns if stride is None else stride,
            offset=0,
            gain=gain,
            bias=bias,
            end=end,
        )
        regions = {"W": whole.values, "S": whole.scales, "P": self._parts[part].region}
        regions |= {"X": self._buffers[x], "Y": self._buffers[y], "R": self._buffers["scale"]}
        yield operation(self._gpu, text, regions, (-(-m.rows // t.tile), 1), tokens=t.tile)

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
        unit: int = 1,
        last_row: bool = False,
        **sizes: Any,
    ) -> Iterator[Op]:
        """Yield a matvec for each of these parts of a matrix, into rows of y that are `y_stride` values apart."""
        m = self._matrices[name]
        t = self._tiling.of(m)
        for cut in parts:
            rows = rows_per_thread(t, streams) if cut.rows >= 512 else 2
            text = shader(
                "matvec",
                **m.sizes,
                rows=cut.rows,
                threads_per_row=t.threads_per_row,
                subgroups=t.subgroups,
                rows_per_thread=rows,
                ahead=ahead(t, m.fmt, streams, rows, unit),
                streams=streams,
                stride=y_stride,
                unit=unit,
                threads=64,
                first=cut.first,
                end=end,
                last_row=last_row,
                **sizes,
            )
            regions = {"W": cut.values, "S": cut.scales, "P": self._parts[part].region}
            regions |= {"X": self._buffers[x], "Y": y, "U": self._buffers["u"]}
            yield operation(self._gpu, text, regions, spread(-(-cut.rows // (64 // t.threads_per_row * rows))), layer)

    def slices(self, name: str, width: int = 0) -> Slices | None:
        return slices_of(self._matrices[name], width)

    def goes_on(self, bindings: int) -> bool:
        """Return True if a kernel's last workgroup may continue with the results of all. bindings: the kernel's."""
        most: int = self._gpu.limits["max-storage-buffers-per-shader-stage"]
        return self._tiling.fused and self._gpu.coherent and bindings <= most

    def spread(
        self, name: str, part: str, cut: Slices | None, bindings: int, eps: float | None = None
    ) -> SpreadProduct | None:
        """Return a kernel's continuation with a product, or None. bindings: the kernel's. eps: of a norm before it."""
        m = self._matrices[name]
        if cut is None or not self.goes_on(bindings) or len(m.parts) > 1:
            return None
        t = self._tiling.of(m)
        sizes: dict[str, Any] = {
            "v": {**m.sizes, "rows": m.rows, "threads_per_row": t.threads_per_row, "subgroups": t.subgroups},
            "v_unit": cut.unit,
            "v_slices": cut.count,
            "v_bias": self._parts[part].at.get(name.partition("_")[2] + "_bias"),
            "v_eps": None if eps is None else f32(eps),
        }
        regions = {"V": m.parts[0].values, "T": m.parts[0].scales, "X": self._buffers["x"]}
        return SpreadProduct(cut, sizes, {**regions, "SUMS": self._buffers["sums"], "COUNT": self._buffers["count"]})

    def mlp(self, into: str, down: str, part: str, gain: int, end: str, cut: Slices | None) -> Op | None:
        """Return a whole MLP as one kernel; None if that is not possible."""
        w, found = self._matrices[into], self.spread(down, part, cut, 8)
        if found is None or len(w.parts) > 1:
            return None
        t = self._tiling.of(w)
        threads, pair = min(256, 16 * t.threads_per_row), 2 if end == "swiglu" else 1
        at_once = threads // t.threads_per_row
        rows = pair * found.slices.unit * VALUES[self._matrices[down].fmt]
        text = shader(
            "mlp",
            **w.sizes,
            **found.sizes,
            rows=w.rows,
            threads=threads,
            threads_per_row=t.threads_per_row,
            subgroups=t.subgroups,
            rows_per_thread=max(2, min(4 if w.fmt == "int4" else 8, rows // at_once)),
            ahead=1,
            streams=1,
            unit=1,
            gain=gain,
            eps=f32(self._eps),
            bias=self._parts[part].at.get(into.partition("_")[2] + "_bias"),
            end=end,
        )
        regions = {"W": w.parts[0].values, "S": w.parts[0].scales, "P": self._parts[part].region, **found.regions}
        return operation(self._gpu, text, regions, (found.slices.count, 1))

    def whole(self, name: str) -> Part:
        """Return a matrix that must be one binding. Raises GraphError, which says what would fit."""
        m, most = self._matrices[name], self._gpu.binding_bytes
        if len(m.parts) > 1:
            fitting = [f for f in VALUES if nbytes(m.rows, m.columns, f) <= most]
            advice = f"build with --quant {fitting[0]}" if fitting else "take a smaller model"
            raise GraphError(
                f"{name} needs a binding of {16 * m.sizes['blocks'] * m.rows / 1e6:.0f} MB and {self._gpu.found.name} "
                f"gives {most / 1e6:.0f} MB (max-storage-buffer-binding-size): {advice}"
            )
        return m.parts[0]
