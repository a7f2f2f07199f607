"""Every family against transformers on every runtime: the errors of logits and states, or the words of the refusal.

    benchmarks/parity.py [VARIANT…]

Tiny random models of tests/tiny.py, one of each family, in float32. Tokens are fed in three ways with junk in the pads.
An error of logits counts in units of the largest of its row, one of states in units of the largest value of its tensor.
LiteRT, OpenVINO and wgpu load what `ssmd build` makes. **Core ML and the NPU cannot execute here**: a numpy evaluator
computes Core ML's packages, and OpenVINO's CPU plugin the graphs for the NPU, whose weights stay float32 for it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from daemon_process import conditions
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracle
import tiny
from conftest import BUILT, TinyArtifacts, opened
from evaluated import runtime_of
from static_graphs import StaticGraphs

from ssmd.authoring.flat import FlatModule
from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.families.registry import family_of
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.model.state import State
from ssmd_wgpu.device import devices

ROWS = (
    *("mamba", "falcon-mamba", "mamba2-groups", "granite-groups", "granite-moe", "bamba-last", "falcon-h1-norm"),
    *("nemotron-h-biases", "lfm2", "lfm2-moe", "lfm3", "qwen3.5", "llama", "qwen3"),
)
RUNTIMES = ("litert", "openvino", "wgpu", "coreml", "npu")
HEAD = ("LiteRT", "OpenVINO", "wgpu", "Core ML, evaluated", "NPU's graphs, on a CPU")
SPLITS = ([64, 64, 22], [50, 1, 13, 64, 22], [16, 7, 64, 3, 60])  # tokens of each call
BUCKETS = (1, 16, 64)
PAD = 99
CONTEXT = 256
Fed = Callable[[Sequence[int], Sequence[int]], Iterator[tuple[int, NDArray[np.float32], State | None]]]


def of_program(program: Any) -> Fed:
    """Return a function that feeds calls of these lengths: positions, their rows of logits, and at last the state."""

    def fed(ids: Sequence[int], split: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32], State | None]]:
        handle, at = program.new_state(), 0
        program.pad_token = PAD
        for length in split:
            row = program.prefill(handle, ids[at : at + length])
            at += length
            yield at - 1, row, program.save(handle) if at == len(ids) else None
        program.release(handle)

    return fed


def of_graphs(source: Path) -> Fed:
    """Do the same with the graphs for the NPU."""
    opened_source = Source.open(source)
    family = family_of(opened_source.config)
    config = family.parse(opened_source.config)
    bound = {name: binding(opened_source) for name, binding in family.bindings(config).items()}
    graphs = StaticGraphs(author(family, config, bound, CONTEXT), BUCKETS)

    def fed(ids: Sequence[int], split: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32], State | None]]:
        host = Host(cast(FlatModule, graphs))
        for length in split:
            at = host.position
            row = host.feed(ids[at : at + length], next(b for b in BUCKETS if b >= length), PAD)
            yield at + length - 1, row, host.state() if host.position == len(ids) else None

    return fed


def off(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


class Parity:
    """The errors of a tiny model on each runtime."""

    def __init__(self, variant: str, artifacts: TinyArtifacts) -> None:
        self.variant, self._artifacts = variant, artifacts
        self.source = artifacts.source(next(name for name, made in BUILT.items() if made.variant == variant))
        official = tiny.official(variant, Source.open(self.source).config["vocab_size"])
        self.ids = np.random.default_rng(11).integers(0, official.config.vocab_size, sum(SPLITS[0])).tolist()
        self.logits, cache = oracle.continued(official, self.ids)
        self.state = oracle.state(cache, len(self.ids))

    def errors(self, fed: Fed) -> str:
        """Return the largest errors of logits and of states."""
        logits = states = 0.0
        for split in SPLITS:
            for position, row, state in fed(self.ids, split):
                logits = max(logits, off(row, self.logits[position]))
                if state is not None:
                    assert state.tensors.keys() == self.state.tensors.keys()
                    states = max(states, *(off(state.tensors[n], array) for n, array in self.state.tensors.items()))
        return f"{logits:.0e}, {states:.0e}"

    def on(self, runtime: str) -> tuple[str, str]:
        """Return the errors, or "" and the words of the refusal."""
        name = f"{self.variant}-f32" if runtime == "litert" else f"{runtime}-{self.variant}-f32"
        if runtime == "npu" and not tiny.has_experts(self.variant):
            return self.errors(of_graphs(self.source)), ""
        if name not in BUILT:
            return "", self._refusal(runtime)
        artifact = Artifact.open(self._artifacts[name])
        device = next(d.name for d in devices() if not d.why_not) if runtime == "wgpu" else "cpu"
        program = runtime_of(artifact.manifest.runtime).load(artifact, device=device)
        try:
            return self.errors(of_program(program)), ""
        finally:
            program.close()

    def _refusal(self, runtime: str) -> str:
        with tempfile.TemporaryDirectory() as models:
            command = [sys.executable, "-m", "ssmd", "build", str(self.source), "--runtime", runtime]
            done = subprocess.run([*command, "--models-dir", models], capture_output=True, text=True, check=False)
        said = " ".join(done.stderr.split("error: ")[-1].split())
        if not done.returncode or "error: " not in done.stderr:
            raise SystemExit(f"{self.variant} is not refused for {runtime}, nor among the tests' artifacts")
        return re.sub(re.escape(str(self.source)), "CHECKPOINT", said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help="of tests/tiny.py; default: one of each family")
    asked = parser.parse_args()
    artifacts, refusals = opened(), list[str]()
    print(f"# Tiny models against transformers, float32; 150 tokens in {len(SPLITS)} ways, junk in the pads.")
    print(f"# {conditions()}. Core ML and the NPU cannot execute here.")
    print(f"| family | config | {' | '.join(HEAD)} |", f"| --- | --- |{' --- |' * len(HEAD)}", sep="\n")
    for variant in asked.variants or ROWS:
        cells, parity = [], Parity(variant, artifacts)
        for runtime in RUNTIMES:
            errors, said = parity.on(runtime)
            if said and said not in refusals:
                refusals.append(said)
            cells.append(errors or f"refused ({refusals.index(said) + 1})")
        print(f"| {tiny.VARIANTS[variant][0]} | {variant} | {' | '.join(cells)} |", flush=True)
    for number, said in enumerate(refusals, 1):
        print(f"\n{number}. {said}")


if __name__ == "__main__":
    main()
