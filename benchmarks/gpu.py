"""The wgpu runtime on the adapter that it finds, at the shapes of four models with random weights: dispatches and what
recording them costs; decode of 1, 4 and 8 streams, a prompt, and the share of memory bandwidth.

    python benchmarks/gpu.py [MODEL…] [--device NAME] [--quant f16,int8,int4] [--count] [--json FILE]

It needs ssmd's wheel with the extra `wgpu`, nothing else, and prints tables as they stand in docs/wgpu.md; the model
that it is at goes to standard error. `--count`: nothing is computed, for adapters that are software. Bandwidth is that
of the best of some shaders that read 1 GiB, beside what a plain copy reads and writes. Decode: a token of each stream
at a time, with their logits read back. A share of bandwidth counts weights, read once a step, and the streams'
recurrent states, read and written. Medians, each taken after the adapter was kept busy for a while, so that its clocks
are up. `scripts/gpu` measures more.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ssmd.families.registry import family_of
from ssmd.model.state import StateSpec
from ssmd_wgpu import pack
from ssmd_wgpu.build import packed_plan
from ssmd_wgpu.device import Gpu, choose_adapter
from ssmd_wgpu.library import package_version
from ssmd_wgpu.model import Model
from ssmd_wgpu.op import Op
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.products import HARDWARE, SOFTWARE
from ssmd_wgpu.recorder import Copy, Dispatch, Region, dispatch
from ssmd_wgpu.trial import tried
from ssmd_wgpu.tuning import Tuning, tuned, warm

PROMPT, MOST = 512, 256
ROWS = 1024  # of a cache
WARM_S = 1.0  # of steps before the first one that counts
STREAMS = 1, 4, 8
MAMBA = {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "mamba-130m": MAMBA | {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 24, "vocab_size": 50280},
    "mamba2-130m": {"model_type": "mamba2", "hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128}
    | {"n_groups": 1, "num_hidden_layers": 24, "vocab_size": 50288, "tie_word_embeddings": True},
    "granite-4.0-h-350m": {"model_type": "granitemoehybrid", "hidden_size": 768, "num_hidden_layers": 32}
    | {"layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)], "num_local_experts": 0}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "shared_intermediate_size": 2048, "mamba_n_heads": 48}
    | {"mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "vocab_size": 100352}
    | {"max_position_embeddings": 32768, "tie_word_embeddings": True},
    "falcon-mamba-7b": MAMBA
    | {"model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "time_step_rank": 256}
    | {"num_hidden_layers": 64, "vocab_size": 65024, "tie_word_embeddings": False},
}


class Random:
    """Random weights in place of Weights: matrices of one shape share their bytes, and each is uploaded for itself."""

    def __init__(self, plan: PackedPlan, quantization: pack.Format) -> None:
        rng = np.random.default_rng(0)
        made: dict[Any, pack.Matrix] = {}
        self.matrices: dict[str, pack.Matrix] = {}
        self.vectors: dict[str, Any] = {}
        for name, shape in plan.packed().items():
            if not pack.is_matrix(name, shape):
                self.vectors[name] = np.full(shape, -1.0 if name.endswith("_A") else 0.5, np.float32)
                continue
            fmt = pack.format_of(name, quantization)
            if (shape, fmt) not in made:
                few = rng.standard_normal((256, shape[1]), np.float32) * shape[1] ** -0.5
                parts = [np.resize(part, (shape[0], *part.shape[1:])) for part in pack.encode(few, fmt)]
                made[shape, fmt] = pack.Matrix(shape[0], shape[1], fmt, parts[0], parts[1] if len(parts) > 1 else None)
            self.matrices[name] = made[shape, fmt]

    @property
    def nbytes(self) -> int:
        """Read for one token: the embedding is a head, too, or only a row of it is."""
        whole = {n: pack.nbytes(m.rows, m.columns, m.fmt) for n, m in self.matrices.items()}
        if "head" in whole:
            del whole["embedding"]
        small: int = sum(v.nbytes for n, v in self.vectors.items() if not n.startswith("rope"))
        return sum(whole.values()) + small


def median_s(run: Any, times: int) -> float:
    run()
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def bandwidth(gpu: Gpu) -> dict[str, float]:
    """GB/s of the best of some shaders that read and sum, and of a copy, which reads and writes: of a busy adapter,
    less what an empty submission takes.
    """
    software = gpu.found.software
    size = min(gpu.binding_bytes, (1 << 26) if software else (1 << 30)) // (1 << 22) * (1 << 22)
    a, b, out = gpu.region(size), gpu.region(size), gpu.region(4 * 65536)
    small = Region(out.buffer, 0, 16)
    forms = ((4096, 1),) if software else ((1024, 8), (4096, 4), (4096, 16), (16384, 4))
    times, rounds = (2, 3) if software else (8, 7)
    warm(gpu)
    empty_s = median_s(lambda: gpu.recorder.read([], [small]), 20)

    def once_s(run: Any) -> float:
        return max(1e-9, median_s(run, rounds) - empty_s) / times

    read_s = []
    for groups, at_once in forms:
        sums = " + ".join(f"A[i + {j * groups * 256}u]" for j in range(at_once))
        text = f"""
@group(0) @binding(0) var<storage, read> A: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> B: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {{
  var s = vec4<f32>();
  for (var i = at.x; i < {size // 16}u; i += {at_once * groups * 256}u) {{ s += {sums}; }}
  B[at.x % 65536u] = s.x + s.y + s.z + s.w;
}}"""
        kernel = gpu.kernel(text)
        reading = [dispatch(kernel.pipeline, gpu.bound(kernel, 0, {"A": a, "B": out}), None, groups, 1)] * times
        read_s.append(once_s(lambda reading=reading: gpu.recorder.read(reading, [small])))
    copies = [Copy(a.buffer, 0, b.buffer, 0, size)] * times

    def copy() -> None:
        gpu.recorder.submit([], copies)
        gpu.recorder.read([], [small])

    copy_gb_s = 2 * size / once_s(copy) / 1e9
    return {"read_gb_s": size / min(read_s) / 1e9, "copy_gb_s": copy_gb_s, "empty_ms": 1e3 * empty_s}


class Bench:
    """A model of random weights on an adapter, and slots for the most streams."""

    def __init__(self, gpu: Gpu, name: str, quantization: pack.Format, counting: bool = False) -> None:
        family = family_of(SHAPES[name])
        self.plan = packed_plan(family, family.parse(SHAPES[name]), 2048)
        self.weights = Random(self.plan, quantization)
        if counting:
            gpu.write = lambda *_: None  # type: ignore[method-assign] # all buffers are there, none is filled
        begin = time.perf_counter()
        half = quantization != "f32"
        software = gpu.found.software
        counted = Tuning(SOFTWARE if software else replace(HARDWARE, fused=True))
        self.tuning = counted if counting else tuned(gpu, self.plan, quantization)
        self.tuned_s = time.perf_counter() - begin
        model = Model(gpu, self.plan, cast(pack.Weights, self.weights), MOST, half, self.tuning.tiling)
        self.model = model if counting or software else tried(model, self.tuning)
        self.load_s = time.perf_counter() - begin
        self.spec: StateSpec = self.plan.spec("float16" if half else "float32")
        self.slots = [self.model.slots.take() for _ in range(max(STREAMS))]
        for slot in self.slots:
            self.model.slots.reserve(slot, ROWS)
        self._position = 0

    def step(self, streams: int) -> list[Dispatch]:
        return self.model.step(streams, len(self.slots[0].pages))

    def decode(self, streams: int, step: list[Dispatch] | None = None) -> None:
        """Compute a token of each of so many streams, by the model's own dispatches or by these."""
        model = self.model
        at = [self._position % (ROWS - MOST)] * streams
        model.slots.feed(self.slots[:streams], at, np.full(streams, 5, np.int32))
        model.gpu.recorder.read(
            self.step(streams) if step is None else step, [model.logits(i) for i in range(streams)], probed=True
        )
        self._position += 1

    def prompt(self, tokens: int, prefill: Sequence[Op] | None = None) -> None:
        """Read a prompt of so many tokens."""
        model = self.model
        for at in range(0, tokens, MOST):
            model.slots.feed(self.slots[:1], [at], np.full(MOST, 7, np.int32))
            ops = model.prefill(MOST) if prefill is None else prefill
            model.gpu.recorder.read(model.slots.dispatches(ops, MOST), [model.logits(0)])

    def share(self, streams: int, seconds: float, read_gb_s: float) -> float:
        """Return the share of the bandwidth that a step reaches."""
        recurrent = sum(t.nbytes_at(0) for t in self.spec.recurrent)
        return (self.weights.nbytes + 2 * streams * recurrent) / seconds / 1e9 / read_gb_s


def measured(
    bench: Bench, name: str, quantization: str, counting: bool, read_gb_s: float, kept: Callable[[Any], object] = id
) -> dict[str, Any]:
    """Measure a model: what `counts` and `speeds` print. `kept` is called with what is known after each measurement."""
    model, gpu = bench.model, bench.model.gpu
    software = gpu.found.software
    steps = {n: bench.step(n) for n in STREAMS}
    row: dict[str, Any] = {
        "model": name,
        "quant": quantization,
        "weights_mb": bench.weights.nbytes / 1e6,
        "dispatches": {n: len(step) for n, step in steps.items()},
        "prefill_dispatches": len(model.prefill(MOST)),
        "tiling": str(model.tiling),
        "fused": model.tiling.fused and gpu.coherent,
        "together": model.tiling.together,
        "weight_reads_per_prompt_token": -(-MOST // model.tiling.tile) / MOST,
        "load_s": bench.load_s,
        "tuned_s": bench.tuned_s,
        "shapes": bench.tuning.table,
        "step_cost": {n: model.step_cost(n) for n in (2, 4, 8)},
    }
    times = 100 if counting else 20
    few = steps[1][:100]  # a buffer that is recorded is filled with zeros: not those of a large model, for that
    empty = [(p, a, b, 0, 0, wrapped) for p, a, b, _, _, wrapped in few]  # the same recording, and no work
    row["record_us"] = 1e6 * median_s(lambda: gpu.recorder.submit(empty), times) / len(empty)
    if counting:
        return row
    row |= {"step_ms": {}, "decode_tok_s": {}, "bandwidth_share": {}}
    until = time.perf_counter() + (0.0 if software else WARM_S)
    while time.perf_counter() < until:  # the first steps of a process take up to twice as long
        bench.decode(1)
    for n in STREAMS:
        warm(gpu)
        seconds = median_s(lambda n=n: bench.decode(n), 5 if software else 64)
        row["step_ms"][n], row["decode_tok_s"][n] = 1e3 * seconds, n / seconds
        row["bandwidth_share"][n] = bench.share(n, seconds, read_gb_s)
        kept(row)
    warm(gpu)
    row["prefill_tok_s"] = PROMPT / median_s(lambda: bench.prompt(PROMPT), 1 if software else 5)
    kept(row)
    return row


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def counts(rows: Sequence[dict[str, Any]]) -> str:
    """The table of what is recorded."""
    streams = [f"{n} stream{'s' * (n > 1)}" for n in STREAMS]
    head = ["model", "weights", "MB", *(f"dispatches, {s}" for s in streams), f"prefill of {MOST}", "recording one, us"]
    cells = []
    for r in rows:
        steps = [str(r["dispatches"][n]) for n in STREAMS]
        numbers = [*steps, str(r["prefill_dispatches"]), f"{r['record_us']:.1f}"]
        cells.append([r["model"], r["quant"], f"{r['weights_mb']:,.0f}", *numbers])
    return table(head, cells)


def speeds(rows: Sequence[dict[str, Any]]) -> str:
    """The table of what is computed."""
    streams = [f"{n} stream{'s' * (n > 1)}" for n in STREAMS]
    head = ["model", "weights", *(f"ms a step, {s}" for s in streams), *(f"tokens/s, {s}" for s in streams)]
    head += [*(f"of bandwidth, {s}" for s in streams), f"prompt of {PROMPT}, tokens/s", "tiling", "load, s"]
    cells = []
    for r in rows:
        numbers = [f"{r['step_ms'][n]:.2f}" for n in STREAMS]
        numbers += [f"{r['decode_tok_s'][n]:,.0f}" for n in STREAMS]
        numbers += [f"{r['bandwidth_share'][n]:.0%}" for n in STREAMS]
        how = f"{r['tiling']}{'; fused' if r['fused'] else ''}{'' if r['together'] else '; one by one'}"
        cells.append([r["model"], r["quant"], *numbers, f"{r['prefill_tok_s']:,.0f}", how, f"{r['load_s']:.1f}"])
    return table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SHAPES), metavar="MODEL")
    parser.add_argument("--device")
    parser.add_argument("--quant", default="f16,int8,int4")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = choose_adapter(asked.device)
    probe = bandwidth(Gpu(found))
    rows = []
    for name in asked.models:
        for quantization in asked.quant.split(","):
            print(f"{name} {quantization} ...", file=sys.stderr, flush=True)
            bench = Bench(Gpu(found), name, quantization, asked.count)
            rows.append(measured(bench, name, quantization, asked.count, probe["read_gb_s"]))
    print(f"wgpu {package_version()}, {found.description}: a shader reads {probe['read_gb_s']:.1f} GB/s, ", end="")
    print(f"a copy moves {probe['copy_gb_s']:.1f} GB/s. Medians, random weights, {platform.system()}.\n")
    print(counts(rows))
    if not asked.count:
        print(f"\n{speeds(rows)}")
    if asked.json:
        asked.json.write_text(json.dumps({"adapter": found.description, **probe, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
