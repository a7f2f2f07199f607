"""/health: whether this daemon answers; no key is needed for it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd import __version__
from ssmd.engine.engine import Engine


def routes(engine: Engine) -> list[Route]:
    async def health(request: Request) -> JSONResponse:
        draining = engine.draining
        manifest = engine.artifact.manifest
        fields = {
            "status": "shutting_down" if draining else "ok",
            "model": manifest.name,
            "runtime": manifest.runtime,
            "version": __version__,
        }
        return JSONResponse(fields, 503 if draining else 200)

    return [Route("/health", health)]
