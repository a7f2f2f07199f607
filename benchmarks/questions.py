"""Short questions with answers, asked as the page asks them: how many come out right, by a model's own defaults.

    benchmarks/questions.py [MODEL] [--table questions] [--seeds 1,2,3] [--set NAME=VALUE …] [--show]

A question is a conversation of its own: a streamed chat completion with no field of sampling but its seed, which is
1000 * seed + the question's number, so that no two questions share their draws. `--set` sends fields besides. The
stream is closed once its first sentence is whole; the page would read on. An answer is right if its first sentence has
the word or number that is expected, and no other answer of that kind that the question does not name.

The questions stand in questions.tsv: the question, its answer, and of which kind that is. They are those of 114 that
SmolLM2 answers at temperature 0: the list measures sampling, not knowledge. So it is biased towards temperature 0, and
no sampling is chosen by it. facts.tsv has 100 others, written before any was asked, and none was taken out.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, Reply, conditions

HERE = Path(__file__).parent
TABLES = ("questions", "facts")
SENTENCE = re.compile(r"\s*[^\s\w]*\s*(.*?\w.*?)(?:[.!?](?=\s)|\n)", re.DOTALL)
LONGEST = 400  # characters of a first sentence
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
DIGITS = {word: str(number) for number, word in enumerate(NUMBERS.split())}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
MONTHS = "January February March April May June July August September October November December"


@cache
def questions(table: str = TABLES[0]) -> list[tuple[str, str, list[str]]]:
    """Return each question of a table, the answer that is expected, and all answers of its kind."""
    rows = [line.split("\t") for line in (HERE / f"{table}.tsv").read_text("utf-8").splitlines()]
    kinds = {"day": DAYS.split(), "month": MONTHS.split()}
    kinds["capital"] = [answer for _, answer, kind in rows if kind == "capital"]
    return [(question, answer, kinds.get(kind, [])) for question, answer, kind in rows]


def words(text: str) -> list[str]:
    """Return a text's words and numbers, small, numbers as digits."""
    return [DIGITS.get(word, word) for word in re.findall(r"[^\W\d_]+|\d+", text.casefold())]


def has(text: Sequence[str], phrase: Sequence[str]) -> bool:
    """Return True if words stand in a text one after another."""
    return any(list(text[i : i + len(phrase)]) == list(phrase) for i in range(len(text)))


def right(question: str, expected: str, kind: Sequence[str], sentence: str) -> bool:
    """Return True if a first sentence answers its question, by the rule above."""
    said, asked = words(sentence), words(question)
    others = [words(other) for other in kind if other != expected and not has(asked, words(other))]
    if expected.isdigit():
        others += [[number] for number in said if number.isdigit() and number not in (expected, *asked)]
    return has(said, words(expected)) and not any(has(said, other) for other in others)


def ask(daemon: DaemonProcess, model: str, question: str, **fields: Any) -> Reply:
    """Return one whole answer, to a request with no field of sampling but those."""
    return daemon.chat([{"role": "user", "content": question}], model=model, **{"temperature": None, **fields})


def first_sentence(daemon: DaemonProcess, model: str, question: str, **fields: Any) -> str:
    """Return the first sentence of an answer; the stream ends with it."""
    text = ""
    body = {"model": model, "temperature": None, **fields}
    for delta in daemon.stream(Reply(), [{"role": "user", "content": question}], **body):
        text += delta
        if (found := SENTENCE.match(text)) or len(text) > LONGEST:
            return found[1] if found else text  # the stream is closed with its iterator
    return text


def score(
    daemon: DaemonProcess, model: str, seed: int, *, table: str = TABLES[0], show: bool = False, **fields: Any
) -> int:
    """Return how many questions of a table are answered right at a seed."""
    correct = 0
    for number, (question, expected, kind) in enumerate(questions(table)):
        said = first_sentence(daemon, model, question, seed=1000 * seed + number, **fields)
        fine = right(question, expected, kind, said)
        correct += fine
        if show and not fine:
            print(f"    {question} {expected}: {said.strip()!r}")
    return correct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--table", choices=TABLES, default=TABLES[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--set", dest="fields", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--show", action="store_true", help="print each wrong answer")
    asked = parser.parse_args()
    fields = {name: json.loads(value) for name, _, value in (one.partition("=") for one in asked.fields)}
    count = len(questions(asked.table))
    print(f"{asked.model}, {count} questions of {asked.table}.tsv, {conditions()}")
    with tempfile.TemporaryDirectory() as folder, DaemonProcess(asked.model, Path(folder) / "data") as daemon:
        for seed in map(int, asked.seeds.split(",")):
            correct = score(daemon, asked.model, seed, table=asked.table, show=asked.show, **fields)
            print(f"seed {seed}: {correct} of {count} right", flush=True)


if __name__ == "__main__":
    main()
