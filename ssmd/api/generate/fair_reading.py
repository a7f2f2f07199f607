"""Requests are read before they wait in the engine's queue: parsed, rendered, tokenised, in threads. So is the store.

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

from starlette.requests import Request

from ssmd.api.generate.delivery import Delivery
from ssmd.api.http.keys import caller_of
from ssmd.machine.hosts import place_of
from ssmd.machine.processor import give_way

AT_ONCE = 2  # of one client: a long one, and a short one beside it
CREDIT_S = 1.0  # of processor time for which a client is not held back
REFILL = 0.05  # of the time
LOOP_S = 0.002  # that a request takes of the event loop, at least: its connection, its head, its answer
LONG_BYTES = 64 << 10  # bodies that take long enough for others to notice
LONG_AT_ONCE = 4
_LOOK_S = 0.02
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


def client_of(request: Request) -> str:
    """Who asks, among those who take turns: the key's name where there are several, else where the request comes from.

    That is the address, or the network of an IPv6 address, of which one computer may have all; at a socket without
    addresses the process.
    """
    caller = caller_of(request.scope)
    if caller.several:
        return caller.name
    return "" if request.client is None else place_of(request.client.host)


class Reading:
    """Runs the reading of requests. In the event loop only.

    beside: whether answers of other clients than this one are under way. threads: of its own, for what is not long;
    0: those that all have.
    """

    def __init__(self, beside: Callable[[str], bool], threads: int = 0) -> None:
        self._beside = beside
        self._short = ThreadPoolExecutor(threads, "ssmd-store") if threads else None
        self._clients: dict[str, _Client] = {}
        self._patient = ThreadPoolExecutor(LONG_AT_ONCE, "ssmd-reading", initializer=give_way)

    async def run(self, work: Callable[[], T], client: str, nbytes: int = 0, delivery: Delivery | None = None) -> T:
        """Do a piece of a client's reading, of a body so long, when it is its turn. Raises what it raises, and Gone
        when the client leaves before, as `delivery` tells.
        """
        async with self._turn(client, delivery) as mine:
            executor = self._patient if nbytes > LONG_BYTES else self._short
            result, spent = await asyncio.get_running_loop().run_in_executor(executor, _timed, work)
            mine.left = mine.credit() - spent - LOOP_S
            if isinstance(result, BaseException):
                raise result
            return result

    @asynccontextmanager
    async def _turn(self, client: str, delivery: Delivery | None) -> AsyncIterator[_Client]:
        mine = self._clients.setdefault(client, _Client())
        if mine.running < AT_ONCE:
            mine.running += 1
        else:
            turn = asyncio.Event()
            mine.waiting.append(turn)
            try:
                await (turn.wait() if delivery is None else delivery.unless_gone(turn))
            except BaseException:
                if turn.is_set():
                    self._next(client, mine)
                else:
                    mine.waiting.remove(turn)
                raise
        try:
            while True:
                if delivery is not None:
                    delivery.check()
                if mine.credit() > 0 or not self._beside(client):
                    break
                await asyncio.sleep(_LOOK_S)
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
