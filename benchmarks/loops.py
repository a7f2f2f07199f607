"""Prompts that small models answer in circles: how often each penalty stops that, and what it costs.

    benchmarks/loops.py [MODEL] [--seeds 1,2] [--rows WORD,…] [--show]

Each prompt is asked with the model's own defaults and the penalties of a row. An answer loops if it ended at its
longest and its last 60 words have no more than half as many different groups of four words as they could. Copies are
prompts that ask for a text of the prompt: right if the answer has it. Questions are those of questions.py. Eight
prompts are asked at a time, questions one after another.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, conditions
from questions import ask, score

LONGEST = 384  # tokens of an answer
TAIL = 60  # words
GROUP = 4
OFF = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "dry_multiplier": 0}
DRY = {"dry_multiplier": 0.8, "dry_penalty_last_n": 512}
PENALTIES: Mapping[str, dict[str, Any]] = {
    "the model's own": {},
    "none": OFF,
    "repetition 1.05": {**OFF, "repetition_penalty": 1.05},
    "repetition 1.1": {**OFF, "repetition_penalty": 1.1},
    "repetition 1.1, 256 tokens": {**OFF, "repetition_penalty": 1.1, "repeat_last_n": 256},
    "DRY 0.8, from 2 tokens": {**OFF, **DRY, "dry_allowed_length": 2},
    "DRY 0.8, from 6 tokens": {**OFF, **DRY, "dry_allowed_length": 6},
    "DRY 0.8, from 6 tokens, over lines": {**OFF, **DRY, "dry_allowed_length": 6, "dry_sequence_breakers": []},
    "DRY 0.8, from 16 tokens, over lines": {**OFF, **DRY, "dry_allowed_length": 16, "dry_sequence_breakers": []},
    "DRY 0.8, from 32 tokens, over lines": {**OFF, **DRY, "dry_allowed_length": 32, "dry_sequence_breakers": []},
}
PROMPTS = (
    "Repeat the password that I gave you.",
    "What did I say before?",
    "Tell me a long story about a dragon and a knight.",
    "Write a poem of twenty lines about the sea.",
    "List fifty animals.",
    "List all countries of Europe with their capitals.",
    "List the first forty prime numbers.",
    "Count from 1 to 100.",
    "Write down everything that you know about France.",
    "Explain in detail how a computer works.",
    "Write a diary of a week on a ship, day by day.",
    "Give me thirty ideas for a birthday party.",
    "Tell me the same joke in ten different ways.",
    "Describe your day from morning to night in detail.",
    "Write a dialogue between a cat and a dog.",
    "Write a Python program that prints a calendar.",
    "What is the meaning of life? Answer at length.",
    "Keep talking about the weather.",
)
LONG = (
    "On Monday the ferry leaves at seven, calls at the island of Arran before noon, and is back in the harbour by six. "
    "On Sunday it leaves two hours later, and does not call at the island at all."
)
CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("a side is negative")
    return width * height"""
COPIES = (
    ("My password is tangerine-42. Repeat the password that I gave you.", "tangerine-42"),
    ("My dog is called Rex and my cat is called Luna. What is my cat called?", "Luna"),
    (
        'Repeat this sentence: "The quick brown fox jumps over the lazy dog."',
        "The quick brown fox jumps over the lazy dog",
    ),
    ('Repeat this sentence: "We meet at seven at the old bridge."', "We meet at seven at the old bridge"),
    (f"Repeat this text, word for word:\n\n{LONG}", LONG),
    (f"Copy this code into a block and say nothing else:\n\n{CODE}", CODE),
    ("Write the word banana three times.", "banana"),
    ("My order number is 7319. What is my order number?", "7319"),
)


def loops(text: str) -> bool:
    """Return True if an answer's end repeats itself."""
    tail = text.split()[-TAIL:]
    groups = [tuple(tail[i : i + GROUP]) for i in range(len(tail) - GROUP + 1)]
    return len(tail) < TAIL // 4 or len(set(groups)) <= len(groups) / 2


def answers(
    daemon: DaemonProcess, model: str, prompts: Sequence[str], seeds: Sequence[int], **fields: Any
) -> list[tuple[str, bool]]:
    """Return the answer to each prompt at each seed, and whether it was cut off."""

    def answer(seed: int, number: int) -> tuple[str, bool]:
        seeded = {"seed": 1000 * seed + number, "max_tokens": LONGEST}
        reply = ask(daemon, model, prompts[number], **seeded, **fields)
        return reply.text, reply.finish_reason == "length"

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(answer, *zip(*product(seeds, range(len(prompts))), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--rows", help="words that a row's name has, separated by commas; else all rows")
    parser.add_argument("--show", action="store_true", help="print each answer that loops, and each wrong copy")
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    print(f"{asked.model}, seeds {asked.seeds}, {conditions()}\n")
    print(
        f"| penalty | loops of {len(PROMPTS) * len(seeds)} | at the longest | words | copies of "
        f"{len(COPIES) * len(seeds)} | questions |\n| --- | --- | --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as folder, DaemonProcess(asked.model, Path(folder) / "data") as daemon:
        for name, penalties in PENALTIES.items():
            if asked.rows and not any(word in name for word in asked.rows.split(",")):
                continue
            told = answers(daemon, asked.model, PROMPTS, seeds, **penalties)
            copied = answers(daemon, asked.model, [prompt for prompt, _ in COPIES], seeds, **penalties)
            round_ = [text for text, cut in told if cut and loops(text)]
            wrong = [t for (t, _), (_, wanted) in zip(copied, COPIES * len(seeds), strict=True) if wanted not in t]
            if asked.show:
                for text in (*round_, *wrong):
                    print(f"    {text[-200:]!r}")
            words = sum(len(text.split()) for text, _ in told) / len(told)
            right = ", ".join(str(score(daemon, asked.model, seed, **penalties)) for seed in seeds)
            cut_off = sum(cut for _, cut in told)
            print(
                f"| {name} | {len(round_)} | {cut_off} | {words:.0f} | {len(copied) - len(wrong)} | {right} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
