"""On what the bits of an answer depend: how its prompt was cut, other answers under way, threads.

    benchmarks/bits.py MODEL…     names or paths of artifacts

*Cut*: the logits and the state after prompts that are cut as the engine cuts them. They are compared with the same
tokens in pieces of 16, and with the second half token by token, as if it had been generated. *Company*: a daemon
answers prompts alone, and beside another client's answers. *Threads*: one against two. Where bits differ, the number
is the median Kullback-Leibler divergence of the next token's probabilities, in nats.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from daemon_process import DaemonProcess, Reply, conditions
from numpy.typing import NDArray

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program, get_runtime

LENGTHS = tuple(range(181, 331, 15))  # tokens of the prompts
ANSWER = 8  # tokens
PATIENCE_S = 600.0
COMPLETIONS = "/v1/completions"
Ids = list[int]
End = tuple[NDArray[np.float32], dict[str, bytes]]  # logits [vocab], and the state, of a prompt's end


def prompts(vocabulary: int) -> list[Ids]:
    """Return prompts of ids that are the same in every run; no two begin alike."""
    draw = np.random.default_rng(7)
    return [draw.integers(3, vocabulary, length).tolist() for length in LENGTHS]


def on_grid(program: Program, ids: Ids) -> list[int]:
    return list(buckets.pieces(0, len(ids), program.buckets))


def in_16s(program: Program, ids: Ids) -> list[int]:
    return [min(16, len(ids) - at) for at in range(0, len(ids), 16)]


def half_generated(program: Program, ids: Ids) -> list[int]:
    half = len(ids) // 2
    return [*buckets.pieces(0, half, program.buckets), *[1] * (len(ids) - half)]


def read(program: Program, ids: Ids, cut: Iterable[int]) -> End:
    """Feed a prompt in calls of such lengths."""
    handle, at = program.new_state(), 0
    for n in cut:
        part = ids[at : at + n]
        logits = program.prefill(handle, part) if n > 1 else program.decode([handle], part)[0]
        at += n
    assert at == len(ids)
    state = {name: array.tobytes() for name, array in program.save(handle).tensors.items()}
    program.release(handle)
    return logits, state


def verdict(pairs: Sequence[tuple[End, End]]) -> str:
    """Say that all pairs are equal to the last bit, or how far the next tokens' probabilities are apart."""
    same = sum(np.array_equal(a[0], b[0]) and a[1] == b[1] for a, b in pairs)
    if same == len(pairs):
        return "equal"
    divergence = statistics.median(_divergence(a[0], b[0]) for a, b in pairs)
    return f"{same} of {len(pairs)}; {divergence:.1g}"


def _divergence(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    log_p, log_q = (x - np.logaddexp.reduce(x) for x in (a.astype(np.float64), b.astype(np.float64)))
    return float(max(0.0, (np.exp(log_p) * (log_p - log_q)).sum()))


def cuts(artifact: Artifact) -> list[str]:
    """Compare cuts, and threads."""
    runtime = get_runtime(artifact.manifest.runtime)
    program = runtime.load(artifact, threads=1)
    asked = prompts(program.vocabulary)
    ends = [read(program, ids, on_grid(program, ids)) for ids in asked]
    found = []
    for cut in (in_16s, half_generated):
        others = [read(program, ids, cut(program, ids)) for ids in asked]
        found.append(verdict(list(zip(ends, others, strict=True))))
    program.close()
    if program.threads != 1 or artifact.manifest.runtime == "wgpu":
        return [*found, ""]
    program = runtime.load(artifact, threads=2)
    others = [read(program, ids, on_grid(program, ids)) for ids in asked]
    program.close()
    return [*found, verdict(list(zip(ends, others, strict=True)))]


@contextlib.contextmanager
def talk(daemon: DaemonProcess) -> Iterator[None]:
    """Have two other answers under way until the end, so that there is one whenever one of them ends."""
    over, begun = threading.Event(), threading.Barrier(3)

    def go_on(number: int) -> None:
        first = True
        while not over.is_set():
            said = [{"role": "user", "content": f"Tell story number {number}, as long as you can."}]
            for _ in daemon.stream(Reply(), said, max_tokens=200 + 150 * number, store=False):
                if first:
                    begun.wait(PATIENCE_S)
                first = False
                if over.is_set():
                    break

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(PATIENCE_S)
    yield
    over.set()
    for thread in threads:
        thread.join()


def company(path: Path, asked: Sequence[Ids]) -> str:
    """Ask alone and beside others; how many answers have the same log-probabilities, and how many the same text."""
    with tempfile.TemporaryDirectory() as folder, DaemonProcess(path, Path(folder) / "data") as daemon:
        model = daemon.get("/v1/models")[1]["data"][0]["id"]

        def ask(ids: Ids) -> dict[str, Any]:
            body = {
                "model": model,
                "prompt": ids,
                "temperature": 0,
                "max_tokens": ANSWER,
                "logprobs": 5,
                "store": False,
            }
            connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_S)
            with contextlib.closing(connection):
                connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
                choice: dict[str, Any] = json.loads(connection.getresponse().read())["choices"][0]
            return choice

        alone = [ask(ids) for ids in asked]
        with talk(daemon):
            beside = [ask(ids) for ids in asked]
    same = sum(a["logprobs"] == b["logprobs"] for a, b in zip(alone, beside, strict=True))
    texts = sum(a["text"] == b["text"] for a, b in zip(alone, beside, strict=True))
    return f"{same} of {len(asked)}" if same == len(asked) else f"{same} of {len(asked)}; texts {texts}"


def main(models: list[str]) -> None:
    print(f"# bits: {len(LENGTHS)} prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens; {conditions()}\n")
    print("| runtime | model | cut in 16s | second half one by one | beside others | 1 and 2 threads |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in models:
        path = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
        artifact = Artifact.open(path)
        in_small, generated, threads = cuts(artifact)
        together = company(path, prompts(artifact.manifest.vocabulary))
        manifest = artifact.manifest
        row = (manifest.runtime, f"{manifest.name} {manifest.quantization}", in_small, generated, together, threads)
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["smollm2"])
