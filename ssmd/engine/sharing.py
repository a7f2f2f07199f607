"""How clients share the device: who gets a lane and the next tokens, and who may read a prompt beside others' answers.

One client has all of it. While several have answers under way, each of them gets a token in every step, however many
answers it has; and prompts that one of them sends without end are read in a small part of the time, so that most steps
of the others are no longer than they would be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ssmd.engine.choice import Choice
from ssmd.engine.generation import Generation

SPARE_LANES = 1  # for who has none, while others have them all
CREDIT_S = 1.0  # for which a client may read prompts beside others' answers at once
REFILL = 0.03  # of the time: a piece of 64 tokens takes as long as a step for two, so one step in 30 has one in it
Open = tuple[Generation, Choice]


class Shares:
    """The worker's alone. max_running: choices that decode at the same time."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._turns: dict[str, int] = {}
        self._credit: dict[str, tuple[float, float, float]] = {}  # by client: seconds left, when, and of the last piece

    def served(self, running: Sequence[Generation], in_use: int) -> frozenset[str] | None:
        """Clients that get no lane now, beside those that are `in_use`; None if nobody gets one.

        For a client that has nothing running there is a lane more.
        """
        if in_use < self._max_running:
            return frozenset()
        if in_use < self._max_running + SPARE_LANES:
            return frozenset(g.asked.request.client for g in running)
        return None

    def choices(self, unended: Sequence[Open]) -> Sequence[Open]:
        """Those that get a token in this step: all of one client's; one of each, in turn, where there are several."""
        by_client: dict[str, list[Open]] = {}
        for g, choice in unended:
            by_client.setdefault(g.asked.request.client, []).append((g, choice))
        if len(by_client) < 2:
            return unended
        self._turns = {client: self._turns.get(client, 0) + 1 for client in by_client}
        return [mine[self._turns[client] % len(mine)] for client, mine in by_client.items()]

    def may_read(self, g: Generation, decoding: Sequence[Generation], more_wait: bool) -> bool:
        """Whether a piece of this prompt may be read now, beside the answers that are under way.

        At once while there is credit; at the pace of the refill if more of the client's requests wait in the queue
        (`more_wait`): who asks for more than there are lanes spends no credit on it.
        """
        client = g.asked.request.client
        known = self._credit.get(client)
        if known is None or all(other.asked.request.client == client for other in decoding):
            return True
        now = time.perf_counter()
        if more_wait:
            return REFILL * (now - known[1]) >= known[2]
        return self._at(known, now) > 0

    def spend(self, g: Generation, seconds: float) -> None:
        """Note how long a piece took, also where it was in nobody's way: who floods has had his fill when others come.

        More than the credit is not owed.
        """
        client, now = g.asked.request.client, time.perf_counter()
        self._credit = {c: known for c, known in self._credit.items() if self._at(known, now) < CREDIT_S}
        left = self._at(self._credit[client], now) if client in self._credit else CREDIT_S
        self._credit[client] = (max(-seconds, left - seconds), now, seconds)

    @staticmethod
    def _at(known: tuple[float, float, float], now: float) -> float:
        return min(CREDIT_S, known[0] + REFILL * (now - known[1]))
