"""Does the time to continue a conversation grow with its history? TTFT after SIGKILL and restart, against re-reading.

For each model and history: a first turn; then, five times: SIGKILL, restart, the client re-sends everything plus a
new message of about 40 tokens. Re-reading is the same prompt length with nothing cached, in the same run.

    benchmarks/resume.py [MODEL…] [--histories 250,1000,1900] [--append 40] [--repeats 5] [--loaded]

MODEL: names or paths of artifacts; default: smollm2. With --loaded the request comes when the model is loaded again,
and the start of the process and the load have columns of their own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from daemon_process import DaemonProcess, Reply, conditions

HISTORIES = (250, 1000, 1900)
REPEATS = 5
SENTENCES = (
    "The river rose in the night and took the lower bridge with it.",
    "Nobody in the village could say how old the mill was.",
    "She counted the boats twice and wrote the number down.",
    "A letter came from the coast, but it was addressed to someone else.",
    "In the morning the frost had drawn ferns on every window.",
    "He kept the seeds in a tin box above the stove.",
)
TOKENS_A_SENTENCE = 13.0


def story(tokens: int, salt: str) -> str:
    """About `tokens` tokens of plain English that begin with `salt`."""
    n = max(1, round(tokens / TOKENS_A_SENTENCE))
    return salt + " " + " ".join(SENTENCES[i % len(SENTENCES)] for i in range(n))


def median(values: list[float]) -> float:
    return statistics.median(values)


def load_ms(daemon: DaemonProcess) -> float:
    """Wait until the daemon's model is loaded. Returns the ms that the load took, by the daemon's clock."""
    model = daemon.get("/v1/models")[1]["data"][0]["id"]
    while (row := daemon.post(f"/ssmd/v1/models/{model}/load", {}))["state"] != "loaded":
        time.sleep(0.02)
    return float(row["load_ms"])


def measure(
    model: str, history: int, folder: Path, *, append: int = 40, repeats: int = REPEATS, loaded: bool = False
) -> tuple[list[Reply], list[Reply], list[tuple[float, float]]]:
    """(resumed turns, re-read turns, ms of each start and load if the requests wait for them)"""
    with DaemonProcess(model, folder / f"data-{history}") as daemon:
        question = {"role": "user", "content": story(history - 30 - append, "Read this.")}
        first = daemon.chat([question], max_tokens=16)
        talk = [question, {"role": "assistant", "content": first.text}]
        resumed, waits = [], []
        for i in range(repeats):
            daemon.kill()
            daemon.start()
            if loaded:
                waits.append((daemon.healthy_ms, load_ms(daemon)))
            said = {"role": "user", "content": story(append, f"Question {i}.")}
            resumed.append(daemon.chat([*talk, said], max_tokens=8))
        reread = [
            daemon.chat(
                [{"role": "user", "content": story(history - 20, f"Again, number {i}.")}], max_tokens=8, store=False
            )
            for i in range(repeats)
        ]
        return resumed, reread, waits


def main(
    models: Sequence[str],
    histories: Sequence[int] = HISTORIES,
    append: int = 40,
    repeats: int = REPEATS,
    loaded: bool = False,
) -> None:
    print(f"# resume: {conditions()}; medians of {repeats}")
    more = ("start ms", "load ms") if loaded else ()
    heads = ("history", "fed / cached", "resume", *more, "restore ms", "TTFT resumed ms", "TTFT re-read ms", "ratio")
    for model in models:
        print(f"\n{model}\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
        ttft: dict[int, float] = {}
        for history in histories:
            with tempfile.TemporaryDirectory() as folder:
                resumed, reread, waits = measure(
                    model, history, Path(folder), append=append, repeats=repeats, loaded=loaded
                )
            usage = resumed[-1].usage
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            ttft[history] = median([r.ttft_ms for r in resumed])
            again = median([r.ttft_ms for r in reread])
            restore = median([r.usage["ssmd"]["restore_ms"] for r in resumed])
            states = ", ".join(sorted({r.usage["ssmd"]["resume"] for r in resumed}))
            cells = [str(usage["prompt_tokens"]), f"{usage['prompt_tokens'] - cached} / {cached}", states]
            cells += [f"{median(list(ms)):.0f}" for ms in zip(*waits, strict=True)]
            cells += [f"{ms:.0f}" for ms in (restore, ttft[history], again)]
            print(f"| {' | '.join(cells)} | {again / ttft[history]:.1f} |", flush=True)
        print(f"TTFT at {histories[-1]} / TTFT at {histories[0]}: {ttft[histories[-1]] / ttft[histories[0]]:.2f}")
    print(f"\n# {conditions()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--histories", type=lambda text: [int(n) for n in text.split(",")], default=HISTORIES)
    parser.add_argument("--append", type=int, default=40, help="tokens of the new message, about")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--loaded", action="store_true", help="wait for the load before each request")
    given = parser.parse_args()
    main(given.models, given.histories, given.append, given.repeats, given.loaded)
