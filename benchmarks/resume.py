"""Does the time to continue a conversation grow with its history? TTFT after SIGKILL and restart, against re-reading.

For each model and history: a first turn; then, five times: SIGKILL, restart, the client re-sends everything plus a
new message of about 40 tokens. Re-reading is the same prompt length with nothing cached, in the same run.

    benchmarks/resume.py [MODEL…]     names or paths of artifacts; default: smollm2
"""

from __future__ import annotations

import statistics
import sys
import tempfile
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


def measure(model: str, history: int, folder: Path) -> tuple[Reply, list[Reply], list[Reply]]:
    """(first turn, resumed turns, re-read turns)"""
    with DaemonProcess(model, folder / f"data-{history}") as daemon:
        question = {"role": "user", "content": story(history - 70, "Read this.")}
        first = daemon.chat([question], max_tokens=16)
        talk = [question, {"role": "assistant", "content": first.text}]
        resumed = []
        for i in range(REPEATS):
            daemon.kill()
            daemon.start()
            resumed.append(daemon.chat([*talk, {"role": "user", "content": story(40, f"Question {i}.")}], max_tokens=8))
        reread = [
            daemon.chat(
                [{"role": "user", "content": story(history - 20, f"Again, number {i}.")}], max_tokens=8, store=False
            )
            for i in range(REPEATS)
        ]
        return first, resumed, reread


def main(models: list[str]) -> None:
    print(f"# resume: {conditions()}; medians of {REPEATS}")
    for model in models:
        print(
            f"\n{model}\n| history | fed / cached | resume | restore ms | TTFT resumed ms | TTFT re-read ms | ratio |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        ttft: dict[int, float] = {}
        for history in HISTORIES:
            with tempfile.TemporaryDirectory() as folder:
                _, resumed, reread = measure(model, history, Path(folder))
            usage = resumed[-1].usage
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            ttft[history] = median([r.ttft_ms for r in resumed])
            again = median([r.ttft_ms for r in reread])
            restore = median([r.usage["ssmd"]["restore_ms"] for r in resumed])
            states = ", ".join(sorted({r.usage["ssmd"]["resume"] for r in resumed}))
            print(
                f"| {usage['prompt_tokens']} | {usage['prompt_tokens'] - cached} / {cached} | {states} | {restore:.0f} "
                f"| {ttft[history]:.0f} | {again:.0f} | {again / ttft[history]:.1f} |"
            )
        print(f"TTFT at {HISTORIES[-1]} / TTFT at {HISTORIES[0]}: {ttft[HISTORIES[-1]] / ttft[HISTORIES[0]]:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["smollm2"])
