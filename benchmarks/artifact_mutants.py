"""Loads 300 malformed artifacts a format as a daemon would, and prints where each ended (tests/mutants.py, trials.py).

    python benchmarks/artifact_mutants.py [--mutants 300] [--first 0] [--only litert openvino wgpu] [--all]

LiteRT's and OpenVINO's are loaded once, as in each of the five trials of a first load, and judged by golden values.
wgpu's are checked up to where a GPU is asked for something. `--all` prints a line for each mutant.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conftest import opened
from daemon_process import conditions
from trials import BUG, CRASH, LATE, LOADED, MANIFEST_CHECK, TRIAL, Outcome, outcomes

MODELS = {"litert": "llama-f32", "openvino": "openvino-llama-f32", "wgpu": "wgpu-llama-int8"}
ENDS = (MANIFEST_CHECK, TRIAL, CRASH, LATE, LOADED, BUG)


def row(format_: str, done: list[Outcome]) -> str:
    """Return the row of the table for one format."""
    ends = Counter(one.end for one in done)
    most = max(one.seconds for one in done), max(one.mib for one in done)
    cells = [format_, str(len(done)), *(str(ends[end]) for end in ENDS), f"{most[0]:.1f} s", f"{most[1]} MiB"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--seconds", type=float, default=60, help="longest load")
    parser.add_argument("--all", action="store_true", help="a line for each mutant")
    given = parser.parse_args()
    artifacts, rows = opened(), []
    for format_ in given.only:
        done = []
        with tempfile.TemporaryDirectory() as folder:
            seeds = range(given.first, given.first + given.mutants)
            for one in outcomes(artifacts[MODELS[format_]], Path(folder), seeds, given.seconds):
                done.append(one)
                if given.all or one.end == BUG:
                    print(
                        f"{format_} {one.seed} {one.rule}: {one.end}, {one.seconds} s, {one.mib} MiB: {one.said}",
                        flush=True,
                    )
        rows.append(row(format_, done))
    print(f"\n{conditions()}\n")
    print(f"| format | mutants | {' | '.join(ENDS)} | longest | most memory |\n|{' --- |' * (4 + len(ENDS))}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
