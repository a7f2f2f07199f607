"""/ssmd/v1/requests: answers under way, which others than their clients may follow, and end."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ssmd.api import sse
from ssmd.api.answer import Answer
from ssmd.api.keys import caller_of
from ssmd.api.under_way import Answering, UnderWay
from ssmd.engine.request import Done, Failed, joined

log = logging.getLogger(__name__)
ROOT = "/ssmd/v1/requests"


def routes(under_way: UnderWay, stall_s: float) -> list[Route]:
    async def stop(request: Request) -> JSONResponse:
        found = under_way.find(request.path_params["id"], caller_of(request.scope).domain)
        log.info("request %s: it is stopped", found.head.label)
        found.stop()
        return JSONResponse({"id": found.request.id, "object": "request.stopped"}, 202)

    return [
        Route(ROOT + "/{id}/stream", _Follow(under_way, stall_s), methods=["GET"]),
        Route(ROOT + "/{id}/stop", stop, methods=["POST"]),
    ]


class _Follow:
    """The ASGI app of an answer's second stream. It reads the deltas that the engine keeps anyway: nothing waits for
    who follows, and who is slow gets more of it at a time.
    """

    def __init__(self, under_way: UnderWay, stall_s: float) -> None:
        self._under_way, self._stall_s = under_way, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._under_way.find(scope["path_params"]["id"], caller_of(scope).domain)
        stream = sse.EventStream(send, self._stall_s)
        if scope["method"] == "HEAD":
            await stream.open(found.head.headers)
            await stream.close()
            return
        with found.delivery.followed() as news:
            left = asyncio.create_task(_departure(receive, news))
            try:
                while found.generation is None and found.end is None and not left.done():
                    news.clear()
                    await news.wait()
                if found.generation is None and isinstance(failed := found.end, Failed):
                    raise failed.error
                if left.done():
                    return
                await stream.open(found.head.headers)
                await _follow(found, found.followed(found.head), stream, news, left)
                await stream.close()
            except sse.Stalled:
                log.info("request %s: who follows it has not read for %.0f s", found.head.label, self._stall_s)
            finally:
                left.cancel()


async def _follow(
    found: Answering, answer: Answer, stream: sse.EventStream, news: asyncio.Event, left: asyncio.Task[None]
) -> None:
    """Write what there is and what comes, to the end. Raises Stalled."""
    for opening in answer.opening():
        await stream.write(opening)
    told = [0] * found.request.choices  # deltas of each choice
    while not left.done():
        news.clear()
        end = found.end  # before the rest: of what is over nothing comes later
        for i, deltas in enumerate(found.deltas):
            new = deltas[told[i] :]
            told[i] += len(new)
            for delta in joined(new):
                await stream.write(answer.delta(delta))
        if isinstance(end, Done):
            for ending in answer.ending(end.finish_reasons, end.usage):
                await stream.write(ending)
            return
        if isinstance(end, Failed):
            await stream.write(answer.failure(end.error))
            return
        await news.wait()


async def _departure(receive: Receive, news: asyncio.Event) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    news.set()
