"""A long session in a store: answers as models write them, with lists, code and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keeping import HYBRID, Chat

from ssmd.sessions.store import Store

ANSWERS = (
    "The lake lies **north** of the town, and it is *cold* even in July. " * 4,
    "Three things matter:\n\n1. the depth, `z` in metres\n2. the wind\n3. what the river brings\n\nThe rest is noise.",
    "```python\ndef area(points):\n    total = 0.0\n    for (x0, y0), (x1, y1) in zip(points, points[1:]):\n"
    "        total += x0 * y1 - x1 * y0\n    return abs(total) / 2\n```\nIt is the *shoelace* formula.",
    "| month | level |\n| --- | --: |\n| May | 3.2 m |\n| June | 2.9 m |\n\n> Measured at the pier.",
)


def fill(data_dir: Path, session: str, turns: int, answers: Sequence[str] = ANSWERS) -> None:
    """Write the session while no daemon has the store."""
    store = Store.open(data_dir)
    try:
        chat = Chat(store, session, HYBRID)
        for i in range(turns):
            answer = f"{answers[i % len(answers)]}\n\n(Answer {i}.)"
            chat.say(f"{session}_{i}", f"{session}_{i - 1}" if i else None, f"Question {i}: how is the lake?", answer)
    finally:
        store.close()
