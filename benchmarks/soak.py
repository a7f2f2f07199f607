"""A daemon under hours of mixed and odd traffic: its memory, descriptors, threads and disk, a line each minute.

    benchmarks/soak.py [MODEL] [--load mixed|costly] [--minutes 60] [--rounds 1] [--idle 0] [--clients 6] [--seed S]
                       [--every 60] [--trace] [--keep DIR]

MODEL: an artifact's name or path, default smollm2. In the mixed load clients chat, go on, go away, repeat requests, and
ask for shapes, new grammars and tools, by all protocols. They send what is refused, list, rename, export and remove
sessions, and have the model unloaded. The costly load is grammars near the limits of a trial, each a new one, and long
prompts that are left. The quota is reached early, so that states are replaced all the time. A round is --minutes of
load, then --idle minutes without a request.

Every --every seconds the daemon's figures are printed: resident memory (anonymous and of files), and of glibc's
allocator what it has of the system, what of it is free, and its arenas. Below the table stand the objects of ssmd's
classes and the sizes of what they hold, where these grew since the first tenth of the run. The last line has the growth
of memory over the second half, in MB an hour, by least squares. It means little for less than an hour.

--trace also has tracemalloc count Python's objects, which costs half of the speed. The places that grew most between a
tenth of the run and its end are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
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
from collections import Counter, deque
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, conditions

QUOTA = "64MB"
TOP = 15  # places that are printed
FRAMES = 1  # kept of each object: the place that made it
WORDS = ("harbour", "lamp", "bread", "winter", "signal", "river", "engine", "letter", "garden", "clock")
SHAPE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "integer"}}}
SIZED = (dict, list, set, deque)  # what the sizes are counted of
PIECES = ("[a-f]{2,9}", "(red|green|blue)+", "\\d{1,4}", "x?y*z", "[^,]{1,20}")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {**SHAPE, "required": ["name"]}}}


def main() -> None:
    """Run the traffic and print the figures. Exit code 1 after a 5xx but 503, or if the daemon did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--load", choices=("mixed", "costly"), default="mixed")
    parser.add_argument("--minutes", type=float, default=60.0, help="of load, in each round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--idle", type=float, default=0.0, help="minutes without a request, after each round's load")
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
    rounds = f"{options.rounds} x {options.minutes:g} minutes of {options.load} load and {options.idle:g} without any"
    print(f"{conditions()}; {options.model}, {options.clients} clients, {rounds}, quota {QUOTA}")
    heads = ["minutes", "load", "requests", "anonymous MB", "of files MB", "allocator MB", "free of it MB", "arenas"]
    heads += ["fds", "threads", "disk MB"]
    print("\n| " + " | ".join(heads) + " |\n| ---: | --- " + "| ---: " * (len(heads) - 2) + "|")
    how = "--traced" if options.trace else "--as-it-is"
    program = (sys.executable, str(Path(__file__).absolute()), how, str(folder))
    with DaemonProcess(options.model, folder / "data", "--quota", QUOTA, program=program) as daemon:
        counts: Counter[str] = Counter()
        model = daemon.get("/v1/models")[1]["data"][0]["id"]
        traffic = [
            Traffic(daemon.port, model, f"{options.seed}:{i}", counts, options.load) for i in range(options.clients)
        ]
        begun = time.monotonic()
        whole = options.rounds * (options.minutes + options.idle) * 60
        figures: list[tuple[float, float]] = []
        first: Counter[str] = Counter()
        last: Counter[str] = Counter()
        end = begun
        row(daemon, folder, 0, "", counts)
        for part in ("load", "") * options.rounds:
            end += 60 * (options.minutes if part else options.idle)
            over = threading.Event()
            threads = [threading.Thread(target=one.until, args=(over,)) for one in traffic if part]
            for thread in threads:
                thread.start()
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(options.every, left))
                passed = time.monotonic() - begun
                if not first and passed >= whole / 10:
                    first = objects(daemon, folder)
                    if options.trace:
                        asked_for(daemon, folder, signal.SIGUSR1, "marked")
                figures.append((passed / 3600, row(daemon, folder, passed, part, counts)))
            over.set()
            for thread in threads:
                thread.join(120)
        last = objects(daemon, folder)
        if options.trace and asked_for(daemon, folder, signal.SIGUSR1, "grown"):
            print(f"\n{(folder / 'grown').read_text()}")
        code = daemon.stop(60)
    grown = [f"{name} {first[name]} -> {n}" for name, n in last.most_common() if n > first[name] + 20]
    print("\n" + "; ".join(["objects and sizes that grew:", *grown]))
    print("\n" + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())) + f"; exit code {code}")
    print(f"anonymous memory over the second half: {slope(figures[len(figures) // 2 :]):+.1f} MB an hour")
    return int(code != 0 or any(what.startswith("5") and what != "503" for what in counts))


def row(daemon: DaemonProcess, folder: Path, passed: float, part: str, counts: Counter[str]) -> float:
    """Print the present figures. Returns the anonymous memory in MB."""
    assert daemon.process is not None
    proc = Path(f"/proc/{daemon.process.pid}")
    anonymous, of_files = daemon.resident_mb()
    held, free, arenas = float("nan"), float("nan"), 0
    if asked_for(daemon, folder, signal.SIGUSR2, "malloc.xml"):
        held, free, arenas = allocator_mb((folder / "malloc.xml").read_text())
    disk = 0
    for one in (folder / "data").rglob("*"):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            disk += one.stat().st_size if one.is_file() else 0
    fds, threads = (len(list((proc / name).iterdir())) for name in ("fd", "task"))
    print(
        f"| {passed / 60:.1f} | {part} | {sum(counts.values())} | {anonymous:.1f} | {of_files:.1f} | {held:.1f} "
        f"| {free:.1f} | {arenas} | {fds} | {threads} | {disk / 1e6:.1f} |",
        flush=True,
    )
    return anonymous


def objects(daemon: DaemonProcess, folder: Path) -> Counter[str]:
    """Return the number of objects of each class of ssmd, and the largest size of each thing they hold."""
    return Counter(json.loads((folder / "objects.json").read_text()))


def asked_for(daemon: DaemonProcess, folder: Path, number: signal.Signals, name: str) -> bool:
    """Have the daemon write a file, by a signal. Returns True when it is there."""
    assert daemon.process is not None
    (folder / name).unlink(missing_ok=True)
    daemon.process.send_signal(number)
    deadline = time.monotonic() + 60
    while not (folder / name).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return (folder / name).exists()


def allocator_mb(text: str) -> tuple[float, float, int]:
    """Return (MB that glibc has of the system, MB of it that are free, arenas), from the text of `malloc_info`."""
    whole = text[text.rindex("</heap>") :]  # the totals of all arenas stand behind them

    def total(pattern: str) -> float:
        return sum(float(size) for size in re.findall(pattern, whole)) / 1e6

    mapped = total(r'<total type="mmap" count="\d+" size="(\d+)"')
    free = total(r'<total type="(?:fast|rest)" count="\d+" size="(\d+)"')
    return total(r'<system type="current" size="(\d+)"') + mapped, free, text.count("<heap nr=")


def slope(figures: list[tuple[float, float]]) -> float:
    """Return the slope of a straight line through points, by least squares; nan for fewer than two points."""
    if len(figures) < 2:
        return float("nan")
    n = len(figures)
    x, y = (sum(one[i] for one in figures) / n for i in (0, 1))
    return sum((a - x) * (b - y) for a, b in figures) / sum((a - x) ** 2 for a, _ in figures)


class Traffic:
    """One client: random requests of a seed, one after the other. counts: answers by status, of all clients."""

    def __init__(self, port: int, model: str, seed: str, counts: Counter[str], load: str) -> None:
        self._port, self._model, self._counts, self._load = port, model, counts, load
        self._rng = random.Random(seed)
        self._sessions: list[str] = []
        self._said: list[dict[str, str]] = []

    def until(self, over: threading.Event) -> None:
        kinds = [self._chat] * 6 + [self._leave, self._repeat, self._shape, self._tools, self._refused, self._raw]
        kinds += [self._lists, self._changes, self._words, self._grammar, self._long]
        kinds += [self._responses, self._conversations, self._messages, self._ollama] * 2 + [self._unload]
        if self._load == "costly":
            kinds = [self._costly] * 3 + [self._long]
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

    def _grammar(self) -> None:
        """Ask for an answer by a new grammar of any kind."""
        word, number = self._text(3), self._rng.randrange(1_000_000)
        pattern = "".join(self._rng.choices(PIECES, k=3)) + f"-{number}"
        some: list[dict[str, Any]] = [
            {"guided_regex": pattern},
            {"json_schema": {"type": "object", "properties": {word: {"type": "string", "pattern": f"^{pattern}$"}}}},
            {"json_schema": {"type": "integer", "multipleOf": 1 + number % 50_000}},
            {"grammar": f'root ::= "{word}" [0-9]+ ("," [a-z]+)*'},
            {"grammar": f'start: "{word}" NUMBER+\nNUMBER: /[0-9]{{1,{1 + number % 30}}}/\n'},
            {"guided_choice": [word, f"{word} {number}"]},
        ]
        self._completion(messages=[{"role": "user", "content": word}], **self._rng.choice(some))

    def _costly(self) -> None:
        """Ask for an answer by a new grammar that takes its trial long, or that meets a limit of it."""
        number = self._rng.randrange(1_000_000)
        pattern = "".join(self._rng.choices(PIECES, k=2)) + f"-{number}"
        patterns = [{"pattern": f"(.)*{self._rng.choice('abcdef')}(.){{{i}}}{pattern}?"} for i in range(12)]
        names = {f"{self._rng.choice(WORDS)}{i}": {"type": "string", "pattern": f"^{pattern}$"} for i in range(200)}
        some: list[Any] = [
            {"type": "integer", "multipleOf": 50_000 + number % 150_000},
            {"type": "string", "allOf": patterns[: self._rng.randint(6, 12)]},
            {"type": "object", "properties": names},
            {"type": "array", "items": {"type": "string", "pattern": f"^([a-z]{{1,{number % 900}}},?)*{number}$"}},
        ]
        messages = [{"role": "user", "content": "x"}]
        self._completion(messages=messages, json_schema=self._rng.choice(some), store=False)

    def _long(self) -> None:
        """Send a prompt as long as the body may be, or nearly so, and leave before it is read."""
        content = self._text(10) + " " + "word " * self._rng.randint(1_000, 300_000)
        raw = json.dumps(self._body(messages=[{"role": "user", "content": content}], stream=True)).encode()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)) as connection:
            connection.request("POST", "/v1/chat/completions", raw, {"content-type": "application/json"})
            time.sleep(self._rng.random())
        self._counts["left"] += 1

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

    def _responses(self) -> None:
        """Ask twice, the second time after the first answer, by its id. Perhaps leave, and remove the first."""
        body = self._body(input=self._text(), instructions=self._text(), store=self._rng.random() < 0.7)
        del body["max_tokens"]
        status, answer = self._ask("POST", "/v1/responses", {**body, "max_output_tokens": 12})
        if status != 200 or not body["store"]:
            return
        first = json.loads(answer)["id"]
        more = {**body, "max_output_tokens": 60, "previous_response_id": first, "stream": True}
        self._ask("POST", "/v1/responses", more, most=self._rng.choice([-1, 300]))
        if self._rng.random() < 0.5:
            self._ask("DELETE", f"/v1/responses/{first}")

    def _conversations(self) -> None:
        item = {"role": "user", "content": self._text()}
        status, answer = self._ask("POST", "/v1/conversations", {"items": [item]})
        if status != 200:
            return
        one = json.loads(answer)["id"]
        body = {"model": self._model, "input": self._text(), "max_output_tokens": 12, "conversation": one}
        for _ in range(2):
            self._ask("POST", "/v1/responses", body)
        self._ask("GET", f"/v1/conversations/{one}/items")
        if self._rng.random() < 0.7:
            self._ask("DELETE", f"/v1/conversations/{one}")

    def _messages(self) -> None:
        marked = {"type": "text", "text": self._text(), "cache_control": {"type": "ephemeral"}}
        tool = {"name": "look", "input_schema": SHAPE}
        said = [{"role": "user", "content": self._text()}]
        more = {"tools": [tool], "tool_choice": {"type": self._rng.choice(["auto", "any"])}}
        body = self._body(system=[marked], messages=said, stream=self._rng.random() < 0.5)
        self._ask("POST", "/v1/messages", {**body, **(more if self._rng.random() < 0.5 else {})})

    def _ollama(self) -> None:
        said = [{"role": "user", "content": self._text()}]
        options = {"num_predict": self._rng.randint(1, 24)}
        stream = self._rng.random() < 0.7
        body = {"model": self._model, "messages": said, "options": options, "stream": stream}
        self._ask("POST", "/api/chat", body, most=self._rng.choice([-1, 200]) if stream else -1)

    def _unload(self) -> None:
        if self._rng.random() < 0.3:
            self._ask("POST", f"/ssmd/v1/models/{self._model}/unload", {})

    def _words(self) -> None:
        self._ask("POST", "/tokenize", {"content": self._text(500)})


def sizes() -> Counter[str]:
    """Return the number of this process's objects of each class of ssmd, and the largest size of what they hold."""
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if kind is asyncio.Task:
            found["asyncio.Task"] += not one.done()
        if not str(getattr(kind, "__module__", "")).startswith("ssmd."):
            continue
        name = f"{kind.__module__}.{kind.__qualname__}"
        found[name] += 1
        for field, value in [*getattr(one, "__dict__", {}).items()]:
            if isinstance(value, SIZED):
                found[f"{name}.{field}"] = max(found[f"{name}.{field}"], len(value))
    return found


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
        write("objects.json", json.dumps(sizes()))
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
