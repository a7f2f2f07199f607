"""The fault campaign: faults of one part of the world after the other; what became of each, counted.

    benchmarks/faults.py kills [--count N] [--seed S] [--state DIR] [--jobs N] [--only UNIT]

What a seed injects is always the same, but for the moments of kills. The work goes on in units, each a process of its
own, whose outcome stands in DIR (default: .cache/faults): the same command goes on where it was cut off. With --only
one unit runs again, alone, and prints what it found; the data of one that failed stay under DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conftest import opened
from daemon_process import conditions

from ssmd.model.artifact import Artifact

ROOT = Path(__file__).parents[1]
MODELS = ("mamba", "granite", "llama", "bamba-last")  # a pure SSM, hybrids, a transformer; tiny, of tests/tiny.py
UNIT_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Part:
    """size: faults of a unit; count: of a run at length. run: (unit, seed, faults, folder) -> counts and failures."""

    size: int
    count: int
    run: Callable[[int, str, int, Path], tuple[Counter[str], list[str]]]


def kills(unit: int, seed: str, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    from kills import Episode

    artifact = opened()[f"{MODELS[unit % len(MODELS)]}-f32"]
    episode = Episode(artifact, Artifact.open(artifact).manifest.name, f"{seed}:{unit}", count, folder)
    episode.run()
    return episode.counts, episode.failures


PARTS = {"kills": Part(25, 1000, kills)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "faults")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    part = PARTS[asked.part]
    count = asked.count or part.count
    folder: Path = asked.state.resolve() / f"{asked.part}-{asked.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    if asked.only is not None:
        counts, failures = one(part, asked.only, asked.seed, count, folder / str(asked.only))
        print(json.dumps({"counts": counts, "failures": failures}, indent=1))
        sys.exit(bool(failures))
    file = folder / "done.json"
    done: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    units = range(-(-count // part.size))
    with ThreadPoolExecutor(asked.jobs) as pool:
        work = {
            pool.submit(apart, asked.part, u, asked.seed, count, asked.state): u for u in units if str(u) not in done
        }
        for ended in as_completed(work):
            done[str(work[ended])] = {**ended.result(), "commit": commit()}
            part_file = file.with_suffix(".part")
            part_file.write_text(json.dumps(done, indent=1))
            part_file.replace(file)
            print(f"{len(done)} of {len(units)}", end="\r", file=sys.stderr, flush=True)
    tell(asked.part, asked.seed, [done[str(u)] for u in units])


def one(part: Part, unit: int, seed: str, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    counts, failures = part.run(unit, seed, min(part.size, count - unit * part.size), folder)
    if not failures:
        shutil.rmtree(folder)
    return counts, failures


def apart(part: str, unit: int, seed: str, count: int, state: Path) -> dict[str, Any]:
    """One unit in a process of its own: one that crashes or hangs is a failure too."""
    began = time.monotonic()
    command = [sys.executable, __file__, part, "--seed", seed, "--count", str(count), "--state", str(state)]
    process = subprocess.Popen(
        [*command, "--only", str(unit)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        said, complaints = process.communicate(timeout=UNIT_TIMEOUT_S)
        found: dict[str, Any] = json.loads(said)
    except (subprocess.TimeoutExpired, ValueError):
        with_all = os.getpgid(process.pid) if process.poll() is None else 0
        if with_all:
            os.killpg(with_all, 9)
        complaints = complaints if process.returncode is not None else process.communicate()[1]
        ending = f"ended with {process.returncode}: {complaints.decode()[-2000:]}"
        found = {"counts": {}, "failures": [f"unit {unit} of seed {seed} {ending}"]}
    return {**found, "seconds": round(time.monotonic() - began)}


def tell(part: str, seed: str, done: list[dict[str, Any]]) -> None:
    counts = Counter[str]()
    for found in done:
        counts.update(found["counts"])
    failures = [f"unit {u}: {failure}" for u, found in enumerate(done) for failure in found["failures"]]
    commits = sorted({found["commit"] for found in done})
    print(f"{part}, seed {seed}, at {', '.join(commits)}; {conditions()}\n\n| | |\n| --- | --- |")
    for what, number in counts.items():
        print(f"| {what} | {number:,} |")
    print(f"| **failures** | **{len(failures)}** |")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(bool(failures))


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "ssmd") else "")


if __name__ == "__main__":
    main()
