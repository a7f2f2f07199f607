"""Clients that ask at once over HTTP, 1, 4, 8 and 16 of them: tokens/s in all and time to first token, beside
llama.cpp's server.

    benchmarks/clients.py MODEL [--llama-server BINARY --gguf FILE]     a name or a path; FILE is the same model

Each client asks 3 times, one after the other, in each of 3 rounds; the servers take turns at each number of clients.
Every prompt has about 90 tokens and no beginning in common with others, every answer 64: one word for ever. `ssmd
serve` with its store and without, and llama-server with 8 slots, otherwise as they are by default, with as many
threads. All run all the time, but nothing else may: llama.cpp's threads spin at barriers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from daemon_process import DaemonProcess, Reply, ServerProcess, conditions
from llama_server import LlamaServer
from resume import story

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.text.tokenizer import Tokenizer

CLIENTS = (1, 4, 8, 16)
ROUNDS = 3
REQUESTS = 3
TOKENS = 64
PROMPT = 50  # tokens of the story, beside the template's and the salt's
SLOTS = 8
CONTEXT = 1024  # of a slot
WORD = " the"


@dataclass
class Took:
    """The measurements of a number of clients of a server. rates: tokens/s in all, by round."""

    rates: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def cells(self) -> list[str]:
        ordered = sorted(self.ttft_ms)
        late = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
        return [f"{statistics.median(self.rates):.1f}", f"{statistics.median(ordered):,.0f}", f"{late:,.0f}"]


class Crowd:
    """Clients whose requests are new to each server."""

    def __init__(self, bias: dict[str, int]) -> None:
        self._bias, self._asked = bias, itertools.count(1000)

    def ask(self, server: ServerProcess, model: str, times: int) -> list[Reply]:
        """One client: some questions, one after another."""
        return [server.chat(self._cold(), model=model, max_tokens=TOKENS, logit_bias=self._bias) for _ in range(times)]

    def measure(self, server: ServerProcess, clients: int, times: int, took: Took) -> None:
        model = server.get("/v1/models")[1]["data"][0]["id"]
        with ThreadPoolExecutor(clients) as pool:
            began = time.perf_counter()
            replies = [r for rs in pool.map(lambda _: self.ask(server, model, times), range(clients)) for r in rs]
            took.rates.append(len(replies) * TOKENS / (time.perf_counter() - began))
        for reply in replies:
            if (made := reply.usage["completion_tokens"]) != TOKENS:
                raise RuntimeError(f"asked for {TOKENS} tokens, there came {made}: {reply.text!r}")
        took.ttft_ms += [reply.ttft_ms for reply in replies]
        took.prompts += [reply.usage["prompt_tokens"] for reply in replies]

    def _cold(self) -> list[dict[str, str]]:
        """Return a question that differs from all others from its first words on, those of the system prompt."""
        number = next(self._asked)
        return [
            {"role": "system", "content": f"{number} is who you are."},
            {"role": "user", "content": story(PROMPT, f"This is number {number}, read it.")},
        ]


def rows(names: Iterable[str], counts: Sequence[int], took: dict[tuple[int, str], Took]) -> None:
    """Print the table; a ratio is of the first server's tokens/s to another's."""
    first, *others = names
    heads = [f"{name}: tokens/s | TTFT p50, ms | p95" for name in (first, *others)]
    print(f"| clients | {' | '.join(heads)} | {' | '.join(f'ratio to {name}' for name in others)} |")
    print("|" + " --- |" * (1 + 3 * len(heads) + len(others)))
    for count in counts:
        each = {name: took[count, name] for name in (first, *others)}
        ratios = [statistics.median(each[first].rates) / statistics.median(each[n].rates) for n in others]
        cells = [cell for one in each.values() for cell in one.cells()]
        print(f"| {count} | {' | '.join([*cells, *(f'{r:.2f}' for r in ratios)])} |", flush=True)


def main(
    name: str,
    binary: Path | None = None,
    gguf: Path | None = None,
    counts: Sequence[int] = CLIENTS,
    rounds: int = ROUNDS,
    requests: int = REQUESTS,
) -> None:
    path = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "auto")
    artifact = Artifact.open(path)
    word = Tokenizer.open(artifact.file("tokenizer.json")).encode(WORD)[0]
    crowd = Crowd({str(word): 100})
    with tempfile.TemporaryDirectory() as at, ExitStack() as opened:
        folder, threads = Path(at), default_threads()
        servers: dict[str, ServerProcess] = {
            "ssmd": DaemonProcess(path, folder / "stored"),
            "no store": DaemonProcess(path, folder / "unstored", "--no-store"),
        }
        if binary is not None and gguf is not None:
            servers["llama.cpp"] = LlamaServer(
                binary, gguf, folder / "llama", context=CONTEXT, threads=threads, parallel=SLOTS
            )
        for server in servers.values():
            opened.enter_context(server)
            crowd.measure(server, 1, 1, Took())  # what the first request does alone
        print(f"# clients: {artifact.manifest.name}, {artifact.manifest.runtime}; {threads} threads; {conditions()}")
        took: dict[tuple[int, str], Took] = defaultdict(Took)
        for _ in range(rounds):
            for count in counts:
                for of, server in servers.items():
                    crowd.measure(server, count, requests, took[count, of])
        prompts = [n for one in took.values() for n in one.prompts]
        print(f"# {rounds} rounds; prompts of {min(prompts)} to {max(prompts)} tokens, {TOKENS} tokens each")
        if isinstance(peer := servers.get("llama.cpp"), LlamaServer):
            print(f"# llama-server {peer.producer()}, {SLOTS} slots")
        print()
        rows(servers, counts, took)
        print(f"\n{conditions()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's binary; needs --gguf")
    parser.add_argument("--gguf", type=Path, help="the same model for it")
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    if (given.llama_server is None) != (given.gguf is None):
        parser.error("--llama-server and --gguf go together")
    main(given.model, given.llama_server, given.gguf, given.clients, given.rounds)
