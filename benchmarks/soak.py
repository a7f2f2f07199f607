"""A daemon under hours of mixed and odd traffic: its memory, descriptors, threads and disk, a line each minute.

    benchmarks/soak.py [MODEL] [--minutes 60] [--clients 6] [--seed S] [--every 60] [--trace] [--keep DIR]

MODEL: an artifact's name or path, default smollm2. The clients chat, go on, go away, repeat requests, ask for shapes
and tools, send what is refused, and list, rename, export and remove sessions. The quota is reached early, so
that states are replaced all the time. Every --every seconds the daemon's figures are printed: resident memory
(anonymous and of files), and of glibc's allocator what it has of the system, and what of it is free. The last line has
the growth of memory over the second half, in MB an hour, by least squares. It means little for less than an hour.

--trace also has tracemalloc count Python's objects, which costs half of the speed. The places that grew most between a
tenth of the run and its end are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, conditions

QUOTA = "64MB"
TOP = 15  # places that are printed
FRAMES = 1  # kept of each object: the place that made it
WORDS = ("harbour", "lamp", "bread", "winter", "signal", "river", "engine", "letter", "garden", "clock")
SHAPE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {**SHAPE, "required": ["name"]}}}


def main() -> None:
    """Run the traffic and print the figures. Exit code 1 if a request ended in a 5xx or the daemon did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", default="soak")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two lines")
    parser.add_argument("--trace", action="store_true", help="count Python's objects too")
    parser.add_argument("--keep", type=Path, help="a folder for the data, which stays")
    options = parser.parse_args()
    with contextlib.ExitStack() as held:
        folder = options.keep or Path(held.enter_context(tempfile.TemporaryDirectory()))
        sys.exit(run(options, folder.absolute()))


def run(options: argparse.Namespace, folder: Path) -> int:
    """Serve into a folder, and print a line every so often. Returns the exit code."""
    print(f"{conditions()}; {options.model}, {options.clients} clients, {options.minutes:g} minutes, quota {QUOTA}")
    heads = ("minutes", "requests", "anonymous MB", "of files MB", "allocator MB", "free of it MB", "fds", "threads")
    print("\n| " + " | ".join((*heads, "disk MB")) + " |\n" + "| ---: " * 9 + "|")
    how = "--traced" if options.trace else "--as-it-is"
    program = (sys.executable, str(Path(__file__).absolute()), how, str(folder))
    with DaemonProcess(options.model, folder / "data", "--quota", QUOTA, program=program) as daemon:
        counts: Counter[str] = Counter()
        over = threading.Event()
        model = daemon.get("/v1/models")[1]["data"][0]["id"]
        traffic = [Traffic(daemon.port, model, f"{options.seed}:{i}", counts) for i in range(options.clients)]
        threads = [threading.Thread(target=one.until, args=(over,)) for one in traffic]
        for thread in threads:
            thread.start()
        begun = time.monotonic()
        figures: list[tuple[float, float]] = []
        marked = not options.trace
        while (passed := time.monotonic() - begun) < options.minutes * 60:
            time.sleep(min(options.every, options.minutes * 60 - passed))
            passed = time.monotonic() - begun
            if not marked and passed >= options.minutes * 6:
                marked = asked_for(daemon, folder, signal.SIGUSR1, "marked")
            figures.append((passed / 3600, row(daemon, folder, passed, counts)))
        over.set()
        for thread in threads:
            thread.join(60)
        if options.trace and asked_for(daemon, folder, signal.SIGUSR1, "grown"):
            print(f"\n{(folder / 'grown').read_text()}")
        code = daemon.stop(60)
    print("\n" + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())) + f"; exit code {code}")
    print(f"anonymous memory over the second half: {slope(figures[len(figures) // 2 :]):+.1f} MB an hour")
    return int(code != 0 or any(what.startswith("5") for what in counts))


def row(daemon: DaemonProcess, folder: Path, passed: float, counts: Counter[str]) -> float:
    """Print the present figures. Returns the anonymous memory in MB."""
    assert daemon.process is not None
    proc = Path(f"/proc/{daemon.process.pid}")
    anonymous, of_files = daemon.resident_mb()
    held = free = float("nan")
    if asked_for(daemon, folder, signal.SIGUSR2, "malloc.xml"):
        held, free = allocator_mb((folder / "malloc.xml").read_text())
    disk = sum(one.stat().st_size for one in (folder / "data").rglob("*") if one.is_file())
    fds, threads = (len(list((proc / name).iterdir())) for name in ("fd", "task"))
    print(
        f"| {passed / 60:.1f} | {sum(counts.values())} | {anonymous:.1f} | {of_files:.1f} | {held:.1f} | {free:.1f} "
        f"| {fds} | {threads} | {disk / 1e6:.1f} |",
        flush=True,
    )
    return anonymous


def asked_for(daemon: DaemonProcess, folder: Path, number: signal.Signals, name: str) -> bool:
    """Have the daemon write a file, by a signal. Returns True when it is there."""
    assert daemon.process is not None
    (folder / name).unlink(missing_ok=True)
    daemon.process.send_signal(number)
    deadline = time.monotonic() + 60
    while not (folder / name).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return (folder / name).exists()


def allocator_mb(text: str) -> tuple[float, float]:
    """Return (MB that glibc has of the system, MB of it that are free), from the text of `malloc_info`."""
    whole = text[text.rindex("</heap>") :]  # the totals of all arenas stand behind them

    def total(pattern: str) -> float:
        return sum(float(size) for size in re.findall(pattern, whole)) / 1e6

    mapped = total(r'<total type="mmap" count="\d+" size="(\d+)"')
    free = total(r'<total type="(?:fast|rest)" count="\d+" size="(\d+)"')
    return total(r'<system type="current" size="(\d+)"') + mapped, free


def slope(figures: list[tuple[float, float]]) -> float:
    """Return the slope of a straight line through points, by least squares; nan for fewer than two points."""
    if len(figures) < 2:
        return float("nan")
    n = len(figures)
    x, y = (sum(one[i] for one in figures) / n for i in (0, 1))
    return sum((a - x) * (b - y) for a, b in figures) / sum((a - x) ** 2 for a, _ in figures)


class Traffic:
    """One client: random requests of a seed, one after the other. counts: answers by status, of all clients."""

    def __init__(self, port: int, model: str, seed: str, counts: Counter[str]) -> None:
        self._port, self._model, self._counts = port, model, counts
        self._rng = random.Random(seed)
        self._sessions: list[str] = []
        self._said: list[dict[str, str]] = []

    def until(self, over: threading.Event) -> None:
        kinds = [self._chat] * 6 + [self._leave, self._repeat, self._shape, self._tools, self._refused, self._raw]
        kinds += [self._lists, self._changes, self._words]
        while not over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):  # it comes to its end
                self._rng.choice(kinds)()

    def _text(self, most: int = 60) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most)))

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self._model, "max_tokens": self._rng.randint(1, 24), **fields}

    def _ask(self, method: str, path: str, body: object = None, *, most: int = -1, **headers: str) -> tuple[int, bytes]:
        """Send a request and read its answer. most: bytes to read before the connection is closed; -1 reads all."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)) as connection:
            raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, raw, {"content-type": "application/json", **named})
            answer = connection.getresponse()
            if found := answer.getheader("x-ssmd-session"):
                self._sessions = [*self._sessions[-20:], found]
            read = answer.read() if most < 0 else answer.read(most)
            self._counts[str(answer.status) if most < 0 else "left"] += 1
            return answer.status, read

    def _completion(self, **fields: Any) -> tuple[int, bytes]:
        return self._ask("POST", "/v1/chat/completions", self._body(**fields))

    def _chat(self) -> None:
        """Go on with a conversation, or begin one."""
        if len(self._said) > 12 or self._rng.random() < 0.2:
            self._said = [{"role": "system", "content": self._text()}] if self._rng.random() < 0.5 else []
        self._said.append({"role": "user", "content": self._text()})
        stream = self._rng.random() < 0.5
        status, answer = self._completion(messages=self._said, stream=stream)
        if status != 200 or stream:
            self._said = []
        else:
            self._said.append({"role": "assistant", "content": json.loads(answer)["choices"][0]["message"]["content"]})

    def _leave(self) -> None:
        body = self._body(messages=[{"role": "user", "content": self._text(300)}], stream=True, max_tokens=400)
        self._ask("POST", "/v1/chat/completions", body, most=self._rng.randint(1, 600))

    def _repeat(self) -> None:
        body = self._body(messages=[{"role": "user", "content": self._text()}], n=self._rng.randint(1, 3))
        name = f"k-{self._rng.getrandbits(40):x}"
        for _ in range(2):
            self._ask("POST", "/v1/chat/completions", body, idempotency_key=name)

    def _shape(self) -> None:
        shape = {**SHAPE, "title": self._text(3)}  # a new grammar each time
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": shape}}
        self._completion(messages=[{"role": "user", "content": self._text()}], response_format=form)

    def _tools(self) -> None:
        self._completion(messages=[{"role": "user", "content": self._text()}], tools=[TOOL])

    def _refused(self) -> None:
        odd: list[object] = [b"{", b"[" * 5000, b"\xff" * 99, {"model": "none"}, self._body(messages="x")]
        odd += [self._body(messages=[{"role": "user", "content": self._text(20_000)}]), {self._text(3): 1}]
        self._ask("POST", "/v1/chat/completions", self._rng.choice(odd))
        self._ask("GET", f"/{self._text(2).replace(' ', '/')}")

    def _raw(self) -> None:
        self._ask("POST", "/v1/completions", self._body(prompt=self._text(), store=self._rng.random() < 0.5))

    def _lists(self) -> None:
        word = self._rng.choice(WORDS)
        for path in ("ssmd/v1/sessions?limit=50", f"ssmd/v1/sessions?search={word}", "metrics", "health", "v1/models"):
            self._ask("GET", f"/{path}")

    def _changes(self) -> None:
        if not self._sessions:
            return
        path = f"/ssmd/v1/sessions/{self._sessions.pop(self._rng.randrange(len(self._sessions)))}"
        self._ask("PATCH", path, {"title": self._text(5)})
        self._ask("GET", f"{path}/export")
        if self._rng.random() < 0.7:
            self._ask("DELETE", path)

    def _words(self) -> None:
        self._ask("POST", "/tokenize", {"content": self._text(500)})


def as_daemon(folder: Path, *, traced: bool) -> None:
    """Be the daemon: SIGUSR2 writes the allocator's figures, SIGUSR1 marks Python's objects, and then what grew."""
    marked: list[Any] = []
    if traced:
        import tracemalloc

        tracemalloc.start(FRAMES)

        def grown() -> None:
            now = tracemalloc.take_snapshot()
            if not marked:
                marked.append(now)
                (folder / "marked").touch()
                return
            lines = [str(one) for one in now.compare_to(marked[0], "lineno")[:TOP]]
            write("grown", "\n".join(["places whose objects grew most:", *lines]))

        signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=grown).start())

    def write(name: str, text: str) -> None:
        (folder / f".{name}").write_text(text)
        (folder / f".{name}").rename(folder / name)

    def allocator() -> None:
        c = ctypes.CDLL(None)
        c.fopen.restype = ctypes.c_void_p
        file = c.fopen(os.fsencode(folder / ".malloc.xml"), b"w")
        c.malloc_info(0, ctypes.c_void_p(file))
        c.fclose(ctypes.c_void_p(file))
        (folder / ".malloc.xml").rename(folder / "malloc.xml")

    signal.signal(signal.SIGUSR2, lambda *_: threading.Thread(target=allocator).start())
    from ssmd.cli import main as ssmd

    ssmd()


if __name__ == "__main__":
    if sys.argv[1:2] in (["--traced"], ["--as-it-is"]):
        how, place = sys.argv[1:3]
        del sys.argv[1:3]
        as_daemon(Path(place), traced=how == "--traced")
    else:
        main()
