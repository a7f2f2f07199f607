"""One generation's events on their way from the engine's threads to the coroutine that answers the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from starlette.types import Receive

from ssmd.engine.request import Delta, Done, Event, Failed

log = logging.getLogger(__name__)
MOST_WAITING = 10_000  # events, of a few kilobytes each with log probabilities


class Gone(Exception):
    """The client went away; nobody reads the answer any more."""


class Delivery:
    """Carries the engine's events to one request. Made in the event loop; called, as `deliver`, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self.last: asyncio.Future[Event] = self._loop.create_future()  # Done or Failed, whether it is read or not

    def __call__(self, event: Event) -> None:
        """Hand an event to the event loop. Raises Gone for text that nobody takes, and RuntimeError when the loop is
        closed already.
        """
        if self._events.qsize() >= MOST_WAITING and isinstance(event, Delta):
            log.warning("a client reads so slowly that %d events wait for it: it is given up", MOST_WAITING)
            self._loop.call_soon_threadsafe(self.leave)
            raise Gone
        self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: Event) -> None:
        self._events.put_nowait(event)
        if isinstance(event, Done | Failed):
            self.last.set_result(event)

    async def next(self) -> Event:
        """Wait for the next event. Raises Gone as soon as the client went away."""
        if not self._events.empty():
            await asyncio.sleep(0)  # a burst of events must not keep the loop from other clients
        event = await self._events.get()
        if event is None or self._gone.is_set():
            raise Gone
        return event

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to go away; run beside the coroutine that calls `next`, after the body was read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        """Nobody waits any more: what is done for the request elsewhere ends at its next `check`."""
        self._gone.set()
        self._events.put_nowait(None)

    def check(self) -> None:
        """Check that somebody waits still. Raises Gone."""
        if self._gone.is_set():
            raise Gone

    async def unless_gone(self, other: asyncio.Event) -> None:
        """Wait for something else before the first event. Raises Gone as soon as the client went away."""
        waits = [asyncio.create_task(event.wait()) for event in (other, self._gone)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._gone.is_set():
            raise Gone

    def replay(self, events: Iterable[Event]) -> None:
        """Deliver what was delivered before; in the event loop."""
        for event in events:
            self._events.put_nowait(event)
