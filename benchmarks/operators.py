"""Where a step of an artifact for LiteRT goes, by operator, as LiteRT's own profiler tells.

    benchmarks/operators.py ARTIFACT… [--depth 64] [--tokens 1] [--streams 1] [--threads 1,2] [--nodes 0]

ARTIFACT is a folder. The step is one of so many tokens (1: decode) after `depth` others, and of so many streams. A
node's time is the least of all repetitions, in whole us: most nodes take less than one. A row has their sum for an
operator; what the sums leave of the step without a profiler are the nodes below a us. `--nodes N` prints the slowest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from daemon_process import conditions

from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.hoststate.signatures import LANES, lanes_name
from ssmd.runtime.hoststate.threads import default_threads
from ssmd.runtime.protocol import get_runtime
from ssmd_litert.profiler import Node, ProfiledGraph
from ssmd_litert.runtime import SUFFIX

REPEATS = 40
Step = Callable[[], object]


def step_of(program: FlatProgram, depth: int, tokens: int, streams: int) -> Step:
    """A step of streams that stand at `depth`, which leaves them there."""
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
    """ms of a step, median."""
    step, took = step_of(program, depth, tokens, streams), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


class Profiled:
    """The graphs of an artifact's file, each opened once, and the program over them."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        (name,) = (n for n in artifact.manifest.files if n.endswith(SUFFIX))
        self._file, self._threads = artifact.file(name), threads
        self._graphs = {1: self._opened(lambda signature: signature not in map(lanes_name, LANES))}
        sizes = [n for n in LANES if lanes_name(n) in self._graphs[1].names]
        self.program = FlatProgram(self._graphs[1], artifact.manifest, "profiled", threads, self._lanes, sizes)

    def _opened(self, wanted: Callable[[str], bool]) -> ProfiledGraph:
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


def profile(graphs: Profiled, depth: int, tokens: int, streams: int) -> list[Node]:
    """The nodes of a step with the least us that each took."""
    step = step_of(graphs.program, depth, tokens, streams)
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
        for threads in counts or sorted({1, default_threads()}):
            with closing(get_runtime("litert").load(artifact, threads=threads)) as bare:
                assert isinstance(bare, FlatProgram)
                ms = measure(bare, depth, tokens, streams)
            graphs = Profiled(artifact, threads)
            with closing(graphs.program):
                nodes = profile(graphs, depth, tokens, streams)
            print(
                f"\n{artifact.manifest.name} {artifact.manifest.build[:12]}: a step of {tokens} tokens after {depth}, "
                f"{streams} streams, {threads} threads: {ms:.2f} ms, {len(nodes)} nodes\n"
            )
            show(nodes, ms, slowest)
    print(f"\n{conditions()}")


def show(nodes: Sequence[Node], ms: float, slowest: int) -> None:
    """Print the table of operators, and of the slowest nodes."""
    count, sums = Counter(name for name, _ in nodes), Counter[str]()
    for name, us in nodes:
        sums[name] += us
    print("| operator | nodes | ms | of the step |\n| --- | --- | --- | --- |")
    for name, us in sums.most_common():
        if us:
            print(f"| {name} | {count[name]} | {us / 1e3:.2f} | {us / 10 / ms:.0f} % |")
    none = sum(n for name, n in count.items() if not sums[name])
    rest = ms - sum(sums.values()) / 1e3
    print(f"| the others, and what is below a us | {none} | {rest:.2f} | {100 * rest / ms:.0f} % |", flush=True)
    for place, (name, us) in sorted(enumerate(nodes), key=lambda node: -node[1][1])[:slowest]:
        print(f"node {place}, {name}: {us} us")


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
