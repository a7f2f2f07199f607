"""The one thread that computes with a program: admits requests, prefills, decodes in turn, and takes checkpoints."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from ssmd.engine.decode.choice import Choice, ToolCalling
from ssmd.engine.decode.device import DeviceLock, WarmUp
from ssmd.engine.decode.generation import Generation
from ssmd.engine.decode.sharing import FairShare, Open, Queue, SharedReading, unavailable
from ssmd.engine.metrics import ModelMetrics
from ssmd.engine.persist.persistence import NoPersistence, Persistence
from ssmd.engine.request import Event, Failure, Finish
from ssmd.engine.terms import Rejection
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Handle, Logits, Program, StateLost
from ssmd.sessions.checkpoint import NewCheckpoint
from ssmd.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Worker:
    """The thread that takes requests from the queue until it closes.

    running: the admitted requests; other threads may read it.
    """

    def __init__(
        self,
        program: Program,
        queue: Queue,
        persistence: Persistence | NoPersistence,
        metrics: ModelMetrics,
        tokenizer: Tokenizer,
        calling: ToolCalling,
        stop_tokens: frozenset[int],
        max_running: int,
        spare_choices: int,
        turns: DeviceLock,
        room: Callable[[], bool],
    ) -> None:
        """Prepare the thread; `start` starts it.

        max_running: choices that decode at once. spare_choices: lanes beside those, for clients that have none.
        turns: on the device. room: returns whether there is memory for one more choice now.
        """
        self.running: list[Generation] = []
        self._program = program
        self._queue = queue
        self._persistence = persistence
        self._tokenizer, self._calling = tokenizer, calling
        self._stop_tokens = stop_tokens
        self._max_running = max_running
        self._shares = FairShare(max_running, spare_choices, getattr(program, "step_cost", float))
        self._turns = turns
        self._room = room
        self._answers = Outputs(program, metrics, self.running, queue.told)
        self._sharing = SharedReading(program, self.running, self._guarded)
        self._warm_up = WarmUp()
        self._idling = True  # work that no request waits for may be under way
        self._thread = threading.Thread(target=self._run, name="ssmd-worker", daemon=True)

    @property
    def alive(self) -> bool:
        """Return True if the thread runs."""
        return self._thread.is_alive()

    def start(self, warm_up: WarmUp) -> None:
        """Start the thread. warm_up: steps to take once, if no request comes at first."""
        self._warm_up = warm_up
        self._turns.join(self, self._queue.wake)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has stopped, if it runs. It stops when the queue closes."""
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
            except Exception:  # of an ended request, or of none: the others go on
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
        """Do a piece of work that no request waits for. No piece takes longer than a restore or a bucket."""
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
            self._guarded([generation], partial(self._sharing.begin, generation))

    def _next(self) -> Generation | None:
        """Take the next request to admit, if there is one and room for it."""
        served = self._served()
        return None if served is None else self._queue.take(served)

    def _served(self) -> frozenset[str] | None:
        """Return `FairShare.served`; None if memory has no room for another request beside the running ones."""
        served = self._shares.served(self.running, self.in_use)
        return served if served is None or not self.running or self._room() else None

    def _something_to_do(self, admits: bool) -> bool:
        """Return True if the worker can go on. The queue is locked: nothing here may wait.

        admits: whether a lane was free.
        """
        restored = any(self._sharing.reader(g) is not None for g in self.running)
        served = self._shares.served(self.running, self.in_use) if admits else None
        admissible = served is not None and self._queue.waits(served)
        return restored or self._queue.closing or self._queue.any_departed or admissible

    @property
    def in_use(self) -> int:
        """Count the lanes that are taken. From any thread."""
        running = tuple(self.running)
        return sum(max(1, sum(choice.end is None for choice in g.progress.choices)) for g in running)

    def _step(self) -> None:
        """Prefill a piece for the least recently served client, then decode a token for open choices."""
        for gone in [g for g in self.running if g.cancelled]:
            self._sharing.leave(gone)
            self._answers.cancel(gone)
        self._sharing.settle()
        decoding = [g for g in self.running if g.progress.choices]
        ready = None
        if len(decoding) < len(self.running):
            reading = [g for g in self.running if not g.progress.choices and self._sharing.reader(g) is not None]
            ready = next((g for g in self._shares.in_turn(reading) if self._may_read(g, decoding)), None)
        if ready is None and not decoding:  # all requests wait for their states
            self._queue.wait(partial(self._something_to_do, self._served() is not None), 0.05)
        reader = None if ready is None else self._sharing.reader(ready)
        if ready is not None and reader is not None:
            started = time.perf_counter()
            others = bool(decoding) or self._turns.others_busy(self)
            self._guarded([reader], partial(self._read_on, reader, bool(decoding), others))
            self._sharing.give(reader)
            self._shares.spend(ready, time.perf_counter() - started)
        if decoding:
            joining = reader if reader is not None and reader in self.running and is_read(reader) else None
            touched = decoding if joining is None else [*decoding, joining]
            self._guarded(touched, partial(self._decode, decoding, joining))

    def _may_read(self, g: Generation, decoding: Sequence[Generation]) -> bool:
        return self._shares.may_read(g, decoding, self._queue.has(g.asked.request.client))

    def _guarded(self, generations: Sequence[Generation], work: Callable[[], None]) -> None:
        """Run `work`. If it fails, end these requests, and only them."""
        try:
            work()
        except Exception as err:
            if not isinstance(err, Rejection):
                log.exception("a step failed")
            for g in [g for g in generations if g in self.running]:
                g.progress.error = _why(err)
                self._answers.cancel(g)

    def _read_on(self, g: Generation, joins: bool, others: bool) -> None:
        """Prefill a piece of a prompt, or decode its last token unless that `joins` the step of other choices.

        others: other requests wait for this.
        """
        if is_read(g) and not joins:
            self._decode([], g)
        else:
            with self._turns:
                feed(g, self._program, others=others, until=self._sharing.stop(g))

    def _saved(self, g: Generation) -> tuple[bool, NewCheckpoint | None]:
        """Copy the state of a prompt, to be kept. Return (failed, state); a failure ends the request."""
        found: list[NewCheckpoint | None] = []
        p = g.progress
        self._guarded([g], lambda: found.append(g.kept.save(p.handle, p.prefill_ms / max(1, p.fed))))
        return not found, found[0] if found else None

    def _begin_answer(self, g: Generation, logits: Logits, saved: NewCheckpoint | None, started: float) -> None:
        """Start the answer to a prompt whose last token was just decoded.

        saved: the state before that token. started: perf_counter when its decode began.
        """
        p = g.progress
        g.kept.keep(saved)  # only now: encoding takes a core from the first token
        p.saved = g.kept.position
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
        """Decode a token for open choices, in one step with the last token of the prompt that is `joining`."""
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
        """Decode a token for each handle. Return its logits, or None if its request ended for lack of memory.

        A program that lacks memory for one handle computes none of them. Then each is decoded alone.
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
        """Prefill a piece of the tokens that a grammar forces, for one choice. Return the choices that take a step now.

        The choice that waits longest is first. Tokens that go in a piece never go in steps instead: that would give
        other bits.
        Where no piece may be read now, they wait for no more steps than they would have taken.
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


def _why(err: Exception) -> Rejection:
    """Return the error that clients get for a failed step. After a lost device, a retry resumes from a checkpoint."""
    if isinstance(err, Rejection):
        return err
    if isinstance(err, StateLost):
        return Rejection(str(err), status=503, code="device_lost", retry_after_s=1)
    return Rejection(f"generation failed: {err}", status=500, code="generation_failed")


class Outputs:
    """The answers of one worker: samples tokens, sends deltas, keeps the state at each end, and reports the end.

    running: the admitted requests; one that ends is removed. told: called when a request's client got its last event.
    All is called by the worker's thread; `_tell` also by the writer's.
    """

    def __init__(
        self, program: Program, metrics: ModelMetrics, running: list[Generation], told: Callable[[], None]
    ) -> None:
        self._program, self._metrics = program, metrics
        self._running, self._told = running, told
        self._gaps: list[float] = []  # ms between tokens, in this step
        self._new = 0  # tokens of this step
        self._left: list[Handle] = []  # handles to release once clients have their ends: clearing one takes up to 3 ms

    def take(self, g: Generation, choice: Choice, logits: Logits) -> None:
        """Sample a choice's next tokens from logits, and send their deltas."""
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
        """End a request if all of its choices have ended."""
        choices = g.progress.choices
        if len(choices) == g.asked.request.n and all(choice.end is not None for choice in choices):
            self.finish(g)

    def cancel(self, g: Generation) -> None:
        """End a request early. Its answer is what was sent."""
        for choice in g.progress.choices:
            choice.cancel()
            try:
                self._close_choice(g, choice)
            except Exception:
                log.exception("request %s: its state could not be saved", g.asked.label)
        self.finish(g)

    def finish(self, g: Generation) -> None:
        """Remove a request from `running` and commit it. Its client gets the end after the commit."""
        p = g.progress
        if g in self._running:
            self._running.remove(g)
        g.kept.discard()
        if p.handle is not None:
            self._left.append(p.handle)
            p.handle = None
        self.count()
        try:
            done = Finish(g.finish_reasons, g.usage(True, self._program.context, True))
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
        """Keep the state at the end of a choice, and mark its handle for release."""
        if choice.handle is None:
            return
        try:
            g.kept.end(choice)
        finally:
            self._left.append(choice.handle)
            choice.handle = None

    def _tell(self, g: Generation, stored: bool, state_stored: bool) -> None:
        """Send the last event of a request. From the writer's thread, or the worker's when nothing is kept."""
        usage, error = g.usage(stored, self._program.context, state_stored), g.progress.error
        g.count_end(self._metrics, usage)
        self._send(g, Finish(g.finish_reasons, usage) if error is None else Failure(error))
        if stored:
            g.kept.rerender()
        self._told()


def feed(g: Generation, program: Program, *, others: bool, until: int | None = None) -> None:
    """Prefill the next piece of a prompt, up to its last token. Begin with its state if it has none.

    A prompt's bits depend on its text alone: pieces end on the grid, and where the system prompt does.
    others: answers under way wait for this. Then several short pieces are fed if they take no longer than a long one.
    Without others a `wide` program is fed several cells of the grid at once, which changes no bit of its results.
    until: a position on the grid at which it stops, as another request goes on from there.

    The last token is fed by a decode step, which gives the logits that every choice starts from. The state before it is
    kept.
    """
    p = g.progress
    if p.handle is None:
        _begin(g, program)
    ids, last, system = g.prompt.ids, len(g.prompt.ids) - 1, g.prompt.system
    started = time.perf_counter()
    room = buckets.grid(program.buckets) + buckets.CALL if others else 0.0
    wide = not others and getattr(program, "wide", False)
    cost = 0.0  # of all pieces
    while p.position < last and p.position != until:
        end = g.kept.stop(p.position, system if p.position < system else last)
        end = end if until is None or until < p.position else min(end, until)
        n = buckets.piece(p.position, end, program.buckets, wide=wide)
        one = buckets.bucket_of(n, program.buckets) + buckets.CALL
        if cost and cost + one > room:
            break
        program.prefill(p.handle, ids.since(p.position)[:n].tolist())
        p.position += n
        p.fed += n
        cost += one
        g.kept.prefilled(p.handle, p.position, (p.prefill_ms + (time.perf_counter() - started) * 1e3) / p.fed)
    p.prefill_ms += (time.perf_counter() - started) * 1e3


def piece_forced(choice: Choice, program: Program) -> int:
    """Return how many grammar-forced tokens the next prefill call takes; 1 means a decode step."""
    at = program.position(choice.handle)
    return buckets.piece(at, at + len(choice.unfed), program.buckets)


def feed_forced(choice: Choice, program: Program) -> Logits | None:
    """Prefill the next piece of grammar-forced tokens. Return the logits [vocab] after the last one, None before."""
    n = piece_forced(choice, program)
    logits = program.prefill(choice.handle, choice.unfed[:n])
    return logits if choice.fed(n) else None


def is_read(g: Generation) -> bool:
    """Return True if all tokens of a prompt but the last were fed."""
    p = g.progress
    return p.handle is not None and p.logits is None and p.position == len(g.prompt.ids) - 1


def _begin(g: Generation, program: Program) -> None:
    """Set the handle to feed: restored from the checkpoint found, or new if none can be read."""
    p, restored = g.progress, g.kept.restored()
    if restored is not None:
        p.prompt = restored.prompt
    if restored is None or restored.handle is None:
        p.handle = program.new_state()
        return
    p.handle, p.position, p.resume = restored.handle, restored.position, restored.resume
    assert p.admitted is not None  # a request that is prefilled was admitted
    p.restore_ms = (time.perf_counter() - p.admitted) * 1e3
