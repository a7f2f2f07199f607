"""A plan on a device: its weights, the buffers that all handles share, the dispatches of a step and of a prefill."""

from __future__ import annotations

from collections.abc import Sequence

from ssmd.model.plan import GatedDeltaNet, Mamba1, Mamba2, ShortConv
from ssmd.runtime.protocol import FormTime
from ssmd_wgpu import library
from ssmd_wgpu.device import ALIGNMENT, SHADERS, Gpu, digest
from ssmd_wgpu.experts import Groups, buffers_of
from ssmd_wgpu.op import Op
from ssmd_wgpu.operations import Operations
from ssmd_wgpu.pack import Weights
from ssmd_wgpu.plan import PackedPlan, attention_rows
from ssmd_wgpu.products import MOST_SLICES, MOST_SUMS, Tiling
from ssmd_wgpu.recorder import Dispatch, Region
from ssmd_wgpu.resident import DeviceWeights
from ssmd_wgpu.slots import STREAMS, Slots
from ssmd_wgpu.ssd import CHUNK


class Model:
    """A plan's weights and kernels on a device. Raises GraphError if it has no room, or a shader is refused."""

    def __init__(
        self, gpu: Gpu, plan: PackedPlan, weights: Weights, most_tokens: int, half: bool, tiling: Tiling
    ) -> None:
        """half: keys and values are float16."""
        self.gpu, self.plan, self.most_tokens, self.tiling = gpu, plan, most_tokens, tiling
        self._half = half
        self._chunked = tiling.chunked and most_tokens > CHUNK
        self.slots = Slots(gpu, plan.spec("float16" if half else "float32"), most_tokens, plan.context)
        self._weights = DeviceWeights(gpu, plan, weights)
        self._stride = -(-4 * plan.vocabulary // ALIGNMENT) * ALIGNMENT // 4  # values, of a stream
        self._logits = gpu.region(4 * STREAMS * self._stride)
        self._buffers = self._make_buffers()
        self._ops = self._made_of(tiling)
        self._weights.upload()
        self.embed = list(self._ops.embedding())
        self._steps: dict[int, list[Op]] = {}
        self.step_s: dict[int, float] = {}  # what steps by kernels for so many streams took, where they were tried
        self.form_times: list[FormTime] = []  # by which its tiling was chosen, if it was measured
        layers, head = range(len(plan.layers)), list(self._ops.head(self._logits, self._stride, 0))
        self._prefills = [
            [*self.embed, *(op for i in layers for op in self._ops.layer(i, 0, chunked=chunked)), *head]
            for chunked in ((False, True) if self._chunked else (False,))
        ]
        self.decode(1)

    def simplify(self, tiling: Tiling) -> None:
        """Decode by this tiling from now on."""
        self.tiling = tiling
        self._ops = self._made_of(self.tiling)
        self._steps.clear()
        self.step_s.clear()
        self.decode(1)

    def _made_of(self, tiling: Tiling) -> Operations:
        return Operations(self.gpu, self.plan, self._weights, self._buffers, self._half, tiling, self.slots)

    def _make_buffers(self) -> dict[str, Region]:
        plan, t = self.plan, max(STREAMS, self.most_tokens)
        width = {"x": plan.hidden, "wide": 4, "qkv": 4, "u": 4, "bc": 4, "dt": 4, "logs": 4, "y": 4, "scale": 1}
        counters = parts = chunks = 4  # of attention, in a decode step; states that chunks begin with
        groups = 4

        def grow(**sizes: int) -> None:
            for name, size in sizes.items():
                width[name] = max(width.get(name, 0), size)

        for layer in plan.layers:
            if layer.mlp is not None:
                grow(wide=layer.mlp.intermediate)
            if layer.experts is not None:
                grow(**buffers_of(layer.experts, plan.hidden))
                groups = max(groups, Groups(layer.experts, t).words)
            for m in layer.mixers:
                if isinstance(m, Mamba1):
                    grow(wide=2 * m.inner, u=m.inner, bc=m.rank + 2 * m.states, dt=m.inner, y=m.inner)
                elif isinstance(m, Mamba2):
                    grow(wide=m.rows, u=m.channels, y=m.inner)
                    if self._chunked:
                        grow(dt=m.heads, logs=m.heads)
                        chunks = max(chunks, m.inner * m.states * -(-t // CHUNK))
                elif isinstance(m, GatedDeltaNet):
                    grow(wide=m.rows, u=m.channels, bc=2 * m.heads, dt=m.heads, logs=m.heads, y=m.inner)
                elif isinstance(m, ShortConv):
                    grow(wide=3 * m.channels, y=m.channels)
                else:
                    grow(qkv=attention_rows(m)[1], y=m.heads * m.head_dim)
                    counters = max(counters, 1 + STREAMS * m.heads)
                    parts = max(parts, STREAMS * m.heads * self.slots.most_pages * (m.head_dim + 2))
        made = {name: self.gpu.region(4 * size * t) for name, size in width.items()}
        made |= {"groups": self.gpu.region(4 * groups)} if plan.experts else {}
        made |= {"parts": self.gpu.region(4 * parts), "chunks": self.gpu.region(4 * chunks)}
        return {
            **made,
            "sums": self.gpu.region(4 * (MOST_SUMS + 8 * MOST_SLICES)),
            "count": self.gpu.region(4 * counters),
        }

    def prefill(self, count: int) -> Sequence[Op]:
        """Return the operations of `count` tokens of one stream."""
        return self._prefills[-1 if count > CHUNK else 0]

    def decode(self, count: int) -> Sequence[Op]:
        """Return the operations of a token of each of `count` streams, by kernels for 1, 2, 4 or 8. They are cached."""
        streams = columns(count)
        if streams not in self._steps:
            layers, stride = range(len(self.plan.layers)), self._stride
            made = [op for i in layers for op in self._ops.layer(i, streams)]
            self._steps[streams] = [*self.embed, *made, *self._ops.head(self._logits, stride, streams)]
        return self._steps[streams]

    def step(self, count: int, pages: int) -> list[Dispatch]:
        """Return the dispatches of a token of each of `count` streams. pages: those of the longest stream."""
        return self.slots.step(self.decode(count), count, pages)

    def step_cost(self, streams: int) -> float:
        """Return the cost of steps of `streams` streams; a step of one costs 1. Without a trial it is their number."""
        whole, rest = divmod(streams, STREAMS)
        return sum(self._cost(n) for n in [STREAMS] * whole + [rest] * bool(rest))

    def _cost(self, streams: int) -> float:
        one, took = self.step_s.get(1), self.step_s.get(columns(streams))
        return float(streams) if one is None or took is None or not self.tiling.together else took / one

    def logits(self, row: int) -> Region:
        """Return the place of the logits of a step's stream; those of a prefill are in row 0."""
        return Region(self._logits.buffer, 4 * row * self._stride, 4 * self.plan.vocabulary)

    @property
    def producer(self) -> str:
        """The versions that an exact resume needs beside the build: others sum in another order.

        These are wgpu, the kernels, the adapter with its driver, and the tiling.
        """
        versions = f"wgpu {library.package_version()}, kernels {digest(SHADERS)[:8]}"
        return f"{versions}; {self.gpu.found.description}; {self.tiling}"


def columns(streams: int) -> int:
    """Return the streams of the kernels for a step of `streams` streams: 1, 2, 4 or 8."""
    return 1 << (streams - 1).bit_length()
