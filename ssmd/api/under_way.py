"""The answers under way, by their ids: for who follows one that another client began, or ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssmd.api.answer import Answer, Head
from ssmd.api.body import shown
from ssmd.api.delivery import Delivery
from ssmd.api.errors import INTERNAL
from ssmd.engine.decode.generation import Generation
from ssmd.engine.decode.several import Several
from ssmd.engine.request import Delta, Done, Event, Failed, FinishReason, Request, Usage
from ssmd.engine.terms import Rejected
from ssmd.sessions.domain import Domain

_PREFIXES = ("chatcmpl-", "cmpl-")  # of an id as the answer has it


@dataclass(eq=False)
class Answering:
    """One answer, from when it waits for its model until its client is told the end.

    followed: how who follows it is answered. lost: to count it when its client leaves while no engine has it.
    generation: None until an engine has it.
    """

    request: Request
    delivery: Delivery
    followed: Callable[[Head], Answer]
    lost: Callable[[], None]
    generation: Generation | Several | None = None
    stopped: bool = False

    @property
    def head(self) -> Head:
        """What is known of it before its first event."""
        owner, generation = self.request.domain.owner, self.generation
        if generation is None:
            return Head(self.request.id, int(time.time()), self.request.session, owner)
        asked = generation.asked
        return Head(asked.id, asked.created, asked.session, owner, cancel=self.cancel)

    @property
    def deltas(self) -> Sequence[Sequence[Delta]]:
        """What was sent of each choice so far: the engine's own, which grows meanwhile."""
        return () if self.generation is None else self.generation.deltas

    @property
    def end(self) -> Event | None:
        """Its last event, once it is over."""
        return self.delivery.last.result() if self.delivery.last.done() else None

    def begin(self, generation: Generation | Several) -> None:
        """Note that the engine has it."""
        self.generation = generation
        if self.stopped:
            generation.stop()
        self.delivery.tell_followers()

    def recalled(self) -> Answering:
        """Note that the engine has it no longer, and had not begun it."""
        self.generation = None
        if self.stopped:
            self.delivery.stop()
        return self

    def cancel(self) -> None:
        """End it, as its client is gone."""
        if self.generation is None:
            return
        self.generation.cancel()
        if self.generation.recalled and not self.delivery.last.done():  # and nobody asks again
            self.lost()
            self.fail(INTERNAL)

    def stop(self) -> None:
        """End it: what was said is its answer, and its client is told so. Idempotent."""
        self.stopped = True
        if self.generation is None:
            self.delivery.stop()
        else:
            self.generation.stop()

    def end_unbegun(self, load_ms: float) -> None:
        """Tell its client that it was stopped before the engine had it."""
        usage = Usage.of_nothing(self.request.session, load_ms)
        stop: FinishReason = "stop"
        self.delivery.put(Done((stop,) * self.request.choices, usage))

    def fail(self, error: Rejected) -> None:
        """Tell those who follow that the engine never had it."""
        if not self.delivery.last.done():
            self.delivery.put(Failed(error))


class UnderWay:
    """All answers under way. In the event loop only."""

    def __init__(self) -> None:
        self._answers: dict[str, Answering] = {}

    def enter(self, answering: Answering) -> Answering:
        """Take one in, until it is over."""
        id_ = answering.request.id
        self._answers[id_] = answering
        answering.delivery.last.add_done_callback(lambda _: self._answers.pop(id_, None))
        return answering

    def find(self, id_: str, domain: Domain) -> Answering:
        """The one of that id, if the domain sees it. Raises Rejected."""
        bare = next((id_.removeprefix(one) for one in _PREFIXES if id_.startswith(one)), id_)
        found = self._answers.get(bare)
        if found is None or not domain.has(found.request.domain.owner):
            raise Rejected(
                f"no request {shown(id_)} is under way; what was said is in its session, if it was kept",
                status=404,
                code="request_not_found",
            )
        return found
