"""Drafts by prompt lookup: what followed when the last tokens of a text stood in it before, and the steps they save.

A draft follows the longest match of 1 to 4 tokens, among equals the latest. A verify step feeds the last token and the
draft; it gives the draft's tokens as far as the answer has them, and one more. It is the same at a temperature above 0:
a draft is one guess, and accepted if the sampler drew just that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

LONGEST = 4
LOSS = 0.03  # that the brake allows
Prices = Mapping[int, float]  # of a step of up to so many rows, in decode steps


class Step(NamedTuple):
    rows: int  # 1 without a draft
    accepted: int


def price(steps: Sequence[Step], prices: Prices) -> float:
    """Return the cost of the steps, in decode steps."""
    return sum(1.0 if rows == 1 else prices[min(n for n in prices if n >= rows)] for rows, _ in steps)


def matches(text: Sequence[int]) -> list[tuple[int, int]]:
    """Return, for each i, how many tokens at the end of text[:i] also stand earlier, and where they end there."""
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for i in range(len(text) + 1):
        ends = [tuple(text[i - n : i]) for n in range(min(LONGEST, i), 0, -1)]
        found.append(next(((len(end), seen[end]) for end in ends if end in seen), (0, 0)))
        seen.update((end, i) for end in ends)
    return found


def steps(
    prompt: Sequence[int], answer: Sequence[int], shortest: int, most: int, brake: Prices | None = None
) -> list[Step]:
    """Return the steps that give an answer after its first token, which the prompt gives.

    Drafts have `most` tokens at most and follow matches of `shortest` or more. `brake`: nothing is drafted where that
    could cost more than LOSS of the steps up to there, at these prices.
    """
    text, at, spent = [*prompt, *answer], len(prompt) + 1, 0.0
    found, taken = matches(text), list[Step]()
    while at < len(text):
        matched, source = found[at]
        draft = text[source : min(source + most, at)] if matched >= shortest else []
        if brake and spent + price([Step(1 + len(draft), 0)], brake) > (1 + LOSS) * (at - len(prompt)):
            draft = []
        right = takewhile(lambda pair: pair[0] == pair[1], zip(draft, text[at:], strict=False))
        taken.append(Step(1 + len(draft), len(list(right))))
        spent += price(taken[-1:], brake) if brake else 0.0
        at += 1 + taken[-1].accepted
    return taken
