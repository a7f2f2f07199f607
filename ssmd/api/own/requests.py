"""/ssmd/v1/requests: the answers under way, which any allowed client may follow or stop."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ssmd.api.generate.answer import Answer, InFlightAnswer, departure
from ssmd.api.http import sse
from ssmd.api.http.access import caller_of
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.request import Failure, Finish, joined

log = logging.getLogger(__name__)


def stop(on: Service) -> Endpoint:
    """Build the endpoint that stops an answer."""

    async def answer(request: HttpRequest) -> JSONResponse:
        found = on.under_way.find(request.path_params["id"], caller_of(request.scope).domain)
        log.info("request %s: stopped by a client", found.head.label)
        found.stop()
        return JSONResponse({"id": found.request.id, "object": "request.stopped"}, 202)

    return answer


class Follow:
    """The ASGI app of an answer's second stream, for followers.

    It reads the deltas that the engine keeps anyway. So no thread waits for a follower, and a slow follower gets more
    deltas at a time.
    """

    def __init__(self, on: Service) -> None:
        self._under_way, self._stall_s = on.under_way, on.stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._under_way.find(scope["path_params"]["id"], caller_of(scope).domain)
        stream = sse.EventStream(send, self._stall_s)
        if scope["method"] == "HEAD":
            await stream.open(found.head.headers)
            await stream.close()
            return
        with found.delivery.followed() as news:
            left = asyncio.create_task(departure(receive, news))
            try:
                while found.generation is None and found.end is None and not left.done():
                    news.clear()
                    await news.wait()
                if found.generation is None and isinstance(failed := found.end, Failure):
                    raise failed.error
                if left.done():
                    return
                await stream.open(found.head.headers)
                await _follow(found, found.followed(found.head), stream, news, left)
                await stream.close()
            except sse.ClientStalled:
                log.info("request %s: a follower has not read for %.0f s", found.head.label, self._stall_s)
            finally:
                left.cancel()


async def _follow(
    found: InFlightAnswer, answer: Answer, stream: sse.EventStream, news: asyncio.Event, left: asyncio.Task[None]
) -> None:
    """Write an answer's deltas so far and to come, until its end or until the follower leaves. Raises ClientStalled."""
    for opening in answer.opening():
        await stream.write(opening)
    told = [0] * found.request.choices  # number of deltas sent, by choice
    while not left.done():
        news.clear()
        end = found.end  # read before the deltas: no delta comes after the end
        for i, deltas in enumerate(found.deltas):
            new = deltas[told[i] :]
            told[i] += len(new)
            for delta in joined(new):
                await stream.write(answer.delta(delta))
        if isinstance(end, Finish):
            for ending in answer.ending(end.finish_reasons, end.usage):
                await stream.write(ending)
            return
        if isinstance(end, Failure):
            await stream.write(answer.failure(end.error))
            return
        await news.wait()
