"""The cost of an artifact that was not made here: template and tokenizer run in a child process, a first load is tried.

    benchmarks/elsewhere.py [MODEL]     a name or a path; default: smollm2

Medians of 15, ms of wall time, in turn. *Open*: template and tokenizer. *Short*: a question is rendered and tokenised.
*New*: so is a question after 50 turns. *Whole*: all of 1,000 turns is. *First load*, *load*: in a process of its own,
and then in the one that serves; of what was made here there is only the second.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from typing import Any

from daemon_process import conditions

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.machine.child import command
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import get_runtime
from ssmd.text.apart import Texts, opened
from ssmd.text.messages import Message

REPEATS = 15
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def ms(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def open_once(artifact: Artifact, apart: bool) -> None:
    opened(artifact, apart=apart).close()


def said(turns: int) -> list[Message]:
    return [Message(("user", "assistant")[i % 2], f"{i} " + "word " * 40) for i in range(2 * turns - 1)]


def works(texts: Texts) -> Iterator[Callable[[], Any]]:
    """Yield the timed calls."""

    def whole(messages: list[Message]) -> Any:
        return texts.tokenizer.ids(texts.template.render_settled(messages, now=NOW).text)

    def new(messages: list[Message], at: int) -> Any:
        rendered = texts.template.render_after(messages[0], at, messages[at:], now=NOW)
        return rendered and texts.tokenizer.ids(rendered.text)

    short, turns, long = said(1), said(50), said(1000)
    settled = texts.template.render_settled(turns[:-2], now=NOW).settled
    yield lambda: whole(short)
    yield lambda: new(turns, 1 if settled is None else settled.messages)
    yield lambda: whole(long)


def main(model: str) -> None:
    settings = Settings()
    artifact = Artifact.open(resolve(model, settings.models_dir))
    print(conditions())
    print("| | open | short | new | whole |\n| --- | --- | --- | --- | --- |")
    opens = {apart: [ms(partial(open_once, artifact, apart)) for _ in range(REPEATS)] for apart in (False, True)}
    with closing(opened(artifact, apart=False)) as here, closing(opened(artifact, apart=True)) as there:
        times: dict[bool, list[list[float]]] = {False: [], True: []}
        for _ in range(REPEATS):
            for apart, texts in ((False, here), (True, there)):
                times[apart].append([ms(work) for work in works(texts)])
    for apart, name in ((False, "made here"), (True, "from elsewhere")):
        row = [statistics.median(opens[apart]), *map(statistics.median, zip(*times[apart], strict=True))]
        print(f"| {name} | " + " | ".join(f"{one:.2f}" for one in row) + " |")
    device = artifact.manifest.device_class
    trial = command("ssmd.runtime.loading", str(os.getpid()), str(artifact.path), device)
    tries = [ms(lambda: subprocess.run(trial, check=True, capture_output=True)) for _ in range(3)]
    loads = [ms(lambda: get_runtime(artifact.manifest.runtime).load(artifact, device=device).close()) for _ in range(3)]
    print(f"\nFirst load {statistics.median(tries):.0f} ms, load {statistics.median(loads):.0f} ms.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
