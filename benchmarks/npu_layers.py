"""Layers of Qwen3.5-0.8B's shape given to the NPU's compiler: blobs, its schedule, and where it puts each operation.

    benchmarks/npu_layers.py compiled [--platforms 4000,5010]         a layer of each kind, and four in a row.
    benchmarks/npu_layers.py forms [--platforms …]                    gated DeltaNet in other forms.
    benchmarks/npu_layers.py engines [--platforms …]                  the operations on the DPU and on the SHAVEs.

Weights are random, float16; the vocabulary is cut to 256, so that embedding and head count for nothing; caches have
2,048 slots. The compiler runs as npu_compile.py says. **It compiles; nothing is executed: Core ML and the NPU cannot
execute here.** Times are those of the compiler's own schedule, by its cost model: no clock measured them. It charges
nothing for some operations.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from npu_compile import PLATFORMS, ROOT, Compiler, table
from true_shape import SHAPES
from xamba import random_module, rewritten

from ssmd_openvino import convert, library
from ssmd_openvino.lint import lint

SHAPE: dict[str, Any] = SHAPES["qwen3.5-0.8b"]["text_config"]
DELTA, FULL = "linear_attention", "full_attention"
KINDS = {"gated DeltaNet": [DELTA], "attention": [FULL], "four layers": [DELTA, DELTA, DELTA, FULL]}
LENGTHS = (1, 64)
SLOTS = 2048
FORMS = (  # whether sums over the state become products, and XAMBA's passes after that
    ("sums over the state as traced", False, None),
    ("sums over the state as products (what ssmd builds)", True, None),
    ("the same + ReduBA", True, "reduba"),
    ("the same + ReduBA + ActiBA 32", True, "reduba,actiba=32"),
)
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3}  # in us


@dataclass(frozen=True)
class Schedule:
    """The compiler's schedule of a model, in us by its own cost model.

    engines: by type of operation, the operations that have work on each engine, and the us there.
    """

    total: float
    busy: dict[str, float]
    engines: dict[str, tuple[Counter[str], dict[str, float]]]

    @staticmethod
    def read(file: Path) -> Schedule:
        trace = json.loads(file.read_text())
        told = trace["taskStatistics"]
        busy = {name: told[f"{said} duration"] for name, said in (("DPU", "DPU"), ("SHAVE", "SW"), ("DMA", "DMA"))}
        engines: dict[str, tuple[Counter[str], dict[str, float]]] = {}
        for event in trace["traceEvents"]:
            if event.get("cat") != "Layer":
                continue
            counts, spent = engines.setdefault(event["args"]["Layer type"], (Counter(), {}))
            for name, said in (("DPU", "DPU time"), ("SHAVE", "Shave time"), ("DMA", "DMA time")):
                if said in event["args"]:
                    counts[name] += 1
                    spent[name] = spent.get(name, 0.0) + _us(event["args"][said])
        return Schedule(told["total duration"], busy, engines)

    def cells(self) -> list[str]:
        return [f"{us:,.0f}" for us in (self.total, *(self.busy[name] for name in ("DPU", "SHAVE", "DMA")))]


def _us(text: str) -> float:
    """Read a time such as "8us 132ns"."""
    return sum(float(word[:-2]) * UNITS[word[-2:]] for word in text.split())


def made(folder: Path, kinds: list[str], length: int, *, products: bool = True, passes: str | None = None) -> Path:
    """Write the graph of some layers for `length` tokens. Raises SystemExit if it breaks a rule of the linter."""
    config = {**SHAPE, "num_hidden_layers": len(kinds), "layer_types": kinds, "vocab_size": 256}
    module = random_module(config)
    if products:
        model = convert.converted(module, SLOTS, length)
    else:
        with patch.object(convert, "_multiply_states", lambda _: None):
            model = convert.converted(module, SLOTS, length)
    model = rewritten(model, passes)
    if wrong := lint(model):
        raise SystemExit(f"not a graph for the NPU: {wrong[0]}")
    file = folder / "layers.xml"
    library.openvino().save_model(model, file, compress_to_fp16=True)
    return file


HEAD = ("compiled, without weights", "schedule, us", "DPU busy", "SHAVEs busy", "DMA busy")


def compiled(compiler: Compiler, folder: Path, platforms: list[str]) -> None:
    def rows() -> Iterator[list[str]]:
        for name, kinds in KINDS.items():
            for length in LENGTHS:
                file = made(folder, kinds, length)
                done = (compiler.compile(file, file.with_suffix(".bin"), platform) for platform in platforms)
                yield [f"{name}, T = {length}", *map(str, done)]

    table(("layers", *(f"{platform} {PLATFORMS.get(platform, '')}" for platform in platforms)), rows())


def forms(compiler: Compiler, folder: Path, platform: str) -> None:
    def rows() -> Iterator[list[str]]:
        for length in LENGTHS:
            for name, products, passes in FORMS:
                if length > 1 and not products:
                    continue  # a chunk has no such sum
                file, trace = made(folder, [DELTA], length, products=products, passes=passes), folder / "trace.json"
                done = compiler.compile(file, file.with_suffix(".bin"), platform, trace=trace)
                yield [f"T = {length}, {name}", str(done), *([] if done.why_not else Schedule.read(trace).cells())]

    table(("form of a layer of gated DeltaNet", *HEAD), rows())


def engines(compiler: Compiler, folder: Path, platform: str) -> None:
    found = {}
    for length in LENGTHS:
        file, trace = made(folder, KINDS["four layers"], length), folder / "trace.json"
        done = compiler.compile(file, file.with_suffix(".bin"), platform, trace=trace)
        if done.why_not:
            raise SystemExit(f"T = {length}: {done.why_not}")
        found[length] = Schedule.read(trace).engines

    def cell(length: int, kind: str, engine: str) -> str:
        counts, spent = found[length].get(kind, (Counter[str](), {}))
        return f"{counts[engine]}: {spent[engine]:,.0f}" if counts[engine] else ""

    def rows() -> Iterator[list[str]]:
        names = ("DPU", "SHAVE", "DMA")
        for kind in sorted(found[1].keys() | found[LENGTHS[-1]].keys()):
            yield [kind, *(cell(length, kind, name) for length in LENGTHS for name in names)]

    head = (f"T = {length}: {name}" for length in LENGTHS for name in ("DPU", "SHAVEs", "DMA"))
    print("# Four layers. Operations that have work on an engine: us of it, of all clusters added up.")
    table(("operation", *head), rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compiled", "forms", "engines"))
    parser.add_argument("--platforms", default="4000", help=", ".join(f"{k} {v}" for k, v in PLATFORMS.items()))
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "npu_compile")
    asked = parser.parse_args()
    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    compiler = Compiler(folder)
    platforms = asked.platforms.split(",")
    if asked.what == "compiled":
        compiler.heading(asked.platforms)
        print("# Layers of Qwen3.5-0.8B's shape, random weights, float16, caches of 2,048 slots.")
        compiled(compiler, folder, platforms)
        return
    for platform in platforms:
        compiler.heading(platform)
        print("# Layers of Qwen3.5-0.8B's shape, random weights, float16; us by the compiler's own cost model.")
        (forms if asked.what == "forms" else engines)(compiler, folder, platform)


if __name__ == "__main__":
    main()
