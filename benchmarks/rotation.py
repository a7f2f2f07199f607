"""The loss of int8 in each runtime, plain and with rotated weights, and the time of both, in turn in one process.

    python benchmarks/rotation.py [RUNTIME…] [--source FOLDER] [--tokens N] [--no-times]     default: litert openvino

FOLDER is a source checkpoint; default: SmolLM2 out of its package. Two texts, that of ssmd/build/quality.py and
quantization.txt beside this file, in pieces of 400 tokens, each from an empty state and each token by a decode step; of
each text N tokens at most. wgpu rounds weights alone and runs no rotated module: benchmarks/quantization.py has it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from daemon_process import conditions
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.authoring.ops import CHUNK
from ssmd.build import quality
from ssmd.build.builder import Packer, build
from ssmd.cli.making import converter_of, smollm2_source
from ssmd.config import Settings
from ssmd.families.registry import family_of
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.runtime.protocol import Program, get_runtime
from ssmd.runtime.verify import verify

PIECE = quality.MAX_TOKENS
CONTEXT = 512
ROUNDS = 11
STEPS = 16
PREFILL = 64
LONG = Path(__file__).with_name("quantization.txt")


class Made(NamedTuple):
    runtime: str
    rotated: bool
    artifact: Artifact
    program: Program


def made(runtime: str, rotated: bool, source: Source, folder: Path) -> Made:
    converter: Any = copy.copy(converter_of(runtime))
    packed = isinstance(converter, Packer)
    if not packed:
        converter.rotates = lambda quantization: rotated
    making = converter.build if packed else partial(build, converter)
    out = folder / f"{runtime}-{'rotated' if rotated else 'plain'}"
    asked: dict[str, Any] = {"name": "model", "quantization": "int8", "buckets": (PREFILL,), "tiers": (CONTEXT,)}
    artifact = making(source, out, **asked)
    return Made(runtime, rotated, artifact, get_runtime(runtime).load(artifact))


def rows(program: Program, tokens: Sequence[int]) -> NDArray[np.float32]:
    handle = program.new_state()
    found = np.stack([program.decode([handle], [token])[0].copy() for token in tokens])
    program.release(handle)
    return found


def losses(programs: Sequence[Made], source: Source, pieces: Sequence[Sequence[int]]) -> list[list[str]]:
    """Return perplexity and its change, KL and the share of equal favourites, of each program over all pieces."""
    family = family_of(source.config)
    config = family.parse(source.config)
    module = author(family, config, {n: b(source) for n, b in family.bindings(config).items()}, CONTEXT)
    told: list[list[tuple[int, dict[str, float]]]] = [[] for _ in programs]
    for piece in pieces:
        reference = Host(module).rows(piece, CHUNK)
        for one, found in zip(programs, told, strict=True):
            found.append((len(piece), quality.compared(rows(one.program, piece), reference, piece)))
    return [_summed(found) for found in told]


def _summed(pieces: Sequence[tuple[int, dict[str, float]]]) -> list[str]:
    def mean(of: Sequence[float], weights: Sequence[int]) -> float:
        return float(np.average(of, weights=weights))

    sizes = [n for n, _ in pieces]
    told = [t for _, t in pieces]
    own, true = (
        np.exp(mean([np.log(t[k]) for t in told], [n - 1 for n in sizes])) for k in ("perplexity", "perplexity_f32")
    )
    kl, same = (mean([t[k] for t in told], sizes) for k in ("kl", "same"))
    return [f"{true:.2f}", f"{own:.2f} ({100 * (own / true - 1):+.2f} %)", f"{kl:.4f}", f"{100 * same:.1f} %"]


def times(programs: Sequence[Made]) -> list[tuple[float, float]]:
    """Return medians in turn, ms: a decode step and a prefill of PREFILL tokens."""

    def one(program: Program) -> tuple[float, float]:
        handle = program.new_state()
        started = time.perf_counter()
        program.prefill(handle, list(range(5, 5 + PREFILL)))
        read = time.perf_counter()
        for _ in range(STEPS):
            program.decode([handle], [7])
        ended = time.perf_counter()
        program.release(handle)
        return (ended - read) * 1e3 / STEPS, (read - started) * 1e3

    found = [[one(p.program) for p in programs] for _ in range(ROUNDS + 1)][1:]  # one to warm up
    medians = [[statistics.median(r[i][k] for r in found) for k in (0, 1)] for i in range(len(programs))]
    return [(step, prefill) for step, prefill in medians]


def main(runtimes: Sequence[str], folder: Path, most: int, timed: bool) -> None:
    source = Source.open(folder)
    tokenizer = Tokenizer.from_str(source.tokenizer_json.decode())
    texts = {"quality.py": quality.TEXT, LONG.name: LONG.read_text()}
    with tempfile.TemporaryDirectory() as scratch:
        forms = [
            (runtime, rotated)
            for runtime in runtimes
            for rotated in ((False,) if isinstance(converter_of(runtime), Packer) else (False, True))
        ]
        programs = [made(runtime, rotated, source, Path(scratch)) for runtime, rotated in forms]
        print(f"# int8 of {source.path.name}, plain and rotated; {conditions()}")
        print("\n| runtime | weights | text | tokens | f32 | perplexity (change) | KL | same favourite |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for name, text in texts.items():
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            ids = ids[: min(most, PIECE if name == "quality.py" else len(ids))]
            pieces = [ids[i : i + PIECE] for i in range(0, len(ids), PIECE) if len(ids) - i > 1]
            for one, cells in zip(programs, losses(programs, source, pieces), strict=True):
                form = "rotated" if one.rotated else "plain"
                print(f"| {' | '.join([one.runtime, form, name, str(len(ids)), *cells])} |", flush=True)
        print(f"\n| runtime | weights | worst golden step, rms | decode ms | prefill of {PREFILL}, ms | of plain |")
        print("| --- | --- | --- | --- | --- | --- |")
        measured = times(programs) if timed else [(float("nan"), float("nan"))] * len(programs)
        plain = {p.runtime: t for p, t in zip(programs, measured, strict=True) if not p.rotated}
        for one, (step, prefill) in zip(programs, measured, strict=True):
            first, second = plain[one.runtime]
            rms = verify(one.artifact, one.program).worst.rms_relative
            cells = [one.runtime, "rotated" if one.rotated else "plain", f"{rms:.3f}", f"{step:.1f}", f"{prefill:.0f}"]
            print(f"| {' | '.join([*cells, f'{step / first:.3f}, {prefill / second:.3f}'])} |")
        for one in programs:
            one.program.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtimes", nargs="*", default=["litert", "openvino"], metavar="RUNTIME")
    parser.add_argument("--source", type=Path, help="a source checkpoint; else SmolLM2's from its package")
    parser.add_argument("--tokens", type=int, default=1 << 30, help="of each text at most")
    parser.add_argument("--no-times", action="store_true", help="on a busy machine")
    given = parser.parse_args()
    if given.source is not None:
        main(given.runtimes, given.source, given.tokens, not given.no_times)
    else:
        with smollm2_source(Settings(), lambda line: None) as unpacked:
            main(given.runtimes, unpacked, given.tokens, not given.no_times)
