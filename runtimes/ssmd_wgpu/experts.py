"""Mixtures of experts: the choice by the router's scores, and products with the chosen experts' matrices.

Buffers of T rows, each a token or a stream of the call, with E experts of J channels, of which k are chosen: scores
(T, E); experts and shares (T, k), the best first; inner (T, k, J), the values between the products; outer
(T, k, hidden), of a prefill; groups, see Groups. A pair is a row with one of its chosen experts: t k + rank.

A decode step reads each stream's chosen experts at offsets by their numbers. A prefill groups pairs by expert, so that
a tile reads an expert's weights once for its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ssmd.model.plan import Experts
from ssmd_wgpu.device import Gpu, shader
from ssmd_wgpu.op import Op, f32, operation
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.products import Products, Tiling, ahead, rows_per_thread
from ssmd_wgpu.recorder import Region
from ssmd_wgpu.resident import DeviceWeights

TILE = 8  # pairs: an expert has few rows of a prompt, and of a tile that is not full the rest is computed, too


@dataclass(frozen=True)
class Groups:
    """The words of `groups`, for calls of at most `tokens` rows.

    From 0 on the first pair of each expert in the order of experts, and their end; the number of tiles; from tiles_at
    on each tile's expert and first pair; from places_at on the pairs in that order.
    """

    m: Experts
    tokens: int

    def tiles(self, tokens: int) -> int:
        """Return the most tiles of so many rows: of each expert that has pairs one may be unfilled."""
        pairs = tokens * self.m.chosen
        return min(self.m.count, pairs) + pairs // TILE

    @property
    def tiles_at(self) -> int:
        return self.m.count + 2

    @property
    def places_at(self) -> int:
        return self.tiles_at + 2 * self.tiles(self.tokens)

    @property
    def words(self) -> int:
        return self.places_at + self.tokens * self.m.chosen

    @property
    def sizes(self) -> dict[str, int]:
        """The constants of shaders that write or read them."""
        at = {"tiles_at": self.tiles_at, "places_at": self.places_at, "tile": TILE}
        return {"count": self.m.count, "chosen": self.m.chosen, **at}


class Mixtures:
    """Makes the operations of layers' experts. tokens: the most rows of a call."""

    def __init__(
        self,
        gpu: Gpu,
        plan: PackedPlan,
        weights: DeviceWeights,
        buffers: Mapping[str, Region],
        products: Products,
        tiling: Tiling,
        tokens: int,
    ) -> None:
        self._gpu, self._plan, self._buffers, self._tokens = gpu, plan, buffers, tokens
        self._matrices, self._parts = weights.matrices, weights.vectors
        self._products, self._tiling = products, tiling

    def inner(self, i: int, m: Experts, streams: int) -> Iterator[Op]:
        """Yield what reads layer i's input: the choice, and gate and up of the chosen experts."""
        part, groups = f"layer{i}_mlp", Groups(m, self._tokens)
        at = self._parts[part].at
        gain = at["norm2"]
        yield from self._products.of(f"layer{i}_router", part, "x", "scores", streams, gain=gain, biased=False)
        sizes = {"count": m.count, "chosen": m.chosen, "sigmoid": m.sigmoid, "normed": m.normed}
        text = shader("experts_choose", **sizes, bias=at["router_bias"] if m.bias else None)
        yield operation(self._gpu, text, self._regions(part), (1, 1), tokens=1)
        if not streams:
            yield operation(self._gpu, shader("experts_group", experts=groups.sizes), self._regions(part), (1, 1))
        name = f"layer{i}_experts_gate_up"
        yield from self._product(name, part, groups, "x", "inner", streams, end="swiglu", gain=gain)

    def outer(self, i: int, m: Experts, streams: int) -> Iterator[Op]:
        """Yield what adds the chosen experts' outputs to x."""
        part, name, groups = f"layer{i}_mlp", f"layer{i}_experts_down", Groups(m, self._tokens)
        if streams:
            yield from self._product(name, part, groups, "inner", "x", streams, end="add", gain=None)
            return
        yield from self._product(name, part, groups, "inner", "outer", streams, end="store", gain=None)
        text = shader("experts_sum", columns=self._plan.hidden, chosen=m.chosen)
        regions = self._regions(part) | {"X": self._buffers["x"], "Y": self._buffers["outer"]}
        yield operation(self._gpu, text, regions, (-(-self._plan.hidden // 64), 1), tokens=1)

    def _product(
        self, name: str, part: str, groups: Groups, x: str, y: str, streams: int, *, end: str, gain: int | None
    ) -> Iterator[Op]:
        """Yield a product with the chosen experts' matrices for each part of them that a binding holds."""
        m = self._matrices[name]
        t = self._tiling.of(m)
        columns = 1 if streams else TILE
        rows = rows_per_thread(t, columns) if m.rows >= 512 else 2
        across = -(-m.rows // (64 // t.threads_per_row * rows))
        for cut in m.parts:
            text = shader(
                "experts_product",
                **m.sizes,
                rows=m.rows,
                threads_per_row=t.threads_per_row,
                subgroups=t.subgroups,
                rows_per_thread=rows,
                ahead=ahead(t, m.fmt, columns, rows, 1),
                streams=columns,
                unit=1,
                threads=64,
                gain=gain,
                eps=f32(self._plan.eps),
                end=end,
                across=across,
                tiled=not streams,
                experts={**groups.sizes, "first": cut.first // m.rows, "here": cut.rows // m.rows},
            )
            regions = {**self._regions(part), "W": cut.values, "S": cut.scales}
            regions |= {"X": self._buffers[x], "Y": self._buffers[y]}
            if streams:
                wide = across * (groups.m.chosen if end == "swiglu" else 1)
                yield operation(self._gpu, text, regions, (wide, 1), tokens=1)
            else:
                yield operation(self._gpu, text, regions, (across, groups.tiles(self._tokens)), high=groups.tiles)

    def _regions(self, part: str) -> dict[str, Region | None]:
        names = ("scores", "experts", "shares", "groups")
        return {**{name.upper(): self._buffers[name] for name in names}, "P": self._parts[part].region}


def buffers_of(m: Experts, hidden: int) -> dict[str, int]:
    """Return the values of each row in the buffers of a layer's experts."""
    k = m.chosen
    return {"scores": m.count, "experts": k, "shares": k, "inner": k * m.intermediate, "outer": k * hidden}
