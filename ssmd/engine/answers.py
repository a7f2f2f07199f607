"""What becomes of the logits that requests get: tokens and deltas, what is kept at an end, and who hears of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from ssmd.engine.choice import Choice
from ssmd.engine.generation import Generation
from ssmd.engine.metrics import ModelMetrics
from ssmd.engine.request import Done, Event, Failed
from ssmd.runtime.protocol import Handle, Logits, Program

log = logging.getLogger(__name__)


class Answers:
    """Those of one worker, whose thread calls everything here; `_tell` may be called from the writer's.

    running: the admitted requests; one that ends leaves them. told: called when one has been told its end.
    """

    def __init__(
        self, program: Program, metrics: ModelMetrics, running: list[Generation], told: Callable[[], None]
    ) -> None:
        self._program, self._metrics = program, metrics
        self._running, self._told = running, told
        self._gaps: list[float] = []  # ms, of this step
        self._new = 0  # tokens of it
        self._left: list[Handle] = []  # to be given back once the ends are told: to clear one takes up to 3 ms

    def take(self, g: Generation, choice: Choice, logits: Logits) -> None:
        """Have a choice draw from logits."""
        before, times = len(choice.tokens), choice.times
        known = len(times)
        deltas = choice.take(logits)
        self._new += len(choice.tokens) - before
        self._gaps += [(b - a) * 1e3 for a, b in pairwise(times[max(0, known - 1) :])]
        if not known and choice.index == 0:
            g.count_first_token(self._metrics)
        for delta in deltas:
            self._send(g, delta)
        if choice.end is not None:
            self._close_choice(g, choice)

    def count(self) -> None:
        """Count the tokens of this step that are not counted yet."""
        if self._gaps or self._new:
            self._metrics.tokens(self._gaps, self._new)
            self._gaps, self._new = [], 0

    def settle(self, g: Generation) -> None:
        """End a request all of whose choices have ended."""
        choices = g.progress.choices
        if len(choices) == g.asked.request.n and all(choice.end is not None for choice in choices):
            self.finish(g)

    def cancel(self, g: Generation) -> None:
        """End a request early: what was sent is its answer."""
        for choice in g.progress.choices:
            choice.cancel()
            try:
                self._close_choice(g, choice)
            except Exception:
                log.exception("request %s: its state could not be saved", g.asked.label)
        self.finish(g)

    def finish(self, g: Generation) -> None:
        """Out of the running; the client hears the end after the commit."""
        p = g.progress
        if g in self._running:
            self._running.remove(g)
        g.kept.discard()
        if p.handle is not None:
            self._left.append(p.handle)
            p.handle = None
        self.count()
        try:
            done = Done(g.finish_reasons, g.usage(True, self._program.context, True))
            g.kept.commit(p.choices, done, partial(self._tell, g))
        except Exception:
            log.exception("request %s: its turns could not be kept", g.asked.label)
            self._tell(g, False, False)

    def give_back(self) -> None:
        """Release the handles of what has ended. Raises nothing."""
        while self._left:
            try:
                self._program.release(self._left.pop())
            except Exception:
                log.exception("a handle could not be released")

    def _send(self, g: Generation, event: Event) -> None:
        try:
            g.asked.deliver(event)
        except Exception:  # the reader is gone: an event loop that was closed, say
            log.debug("request %s: its reader is gone", g.asked.label)
            g.cancelled = True

    def _close_choice(self, g: Generation, choice: Choice) -> None:
        """Keep the state at the end of a choice, whose handle goes back."""
        if choice.handle is None:
            return
        try:
            g.kept.end(choice)
        finally:
            self._left.append(choice.handle)
            choice.handle = None

    def _tell(self, g: Generation, stored: bool, state_stored: bool) -> None:
        """Deliver the last event of a request. From the writer's thread, or the worker's when nothing is kept."""
        usage, error = g.usage(stored, self._program.context, state_stored), g.progress.error
        g.count_end(self._metrics, usage)
        self._send(g, Done(g.finish_reasons, usage) if error is None else Failed(error))
        if stored:
            g.kept.rerender()
        self._told()
