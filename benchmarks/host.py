"""Several models in one daemon: what loading, switching, sharing the processor and live numbers cost.

benchmarks/host.py [MODEL OTHER]     installed models, default: smollm2 and smollm2@openvino; a stream of MODEL is
                                     measured alone and beside what OTHER does, in turn, against a daemon of its own
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from daemon_process import HostProcess, conditions

from ssmd.config import Settings
from ssmd.engine.metrics import Metrics
from ssmd.installed import resolve
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import get_runtime

MODEL, OTHER = sys.argv[1:3] if len(sys.argv) > 2 else ("smollm2", "smollm2@openvino")
ROUNDS = 5
TOKENS = 150
COUNTED = 20_000
LISTENERS = 20
STORY = [{"role": "user", "content": "Tell a long story of a lighthouse and its keeper."}]


def quantile(values: list[float], part: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(part * 100) - 1]


class Daemon(HostProcess):
    """A daemon that keeps loaded models."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir, "--keep-alive", "-1")

    def gaps(self, name: str) -> list[float]:
        return self.chat(STORY, model=name, max_tokens=TOKENS, store=False).gaps_ms


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do something again and again beside the body."""
    ended = threading.Event()

    def again() -> None:
        while not ended.is_set():
            work()

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def row(what: str, value: str, beside: str = "", ratio: float | None = None) -> None:
    print(f"| {what} | {value} | {beside} | {'' if ratio is None else f'{ratio:.2f}'} |", flush=True)


def loads(daemon: Daemon) -> None:
    """A load on demand beside the runtime's own, which is what `ssmd bench` prints: the first in a process, when its
    tokenizer is read, and those after it."""
    for name in (MODEL, OTHER):
        artifact = Artifact.open(resolve(name, Settings().models_dir))
        runtime, own, asked = get_runtime(artifact.manifest.runtime), list[float](), list[float]()
        started = time.perf_counter()
        runtime.load(artifact).close()
        its = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        daemon.model(name, "load")
        mine = (time.perf_counter() - started) * 1e3
        row(f"load {name} when first asked for, ms", f"{mine:.0f}", f"{its:.0f} as `ssmd bench`", mine / its)
        for _ in range(ROUNDS):
            started = time.perf_counter()
            program = runtime.load(artifact)
            own.append((time.perf_counter() - started) * 1e3)
            program.close()
            daemon.unloaded(name)
            started = time.perf_counter()
            daemon.model(name, "load")
            asked.append((time.perf_counter() - started) * 1e3)
        mine, its = statistics.median(asked), statistics.median(own)
        row("and again, ms", f"{mine:.0f}", f"{its:.0f} as `ssmd bench`", mine / its)


def beside_a_load(daemon: Daemon) -> None:
    """Measure a stream while the other model is loaded and unloaded without end: the worst case, not a real use."""

    def reload() -> None:
        daemon.unloaded(OTHER)
        daemon.model(OTHER, "load")

    alone, beside = list[float](), list[float]()
    for _ in range(ROUNDS):
        alone += daemon.gaps(MODEL)
        with meanwhile(reload):
            time.sleep(0.1)
            beside += daemon.gaps(MODEL)
    usual, late = quantile(alone, 0.95), quantile(beside, 0.95)
    row(f"p95 gap while {OTHER} is loaded, ms", f"{late:.1f}", f"{usual:.1f} alone", late / usual)
    row("longest", f"{max(beside):.0f}", f"{max(alone):.0f} alone")


def together(daemon: Daemon) -> None:
    """Two models that both answer: the time of a step is the sum of both, if turns cost nothing."""
    steps = dict[str, list[float]]()
    for _ in range(ROUNDS):
        for name in (MODEL, OTHER):
            steps.setdefault(f"{name} alone", []).extend(daemon.gaps(name))
        with meanwhile(lambda: daemon.gaps(OTHER)):
            time.sleep(0.5)
            steps.setdefault("both", []).extend(daemon.gaps(MODEL))
    own = [statistics.median(steps[f"{name} alone"]) for name in (MODEL, OTHER)]
    both = statistics.median(steps["both"])
    row(f"TBT of {MODEL} while {OTHER} answers too, ms", f"{both:.1f}", f"{own[0]:.1f} + {own[1]:.1f}", both / sum(own))


def switching(daemon: Daemon) -> None:
    """The same request to one model again, and after one to the other."""
    again, switched = list[float](), list[float]()
    short = {"messages": STORY, "max_tokens": 2, "store": False}

    def ttft(name: str) -> float:
        answer = daemon.post("/v1/chat/completions", {"model": name, **short})
        return float(answer["usage"]["ssmd"]["ttft_ms"])

    for name in (MODEL, OTHER):
        ttft(name)
    for _ in range(4 * ROUNDS):
        ttft(MODEL)
        again.append(ttft(MODEL))
        ttft(OTHER)
        switched.append(ttft(MODEL))
    one, other = statistics.median(switched), statistics.median(again)
    row(f"TTFT of {MODEL} after a request to {OTHER}, ms", f"{one:.1f}", f"{other:.1f} after its own", one / other)


def listened_to(daemon: Daemon) -> None:
    """Measure a stream while the metrics are streamed to many clients.

    The clients read them afterwards, as their own work is not the daemon's.
    """
    alone, beside = list[float](), list[float]()
    for _ in range(ROUNDS):
        alone += daemon.gaps(MODEL)
        lines = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(LISTENERS)]
        for line in lines:
            line.sendall(b"GET /ssmd/v1/metrics/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        time.sleep(0.3)
        beside += daemon.gaps(MODEL)
        for line in lines:
            if b"data: " not in line.recv(1 << 20):
                raise RuntimeError("a listener was told nothing")
            line.close()
    one, other = statistics.median(beside), statistics.median(alone)
    row(f"TBT while {LISTENERS} listen to the metrics, ms", f"{one:.2f}", f"{other:.2f} alone", one / other)


def counting() -> None:
    """Counting a step of eight streams, and of one, in this process."""
    numbers = Metrics().of("m")
    for streams in (1, 8):
        gaps, times = [12.5] * streams, list[float]()
        for _ in range(COUNTED):
            started = time.perf_counter()
            numbers.tokens(gaps, streams)
            times.append((time.perf_counter() - started) * 1e6)
        row(f"counting a step of {streams}, µs", f"{statistics.median(times):.1f}")


def main() -> None:
    print(f"{MODEL} and {OTHER}; {conditions()}\n")
    print("| what | measured | beside | ratio |\n| --- | --- | --- | --- |")
    counting()
    with tempfile.TemporaryDirectory() as folder:
        with Daemon(Path(folder) / "data") as daemon:  # which hashes the files, once for all
            for name in (MODEL, OTHER):
                daemon.model(name, "load")
        measured(Path(folder) / "data")


def measured(data_dir: Path) -> None:
    with Daemon(data_dir) as daemon:
        loads(daemon)
        for part in (beside_a_load, together, switching, listened_to):
            for name in (MODEL, OTHER):
                daemon.model(name, "load")
            part(daemon)


if __name__ == "__main__":
    main()
