"""The cost of reading and rendering a whole conversation before any look-up, at 50 turns and at 5,000.

    benchmarks/rendering.py [TURNS…]     default: 50 5000

A turn is a question and an answer of 50 tokens each, about 200 characters. CPU time of the thread, ms, medians. *Read*:
from the request's bytes to its messages. *Whole*: all is rendered. *New*: a question is rendered after the turns before
it, which were settled. "-": the template is not proven to only append, so that all is rendered.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from daemon_process import conditions

from ssmd.api.http.body import parse_object
from ssmd.api.openai.chat import read_chat, to_request
from ssmd.model.artifact import SpecialTokens
from ssmd.text.messages import Message
from ssmd.text.template import ChatTemplate

TEMPLATES = Path(__file__).parents[1] / "tests" / "data" / "templates"
NAMES = ("smollm2", "llama3", "falcon-h1", "granite4", "lfm2", "qwen3")
REPEATS = 7
NEW_MS, WHOLE_MS = 60, 400  # at 5,000 turns, reading included
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def cpu_ms(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        times.append((time.thread_time() - started) * 1e3)
    return statistics.median(times)


def body(turns: int) -> bytes:
    """Return the request that asks the last of so many questions."""
    said = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 40} for i in range(2 * turns - 1)]
    return json.dumps({"model": "m", "messages": said}).encode()


def read(raw: bytes) -> tuple[Message, ...]:
    return to_request(read_chat(parse_object(raw)), vocabulary=1000).messages


def main(counts: list[int]) -> None:
    print(conditions())
    print("| turns | body MB | template | read | whole | read + whole | new | read + new |\n" + "| --- " * 8 + "|")
    for turns in counts:
        raw = body(turns)
        reading, messages = cpu_ms(partial(read, raw)), read(raw)
        for name in NAMES:
            template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SpecialTokens(bos="<s>", eos="</s>"))
            whole = cpu_ms(partial(template.render, messages, now=NOW))
            row = f"| {turns:,} | {len(raw) / 1e6:.2f} | {name} | {reading:.1f} | {whole:.1f} | {reading + whole:.1f} |"
            settled = template.render_settled(messages[:-2], now=NOW).settled
            if settled is None:
                print(f"{row} - | - |", flush=True)
                continue
            at = settled.messages
            new = cpu_ms(partial(template.render_after, messages[0], at, messages[at:], now=NOW))
            print(f"{row} {new:.2f} | {reading + new:.1f} |", flush=True)
    print(f"\nGoals at 5,000 turns: read + new {NEW_MS} ms, read + whole {WHOLE_MS} ms.")


if __name__ == "__main__":
    main([int(turns) for turns in sys.argv[1:]] or [50, 5000])
