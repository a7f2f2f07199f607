"""One worker per program: admits requests, prefills, decodes in turn, and takes checkpoints.

`Engine.submit` runs in the caller's thread and decides what has to be fed; the worker alone touches the program;
checkpoints are read in a thread of their own (restore.py), so that other streams go on; the writer (writer.py) commits.
No asyncio here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ssmd.engine.choice import Choice
from ssmd.engine.generation import Generation
from ssmd.engine.metrics import Metrics
from ssmd.engine.persistence import Persistence
from ssmd.engine.prompt import Planner
from ssmd.engine.queue import Queue, unavailable
from ssmd.engine.request import Done, Event, Failed, Rejected, Request
from ssmd.engine.warmup import WarmUp, once, run_tokens
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Logits, Program, StateLost
from ssmd.sessions.reply import Reply, ReplyKey
from ssmd.sessions.store import Store
from ssmd.text.template import ChatTemplate
from ssmd.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
BUCKET_WHILE_OTHERS_DECODE = 64


class Engine:
    """Serves one program. `store` None keeps nothing."""

    def __init__(
        self,
        artifact: Artifact,
        program: Program,
        store: Store | None,
        *,
        metrics: Metrics,
        max_running: int = 4,
        max_queue: int = 64,
    ) -> None:
        manifest = artifact.manifest
        self.artifact = artifact
        self.program = program
        self.metrics = metrics
        self._tokenizer = Tokenizer.open(artifact.file("tokenizer.json"), stop_tokens=manifest.stop_tokens)
        template = ChatTemplate(artifact.file("chat_template.jinja").read_text("utf-8"), manifest.special_tokens)
        self._planner = Planner(manifest, program, self._tokenizer, template, store)
        self._warm_up = WarmUp()
        self._max_running = max_running
        self._stop_tokens = frozenset(manifest.stop_tokens)
        self._queue = Queue(max_queue)
        self._running: list[Generation] = []
        self._persistence = None
        if store is not None:
            self._persistence = Persistence(
                store, program, self._planner, self._tokenizer, metrics, build=manifest.build, wake=self._queue.wake
            )
        self._worker = threading.Thread(target=self._run, name="ssmd-worker", daemon=True)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused, as it shuts down."""
        return self._queue.draining

    @property
    def keeps(self) -> bool:
        """Whether turns are written down here."""
        return self._persistence is not None

    def start(self, *, warm_up: bool = False) -> None:
        """warm_up: if nobody comes in the first moments, do once what takes longer the first time."""
        if warm_up:
            lengths = self.program.buckets
            short = [b for b in lengths if b <= BUCKET_WHILE_OTHERS_DECODE] or lengths[:1]
            tokens = [0, *short][-2] + 1  # as few as run the longest of these: more might need a larger KV tier
            persistence = self._persistence
            feed = run_tokens(self.program, tokens) if persistence is None else persistence.warm_up(tokens)
            self._warm_up = WarmUp([once(self._planner.warm_up), feed])
        self._worker.start()

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> Generation:
        """Plan the prompt and queue it. Blocks for template, tokenizer and look-up; raises Rejected.

        `deliver` is called from the worker's and the writer's threads: deltas, then one Done or Failed.
        """
        started = time.perf_counter()
        self._queue.check()
        prompt = self._planner.plan(request)
        generation = Generation(request, prompt, deliver, started)
        self._queue.put(generation)
        return generation

    def reply(self, key: ReplyKey) -> Reply | None:
        """What a request was answered with before, if it was. Raises StoreError."""
        return None if self._persistence is None else self._persistence.reply(key)

    def shutdown(self, grace_s: float = 10.0) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, cut the rest (stored incomplete), stop."""
        self._queue.drain(grace_s)
        if self._worker.is_alive():
            self._worker.join()
        if self._persistence is not None:
            self._persistence.close()

    # The worker's thread, from here on.

    def _run(self) -> None:
        while True:
            self._queue.wait(self._awake, self._warm_up.due_s)
            if self._queue.closing:
                break
            self._admit()
            try:
                if not self._running:
                    self._idle()
                    continue
                self._warm_up.cancel()
                if self._persistence is not None:
                    self._persistence.rerenderer.pause()
                self._step()
            except Exception:  # of a request that is over already, or of none: the others go on
                log.exception("the worker failed at a piece of work")
        self._warm_up.cancel()
        cut = unavailable("the server was shut down", "shutting_down")
        waiting = [self._queue.take() for _ in range(len(self._queue))]
        for generation in [*self._running, *waiting]:
            generation.error = cut
            self._cancel(generation)

    def _idle(self) -> None:
        """A piece of work that no request waits for; none of them takes longer than a restore or a bucket."""
        if self._warm_up:
            self._warm_up.step()
        elif self._persistence is not None:
            self._persistence.rerenderer.step()

    def _awake(self) -> bool:
        at_work = bool(self._queue or self._running or self._queue.closing)
        return at_work or (self._persistence is not None and self._persistence.rerenderer.ready())

    def _admit(self) -> None:
        if not self._queue:  # as at nearly every token
            return
        while self._queue and self._choices_in_use() < self._max_running:
            generation = self._queue.take()
            if generation.cancelled:
                self._finish(generation)
                continue
            generation.admitted = time.perf_counter()
            if self._persistence is not None:
                self._persistence.load(generation)
            self._running.append(generation)
        self.metrics.queue(len(self._queue), len(self._running))

    def _something_to_do(self) -> bool:
        loaded = any(g.restoring is not None and g.restoring.done() for g in self._running)
        admissible = bool(self._queue) and self._choices_in_use() < self._max_running
        return loaded or self._queue.closing or admissible

    def _choices_in_use(self) -> int:
        return sum(max(1, sum(choice.end is None for choice in g.choices)) for g in self._running)

    def _step(self) -> None:
        """One piece of prefill for the request that waits longest for it, then one token for every open choice."""
        for gone in [g for g in self._running if g.cancelled]:
            self._cancel(gone)
        decoding = [g for g in self._running if g.choices]
        ready = next((g for g in self._running if not g.choices and (g.restoring is None or g.restoring.done())), None)
        if ready is None and not decoding:  # all wait for their states
            self._queue.wait(self._something_to_do, 0.05)
        if ready is not None:
            self._guarded([ready], partial(self._advance_prompt, ready, others=bool(decoding)))
        if decoding:
            self._guarded(decoding, partial(self._decode, decoding))

    def _guarded(self, generations: Sequence[Generation], work: Callable[[], None]) -> None:
        """A failure ends the requests it touched, and only them."""
        try:
            work()
        except Exception as err:
            log.exception("a step failed")
            lost = isinstance(err, StateLost)  # who asks again goes on from the last checkpoint
            for g in [g for g in generations if g in self._running]:
                g.error = (
                    Rejected(str(err), status=503, code="device_lost", retry_after_s=1)
                    if lost
                    else Rejected(f"generation failed: {err}", status=500, code="generation_failed")
                )
                self._cancel(g)

    def _advance_prompt(self, g: Generation, others: bool) -> None:
        prompt, last = g.prompt, len(g.prompt.ids) - 1
        if g.handle is None:
            self._begin(g)
        started = time.perf_counter()
        if g.position < last:
            mark = prompt.system if g.position < prompt.system else last
            limit = BUCKET_WHILE_OTHERS_DECODE if others else None
            n = buckets.plan(mark - g.position, self.program.buckets, limit)[0]
            self.program.prefill(g.handle, prompt.ids[g.position : g.position + n].tolist())
            g.position += n
            g.fed += n
            if g.position == mark < last and self._persistence is not None:
                self._persistence.checkpoint(g, g.handle, "system", prompt.ids[:mark])
        else:
            persistence = self._persistence if g.fed else None
            user = None if persistence is None else persistence.save(g, g.handle, "user", prompt.ids[:last])
            logits = self.program.decode([g.handle], [int(prompt.ids[last])])[0]
            if persistence is not None and user is not None:  # only now: encoding takes a core from the first token
                persistence.keep(g, user)
            g.position += 1
            g.fed += 1
            g.logits = logits
            self._open_choices(g)
        g.prefill_ms += (time.perf_counter() - started) * 1e3

    def _begin(self, g: Generation) -> None:
        """The handle to prefill: restored from the checkpoint found, or new when there is none that can be read."""
        loaded = None if g.restoring is None else g.restoring.result()
        g.restoring = None
        if loaded is None:
            g.handle = self.program.new_state()
            return
        found, g.handle = loaded
        g.position = found.position
        g.origin = found.origin
        same_build = found.build == self.artifact.manifest.build
        g.resume = "exact" if same_build and found.producer == self.program.producer else "portable"
        if same_build:
            g.parent = (found.id, found.position)
        g.restore_ms = (time.perf_counter() - g.admitted) * 1e3

    def _open_choices(self, g: Generation) -> None:
        """Start as many of the n choices as there is room for; the last of them takes the prompt's own handle."""
        request, logits = g.request, g.logits
        if logits is None:
            return
        while len(g.choices) < request.n and (not g.choices or self._choices_in_use() < self._max_running):
            context = self.program.context
            budget = request.max_tokens if context is None else min(request.max_tokens, context - len(g.prompt.ids))
            choice = Choice(request, len(g.choices), budget, self._tokenizer, self._stop_tokens)
            last = choice.index == request.n - 1
            choice.handle = g.handle if last else self.program.clone(g.handle)
            if last:
                g.handle = None
            g.choices.append(choice)
            self._take(g, choice, logits)
        self._settle(g)

    def _decode(self, generations: Sequence[Generation]) -> None:
        open_choices = [
            (g, choice) for g in generations if g in self._running for choice in g.choices if choice.end is None
        ]
        if open_choices:
            handles, tokens = (
                [choice.handle for _, choice in open_choices],
                [choice.next_token for _, choice in open_choices],
            )
            rows = self.program.decode(handles, tokens)
            for (g, choice), row in zip(open_choices, rows, strict=True):
                self._guarded([g], partial(self._take, g, choice, row))
        for g in generations:
            if g in self._running:
                self._open_choices(g)

    def _take(self, g: Generation, choice: Choice, logits: Logits) -> None:
        delta = choice.take(logits)
        if delta is not None:
            self._send(g, delta)
        if choice.end is not None:
            self._close_choice(g, choice)

    def _send(self, g: Generation, event: Event) -> None:
        try:
            g.deliver(event)
        except Exception:  # the reader is gone: an event loop that was closed, say
            log.debug("request %s: its reader is gone", g.id)
            g.cancelled = True

    def _close_choice(self, g: Generation, choice: Choice) -> None:
        """Checkpoint the end of a turn whose text is what was fed, and give the handle back."""
        if choice.handle is None:
            return
        if self._persistence is not None and not choice.cut:
            fed = self.program.position(choice.handle)
            ids = np.concatenate([g.prompt.ids, np.array(choice.tokens, np.int32)])[:fed]
            self._persistence.checkpoint(g, choice.handle, "turn", ids, choice.turn)
        self.program.release(choice.handle)
        choice.handle = None

    def _cancel(self, g: Generation) -> None:
        """End a request early: what was sent is its answer."""
        for choice in g.choices:
            choice.cancel()
            try:
                self._close_choice(g, choice)
            except Exception:
                log.exception("request %s: its state could not be saved", g.id)
        self._finish(g)

    def _settle(self, g: Generation) -> None:
        if len(g.choices) == g.request.n and all(choice.end is not None for choice in g.choices):
            self._finish(g)

    def _finish(self, g: Generation) -> None:
        """Out of the running; the client hears the end after the commit."""
        if g in self._running:
            self._running.remove(g)
        if self._persistence is not None:
            self._persistence.discard(g)
        if g.handle is not None:
            self.program.release(g.handle)
            g.handle = None
        self.metrics.queue(len(self._queue), len(self._running))
        if self._persistence is None:
            self._tell(g, stored=False)
        else:
            self._persistence.commit(g, partial(self._tell, g))

    def _tell(self, g: Generation, stored: bool) -> None:
        """The last event of a request. From the writer's thread, or the worker's when nothing is kept."""
        usage = g.usage(stored)
        if g.error is not None:
            self.metrics.request_failed(g.error.code)
        elif g.cancelled:
            self.metrics.request_failed("cancelled")
        else:
            g.record(self.metrics, usage)
        self._send(g, Done(g.finish_reasons, usage) if g.error is None else Failed(g.error))
        if stored and self._persistence is not None:
            self._persistence.rerenderer.add(g)
        self._queue.told()
