"""One generation's events on their way from the engine's threads to the coroutine that answers the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.types import Receive

from ssmd.engine.request import Delta, Event, Failure, Finish

log = logging.getLogger(__name__)
MOST_WAITING = 10_000  # most events that wait for a client, of a few kilobytes each with log probabilities


class ClientGone(Exception):
    """A client that went away and does not read the answer any more."""


class AnswerStopped(Exception):
    """An answer that was stopped before the engine had its request."""


class Delivery:
    """Carries the engine's events to one request. Made in the event loop; called, as `deliver`, from any thread.

    background: the answer goes on when its client leaves.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._interrupted = asyncio.Event()
        self._followers: set[asyncio.Event] = set()
        self._gone = self._stopped = False
        self.background = False
        self.left = asyncio.Event()  # set when the client is gone
        self.last: asyncio.Future[Event] = self._loop.create_future()  # Finish or Failure, even if it is not read

    def __call__(self, event: Event) -> None:
        """Hand an event to the event loop.

        Raises ClientGone for text if MOST_WAITING events wait for the client, and RuntimeError if the loop is closed.
        """
        if self._events.qsize() >= MOST_WAITING and isinstance(event, Delta):
            log.warning("a client reads so slowly that %d events wait for it: it is disconnected", MOST_WAITING)
            self._loop.call_soon_threadsafe(self.leave)
            if not self.background:
                raise ClientGone
        self._loop.call_soon_threadsafe(self.put, event)

    def put(self, event: Event) -> None:
        """Deliver an event; in the event loop."""
        if not self._gone:
            self._events.put_nowait(event)
        if isinstance(event, Finish | Failure) and not self.last.done():
            self.last.set_result(event)
        for news in self._followers:
            news.set()

    async def next(self) -> Event:
        """Wait for the next event. Raises ClientGone as soon as the client went away."""
        if not self._events.empty():
            await asyncio.sleep(0)  # a burst of events must not keep the loop from other clients
        event = await self._events.get()
        if event is None or self._gone:
            raise ClientGone
        return event

    @contextmanager
    def followed(self) -> Iterator[asyncio.Event]:
        """Yield an asyncio event that is set at each event, and by `tell_followers`, until the context ends."""
        news = asyncio.Event()
        self._followers.add(news)
        try:
            yield news
        finally:
            self._followers.discard(news)

    def tell_followers(self) -> None:
        """Wake the followers, so that they look for news."""
        for news in self._followers:
            news.set()

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to go away; run beside the coroutine that calls `next`, after the body was read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        """Note that the client left. Work on its request ends at its next `check`, unless it is in the background."""
        self._gone = True
        self.left.set()
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)
        if not self.background:
            self._interrupted.set()

    def go_on(self) -> None:
        """Let the answer go on when its client leaves, or has left."""
        self.background = True
        if not self._stopped:
            self._interrupted.clear()

    def abandon(self) -> None:
        """Give the answer up even if it is in the background, as the server ends."""
        self.background = False
        self.leave()

    def stop(self) -> None:
        """Stop the work on the request before the engine has it."""
        self._stopped = True
        self._interrupted.set()

    def check(self) -> None:
        """Check that the answer is still wanted. Raises ClientGone and AnswerStopped."""
        if self._stopped:
            raise AnswerStopped
        if self._gone and not self.background:
            raise ClientGone

    async def unless_gone(self, other: asyncio.Event) -> None:
        """Wait for `other`, before the first event.

        Raises ClientGone as soon as the client went away, and AnswerStopped.
        """
        waits = [asyncio.create_task(event.wait()) for event in (other, self._interrupted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.check()

    async def unless_done(self, future: Future[Any]) -> None:
        """Wait for a future of another thread. Raises ClientGone as soon as the client went away, and AnswerStopped."""
        if not future.done():
            there = asyncio.Event()
            future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(there.set))
            await self.unless_gone(there)

    def replay(self, events: Iterable[Event]) -> None:
        """Deliver the events of an earlier answer; in the event loop."""
        for event in events:
            self._events.put_nowait(event)


async def departure(receive: Receive, news: asyncio.Event) -> None:
    """Wait until a follower's client is gone, then set `news`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    news.set()


@asynccontextmanager
async def watched(receive: Receive) -> AsyncIterator[Delivery]:
    """Yield a delivery that notes that the client leaves, until the context ends; for a request without events."""
    delivery = Delivery()
    watcher = asyncio.create_task(delivery.watch(receive))
    try:
        yield delivery
    finally:
        delivery.abandon()  # stops a thread that still works on the request when the server ends
        watcher.cancel()
