"""A plan on a device: its weights, the buffers that all handles share, the dispatches of a step and of a prefill."""

from __future__ import annotations

from collections.abc import Sequence

from ssmd.model.plan import Mamba1, Mamba2, ShortConv
from ssmd_wgpu import library
from ssmd_wgpu.device import ALIGNMENT, Gpu
from ssmd_wgpu.op import Op
from ssmd_wgpu.operations import Operations, parts_of
from ssmd_wgpu.pack import Weights
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.products import Tiling
from ssmd_wgpu.recorder import Region
from ssmd_wgpu.resident import Resident
from ssmd_wgpu.ssd import CHUNK


class Model:
    """A plan's weights and kernels on a device. Raises GraphError if there is no room for it or a shader is refused."""

    def __init__(
        self, gpu: Gpu, plan: PackedPlan, weights: Weights, most_tokens: int, half: bool, tiling: Tiling
    ) -> None:
        """`half`: whether keys and values are float16."""
        self.gpu, self.plan, self.most_tokens = gpu, plan, most_tokens
        self._tiling = tiling
        self._chunked = tiling.chunked and most_tokens > CHUNK
        weighty = Resident(gpu, plan, weights)
        self._ops = Operations(gpu, plan, weighty, self._make_buffers(), half, tiling)
        weighty.upload()
        self._logits: Region | None = None
        self._heads: list[list[Op]] = []
        self.embed = list(self._ops.embedding())
        self.decode = [op for i in range(len(plan.layers)) for op in self._ops.layer(i, one=True)]
        self._prefills = [
            [op for i in range(len(plan.layers)) for op in self._ops.layer(i, one=False, chunked=chunked)]
            for chunked in ((False, True) if self._chunked else (False,))
        ]

    def _make_buffers(self) -> dict[str, Region]:
        plan, t = self.plan, self.most_tokens
        width = {"x": plan.hidden, "wide": 4, "qkv": 4, "u": 4, "bc": 4, "dt": 4, "logs": 4, "y": 4, "scale": 1}
        parts = chunks = 4  # of attention, in one token; states that chunks begin with

        def grow(**sizes: int) -> None:
            for name, size in sizes.items():
                width[name] = max(width[name], size)

        for layer in plan.layers:
            if layer.mlp is not None:
                grow(wide=layer.mlp.intermediate)
            for m in layer.mixers:
                if isinstance(m, Mamba1):
                    grow(wide=2 * m.inner, u=m.inner, bc=m.rank + 2 * m.states, dt=m.inner, y=m.inner)
                elif isinstance(m, Mamba2):
                    grow(wide=m.rows, u=m.channels, y=m.inner)
                    if self._chunked:
                        grow(dt=m.heads, logs=m.heads)
                        chunks = max(chunks, m.inner * m.states * -(-t // CHUNK))
                elif isinstance(m, ShortConv):
                    grow(wide=3 * m.channels, y=m.channels)
                else:
                    grow(qkv=m.rows, y=m.heads * m.head_dim)
                    parts = max(parts, m.heads * parts_of(plan.context) * (m.head_dim + 2))
        made = {name: self.gpu.region(4 * size * t) for name, size in width.items()}
        return {**made, "parts": self.gpu.region(4 * parts), "chunks": self.gpu.region(4 * chunks)}

    def prefill(self, count: int) -> Sequence[Op]:
        """The operations of `count` tokens, without embedding and head."""
        if count == 1:
            return self.decode
        return self._prefills[-1 if count > CHUNK else 0]

    @property
    def producer(self) -> str:
        """What an exact resume needs beside the build: other drivers and other tilings sum in another order."""
        return f"wgpu {library.package_version()}; {self.gpu.found.description}; {self._tiling}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one handle's logits."""
        return -(-4 * self.plan.vocabulary // ALIGNMENT) * ALIGNMENT

    def head(self, row: int) -> tuple[Sequence[Op], Region]:
        """The dispatches that write row `row` of the logits, and where they are."""
        if self._logits is None or (row + 1) * self.row_bytes > self._logits.size:
            rows = max(4, 2 * row)
            self._logits = self.gpu.region(rows * self.row_bytes)
            self._heads.clear()
        while len(self._heads) <= row:
            own = Region(self._logits.buffer, len(self._heads) * self.row_bytes, self.row_bytes)
            self._heads.append(list(self._ops.head(own)))
        return self._heads[row], Region(self._logits.buffer, row * self.row_bytes, 4 * self.plan.vocabulary)
