"""The cost of continuing a conversation: append, regenerate, edit, another one and back, fork; killed before each.

For each history: SIGKILL, restart, a second of rest, the request. TTFT by the client's clock, beside the bare runtime's
time for the tokens that were fed, measured in the same run: what is left is what resuming costs.

    benchmarks/session_operations.py [MODEL [HISTORY…]]     default: smollm2 500 1900

With `--llama-server BINARY --gguf FILE`, the same talk with that peer after each history, in a table of its own. FILE
is the same model; what the peer does not restore it reads again. Built with OpenMP, its threads spin at every barrier:
beside other work it is many times slower (OMP_WAIT_POLICY=PASSIVE spares some of that). Compare on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from daemon_process import DaemonProcess, Reply, ServerProcess, conditions
from llama_server import LlamaServer
from resume import story

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.model.state import State
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program, get_runtime
from ssmd.text.tokenizer import Tokenizer

REPEATS = 5
REST_S = 1.0
LONG = 4000  # tokens of history that a peer reads again only once: it takes a minute
WORD = " the"
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
            self.ms(n, 0)  # the first time makes its buffers

    def ms(self, tokens: int, position: int) -> float:
        """Time of feeding `tokens` tokens after `position` others, ms. The state's contents make no difference: it is
        zero.
        """
        tensors = {t.name: np.zeros(t.shape_at(position), t.numpy_dtype) for t in self._program.spec.tensors}
        handle = self._program.restore(State(position, 0, tensors))
        started = time.perf_counter()
        for n in buckets.pieces(position, position + tokens, self._program.buckets):
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

    def __init__(self, daemon: ServerProcess, history: int, bias: dict[str, int], salt: str) -> None:
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


def restarted(daemon: ServerProcess) -> None:
    daemon.kill()
    daemon.start()
    time.sleep(REST_S)


def measure(daemon: DaemonProcess, bare: Bare, request: Callable[[int], Reply]) -> list[Measured]:
    found = []
    for i in range(REPEATS):
        restarted(daemon)
        reply = request(i)
        prompt, cached = tokens(reply)
        found.append(Measured(reply, bare.ms(prompt - cached, cached)))
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


def beside(server: LlamaServer, history: int, ours: dict[str, float]) -> None:
    """The same talk with a peer that restores where it is told to, as a table beside `ours`: TTFT ms by operation."""
    talk = Talk(server, history, {WORD: 100}, f"number {history}")
    save_ms, size = server.save("talk")
    print(f"\nllama-server {server.producer()}; {conditions()}")
    print(f"{size / 1e6:.1f} MB of a slot saved by hand in {save_ms:.0f} ms; its TTFT is without the restore by hand\n")
    print("| history | operation | slot | runs | fed / cached | restore ms | TTFT ms | ssmd TTFT ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")

    def more(i: int) -> Messages:
        return [*talk.messages, say(story(40, f"More {i}."))]

    def again(i: int) -> Messages:
        return talk.messages[:-1]

    for operation, restored, ask in (("append", True, more), ("regenerate", True, again), ("append", False, more)):
        replies: list[Reply] = []
        restores: list[float] = []
        rereads = operation == "regenerate" or not restored
        for i in range(1 if rereads and history > LONG else REPEATS):
            restarted(server)
            if restored:
                restores.append(server.restore("talk"))
            replies.append(talk.ask(ask(i)))
        prompt, cached = tokens(replies[-1])
        ttft = statistics.median(r.ttft_ms for r in replies)
        slot, restore = ("restored", f"{statistics.median(restores):.0f}") if restores else ("not restored", "")
        cells = [str(prompt), operation, slot, str(len(replies)), f"{prompt - cached} / {cached}", restore]
        cells += [f"{ttft:.0f}", f"{ours[operation]:.0f}", f"{ttft / ours[operation]:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def tokens(reply: Reply) -> tuple[int, int]:
    """(of the prompt, of those cached), as the server counts."""
    return reply.usage["prompt_tokens"], reply.usage["prompt_tokens_details"]["cached_tokens"]


def main(name: str, histories: list[int], llama_server: Path | None, gguf: Path | None) -> None:
    path = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
    artifact = Artifact.open(path)
    program = get_runtime(artifact.manifest.runtime).load(artifact)
    bare = Bare(program)
    word = Tokenizer.open(artifact.file("tokenizer.json")).encode(WORD)[0]
    bias = {str(word): 100}  # one word for ever: every token has a text, whatever the weights
    print(f"# sessions: {artifact.manifest.name}, context {program.context}, {program.producer}; {conditions()};")
    print(f"# medians of {REPEATS}, SIGKILL and restart and {REST_S:g} s of rest before each")
    context = program.context or 12_288  # a pure state-space model has no limit, the peer wants one
    for history in histories:
        ttfts: dict[str, float] = {}
        print("\n| history | operation | fed / cached | restore ms | TTFT ms | bare ms | resuming costs ms | limit |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        with tempfile.TemporaryDirectory() as folder, DaemonProcess(name, Path(folder) / "data") as daemon:
            for operation, found in operations(daemon, bare, history, bias):
                prompt, cached = tokens(found[-1].reply)
                ttfts[operation] = ttft = statistics.median(m.reply.ttft_ms for m in found)
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
        if llama_server is None or gguf is None:
            continue
        with (
            tempfile.TemporaryDirectory() as folder,
            LlamaServer(llama_server, gguf, Path(folder), context=context, threads=default_threads()) as server,
        ):
            beside(server, history, ttfts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("history", nargs="*", type=int, default=[500, 1900], help="tokens")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's binary; needs --gguf")
    parser.add_argument("--gguf", type=Path, help="the same model for it")
    asked = parser.parse_args()
    if (asked.llama_server is None) != (asked.gguf is None):
        parser.error("--llama-server and --gguf go together")
    main(asked.model, asked.history, asked.llama_server, asked.gguf)
