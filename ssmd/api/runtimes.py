"""/ssmd/v1/runtimes: which runtimes and devices can be used here, as `ssmd doctor` finds out."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.runtime.devices import Found, find

KEPT_S = 60.0
LIMIT_S = 20.0  # a client waits for 30
# Folders of this computer's user are nobody else's business; those of the system's devices tell what is missing.
_ROOT = r"(?<![\w/:.])(?!/(?:dev|proc|sys)/)(?:/|~/|[A-Za-z]:[\\/])"
_PATH = re.compile(rf"(?<='){_ROOT}[^']+(?=')|(?<=\"){_ROOT}[^\"]+(?=\")|{_ROOT}[^\s'\"`,;:()]+")


def routes(runtimes: Runtimes) -> list[Route]:
    async def answer(request: Request) -> JSONResponse:
        found = await runtimes.found()
        return JSONResponse({"object": "list", "looked_at": runtimes.looked_at, "data": found})

    return [Route("/ssmd/v1/runtimes", answer)]


class Runtimes:
    """What was found last. Who asks while somebody looks waits for what that finds.

    looked_at: when, in seconds since 1970.
    """

    def __init__(self) -> None:
        self._looking = asyncio.Lock()
        self._found: list[dict[str, Any]] = []
        self.looked_at = 0.0
        self._fresh_until = 0.0  # by the monotonic clock

    async def found(self) -> list[dict[str, Any]]:
        """What can be used here, a minute old at most."""
        async with self._looking:
            if time.monotonic() >= self._fresh_until:
                found = await asyncio.to_thread(find, limit_s=LIMIT_S)
                self._found, self.looked_at = [_fields(one) for one in found], time.time()
                self._fresh_until = time.monotonic() + KEPT_S
        return self._found


def _fields(found: Found) -> dict[str, Any]:
    devices = [
        {"name": d.name, "description": d.description, "usable": not d.why_not, "problem": without_paths(d.why_not)}
        for d in found.devices
    ]
    return {
        "name": found.name,
        "usable": bool(found.usable),
        "problem": without_paths(found.why_not),
        "devices": devices,
    }


def without_paths(problem: str) -> str | None:
    """A reason without the paths in it, None for none."""
    return _PATH.sub("…", problem) or None
