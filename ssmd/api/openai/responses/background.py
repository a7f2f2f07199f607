"""Responses in the background: their receipts, and the events of any response, followed or sent again.

A response is accepted when its receipt is stored, before its client gets its id. The commit of its turn removes the
receipt, so that a response has one of the two. A receipt that a killed daemon left is that of a failed response.

All readers of a response get the same events under the same numbers. They read the deltas that the engine keeps anyway,
or those of the stored answer, which is cut where the deltas did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ssmd.api.generate.answer import Answer, InFlightAnswer, Receipt, ResponseInfo, departure
from ssmd.api.http import sse
from ssmd.api.http.errors import cut
from ssmd.api.openai.responses.answer import ResponseAnswer, ResponseForm, encoded, ending, response_id
from ssmd.api.openai.responses.stored import form_of
from ssmd.api.operation import Service
from ssmd.engine.decode.sharing import unavailable
from ssmd.engine.persist.replay import cut_again, parts_of
from ssmd.engine.request import Delta, Event, Failure, Finish, Request, Usage, generation_of, turn_of
from ssmd.engine.terms import Rejection
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, Turn

log = logging.getLogger(__name__)
MAX_ECHO_CHARS = 16 << 10  # of a receipt's echo, in JSON; of a longer one only small fields are kept
_LONG_FIELDS = ("text", "tool_choice", "metadata")
_SERVER_ERROR = "server_error"
_LOST = Rejection(
    "The daemon ended before it stored the answer, and the answer is lost. Send the request again.",
    status=500,
    code=_SERVER_ERROR,
)
_NOT_STORED = Rejection(
    "The daemon could not store the answer, and the answer is lost. GET /health says why; then send the request again.",
    status=500,
    code=_SERVER_ERROR,
)


class Receipts:
    """Writes the receipts of responses in the background, as a trust domain's."""

    def __init__(self, on: Service, store: Store, events: Callable[[Store, str, int], Iterator[bytes]]) -> None:
        """Begin. events: yields those of a stored response, by its id, after a number."""
        self._events = events
        self._store, self._pool, self._writer = store, on.gate.store, on.host.writer
        self._under_way, self._most = on.under_way, on.settings.max_queue

    def of(self, written: Callable[[ResponseInfo], ResponseAnswer]) -> Receipt:
        """Return the receipt of a request. written: builds its answer."""
        return Receipt(self._write, self._end, lambda head, status: written(head).object(status), self._again)

    async def _write(self, request: Request) -> None:
        running = self._under_way.carried
        if len(running) > self._most:  # this one is among them
            said = (
                f"Too many requests: {self._most} responses are under way in the background already. Try again later."
            )
            raise unavailable(said, "queue_full")
        facts = _receipt(request)
        write = partial(self._store.receive, turn_of(request.id), facts, [turn_of(id_) for id_ in running])
        try:
            await self._pool.run(write, request.client)
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err

    async def _again(self, request: Request, id_: str, stream: sse.EventStream, gone: asyncio.Event) -> None:
        try:
            found = self._under_way.find(id_, request.domain)
        except Rejection:
            stored = partial(self._events, self._store, response_id(id_), -1)
            await write_all(await self._pool.run(stored, request.client), stream, gone)
        else:
            await follow(found, -1, stream, gone)

    def _end(self, request: Request, last: Event, done: Callable[[], None]) -> None:
        """Write how a response ended that got no turn, on the writer's thread. Then call `done`."""
        if self._writer is None or (isinstance(last, Finish) and last.usage.stored):
            done()
            return
        loop = asyncio.get_running_loop()
        status, error = _ended(last)
        facts = {**_receipt(request), "status": status}
        if error is not None:
            facts["error"] = {"code": error.code, "message": cut(error.message)}

        def work() -> None:
            try:
                self._store.end_receipt(turn_of(request.id), facts)
            except StoreError as err:  # its response is a failed one all the same
                log.warning("response %s: its end was not stored: %s", request.id, err)
            finally:
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(done)

        self._writer.after(work)


def _receipt(request: Request) -> dict[str, Any]:
    """Return the facts of a receipt: no words of the conversation are among them."""
    assert request.facts is not None, "a response has facts"
    echo = request.facts["echo"]
    if len(encoded(echo)) > MAX_ECHO_CHARS:
        echo = {name: value for name, value in echo.items() if name not in _LONG_FIELDS}
    return {"model": request.facts["model"], "echo": echo, "created": request.created}


def _ended(last: Event) -> tuple[str, Rejection | None]:
    """Return (status, error) of a response without a turn."""
    if isinstance(last, Finish):
        return ("cancelled", None) if last.usage.stopped else ("failed", _NOT_STORED)
    return "failed", last.error if isinstance(last, Failure) else _LOST


def object_under_way(found: InFlightAnswer) -> bytes:
    """Return a response that is under way, as JSON."""
    return _answer(found).object("queued" if found.accepted and found.waits else "in_progress")


def object_of_receipt(turn: str, receipt: Mapping[str, Any]) -> bytes:
    """Return a response that ended without a turn, as JSON."""
    return _of_receipt(turn, receipt, -1).object(*_status_of(receipt))


def response_of(turn: str) -> str:
    """Return the id of the response whose turn has this id."""
    return response_id(generation_of(turn))


def retold_end(turn: str, receipt: Mapping[str, Any], after: int) -> Iterator[bytes]:
    """Yield the events of a response that ended without a turn, but those up to number `after`.

    Its last event comes in any case, with a number after that: its earlier events are not known any more.
    """
    answer = _of_receipt(turn, receipt, after)
    yield from answer.opening()
    answer.at_least(after + 1)
    status, error = _status_of(receipt)
    if error is None:
        yield from answer.closing(status, None, None)
    else:
        yield answer.failure(error)


def _of_receipt(turn: str, receipt: Mapping[str, Any], after: int) -> ResponseAnswer:
    echo = {**receipt["echo"], "instructions": None, "tools": []}  # texts, which no receipt has
    form = ResponseForm(receipt["model"], echo, store=True, origins={}, encrypts=False)
    head = ResponseInfo(generation_of(turn), receipt["created"], None)
    return ResponseAnswer(form, encoded(form.echo), head, after)


def _status_of(receipt: Mapping[str, Any]) -> tuple[str, Rejection | None]:
    """Return (status, error) by a receipt. One without a status is what a daemon left that ended meanwhile."""
    error = receipt.get("error")
    if error is not None:
        return receipt["status"], Rejection(error["message"], status=500, code=error["code"])
    return ("failed", _LOST) if "status" not in receipt else (receipt["status"], None)


def retold(turn: Turn, facts: Mapping[str, Any], instructions: str | None, after: int) -> Iterator[bytes]:
    """Yield the events of a stored response, but those up to number `after`.

    One that was not in the background has each item's text in one delta. Log-probabilities are left out.
    """
    echo = {**facts["echo"], "instructions": instructions, "tools": []}
    form = replace(form_of(facts), model=facts["model"], echo=echo)
    usage = Usage(**facts["usage"])
    head = ResponseInfo(generation_of(turn.id), facts["created"], turn.session)
    answer = ResponseAnswer(form, encoded(echo), head, after)
    yield from answer.opening()
    for delta in _deltas(turn, facts):
        yield answer.part(delta)
    status, why = ending(facts["finish_reason"], usage, background=form.background, complete=turn.complete)
    yield from answer.closing(status, why, usage, int(turn.created_at.timestamp()))


def _deltas(turn: Turn, facts: Mapping[str, Any]) -> Iterable[Delta]:
    """Return the deltas of a stored answer."""
    parts = parts_of(turn.answer, facts)
    found = cut_again(facts.get("cuts", []), parts)
    return parts if found is None else found


class EventResponse(Response):
    """A stream of events."""

    def __init__(
        self,
        write: Callable[[sse.EventStream, asyncio.Event], Awaitable[None]],
        headers: Mapping[str, str],
        stall_s: float,
        silence_s: float,
    ) -> None:
        """Make a stream that is not open yet.

        write: writes the events, until the client leaves; it gets the stream, and an event that is set then. headers:
        those of ssmd. stall_s, silence_s: as of an EventStream.
        """
        super().__init__()
        self._write, self._own, self._stall_s, self._silence_s = write, headers, stall_s, silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream, gone = sse.EventStream(send, self._stall_s, self._silence_s), asyncio.Event()
        left = asyncio.create_task(departure(receive, gone))
        try:
            await stream.open(self._own)
            if scope["method"] != "HEAD":
                await self._write(stream, gone)
            await stream.close()
        except sse.ClientStalled:
            log.info("a follower of a response has not read for %.0f s, given up", self._stall_s)
        finally:
            left.cancel()


async def write_all(events: Iterable[bytes], stream: sse.EventStream, gone: asyncio.Event) -> None:
    """Write events until the client leaves. Raises ClientStalled."""
    for event in events:
        if gone.is_set():
            return
        if event:
            await stream.write(event)
            await asyncio.sleep(0)  # a burst of events must not keep the loop from other clients


async def follow(found: InFlightAnswer, after: int, stream: sse.EventStream, gone: asyncio.Event) -> None:
    """Write the events of a response above number `after`: those so far, then new ones. Raises ClientStalled.

    A failure comes in any case, as in `retold_end`. The events are read from the engine's own list, so that a slow
    reader needs no memory.
    """
    answer, told = _answer(found), 0
    answer.after = after
    await write_all(answer.opening(), stream, gone)
    with found.delivery.followed() as news:
        leaves = asyncio.create_task(_pass_on(gone, news))
        try:
            while not gone.is_set():
                news.clear()
                end = found.end  # read before the deltas: no delta comes after the end
                deltas = found.deltas[0] if found.deltas else ()
                new = deltas[told:]
                told += len(new)  # the engine may have added some meanwhile
                await write_all(map(answer.delta, new), stream, gone)
                if isinstance(end, Finish):
                    await write_all(answer.ending(end.finish_reasons, end.usage), stream, gone)
                elif isinstance(end, Failure):
                    answer.at_least(after + 1)
                    await write_all([answer.failure(end.error)], stream, gone)
                if end is not None:
                    return
                async with stream.kept_alive({}):
                    await news.wait()
        finally:
            leaves.cancel()


async def _pass_on(gone: asyncio.Event, news: asyncio.Event) -> None:
    await gone.wait()
    news.set()


def _answer(found: InFlightAnswer) -> ResponseAnswer:
    answer: Answer = found.followed(found.head)
    assert isinstance(answer, ResponseAnswer), "only responses have facts"
    return answer
