"""An operation: a dispatch that still lacks its handle; and numbers as shaders read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu.device import Gpu, Kernel
from ssmd_wgpu.recorder import Region
from ssmd_wgpu.ssd import MOST_GROUPS


@dataclass(frozen=True, eq=False)
class Op:
    """A kernel with its buffers and workgroups. `layer`: whose state group 1 binds, where the kernel has a group 1.

    `tokens`: the rows of x, tokens or streams, that one workgroup's y takes; 0 where y does not count them. `paged`:
    y counts the pages of a cache, too. `high`: computes y from the number of rows, where that is not all.
    """

    kernel: Kernel
    group0: Any
    layer: int
    grid: tuple[int, int]
    tokens: int = 0
    paged: bool = False
    high: Callable[[int], int] | None = None


def operation(
    gpu: Gpu,
    text: str,
    regions: Mapping[str, Region | None],
    grid: tuple[int, int],
    layer: int = 0,
    tokens: int = 0,
    paged: bool = False,
    high: Callable[[int], int] | None = None,
) -> Op:
    """Return an operation: a shader with the regions that it names. Raises GraphError if the device refuses it."""
    if grid[0] > MOST_GROUPS or grid[1] > MOST_GROUPS:
        raise GraphError(f"a dispatch of {grid} workgroups is more than any device takes")
    kernel = gpu.kernel(text)
    group0 = gpu.bound(kernel, 0, {n: r for n, r in regions.items() if r is not None})
    return Op(kernel, group0, layer, grid, tokens, paged, high)


def f32(value: float) -> str:
    """Write a number as a literal of WGSL."""
    if not math.isfinite(value):
        raise GraphError(f"{value} is no number")
    return f"f32({float(value)!r})"


def f32_or_none(value: float | None) -> str | None:
    return None if value is None else f32(value)
