"""An answer under way: its protocol's interface, the delivery of its events, and all that are in flight, by id.

A protocol reads a request's body, and writes its answer, whole or as events. The events come from the engine's threads
to the coroutine that answers the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from starlette.types import Receive

from ssmd.api.http.body import brief
from ssmd.api.http.errors import IGNORED, INTERNAL, REPLAYED
from ssmd.api.http.sse import EventStream
from ssmd.engine.decode.generation import Generation
from ssmd.engine.decode.several import MultiPrompt
from ssmd.engine.host.models import Model
from ssmd.engine.request import (
    Delta,
    Event,
    Failure,
    Finish,
    FinishReason,
    Request,
    TokenLogprob,
    Usage,
    calls_of,
    label,
)
from ssmd.engine.terms import Rejection
from ssmd.sessions.turn import Domain
from ssmd.text.messages import ToolCall

log = logging.getLogger(__name__)
MOST_WAITING = 10_000  # most events that wait for a client, of a few kilobytes each with log probabilities
_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")  # of an id as the answer has it


@dataclass(frozen=True)
class ResponseInfo:
    """The facts of an answer that are known before its first event."""

    id: str
    created: int  # seconds since 1970
    session: str | None
    key: str = ""  # name of the API key
    replayed: bool = False
    ignored: tuple[str, ...] = ()  # ignored fields of the request, as Fields names them
    dropped: tuple[str, ...] = ()  # known volatile text that was left out of its system prompt, by name
    cancel: Callable[[], None] = lambda: None
    usage: Callable[[], Usage | None] = lambda: None  # returns what is counted so far

    @property
    def label(self) -> str:
        """Return the answer's name in the log."""
        return label(self.id, self.key)

    @property
    def headers(self) -> dict[str, str]:
        """Return ssmd's own response headers, the same in any protocol."""
        session = {} if self.session is None else {"x-ssmd-session": self.session}
        ignored = {IGNORED: ", ".join(self.ignored)} if self.ignored else {}
        return session | ignored | ({REPLAYED: "true"} if self.replayed else {})


@dataclass(frozen=True)
class WholeChoice:
    """One of the n choices, complete. logprobs: empty unless the request asked for them."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    deltas: Sequence[Delta] = ()  # the same in the order in which it was written

    @staticmethod
    def of(deltas: Sequence[Delta], finish_reason: FinishReason) -> WholeChoice:
        """Join the deltas of a choice."""
        said = "".join(delta.text for delta in deltas if not delta.reasoning)
        thought = "".join(delta.text for delta in deltas if delta.reasoning)
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
        return WholeChoice(said, logprobs, finish_reason, thought, calls_of(deltas), deltas)


class Answer(ABC):
    """Writes the answer to one request in its protocol: as one object, or as a stream's events, each as bytes."""

    @abstractmethod
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Mapping[str, Any] | bytes:
        """Return the answer as one JSON object; as bytes, if parts of it may be long and were encoded before."""

    @abstractmethod
    def opening(self) -> Iterable[bytes]:
        """Return the events before the first word."""

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """Return the event of a delta: new text, or more of a call."""

    @abstractmethod
    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterable[bytes]:
        """Return the events after the last word of every choice."""

    @abstractmethod
    def failure(self, error: Rejection) -> bytes:
        """Return the event that ends a stream which broke off."""


@dataclass(frozen=True)
class Receipt:
    """The record of a request that goes on without its client.

    write: writes it, before the client gets the answer's id; raises Rejection. end: writes how the answer ended, then
    calls a function in the event loop. body: returns the JSON for the client, with a status. again: writes the events
    of the answer that an earlier attempt got, by its id, until an asyncio event is set.
    """

    write: Callable[[Request], Awaitable[None]]
    end: Callable[[Request, Event, Callable[[], None]], None]
    body: Callable[[ResponseInfo, str], bytes]
    again: Callable[[Request, str, EventStream, asyncio.Event], Awaitable[None]]


@dataclass(frozen=True)
class ParsedRequest:
    """A request's body after it was read."""

    model: Model
    request: Request
    stream: bool  # answer as events
    answer: Callable[[ResponseInfo], Answer]  # builds the answer for the client
    followed: Callable[[ResponseInfo], Answer]  # builds the answer for a follower
    keep_alive_s: float | None = None  # how long the model stays loaded; None: as configured
    background: bool = False  # go on when the client leaves
    receipt: Receipt | None = None  # answer the client as soon as this is written
    only: Literal["load", "unload"] | None = None  # do this with the model; there is nothing to answer
    ignored: tuple[str, ...] = ()  # ignored fields of the body, as Fields names them
    dropped: tuple[str, ...] = ()  # as in a ResponseInfo
    variables: Mapping[str, str] = field(default_factory=dict)  # by field, the chat template's variable that it sets
    placed: Callable[[Rejection], Rejection] = lambda error: error  # names places of the body as its protocol does
    # Checks, before it is submitted, that what it goes on from is as it was read. In a thread; raises Rejection.
    check: Callable[[], None] | None = None
    named: Callable[[Collection[str]], tuple[str, ...]] = tuple  # names ignored fields; raises Rejection if strict

    def told(self, known: Callable[[str], bool]) -> ParsedRequest:
        """Return a copy that also lists as ignored the fields that the template does not know. Raises Rejection."""
        unknown = [name for name, variable in self.variables.items() if not known(variable)]
        return replace(self, ignored=(*self.ignored, *self.named(unknown)), variables={})

    def headed(self, head: ResponseInfo) -> ResponseInfo:
        """Return the head with the names of what was not read of this body."""
        return replace(head, ignored=self.ignored, dropped=self.dropped)

    def follow(self, head: ResponseInfo) -> Answer:
        """Build the answer for a follower, with the names of what was not read in its head."""
        return self.followed(self.headed(head))


Read = Callable[
    [dict[str, Any]], ParsedRequest
]  # reads a body's fields in one protocol; runs in a thread; raises Rejection


def own_usage(usage: Usage, ignored: Sequence[str] = (), dropped: Sequence[str] = ()) -> dict[str, Any]:
    """Return ssmd's own usage fields, the same in any protocol, beyond the token counts. Times in ms."""
    return {
        **({"model": usage.model} if usage.model else {}),
        "session": usage.session,
        "resume": usage.resume,
        "stored": usage.stored,
        "state_stored": usage.state_stored,
        **({} if usage.remote is None else {"remote": usage.remote}),
        "stopped": usage.stopped,
        "ttft_ms": round(usage.ttft_ms, 3),
        "tbt_ms": None if usage.tbt_ms is None else round(usage.tbt_ms, 3),
        "prefill_ms": round(usage.prefill_ms, 3),
        "restore_ms": round(usage.restore_ms, 3),
        "load_ms": round(usage.load_ms, 3),
        "plan_ms": round(usage.plan_ms, 3),
        "queue_ms": round(usage.queue_ms, 3),
        "shared_ms": round(usage.shared_ms, 3),
        "context_left": usage.context_left,
        "cut_messages": usage.cut_messages,
        **({} if usage.parted_at is None else {"parted_at": usage.parted_at}),
        **({"ignored": list(ignored)} if ignored else {}),
        **({"dropped": list(dropped)} if dropped else {}),
    }


class ClientGone(Exception):
    """A client that went away and does not read the answer any more."""


class AnswerStopped(Exception):
    """An answer that was stopped before the engine had its request."""


class Delivery:
    """Carries the engine's events to one request. Made in the event loop; called, as `deliver`, from any thread.

    background: the answer goes on when its client leaves.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._interrupted = asyncio.Event()
        self._followers: set[asyncio.Event] = set()
        self._gone = self._stopped = False
        self.background = False
        self.left = asyncio.Event()  # set when the client is gone
        self.last: asyncio.Future[Event] = self._loop.create_future()  # Finish or Failure, even if it is not read

    def __call__(self, event: Event) -> None:
        """Hand an event to the event loop.

        Raises ClientGone for text if MOST_WAITING events wait for the client, and RuntimeError if the loop is closed.
        """
        if self._events.qsize() >= MOST_WAITING and isinstance(event, Delta):
            log.warning("a client reads so slowly that %d events wait for it: it is disconnected", MOST_WAITING)
            self._loop.call_soon_threadsafe(self.leave)
            if not self.background:
                raise ClientGone
        self._loop.call_soon_threadsafe(self.put, event)

    def put(self, event: Event) -> None:
        """Deliver an event; in the event loop."""
        if not self._gone:
            self._events.put_nowait(event)
        if isinstance(event, Finish | Failure) and not self.last.done():
            self.last.set_result(event)
        for news in self._followers:
            news.set()

    async def next(self) -> Event:
        """Wait for the next event. Raises ClientGone as soon as the client went away."""
        if not self._events.empty():
            await asyncio.sleep(0)  # a burst of events must not keep the loop from other clients
        event = await self._events.get()
        if event is None or self._gone:
            raise ClientGone
        return event

    @contextmanager
    def followed(self) -> Iterator[asyncio.Event]:
        """Yield an asyncio event that is set at each event, and by `tell_followers`, until the context ends."""
        news = asyncio.Event()
        self._followers.add(news)
        try:
            yield news
        finally:
            self._followers.discard(news)

    def tell_followers(self) -> None:
        """Wake the followers, so that they look for news."""
        for news in self._followers:
            news.set()

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to go away; run beside the coroutine that calls `next`, after the body was read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        """Note that the client left. Work on its request ends at its next `check`, unless it is in the background."""
        self._gone = True
        self.left.set()
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)
        if not self.background:
            self._interrupted.set()

    def go_on(self) -> None:
        """Let the answer go on when its client leaves, or has left."""
        self.background = True
        if not self._stopped:
            self._interrupted.clear()

    def abandon(self) -> None:
        """Give the answer up even if it is in the background, as the server ends."""
        self.background = False
        self.leave()

    def stop(self) -> None:
        """Stop the work on the request before the engine has it."""
        self._stopped = True
        self._interrupted.set()

    def check(self) -> None:
        """Check that the answer is still wanted. Raises ClientGone and AnswerStopped."""
        if self._stopped:
            raise AnswerStopped
        if self._gone and not self.background:
            raise ClientGone

    async def unless_gone(self, other: asyncio.Event) -> None:
        """Wait for `other`, before the first event.

        Raises ClientGone as soon as the client went away, and AnswerStopped.
        """
        waits = [asyncio.create_task(event.wait()) for event in (other, self._interrupted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.check()

    async def unless_done(self, future: Future[Any]) -> None:
        """Wait for a future of another thread. Raises ClientGone as soon as the client went away, and AnswerStopped."""
        if not future.done():
            there = asyncio.Event()
            future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(there.set))
            await self.unless_gone(there)

    def replay(self, events: Iterable[Event]) -> None:
        """Deliver the events of an earlier answer; in the event loop."""
        for event in events:
            self._events.put_nowait(event)


async def departure(receive: Receive, news: asyncio.Event) -> None:
    """Wait until a follower's client is gone, then set `news`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    news.set()


@asynccontextmanager
async def watched(receive: Receive) -> AsyncIterator[Delivery]:
    """Yield a delivery that notes that the client leaves, until the context ends; for a request without events."""
    delivery = Delivery()
    watcher = asyncio.create_task(delivery.watch(receive))
    try:
        yield delivery
    finally:
        delivery.abandon()  # stops a thread that still works on the request when the server ends
        watcher.cancel()


@dataclass(eq=False)
class InFlightAnswer:
    """One answer, from when its request waits for a model until its last event."""

    request: Request
    delivery: Delivery
    followed: Callable[[ResponseInfo], Answer]  # builds the answer for a follower
    lost: Callable[[], None]  # counts it if its client leaves while no engine has it
    generation: Generation | MultiPrompt | None = None  # None until an engine has it
    stopped: bool = False
    carried: bool = False  # it goes on without its client, as soon as it is accepted
    accepted: bool = False  # it was written down, and goes on without its client
    noted: asyncio.Event = field(default_factory=asyncio.Event)  # set when `accepted` is known
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # set when its end is written down too

    @property
    def head(self) -> ResponseInfo:
        """Return the head of its response, as known now."""
        owner, generation = self.request.domain.owner, self.generation
        if generation is None:
            created = int(time.time()) if self.request.created is None else self.request.created
            return ResponseInfo(self.request.id, created, self.request.session, owner, cancel=self.cancel)
        asked = generation.asked
        head = ResponseInfo(asked.id, asked.created, asked.session, owner, cancel=self.cancel)
        return replace(head, usage=partial(generation.usage, True)) if isinstance(generation, Generation) else head

    @property
    def deltas(self) -> Sequence[Sequence[Delta]]:
        """Return the deltas of each choice so far: the engine's own lists, which grow meanwhile."""
        return () if self.generation is None else self.generation.deltas

    @property
    def waits(self) -> bool:
        """Return True until its engine works on it."""
        return not isinstance(self.generation, Generation) or self.generation.progress.admitted is None

    @property
    def end(self) -> Event | None:
        """Return its last event; None while it goes on."""
        return self.delivery.last.result() if self.delivery.last.done() else None

    async def unless_ended(self) -> InFlightAnswer | None:
        """Return this answer while it is under way. Return None once its end is written down, which this waits for."""
        if self.end is None or not self.accepted:
            return self
        await self.settled.wait()
        return None

    def begin(self, generation: Generation | MultiPrompt) -> None:
        """Note that the engine has it."""
        self.generation = generation
        if self.stopped:
            generation.stop()
        self.delivery.tell_followers()

    def recalled(self) -> InFlightAnswer:
        """Note that the engine gave it back unbegun."""
        self.generation = None
        if self.stopped:
            self.delivery.stop()
        return self

    def cancel(self) -> None:
        """Cancel it because its client is gone."""
        if self.generation is None:
            return
        self.generation.cancel()
        if self.generation.recalled and not self.delivery.last.done():  # and it is not submitted again
            self.lost()
            self.fail(INTERNAL)

    def stop(self) -> None:
        """Stop it: the text so far is its answer, which its client gets. Idempotent."""
        self.stopped = True
        if self.generation is None:
            self.delivery.stop()
        else:
            self.generation.stop()

    def end_unbegun(self, load_ms: float) -> None:
        """Deliver an empty answer that was stopped before the engine had it. load_ms: time waited for the model."""
        usage = Usage.of_nothing(self.request.session, load_ms, self.request.model)
        stop: FinishReason = "stop"
        self.delivery.put(Finish((stop,) * self.request.choices, usage))

    def fail(self, error: Rejection) -> None:
        """Deliver an error as its last event, unless it has one: the engine never had it."""
        if not self.delivery.last.done():
            self.delivery.put(Failure(error))


class InFlightAnswers:
    """All answers under way. Used in the event loop only."""

    def __init__(self) -> None:
        self._answers: dict[str, InFlightAnswer] = {}
        self._changed: set[str] = set()  # conversations that a request changes
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(
        self, answering: InFlightAnswer, end: Callable[[Callable[[], None]], None] | None = None
    ) -> InFlightAnswer:
        """Add an answer. It is removed at its last event. Raises Rejection if its conversation is being changed.

        end: called at its last event with a function that removes it, in the event loop.
        """
        id_, conversation = answering.request.id, answering.request.conversation
        if conversation is not None:
            self._change(conversation)
            answering.delivery.last.add_done_callback(lambda _: self._changed.discard(conversation))
        self._answers[id_] = answering

        def remove() -> None:
            self._answers.pop(id_, None)
            answering.settled.set()

        answering.delivery.last.add_done_callback(lambda _: remove() if end is None else end(remove))
        return answering

    def carry(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work of an answer that goes on without its client."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds a task only weakly
        task.add_done_callback(self._tasks.discard)

    @property
    def carried(self) -> list[str]:
        """List the ids of the answers that go on without their clients, or will once accepted, and have not ended."""
        return [id_ for id_, one in self._answers.items() if one.carried and one.end is None]

    @contextmanager
    def alone(self, conversation: str) -> Iterator[None]:
        """Let no other request change a conversation meanwhile. Raises Rejection if one does."""
        self._change(conversation)
        try:
            yield
        finally:
            self._changed.discard(conversation)

    def _change(self, conversation: str) -> None:
        if conversation in self._changed:
            raise locked()
        self._changed.add(conversation)

    def find(self, id_: str, domain: Domain) -> InFlightAnswer:
        """Return the answer of that id. Raises Rejection if the id is unknown, or hidden from the domain."""
        bare = next((id_.removeprefix(one) for one in _PREFIXES if id_.startswith(one)), id_)
        found = self._answers.get(bare)
        if found is None or not domain.has(found.request.domain.owner):
            raise Rejection(
                f"no request {brief(id_)} is under way; its text is in its session, if it was stored",
                status=404,
                code="request_not_found",
            )
        return found


def locked() -> Rejection:
    """Build the error for a conversation that another request changes, in OpenAI's words."""
    return Rejection(
        "Another process is currently operating on this conversation. Please retry in a few seconds.",
        code="conversation_locked",
        param="conversation",
    )
