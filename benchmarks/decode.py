"""Artifacts of one model, and libllama with the same, in turn in one process: prompts from nothing, and decode steps of
1, 4 and 8 streams after them.

    benchmarks/decode.py ARTIFACT… [--llama-library LIBRARY --gguf FILE]     folders; others are compared with the first

First with 1 thread, by the least processor time of the process, which a busy machine changes little; then with as many
as suit it, by the median of 5 rounds' wall time, for which nothing else may run: libllama's threads spin at barriers.
A ratio is of another's time to the first's: above 1 the first is faster. Streams go on from one prompt, each with
other tokens. LIBRARY is libllama.so of the version that llama_library.py names; that file also makes FILE.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from daemon_process import conditions
from llama_library import Library, Llama

from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.bench import weights_bytes
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.protocol import get_runtime
from ssmd.runtime.weightread import WeightRead

DEPTHS = (64, 512, 1500)
STREAMS = (1, 4, 8)
ROUNDS = 5
STEPS = 16
WARM = 2  # steps before those, in which copies are made
PROMPT = 0  # among numbers of streams: the prompt before them


class Side(Protocol):
    """Streams of one model after one prompt."""

    name: str
    vocabulary: int
    context: int | None

    def read(self, ids: Sequence[int]) -> None:
        """Read a prompt from nothing."""

    def split(self, streams: int) -> None:
        """Begin so many streams after the prompt that was read."""

    def step(self, tokens: Sequence[int]) -> None:
        """Feed each stream its token."""

    def close(self) -> None:
        """Let the model go."""


class Ours:
    """An artifact's program."""

    def __init__(self, artifact: Artifact, name: str, threads: int) -> None:
        self.name = name
        self._program = get_runtime(artifact.manifest.runtime).load(artifact, threads=threads)
        self.vocabulary, self.context = self._program.vocabulary, self._program.context
        self._prompt = self._program.new_state()
        self._streams: list[Any] = []

    def read(self, ids: Sequence[int]) -> None:
        self.split(0)
        self._program.release(self._prompt)
        self._prompt, at = self._program.new_state(), 0
        for n in buckets.pieces(0, len(ids), self._program.buckets):
            if n == 1:
                self.logits = self._program.decode([self._prompt], [ids[at]])
            else:
                self.logits = self._program.prefill(self._prompt, ids[at : at + n])
            at += n

    def split(self, streams: int) -> None:
        for handle in self._streams:
            self._program.release(handle)
        if isinstance(self._program, FlatProgram):
            self._program.batches.open(streams)  # now, not beside the steps that are measured
        self._streams = [self._program.clone(self._prompt) for _ in range(streams)]

    def step(self, tokens: Sequence[int]) -> None:
        self.logits = self._program.decode(self._streams, tokens)

    def close(self) -> None:
        self._program.close()


@dataclass
class Took:
    """Times of one thing, ms: by round, of each step of it."""

    wall: list[list[float]] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def round(self, steps: Sequence[Callable[[], None]]) -> None:
        """Take the steps, one after another."""
        self.wall.append([])
        for step in steps:
            began, processor = time.perf_counter(), time.process_time()
            step()
            self.processor.append((time.process_time() - processor) * 1e3)
            self.wall[-1].append((time.perf_counter() - began) * 1e3)

    def ms(self, threads: int) -> float:
        """Return the tables' number: the least processor time or the median wall time, by the number of threads."""
        return min(self.processor) if threads == 1 else statistics.median(map(statistics.median, self.wall))


def measure(side: Side, depth: int, streams: Sequence[int], took: dict[int, Took]) -> None:
    """A round: a prompt of `depth` tokens, and steps of so many streams after it."""

    def token(stream: int, at: int) -> int:
        return (7 * at + 31 * stream) % side.vocabulary

    def step(streams: int, at: int) -> Callable[[], None]:
        return partial(side.step, [token(stream, at) for stream in range(streams)])

    took[PROMPT].round([partial(side.read, [token(0, at) for at in range(depth)])])
    for count in streams:
        side.split(count)
        for at in range(depth, depth + WARM):
            step(count, at)()
        took[count].round([step(count, depth + WARM + i) for i in range(STEPS)])
    side.split(0)


def compare(sides: Sequence[Side], threads: int, depths: Sequence[int], streams: Sequence[int], rounds: int) -> None:
    """Print the tables of prompts and of steps with so many threads."""
    names = [side.name for side in sides]
    ratio = ["ratio"] * (len(sides) > 1)
    unit = "least processor time, 1 thread" if threads == 1 else f"wall time, {threads} threads"
    each = [f"{n}: one stream = 1" for n in names]
    prompts = [("tokens", *names, *ratio)]
    steps = [("after tokens", "streams", *names, *ratio, *each)]
    for depth in depths:
        if any(side.context is not None and depth + WARM + STEPS > side.context for side in sides):
            continue
        took = [defaultdict[int, Took](Took) for _ in sides]
        for _ in range(rounds):
            for side, of in zip(sides, took, strict=True):
                measure(side, depth, streams, of)
        for count in (PROMPT, *streams):
            ms = [of[count].ms(threads) for of in took]
            times = [f"{m:.{1 if count else 0}f}" for m in ms]
            ratios = [" / ".join(f"{m / ms[0]:.2f}" for m in ms[1:])] * (len(sides) > 1)
            if count == PROMPT:
                prompts.append((f"{depth:,}", *times, *ratios))
                continue
            gain = [
                f"{of[streams[0]].ms(threads) / streams[0] * count / m:.2f}" for of, m in zip(took, ms, strict=True)
            ]
            steps.append((f"{depth:,}", str(count), *times, *ratios, *gain))
    for what, (head, *rows) in (("a prompt", prompts), ("a step of all streams", steps)):
        print(f"\n{what}, ms: {unit}\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        for row in rows:
            print(f"| {' | '.join(row)} |", flush=True)


def main(
    folders: Sequence[Path],
    library: Path | None = None,
    gguf: Path | None = None,
    depths: Sequence[int] = DEPTHS,
    streams: Sequence[int] = STREAMS,
    rounds: int = ROUNDS,
    counts: Sequence[int] = (),
) -> None:
    artifacts = [Artifact.open(folder) for folder in folders]
    names = ["ssmd"] if len(artifacts) == 1 else [str(i) for i in range(1, len(artifacts) + 1)]
    print(conditions())
    for name, artifact in zip(names, artifacts, strict=True):
        m = artifact.manifest
        print(f"{name}: {m.name} {m.build[:12]}, {m.runtime} {m.quantization}, tiers {m.tiers}")
    makers: list[Callable[[int], Side]] = [partial(Ours, a, n) for a, n in zip(artifacts, names, strict=True)]
    if library is not None and gguf is not None:
        functions, context = Library(library), max(depths) + WARM + STEPS
        makers.append(lambda threads: Llama(functions, gguf, context=context, streams=max(streams), threads=threads))
        print(f"{Llama.name}: {gguf.name}, {gguf.stat().st_size / 1e6:.0f} MB, libllama {functions.version}")
    for threads in counts or sorted({1, default_threads()}):
        with ExitStack() as opened:
            sides = [opened.enter_context(closing(make(threads))) for make in makers]
            if len({side.vocabulary for side in sides}) > 1:
                raise SystemExit(f"these are other models: vocabularies of {[s.vocabulary for s in sides]} tokens")
            compare(sides, threads, depths, streams, rounds)
        nbytes = weights_bytes(artifacts[0].manifest)
        with WeightRead(nbytes, threads) as read:
            ms = statistics.median([read.ms() for _ in range(1 + rounds)][1:])
        print(f"\none read of {nbytes / 1e6:.0f} MB, as its weights: {ms:.1f} ms with {threads} threads")
    print(conditions())


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--llama-library", type=Path, help="libllama.so; needs --gguf")
    parser.add_argument("--gguf", type=Path, help="the same model for it")
    parser.add_argument("--depths", type=numbers, default=DEPTHS, help="tokens before the steps: 64,512,1500")
    parser.add_argument("--streams", type=numbers, default=STREAMS, help="1,4,8")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=numbers, default=(), help="1,2; 1 alone on a busy machine")
    given = parser.parse_args()
    if (given.llama_library is None) != (given.gguf is None):
        parser.error("--llama-library and --gguf go together")
    main(given.artifacts, given.llama_library, given.gguf, given.depths, given.streams, given.rounds, given.threads)
