"""A layer of experts on the wgpu runtime, beside a dense MLP as large as the experts that a token takes.

    python benchmarks/experts.py [--device NAME] [--quant int8,int4]

Granite-4.0-H-Tiny's sizes with random weights: hidden 1536, 64 experts of 512, 6 chosen; the dense MLP has 3072
channels. Least milliseconds of a dispatched layer of some rounds, which take both in turn: of the processor, where the
adapter is software, or of the clock. Rows are tokens of a prompt, or streams with a token each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
from daemon_process import conditions
from gpu import Random, table

from ssmd.model.plan import Experts, Layer, Mlp, ShortConv
from ssmd_wgpu import pack
from ssmd_wgpu.device import Gpu, choose_adapter
from ssmd_wgpu.model import Model
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.recorder import Region
from ssmd_wgpu.tuning import tuned

HIDDEN, COUNT, CHOSEN, CHANNELS = 1536, 64, 6, 512
STREAMS, PROMPTS = (1, 4, 8), (16, 64, 256)
ROUNDS = 7


class OneLayer:
    """A layer of random weights on an adapter. Another one before it has the state that a model needs."""

    def __init__(self, gpu: Gpu, layer: Layer, quantization: pack.Format) -> None:
        small = Layer(mixers=(ShortConv(channels=16, width=3, bias=False),), mlp=None)
        sizes = {"hidden": HIDDEN, "vocabulary": 256, "eps": 1e-5, "embedding_scale": 1.0, "tied": True, "context": 512}
        plan = PackedPlan.model_validate({**sizes, "layers": (small, layer)})
        weights = cast(pack.Weights, Random(plan, quantization))
        self.gpu = gpu
        self.model = Model(gpu, plan, weights, max(PROMPTS), False, tuned(gpu, plan, quantization).tiling)
        self.slots = [self.model.slots.take() for _ in range(max(STREAMS))]

    def seconds(self, rows: int, streams: bool) -> float:
        """Compute the layer for rows of random numbers."""
        slots = self.model.slots
        count = rows if streams else 1
        slots.feed(self.slots[:count], [0] * count, np.arange(rows, dtype=np.int32))
        ops = list(self.model._ops.layer(1, rows if streams else 0))
        x = self.model._buffers["x"]
        self.gpu.write(x, np.random.default_rng(0).standard_normal((rows, HIDDEN), np.float32))
        self.gpu.wait()
        clock = time.process_time if self.gpu.found.software else time.perf_counter
        begin = clock()
        self.gpu.recorder.read(slots.dispatches(ops, rows), [Region(x.buffer, 0, 16)])
        return clock() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device")
    parser.add_argument("--quant", default="int8,int4")
    asked = parser.parse_args(arguments)
    gpu = Gpu(choose_adapter(asked.device))
    print(f"# {gpu.found.description}; {conditions()}.")
    experts = Experts(count=COUNT, chosen=CHOSEN, intermediate=CHANNELS, sigmoid=False, bias=False, normed=False)
    layers = (
        Layer(mixers=(), mlp=Mlp(intermediate=CHOSEN * CHANNELS, bias=False)),
        Layer(mixers=(), mlp=None, experts=experts),
    )
    made = []
    for quantization in asked.quant.split(","):
        both = [OneLayer(gpu, layer, quantization) for layer in layers]
        for rows, streams in [*((n, True) for n in STREAMS), *((n, False) for n in PROMPTS)]:
            times = [[layer.seconds(rows, streams) for layer in both] for _ in range(ROUNDS)]
            dense, mixed = (1e3 * min(each) for each in zip(*times, strict=True))
            what = f"{rows} stream{'s' * (rows > 1)}" if streams else f"prompt of {rows}"
            made.append([quantization, what, f"{dense:.1f}", f"{mixed:.1f}", f"{mixed / dense:.1f}"])
    print(table(["weights", "rows of a call", "dense, ms", "experts, ms", "experts / dense"], made))


if __name__ == "__main__":
    main()
