"""The operations of a plan: kernels over buffers, for one token each of some streams, or T tokens of one.

Buffers of T rows, each a token or a stream of the call: x (T, hidden), the residual stream; wide and qkv, outputs of a
first product; u, after a convolution; bc and dt, of Mamba-1; bc, dt, logs, of gated DeltaNet: b and a, beta, the decay;
y, output of a mixer; scale (T).

streams: the number of streams that a decode step's kernels are made for; 0 in a prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ssmd.model.plan import Attention, GatedDeltaNet, Mamba1, Mamba2, ShortConv
from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu import delta
from ssmd_wgpu.device import Gpu, shader
from ssmd_wgpu.experts import Mixtures
from ssmd_wgpu.op import Op, f32, f32_or_none, operation
from ssmd_wgpu.pack import VALUES
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.products import Products, Slices, Tiling
from ssmd_wgpu.recorder import Region
from ssmd_wgpu.resident import DeviceWeights
from ssmd_wgpu.slots import CONTROL, Slots
from ssmd_wgpu.ssd import recurrence

_NO_BOUND = 3.0e38  # of dt


class Operations:
    """The maker of a plan's operations. half: keys and values are float16.

    Raises GraphError if the device refuses one.
    """

    def __init__(
        self,
        gpu: Gpu,
        plan: PackedPlan,
        weights: DeviceWeights,
        buffers: Mapping[str, Region],
        half: bool,
        tiling: Tiling,
        slots: Slots,
    ) -> None:
        self._gpu, self._plan, self._half, self._buffers = gpu, plan, half, buffers
        self._pages = {"page": slots.page, "tables": slots.tables, "most_pages": slots.most_pages}
        self._matrices, self._parts, self._tables = weights.matrices, weights.vectors, weights.tables
        self._products = Products(gpu, weights.matrices, weights.vectors, buffers, plan.eps, tiling)
        self._mixtures = Mixtures(gpu, plan, weights, buffers, self._products, tiling, slots.most_tokens)

    def embedding(self) -> Iterator[Op]:
        m, scale = self._matrices["embedding"], f32(self._plan.embedding_scale)
        for part in m.parts:
            text = shader("embed", **m.sizes, control=CONTROL, first=part.first, rows=part.rows, scale=scale)
            regions = {"W": part.values, "S": part.scales, "X": self._buffers["x"]}
            yield operation(self._gpu, text, regions, (-(-m.sizes["blocks"] // 64), 1), tokens=1)

    def head(self, logits: Region, stride: int, streams: int) -> Iterator[Op]:
        """Yield the operations of the head, into rows `stride` values apart; in a prefill only for the last token."""
        name = "embedding" if self._plan.tied else "head"
        norm: dict[str, Any] = {"gain": self._parts[""].at["norm"], "eps": f32(self._plan.eps), "bias": None}
        parts = self._matrices[name].parts
        columns = max(1, streams)
        yield from self._products.matvec(name, "", "x", logits, stride, columns, parts, last_row=not streams, **norm)

    def layer(self, i: int, streams: int, *, chunked: bool = False) -> Iterator[Op]:
        """Yield the operations of layer `i`. chunked: Mamba-2 by chunks."""
        layer = self._plan.layers[i]
        parts = [(f"layer{i}_mixer{j}", mixer) for j, mixer in enumerate(layer.mixers)]
        if not streams and parts:
            yield self._rms()
        for part, mixer in parts:  # before another mixer changes x
            if isinstance(mixer, Attention):
                gain = self._parts[part].at["norm1"]
                yield from self._products.of(f"layer{i}_qkv", part, "x", "qkv", streams, gain=gain)
        for part, mixer in parts:
            if isinstance(mixer, Attention):
                yield from self._attention(i, part, mixer, streams)
            elif isinstance(mixer, Mamba1):
                yield from self._mamba1(i, part, mixer, streams)
            elif isinstance(mixer, Mamba2):
                yield from self._mamba2(i, part, mixer, streams, chunked)
            elif isinstance(mixer, GatedDeltaNet):
                yield from self._gated_deltanet(i, part, mixer, streams)
            else:
                yield from self._short_conv(i, part, mixer, streams)
        if layer.followers and not streams:
            yield self._rms()
        if layer.experts is not None:  # before an MLP beside them changes x
            yield from self._mixtures.inner(i, layer.experts, streams)
        if layer.mlp is not None:
            to, part = f"layer{i}_", f"layer{i}_mlp"
            gain, act = self._parts[part].at["norm2"], layer.mlp.activation
            into, _ = layer.mlp.into
            cut = self._products.slices(to + "down")
            whole = self._products.mlp(to + into, to + "down", part, gain, act, cut) if streams == 1 else None
            if whole is not None:
                yield whole
            else:
                yield from self._products.of(to + into, part, "x", "wide", streams, gain=gain, end=act)
                yield from self._products.of(to + "down", part, "wide", "x", streams, end="add", unit=_unit(cut))
        if layer.experts is not None:
            yield from self._mixtures.outer(i, layer.experts, streams)

    def _mamba1(self, i: int, part: str, m: Mamba1, streams: int) -> Iterator[Op]:
        to, at = f"layer{i}_", self._parts[part].at
        conv = _sizes_of_conv(m.inner, m.width, at)
        gain = at["norm1"]
        small = {"a": at["A"], "dt_bias": at["dt_bias"], "d": at["D"]}
        if streams:
            fused: dict[str, Any] = {**conv, "end": "mamba1", "layer": i}
            yield from self._products.of(to + "in", part, "x", "wide", streams, gain=gain, **fused)
            yield from self._products.of(to + "x", part, "u", "bc", streams)
            w, values = self._matrices[to + "dt"], self._products.whole(to + "dt").values
            if w.fmt not in ("f32", "f16"):
                raise GraphError(f"{to}dt is {w.fmt}; it may be f32 or f16")
            sizes = {"channels": m.inner, "states": m.states, "rank": m.rank, "mixer_eps": f32_or_none(m.mixer_eps)}
            text = shader("selective_step", format=w.fmt, blocks=w.sizes["blocks"], **sizes, **small)
            regions = {"W": values, **self._named("bc", "u", "y"), **self._wide(part)}
            yield operation(self._gpu, text, regions, (-(-m.inner // 4), 1), i, tokens=1)
        else:
            yield from self._products.of(to + "in", part, "x", "wide", 0, gain=gain)
            yield self._conv(part, i, "u", 0, gated=False, stride=2 * m.inner, offset=0, **conv)
            yield from self._products.of(to + "x", part, "u", "bc", 0)
            stride = m.rank + 2 * m.states
            if m.mixer_eps is not None:
                for offset, columns in ((0, m.rank), (m.rank, m.states), (m.rank + m.states, m.states)):
                    norm: dict[str, Any] = {"columns": columns, "stride": stride, "offset": offset}
                    yield self._group_norm("bc", part, 1, gain=None, gate=None, eps=f32(m.mixer_eps), **norm)
            yield from self._products.of(to + "dt", part, "bc", "dt", 0, stride=stride, biased=False)
            yield self._scan(
                part,
                i,
                small,
                channels=m.inner,
                states=m.states,
                heads=None,
                groups=1,
                rank=m.rank,
                u_stride=m.inner,
                z_stride=2 * m.inner,
                z_offset=m.inner,
                gate=True,
            )
        yield from self._products.of(to + "out", part, "y", "x", streams, end="add")

    def _mamba2(self, i: int, part: str, m: Mamba2, streams: int, chunked: bool) -> Iterator[Op]:
        to, at = f"layer{i}_", self._parts[part].at
        conv = _sizes_of_conv(m.channels, m.width, at)
        small = {"a": at["A"], "dt_bias": at["dt_bias"], "d": at["D"]}
        gain = at["norm1"]
        if streams:
            fused: dict[str, Any] = {**conv, "inner": m.inner, "end": "mamba2", "layer": i}
            yield from self._products.of(to + "in", part, "x", "wide", streams, gain=gain, **fused)
        else:
            yield from self._products.of(to + "in", part, "x", "wide", 0, gain=gain)
            yield self._conv(part, i, "u", 0, gated=False, stride=m.rows, offset=m.inner, **conv)
        sizes: dict[str, Any] = {
            "heads": m.heads,
            "head_dim": m.head_dim,
            "states": m.states,
            "groups": m.groups,
            "u_stride": m.channels,
            "z_stride": m.rows,
            "dt_offset": m.inner + m.channels,
            "dt_low": f32(m.dt_low),
            "dt_high": f32(_NO_BOUND if m.dt_high is None else m.dt_high),
            "gate": m.norm != "before the gate",
        }
        regions = {**self._named("u", "y", "dt", "logs", "chunks"), **self._wide(part)}
        normed = m.norm == "after the gate" and m.groups == 1  # which a matvec can do, too
        cut = self._products.slices(to + "out") if normed or m.norm == "none" else None
        if streams:
            eps = m.eps if normed else None
            found = self._products.spread(to + "out", part, cut, 10, eps) if streams == 1 else None
            more: dict[str, Any] = {"v": None}
            if found is not None:
                more = {**found.sizes, "v_gain": at["gated_norm"] if normed else None}
                regions |= found.regions
            wide = 32 if cut is None else cut.unit * VALUES[self._matrices[to + "out"].fmt]
            sizes |= {"inner": m.inner, "wide": wide, "threads": 256, "per_thread": -(-m.states // 16)}
            text = shader("mamba2_step", **small, **sizes, **more)
            yield operation(self._gpu, text, regions, (-(-m.inner // wide), 1), i, tokens=1)
            if found is not None:
                return
        else:
            for text, grid, tokens in recurrence({**small, **sizes}, chunked=chunked):
                yield operation(self._gpu, text, regions, grid, i, tokens)
        if m.norm != "none" and not (streams and normed):
            gate = m.rows if m.norm == "before the gate" else None
            of: dict[str, Any] = {"columns": m.inner // m.groups, "stride": m.inner, "offset": 0, "eps": f32(m.eps)}
            yield self._group_norm("y", part, m.groups, gain=at["gated_norm"], gate=gate, **of)
        norm: dict[str, Any] = {"gain": at["gated_norm"], "eps": m.eps} if streams and normed else {}
        yield from self._products.of(to + "out", part, "y", "x", streams, end="add", unit=_unit(cut), **norm)

    def _gated_deltanet(self, i: int, part: str, m: GatedDeltaNet, streams: int) -> Iterator[Op]:
        to, at = f"layer{i}_", self._parts[part].at
        conv = _sizes_of_conv(m.channels, m.width, at)
        gain = at["norm1"]
        if streams:
            fused: dict[str, Any] = {**conv, "inner": m.inner, "end": "mamba2", "layer": i}
            yield from self._products.of(to + "in", part, "x", "wide", streams, gain=gain, **fused)
        else:
            yield from self._products.of(to + "in", part, "x", "wide", 0, gain=gain)
            yield self._conv(part, i, "u", 0, gated=False, stride=m.rows, offset=m.inner, **conv)
        yield from self._products.of(to + "ba", part, "x", "bc", streams, gain=gain)
        regions = {**self._named("u", "bc", "y", "dt", "logs"), **self._wide(part)}
        cut = self._products.slices(to + "out", m.value_dim)
        if streams:
            found = self._products.spread(to + "out", part, cut, 11) if streams == 1 else None
            regions |= {} if found is None else found.regions
            text = delta.step(m, at, None if found is None else found.sizes)
            yield operation(self._gpu, text, regions, (m.heads, 1), i, tokens=1)
            if found is not None:
                return
        else:
            for text, grid, tokens in delta.recurrence(m, at):
                yield operation(self._gpu, text, regions, grid, i, tokens)
            of: dict[str, Any] = {"columns": m.value_dim, "stride": m.inner, "offset": 0, "eps": f32(m.eps)}
            yield self._group_norm("y", part, m.heads, gain=at["gated_norm"], shared=True, gate=m.rows, **of)
        yield from self._products.of(to + "out", part, "y", "x", streams, end="add", unit=_unit(cut))

    def _short_conv(self, i: int, part: str, m: ShortConv, streams: int) -> Iterator[Op]:
        to, at = f"layer{i}_", self._parts[part].at
        conv = _sizes_of_conv(m.channels, m.width, at)
        yield from self._products.of(to + "in", part, "x", "wide", streams, gain=at["norm1"])
        yield self._conv(part, i, "y", streams, gated=True, stride=3 * m.channels, offset=0, **conv)
        yield from self._products.of(to + "out", part, "y", "x", streams, end="add")

    def _attention(self, i: int, part: str, m: Attention, streams: int) -> Iterator[Op]:
        to, at = f"layer{i}_", self._parts[part].at
        sizes: dict[str, Any] = {
            "heads": m.heads,
            "kv_heads": m.kv_heads,
            "head_dim": m.head_dim,
            "half": self._half,
            "per_thread": -(-m.head_dim // 64),
            "rotated": m.rotated,
            "qk_eps": f32_or_none(m.qk_eps),
            "q_norm": at.get("q_norm"),
            "k_norm": at.get("k_norm"),
            "gate": m.gate != "none",
            **self._pages,
        }
        regions = {**self._named("qkv", "y", "parts", "count"), "P": self._parts[part].region}
        if m.rotated:
            regions |= self._tables
        cut = self._products.slices(to + "o", m.head_dim)
        if not streams:
            yield operation(self._gpu, shader("rotate", **sizes), regions, (m.heads + 2 * m.kv_heads, 1), i, tokens=1)
            yield operation(self._gpu, shader("attention", **sizes, one=False), regions, (m.heads, 1), i, tokens=1)
        else:
            found = self._products.spread(to + "o", part, cut, 13) if streams == 1 else None
            end = "here" if self._products.goes_on(10) else "apart"
            if found is not None:
                end, regions, sizes = "spread", {**regions, **found.regions}, {**sizes, **found.sizes}
            text = shader("attention", **sizes, one=True, end=end)
            yield operation(self._gpu, text, regions, (m.heads, 1), i, tokens=1, paged=True)
            if end == "spread":
                return
            if end == "apart":
                yield operation(self._gpu, shader("attention_merge", **sizes), regions, (m.heads, 1), i, tokens=1)
        yield from self._products.of(to + "o", part, "y", "x", streams, end="add", unit=_unit(cut))

    def _conv(self, part: str, layer: int, to: str, streams: int, **sizes: Any) -> Op:
        regions = {"X": self._buffers["wide"], "U": self._buffers[to], "P": self._parts[part].region}
        text = shader("conv", one=bool(streams), **sizes)
        return operation(self._gpu, text, regions, (-(-sizes["channels"] // 32), 1), layer, tokens=bool(streams))

    def _scan(self, part: str, layer: int, small: dict[str, int], **sizes: Any) -> Op:
        text = shader("scan", source="BC", per_thread=-(-sizes["states"] // 16), **small, **sizes)
        regions = {**self._named("u", "y", "bc", "dt"), **self._wide(part)}
        return operation(self._gpu, text, regions, (-(-sizes["channels"] // 4), 1), layer)

    def _group_norm(self, of: str, part: str, groups: int, *, shared: bool = False, **sizes: Any) -> Op:
        regions = {"Y": self._buffers[of], **self._wide(part)}
        return operation(self._gpu, shader("group_norm", shared=shared, **sizes), regions, (groups, 1), tokens=1)

    def _rms(self) -> Op:
        text = shader("rms", columns=self._plan.hidden, eps=f32(self._plan.eps))
        return operation(self._gpu, text, {"X": self._buffers["x"], "R": self._buffers["scale"]}, (1, 1), tokens=1)

    def _named(self, *names: str) -> dict[str, Region | None]:
        return {name.upper(): self._buffers[name] for name in names}

    def _wide(self, part: str) -> dict[str, Region | None]:
        return {"Z": self._buffers["wide"], "P": self._parts[part].region}


def _unit(cut: Slices | None) -> int:
    """Return the number of blocks that a matvec sums separately, as a kernel with a slice of them does."""
    return 1 if cut is None else cut.unit


def _sizes_of_conv(channels: int, width: int, at: Mapping[str, int]) -> dict[str, Any]:
    return {"channels": channels, "width": width, "conv": at["conv"], "conv_bias": at.get("conv_bias")}
