"""Fair shares of the device: which clients get lanes and tokens, and when a prompt is prefilled beside others' answers.

A single client gets the whole device. While several clients have answers under way, each gets a token in every step.
A client with more answers gets more tokens only while the step stays about as short. Prompts that a client sends
without end are prefilled in a small part of the time, so that most steps of the others stay as short as without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ssmd.engine.decode.choice import Choice
from ssmd.engine.decode.generation import Generation

CREDIT_S = 1.0  # s of prefill that a client may take at once beside others' answers
REFILL = 0.03  # s of credit per s: a 64-token piece takes as long as a step for two, so one step in 30 has one
FAIR = 1.25  # bound of a step with more than a token for each client, in steps for one
Open = tuple[Generation, Choice]


class FairShare:
    """The device's shares by client. For the worker only.

    max_running: choices that decode at once.
    spare_choices: lanes beside these, one for each client that has none.
    step_cost: cost of a decode step, by the number of choices in it; with one choice it is 1.
    """

    def __init__(self, max_running: int, spare_choices: int = 1, step_cost: Callable[[int], float] = float) -> None:
        self._max_running = max_running
        self._spare_choices = spare_choices
        self._step_cost = step_cost
        self._turns: dict[str, int] = {}
        self._credit: dict[str, tuple[float, float, float]] = {}  # by client: s left, at which time, s of last piece

    def served(self, running: Sequence[Generation], in_use: int) -> frozenset[str] | None:
        """Return the clients that get no lane now, beside `in_use` lanes; None if no client gets one.

        Spare lanes are for clients that have nothing running. So none of them waits for the end of another client's
        answer, which may be far.
        """
        if in_use < self._max_running:
            return frozenset()
        if in_use < self._max_running + self._spare_choices:
            return frozenset(g.asked.request.client for g in running)
        return None

    def choices(self, unended: Sequence[Open], beside: int = 0) -> Sequence[Open]:
        """Pick the choices that get a token in this step: all of them, if there is a single client.

        Of several clients each gets one token, for its choices in turn. Further choices are added in turn while the
        step costs no more than with those, or than FAIR.
        beside: tokens that are in the step already.
        """
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
        """Order the prefilling requests so that clients alternate: least recently served first.

        Of one client's requests the older come first. An agent asks for a title beside its real request: the title's
        prompt is short, so it is planned sooner, and would be prefilled first.
        """

        def turn(g: Generation) -> tuple[float, float]:
            known = self._credit.get(g.asked.request.client)
            return g.asked.started if known is None else known[1], g.asked.started

        return sorted(reading, key=turn)

    def may_read(self, g: Generation, decoding: Sequence[Generation], more_wait: bool) -> bool:
        """Return True if a piece of this prompt may be prefilled now, beside the answers under way.

        A client may while it has credit. If more of its requests wait in the queue (`more_wait`), it may at the pace of
        the refill: a client that asks for more lanes than there are spends no credit on that.
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
        """Charge a client for prefill time, even when no other client waits.

        So a flood has no credit left when another client comes. A client owes at most the time of its last piece.
        """
        client, now = g.asked.request.client, time.perf_counter()
        self._credit = {c: known for c, known in self._credit.items() if self._at(known, now) < CREDIT_S}
        left = self._at(self._credit[client], now) if client in self._credit else CREDIT_S
        self._credit[client] = (max(-seconds, left - seconds), now, seconds)

    @staticmethod
    def _at(known: tuple[float, float, float], now: float) -> float:
        return min(CREDIT_S, known[0] + REFILL * (now - known[1]))
