"""The one thread that computes with a program: admits requests, prefills, decodes in turn, and takes checkpoints."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from ssmd.engine.answers import Answers
from ssmd.engine.calling import Calling
from ssmd.engine.choice import Choice
from ssmd.engine.feeding import feed, feed_forced, is_read, piece_forced
from ssmd.engine.generation import Generation
from ssmd.engine.metrics import ModelMetrics
from ssmd.engine.persistence import KeepsNothing, Persistence
from ssmd.engine.queue import Queue, unavailable
from ssmd.engine.sharing import Open, Shares
from ssmd.engine.terms import Rejected
from ssmd.engine.turns import Turns
from ssmd.engine.warmup import WarmUp
from ssmd.runtime.protocol import Handle, Logits, Program, StateLost
from ssmd.sessions.checkpoint import NewCheckpoint
from ssmd.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Worker:
    """Takes from the queue until it closes. running: the admitted requests, which others may look at."""

    def __init__(
        self,
        program: Program,
        queue: Queue,
        persistence: Persistence | KeepsNothing,
        metrics: ModelMetrics,
        tokenizer: Tokenizer,
        calling: Calling,
        stop_tokens: frozenset[int],
        max_running: int,
        spare_lanes: int,
        turns: Turns,
        room: Callable[[], bool],
    ) -> None:
        """max_running: choices that decode at the same time; spare_lanes: beside those. turns: on the device. room:
        whether there is memory for one choice beside others now.
        """
        self.running: list[Generation] = []
        self._program = program
        self._queue = queue
        self._persistence = persistence
        self._tokenizer, self._calling = tokenizer, calling
        self._stop_tokens = stop_tokens
        self._max_running = max_running
        self._shares = Shares(max_running, spare_lanes, getattr(program, "step_cost", float))
        self._turns = turns
        self._room = room
        self._answers = Answers(program, metrics, self.running, queue.told)
        self._warm_up = WarmUp()
        self._idling = True  # something that no request waits for may be under way
        self._thread = threading.Thread(target=self._run, name="ssmd-worker", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether it has been started and has not stopped."""
        return self._thread.is_alive()

    def start(self, warm_up: WarmUp) -> None:
        """Start, with what to do once if nobody comes in the first moments."""
        self._warm_up = warm_up
        self._turns.join(self, self._queue.wake)
        self._thread.start()

    def join(self) -> None:
        """Wait until it has stopped, if it was started: as it does when the queue closes."""
        if self.alive:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._queue.wait(self._awake, self._warm_up.due_s)
            if self._queue.closing:
                break
            try:
                self._admit()
                if not self.running:
                    self._idle()
                    continue
                if self._idling:
                    self._warm_up.cancel()
                    self._persistence.pause()
                    self._idling = False
                    self._turns.busy(self)
                self._step()
            except Exception:  # of a request that is over already, or of none: the others go on
                log.exception("the worker failed at a piece of work")
            finally:
                self._answers.give_back()
        self._turns.leave(self)
        self._warm_up.cancel()
        cut = unavailable("the server was shut down", "shutting_down")
        waiting = [g for _ in range(len(self._queue)) if (g := self._queue.take()) is not None]
        for generation in [*self.running, *waiting]:
            generation.progress.error = cut
            self._answers.cancel(generation)
        self._answers.give_back()

    def _idle(self) -> None:
        """A piece of work that no request waits for; none of them takes longer than a restore or a bucket."""
        if not self._idling:
            self._idling = True
            self._turns.idle(self)
        if self._turns.others_busy(self):
            self._warm_up.cancel()
            return
        with self._turns:
            if self._warm_up:
                self._warm_up.step()
            else:
                self._persistence.work()

    def _awake(self) -> bool:
        busy = self._queue or self._queue.any_departed or self.running or self._queue.closing
        return bool(busy) or not self._idling or (self._persistence.has_work() and not self._turns.others_busy(self))

    def _admit(self) -> None:
        while (gone := self._queue.departed()) is not None:
            self._answers.finish(gone)
        if not self._queue:  # as at nearly every token
            return
        while (generation := self._next()) is not None:
            if generation.cancelled:
                self._answers.finish(generation)
                continue
            generation.progress.admitted = time.perf_counter()
            self.running.append(generation)
            self._guarded([generation], generation.kept.restore)

    def _next(self) -> Generation | None:
        """The request to admit now, if there is one and room for it."""
        served = self._served()
        return None if served is None else self._queue.take(served)

    def _served(self) -> frozenset[str] | None:
        """As Shares.served."""
        served = self._shares.served(self.running, self.in_use)
        return served if served is None or not self.running or self._room() else None

    def _something_to_do(self, admits: bool) -> bool:
        """Asked with the queue locked, so that nothing else may be waited for. admits: whether there was a lane."""
        restored = any(g.kept.ready() for g in self.running)
        served = self._shares.served(self.running, self.in_use) if admits else None
        admissible = served is not None and self._queue.waits(served)
        return restored or self._queue.closing or self._queue.any_departed or admissible

    @property
    def in_use(self) -> int:
        """How many lanes are taken. From any thread."""
        running = tuple(self.running)
        return sum(max(1, sum(choice.end is None for choice in g.progress.choices)) for g in running)

    def _step(self) -> None:
        """One piece of prefill for the client that waits longest for one, then one token for every open choice."""
        for gone in [g for g in self.running if g.cancelled]:
            self._answers.cancel(gone)
        decoding = [g for g in self.running if g.progress.choices]
        ready = None
        if len(decoding) < len(self.running):
            reading = [g for g in self.running if not g.progress.choices and g.kept.ready()]
            ready = next((g for g in self._shares.in_turn(reading) if self._may_read(g, decoding)), None)
        if ready is None and not decoding:  # all wait for their states
            self._queue.wait(partial(self._something_to_do, self._served() is not None), 0.05)
        if ready is not None:
            started = time.perf_counter()
            others = bool(decoding) or self._turns.others_busy(self)
            self._guarded([ready], partial(self._read_on, ready, bool(decoding), others))
            self._shares.spend(ready, time.perf_counter() - started)
        if decoding:
            joining = ready if ready in self.running and is_read(ready) else None
            touched = decoding if joining is None else [*decoding, joining]
            self._guarded(touched, partial(self._decode, decoding, joining))

    def _may_read(self, g: Generation, decoding: Sequence[Generation]) -> bool:
        return self._shares.may_read(g, decoding, self._queue.has(g.asked.request.client))

    def _guarded(self, generations: Sequence[Generation], work: Callable[[], None]) -> None:
        """A failure ends the requests it touched, and only them."""
        try:
            work()
        except Exception as err:
            if not isinstance(err, Rejected):
                log.exception("a step failed")
            for g in [g for g in generations if g in self.running]:
                g.progress.error = _why(err)
                self._answers.cancel(g)

    def _read_on(self, g: Generation, joins: bool, others: bool) -> None:
        """Read a piece of a prompt, or its last token unless that joins those who decode. others: who wait for it."""
        if is_read(g) and not joins:
            self._decode([], g)
        else:
            with self._turns:
                feed(g, self._program, others=others)

    def _saved(self, g: Generation) -> tuple[bool, NewCheckpoint | None]:
        """Whether the state of a prompt could not be saved, which ends the request, and the state."""
        found: list[NewCheckpoint | None] = []
        p = g.progress
        self._guarded([g], lambda: found.append(g.kept.save(p.handle, p.prefill_ms / max(1, p.fed))))
        return not found, found[0] if found else None

    def _begin_answer(self, g: Generation, logits: Logits, saved: NewCheckpoint | None, started: float) -> None:
        """Go on from a prompt whose last token was fed since `started`. saved: its state before that."""
        p = g.progress
        g.kept.keep(saved)  # only now: encoding takes a core from the first token
        p.logits = logits
        p.position += 1
        p.fed += 1
        p.prefill_ms += (time.perf_counter() - started) * 1e3
        self._open_choices(g)

    def _open_choices(self, g: Generation) -> None:
        """Start as many of the n choices as there is room for; the last of them takes the prompt's own handle."""
        p, request = g.progress, g.asked.request
        if p.logits is None:
            return
        while len(p.choices) < request.n:
            if any(c.end is None for c in p.choices) and not (self.in_use < self._max_running and self._room()):
                break
            room = None if self._program.context is None else self._program.context - len(g.prompt.ids)
            budget = request.max_tokens if room is None else min(request.max_tokens, room)
            guide = g.asked.guide and g.asked.guide.copy()
            index, texts = len(p.choices), (self._tokenizer, self._stop_tokens)
            choice = Choice(request, index, budget, *texts, g.prompt, self._calling, guide)
            last = choice.index == request.n - 1
            choice.handle = p.handle if last else self._program.clone(p.handle)
            if last:
                p.handle = None
            p.choices.append(choice)
            self._answers.take(g, choice, p.logits)
        self._answers.settle(g)

    def _decode(self, generations: Sequence[Generation], joining: Generation | None = None) -> None:
        """A token for open choices of these, in one step with the last token of the prompt that is `joining`."""
        running = [g for g in generations if g in self.running]
        open_ = [(g, c) for g in running for c in g.progress.choices if c.end is None]
        if any(choice.ahead for _, choice in open_):
            open_ = self._feed_forced(open_, running)
        unended = self._shares.choices(open_, beside=int(joining is not None))
        handles = [choice.handle for _, choice in unended]
        tokens = [choice.next_token for _, choice in unended]
        started, saved = time.perf_counter(), None
        if joining is not None and joining.progress.fed:
            failed, saved = self._saved(joining)
            joining = None if failed else joining
        if joining is not None:
            handles.append(joining.progress.handle)
            tokens.append(int(joining.prompt.ids.own[-1]))
        if handles:
            owners = [g for g, _ in unended] + ([] if joining is None else [joining])
            rows = self._compute(owners, handles, tokens)
            for (g, choice), row in zip(unended, rows, strict=False):
                if row is not None and choice.fed(1):
                    self._guarded([g], partial(self._answers.take, g, choice, row))
            if joining is not None and rows[-1] is not None:
                self._guarded([joining], partial(self._begin_answer, joining, rows[-1], saved, started))
        for g in running:
            if g in self.running:
                self._guarded([g], partial(self._open_choices, g))
        self._answers.count()

    def _compute(
        self, owners: Sequence[Generation], handles: Sequence[Handle], tokens: Sequence[int]
    ) -> Sequence[Logits | None]:
        """Decode a token for each handle: its logits, or None where its generation ended for want of memory.

        A program that has no memory for one of them has computed none: then each takes a step alone.
        """
        with self._turns:
            try:
                return list(self._program.decode(handles, tokens))
            except MemoryError:
                if len(handles) == 1:
                    raise
        rows = list[Logits | None]([None] * len(handles))
        for i, g in enumerate(owners):
            if g in self.running:
                self._guarded([g], partial(self._compute_alone, rows, i, handles[i], tokens[i]))
        return rows

    def _compute_alone(self, rows: list[Logits | None], i: int, handle: Handle, token: int) -> None:
        with self._turns:
            rows[i] = self._program.decode([handle], [token])[0]

    def _feed_forced(self, open_: Sequence[Open], running: Sequence[Generation]) -> list[Open]:
        """Feed a piece of what a grammar left one of these choices no choice of; those that take a step then.

        The one comes first that waits longest. Tokens that go in a piece never go in steps instead, as that would give
        other bits: where no piece may be read now, they wait for no more steps than they would have taken.
        """
        due = sorted((one for one in open_ if one[1].ahead), key=lambda one: one[1].times[-1])
        pieces = [(g, c, n) for g, c in due if (n := piece_forced(c, self._program)) > 1]
        fed = next(
            (one for one in pieces if one[1].waited >= one[2] or self._shares.may_read(one[0], running, False)), None
        )
        for _, choice, _ in pieces:
            choice.waited += 1
        if fed is not None:
            g, choice, _ = fed
            started, choice.waited = time.perf_counter(), 0
            self._guarded([g], partial(self._feed_run, g, choice))
            self._shares.spend(g, time.perf_counter() - started)
        left = [(g, c) for g, c in open_ if g in self.running and c.end is None]
        return [(g, c) for g, c in left if not (c.ahead and piece_forced(c, self._program) > 1)]

    def _feed_run(self, g: Generation, choice: Choice) -> None:
        with self._turns:
            logits = feed_forced(choice, self._program)
        if logits is not None:
            self._answers.take(g, choice, logits)


def _why(err: Exception) -> Rejected:
    """What a client is told of a failed step. Who asks again after a lost device goes on from the last checkpoint."""
    if isinstance(err, Rejected):
        return err
    if isinstance(err, StateLost):
        return Rejected(str(err), status=503, code="device_lost", retry_after_s=1)
    return Rejected(f"generation failed: {err}", status=500, code="generation_failed")
