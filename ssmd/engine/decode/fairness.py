"""How clients share the device: who gets a lane and the next tokens, and who may read a prompt beside others' answers.

One client has all of it. While several have answers under way, each of them gets a token in every step, and who has
more answers gets more tokens only as far as the step stays about as short; and prompts that one of them sends without
end are read in a small part of the time, so that most steps of the others are no longer than they would be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ssmd.engine.decode.choice import Choice
from ssmd.engine.decode.generation import Generation

CREDIT_S = 1.0  # for which a client may read prompts beside others' answers at once
REFILL = 0.03  # of the time: a piece of 64 tokens takes as long as a step for two, so one step in 30 has one in it
FAIR = 1.25  # times as long as for one may a step take that has more than a token for each client
Open = tuple[Generation, Choice]


class Shares:
    """The worker's alone. max_running: choices that decode at the same time. spare_lanes: beside these, one for each
    client that has none. step_cost: of a decode step, by how many take it, where that of one is 1."""

    def __init__(self, max_running: int, spare_lanes: int = 1, step_cost: Callable[[int], float] = float) -> None:
        self._max_running = max_running
        self._spare_lanes = spare_lanes
        self._step_cost = step_cost
        self._turns: dict[str, int] = {}
        self._credit: dict[str, tuple[float, float, float]] = {}  # by client: seconds left, when, and of the last piece

    def served(self, running: Sequence[Generation], in_use: int) -> frozenset[str] | None:
        """Clients that get no lane now, beside those that are `in_use`; None if nobody gets one.

        For clients that have nothing running there are spare lanes, so that none of them waits for the end of another's
        answer, which may be far.
        """
        if in_use < self._max_running:
            return frozenset()
        if in_use < self._max_running + self._spare_lanes:
            return frozenset(g.asked.request.client for g in running)
        return None

    def choices(self, unended: Sequence[Open], beside: int = 0) -> Sequence[Open]:
        """Those that get a token in this step: all of one client's. Where there are several, one of each, in turn, and
        more, in turn too, while the step costs no more than it would for those, or than FAIR. beside: how many tokens
        are in the step already."""
        by_client: dict[str, list[Open]] = {}
        for g, choice in unended:
            by_client.setdefault(g.asked.request.client, []).append((g, choice))
        if len(by_client) < 2:
            return unended
        self._turns = {client: self._turns.get(client, 0) for client in by_client}
        most = max(self._step_cost(beside + len(by_client)), FAIR)
        chosen: list[Open] = []
        for place in range(max(map(len, by_client.values()))):
            for client, mine in by_client.items():
                if place < len(mine) and (place == 0 or self._step_cost(beside + len(chosen) + 1) <= most):
                    chosen.append(mine[self._turns[client] % len(mine)])
                    self._turns[client] += 1
        return chosen

    def in_turn(self, reading: Sequence[Generation]) -> list[Generation]:
        """Those that read prompts, so that clients take turns: who had a piece last, or came last, is the last."""

        def since(g: Generation) -> float:
            known = self._credit.get(g.asked.request.client)
            return (g.progress.admitted or 0.0) if known is None else known[1]

        return sorted(reading, key=since)

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
