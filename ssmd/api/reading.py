"""Requests are read before they wait in the engine's queue: parsed, rendered, tokenised, in threads.

All of that takes the processor from answers under way. So one client has few requests read at once, the others of it
wait their turn; and beside other clients' answers its reading has a part of the time only, once it has had its fill.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ssmd.api.delivery import Delivery
from ssmd.machine.processor import give_way

AT_ONCE = 2  # of one client: a long one, and a short one beside it
CREDIT_S = 1.0  # of processor time for which a client is not held back
REFILL = 0.1  # of the time
LONG_BYTES = 64 << 10  # bodies that take long enough for others to notice
LONG_AT_ONCE = 4
_LOOK_S = 0.1
T = TypeVar("T")


@dataclass
class _Client:
    """running: readings under way. waiting: those that wait for their turn. left: seconds of credit, at a time."""

    running: int = 0
    waiting: deque[asyncio.Event] = field(default_factory=deque)
    left: float = CREDIT_S
    at: float = field(default_factory=time.monotonic)

    def credit(self) -> float:
        now = time.monotonic()
        self.left, self.at = min(CREDIT_S, self.left + REFILL * (now - self.at)), now
        return self.left


class Reading:
    """Runs the reading of requests. In the event loop only.

    beside: whether answers of other clients than this one are under way.
    """

    def __init__(self, beside: Callable[[str], bool]) -> None:
        self._beside = beside
        self._clients: dict[str, _Client] = {}
        self._patient = ThreadPoolExecutor(LONG_AT_ONCE, "ssmd-reading", initializer=give_way)

    async def run(self, work: Callable[[], T], client: str, nbytes: int, delivery: Delivery) -> T:
        """Do a piece of a client's reading, of a body so long, when it is its turn. Raises what it raises, and Gone
        when the client leaves before.
        """
        async with self._turn(client, delivery) as mine:
            executor = self._patient if nbytes > LONG_BYTES else None
            result, spent = await asyncio.get_running_loop().run_in_executor(executor, _timed, work)
            mine.left = mine.credit() - spent
            if isinstance(result, BaseException):
                raise result
            return result

    @asynccontextmanager
    async def _turn(self, client: str, delivery: Delivery) -> AsyncIterator[_Client]:
        mine = self._clients.setdefault(client, _Client())
        if mine.running < AT_ONCE:
            mine.running += 1
        else:
            turn = asyncio.Event()
            mine.waiting.append(turn)
            try:
                await delivery.unless_gone(turn)
            except BaseException:
                if turn.is_set():
                    self._next(client, mine)
                else:
                    mine.waiting.remove(turn)
                raise
        try:
            delivery.check()
            while mine.credit() <= 0 and self._beside(client):
                await asyncio.sleep(_LOOK_S)
                delivery.check()
            yield mine
        finally:
            self._next(client, mine)

    def _next(self, client: str, mine: _Client) -> None:
        """Hand a turn that is over to the one who waits longest."""
        if mine.waiting:
            mine.waiting.popleft().set()
            return
        mine.running -= 1
        if not mine.running:
            self._clients = {
                c: known for c, known in self._clients.items() if known.running or known.credit() < CREDIT_S
            }


def _timed(work: Callable[[], T]) -> tuple[T | BaseException, float]:
    """What came of a piece of work, and the processor time it took, in seconds."""
    began = time.thread_time()
    try:
        return work(), time.thread_time() - began
    except BaseException as err:
        return err, time.thread_time() - began
