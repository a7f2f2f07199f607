"""/api/pull: a pull, and its progress as lines. It goes on if the client leaves: other clients may wait for it too."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ssmd.api.generate.answer import ClientGone, Delivery, watched
from ssmd.api.generate.fair_reading import client_of
from ssmd.api.http import sse
from ssmd.api.http.body import validate
from ssmd.api.ollama.errors import LINES, error_body, line
from ssmd.api.ollama.models import NameBody
from ssmd.api.operation import Service
from ssmd.api.own import pulls
from ssmd.api.own.pulls import PullBody
from ssmd.engine.host.models import untagged
from ssmd.engine.terms import Rejection

log = logging.getLogger(__name__)
_LOOK_S = 0.2  # time between two looks at a pull
_WAITING = "waiting"


class OllamaPullBody(NameBody):
    """The fields of a pull. insecure: ignored, as ssmd's own source is asked."""

    stream: bool | None = None
    insecure: bool | None = None


class Pull:
    """The ASGI app."""

    def __init__(self, on: Service) -> None:
        self._pulls, self._pool, self._stall_s = on.pulls, on.pool, on.stall_s
        self._silence_s = on.settings.stream_comment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await self._pool.body(request, OllamaPullBody)
        wanted = validate(PullBody, {"model": untagged(body.asked)[:200]})
        row = await self._pool.run(partial(pulls.begin, self._pulls, wanted), client_of(request))
        stream = sse.EventStream(send, self._stall_s, form=LINES)
        async with watched(receive) as delivery:
            try:
                if body.stream is False:
                    await self._whole(row["id"], delivery)
                    await JSONResponse({"status": "success"})(scope, receive, send)
                else:
                    await stream.open({})
                    await self._tell(row["id"], stream, delivery)
                    await stream.close()
            except (ClientGone, sse.ClientStalled):
                log.info("a client left its pull of %s, which goes on", wanted.model)

    async def _whole(self, id_: str, delivery: Delivery) -> None:
        """Wait for the end of a pull. Raises Rejection if it fails, and ClientGone."""
        seen = self._pulls.changes
        while not (row := self._row(id_))["ended_at"]:
            while self._pulls.changes == seen:
                delivery.check()
                await asyncio.sleep(_LOOK_S)
            seen = self._pulls.changes
        _check(row)

    async def _tell(self, id_: str, stream: sse.EventStream, delivery: Delivery) -> None:
        """Write a line for each news of a pull, and its end. Raises ClientGone and ClientStalled."""
        before, news = dict[str, Any](), dict[str, Any]()
        written, seen = time.monotonic(), -1
        while True:
            delivery.check()
            if self._pulls.changes != seen:  # hundreds of clients may wait for one pull
                seen, row = self._pulls.changes, self._row(id_)
                if row["ended_at"]:
                    break
                news = _progress(row)
            if news != before:
                await stream.write(line(news))
                before, written = news, time.monotonic()
            elif time.monotonic() - written >= self._silence_s:
                await stream.write(LINES.comment)
                written = time.monotonic()
            await asyncio.sleep(_LOOK_S)
        try:
            _check(row)
        except Rejection as err:
            await stream.write(line(error_body(err)))
        else:
            await stream.write(line({"status": "success"}))

    def _row(self, id_: str) -> dict[str, Any]:
        """Return a pull's row. One that is forgotten has ended long ago."""
        return pulls.row(self._pulls, id_) or {"id": id_, "state": "done", "ended_at": 1.0}


def _check(row: dict[str, Any]) -> None:
    """Raise Rejection if a pull that has ended did not end well."""
    if row["state"] == "failed":
        raise Rejection(f"{row['model']} could not be pulled: {row['error']}", status=500, code="pull_failed")
    if row["state"] == "cancelled":
        raise Rejection(f"the pull of {row['model']} was cancelled", status=500, code="pull_cancelled")


def _progress(row: dict[str, Any]) -> dict[str, Any]:
    """Return the line for a pull under way. digest: its id; clients show counts of a line that has one."""
    if row["state"] == "waiting":
        return {"status": _WAITING}
    status = row["stage"] or "pulling manifest"
    if row["total"] is None or row["done"] is None:
        return {"status": status}
    return {"status": status, "digest": row["id"], "total": row["total"], "completed": row["done"]}
