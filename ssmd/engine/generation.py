"""A request inside the engine: what was asked, how far it is, and what it cost."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from itertools import pairwise

from ssmd.engine.choice import Choice
from ssmd.engine.metrics import Metrics
from ssmd.engine.prompt import Prompt
from ssmd.engine.request import Event, FinishReason, Rejected, Request, Resume, Usage
from ssmd.engine.restore import Restoring
from ssmd.engine.writer import Pending
from ssmd.runtime.protocol import Handle, Logits
from ssmd.sessions.checkpoint import NewCheckpoint


class Generation:
    """A submitted request. `session` is None when nothing is kept."""

    def __init__(self, request: Request, prompt: Prompt, deliver: Callable[[Event], None], started: float) -> None:
        self.id = f"gen_{secrets.token_hex(12)}"
        self.session = None if prompt.info is None else prompt.info.id
        self.created = int(time.time())
        self.prompt_tokens = len(prompt.ids)
        self.cancelled = False
        # The rest belongs to the engine.
        self.request = request
        self.prompt = prompt
        self.deliver = deliver
        self.started = started
        self.handle: Handle = None
        self.admitted = started
        self.restoring: Restoring | None = None
        self.position = 0
        self.fed = 0
        self.resume: Resume = "none"
        self.logits: Logits | None = None  # after the prompt: what every choice starts from
        self.choices: list[Choice] = []
        self.checkpoints: list[Pending] = []
        self.parent: tuple[int | NewCheckpoint | None, int] = (None, 0)  # what the next checkpoint grows from, where
        self.origin: str | None = None  # set when the state came from an import: what grows from it stays there
        self.prefill_ms = self.restore_ms = 0.0
        self.error: Rejected | None = None

    def cancel(self) -> None:
        """Stop generating; the text sent so far is stored, marked incomplete. Idempotent, from any thread."""
        self.cancelled = True

    @property
    def kept(self) -> list[Choice]:
        """Its choices that become turns: all but those that were cut before they had a text."""
        return [choice for choice in self.choices if choice.text or choice.end != "cancelled"]

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """Of all choices, one that was cut off counted as `stop`."""
        return tuple("length" if choice.end == "length" else "stop" for choice in self.choices)

    def usage(self, stored: bool) -> Usage:
        """Counted: cached tokens are those of the prompt that were not fed."""
        first = min((choice.times[0] for choice in self.choices if choice.times), default=self.started)
        gaps = self._gaps_ms()
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(len(choice.tokens) for choice in self.choices),
            cached_tokens=self.prompt_tokens - self.fed if self.choices else 0,
            session=self.session,
            resume=self.resume,
            stored=stored,
            ttft_ms=(first - self.started) * 1e3,
            tbt_ms=sum(gaps) / len(gaps) if gaps else None,
            prefill_ms=self.prefill_ms,
            restore_ms=self.restore_ms,
        )

    def record(self, metrics: Metrics, usage: Usage) -> None:
        metrics.request_done(
            ttft_ms=usage.ttft_ms,
            tbts_ms=self._gaps_ms(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.completion_tokens,
            prefill_ms=usage.prefill_ms,
            restore_ms=usage.restore_ms,
        )

    def _gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for choice in self.choices for a, b in pairwise(choice.times)]
