"""Several raw prompts of one request: a generation for each, and one stream of events with all their choices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from ssmd.engine.decode.generation import Generation, GenerationInput
from ssmd.engine.request import Delta, Event, Failure, Finish, FinishReason, Request, Resume

Submit = Callable[[Request, Callable[[Event], None]], Generation]
_RESUMES: tuple[Resume, ...] = ("none", "portable", "exact")


class MultiPrompt:
    """The generations of one request with several raw prompts. They run together as far as there are lanes."""

    recalled = False  # none of them is given back: the others may have begun

    def __init__(self, request: Request, deliver: Callable[[Event], None]) -> None:
        self._n, self._deliver = request.n, deliver
        self._left = 1 + len(request.more)
        self._ends: list[Finish | None] = [None] * self._left
        self._lock = threading.Lock()
        self._over = False
        self.generations: list[Generation] = []

    @staticmethod
    def begin(request: Request, deliver: Callable[[Event], None], submit: Submit) -> MultiPrompt:
        """Submit a generation for each prompt. Raises the errors of `submit`; then all are cancelled."""
        several = MultiPrompt(request, deliver)
        try:
            for i, raw in enumerate((request.raw, *request.more)):
                one = replace(request, raw=raw, more=(), key=None, id=request.id if not i else f"{request.id}_{i}")
                several.generations.append(submit(one, several._taker(i)))
        except BaseException:
            several._over = True
            several.cancel()
            raise
        return several

    @property
    def asked(self) -> GenerationInput:
        """Return the input of the first generation."""
        return self.generations[0].asked

    @property
    def deltas(self) -> list[list[Delta]]:
        """Return the deltas of each choice so far. The lists grow meanwhile. From any thread."""
        found: list[list[Delta]] = []
        for one in tuple(self.generations):
            mine = one.deltas
            found += (mine + [[] for _ in range(self._n)])[: self._n]
        return found

    def cancel(self) -> None:
        """Stop generating. Idempotent, from any thread."""
        for one in tuple(self.generations):
            one.cancel()

    def stop(self) -> None:
        """End the answer early. Its client still waits for the end, and gets it."""
        for one in tuple(self.generations):
            one.stop()

    def _taker(self, number: int) -> Callable[[Event], None]:
        def take(event: Event) -> None:
            if isinstance(event, Delta):
                if not self._over:
                    self._deliver(replace(event, index=number * self._n + event.index))
                return
            with self._lock:
                if self._over:
                    return
                if isinstance(event, Finish):
                    self._ends[number] = event
                    self._left -= 1
                self._over = not isinstance(event, Finish) or not self._left
            if isinstance(event, Failure):
                self.cancel()
                self._deliver(event)
            elif self._over:
                self._deliver(_together([end for end in self._ends if end is not None]))

        return take


def _together(ends: Sequence[Finish]) -> Finish:
    """Merge the ends of all generations into one.

    Tokens are added up. `resume` is the worst of all; times are those of the generation with the longest TTFT.
    """
    usages = [end.usage for end in ends]
    rooms = [usage.context_left for usage in usages if usage.context_left is not None]
    gaps = [usage.tbt_ms for usage in usages if usage.tbt_ms is not None]
    slowest = max(usages, key=lambda usage: usage.ttft_ms)
    reasons: tuple[FinishReason, ...] = tuple(reason for end in ends for reason in end.finish_reasons)
    usage = replace(
        slowest,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        resume=min((usage.resume for usage in usages), key=_RESUMES.index),
        stored=all(usage.stored for usage in usages),
        state_stored=all(usage.state_stored for usage in usages),
        tbt_ms=sum(gaps) / len(gaps) if gaps else None,
        context_left=min(rooms) if rooms else None,
        stopped=any(usage.stopped for usage in usages),
        saved_tokens=sum(usage.saved_tokens for usage in usages),
        stop_strings=[one for usage in usages for one in usage.stop_strings],
    )
    return Finish(reasons, usage)
