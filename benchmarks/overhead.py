"""The daemon's overhead beside the runtime's own step, as its client sees it.

benchmarks/overhead.py [MODEL]     an artifact's name or path; default: smollm2
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from daemon_process import DaemonProcess, Reply, conditions
from resume import story

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program, get_runtime
from ssmd.text.tokenizer import Tokenizer

ROUNDS = 5
TOKENS = 120
PROMPT = 200


def bare_gaps_ms(program: Program) -> list[float]:
    """Return the gaps of a bare loop: decode and argmax, from the same position as the daemon's stream."""
    handle = program.new_state()
    token, gaps = 1, []
    for start in range(0, PROMPT, max(program.buckets)):
        program.prefill(handle, [1 + i % 100 for i in range(start, min(PROMPT, start + max(program.buckets)))])
    for _ in range(TOKENS):
        started = time.perf_counter()
        logits = program.decode([handle], [token])
        token = int(np.argmax(logits[0]))
        gaps.append((time.perf_counter() - started) * 1e3)
    program.release(handle)
    return gaps


def arrivals_ms(daemon: DaemonProcess, body: dict[str, Any]) -> tuple[list[float], float]:
    """Gaps between deltas and the time from the last delta to the finish chunk, by a client that costs next to nothing.

    It shares the cores with the model, so it stamps what arrives and takes it apart afterwards.
    """
    raw = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    arrived: list[tuple[float, bytes]] = []
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=300) as connection:
        connection.sendall(head.encode() + f"content-length: {len(raw)}\r\n\r\n".encode() + raw)
        while not arrived or b"[DONE]" not in arrived[-1][1]:
            part = connection.recv(1 << 16)
            arrived.append((time.perf_counter() * 1e3, part))
            if not part:
                raise RuntimeError(f"the stream broke off: {arrived}")
    deltas = [t for t, part in arrived if b'"delta":{"content"' in part]
    finish = next(t for t, part in arrived if b'"finish_reason":"' in part)
    return [b - a for a, b in pairwise(deltas)], finish - deltas[-1]


def save_ms(program: Program) -> float:
    """Return the ms that a checkpoint takes in the token path, at a position of about 1,500."""
    handle, times = program.new_state(), []
    for _ in range(1500 // max(program.buckets)):
        program.prefill(handle, [1 + i % 100 for i in range(max(program.buckets))])
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        program.save(handle)
        times.append((time.perf_counter() - started) * 1e3)
    program.release(handle)
    return statistics.median(times[1:])  # the first one makes its buffers


def interference_gaps_ms(daemon: DaemonProcess, bias: dict[str, int]) -> list[float]:
    """Gaps of a stream while another client's prompt of about 1,500 tokens is read."""
    reply, during = Reply(), []
    other = threading.Thread(
        target=daemon.chat,
        args=([{"role": "user", "content": story(1500, f"At {time.time()}.")}],),
        kwargs={"max_tokens": 1},
    )
    last = time.perf_counter()
    for i, _ in enumerate(
        daemon.stream(reply, [{"role": "user", "content": story(60, "Go on.")}], max_tokens=200, logit_bias=bias)
    ):
        now = time.perf_counter()
        if i == 5:
            other.start()
        if i > 5 and other.is_alive():
            during.append((now - last) * 1e3)
        last = now
    other.join()
    return during


def main(name: str) -> None:
    path = resolve(name, Settings().models_dir, "auto") if not Path(name).exists() else Path(name)
    artifact = Artifact.open(path)
    program = get_runtime(artifact.manifest.runtime).load(artifact)
    print(f"# overhead: {artifact.manifest.name}, {program.producer}; {conditions()}; medians of {ROUNDS} rounds")
    word = Tokenizer.open(artifact.file("tokenizer.json")).encode(" the")[0]
    bias = {str(word): 100}  # one word for ever: every token has a text, whatever the weights
    bare, served, tails = [], [], []
    with tempfile.TemporaryDirectory() as folder, DaemonProcess(name, Path(folder) / "data") as daemon:
        daemon.stop()
        daemon.start()  # warm: caches are filled
        print(f"warm start to healthy: {daemon.healthy_ms:.0f} ms")
        for i in range(ROUNDS):
            bare.append(statistics.median(bare_gaps_ms(program)))
            body = {
                "model": artifact.manifest.name,
                "messages": [{"role": "user", "content": story(PROMPT - 40, f"Round {i}.")}],
                "max_tokens": TOKENS,
                "temperature": 0,
                "logit_bias": bias,
            }
            gaps, tail = arrivals_ms(daemon, body)
            served.append(statistics.median(gaps))
            tails.append(tail)
        a, b = statistics.median(bare), statistics.median(served)
        print(f"bare decode {a:.2f} ms, client TBT {b:.2f} ms: {b - a:+.2f} ms ({(b / a - 1) * 100:+.1f} %)")
        print(f"last delta to finish chunk: {statistics.median(tails):.0f} ms (worst {max(tails):.0f})")
        print(f"a checkpoint holds the token path: {save_ms(program):.1f} ms")
        program.close()
        others = [g for _ in range(3) for g in interference_gaps_ms(daemon, bias)]
        p50, p95 = np.percentile(others, [50, 95])
        print(f"gaps while 1,500 tokens are read: p50 {p50:.0f} ms, p95 {p95:.0f} ms")
        daemon.stop()
        daemon.start()
        daemon.chat([{"role": "user", "content": story(2060, "Long.")}], max_tokens=60)
        size = sum(f.size for f in artifact.manifest.files.values()) / 1e6
        print(f"resident after a turn of 1,900 tokens; artifact {size:.0f} MB, bound {1.5 * size + 250:.0f} MB:")
        for when, wait_s in (("at its end", 0.0), ("idle for 4 s", 4.0)):
            time.sleep(wait_s)
            anonymous, file_backed = daemon.resident_mb()
            total = anonymous + file_backed
            print(f"  {when}: {total:.0f} MB = {anonymous:.0f} anonymous + {file_backed:.0f} file-backed")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2"]))
