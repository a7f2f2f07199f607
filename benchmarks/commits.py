"""The wait of a stored answer for its commit, beside a plain write and fsync of the same bytes, in turn.

    benchmarks/commits.py MODEL [--turns 40] [--tokens 64]

Each turn is a conversation of its own: a prompt of some 90 tokens, and --tokens more. The wait goes from the end of the
answer until it may be sent to the client. The plain write makes a file with the bytes of the states that the commit had
to write, on the same disk, and ends with fsync. States that were written before the end are not among them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daemon_process import conditions
from long_session import Clock, ask, started
from resume import story

from ssmd.config import Settings
from ssmd.engine.persist.writer import Writer
from ssmd.installed import resolve

WARM = 4  # turns that are not counted


class Waits:
    """The wait for each commit, ms, and the bytes of states that it wrote."""

    def __init__(self, writer: Writer) -> None:
        self.ms: list[float] = []
        self.nbytes: list[int] = []
        commit = writer.commit

        def timed(session: Any, turns: Any, checkpoints: Sequence[Any], then: Any, *rest: Any) -> None:
            begun = time.perf_counter()

            def told(stored: bool, state_stored: bool) -> None:
                self.ms.append((time.perf_counter() - begun) * 1e3)
                if not (stored and state_stored):
                    raise RuntimeError("a turn was not stored with its state")
                self.nbytes.append(sum(p.nbytes for p in checkpoints if not p.ahead))
                then(stored, state_stored)

            commit(session, turns, checkpoints, told, *rest)

        writer.commit = timed  # type: ignore[method-assign, assignment]


def plain_ms(folder: Path, data: bytes) -> float:
    """Write a new file, ended by fsync."""
    begun = time.perf_counter()
    with open(folder / "plain", "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    took = (time.perf_counter() - begun) * 1e3
    (folder / "plain").unlink()
    return took


def p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    settings = Settings()
    model = resolve(asked.model, settings.models_dir, settings.runtime, settings.device)
    print(f"# commits: {model.parent.name}; {conditions()}; {asked.turns} turns\n")
    with tempfile.TemporaryDirectory() as parent:
        data = Path(parent) / "data"
        data.mkdir(mode=0o700)
        plain: list[float] = []
        with started(model, data) as (engine, writer):
            waits = Waits(writer)
            for turn in range(asked.turns + WARM):
                said = [{"role": "user", "content": story(60, f"Number {turn} of {time.time()}.")}]
                ask(engine, Clock(), said, asked.tokens)
                time.sleep(0.2)
                plain.append(plain_ms(Path(parent), os.urandom(waits.nbytes[-1])))
    ms, plain = waits.ms[WARM:], plain[WARM:]
    size = statistics.median(waits.nbytes[WARM:]) / 1e6
    print("| | MB | median, ms | p95, ms |\n| --- | --- | --- | --- |")
    print(f"| commit | {size:.1f} | {statistics.median(ms):.1f} | {p95(ms):.1f} |")
    print(f"| plain | {size:.1f} | {statistics.median(plain):.1f} | {p95(plain):.1f} |")
    print(f"| ratio | | {statistics.median(ms) / statistics.median(plain):.2f} | {p95(ms) / p95(plain):.2f} |")


if __name__ == "__main__":
    main()
