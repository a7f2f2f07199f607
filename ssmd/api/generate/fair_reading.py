"""Fair reading: threads parse, render and tokenize requests before the engine's queue. Store requests run there too.

All of that takes processor time from running answers. So only AT_ONCE requests of one client are read at the same time;
its others wait. A client without credit waits for more while other clients' answers run.
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

AT_ONCE = 2  # most readings of one client at the same time: a long one, and a short one beside it
CREDIT_S = 1.0  # most credit of a client, in seconds of processor time
REFILL = 0.05  # credit gained per second
LOOP_S = 0.002  # least event loop time that a request costs: its connection, its head, its answer
LONG_BYTES = 64 << 10  # bodies above this take long enough to delay others
LONG_AT_ONCE = 4  # threads for long bodies
_LOOK_S = 0.02
T = TypeVar("T")


@dataclass
class _Client:
    """A client's readings and its credit."""

    running: int = 0  # readings under way
    waiting: deque[asyncio.Event] = field(default_factory=deque)  # readings that wait for their turn
    left: float = CREDIT_S  # credit at the time `at`, in seconds of processor time
    at: float = field(default_factory=time.monotonic)

    def credit(self) -> float:
        now = time.monotonic()
        self.left, self.at = min(CREDIT_S, self.left + REFILL * (now - self.at)), now
        return self.left


def client_of(request: Request) -> str:
    """Return the client that a request counts for: its key's name if there are several names, else its place.

    The place is the IPv4 address, or the network of an IPv6 address, as one computer may have all addresses of it. At a
    Unix socket it is the process.
    """
    caller = caller_of(request.scope)
    if caller.several:
        return caller.name
    return "" if request.client is None else place_of(request.client.host)


class RequestReaders:
    """Runs the reading of requests. Used in the event loop only.

    beside: returns True if answers of clients other than this one run. threads: size of an own pool for short bodies;
    0 uses asyncio's.
    """

    def __init__(self, beside: Callable[[str], bool], threads: int = 0) -> None:
        self._beside = beside
        self._short = ThreadPoolExecutor(threads, "ssmd-store") if threads else None
        self._clients: dict[str, _Client] = {}
        self._patient = ThreadPoolExecutor(LONG_AT_ONCE, "ssmd-reading", initializer=give_way)

    async def run(self, work: Callable[[], T], client: str, nbytes: int = 0, delivery: Delivery | None = None) -> T:
        """Run `work` in a thread when it is the client's turn, and charge its time. nbytes: length of the body.

        Raises what `work` raises. With a `delivery`, raises ClientGone if the client leaves before, and AnswerStopped.
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
        """Hand a finished turn to the client's longest waiting reading."""
        if mine.waiting:
            mine.waiting.popleft().set()
            return
        mine.running -= 1
        if not mine.running:
            self._clients = {
                c: known for c, known in self._clients.items() if known.running or known.credit() < CREDIT_S
            }


def _timed(work: Callable[[], T]) -> tuple[T | BaseException, float]:
    """Return the result or the error of `work`, and its processor time in seconds."""
    began = time.thread_time()
    try:
        return work(), time.thread_time() - began
    except BaseException as err:
        return err, time.thread_time() - began
