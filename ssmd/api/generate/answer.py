"""What a protocol has to say: how one of its bodies is read, and how an answer is written, whole or as events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ssmd.api.generate.idempotency import REPLAYED
from ssmd.api.http.errors import IGNORED
from ssmd.engine.host.models import Model
from ssmd.engine.request import Delta, FinishReason, Request, TokenLogprob, Usage, calls_of, label
from ssmd.engine.terms import Rejected
from ssmd.text.messages import ToolCall


@dataclass(frozen=True)
class Head:
    """What is known of an answer before its first event. created: seconds since 1970. key: the name of its key.
    ignored: fields of its request, as Fields names them.
    """

    id: str
    created: int
    session: str | None
    key: str = ""
    replayed: bool = False
    ignored: tuple[str, ...] = ()
    cancel: Callable[[], None] = lambda: None

    @property
    def label(self) -> str:
        """What the log calls it."""
        return label(self.id, self.key)

    @property
    def headers(self) -> dict[str, str]:
        """What ssmd says of the answer in its header, in any protocol."""
        session = {} if self.session is None else {"x-ssmd-session": self.session}
        ignored = {IGNORED: ", ".join(self.ignored)} if self.ignored else {}
        return session | ignored | ({REPLAYED: "true"} if self.replayed else {})


@dataclass(frozen=True)
class WholeChoice:
    """One of the n answers, from its first word to its end. logprobs: none unless they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @staticmethod
    def of(deltas: Sequence[Delta], finish_reason: FinishReason) -> WholeChoice:
        """What the deltas of a choice come to."""
        said = "".join(delta.text for delta in deltas if not delta.reasoning)
        thought = "".join(delta.text for delta in deltas if delta.reasoning)
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
        return WholeChoice(said, logprobs, finish_reason, thought, calls_of(deltas))


class Answer(ABC):
    """How one request is answered in its protocol: as one object, or as the events of a stream, each as bytes."""

    @abstractmethod
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Mapping[str, Any]:
        """The answer as one JSON object."""

    @abstractmethod
    def opening(self) -> Iterable[bytes]:
        """The events before the first word."""

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """The event of a delta: new text, or more of a call."""

    @abstractmethod
    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterable[bytes]:
        """The events after the last word of every choice."""

    @abstractmethod
    def failure(self, error: Rejected) -> bytes:
        """The event that ends a stream which broke off."""


@dataclass(frozen=True)
class Asking:
    """A body that was read. stream: answer by events. answer: how, once the head is known. followed: the same for who
    follows it. keep_alive_s: how long the model is to stay, None: as it does. background: go on when the client leaves.
    ignored: fields of it, as Fields names them. variables: fields that are one for the chat template, and how it is
    called there. named: how more that is ignored is named; raises Rejected where nothing may be.
    """

    model: Model
    request: Request
    stream: bool
    answer: Callable[[Head], Answer]
    followed: Callable[[Head], Answer]
    keep_alive_s: float | None = None
    background: bool = False
    ignored: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    named: Callable[[Collection[str]], tuple[str, ...]] = tuple

    def told(self, known: Callable[[str], bool]) -> Asking:
        """The same, which names as ignored what its model's template does not know. Raises Rejected."""
        unknown = [name for name, variable in self.variables.items() if not known(variable)]
        return replace(self, ignored=(*self.ignored, *self.named(unknown)), variables={})

    def headed(self, head: Head) -> Head:
        """A head that says what of the body is ignored."""
        return replace(head, ignored=self.ignored)

    def follow(self, head: Head) -> Answer:
        """How who follows it is answered, who is told that too."""
        return self.followed(self.headed(head))


Read = Callable[[dict[str, Any]], Asking]  # of a protocol: takes a body's fields; in a thread; raises Rejected


def own_usage(usage: Usage, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """What ssmd says of an answer beyond the counts of tokens, in any protocol; times in ms."""
    return {
        "session": usage.session,
        "resume": usage.resume,
        "stored": usage.stored,
        "state_stored": usage.state_stored,
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
        **({"ignored": list(ignored)} if ignored else {}),
    }
