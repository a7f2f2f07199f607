"""/metrics for Prometheus and /ssmd/v1/metrics, the same in JSON for people's screens."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ssmd.engine.engine import Engine
from ssmd.sessions.store import Store

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def routes(engine: Engine, store: Store | None) -> list[Route]:
    metrics = engine.metrics

    async def refresh() -> None:
        if store is not None:
            metrics.stored_bytes(await asyncio.to_thread(store.bytes_stored), store.quota)

    async def prometheus(request: Request) -> Response:
        await refresh()
        return Response(metrics.prometheus(), media_type=PROMETHEUS)

    async def snapshot(request: Request) -> JSONResponse:
        await refresh()
        return JSONResponse(metrics.snapshot())

    return [Route("/metrics", prometheus), Route("/ssmd/v1/metrics", snapshot)]
