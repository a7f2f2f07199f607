"""/metrics for Prometheus and /ssmd/v1/metrics, the same in JSON for screens; docs/metrics.md has the fields."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ssmd import __version__
from ssmd.api import sse
from ssmd.api.keys import caller_of
from ssmd.engine.host import Host
from ssmd.engine.prometheus import Exposition
from ssmd.sessions.domain import Domain
from ssmd.sessions.store import Store

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
PERIOD_S = 0.25  # between two events of the stream
AGED_S = 10.0  # after which percentiles have changed though nothing came


def routes(host: Host, store: Store | None, stall_s: float) -> list[Route]:
    exposition, started_at = Exposition(host.metrics), time.time()

    def snapshot() -> dict[str, Any]:
        process = {"version": __version__, "pid": os.getpid(), "started_at": round(started_at, 3)}
        return process | host.metrics.snapshot()

    async def refresh() -> None:
        if store is not None:
            host.metrics.stored_bytes(await asyncio.to_thread(store.bytes_stored), store.quota)

    async def prometheus(request: Request) -> Response:
        await refresh()
        return Response(await asyncio.to_thread(exposition.text), media_type=PROMETHEUS)

    async def shown(request: Request) -> JSONResponse:
        await refresh()
        return JSONResponse(_seen_by(caller_of(request.scope).domain, await asyncio.to_thread(snapshot)))

    return [
        Route("/metrics", prometheus),
        Route("/ssmd/v1/metrics", shown),
        Route("/ssmd/v1/metrics/stream", _Stream(host, snapshot, stall_s), methods=["GET"]),
    ]


def _seen_by(domain: Domain, snapshot: dict[str, Any]) -> dict[str, Any]:
    """Of requests of others nothing is told but that they run."""
    hidden = {"id": None, "session": None}
    seen = [row if domain.has(row["owner"]) else row | hidden for row in snapshot["running"]]
    return {**snapshot, "running": [{k: v for k, v in row.items() if k != "owner"} for row in seen]}


class _Listener:
    """One who reads the stream. event: the last one made for it, until it is taken."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.event = b""
        self.news = asyncio.Event()


class _Stream:
    """The ASGI app of the stream: one snapshot for all who listen, and none while nothing changes."""

    def __init__(self, host: Host, snapshot: Callable[[], dict[str, Any]], stall_s: float) -> None:
        self._host, self._snapshot, self._stall_s = host, snapshot, stall_s
        self._listeners: set[_Listener] = set()
        self._pump: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        mine = _Listener(caller_of(scope).domain)
        leaving = asyncio.create_task(_departure(receive, mine))
        self._listeners.add(mine)
        stream = sse.EventStream(send, self._stall_s)
        try:
            await stream.open({})
            await self._begin(mine)
            while not leaving.done():
                if mine.event:
                    event, mine.event = mine.event, b""
                    await stream.write(event)
                if self._host.draining:
                    break
                mine.news.clear()
                await mine.news.wait()
            await stream.close()
        except sse.Stalled:
            pass
        finally:
            leaving.cancel()
            self._listeners.discard(mine)

    async def _begin(self, mine: _Listener) -> None:
        """Make a first event for who came just now, and have the others made."""
        self._hand_out(await asyncio.to_thread(self._snapshot), [mine])
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        seen, made = None, time.monotonic()
        while self._listeners:
            await asyncio.sleep(PERIOD_S)
            pulse = self._host.pulse()
            busy = pulse != seen or self._host.draining
            if busy or time.monotonic() - made >= AGED_S:
                seen, made = pulse, time.monotonic()
                self._hand_out(await asyncio.to_thread(self._snapshot), list(self._listeners))

    def _hand_out(self, snapshot: dict[str, Any], listeners: Sequence[_Listener]) -> None:
        encoded: dict[Domain, bytes] = {}
        for one in listeners:
            if one.domain not in encoded:
                encoded[one.domain] = sse.encode(_seen_by(one.domain, snapshot))
            one.event = encoded[one.domain]
            one.news.set()


async def _departure(receive: Receive, one: _Listener) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    one.news.set()
