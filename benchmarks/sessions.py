"""What a conversation costs to take up again: append, regenerate, edit, another one and back, fork; killed before each.

For each history: SIGKILL, restart, a second of rest, the request. TTFT by the client's clock, beside the bare runtime's
time for the tokens that were fed, measured in the same run: what is left is what resuming costs.

    benchmarks/sessions.py [MODEL [HISTORY…]]     default: smollm2 500 1900
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from daemon_process import DaemonProcess, Reply, conditions
from resume import story

from ssmd import buckets
from ssmd.artifact import Artifact
from ssmd.config import Settings
from ssmd.models import resolve
from ssmd.runtime import Program, get_runtime
from ssmd.text.tokenizer import Tokenizer

REPEATS = 5
REST_S = 1.0
Messages = list[dict[str, str]]


@dataclass
class Measured:
    """A request, and the bare runtime right after it: `bare_ms` for as many tokens in the daemon's own buckets."""

    reply: Reply
    bare_ms: float


class Bare:
    """The runtime alone, in this process."""

    def __init__(self, program: Program) -> None:
        self._program = program
        for n in (1, *program.buckets):
            self.ms(n)  # the first time makes its buffers

    def ms(self, tokens: int) -> float:
        handle = self._program.new_state()
        started = time.perf_counter()
        for n in buckets.plan(tokens, self._program.buckets):
            if n == 1:
                self._program.decode([handle], [5])
            else:
                self._program.prefill(handle, [1 + i % 100 for i in range(n)])
        elapsed = (time.perf_counter() - started) * 1e3
        self._program.release(handle)
        return elapsed


def say(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Talk:
    """A conversation of about `history` tokens whose requests are repeated after a SIGKILL each."""

    def __init__(self, daemon: DaemonProcess, history: int, bias: dict[str, int], salt: str) -> None:
        self.daemon, self.bias = daemon, bias
        # Two turns: a long one and a short one, which is what is edited.
        self.messages: Messages = [say(story(history - 130, f"Read this, {salt}."))]
        self.answer()
        self.messages.append(say(story(40, "The last question.")))
        self.answer()

    def ask(self, messages: Messages, **fields: object) -> Reply:
        return self.daemon.chat(messages, max_tokens=8, logit_bias=self.bias, **fields)

    def answer(self) -> None:
        self.messages.append({"role": "assistant", "content": self.ask(self.messages).text})


def restarted(daemon: DaemonProcess) -> None:
    daemon.kill()
    daemon.start()
    time.sleep(REST_S)


def measure(daemon: DaemonProcess, bare: Bare, request: Callable[[int], Reply]) -> list[Measured]:
    found = []
    for i in range(REPEATS):
        restarted(daemon)
        reply = request(i)
        fed = reply.usage["prompt_tokens"] - reply.usage["prompt_tokens_details"]["cached_tokens"]
        found.append(Measured(reply, bare.ms(fed)))
    return found


def operations(
    daemon: DaemonProcess, bare: Bare, history: int, bias: dict[str, int]
) -> Iterator[tuple[str, list[Measured]]]:
    talk = Talk(daemon, history, bias, f"number {history}")
    other = Talk(daemon, 300, bias, "another one")

    def back(i: int) -> Reply:
        other.ask([*other.messages, say(story(40, f"Meanwhile {i}."))])
        restarted(daemon)
        return talk.ask([*talk.messages, say(story(40, f"Back {i}."))])

    def forked(i: int) -> Reply:
        session = talk.ask([*talk.messages, say("Where are we?")]).session
        fork = daemon.post(f"/ssmd/v1/sessions/{session}/fork", {})["id"]
        restarted(daemon)
        return talk.ask([*talk.messages, say(story(40, f"Fork {i}."))], session=fork)

    def asking(*more: str, drop: int = 0) -> Callable[[int], Reply]:
        kept = talk.messages[: len(talk.messages) - drop]
        return lambda i: talk.ask([*kept, *(say(story(40, f"{word} {i}.")) for word in more)])

    yield "append", measure(daemon, bare, asking("More"))
    yield "regenerate", measure(daemon, bare, asking(drop=1))
    yield "edit last", measure(daemon, bare, asking("Edited", drop=2))
    yield "other and back", measure(daemon, bare, back)
    yield "fork", measure(daemon, bare, forked)


def main(name: str, histories: list[int]) -> None:
    path = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
    artifact = Artifact.open(path)
    program = get_runtime(artifact.manifest.runtime).load(artifact)
    bare = Bare(program)
    word = Tokenizer.open(artifact.file("tokenizer.json")).encode(" the")[0]
    bias = {str(word): 100}  # one word for ever: every token has a text, whatever the weights
    print(f"# sessions: {artifact.manifest.name}, context {program.context}, {program.producer}; {conditions()};")
    print(f"# medians of {REPEATS}, SIGKILL and restart and {REST_S:g} s of rest before each\n")
    print("| history | operation | fed / cached | restore ms | TTFT ms | bare ms | resuming costs ms | limit |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for history in histories:
        with tempfile.TemporaryDirectory() as folder, DaemonProcess(name, Path(folder) / "data") as daemon:
            for operation, found in operations(daemon, bare, history, bias):
                usage = found[-1].reply.usage
                prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
                ttft = statistics.median(m.reply.ttft_ms for m in found)
                restore = statistics.median(m.reply.usage["ssmd"]["restore_ms"] for m in found)
                alone = statistics.median(m.bare_ms for m in found)
                cost = statistics.median(m.reply.ttft_ms - m.bare_ms for m in found)
                limit = (150 if operation == "regenerate" else 100) + 40 * prompt / 10_000
                numbers = (restore, ttft, alone, cost, limit)
                cells = [str(prompt), operation, f"{prompt - cached} / {cached}", *(f"{x:.0f}" for x in numbers)]
                print(f"| {' | '.join(cells)} |", flush=True)
            sizes = daemon.get("/ssmd/v1/sessions")[1]["data"]
            for size in sizes:
                print(f"{size['bytes'] / 1e6:.1f} MB of states in {size['turn_count']} turns")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2", [int(h) for h in sys.argv[2:]] or [500, 1900])
