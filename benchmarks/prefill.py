"""A prompt of which nothing is cached, and the tokens after it: the bare runtime beside llama.cpp's server, in turn.

    benchmarks/prefill.py MODEL --llama-server BINARY --gguf FILE [TOKENS…]     default: 512

FILE is the same model. Its times are those that it reports itself, without its HTTP; ours are calls of the program, the
first of them with its state new. Both have as many threads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from daemon_process import conditions
from llama_server import LlamaServer

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program, get_runtime

ROUNDS = 5
STEPS = 32


def ours(program: Program, ids: list[int]) -> tuple[float, float]:
    """(ms of the prompt, ms a token after it)"""
    started = time.perf_counter()
    handle, at = program.new_state(), 0
    for n in buckets.pieces(0, len(ids), program.buckets):
        program.prefill(handle, ids[at : at + n])
        at += n
    read = time.perf_counter()
    for _ in range(STEPS):
        program.decode([handle], [5])
    ended = time.perf_counter()
    program.release(handle)
    return (read - started) * 1e3, (ended - read) * 1e3 / STEPS


def theirs(server: LlamaServer, ids: list[int]) -> tuple[float, float]:
    """Return the same times of llama.cpp's server, as it reports them."""
    asked = {"prompt": ids, "n_predict": STEPS, "ignore_eos": True, "cache_prompt": False}
    said = server.post("/completion", asked)["timings"]
    if said["prompt_n"] != len(ids) or said["predicted_n"] != STEPS:
        raise RuntimeError(f"asked for {len(ids)} + {STEPS} tokens, it took {said['prompt_n']} + {said['predicted_n']}")
    return said["prompt_ms"], said["predicted_per_token_ms"]


def main(name: str, lengths: list[int], binary: Path, gguf: Path) -> None:
    path = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
    artifact = Artifact.open(path)
    program = get_runtime(artifact.manifest.runtime).load(artifact)
    context = max(lengths) + STEPS
    with (
        tempfile.TemporaryDirectory() as folder,
        LlamaServer(binary, gguf, Path(folder), context=context, threads=default_threads()) as server,
    ):
        print(f"# prefill: {artifact.manifest.name}, buckets {program.buckets}, {program.producer}; {conditions()}")
        print(f"# llama-server {server.producer()}; medians of {ROUNDS}, in turn\n")
        print("| tokens | ssmd ms (tokens/s) | llama.cpp ms (tokens/s) | ratio | next token: ssmd ms | llama.cpp ms |")
        print("| --- | --- | --- | --- | --- | --- |")
        for length in lengths:
            ids = [1 + i % 100 for i in range(length)]
            found = [(ours(program, ids), theirs(server, ids)) for _ in range(ROUNDS + 1)][1:]  # one to warm up
            mine, peers = (statistics.median(pair[who][0] for pair in found) for who in (0, 1))
            step, their_step = (statistics.median(pair[who][1] for pair in found) for who in (0, 1))
            cells = [str(length), *(f"{ms:.0f} ({length / ms * 1e3:.0f})" for ms in (mine, peers))]
            cells += [f"{peers / mine:.2f}", f"{step:.1f}", f"{their_step:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens", nargs="*", type=int, default=[512])
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's binary")
    parser.add_argument("--gguf", type=Path, required=True, help="the same model for it")
    given = parser.parse_args()
    main(given.model, given.tokens, given.llama_server, given.gguf)
