"""The time to first token of one conversation over each protocol, in one run, beside that of chat completions.

    benchmarks/protocols.py [MODEL] [--rounds 15] [--tokens 1500]     MODEL: name or path; default: smollm2

A round asks each protocol, in an order that rotates, for a first turn of about `tokens` new tokens and for the next
turn, which goes on from its state. TTFT is by the client's clock, from the request's first byte to the first event with
text. *ratio*: the median of the rounds' ratios to chat.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, conditions
from resume import story

from ssmd.config import Settings
from ssmd.installed import resolve

Fields = dict[str, Any]
SYSTEM = "You are a helpful assistant."
ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Protocol:
    """A protocol. body: of a request with messages. text: matches an event's text, in JSON."""

    path: str
    body: Callable[[str, list[Fields]], Fields]
    text: re.Pattern[bytes]


def _chat(model: str, messages: list[Fields]) -> Fields:
    system = {"role": "system", "content": SYSTEM}
    return {"model": model, "messages": [system, *messages], "max_tokens": ANSWER_TOKENS, "temperature": 0}


def _responses(model: str, messages: list[Fields]) -> Fields:
    body = {"model": model, "instructions": SYSTEM, "input": messages, "temperature": 0}
    return {**body, "max_output_tokens": ANSWER_TOKENS}


def _messages(model: str, messages: list[Fields]) -> Fields:
    body = {"model": model, "system": SYSTEM, "messages": messages, "temperature": 0}
    return {**body, "max_tokens": ANSWER_TOKENS}


def _ollama(model: str, messages: list[Fields]) -> Fields:
    system = {"role": "system", "content": SYSTEM}
    options = {"num_predict": ANSWER_TOKENS, "temperature": 0}
    return {"model": model, "messages": [system, *messages], "options": options}


_TEXT = rb'"((?:[^"\\]|\\.)+)"'
PROTOCOLS = {
    "chat": Protocol("/v1/chat/completions", _chat, re.compile(rb'"content": ?' + _TEXT)),
    "responses": Protocol("/v1/responses", _responses, re.compile(rb'output_text\.delta"[^\n]*"delta": ?' + _TEXT)),
    "messages": Protocol("/v1/messages", _messages, re.compile(rb'text_delta", ?"text": ?' + _TEXT)),
    "ollama": Protocol("/api/chat", _ollama, re.compile(rb'"content": ?' + _TEXT)),
}


def timed(daemon: DaemonProcess, protocol: Protocol, body: Fields) -> tuple[float, str]:
    """Stream an answer. Returns the ms to its first text, and the whole text. Raises RuntimeError if there is none."""
    raw = json.dumps({**body, "stream": True})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=600)) as connection:
        started = time.perf_counter()
        connection.request("POST", protocol.path, raw, {"content-type": "application/json"})
        response = connection.getresponse()
        found, first_ms = b"", 0.0
        while part := response.read1(1 << 16):
            found += part
            if not first_ms and protocol.text.search(found):
                first_ms = (time.perf_counter() - started) * 1e3
    if response.status != 200 or not first_ms:
        raise RuntimeError(f"{protocol.path} was answered with {response.status}: {found.decode()[:500]}")
    return first_ms, "".join(json.loads(b'"' + one + b'"') for one in protocol.text.findall(found))


def measure(daemon: DaemonProcess, rounds: int, tokens: int) -> dict[str, list[tuple[float, float]]]:
    """Return the ms of both turns of each round, by protocol. The round that warms up is left out."""
    model = daemon.get("/v1/models")[1]["data"][0]["id"]
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    names = [*PROTOCOLS]
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            protocol = PROTOCOLS[name]
            messages = [{"role": "user", "content": story(tokens, f"Round {number}, {names.index(name)}.")}]
            first, answer = timed(daemon, protocol, protocol.body(model, messages))
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on, please."}]
            following, _ = timed(daemon, protocol, protocol.body(model, messages))
            if number:
                times[name].append((first, following))
    return times


def show(times: dict[str, list[tuple[float, float]]]) -> None:
    print("| protocol | first turn, ms | ratio | next turn, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for name, rounds in ((name, times[name]) for name in PROTOCOLS):
        cells = [name]
        for turn in (0, 1):
            ratios = [one[turn] / chat[turn] for one, chat in zip(rounds, times["chat"], strict=True)]
            cells += [f"{statistics.median(one[turn] for one in rounds):.1f}", f"{statistics.median(ratios):.3f}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1_500, help="of a first turn's prompt, about")
    asked = parser.parse_args()
    settings, named = Settings(), Path(asked.model)
    artifact = named if named.exists() else resolve(asked.model, settings.models_dir, settings.runtime, settings.device)
    print(f"# protocols: {artifact.parent.name}, {artifact.name}; {asked.rounds} rounds; {conditions()}\n", flush=True)
    with tempfile.TemporaryDirectory() as at, DaemonProcess(artifact, Path(at) / "data") as daemon:
        show(measure(daemon, asked.rounds, asked.tokens))


if __name__ == "__main__":
    main()
