"""Artifacts of one model in turn in one process: a prompt of N tokens from nothing, and decode steps after it.

    benchmarks/decode.py ARTIFACT...     folders; the first is what others are compared with

Medians of 5 rounds. A ratio is of the first artifact's time: 2 is twice as fast.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from daemon_process import conditions

from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program, get_runtime

DEPTHS = (64, 512, 1024, 1500, 2000)
ROUNDS = 5
STEPS = 24


def measure(program: Program, depth: int) -> tuple[float, float]:
    """Milliseconds of a prompt of `depth` tokens, and of a decode step after it."""
    handle, ids = program.new_state(), [(7 * i) % program.vocabulary for i in range(depth + STEPS)]
    largest = program.buckets[-1]
    begun = time.perf_counter()
    for start in range(0, depth, largest):
        program.prefill(handle, ids[start : min(depth, start + largest)])
    prompt = time.perf_counter() - begun
    steps = []
    for token in ids[depth:]:
        begun = time.perf_counter()
        program.decode([handle], [token])
        steps.append(time.perf_counter() - begun)
    program.release(handle)
    return prompt * 1e3, statistics.median(steps) * 1e3


def main(folders: Sequence[str]) -> None:
    artifacts = [Artifact.open(Path(folder)) for folder in folders]
    programs = [get_runtime(a.manifest.runtime).load(a) for a in artifacts]
    print(conditions())
    for artifact in artifacts:
        m = artifact.manifest
        print(f"{m.name} {m.build[:12]}: {m.runtime}, tiers {m.tiers}")
    others = range(1, len(programs))
    heads = [
        "prompt, ms",
        *(f"of {i + 1}" for i in others),
        "ratio",
        "step, ms",
        *(f"of {i + 1}" for i in others),
        "ratio",
    ]
    print(f"\n| after tokens | {' | '.join(heads)} |\n|{' --- |' * (len(heads) + 1)}")
    for depth in DEPTHS:
        if any(p.context is not None and depth + STEPS > p.context for p in programs):
            continue
        rounds = [[measure(program, depth) for program in programs] for _ in range(ROUNDS)]
        cells: list[str] = []
        for kind in range(2):
            medians = [statistics.median(one[i][kind] for one in rounds) for i in range(len(programs))]
            cells += [f"{m:.{kind}f}" for m in medians] + [" / ".join(f"{medians[0] / m:.2f}" for m in medians[1:])]
        print(f"| {depth:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
