"""The front under all protocols: from a request's body to the engine, and from its events to one answer or a stream.

A protocol reads its bodies (`Read`) and writes its answers (`Answer`). This file does the rest: repeated requests,
clients that go away or do not read, and errors before and after the first byte.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ssmd.api.generate.answer import (
    Answer,
    AnswerStopped,
    ClientGone,
    Delivery,
    InFlightAnswer,
    InFlightAnswers,
    ParsedRequest,
    Read,
    Receipt,
    ResponseInfo,
    WholeChoice,
)
from ssmd.api.generate.fair_reading import LONG_BYTES, Gate, client_of
from ssmd.api.generate.idempotency import OVERTAKEN, Attempt, Repeats, RequestIdentity, in_place_of, read_mark
from ssmd.api.http import access, sse
from ssmd.api.http.access import caller_of
from ssmd.api.http.body import parse_object, read_body
from ssmd.api.http.errors import INTERNAL
from ssmd.engine.host.host import Host
from ssmd.engine.host.loader import LeaseRequest, ModelLease
from ssmd.engine.metrics import CANCELLED, STOPPED
from ssmd.engine.persist.replay import events
from ssmd.engine.request import Delta, Event, Failure, Finish, Recall, Request, Usage, label
from ssmd.engine.sampling.trial import PendingTrial
from ssmd.engine.terms import Rejection
from ssmd.sessions.reply import Reply
from ssmd.sessions.turn import Domain

log = logging.getLogger(__name__)
T = TypeVar("T")
_MOMENT = 3  # turns of the event loop after which a client that left at once is noticed


class Front:
    """The ASGI app of an endpoint that generates.

    read_for: returns what reads a body for the caller's domain. stall_s: seconds after which a client that reads
    nothing is disconnected. silence_s: seconds between the comments of a stream that has no event yet. form: of the
    protocol's streams.
    """

    def __init__(
        self,
        host: Host,
        gate: Gate,
        read_for: Callable[[Domain], Read],
        under_way: InFlightAnswers,
        stall_s: float,
        silence_s: float,
        form: sse.StreamFormat = sse.EVENTS,
    ) -> None:
        self.host, self.under_way, self.read_for = host, under_way, read_for
        self.repeats, self.pool = Repeats(host, gate.store), gate.chats
        self._stall_s, self._silence_s, self._form = stall_s, silence_s, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery, exchange, watcher = Delivery(), None, None
        ended, key = False, caller_of(scope).name
        stream = sse.EventStream(send, self._stall_s, self._silence_s, self._form)
        try:
            http = HttpRequest(scope, receive)
            raw = await read_body(http)
            watcher = asyncio.create_task(delivery.watch(receive))
            exchange = _Exchange(self, raw, http, delivery)
            parsed = await exchange.parse()
            if parsed.only is not None:
                await JSONResponse(await exchange.only(parsed.only))(scope, receive, send)
            elif parsed.stream:
                await self._stream(exchange, stream)
            else:
                head = await exchange.begin()
                access.note(scope, answer=head.id, model=exchange.parsed.model.id)
                whole: Mapping[str, Any] | bytes | None = exchange.accepted
                if whole is None:
                    whole = await _whole(exchange.parsed.answer(head), exchange.first, delivery)
                    if (other := await exchange.overtaken()) is not None:
                        head, whole = other, await _whole(exchange.parsed.answer(other), exchange.first, delivery)
                kind = Response if isinstance(whole, bytes) else JSONResponse
                await kind(whole, headers=head.headers, media_type="application/json")(scope, receive, send)
            ended = True
        except Rejection as err:
            if exchange is None or exchange.head is None:  # else the engine has counted it
                self.host.metrics.request_failed(err.code, key)
            if exchange is None:
                raise
            err = exchange.placed(err)
            if not stream.opened:
                raise err from None
            access.note(scope, code=err.code)
            with suppress(sse.ClientStalled):
                await stream.write(exchange.parsed.answer(exchange.expected_head).failure(err))
                await stream.close()
        except ClientGone:
            begun = None if exchange is None else exchange.head
            if begun is None:
                self.host.metrics.request_failed(CANCELLED, key)
            log.info("request %s: the client went away", label("that waited", key) if begun is None else begun.label)
        except sse.ClientStalled:
            begun = None if exchange is None else exchange.head
            name = label("that waited", key) if begun is None else begun.label
            log.warning("request %s: the client has not read for %.0f s, given up", name, self._stall_s)
        finally:
            if delivery.last.done():
                last = delivery.last.result()
                if isinstance(last, Finish):
                    access.note(scope, usage=last.usage)
                elif isinstance(last, Failure):
                    access.note(scope, code=last.error.code)
            if exchange is None or exchange.head is None:
                delivery.abandon()  # stops a thread that still reads the request when the server ends
            else:
                delivery.leave()
            if watcher is not None:
                watcher.cancel()
            if exchange is not None:
                exchange.leave(ended=ended)

    async def _stream(self, exchange: _Exchange, stream: sse.EventStream) -> None:
        """Send an answer as events.

        The headers leave once the engine has the request, or with the first comment if that comes earlier. Without a
        background the opening events wait for the first word, so that clients measure the time to it.
        """
        async with stream.kept_alive(exchange.expected_head.headers):
            head = await exchange.begin()
        access.note(exchange.scope, answer=head.id, model=exchange.parsed.model.id)
        answer, delivery = exchange.parsed.answer(head), exchange.delivery
        if not stream.opened:
            await stream.open(head.headers)
        if exchange.retold:
            assert exchange.parsed.receipt is not None
            await exchange.parsed.receipt.again(exchange.request, head.id, stream, delivery.left)
            await stream.close()
            return
        openings = list(answer.opening())
        if exchange.parsed.background:
            await _write_all(stream, openings)
            openings = []
        async with stream.kept_alive(head.headers):
            event = await exchange.first()
        try:
            if not isinstance(event, Failure):
                await _write_all(stream, openings)
            elif openings:
                answer = exchange.parsed.answer(head)  # one that knows that nothing was sent
            while isinstance(event, Delta):
                await stream.write(answer.delta(event))
                event = await delivery.next()
            if isinstance(event, Failure):
                await stream.write(answer.failure(event.error))
            elif isinstance(event, Finish) and await exchange.overtaken() is not None:
                await stream.write(answer.failure(OVERTAKEN))
            elif isinstance(event, Finish):
                await _write_all(stream, answer.ending(event.finish_reasons, event.usage))
        except (ClientGone, sse.ClientStalled):
            raise
        except Exception:  # a bug, after the status was sent: the client gets an error event
            log.exception("request %s failed while streaming", head.label)
            head.cancel()
            await stream.write(answer.failure(INTERNAL))
        await stream.close()


class _Exchange:
    """One request, from its body to the first event of its answer."""

    def __init__(self, front: Front, raw: bytes, http: HttpRequest, delivery: Delivery) -> None:
        self.delivery, self.scope = delivery, http.scope
        self.head: ResponseInfo | None = None  # once the engine has the request, or an earlier answer is replayed
        self.retold = False  # its receipt writes the events of an earlier attempt's answer
        self.accepted: bytes | None = None  # JSON for the client of an answer that goes on without it
        self._front, self._raw, self._http = front, raw, http
        self._host = front.host
        self._caller, self._client, self._arrived = caller_of(http.scope), client_of(http), time.perf_counter()
        self._lease = ExitStack()  # releases the model
        self._parsed: ParsedRequest | None = None
        self._mark: RequestIdentity | None = None
        self._request: Request | None = None
        self._answering: InFlightAnswer | None = None
        self._attempt: Attempt | None = None
        self._asked = self._arrived  # perf_counter at which it asked for the model

    @property
    def parsed(self) -> ParsedRequest:
        assert self._parsed is not None, "parse comes first"
        return self._parsed

    @property
    def request(self) -> Request:
        assert self._request is not None, "parse comes first"
        return self._request

    def placed(self, error: Rejection) -> Rejection:
        """Return an error with its place in the body as the protocol names it."""
        return error if self._parsed is None else self._parsed.placed(error)

    @property
    def expected_head(self) -> ResponseInfo:
        """Return the head of the response, as far as it is known."""
        assert self._request is not None, "parse comes first"
        if self.head is not None:
            return self.head
        head = ResponseInfo(self._request.id, int(time.time()), self._request.session, self._caller.name)
        return self.parsed.headed(head)

    async def parse(self) -> ParsedRequest:
        """Read the body. Raises Rejection, ClientGone and AnswerStopped."""
        name, headers, path = self._caller.name, self._http.headers, self.scope["path"]
        if len(self._raw) > LONG_BYTES:
            self._mark = await self._run(partial(read_mark, headers, self._raw, name, path))
        else:
            self._mark = read_mark(headers, self._raw, name, path)
            for _ in range(_MOMENT):
                await asyncio.sleep(0)
        if not self._mark.repeats:
            self._check(self._mark)
        self.delivery.check()
        self._parsed = await self._run(self._look_at)
        if self._parsed.background:
            self.delivery.go_on()
        self.delivery.check()
        self._request = replace(
            self._parsed.request,
            client=self._client,
            model=self._parsed.model.id,
            domain=self._caller.domain,
            arrived=self._arrived,
        )
        return self._parsed

    async def begin(self) -> ResponseInfo:
        """Submit the request to the engine, or replay its earlier answer. Return the head of the response.

        Raises Rejection, ClientGone and AnswerStopped.
        """
        assert self._request is not None, "parse comes first"
        assert self._mark is not None
        if not (self._request.store and self._host.keeps):
            return self._begun(await self._submit(self._request))
        if self.parsed.receipt is not None:
            earlier = self._front.repeats.accepted(self._mark)
            if earlier:
                return await self._join(earlier, self.parsed.receipt)
        elsewhere = self._request.domain if self.parsed.receipt is None else None  # a receipt's events are kept here
        attempt, reply = await self._front.repeats.enter(self._mark, self.delivery, self._client, elsewhere)
        if reply is not None and reply.complete:
            attempt.end()
            self.retold = self.parsed.receipt is not None and self.parsed.stream
            return self._replayed(reply)
        self._attempt = attempt
        try:
            self.delivery.check()
            attempt.accepted = self._request.id if self.parsed.receipt is not None else ""
            head = await self._submit(in_place_of(self._request, self._mark, reply))
        except BaseException as err:  # of any kind: a retry must not wait for this attempt
            attempt.end(err if isinstance(err, Rejection) else INTERNAL)
            raise
        attempt.follow(self.delivery, head.id)
        return self._begun(head)

    async def only(self, what: Literal["load", "unload"]) -> Mapping[str, Any] | bytes:
        """Load or unload the request's model, and return the answer that says so. Raises Rejection and ClientGone."""
        assert self._request is not None, "parse comes first"
        began = time.perf_counter()
        if what == "unload":
            self._host.unload(self.parsed.model)
        else:
            (await self._lend(self._request)).release()
        took_ms = (time.perf_counter() - began) * 1e3
        return self.parsed.answer(self.expected_head).whole((), Usage.of_nothing(None, took_ms))

    async def first(self) -> Event:
        """Return the answer's first event. The request is submitted again whenever an engine recalls it."""
        while isinstance(event := await self.delivery.next(), Recall):
            await self._again()
        return event

    def leave(self, *, ended: bool) -> None:
        """Release the model. ended: False cancels the answer, unless it goes on in the background."""
        if self.accepted is not None:  # its own task does
            return
        if self.head is not None and not ended:
            if self.delivery.background:
                self.delivery.last.add_done_callback(partial(_closed, self._lease.pop_all()))
            else:
                self.head.cancel()
        self._lease.close()

    async def overtaken(self) -> ResponseInfo | None:
        """Return the head of another machine's answer, whose events are delivered next, if that one counts.

        So it is where this machine slept while it answered, and another one took over. Raises Rejection, ClientGone.
        """
        if self._attempt is None or self._request is None:
            return None
        domain, ask = self._request.domain, self._front.repeats.overtaken
        reply = await ask(self._attempt, domain, self.delivery, self._client)
        return None if reply is None else self._replayed(reply)

    def _replayed(self, reply: Reply) -> ResponseInfo:
        """Return the head of an earlier answer, and deliver its events, but for one that a receipt tells again."""
        said = reply.answer
        if not self.retold:
            self.delivery.replay(events(reply))
        return self._begun(ResponseInfo(said["id"], said["created"], reply.session, self._caller.name, replayed=True))

    def _begun(self, head: ResponseInfo) -> ResponseInfo:
        self.head = self.parsed.headed(head)
        return self.head

    async def _run(self, work: Callable[[], T]) -> T:
        """Run work on the request in a thread, in this client's turn."""
        return await self._front.pool.run(work, self._client, len(self._raw), self.delivery)

    def _look_at(self) -> ParsedRequest:
        """Read the body. Runs in a thread, as a long conversation has megabytes. Raises Rejection, ClientGone."""
        return self._front.read_for(self._caller.domain)(parse_object(self._raw, self.delivery.check))

    def _check(self, mark: RequestIdentity) -> None:
        """Refuse the request before its body is parsed if the host cannot take it. Raises Rejection."""
        try:
            self._host.check(self._client)
        except Rejection:
            self._front.repeats.remember_failure(mark.key.digest)
            raise

    async def _submit(self, request: Request) -> ResponseInfo:
        lost = partial(self._host.metrics.request_failed, CANCELLED, self._caller.name)
        answering, receipt = InFlightAnswer(request, self.delivery, self.parsed.follow, lost), self.parsed.receipt
        self._asked = time.perf_counter()
        if receipt is None:
            self._answering = self._front.under_way.enter(answering)
            await self._engage(answering)
            return answering.head
        last, end, answering.carried = self.delivery.last, receipt.end, True

        def ended(done: Callable[[], None]) -> None:
            if answering.accepted:
                end(request, last.result(), done)
            else:
                done()

        self._answering = self._front.under_way.enter(answering, ended)
        try:
            await receipt.write(request)
            answering.accepted = True
        except BaseException as err:  # of any kind: followers must not wait for this answer
            answering.fail(err if isinstance(err, Rejection) else INTERNAL)
            raise
        finally:
            answering.noted.set()
        self.accepted = receipt.body(self.parsed.headed(answering.head), "queued")
        self._front.under_way.carry(self._go_on(answering))
        return answering.head

    async def _go_on(self, answering: InFlightAnswer) -> None:
        """Have an accepted request answered, whether or not its client is there. Raises nothing."""
        try:
            await self._engage(answering)
        except Rejection as err:
            self._host.metrics.request_failed(err.code, self._caller.name)
        except Exception:
            log.exception("request %s failed before it was answered", answering.head.label)
            self._host.metrics.request_failed(INTERNAL.code, self._caller.name)
        finally:
            self.delivery.last.add_done_callback(partial(_closed, self._lease.pop_all()))

    async def _join(self, id_: str, receipt: Receipt) -> ResponseInfo:
        """Return the head of the answer that an earlier attempt of this request was accepted with. Raises Rejection."""
        found = self._front.under_way.find(id_, self._caller.domain)
        await found.noted.wait()
        if not found.accepted:
            raise found.end.error if isinstance(found.end, Failure) else INTERNAL
        head, self.retold = replace(found.head, replayed=True), self.parsed.stream
        if not self.retold:
            self.accepted = receipt.body(self.parsed.headed(head), "queued" if found.waits else "in_progress")
        return self._begun(head)

    async def _again(self) -> None:
        """Submit the request again, which an engine gave back."""
        assert self._answering is not None, "only an engine recalls"
        self._lease.close()
        try:
            await self._engage(self._answering.recalled())
        except Rejection as err:
            self._host.metrics.request_failed(err.code, self._caller.name)
            raise
        except ClientGone:
            self._answering.lost()
            raise

    async def _engage(self, answering: InFlightAnswer) -> None:
        """Lease the model and submit the request to its engine. Raises Rejection and ClientGone."""
        try:
            if self.parsed.check is not None:
                await self._run(self.parsed.check)
            lease = None
            while lease is None:
                try:
                    lease = await self._lend(answering.request)
                except Rejection:
                    other = await self._run(self._look_at)
                    if other.model is self.parsed.model:
                        raise
                    self._parsed, answering.followed = other, other.follow  # the name means another model now
            self._lease.callback(lease.release)
            engine = lease.engine
            if self.parsed.variables:
                parsed = self.parsed
                self._parsed = await self._run(lambda: parsed.told(engine.knows))
                answering.followed = self._parsed.follow
            load_ms = (time.perf_counter() - self._asked) * 1e3
            mine = replace(answering.request, model=self.parsed.model.id, load_ms=load_ms)
            submit = partial(engine.submit_all, recallable=not self.parsed.background, wait=False)
            begun = None
            while begun is None:
                try:
                    begun = await self._run(lambda: submit(mine, self.delivery, self.delivery.check))
                except PendingTrial as pending:  # no thread waits for it
                    try:
                        await self.delivery.unless_done(pending.verdict)
                    except BaseException:
                        pending.verdict.cancel()
                        raise
                    pending.verdict.result()
            answering.begin(begun)
        except AnswerStopped:
            self._host.metrics.request_failed(STOPPED, self._caller.name)
            answering.end_unbegun((time.perf_counter() - self._asked) * 1e3)
        except BaseException as err:  # of any kind: followers must not wait for this answer
            answering.fail(err if isinstance(err, Rejection) else INTERNAL)
            raise

    async def _lend(self, request: Request) -> ModelLease:
        """Return a lease of the request's model, once it is loaded.

        Raises Rejection, AnswerStopped, and ClientGone if the client leaves before.
        """
        asker = LeaseRequest(request.id, request.session, request.domain.owner)
        future = self._host.lend(self.parsed.model, self.parsed.keep_alive_s, asker)
        try:
            await self.delivery.unless_done(future)
        except BaseException:
            self._host.give_up(future)
            raise
        return future.result()


async def _write_all(stream: sse.EventStream, events: Iterable[bytes]) -> None:
    for event in events:
        await stream.write(event)


async def _whole(
    answer: Answer, first: Callable[[], Awaitable[Event]], delivery: Delivery
) -> Mapping[str, Any] | bytes:
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
