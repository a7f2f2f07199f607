"""The gate: the only threads of the HTTP interface. Whatever costs more than a look at memory runs in one of its pools.

Chats, texts, the store and looks at the daemon have pools of their own, so that none waits for another.
In each pool short work and long work have threads of their own too. Within them AT_ONCE requests of one client run at
the same time; its others wait. All of that takes processor time from running answers. So a client without credit waits
for more while other clients' answers run.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from starlette.requests import Request

from ssmd.api.generate.answer import Delivery
from ssmd.api.http.access import caller_of
from ssmd.api.http.body import Model, parse_object, read_body, validate
from ssmd.machine.network import place_of
from ssmd.machine.processor import give_way

AT_ONCE = 2  # most short works of one client at the same time in a pool, and as many long ones beside them
CREDIT_S = 1.0  # most credit of a client, in seconds of processor time
REFILL = 0.05  # credit gained per second
LOOP_S = 0.002  # least event loop time that a request costs: its connection, its head, its answer
LONG_BYTES = 64 << 10  # bodies above this take long enough to delay others
SHORT_AT_ONCE = 4  # threads of a pool for short work
LONG_AT_ONCE = 4  # threads of a pool for long work
_LOOK_S = 0.02
T = TypeVar("T")


@dataclass
class _Queue:
    """A client's works of one length in a pool."""

    running: int = 0
    waiting: deque[asyncio.Event] = field(default_factory=deque)  # works that wait for their turn


@dataclass
class _Client:
    """A client's works in a pool, and its credit there."""

    short: _Queue = field(default_factory=_Queue)
    long: _Queue = field(default_factory=_Queue)
    left: float = CREDIT_S  # credit at the time `at`, in seconds of processor time
    at: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> bool:
        return not (self.short.running or self.long.running)

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


class FairPool:
    """Runs one kind of work, fairly between clients. Used in the event loop only.

    beside: returns True if answers of clients other than this one run. name: of its threads. behind: long work has the
    lowest priority; not for work that holds a lock meanwhile, as that of the store's writers.
    """

    def __init__(self, beside: Callable[[str], bool], name: str = "work", *, behind: bool = True) -> None:
        self._beside = beside
        self._clients: dict[str, _Client] = {}
        self._short = ThreadPoolExecutor(SHORT_AT_ONCE, f"ssmd-{name}")
        self._long = ThreadPoolExecutor(LONG_AT_ONCE, f"ssmd-{name}-long", initializer=give_way if behind else None)

    async def run(
        self,
        work: Callable[[], T],
        client: str,
        nbytes: int = 0,
        delivery: Delivery | None = None,
        *,
        long: bool = False,
        least_s: float = LOOP_S,
    ) -> T:
        """Run `work` in a thread when it is the client's turn, and charge its processor time, but `least_s` for any.

        nbytes: length of the body. long: the work is long whatever its body. Raises what `work` raises. With a
        `delivery`, raises ClientGone if the client leaves before, and AnswerStopped.
        """
        long = long or nbytes > LONG_BYTES
        async with self._turn(client, delivery, long) as mine:
            executor, spent = self._long if long else self._short, list[float]()
            try:
                return await asyncio.get_running_loop().run_in_executor(executor, _timed, work, spent)
            finally:
                mine.left = mine.credit() - sum(spent) - least_s

    async def body(self, request: Request, model: type[Model]) -> Model:
        """Read a request's body into the model. Raises Rejection."""
        raw = await read_body(request)
        return await self.run(lambda: validate(model, parse_object(raw)), client_of(request), len(raw))

    @asynccontextmanager
    async def _turn(self, client: str, delivery: Delivery | None, long: bool) -> AsyncIterator[_Client]:
        mine = self._clients.setdefault(client, _Client())
        queue = mine.long if long else mine.short
        if queue.running < AT_ONCE:
            queue.running += 1
        else:
            turn = asyncio.Event()
            queue.waiting.append(turn)
            try:
                await (turn.wait() if delivery is None else delivery.unless_gone(turn))
            except BaseException:
                if turn.is_set():
                    self._next(mine, queue)
                else:
                    queue.waiting.remove(turn)
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
            self._next(mine, queue)

    def _next(self, mine: _Client, queue: _Queue) -> None:
        """Hand a finished turn to the client's longest waiting work of that length."""
        if queue.waiting:
            queue.waiting.popleft().set()
            return
        queue.running -= 1
        if mine.idle:
            self._clients = {
                c: known for c, known in self._clients.items() if not known.idle or known.credit() < CREDIT_S
            }


class Gate:
    """The pools of a daemon, by purpose. Used in the event loop only.

    chats: reading of chats and completions, up to the engine's queue. texts: tokenizing and rendering for their own
    sake. store: sessions and stored replies. looks: the daemon's own state, models and descriptions.
    """

    def __init__(self, beside: Callable[[str], bool]) -> None:
        """Make the pools; their threads start with their first work. beside: as of `FairPool`."""
        self.chats, self.texts = FairPool(beside, "chats"), FairPool(beside, "texts")
        self.store, self.looks = FairPool(beside, "store", behind=False), FairPool(beside, "looks", behind=False)
        self._health = ThreadPoolExecutor(1, "ssmd-health")

    async def health(self, look: Callable[[], T]) -> T:
        """Run a look of microseconds in a thread that has nothing else to do."""
        return await asyncio.get_running_loop().run_in_executor(self._health, look)


class SharedResult(Generic[T]):
    """A result that is the same for every request. It is made once, by the first request, while others wait for it.

    name: of the work in the pool. It counts for no client, so that none pays for all.
    """

    def __init__(self, make: Callable[[], T], name: str) -> None:
        self._make, self._client = make, shared(name)
        self._making = asyncio.Lock()
        self._made: T | None = None

    async def get(self, pool: FairPool) -> T:
        """Return the result. Raises what the making raises; then the next request tries again."""
        if self._made is None:
            async with self._making:
                if self._made is None:
                    self._made = await pool.run(self._make, self._client, long=True)
        return self._made


def shared(name: str) -> str:
    """Return a client's name, which no client can have, for work that is done once for all of them."""
    return f" {name}"


def _timed(work: Callable[[], T], spent: list[float]) -> T:
    """Return the result of `work`, and append its processor time in seconds to `spent`.

    An error is raised, not returned: the caller's frame would hold it, and its traceback that frame, for long.
    """
    began = time.thread_time()
    try:
        return work()
    finally:
        spent.append(time.thread_time() - began)
