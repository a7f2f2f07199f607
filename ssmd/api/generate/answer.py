"""The interface of a protocol: reading a request's body, and writing its answer, whole or as events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ssmd.api.generate.idempotency import REPLAYED
from ssmd.api.http.errors import IGNORED
from ssmd.api.http.sse import EventStream
from ssmd.engine.host.models import Model
from ssmd.engine.request import Delta, Event, FinishReason, Request, TokenLogprob, Usage, calls_of, label
from ssmd.engine.terms import Rejection
from ssmd.text.messages import ToolCall


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
