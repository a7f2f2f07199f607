"""One honest stream beside clients that mean no good, or do no good: how long it waits from token to token.

benchmarks/neighbours.py [MODEL [WORD]]     an artifact's name or path, default: smollm2; only rows with this in them

The second table has a row for each POST of openapi.json (endpoints.py): CROWD clients send it at once. It names the
rows that are beyond a bound, and then the exit status is 1.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, conditions
from endpoints import Target, requests

TOKENS = 150
STREAMS = 3  # of so many tokens each, alone and beside each of the others: medians, and the longest gap of all
REFUSED = 5  # windows of a second
HONEST, OTHER = "127.0.0.2", "127.0.0.1"  # clients are told apart by address; third ones have other addresses
CROWD = 60  # requests at once to one endpoint
CROWD_S = 20.0  # time after which those that have no answer are given up
# Bounds of the second table: longest gap of the stream, /health, a one-token chat of a third client, more memory.
GAP_MS, HEALTH_MS, CHAT_MS, MORE_MB = 1000.0, 500.0, 3000.0, 600.0
MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
WORD = sys.argv[2] if len(sys.argv) > 2 else ""
LIST = b"GET /ssmd/v1/sessions?limit=1000 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
LINES = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 14_000 + b"\r\n"
REFUSALS = "a refusal, queue full"
Other = Callable[[int], None]  # what one of the others does, given the port, until it is killed


def connect(port: int, address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(address, 0))


def head(length: int) -> bytes:
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        "content-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def in_pieces(raw: bytes) -> bytes:
    """Return a request whose body comes in chunks of a byte each."""
    start = head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    return start + b"".join(b"1\r\n%c\r\n" % one for one in raw) + b"0\r\n\r\n"


def body(content: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": NAME, "messages": messages, "stream": True, **fields}).encode()


def honest_gaps_ms(port: int) -> list[float]:
    """Return the gaps of a stream, from its first delta on."""
    raw = body("Tell a long story of a lighthouse and its keeper.", max_tokens=TOKENS, temperature=0, store=False)
    arrived: list[float] = []
    with connect(port, HONEST) as one:
        one.sendall(head(len(raw)) + raw)
        part = b""
        while b"[DONE]" not in part:
            part = one.recv(1 << 16)
            if not part or b'"error"' in part:
                raise RuntimeError(f"the honest stream broke off: {part!r}")
            arrived += [time.perf_counter() * 1e3] * part.count(b'"delta":{"content":"')
    return [b - a for a, b in pairwise(arrived)]


def ask(port: int, raw: bytes, *, read: bool = True) -> None:
    send(port, head(len(raw)) + raw, read=read)


def send(port: int, request: bytes, *, read: bool = True) -> None:
    with contextlib.suppress(OSError), connect(port, OTHER) as one:
        one.sendall(request)
        while read and one.recv(1 << 16):
            pass


def again(work: Callable[[int], None]) -> Other:
    def until(port: int) -> None:
        while True:
            work(port)

    return until


def held(first: bytes, more: bytes, count: int) -> Other:
    """Connections that begin with something, and then send a little now and then."""

    def until(port: int) -> None:
        open_: list[socket.socket] = []
        with contextlib.suppress(OSError):
            for _ in range(count):
                open_.append(connect(port, OTHER))
                open_[-1].sendall(first)
        while True:
            time.sleep(0.5)
            for one in open_:
                with contextlib.suppress(OSError):
                    one.sendall(more)

    return until


def elsewhere(others: list[Other], port: int) -> None:
    """Be the others, in a process of their own, and as little as can be in the way of the daemon's."""
    os.nice(19)
    threads = [threading.Thread(target=one, args=(port,)) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def neighbours() -> dict[str, list[Other]]:
    long = body("hello world " * 175_000)
    pieces = in_pieces(body("hello " * 50_000))
    keys = body("hi")[:-1] + b"," + b",".join(b'"k%d":1' % i for i in range(700_000)) + b"}"
    return {
        "nobody": [],
        "another like it": [again(lambda port: ask(port, body("And another story.", max_tokens=TOKENS)))],
        "a flood: 16 that ask at once, again and again": [
            again(lambda port: ask(port, body("Tell me more.", max_tokens=60))) for _ in range(16)
        ],
        "16 that ask and go away": [again(lambda port: ask(port, body("Never mind."), read=False)) for _ in range(16)],
        "a prompt of 2 MiB, again and again": [again(lambda port: ask(port, long))],
        "8 MiB of unknown names, again and again": [again(lambda port: ask(port, keys))],
        "300,000 chunks of 1 byte, again and again": [again(lambda port: send(port, pieces))],
        "4 heads of 14,000 lines, again and again": [again(lambda port: send(port, LINES)) for _ in range(4)],
        "24 that list the sessions, again and again": [again(lambda port: send(port, LIST)) for _ in range(24)],
        "200 silent connections": [held(b"", b"", 200)],
        "100 bodies that drip": [held(head(1000), b" ", 100)],
        "100 heads that drip": [held(b"GET /health HTTP/1.1\r\n", b"x: y\r\n", 100)],
    }


@dataclass
class Beside:
    """Measurements while a crowd asks, ms. statuses: of the crowd's answers; 0 for none in time."""

    statuses: Counter[int] = field(default_factory=Counter)
    all_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    chats: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    more_mb: float = 0.0

    @property
    def beyond(self) -> str:
        """Name the bounds that do not hold."""
        bounds = (
            ("gaps", self.gaps, GAP_MS),
            ("/health", self.health, HEALTH_MS),
            ("chat", self.chats, CHAT_MS),
            ("MB", [self.more_mb], MORE_MB),
        )
        return ", ".join(name for name, found, bound in bounds if max(found, default=0.0) > bound)


def crowd(port: int, raw: bytes, done: Any) -> None:
    """Send a request CROWD times at once, and put a status and a time for each into `done`."""
    os.nice(19)
    began = time.perf_counter()

    def one() -> None:
        status = 0
        with contextlib.suppress(OSError), connect(port, OTHER) as line:
            line.settimeout(CROWD_S)
            line.sendall(raw)
            answer = line.recv(1 << 16)
            status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
            while line.recv(1 << 16):
                pass
        done.put((status, time.perf_counter() - began))

    threads = [threading.Thread(target=one) for _ in range(CROWD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timed_ms(port: int, at: str, method: str, path: str, raw: bytes | None = None) -> float:
    """Return the time that a client at an address waits for an answer."""
    began = time.perf_counter()
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=120, source_address=(at, 0))
    with contextlib.closing(line):
        line.request(method, path, raw, {"content-type": "application/json"} if raw else {})
        status, _ = (answer := line.getresponse()).status, answer.read()
    if status != 200:
        raise RuntimeError(f"{method} {path}: {status}")
    return (time.perf_counter() - began) * 1e3


def beside(daemon: DaemonProcess, raw: bytes, third: str) -> Beside:
    """Measure a stream, and /health, a chat and /metrics of a third client, while a crowd sends a request."""
    found, over = Beside(), threading.Event()
    fork = multiprocessing.get_context("fork")
    done = fork.Queue()
    others = fork.Process(target=crowd, args=(daemon.port, raw, done))
    chat = body("Hi", max_tokens=1, store=False, stream=False)
    before = peak_mb(daemon, anew=True)

    def probe(times: list[float], path: str) -> None:
        while not over.is_set():
            times.append(timed_ms(daemon.port, third, "GET", path))
            over.wait(0.1)

    def ask_once() -> None:
        time.sleep(1)
        found.chats.append(timed_ms(daemon.port, third, "POST", "/v1/chat/completions", chat))

    def stream() -> None:
        while not over.is_set():
            found.gaps += honest_gaps_ms(daemon.port)

    threads = [
        threading.Thread(target=stream),
        threading.Thread(target=ask_once),
        threading.Thread(target=probe, args=(found.health, "/health")),
        threading.Thread(target=probe, args=(found.metrics, "/metrics")),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    others.start()
    try:
        for _ in range(CROWD):
            status, found.all_s = done.get(timeout=2 * CROWD_S)
            found.statuses[status] += 1
    finally:
        others.kill()
        over.set()
        for thread in threads:
            thread.join()
    found.more_mb = peak_mb(daemon) - before
    return found


def peak_mb(daemon: DaemonProcess, *, anew: bool = False) -> float:
    """Return the most memory that the daemon had, MB. anew: since now."""
    assert daemon.process is not None
    if anew:
        Path(f"/proc/{daemon.process.pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


def endpoints(daemon: DaemonProcess) -> Iterator[tuple[str, bytes]]:
    """Yield a row's name and its request for each POST of openapi.json."""
    session = daemon.chat([{"role": "user", "content": "Keep this."}], max_tokens=20).session
    assert session is not None
    line = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    with contextlib.closing(line):
        line.request("GET", f"/ssmd/v1/sessions/{session}/export")
        file = line.getresponse().read()
    document = daemon.get("/openapi.json")[1]
    for path, raw in requests(document, Target(NAME, session, file)):
        yield f"{CROWD} x POST {path}, {len(raw) / 1e3:.0f} kB", raw


def by_endpoint(daemon: DaemonProcess) -> list[str]:
    """Print a row for each POST. Return the rows that are beyond a bound."""
    bad = []
    print(
        f"\nlongest of each in ms; bounds: gaps {GAP_MS:.0f}, /health {HEALTH_MS:.0f}, chat {CHAT_MS:.0f} ms,", end=""
    )
    print(f" {MORE_MB:.0f} MB more\n")
    print("| at once | answers | all after, s | gap, p50 | gap | /health | a chat | /metrics | MB more | beyond |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, (name, raw) in enumerate(endpoints(daemon)):
        if WORD not in name:
            continue
        until_idle(daemon)
        one = beside(daemon, raw, f"127.0.1.{number + 1}")
        answers = ", ".join(f"{n} x {status}" for status, n in sorted(one.statuses.items()))
        longest = " | ".join(f"{max(times):.0f}" for times in (one.gaps, one.health, one.chats, one.metrics))
        usual = statistics.median(one.gaps)
        print(f"| {name} | {answers} | {one.all_s:.1f} | {usual:.1f} | {longest} | {one.more_mb:.0f} | {one.beyond} |")
        sys.stdout.flush()
        if one.beyond:
            bad.append(name)
    return bad


def main() -> int:
    global NAME
    print(conditions())
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder, DaemonProcess(MODEL, Path(folder) / "data") as daemon:
        NAME = daemon.get("/v1/models")[1]["data"][0]["id"]
        honest_gaps_ms(daemon.port)
        print(f"{NAME}, {STREAMS} honest streams of {TOKENS} tokens one after another; their gaps in ms, medians\n")
        print("| beside it | p50 | p95 | longest | p95 alone just before | ratio | MB |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name, others in neighbours().items():
            if WORD not in name:
                continue
            until_idle(daemon)
            alone = statistics.median(p95(honest_gaps_ms(daemon.port)) for _ in range(STREAMS))
            beside = multiprocessing.get_context("fork").Process(target=elsewhere, args=(others, daemon.port))
            beside.start()
            try:
                time.sleep(2)
                streams = [honest_gaps_ms(daemon.port) for _ in range(STREAMS)]
            finally:
                beside.kill()
                beside.join()
            usual = statistics.median(statistics.median(gaps) for gaps in streams)
            late = statistics.median(p95(gaps) for gaps in streams)
            told = f"{usual:.1f} | {late:.1f} | {max(map(max, streams)):.0f} | {alone:.1f}"
            print(f"| {name} | {told} | {late / alone:.1f} | {daemon.resident_mb()[0]:.0f} |", flush=True)
        bad = by_endpoint(daemon)
    if WORD in REFUSALS:
        with tempfile.TemporaryDirectory() as folder:
            print()
            refusals(Path(folder))
    return 1 if bad else 0


def until_idle(daemon: DaemonProcess) -> None:
    """Wait until the others' requests have ended."""
    quiet = 0
    while quiet < 5:
        time.sleep(0.5)
        queue = daemon.get("/ssmd/v1/metrics")[1]["queue"]
        quiet = quiet + 1 if queue["waiting"] == queue["running"] == 0 else 0


def processor_s(daemon: DaemonProcess) -> float:
    """Processor time that the daemon has used."""
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def refusals(folder: Path) -> None:
    """Measure the cost of refusals while the queue is full, beyond that of the running answers."""
    with DaemonProcess(
        MODEL, folder / "full", "--max-running", "1", "--max-queue", "1", "--no-store", "--threads", "1"
    ) as daemon:
        long = body("Tell a very long story.", max_tokens=1500, logit_bias={str(i): -100 for i in range(3)})
        for _ in range(4):
            threading.Thread(target=always, args=(daemon.port, long), daemon=True).start()
        time.sleep(2)
        for name, raw in {
            "of 100 bytes": body("Hello?"),
            "of 1 MiB": body("hello " * (1 << 20) + "?")[: 1 << 20],
        }.items():
            costs = []
            for _ in range(REFUSED):
                before, began = processor_s(daemon), time.perf_counter()
                refused = 0
                while time.perf_counter() - began < 1:
                    with connect(daemon.port, OTHER) as one:
                        one.sendall(head(len(raw)) + raw)
                        refused += b" 503 " in one.recv(1 << 16)
                window = time.perf_counter() - began
                used = processor_s(daemon) - before
                before = processor_s(daemon)
                time.sleep(window)
                costs.append((used - (processor_s(daemon) - before)) * 1e3 / refused)
            print(f"{REFUSALS}, {name}: {statistics.median(costs):.2f} ms of processor time")


def always(port: int, raw: bytes) -> None:
    """Ask again whenever there was an end."""
    while True:
        ask(port, raw)
        time.sleep(0.2)


def p95(gaps: list[float]) -> float:
    return sorted(gaps)[int(len(gaps) * 0.95)]


NAME = ""

if __name__ == "__main__":
    sys.exit(main())
