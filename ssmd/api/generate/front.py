"""The front under all protocols: from a request's body to the engine, and from its events to one answer or a stream.

A protocol reads its bodies (`Read`) and writes its answers (`Answer`). This file does the rest: repeated requests,
clients that go away or do not read, and errors before and after the first byte.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ssmd.api.generate.answer import Answer, ParsedRequest, Read, ResponseInfo, WholeChoice
from ssmd.api.generate.delivery import AnswerStopped, ClientGone, Delivery
from ssmd.api.generate.fair_reading import LONG_BYTES, RequestReaders, client_of
from ssmd.api.generate.idempotency import Repeats, RequestIdentity, in_place_of, read_mark
from ssmd.api.generate.in_flight import InFlightAnswer, InFlightAnswers
from ssmd.api.http import access, sse
from ssmd.api.http.body import parse_object, read_body
from ssmd.api.http.errors import INTERNAL
from ssmd.api.http.keys import caller_of
from ssmd.engine.host.host import Host
from ssmd.engine.host.loader import LeaseRequest, ModelLease
from ssmd.engine.metrics import CANCELLED, STOPPED
from ssmd.engine.persist.replay import events
from ssmd.engine.request import Delta, Event, Failure, Finish, Recall, Request, label
from ssmd.engine.terms import Rejection

log = logging.getLogger(__name__)
T = TypeVar("T")
Again = Callable[[], Awaitable[None]]
First = Callable[[], Awaitable[Event]]  # gives the first event of an answer


_MOMENT = 3  # turns of the event loop after which a client that left at once is noticed


class Front:
    """The ASGI app of an endpoint that generates. It gives up a client that reads nothing for `stall_s` seconds."""

    def __init__(self, host: Host, read: Read, under_way: InFlightAnswers, stall_s: float) -> None:
        self._host, self._under_way = host, under_way
        self._read = read
        self._stall_s = stall_s
        self._repeats = Repeats(host)
        self._reading = RequestReaders(host.runs_others)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery, head, watcher = Delivery(), None, None
        ended, key, held = False, caller_of(scope).name, ExitStack()
        try:
            http = HttpRequest(scope, receive)
            raw = await read_body(http)
            watcher = asyncio.create_task(delivery.watch(receive))
            asking, head, again = await self._begin(raw, http, delivery, held)
            head = asking.headed(head)
            access.note(scope, answer=head.id, model=asking.model.id)
            first, answer = partial(_first, delivery, again), asking.answer(head)
            if asking.stream:
                await self._stream(answer, head, first, delivery, send, at_once=asking.background)
            else:
                whole = await _whole(answer, first, delivery)
                await JSONResponse(whole, headers=head.headers)(scope, receive, send)
            ended = True
        except Rejection as err:
            if head is None:  # else the engine has counted it
                self._host.metrics.request_failed(err.code, key)
            raise
        except ClientGone:
            if head is None:
                self._host.metrics.request_failed(CANCELLED, key)
            log.info("request %s: the client went away", label("that waited", key) if head is None else head.label)
        except sse.ClientStalled:
            log.warning("request %s: the client has not read for %.0f s, given up", head and head.label, self._stall_s)
        finally:
            if delivery.last.done():
                last = delivery.last.result()
                if isinstance(last, Finish):
                    access.note(scope, usage=last.usage)
                elif isinstance(last, Failure):
                    access.note(scope, code=last.error.code)
            if head is None:
                delivery.abandon()  # stops a thread that still reads the request when the server ends
            else:
                delivery.leave()
            if watcher is not None:
                watcher.cancel()
            if head is not None and not ended:
                if delivery.background:
                    delivery.last.add_done_callback(partial(_closed, held.pop_all()))
                else:
                    head.cancel()
            held.close()

    async def _begin(
        self, raw: bytes, http: HttpRequest, delivery: Delivery, held: ExitStack
    ) -> tuple[ParsedRequest, ResponseInfo, Again]:
        """Read a request, and submit it to the engine or replay its earlier answer.

        Returns the body, the head, and a function that submits it again if the engine gives it back. held: gets the
        release of the model's lease.
        """
        caller, arrived = caller_of(http.scope), time.perf_counter()
        client = client_of(http)

        async def read(work: Callable[[], T]) -> T:
            return await self._reading.run(work, client, len(raw), delivery)

        if len(raw) > LONG_BYTES:
            mark = await asyncio.to_thread(read_mark, http.headers, raw, caller.name)
        else:
            mark = read_mark(http.headers, raw, caller.name)
            for _ in range(_MOMENT):
                await asyncio.sleep(0)
        if not mark.repeats:
            self._check(mark, client)
        delivery.check()
        asking = await read(lambda: self._look_at(raw, delivery.check))
        if asking.background:
            delivery.go_on()
        delivery.check()
        request = replace(asking.request, client=client, domain=caller.domain, arrived=arrived)

        async def engage(answering: InFlightAnswer, asked: float) -> None:
            """Lease the model and submit the request to its engine. Raises Rejection and ClientGone."""
            nonlocal asking
            try:
                lease = None
                while lease is None:
                    try:
                        lease = await self._lend(asking, answering.request, delivery)
                    except Rejection:
                        other = await read(lambda: self._look_at(raw, delivery.check))
                        if other.model is asking.model:
                            raise
                        asking, answering.followed = other, other.follow  # the name means another model now
                held.callback(lease.release)
                if asking.variables:
                    engine = lease.engine
                    asking = await read(lambda: asking.told(engine.knows))
                    answering.followed = asking.follow
                mine = replace(answering.request, load_ms=(time.perf_counter() - asked) * 1e3)
                submit = partial(lease.engine.submit_all, recallable=not asking.background)
                answering.begin(await read(lambda: submit(mine, delivery, delivery.check)))
            except AnswerStopped:
                self._host.metrics.request_failed(STOPPED, caller.name)
                answering.end_unbegun((time.perf_counter() - asked) * 1e3)
            except BaseException as err:  # of any kind: followers must not wait for this answer
                answering.fail(err if isinstance(err, Rejection) else INTERNAL)
                raise

        async def submit(request: Request) -> tuple[ParsedRequest, ResponseInfo, Again]:
            lost = partial(self._host.metrics.request_failed, CANCELLED, caller.name)
            answering = self._under_way.enter(InFlightAnswer(request, delivery, asking.follow, lost))
            asked = time.perf_counter()
            await engage(answering, asked)

            async def again() -> None:
                held.close()
                try:
                    await engage(answering.recalled(), asked)
                except Rejection as err:
                    self._host.metrics.request_failed(err.code, caller.name)
                    raise
                except ClientGone:
                    lost()
                    raise

            return asking, answering.head, again

        if not (request.store and self._host.keeps):
            return await submit(request)
        attempt, reply = await self._repeats.enter(mark, delivery)
        if reply is not None and reply.complete:
            attempt.end()
            delivery.replay(events(reply))
            said = reply.answer
            return asking, ResponseInfo(said["id"], said["created"], reply.session, caller.name, replayed=True), _never
        try:
            delivery.check()
            begun = await submit(in_place_of(request, mark, reply))
        except BaseException as err:  # of any kind: a retry must not wait for this attempt
            attempt.end(err if isinstance(err, Rejection) else INTERNAL)
            raise
        attempt.follow(delivery, begun[1].id)
        return begun

    async def _lend(self, asking: ParsedRequest, request: Request, delivery: Delivery) -> ModelLease:
        """Return a lease of the request's model, once it is loaded.

        Raises Rejection, AnswerStopped, and ClientGone if the client leaves before.
        """
        asker = LeaseRequest(request.id, request.session, request.domain.owner)
        future = self._host.lend(asking.model, asking.keep_alive_s, asker)
        if not future.done():
            there, loop = asyncio.Event(), asyncio.get_running_loop()
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(there.set))
            try:
                await delivery.unless_gone(there)
            except BaseException:
                self._host.give_up(future)
                raise
        return future.result()

    def _check(self, mark: RequestIdentity, client: str) -> None:
        """Refuse a request before its body is parsed if the host cannot take it. Raises Rejection."""
        try:
            self._host.check(client)
        except Rejection:
            self._repeats.remember_failure(mark.key.digest)
            raise

    def _look_at(self, raw: bytes, go_on: Callable[[], None]) -> ParsedRequest:
        """Read a body. Runs in a thread, as a long conversation has megabytes. Raises Rejection, and as `go_on`."""
        return self._read(parse_object(raw, go_on))

    async def _stream(
        self, answer: Answer, head: ResponseInfo, first: First, delivery: Delivery, send: Send, *, at_once: bool
    ) -> None:
        """Send an answer as events.

        at_once: send the headers before the first event. The client then knows the id of an answer that goes on
        without it.
        """
        stream = sse.EventStream(send, self._stall_s)
        if at_once:
            await self._open(stream, answer, head)
        event = await first()
        if not at_once:
            if isinstance(event, Failure):  # nothing was sent yet, so a plain error response is possible
                raise event.error
            await self._open(stream, answer, head)
        try:
            while isinstance(event, Delta):
                await stream.write(answer.delta(event))
                event = await delivery.next()
            if isinstance(event, Failure):
                await stream.write(answer.failure(event.error))
            elif isinstance(event, Finish):
                for ending in answer.ending(event.finish_reasons, event.usage):
                    await stream.write(ending)
        except (ClientGone, sse.ClientStalled):
            raise
        except Exception:  # a bug, after the status was sent: the client gets an error event
            log.exception("request %s failed while streaming", head.label)
            head.cancel()
            await stream.write(answer.failure(INTERNAL))
        await stream.close()

    async def _open(self, stream: sse.EventStream, answer: Answer, head: ResponseInfo) -> None:
        await stream.open(head.headers)
        for opening in answer.opening():
            await stream.write(opening)


async def _first(delivery: Delivery, again: Again) -> Event:
    """Return an answer's first event. Its request is submitted again whenever an engine recalls it."""
    while isinstance(event := await delivery.next(), Recall):
        await again()
    return event


async def _never() -> None:
    """Stand in for `again` where an answer is replayed: no engine can recall it."""


async def _whole(answer: Answer, first: First, delivery: Delivery) -> Mapping[str, Any]:
    """Return the whole answer, once it is complete. Raises Rejection if it broke off."""
    deltas: dict[int, list[Delta]] = {}
    event = await first()
    while isinstance(event, Delta):
        deltas.setdefault(event.index, []).append(event)
        event = await delivery.next()
    if isinstance(event, Failure):
        raise event.error
    assert isinstance(event, Finish)
    choices = [WholeChoice.of(deltas.get(i, []), reason) for i, reason in enumerate(event.finish_reasons)]
    return answer.whole(choices, event.usage)


def _closed(held: ExitStack, _: object) -> None:
    held.close()
