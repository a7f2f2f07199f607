"""The artifacts of one model under their runtimes, in turn in one process: a prompt, decode steps, Python's share.

    benchmarks/runtimes.py MODEL [--tokens N]     a name whose artifacts are compared; the first is what others are
                                                  compared with. Memory is of a process for each, started for that.

Python's share is what `decode` takes beyond the runtime's own call; "-" where a runtime makes more than one. What
cannot run here is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from daemon_process import conditions
from prefill import ours

from ssmd.config import Settings
from ssmd.installed import installed, why_unusable
from ssmd.model.artifact import Artifact
from ssmd.runtime.bench import weights_bytes
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.protocol import Program, get_runtime

ROUNDS = 7
STEPS = 16
MEMORY = """
import json, sys
from pathlib import Path
from ssmd.model.artifact import Artifact
from ssmd.machine.memory import return_big_blocks, trim
from ssmd.runtime.protocol import Program, get_runtime
return_big_blocks()
artifact = Artifact.open(Path(sys.argv[1]))
program = get_runtime(artifact.manifest.runtime).load(artifact, device=sys.argv[2])
handle = program.new_state()
for _ in range(4):
    program.prefill(handle, list(range(1, 1 + min(64, program.buckets[-1]))))
for i in range(16):
    program.decode([handle], [i])
trim()
lines = Path("/proc/self/status").read_text().splitlines()
print(json.dumps({l.split(":")[0]: int(l.split()[1]) / 1e3 for l in lines if l.startswith("Rss")}))
"""


class Watched:
    """Counts the time that a program's calls of its graph take."""

    def __init__(self, program: Any) -> None:
        self.seconds = 0.0
        bind = program.graph.bind

        def watched(*args: Any) -> Any:
            call = bind(*args)
            watch = self

            class Call:
                def run(self) -> None:
                    begin = time.perf_counter()
                    call.run()
                    watch.seconds += time.perf_counter() - begin

            return Call()

        program.graph.bind = watched
        for slot in program._spare:
            slot.calls.clear()  # which were bound when it was loaded


def share_ms(program: Program, watch: Watched) -> float:
    """Return the ms of a decode step beyond the graph's call, the median of single steps."""
    handle, shares = program.new_state(), []
    program.prefill(handle, [1] * 16)
    for i in range(STEPS):
        watch.seconds = 0.0
        begin = time.perf_counter()
        program.decode([handle], [i])
        shares.append(time.perf_counter() - begin - watch.seconds)
    program.release(handle)
    return statistics.median(shares) * 1e3


def memory(artifact: Artifact) -> str:
    command = [sys.executable, "-c", MEMORY, str(artifact.path), device_of(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    held = json.loads(done.stdout.splitlines()[-1])
    return f"{sum(held.values()):.0f} = {held['RssAnon']:.0f} + {held['RssFile']:.0f}"


def device_of(artifact: Artifact) -> str:
    """The processor, also of what was made for an NPU; of what is for a GPU that."""
    return "gpu" if artifact.manifest.device_class == "gpu" else "cpu"


def main(name: str, tokens: int, rounds: int = ROUNDS) -> None:
    artifacts = []
    for found in (i for i in installed(Settings().models_dir) if i.name == name and not i.problem):
        artifact = Artifact.open(found.path)
        if why := why_unusable(artifact.manifest, device_of(artifact)):
            print(f"# {found.path.name} is left out: {why}")
        else:
            artifacts.append(artifact)
    if not artifacts:
        sys.exit(f"there is no artifact of {name!r} that runs here")
    resident = [memory(a) for a in artifacts]
    programs = [get_runtime(a.manifest.runtime).load(a, device=device_of(a)) for a in artifacts]
    watches = [Watched(p) if isinstance(p, FlatProgram) else None for p in programs]
    print(f"# runtimes: {name}; {programs[0].threads} threads; {conditions()}")
    print(f"# medians of {rounds} in turn; a prompt of {tokens} tokens, decode after it\n")
    print("| artifact | weights MB | prompt ms | decode ms | ratio | Python ms | resident MB = anonymous + files |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    ids = [1 + i % 100 for i in range(tokens)]
    found_ms = [[ours(p, ids) for p in programs] for _ in range(rounds + 1)][1:]  # one to warm up
    times = [[statistics.median(r[i][what] for r in found_ms) for what in (0, 1)] for i in range(len(programs))]
    for i, (artifact, program) in enumerate(zip(artifacts, programs, strict=True)):
        (prompt, step), (first_prompt, first_step) = times[i], times[0]
        m, watch = artifact.manifest, watches[i]
        cells = [f"{m.runtime} {m.device_class} {m.quantization}", f"{weights_bytes(m) / 1e6:.0f}"]
        cells += [f"{prompt:.0f}", f"{step:.1f}", f"{prompt / first_prompt:.2f}, {step / first_step:.2f}"]
        cells.append(f"{share_ms(program, watch):.2f}" if watch is not None else "-")
        print(f"| {' | '.join([*cells, resident[i]])} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    main(given.model, given.tokens)
