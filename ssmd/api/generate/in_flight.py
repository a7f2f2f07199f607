"""The answers under way, by id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ssmd.api.generate.answer import Answer, ResponseInfo
from ssmd.api.generate.delivery import Delivery
from ssmd.api.http.body import brief
from ssmd.api.http.errors import INTERNAL
from ssmd.engine.decode.generation import Generation
from ssmd.engine.decode.several import MultiPrompt
from ssmd.engine.request import Delta, Event, Failure, Finish, FinishReason, Request, Usage
from ssmd.engine.terms import Rejection
from ssmd.sessions.turn import Domain

_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")  # of an id as the answer has it


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
