"""A request inside the engine, in three parts: the input, the progress, and the states and turns that are stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ssmd.engine.decode.choice import Choice
from ssmd.engine.metrics import CANCELLED, STOPPED, ModelMetrics
from ssmd.engine.prompt.planner import Prompt
from ssmd.engine.request import Delta, Event, Finish, FinishReason, Request, Resume, Usage, label
from ssmd.engine.sampling.grammar import Guide
from ssmd.engine.terms import Rejection
from ssmd.runtime.protocol import Handle, Logits
from ssmd.sessions.checkpoint import NewCheckpoint
from ssmd.sessions.remote.remote import RemoteState

Then = Callable[[bool, bool], None]  # called with: the text of all choices is stored; the state at each end is


@dataclass(frozen=True, eq=False)
class GenerationInput:
    """A request and its prompt, and where the answer goes."""

    request: Request
    prompt: Prompt
    deliver: Callable[[Event], None]  # takes deltas, then one Finish or Failure; from the engine's threads
    started: float  # perf_counter when the request came
    recallable: bool = False  # the caller takes it back on demand while it waits
    guide: Guide | None = None  # of each choice
    planned: float = field(default_factory=time.perf_counter)  # perf_counter when the prompt was planned
    created: int = field(default_factory=lambda: int(time.time()))  # s since 1970

    @property
    def id(self) -> str:
        """Return the id of the answer."""
        return self.request.id

    @property
    def label(self) -> str:
        """Return its name in the log."""
        return label(self.id, self.request.domain.owner)

    @property
    def session(self) -> str | None:
        """Return the id of the session to store it in; None if nothing is stored."""
        return None if self.prompt.info is None else self.prompt.info.id


@dataclass(slots=True, eq=False)
class Progress:
    """The progress of a request: the engine's part, written by its worker alone."""

    admitted: float | None = None  # perf_counter; None while it waits
    handle: Handle = None  # reads the prompt
    position: int = 0  # of `handle`
    fed: int = 0  # tokens of the prompt
    saved: int = 0  # the deepest position of the prompt with a kept state, before the answer began
    logits: Logits | None = None  # [vocab], after the prompt: every choice starts from them
    choices: list[Choice] = field(default_factory=list)
    prompt: Prompt | None = None  # the prompt to feed, once that is known
    resume: Resume = "none"
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    error: Rejection | None = None


@dataclass(frozen=True, eq=False)
class RestoredState:
    """A stored state in a handle, and its position; no handle for a new state.

    prompt: the prompt to feed, if it differs from the planned one.
    """

    handle: Handle | None
    position: int
    resume: Resume
    prompt: Prompt


class GenerationStore:
    """The states and turns that are stored of a request: persistence's part, which the engine only calls.

    For the worker only, but for `rerender`. This class stores nothing and starts from nothing.
    parted_at: tokens of the prompt after which it goes on otherwise than an earlier one; None: it does not.
    states_kept: its states were written though no turn was.
    """

    parted_at: int | None = None
    states_kept = False

    def remote(self, stored: bool) -> RemoteState | None:
        """Return if the remote has its turns; None if no remote is set. stored: the store has them."""
        return None

    @property
    def shareable(self) -> bool:
        """Return True if other requests of its trust domain may go on from its states."""
        return True

    def restore(self, *, again: bool = False) -> None:
        """Begin to restore the state to start from, if there is one.

        again: look for a deeper one than was planned, which another request may have left meanwhile.
        """

    def publish(self) -> None:
        """Write the states that are kept so far at once, for other requests to start from."""

    def grow_from(self, other: GenerationStore, handle: Handle, position: int, read_ms: float) -> None:
        """Note that the request goes on from a copy of another one's state, after `position` tokens of its prompt.

        read_ms: time to prefill a token of the prompt.
        """

    def ready(self) -> bool:
        """Return True if `restored` returns at once."""
        return True

    def restored(self) -> RestoredState | None:
        """Return the state to start from, for the caller to release; None: a new one.

        Raises what restoring it raised.
        """
        return None

    def discard(self) -> None:
        """Release the state that `restored` did not return, because the request ended before."""

    def stop(self, position: int, end: int) -> int:
        """Return where prefill stops next so that a state can be kept: after `position`, at `end` at the latest."""
        return end

    def prefilled(self, handle: Handle, position: int, read_ms: float) -> None:
        """Keep the state after the first `position` tokens of the prompt, if that is to be stored.

        read_ms: time to prefill a token of the prompt.
        """

    def save(self, handle: Handle, read_ms: float) -> NewCheckpoint | None:
        """Copy the state before the prompt's last token, for `keep`; None if it is not kept.

        read_ms: time to prefill a token of the prompt.
        """
        return None

    def keep(self, checkpoint: NewCheckpoint | None) -> None:
        """Start to store the result of `save`. It is a call of its own: encoding takes a core from the next step."""

    @property
    def position(self) -> int:
        """Return the tokens of the prompt up to its deepest kept state; 0 without one."""
        return 0

    def end(self, choice: Choice) -> None:
        """Keep the state at the end of a choice, which still has its handle, if its text equals its tokens."""

    def commit(self, choices: Sequence[Choice], done: Finish, then: Then) -> None:
        """Write the answer, then call `then` once, from any thread. done: the last event that its client will get."""
        then(False, False)

    def rerender(self) -> None:
        """Read the stored turns again as later requests render them, while no request waits."""


class Generation:
    """A submitted request. Its caller may cancel it; the rest is for the engine and its persistence."""

    def __init__(self, asked: GenerationInput, kept: GenerationStore, leave: Callable[[Generation], None]) -> None:
        """Begin a request that waits. leave: called when it is cancelled; it may still wait."""
        self.asked = asked
        self.kept = kept
        self._leave = leave
        self.progress = Progress()
        self.cancelled = False
        self.recalled = False  # it was given back while it waited
        self.stopped = False  # it was cancelled, and its text so far is the answer

    @property
    def prompt(self) -> Prompt:
        """Return the prompt to feed: the planned one, or another one if stored data of that failed."""
        return self.progress.prompt or self.asked.prompt

    def cancel(self) -> None:
        """Stop generating; the text sent so far is stored, marked incomplete. Idempotent, from any thread."""
        self.cancelled = True
        self._leave(self)

    def stop(self) -> None:
        """End the answer early. Its client still waits for the end, and gets it."""
        self.stopped = True
        self.cancel()

    @property
    def deltas(self) -> list[list[Delta]]:
        """Return the deltas of each choice that has begun. The lists grow meanwhile. From any thread."""
        return [choice.deltas for choice in tuple(self.progress.choices)]

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """Return why each choice ended. One that was cut off, or never begun, counts as `stop`."""
        ends = [choice.end for choice in self.progress.choices]
        ends += [None] * (self.asked.request.n - len(ends))
        return tuple("stop" if end is None or end == "cancelled" else end for end in ends)

    @property
    def broke_off(self) -> bool:
        """Return True if a requested choice did not come to its end."""
        ends = [choice.end for choice in self.progress.choices]
        return len(ends) < self.asked.request.n or "cancelled" in ends

    def usage(self, stored: bool, context: int | None = None, state_stored: bool = False) -> Usage:
        """Return the usage of the request. Cached tokens are tokens of the prompt that were not fed.

        stored, state_stored: as in Usage. context: the model's.
        """
        asked, progress = self.asked, self.progress
        first = min((choice.times[0] for choice in progress.choices if choice.times), default=None)
        ttft_ms = 0.0 if first is None else (first - asked.started) * 1e3
        load_ms = asked.request.load_ms
        plan_ms = (asked.planned - asked.started) * 1e3 - load_ms
        queue_ms = ((progress.admitted or asked.planned) - asked.planned) * 1e3
        known_ms = load_ms + plan_ms + queue_ms + progress.restore_ms + progress.prefill_ms
        gaps = [(b - a) * 1e3 for choice in progress.choices for a, b in pairwise(choice.times)]
        prompt_tokens = len(self.prompt.ids)
        longest = max((len(choice.tokens) for choice in progress.choices), default=0)
        cached_tokens = prompt_tokens - progress.fed if progress.choices else 0
        kept = stored or self.kept.states_kept
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(len(choice.tokens) for choice in progress.choices),
            cached_tokens=cached_tokens,
            session=asked.session,
            resume=progress.resume,
            stored=stored,
            ttft_ms=ttft_ms,
            tbt_ms=sum(gaps) / len(gaps) if gaps else None,
            prefill_ms=progress.prefill_ms,
            restore_ms=progress.restore_ms,
            context_left=None if context is None else max(0, context - prompt_tokens - longest),
            cut_messages=self.prompt.cut,
            load_ms=load_ms,
            plan_ms=plan_ms,
            queue_ms=queue_ms,
            shared_ms=max(0.0, ttft_ms - known_ms),
            stopped=self.cancelled and self.broke_off,
            state_stored=state_stored,
            parted_at=self.kept.parted_at,
            saved_tokens=max(0, progress.saved - cached_tokens) if kept and progress.choices else 0,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in progress.choices),
            stop_strings=[choice.stop_string for choice in progress.choices] if asked.request.stop else (),
            model=asked.request.model,
            remote=self.kept.remote(stored),
        )

    def count_first_token(self, metrics: ModelMetrics) -> None:
        """Count the prompt, when its first token was drawn."""
        usage = self.usage(False)
        metrics.first_token(
            ttft_ms=usage.ttft_ms,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            prefill_ms=usage.prefill_ms,
            restore_ms=usage.restore_ms,
        )

    @property
    def outcome(self) -> str:
        """Return how it ended: the outcome for the metrics."""
        if self.progress.error is not None:
            return self.progress.error.code
        if self.stopped:
            return STOPPED if self.broke_off else "ok"
        return CANCELLED if self.cancelled else "ok"

    def count_end(self, metrics: ModelMetrics, usage: Usage) -> None:
        """Count a request that has ended, successfully or not."""
        begun = bool(self.progress.choices)
        parts = ("load_ms", "plan_ms", "queue_ms", "restore_ms", "prefill_ms", "shared_ms")
        last: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": usage.completion_tokens,
            "ttft_ms": round(usage.ttft_ms, 3) if begun else None,
            **{part: round(getattr(usage, part), 3) for part in parts},
            "tokens_per_s": self._tokens_per_s(),
        }
        asked = self.asked
        metrics.ended(last, self.outcome, asked.request.domain.owner, id_=asked.id, session=asked.session)

    def row(self) -> dict[str, Any]:
        """Return its progress at this moment, ready for JSON. From any thread."""
        p, choices, prompt = self.progress, tuple(self.progress.choices), self.prompt
        first = min((choice.times[0] for choice in choices if choice.times), default=None)
        if p.admitted is None:
            phase = "waiting"
        elif choices:
            phase = "decode"
        else:
            phase = "prefill" if p.handle is not None or self.kept.ready() else "restoring"
        kept = 0 if prompt.found is None else prompt.found.start
        return {
            "id": self.asked.id,
            "session": self.asked.session,
            "phase": phase,
            "fed": p.fed,
            "to_feed": len(prompt.ids) - (kept if p.handle is None and not choices else p.position - p.fed),
            "tokens": sum(len(choice.tokens) for choice in choices),
            "ttft_ms": None if first is None else round((first - self.asked.started) * 1e3, 3),
            "tokens_per_s": self._tokens_per_s(),
            "owner": self.asked.request.domain.owner,
        }

    def _tokens_per_s(self) -> float | None:
        """Return the rate of tokens of all choices after the first; None before the second one."""
        times = [choice.times for choice in tuple(self.progress.choices) if choice.times]
        new = sum(len(one) - 1 for one in times)
        if new < 1:
            return None
        seconds = max(one[-1] for one in times) - min(one[0] for one in times)
        return round(new / seconds, 2) if seconds > 0 else None
