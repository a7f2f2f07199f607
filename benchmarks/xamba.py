"""XAMBA's graph passes (docs/notes/xamba.md): a Mamba-2 block in all its forms on this CPU, and what ActiBA costs.

    benchmarks/xamba.py [--smollm2 FOLDER] [--save FOLDER]

FOLDER of --smollm2 is its source checkpoint; default: out of its package. --save writes the block's graphs with float16
weights, to compile them elsewhere. Nothing here runs on an NPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from daemon_process import conditions
from numpy.typing import NDArray
from tokenizers import Tokenizer
from true_shape import SHAPES, Weights

from ssmd.authoring.flat import FlatModule
from ssmd.authoring.model import author
from ssmd.build import quality
from ssmd.cli.making import smollm2_source
from ssmd.config import Settings
from ssmd.families.registry import family_of
from ssmd.model.source import Source
from ssmd_openvino import library, xamba
from ssmd_openvino.convert import converted
from ssmd_openvino.piecewise import Array, Function, silu, softplus, terms
from ssmd_openvino.xamba import Passes

TOKENS = 256
ROUNDS = 15
THREADS = 2
SEGMENTS = (8, 16, 32, 64)
BLOCK = SHAPES["mamba2-130m"] | {"num_hidden_layers": 1, "vocab_size": 256}  # head and embedding as good as nothing
VOCABULARY = 384
MAMBA = SHAPES["mamba2-130m"] | {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_heads": 12,
    "head_dim": 16,
    "state_size": 32,
}
GRANITE = SHAPES["granite-4.0-h-350m"] | {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "shared_intermediate_size": 192,
}
PROPERTIES = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": THREADS}


class Form(NamedTuple):
    name: str
    file: str
    naive: bool
    passes: str | None
    paper: str  # how many times as fast as naive its authors measured it on an NPU


FORMS = (
    Form("naive", "naive", True, None, "1"),
    Form("CumBA", "cumba", True, "cumba", "2.7"),
    Form("ReduBA", "reduba", True, "reduba", "1.2"),
    Form("CumBA + ReduBA", "both", True, "cumba,reduba", "4.8"),
    Form("CumBA + ReduBA + ActiBA 32", "both_actiba32", True, "cumba,reduba,actiba=32", ""),
    Form("products of matrices (what ssmd builds)", "products", False, None, ""),
    Form("the same + ActiBA 32", "products_actiba32", False, "actiba=32", ""),
)


def random_module(config: Mapping[str, Any]) -> FlatModule:
    family, weights = family_of(config), cast(Source, Weights())
    parsed = family.parse(config)
    return author(family, parsed, {n: b(weights) for n, b in family.bindings(parsed).items()}, TOKENS)


def rewritten(model: Any, passes: str | None) -> Any:
    model = model.clone()
    if passes is not None:
        left = xamba.apply(model, Passes.parse(passes)).left
        if left:
            raise RuntimeError(f"{passes} leaves {left}")
    return model


class Compiled:
    """A model on the CPU with inputs of its own: tokens from `ids`, states of small random values, or zeros."""

    def __init__(self, model: Any, ids: Sequence[int], scale: float = 0.0) -> None:
        openvino = library.openvino()
        rng = np.random.default_rng(0)
        self.request = openvino.Core().compile_model(model, "CPU", PROPERTIES).create_infer_request()
        fixed = {"tokens": [list(ids)], "pos": [0], "n_valid": [len(ids)]}
        for i, port in enumerate(model.inputs):
            if port.any_name in fixed:
                array = np.array(fixed[port.any_name], np.int32)
            else:
                array = (rng.standard_normal(tuple(port.shape)) * scale).astype(np.float32)
            self.request.set_input_tensor(i, openvino.Tensor(array))

    def ms(self) -> float:
        started = time.perf_counter()
        self.request.start_async()
        self.request.wait()
        return (time.perf_counter() - started) * 1e3

    def logits(self) -> NDArray[np.float32]:
        self.ms()
        found: NDArray[np.float32] = self.request.get_tensor("logits").data.copy()
        return found


def block(save: Path | None) -> None:
    module, ids = random_module(BLOCK), [1 + i % 200 for i in range(TOKENS)]
    traced = {}
    for naive in (True, False):
        module.naive = naive
        traced[naive] = converted(module, TOKENS, TOKENS)
    models = [rewritten(traced[form.naive], form.passes) for form in FORMS]
    if save is not None:
        for form, model in zip(FORMS, models, strict=True):
            library.openvino().save_model(model, save / f"{form.file}.xml", compress_to_fp16=True)
    compiled = [Compiled(model, ids, 0.1) for model in models]
    expected = compiled[0].logits()
    errors = [float(np.abs(c.logits() - expected).max() / expected.std()) for c in compiled]
    times = [[c.ms() for c in compiled] for _ in range(ROUNDS)]
    medians = [statistics.median(row) for row in zip(*times, strict=True)]
    print(f"# A Mamba-2-130m block, one layer with random weights, T = {TOKENS}, float32; {conditions()}")
    print(
        f"# OpenVINO {library.package_version()} on the CPU, {THREADS} threads, {PROPERTIES['PERFORMANCE_HINT']};",
        end="",
    )
    print(
        f" medians of {ROUNDS} in turn. Core ML and the NPU cannot execute here: the paper's column is its authors'.\n"
    )
    print(
        "| form | ms | times as fast | paper, on its NPU "
        "| CumSum | ReduceSum | SiLU, softplus | MatMul | error of logits |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for form, model, ms, error in zip(FORMS, models, medians, errors, strict=True):
        n = xamba.counts(model)
        found = [n.get("CumSum", 0), n.get("ReduceSum", 0), n.get("Swish", 0) + n.get("SoftPlus", 0), n["MatMul"]]
        cells = [form.name, f"{ms:.1f}", f"{medians[0] / ms:.2f}", form.paper, *map(str, found), f"{error:.1e}"]
        print(f"| {' | '.join(cells)} |")


def piecewise(function: Function, segments: int, x: Array) -> Array:
    ends, slopes = terms(function, segments)
    inside = [slope * (c - np.clip(np.abs(x), low, c)) for c, low, slope in zip(ends, ends[1:], slopes, strict=False)]
    made: Array = np.maximum(x, 0) + sum(inside)
    return made


def functions() -> None:
    """Print the errors of SiLU, and of softplus as the time step dt of a Mamba."""
    x = np.linspace(-30.0, 30.0, 600_001)
    dt = np.geomspace(1e-3, 0.1, 100_001)
    print("\n# ActiBA's functions: largest error over [-30, 30]; relative error of dt where it is 0.001 to 0.1\n")
    print("| segments | R of SiLU, of softplus | SiLU | softplus | dt: median | largest | smallest dt for 0.0001 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for segments in SEGMENTS:
        ranges = [f"{terms(f, segments)[0][0]:.1f}" for f in (silu, softplus)]
        errors = [np.abs(piecewise(f, segments, x) - f(x)).max() for f in (silu, softplus)]
        off = np.abs(piecewise(softplus, segments, np.log(np.expm1(dt))) / dt - 1)
        least = piecewise(softplus, segments, np.log(np.expm1(np.array([1e-4]))))[0]
        cells = [str(segments), ", ".join(ranges), *(f"{e:.1e}" for e in errors)]
        cells += [f"{100 * np.median(off):.2g} %", f"{100 * off.max():.2g} %", f"{least:.1e}"]
        print(f"| {' | '.join(cells)} |")


def errors_of_logits(found: NDArray[np.float32], expected: NDArray[np.float32]) -> list[str]:
    difference = (found - expected) / expected.std(-1, keepdims=True)
    return [f"{np.sqrt((difference**2).mean()):.1e}", f"{np.abs(difference).max():.1e}"]


def accuracy(folder: Path) -> None:
    source = Source.open(folder)
    family = family_of(source.config)
    config = family.parse(source.config)
    ids = Tokenizer.from_str(source.tokenizer_json.decode()).encode(quality.TEXT, add_special_tokens=False).ids
    ids = ids[: quality.MAX_TOKENS]
    large = author(family, config, {n: b(source) for n, b in family.bindings(config).items()}, len(ids))
    chosen = [int(i) for i in np.random.default_rng(1).integers(0, VOCABULARY, TOKENS)]
    fed = [chosen, chosen, ids]
    models = []
    for module, given in zip((random_module(MAMBA), random_module(GRANITE), large), fed, strict=True):
        module.every = True
        models.append(converted(module, len(given), len(given)))
    expected = [Compiled(m, i).logits() for m, i in zip(models, fed, strict=True)]
    print(f"\n# ActiBA: {len(ids)} tokens of SmolLM2-135M, which has SiLU alone; {TOKENS} of a tiny Mamba-2 and a tiny")
    print("# Granite hybrid with random weights and time steps as training begins with them; float32 on the CPU.")
    print("# Errors of logits in standard deviations of their row: of all rows the rms and the worst.\n")
    heads = ["segments", "Mamba-2: rms", "worst", "Granite: rms", "worst", "SmolLM2: rms", "worst"]
    print(f"| {' | '.join([*heads, 'perplexity', 'change', 'KL'])} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for segments in SEGMENTS:
        rows = [Compiled(rewritten(m, f"actiba={segments}"), i).logits() for m, i in zip(models, fed, strict=True)]
        told = quality.compared(rows[-1], expected[-1], ids)
        change = 100 * (told["perplexity"] / told["perplexity_f32"] - 1)
        cells = [str(segments)]
        for found, true in zip(rows, expected, strict=True):
            cells += errors_of_logits(found, true)
        cells += [f"{told['perplexity']:.2f}", f"{change:+.2f} %", f"{told['kl']:.1e}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"| exact | 0 | 0 | 0 | 0 | 0 | 0 | {told['perplexity_f32']:.2f} | | 0 |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="its source checkpoint; else out of its package")
    parser.add_argument("--save", type=Path, help="where to write the block's graphs")
    given = parser.parse_args()
    block(given.save)
    functions()
    if given.smollm2 is not None:
        accuracy(given.smollm2)
        return
    with smollm2_source(Settings(), print) as folder:
        accuracy(folder)


if __name__ == "__main__":
    main()
