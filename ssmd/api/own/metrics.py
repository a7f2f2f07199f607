"""/metrics for Prometheus and /ssmd/v1/metrics, the same in JSON for screens. docs/metrics.md has the fields."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ssmd import __version__
from ssmd.api.generate.fair_reading import FairPool, client_of, shared
from ssmd.api.http import sse
from ssmd.api.http.access import caller_of, is_in_force
from ssmd.api.http.body import StrictModel, validate
from ssmd.api.operation import Service
from ssmd.api.own import pulls
from ssmd.engine.host.host import DRAINING
from ssmd.engine.prometheus import Exposition
from ssmd.sessions.turn import Domain, StoreError

log = logging.getLogger(__name__)
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
PERIOD_S = 0.25  # shortest, and default, time between two events of a stream
MOST_S = 60.0  # longest interval that a client may ask for
AGED_S = 10.0  # age at which a snapshot's percentiles have changed without any new request


class Metrics:
    """The handlers."""

    def __init__(self, on: Service) -> None:
        self._host, self._store, self._pulls, self._pool = on.host, on.store, on.pulls, on.pool
        self._exposition = Exposition(on.host.metrics)
        self._started_at, self._counted_at = time.time(), -math.inf
        self.stream = _Stream(self._pulse, self._snapshot, self._refresh, on.stall_s, on.pool)

    async def prometheus(self, request: Request) -> Response:
        return Response(await self._pool.run(self._text, client_of(request)), media_type=PROMETHEUS)

    async def shown(self, request: Request) -> JSONResponse:
        def seen() -> JSONResponse:
            self._refresh()
            return JSONResponse(_seen_by(caller_of(request.scope).domain, self._snapshot()))

        return await self._pool.run(seen, client_of(request))

    def _text(self) -> bytes:
        self._refresh()
        return self._exposition.text()

    def _pulse(self) -> tuple[object, object]:
        state, all_else = self._host.pulse()
        return state, (all_else, self._pulls.changes)

    def _snapshot(self) -> dict[str, Any]:
        process = {"version": __version__, "pid": os.getpid(), "started_at": round(self._started_at, 3)}
        return process | self._host.metrics.snapshot() | {"pulls": pulls.rows(self._pulls)}

    def _refresh(self) -> None:
        if self._store is None:
            return
        with contextlib.suppress(StoreError):  # metrics are needed most when something is wrong
            self._host.metrics.stored_bytes(self._store.bytes_stored(), self._store.quota)
            if time.monotonic() - self._counted_at >= AGED_S:
                self._counted_at = time.monotonic()
                self._host.metrics.stored_sessions(*self._store.count())


def _seen_by(domain: Domain, snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return the snapshot for a domain, without the ids and sessions of other domains' requests."""
    hidden = {"id": None, "session": None}

    def seen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        told = [row if domain.has(row["owner"]) else row | hidden for row in rows]
        return [{k: v for k, v in row.items() if k != "owner"} for row in told]

    return {**snapshot, "running": seen(snapshot["running"]), "recent": seen(snapshot["recent"])}


class _Pace(StrictModel):
    """Query parameters. interval: seconds between two events while the state stays the same."""

    model_config = ConfigDict(strict=False)  # query parameters are text
    interval: Annotated[float, Field(ge=PERIOD_S, le=MOST_S)] = PERIOD_S


class _Listener:
    """A client of the stream."""

    def __init__(self, domain: Domain, interval_s: float) -> None:
        self.domain = domain
        self.interval_s = interval_s
        self.due_s = -math.inf  # monotonic time of its next event, unless the state changes before
        self.number = 0  # of the last snapshot made for it
        self.event = b""  # the last event made for it, until it is sent
        self.last = False  # that event is the last one
        self.news = asyncio.Event()


class _Stream:
    """The ASGI app of the stream: one snapshot for all listeners, and none while nothing changes.

    pulse: returns a cheap version stamp (state, everything else). refresh: updates the store's numbers.
    """

    def __init__(
        self,
        pulse: Callable[[], tuple[object, object]],
        snapshot: Callable[[], dict[str, Any]],
        refresh: Callable[[], None],
        stall_s: float,
        pool: FairPool,
    ) -> None:
        self._pulse, self._snapshot, self._refresh, self._stall_s = pulse, snapshot, refresh, stall_s
        self._pool = pool
        self._listeners: set[_Listener] = set()
        self._pump: asyncio.Task[None] | None = None
        self._making = asyncio.Lock()
        self._seen: tuple[object, object] = (None, None)
        self._made = -math.inf
        self._number = 0  # of snapshots that differed from the one before
        self._last: dict[str, Any] = {}
        self._encoded: dict[Domain, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pace = validate(_Pace, dict(Request(scope).query_params))
        stream = sse.EventStream(send, self._stall_s)
        await stream.open({})
        if scope["method"] == "HEAD":
            await stream.close()
            return
        mine = _Listener(caller_of(scope).domain, pace.interval)
        leaving = asyncio.create_task(_departure(receive, mine))
        self._listeners.add(mine)
        try:
            await self._show(mine)
            pump = self._pumping()
            while not (leaving.done() or pump.done()):
                mine.news.clear()
                if not mine.event:
                    await mine.news.wait()
                    continue
                event, mine.event, last = mine.event, b"", mine.last
                if not is_in_force(scope):  # the key was revoked
                    break
                await stream.write(event)
                if last:
                    break
                await asyncio.sleep(PERIOD_S)
            await stream.close()
        except sse.ClientStalled:
            log.info("a listener of the metrics has not read for %.0f s, given up", self._stall_s)
        finally:
            leaving.cancel()
            self._listeners.discard(mine)

    def _pumping(self) -> asyncio.Task[None]:
        """Return the task that makes events, started if needed. If it fails, the listeners' streams end."""
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            self._pump.add_done_callback(self._wake)
        return self._pump

    def _wake(self, _: asyncio.Task[None]) -> None:
        for one in self._listeners:
            one.news.set()

    async def _run(self) -> None:
        while self._listeners:
            await asyncio.sleep(PERIOD_S)
            await self._show()

    async def _show(self, new: _Listener | None = None) -> None:
        """Make an event for each due listener to which the snapshot is new, and for the new one in any case.

        A change of the state makes all listeners due.
        """
        async with self._making:
            pulse, now = self._pulse(), time.monotonic()
            changed = pulse[0] != self._seen[0]
            due = [one for one in self._listeners if changed or now >= one.due_s]
            age = now - self._made
            if due and age >= PERIOD_S and (age >= AGED_S or pulse != self._seen):
                before, self._last = self._last, await self._pool.run(partial(self._look, age), shared("metrics"))
                self._seen, self._made = pulse, time.monotonic()
                if not _alike(before, self._last):
                    self._number += 1
                    self._encoded = {}
            self._hand_out({one for one in due if one is new or one.number != self._number})

    def _look(self, age: float) -> dict[str, Any]:
        """Return a snapshot. age: seconds of the last one."""
        if age >= AGED_S:
            self._refresh()
        return self._snapshot()

    def _hand_out(self, listeners: Iterable[_Listener]) -> None:
        for one in listeners:
            if one.domain not in self._encoded:
                self._encoded[one.domain] = sse.encode(_seen_by(one.domain, self._last))
            one.event, one.last = self._encoded[one.domain], self._last["state"] == DRAINING
            one.number, one.due_s = self._number, time.monotonic() + one.interval_s - PERIOD_S / 2
            one.news.set()


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two snapshots are equal but for the process's memory, which always changes."""
    memory: dict[str, Any] = {"memory": None}
    return one | memory == other | memory


async def _departure(receive: Receive, one: _Listener) -> None:
    """Wait until the client is gone, then wake its listener."""
    while (await receive())["type"] != "http.disconnect":
        pass
    one.news.set()
