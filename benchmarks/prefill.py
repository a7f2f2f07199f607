"""A prompt of which nothing is cached, and the tokens after it: the bare runtime beside llama.cpp's server, in turn.

    benchmarks/prefill.py MODEL --llama-server BINARY --gguf FILE [TOKENS…] [--processor]     default: 512

FILE is the same model. Its times are those that it reports itself, without its HTTP; ours are calls of the program, the
first of them with its state new. Both have as many threads.

With --processor each has one thread, and the least processor time of its process counts, which a busy machine changes
little. The peer's is read when it streams its first token, and when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def ours(program: Program, ids: list[int], clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """(ms of the prompt, ms a token after it)"""
    started = clock()
    handle, at = program.new_state(), 0
    for n in buckets.pieces(0, len(ids), program.buckets):
        program.prefill(handle, ids[at : at + n])
        at += n
    read = clock()
    for _ in range(STEPS):
        program.decode([handle], [5])
    ended = clock()
    program.release(handle)
    return (read - started) * 1e3, (ended - read) * 1e3 / STEPS


def theirs(server: LlamaServer, ids: list[int]) -> tuple[float, float]:
    """Return the same times of llama.cpp's server, as it reports them."""
    asked = {"prompt": ids, "n_predict": STEPS, "ignore_eos": True, "cache_prompt": False}
    said = server.post("/completion", asked)["timings"]
    _check(said, len(ids))
    return said["prompt_ms"], said["predicted_per_token_ms"]


def theirs_of_processor(server: LlamaServer, ids: list[int]) -> tuple[float, float]:
    """Return the same times of the server's processor. The first token counts to the prompt."""
    body = {"prompt": ids, "n_predict": STEPS, "ignore_eos": True, "cache_prompt": False, "stream": True}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        started = processor_ms(server)
        connection.request("POST", "/completion", json.dumps(body), {"content-type": "application/json"})
        read, said = 0.0, None
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                read = read or processor_ms(server)
                said = json.loads(line[6:]).get("timings") or said
        ended = processor_ms(server)
    _check(said or {}, len(ids))
    return read - started, (ended - read) / (STEPS - 1)


def processor_ms(server: LlamaServer) -> float:
    """Return the processor time of all threads that the server has."""
    assert server.process is not None
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def _check(said: Mapping[str, Any], tokens: int) -> None:
    if (said.get("prompt_n"), said.get("predicted_n")) != (tokens, STEPS):
        raise RuntimeError(f"asked for {tokens} + {STEPS} tokens, it took {dict(said)}")


def main(name: str, lengths: list[int], binary: Path, gguf: Path, of_processor: bool = False) -> None:
    path = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
    artifact = Artifact.open(path)
    threads = 1 if of_processor else default_threads()
    program = get_runtime(artifact.manifest.runtime).load(artifact, threads=threads)
    context = max(lengths) + STEPS
    clock, peer, unit = time.perf_counter, theirs, "medians"
    middle: Callable[[list[float]], float] = statistics.median
    if of_processor:
        clock, peer, middle, unit = time.process_time, theirs_of_processor, min, "least processor times, 1 thread,"
    with (
        tempfile.TemporaryDirectory() as folder,
        LlamaServer(binary, gguf, Path(folder), context=context, threads=threads) as server,
    ):
        print(f"# prefill: {artifact.manifest.name}, buckets {program.buckets}, {program.producer}; {conditions()}")
        print(f"# llama-server {server.producer()}; {unit} of {ROUNDS}, in turn\n")
        print("| tokens | ssmd ms (tokens/s) | llama.cpp ms (tokens/s) | ratio | next token: ssmd ms | llama.cpp ms |")
        print("| --- | --- | --- | --- | --- | --- |")
        for length in lengths:
            ids = [1 + i % 100 for i in range(length)]
            found = [(ours(program, ids, clock), peer(server, ids)) for _ in range(ROUNDS + 1)][1:]  # one to warm up
            mine, peers = (middle([pair[who][0] for pair in found]) for who in (0, 1))
            step, their_step = (middle([pair[who][1] for pair in found]) for who in (0, 1))
            cells = [str(length), *(f"{ms:.0f} ({length / ms * 1e3:.0f})" for ms in (mine, peers))]
            cells += [f"{peers / mine:.2f}", f"{step:.1f}", f"{their_step:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n# {conditions()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens", nargs="*", type=int, default=[512])
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's binary")
    parser.add_argument("--gguf", type=Path, required=True, help="the same model for it")
    parser.add_argument("--processor", action="store_true", help="processor time of one thread: on a busy machine")
    given = parser.parse_args()
    main(given.model, given.tokens, given.llama_server, given.gguf, given.processor)
