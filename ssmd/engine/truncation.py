"""What is left out of a conversation that outgrows the context: its oldest messages, but for the system prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ssmd.sessions.turn import system_prompt
from ssmd.text.messages import Message

TRUNCATED = 0.6  # of the context that a prompt may take up once its oldest messages were left out
LEAST_ROOM = 0.05  # of the context that must be left for an answer, or all that it may take


def cut_to_fit(
    messages: Sequence[Message],
    cut: int,
    tokens: int,
    *,
    context: int,
    max_tokens: int,
    tokens_with: Callable[[int], int],
) -> int:
    """How many messages after the system prompt to leave out of a prompt that comes to so many `tokens` without `cut`.

    If that leaves too little room for an answer: so many that it takes up TRUNCATED of the context, and not again at
    every turn. `cut`, where there is room, or nothing to leave out. tokens_with: of a prompt without so many messages.
    """
    if context - tokens >= min(max_tokens, int(context * LEAST_ROOM)):
        return cut
    head = system_prompt(messages)
    # Each a user's message to begin with, and the last of them stays whatever it takes.
    ends = [i - head for i, m in enumerate(messages) if m.role == "user" and i - head > cut]
    least, most = 0, len(ends) - 1
    while least < most:
        middle = (least + most) // 2
        fits = tokens_with(ends[middle]) <= context * TRUNCATED
        least, most = (least, middle) if fits else (middle + 1, most)
    return ends[least] if ends else cut
