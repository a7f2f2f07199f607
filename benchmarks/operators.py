"""Where a step of an artifact for LiteRT or OpenVINO goes, by operator, as the runtime's own profiler tells.

    benchmarks/operators.py ARTIFACT… [--depth 64] [--tokens 1] [--streams 1] [--threads 1,2] [--nodes 0]

ARTIFACT is a folder. The step is one of so many tokens (1: decode) after `depth` others, and of so many streams: with
OpenVINO of one. LiteRT tells a node's time in whole us, and the least of all repetitions counts; OpenVINO its mean, and
its share of the steps counts. Most nodes take less than a us. A row has their sum for an operator; the last has what
the others leave of the step without a profiler. `--nodes N` prints the slowest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from daemon_process import conditions

from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.hoststate.signatures import LANES, lanes_name
from ssmd.runtime.protocol import get_runtime

if TYPE_CHECKING:
    from ssmd_litert.profiler import ProfiledGraph

REPEATS = 40
LEAST = 10  # us of all nodes of an operator, for a row of its own
Step = Callable[[], object]
Node = tuple[str, float]  # its operator, and the us that it took


def step_of(program: FlatProgram, depth: int, tokens: int, streams: int) -> Step:
    """Return a step of streams that stand at `depth`, which leaves them there."""
    handle, at = program.new_state(), 0
    for n in buckets.plan(depth, program.buckets):
        program.prefill(handle, [1 + i % 100 for i in range(at, at + n)])
        at += n
    program.batches.open(streams)
    handles = [program.clone(handle) for _ in range(streams)]
    ids = [7] * (streams if tokens == 1 else tokens)

    def step() -> None:
        if tokens == 1:
            program.decode(handles, ids)
        else:
            program.prefill(handles[0], ids)
        for h in handles:  # what it read is overwritten by the next: a time does not go by numbers
            h.position = depth

    return step


def measure(program: FlatProgram, depth: int, tokens: int, streams: int) -> float:
    """ms of a step: with one thread the least processor time of the process, with more the median wall time."""
    step, took, processor = step_of(program, depth, tokens, streams), [], []
    for _ in range(REPEATS):
        began, computed = time.perf_counter(), time.process_time()
        step()
        processor.append((time.process_time() - computed) * 1e3)
        took.append((time.perf_counter() - began) * 1e3)
    return min(processor) if program.threads == 1 else statistics.median(took)


class Profiled:
    """The graphs of an artifact's file for LiteRT, each opened once, and the program over them."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        from ssmd_litert.runtime import SUFFIX

        (name,) = (n for n in artifact.manifest.files if n.endswith(SUFFIX))
        self._file, self._threads = artifact.file(name), threads
        self._graphs = {1: self._opened(lambda signature: signature not in map(lanes_name, LANES))}
        sizes = [n for n in LANES if lanes_name(n) in self._graphs[1].names]
        self.program = FlatProgram(self._graphs[1], artifact.manifest, "profiled", threads, self._lanes, sizes)

    def _opened(self, wanted: Callable[[str], bool]) -> ProfiledGraph:
        from ssmd_litert.profiler import ProfiledGraph

        return ProfiledGraph(self._file, threads=self._threads, weight_cache=None, wanted=wanted)

    def _lanes(self, lanes: int) -> ProfiledGraph:
        self._graphs[lanes] = self._opened(lambda signature: signature == lanes_name(lanes))
        return self._graphs[lanes]

    def nodes(self, step: Step) -> list[Node]:
        """Run a step. Returns the nodes of all its calls, graph by graph."""
        chained: Step = step
        found: list[Node] = []
        for graph in self._graphs.values():
            chained = partial(_noted, graph, chained, found)
        chained()
        return found


def _noted(graph: ProfiledGraph, step: Step, found: list[Node]) -> None:
    found += graph.nodes(step)


def profile(artifact: Artifact, threads: int, depth: int, tokens: int, streams: int, ms: float) -> list[Node]:
    """The nodes of a step that takes so many ms, with the us of each: LiteRT's least, OpenVINO's share of the ms."""
    if artifact.manifest.runtime == "openvino":
        from ssmd_openvino.profiler import profiled

        shares = profiled(artifact, threads)
        with closing(FlatProgram(shares, artifact.manifest, "profiled", threads)) as program:
            nodes = shares.nodes(step_of(program, depth, tokens, streams), REPEATS)
        return [(name, share * ms * 1e3) for name, share in nodes]
    graphs = Profiled(artifact, threads)
    with closing(graphs.program) as program:
        step = step_of(program, depth, tokens, streams)
        step()
        runs = [graphs.nodes(step) for _ in range(REPEATS)]
    names = [name for name, _ in runs[0]]
    if any([name for name, _ in run] != names for run in runs):
        raise RuntimeError("the profiler does not tell the same nodes each time")
    return list(zip(names, np.array([[us for _, us in run] for run in runs]).min(0).tolist(), strict=True))


def main(
    folders: Sequence[Path],
    depth: int = 64,
    tokens: int = 1,
    streams: int = 1,
    counts: Sequence[int] = (),
    slowest: int = 0,
) -> None:
    print(conditions())
    for folder in folders:
        artifact = Artifact.open(folder)
        if streams > 1 and artifact.manifest.runtime == "openvino":
            raise SystemExit(f"{folder}: what is told of OpenVINO's nodes is of one stream, not of {streams}")
        for threads in counts or sorted({1, default_threads()}):
            with closing(get_runtime(artifact.manifest.runtime).load(artifact, threads=threads)) as bare:
                assert isinstance(bare, FlatProgram)
                ms = measure(bare, depth, tokens, streams)
            nodes = profile(artifact, threads, depth, tokens, streams, ms)
            m, unit = artifact.manifest, "of processor time, 1 thread" if threads == 1 else f"{threads} threads"
            print(
                f"\n{m.name} {m.build[:12]}, {m.runtime}: a step of {tokens} tokens after {depth}, {streams} streams, "
                f"{ms:.2f} ms {unit}, {len(nodes)} nodes\n"
            )
            show(nodes, ms, slowest)
    print(f"\n{conditions()}")


def show(nodes: Sequence[Node], ms: float, slowest: int) -> None:
    """Print the table of operators, and of the slowest nodes."""
    count, sums = Counter(name for name, _ in nodes), defaultdict[str, float](float)
    for name, us in nodes:
        sums[name] += us
    print("| operator | nodes | ms | of the step |\n| --- | --- | --- | --- |")
    for name, us in sorted(sums.items(), key=lambda row: -row[1]):
        if us >= LEAST:
            print(f"| {name} | {count[name]} | {us / 1e3:.2f} | {us / 10 / ms:.0f} % |")
    none = sum(n for name, n in count.items() if sums[name] < LEAST)
    rest = ms - sum(us for us in sums.values() if us >= LEAST) / 1e3
    print(f"| the others, and what is not told | {none} | {rest:.2f} | {100 * rest / ms:.0f} % |", flush=True)
    for place, (name, us) in sorted(enumerate(nodes), key=lambda node: -node[1][1])[:slowest]:
        print(f"node {place}, {name}: {us:.0f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=())
    parser.add_argument("--nodes", type=int, default=0)
    given = parser.parse_args()
    main(given.artifacts, given.depth, given.tokens, given.streams, given.threads, given.nodes)
