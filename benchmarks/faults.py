"""The fault campaign: kills of the daemon and of commands, altered session files, damaged databases, all counted.

    benchmarks/faults.py kills|beginnings|background|commands|remote|files|databases [--count N] [--seed S]
                         [--state DIR] [--jobs N] [--only CASE[:COUNT]]

What a seed injects is always the same, but for the moments of kills. The work goes on in units, each a process of its
own, whose outcome stands in DIR (default: .cache/faults): the same command goes on where it was cut off. With --only
some cases run again, alone, and print what they found; the data of what failed stay under DIR. Cases of `kills` are
in episodes of 25, which begin at multiples of that; those of `beginnings` and `background` in episodes of 10. Each 20
cases of `commands` are kills of one command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
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
KILLS, FEW_KILLS = 25, 10  # of an episode
MODELS = ("mamba", "granite", "llama", "bamba-last")  # a pure SSM, hybrids, a transformer; tiny, of tests/tiny.py
UNIT_TIMEOUT_S = 1200


Outcome = tuple[Counter[str], list[str]]


@dataclass(frozen=True)
class Part:
    """size: cases of a unit; count: of a run at length; run: of (artifact, first case, cases, seed, folder)."""

    size: int
    count: int
    run: Callable[[Path, int, int, str, Path], Outcome]
    models: tuple[str, ...] = MODELS


def kills(path: Path, first: int, count: int, seed: str, folder: Path) -> Outcome:
    from kills import Episode

    episode = Episode(path, Artifact.open(path).manifest.name, f"{seed}:{first // KILLS}", count, folder)
    episode.run()
    return episode.counts, episode.failures


def background(path: Path, first: int, count: int, seed: str, folder: Path) -> Outcome:
    from background import Episode

    episode = Episode(path, Artifact.open(path).manifest.name, f"{seed}:{first}", count, folder)
    episode.run()
    return episode.counts, episode.failures


def beginnings(path: Path, first: int, count: int, seed: str, folder: Path) -> Outcome:
    from beginnings import SMALL, Beginnings

    number = first // FEW_KILLS
    quota = ("--quota", SMALL) if random.Random(f"{seed}:{number} quota").random() < 0.5 else ()
    episode = Beginnings(path, Artifact.open(path).manifest.name, f"{seed}:{number}", count, folder, quota)
    episode.run()
    return episode.counts, episode.failures


def files(path: Path, first: int, count: int, seed: str, folder: Path) -> Outcome:
    from files import run

    return run(path, first, count, seed, folder)


def databases(path: Path, first: int, count: int, seed: str, folder: Path) -> Outcome:
    from databases import run

    return run(path, first, count, seed, folder)


def commands(path: Path, first: int, count: int, seed: str, folder: Path) -> Outcome:
    from interrupted import run

    return run(path, first, count, seed, folder)


def remote(path: Path, first: int, count: int, seed: str, folder: Path) -> Outcome:
    from roamers import Episode

    episode = Episode(path, f"{seed}:{first}", count, folder)
    episode.run()
    return episode.counts, episode.failures


PARTS = {
    "kills": Part(KILLS, 1_000, kills),
    "beginnings": Part(FEW_KILLS, 90, beginnings, ("granite", "mamba2-groups", "llama")),
    "background": Part(10, 100, background),
    "commands": Part(20, 240, commands),
    "remote": Part(25, 125, remote, ("mamba", "llama")),
    "files": Part(1_000, 20_000, files),
    "databases": Part(50, 2_000, databases),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "faults")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only")
    asked = parser.parse_args()
    part = PARTS[asked.part]
    folder: Path = asked.state.resolve() / f"{asked.part}-{asked.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    if asked.only is not None:
        first, _, cases = asked.only.partition(":")
        counts, failures = one(part, int(first), int(cases or 1), asked.seed, folder / first)
        print(json.dumps({"counts": counts, "failures": failures}, indent=1))
        sys.exit(bool(failures))
    count = asked.count or part.count
    file = folder / "done.json"
    done: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    units = [(unit, min(part.size, count - unit * part.size)) for unit in range(-(-count // part.size))]
    with ThreadPoolExecutor(asked.jobs) as pool:
        work = {
            pool.submit(apart, asked.part, unit * part.size, cases, asked.seed, asked.state): unit
            for unit, cases in units
            if str(unit) not in done
        }
        for ended in as_completed(work):
            done[str(work[ended])] = {**ended.result(), "commit": commit()}
            written = file.with_suffix(".part")
            written.write_text(json.dumps(done, indent=1))
            written.replace(file)
            print(f"{len(done)} of {len(units)}", file=sys.stderr, flush=True)
    tell(asked.part, asked.seed, [done[str(unit)] for unit, _ in units])


def one(part: Part, first: int, count: int, seed: str, folder: Path) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    artifact = opened()[f"{part.models[first // part.size % len(part.models)]}-f32"]
    counts, failures = part.run(artifact, first, count, seed, folder)
    if not failures:
        shutil.rmtree(folder)
    return counts, failures


def apart(part: str, first: int, count: int, seed: str, state: Path) -> dict[str, Any]:
    """One unit in a process of its own: one that crashes or hangs is a failure too."""
    began = time.monotonic()
    command = [sys.executable, __file__, part, "--seed", seed, "--state", str(state), "--only", f"{first}:{count}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        said, complaints = process.communicate(timeout=UNIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, complaints = process.communicate()
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        ending = f"the process ended with {process.returncode}: {complaints.decode()[-3000:]}"
        found = {"counts": {}, "failures": [f"cases {first} to {first + count - 1}: {ending}"]}
    return {**found, "seconds": round(time.monotonic() - began)}


def tell(part: str, seed: str, done: list[dict[str, Any]]) -> None:
    counts = Counter[str]()
    for found in done:
        counts.update(found["counts"])
    failures = [failure for found in done for failure in found["failures"]]
    print(f"{part}, seed {seed}, at {', '.join(sorted({found['commit'] for found in done}))}; {conditions()}\n")
    if any("/" in what for what in counts):
        _by_kind(counts)
    else:
        print("| | |\n| --- | --- |")
        for what, number in counts.items():
            print(f"| {what} | {number:,} |")
    print(f"\nfailures: {len(failures)}")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(bool(failures))


def _by_kind(counts: Counter[str]) -> None:
    """A row for each kind of fault, a column for each outcome."""
    rows = sorted({what.partition("/")[0] for what in counts})
    outcomes = {what.partition("/")[2] for what in counts}
    columns = [
        "injected",
        *sorted(outcomes - {"injected", "failures"}),
        *(["failures"] if "failures" in outcomes else []),
    ]
    print(f"| | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for row in rows:
        print(f"| {row} |", *(f"{counts[row + '/' + column]:,} |" for column in columns))
    print("| **all** |", *(f"**{sum(counts[row + '/' + column] for row in rows):,}** |" for column in columns))


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "ssmd") else "")


if __name__ == "__main__":
    main()
