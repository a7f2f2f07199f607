"""/ssmd/v1/stop: the end of the daemon, as a signal brings it about; for the commands of its own user alone."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.api.keys import caller_of
from ssmd.engine.terms import Rejected

log = logging.getLogger(__name__)


def routes(stop: Callable[[], None]) -> list[Route]:
    """The one route. stop: called in the event loop, once the answer is on its way; it may be called again."""

    async def begin() -> None:
        stop()

    async def answer(request: Request) -> JSONResponse:
        if not caller_of(request.scope).own:
            raise Rejected(
                "the daemon stops for its own user alone, who says: ssmd stop", status=403, code="own_token_needed"
            )
        log.info("`ssmd stop` was said: finishing what runs")
        return JSONResponse({"status": "shutting_down"}, 202, background=BackgroundTask(begin))

    return [Route("/ssmd/v1/stop", answer, methods=["POST"])]
