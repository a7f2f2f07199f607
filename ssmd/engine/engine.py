"""The engine of one program: it plans and queues requests, and its threads answer them.

`Engine.submit` runs in the caller's thread and plans the prompt. Only the worker (worker.py) computes with the program.
Checkpoints are read in a thread of their own (persist/restore.py), so that other streams go on. The writer
(persist/writer.py) commits. No asyncio here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ssmd.engine.decode.choice import ToolCalling
from ssmd.engine.decode.device import DeviceLock, WarmUp, once
from ssmd.engine.decode.generation import Generation, GenerationInput, GenerationStore
from ssmd.engine.decode.several import MultiPrompt
from ssmd.engine.decode.sharing import Queue
from ssmd.engine.metrics import ModelMetrics
from ssmd.engine.persist.persistence import NoPersistence, Persistence
from ssmd.engine.persist.writer import Writer
from ssmd.engine.prompt.planner import Planner
from ssmd.engine.prompt.raw import RawPlanner, echoing
from ssmd.engine.request import Event, Finish, Recall, Request
from ssmd.engine.sampling.grammar import Grammars
from ssmd.engine.terms import Rejection
from ssmd.engine.worker import Worker
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program
from ssmd.text.apart import Texts, opened
from ssmd.text.template import TemplateError


class Engine:
    """Serves one program. `writer`: of the store for its turns; None stores nothing."""

    def __init__(
        self,
        artifact: Artifact,
        program: Program,
        writer: Writer | None,
        *,
        metrics: ModelMetrics,
        device: str = "",
        turns: DeviceLock | None = None,
        max_running: int = 8,
        spare_choices: int = 1,
        choice_bytes: int = 0,
        room: Callable[[int], bool] = lambda nbytes: True,
        max_queue: int = 512,
        texts: Texts | None = None,
    ) -> None:
        """Open the engine; `start` starts its worker. Raises TemplateError or TokenizerError.

        device: where the program computes. turns: on that device, if other programs compute there too.
        max_running: choices that decode at once. spare_choices: lanes beside those, one for each client that has none
        while others have them all. choice_bytes: memory of a choice.
        room: returns True if there is memory for that many more bytes; called before a choice decodes beside others.
        texts: the artifact's template and tokenizer; by default they are opened here, in this process.
        """
        manifest = artifact.manifest
        self.artifact = artifact
        self.program = program
        self.device = device or manifest.device_class
        self._texts = opened(artifact, apart=False) if texts is None else texts
        tokenizer = self._texts.tokenizer
        self._calling = ToolCalling(self._texts.template.source, tokenizer)
        store = None if writer is None else writer.store
        link = None if writer is None else writer.remote
        template = self._texts.template
        self._planner = Planner(manifest, program, tokenizer, template, store, link, lambda: metrics.ms_per_token)
        self._raw = RawPlanner(self._planner.scope, program, tokenizer, store)
        self._queue = Queue(max_queue)
        self._persistence: Persistence | NoPersistence = NoPersistence(program)
        if writer is not None:
            wake = self._queue.wake
            self._persistence = Persistence(writer, program, self._planner, tokenizer, build=manifest.build, wake=wake)
        stops = frozenset(manifest.stop_tokens)
        self._grammars = Grammars(tokenizer, stops, program.vocabulary)
        self._choice_bytes = choice_bytes
        self._worker = Worker(
            program,
            self._queue,
            self._persistence,
            metrics,
            tokenizer,
            self._calling,
            stops,
            max_running,
            spare_choices,
            turns or DeviceLock(),
            partial(room, choice_bytes),
        )

    @property
    def draining(self) -> bool:
        """Return True if the engine refuses new requests, as it shuts down."""
        return self._queue.draining

    @property
    def working(self) -> bool:
        """Return True if the worker runs."""
        return self._worker.alive

    def start(self, *, warm_up: bool = False) -> None:
        """Start the worker. warm_up: if no request comes at first, do work once that takes longer the first time."""
        steps = []
        if warm_up:
            lengths = self.program.buckets
            short = [b for b in lengths if b <= buckets.grid(lengths)]
            tokens = [0, *short][-2] + 1  # as few as run the longest of these: more might need a larger KV tier
            steps = [once(self._planner.warm_up), self._persistence.warm_up(tokens), self._grammars.warm_up()]
        self._worker.start(WarmUp(steps))

    def check(self, client: str) -> None:
        """Raise Rejection if a request of this client would not be accepted now."""
        self._queue.check(client)

    def runs_others(self, client: str) -> bool:
        """Return True if answers to other clients are under way."""
        return any(g.asked.request.client != client for g in tuple(self._worker.running))

    def submit(
        self,
        request: Request,
        deliver: Callable[[Event], None],
        go_on: Callable[[], None] = lambda: None,
        *,
        recallable: bool = False,
        wait: bool = True,
    ) -> Generation:
        """Plan the prompt and queue it. Blocks for template, tokenizer and look-up. Raises Rejection.

        deliver: called from the worker's and the writer's threads: deltas, then one Finish or Failure.
        go_on: called now and then while it blocks; it raises if the client is gone.
        recallable: the request may be given back while it waits, by Recall.
        wait: block until a new grammar is tried; otherwise raise PendingTrial.
        """
        started = time.perf_counter() if request.arrived is None else request.arrived
        self.check(request.client)
        guide, read = None, partial(self._grammars.read, client=request.client, wait=wait)
        if request.grammar is not None and not request.given.tools:
            guide = read(request.grammar)  # before the prompt is planned, as that would be in vain
        try:
            plan = self._planner.plan if request.raw is None else self._raw.plan
            prompt = plan(request, go_on)
        except Rejection:
            if self.draining:  # its template and tokenizer were closed
                self.check(request.client)
            raise
        request = self._calling.forced(request, prompt)
        if request.grammar is not None and guide is None:
            guide = read(request.grammar)
        if request.echo:
            deliver = echoing(deliver, self._raw.text(request), request.n)
        created = int(time.time()) if request.created is None else request.created
        asked = GenerationInput(request, prompt, deliver, started, recallable, guide, created=created)
        if request.warm is not None and request.warm.idle:
            return self._deferred(asked)
        generation = Generation(asked, self._persistence.begin(asked), self._queue.leave)
        self._queue.put(generation)
        return generation

    def _deferred(self, asked: GenerationInput) -> Generation:
        """Store a warm beginning, to be read when no request waits. Its request ends when that is written."""
        assert isinstance(self._persistence, Persistence)  # the planner refuses it without a store
        generation = Generation(asked, GenerationStore(), lambda _: None)

        def end(stored: bool, state_stored: bool) -> None:
            asked.deliver(Finish(("stop",), generation.usage(stored, self.program.context, state_stored)))

        self._persistence.defer(asked, end)
        return generation

    def look_for_warm(self) -> None:
        """Queue the warm beginnings that are to be read when no request waits. From any thread."""
        self._persistence.look_for_warm()

    def submit_all(
        self,
        request: Request,
        deliver: Callable[[Event], None],
        go_on: Callable[[], None] = lambda: None,
        *,
        recallable: bool = False,
        wait: bool = True,
    ) -> Generation | MultiPrompt:
        """Submit a request. Each of several raw prompts is a generation of its own; otherwise as `submit`."""
        if request.more:
            return MultiPrompt.begin(request, deliver, lambda one, taken: self.submit(one, taken, go_on, wait=wait))
        return self.submit(request, deliver, go_on, recallable=recallable, wait=wait)

    @property
    def words(self) -> RawPlanner:
        """Return the planner of raw prompts, which turns text into ids and back."""
        return self._raw

    def knows(self, variable: str) -> bool:
        """Return True if the chat template looks a variable up, or if that is unknown. Blocks the first time."""
        with contextlib.suppress(TemplateError):
            return variable in self._texts.template.variables
        return True

    def rendered(self, request: Request) -> str:
        """Render a request's messages with the chat template. Raises Rejection."""
        return self._planner.text(request)

    def count(self, request: Request, at_most: int, go_on: Callable[[], None]) -> int:
        """Count the tokens of a request's prompt, as Planner.count. Raises Rejection."""
        return self._planner.count(request, at_most, go_on)

    def recall(self) -> None:
        """Return waiting requests to the callers that take them back: other models' requests come first."""
        for generation in self._queue.recall():
            with contextlib.suppress(RuntimeError):  # its reader is gone
                generation.asked.deliver(Recall())

    @property
    def idle(self) -> bool:
        """Return True if nothing is left to do, neither requests nor deferred work."""
        return not self._queue.unfinished and self._persistence.idle

    @property
    def busy_bytes(self) -> int:
        """Return the bytes of memory that choices take now. The first is not counted: it is a part of the program."""
        return max(0, self._worker.in_use - 1) * self._choice_bytes

    def rows(self) -> list[dict[str, Any]]:
        """List the progress of each request that waits or is answered, ready for JSON."""
        return [g.row() for g in (*tuple(self._worker.running), *self._queue.waiting())]

    def drain(self) -> None:
        """Refuse new requests; `shutdown` waits for those that are there."""
        self._queue.draining = True
        self._texts.close()  # requests that wait for them are refused
        self._grammars.close()

    def shutdown(self, grace_s: float = 10.0) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, cut the rest (stored incomplete), stop."""
        self.drain()
        self._queue.drain(grace_s)
        self._worker.join()
        self._persistence.close()
