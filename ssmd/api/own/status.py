"""/health reports whether this daemon answers and stores its answers; it needs no key. /v1 describes the daemon, for
people and programs that open the interface's own address. /ssmd/v1/stop ends it, as a signal does; for the commands of
its own user alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd import __version__
from ssmd.api.generate.fair_reading import Gate, SharedResult
from ssmd.api.http.keys import caller_of
from ssmd.engine.host.host import Host
from ssmd.engine.terms import Rejection

# For any client, also without a key, so without a path.
_ADVICE = {
    "disk_full": "the disk is full: turns are stored without their states, or not at all; free some space, or remove "
    "sessions with `ssmd session rm`",
    "read_only": "the session store's file system is read-only, and turns are not stored: see the system's log, and "
    "remount it read-write",
    "locked": "another process writes to the session store and does not end: turns are not stored",
    "damaged": "the session store is damaged, and turns are not stored: stop the daemon, then `ssmd session check "
    "--repair`",
    "replaced": "the session store's file was removed or replaced while the daemon used it, and turns are not stored: "
    "put the old files back, or restart the daemon to use the present ones",
    "late": "the disk is too slow: turns are stored without their states, or not at all",
    "error": "turns are not stored: the daemon's log says why",
}

log = logging.getLogger(__name__)


def routes(host: Host, gate: Gate) -> list[Route]:
    described = SharedResult(_described, "description")

    def look() -> JSONResponse:
        draining, problem = host.draining, host.problem
        model = host.foremost()
        manifest = None if model is None else model.found.manifest
        fields = {
            "status": "shutting_down" if draining else "degraded" if problem else "ok",
            "model": None if model is None else model.name,
            "runtime": None if manifest is None else manifest.runtime,
            "version": __version__,
            "loading": host.loading(),
            "healed": host.metrics.damages(),
        }
        if problem:
            fields |= {"reason": problem, "message": _ADVICE[problem]}
        return JSONResponse(fields, 503 if draining else 200)

    async def health(request: Request) -> JSONResponse:
        return await gate.health(look)

    async def root(request: Request) -> JSONResponse:
        return JSONResponse(await described.get(gate.looks))

    return [Route("/health", health), Route("/v1", root), Route("/v1/", root)]


def _described() -> dict[str, Any]:
    from ssmd.api.operations import OPERATIONS  # which imports this module

    served = [
        (method, path) for (method, path), one in OPERATIONS.items() if path.startswith("/v1/") and one.good < 300
    ]
    return {
        "object": "ssmd",
        "name": "ssmd",
        "version": __version__,
        "description": "a daemon that answers OpenAI's clients with the models of this machine",
        "page": "/",
        "docs": "/docs",
        "openapi": "/openapi.json",
        "endpoints": [f"{method} {path}" for method, path in served if path != "/v1/"],
    }


def stop_routes(stop: Callable[[], None]) -> list[Route]:
    """Return the one route. stop: called in the event loop after the response was sent, perhaps more than once."""

    async def begin() -> None:
        stop()

    async def answer(request: Request) -> JSONResponse:
        if not caller_of(request.scope).own:
            raise Rejection(
                "only the user who started the daemon may stop it; run `ssmd stop` as that user",
                status=403,
                code="own_token_needed",
            )
        log.info("`ssmd stop` was called: finishing running requests")
        return JSONResponse({"status": "shutting_down"}, 202, background=BackgroundTask(begin))

    return [Route("/ssmd/v1/stop", answer, methods=["POST"])]
