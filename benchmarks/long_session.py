"""Does a request cost more the longer its conversation is? One session of a model without a context, turn by turn.

    benchmarks/long_session.py MODEL [--turns 5000] [--tokens 100]

MODEL: the name or folder of an artifact; a tiny Mamba shows the host's own work best. Every request says the whole
conversation again, as OpenAI's clients do. At each length, medians of 21 turns in milliseconds, of a thread's CPU:
reading the client's JSON, planning what is fed (hash, match, render, tokenise, find the state), of that hashing what
the client says and rendering; by the wall's clock: restoring and committing. And what the process holds more than at
the first length. Then a daemon is started on the same store, killed, started again, and asked over HTTP, the longest
conversation and one of 50 turns: time to the first token by the client's clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import queue
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, conditions
from resume import story

from ssmd.api.http.body import parse_object
from ssmd.api.openai.chat import read_chat, to_request
from ssmd.config import Settings
from ssmd.engine.engine import Engine
from ssmd.engine.metrics import Metrics
from ssmd.engine.persist.writer import Writer
from ssmd.engine.request import Delta, Event, Finish
from ssmd.installed import resolve
from ssmd.machine.memory import trim
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import get_runtime
from ssmd.sessions.match import Echo
from ssmd.sessions.store import Store

REPEATS = 21
AT = (50, 500, 1000, 2000, 5000, 10_000)


class Clock:
    """Adds up what calls take. ms: by name, one value a turn."""

    def __init__(self) -> None:
        self.ms: defaultdict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, method: str, name: str, clock: Callable[[], float] = time.thread_time) -> None:
        """Time a method of an object from now on."""
        timed = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return timed(*args, **kwargs)
            finally:
                self.ms[name].append((clock() - started) * 1e3)

        setattr(owner, method, call)

    def median(self, name: str) -> float:
        """Return the median of the last turns."""
        return statistics.median(self.ms[name][-REPEATS:] or [0.0])


def held_mb() -> float:
    """Anonymous resident memory, MB."""
    gc.collect()
    trim()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3


def ask(engine: Engine, clock: Clock, messages: list[dict[str, str]], tokens: int) -> tuple[str, Finish]:
    """One turn, from the client's bytes to the end of its answer."""
    raw = json.dumps({"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0}).encode()
    started = time.thread_time()
    request = to_request(read_chat(parse_object(raw)), engine.program.vocabulary)
    clock.ms["read"].append((time.thread_time() - started) * 1e3)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(request, events.put)
    text = ""
    while not isinstance(event := events.get(), Finish):
        if not isinstance(event, Delta):
            raise RuntimeError(str(event))
        text += event.text
    clock.ms["restore"].append(event.usage.restore_ms)
    return text, event


@contextmanager
def started(model: Path, folder: Path) -> Iterator[tuple[Engine, Writer]]:
    """Yield an engine with a store in a folder."""
    artifact = Artifact.open(model)
    program = get_runtime(artifact.manifest.runtime).load(artifact)
    store = Store.open(folder)
    numbers = Metrics()
    writer = Writer(store, numbers)
    engine = Engine(artifact, program, writer, metrics=numbers.of(artifact.manifest.name))
    engine.start()
    yield engine, writer
    engine.shutdown()
    writer.close()
    store.close()


def grow(engine: Engine, store: Store, turns: int, tokens: int) -> list[dict[str, str]]:
    """A conversation of so many turns in a store, measured on the way; its messages."""
    clock = Clock()
    clock.watch(engine._planner, "plan", "plan")
    for part in ("whole", "after"):
        clock.watch(engine._planner._renderer, part, "render")
    clock.watch(Echo, "of", "hash")
    clock.watch(store, "commit", "commit", time.perf_counter)
    messages: list[dict[str, str]] = []
    before = 0.0
    print(
        "| turns | tokens | read | plan | of that hash | and render | restore | commit | fed | resume | held, MB more |"
    )
    print("| --- " * 11 + "|")
    for turn in range(1, turns + 1):
        messages.append({"role": "user", "content": story(tokens // 2, f"{turn}.")})
        said, done = ask(engine, clock, messages, tokens - tokens // 2)
        messages.append({"role": "assistant", "content": said})
        if turn in AT or turn == turns:
            before = before or held_mb()
            names = ("read", "plan", "hash", "render", "restore", "commit")
            fed = done.usage.prompt_tokens - done.usage.cached_tokens
            print(
                f"| {turn} | {done.usage.prompt_tokens} | {' | '.join(f'{clock.median(n):.2f}' for n in names)} "
                f"| {fed} | {done.usage.resume} | {held_mb() - before:.1f} |",
                flush=True,
            )
    return messages


def over_http(model: Path, folder: Path, messages: list[dict[str, str]], tokens: int) -> None:
    """Time to the first token after a SIGKILL, of the whole conversation and of its beginning."""
    print(
        "\n| turns | first after SIGKILL, ms | then, ms (median) | resume | cached of prompt |\n" + "| --- " * 5 + "|"
    )
    for turns in (50, len(messages) // 2):
        talk = [*messages[: 2 * turns], {"role": "user", "content": story(tokens // 2, "And then?")}]
        daemon = DaemonProcess(model, folder)
        daemon.start()
        daemon.kill()
        daemon.start()
        first, *others = [daemon.chat(talk, max_tokens=8) for _ in range(1 + 5)]
        daemon.stop()
        usage = first.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        then = statistics.median(r.ttft_ms for r in others)
        print(
            f"| {turns} | {first.ttft_ms:.0f} | {then:.0f} | {usage['ssmd']['resume']} "
            f"| {cached} of {usage['prompt_tokens']} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=100)
    asked = parser.parse_args()
    settings = Settings()
    model = resolve(asked.model, settings.models_dir, settings.runtime, settings.device)
    print(f"# long session: {model.parent.name}, {asked.tokens} tokens a turn; {conditions()}; medians of {REPEATS}\n")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir(mode=0o700)
        with started(model, data) as (engine, writer):
            messages = grow(engine, writer.store, asked.turns, asked.tokens)
        over_http(model, data, messages, asked.tokens)


if __name__ == "__main__":
    main()
