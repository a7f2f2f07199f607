"""What serves one program: requests are planned and queued here, and answered by threads.

`Engine.submit` runs in the caller's thread and decides what has to be fed; the worker (worker.py) alone touches the
program; checkpoints are read in a thread of their own (restore.py), so that other streams go on; the writer (writer.py)
commits. No asyncio here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ssmd.engine.feeding import BUCKET_WHILE_OTHERS_DECODE
from ssmd.engine.generation import Asked, Generation
from ssmd.engine.metrics import Metrics
from ssmd.engine.persistence import KeepsNothing, Persistence
from ssmd.engine.prompt import Planner
from ssmd.engine.queue import Queue
from ssmd.engine.request import Event, Rejected, Request
from ssmd.engine.warmup import WarmUp, once
from ssmd.engine.worker import Worker
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.reply import Reply, ReplyKey
from ssmd.sessions.store import Store
from ssmd.text.apart import opened


class Engine:
    """Serves one program. `store` None keeps nothing."""

    def __init__(
        self,
        artifact: Artifact,
        program: Program,
        store: Store | None,
        *,
        metrics: Metrics,
        max_running: int = 8,
        spare_lanes: int = 1,
        max_queue: int = 512,
        apart: bool = False,
    ) -> None:
        """max_running: choices that decode at the same time. spare_lanes: so many more, one for each client that has
        none while others have them all. `apart`: the artifact may be a stranger's, so its template and tokenizer work
        in a process of their own.

        Raises TemplateError or TokenizerError.
        """
        manifest = artifact.manifest
        self.artifact = artifact
        self.program = program
        self.metrics = metrics
        self._texts = opened(artifact, apart=apart)
        tokenizer = self._texts.tokenizer
        self._planner = Planner(manifest, program, tokenizer, self._texts.template, store)
        self._queue = Queue(max_queue)
        self._persistence: Persistence | KeepsNothing = KeepsNothing(program)
        if store is not None:
            self._persistence = Persistence(
                store, program, self._planner, tokenizer, metrics, build=manifest.build, wake=self._queue.wake
            )
        stops = frozenset(manifest.stop_tokens)
        self._worker = Worker(
            program, self._queue, self._persistence, metrics, tokenizer, stops, max_running, spare_lanes
        )

    @property
    def draining(self) -> bool:
        """Whether the engine refuses new requests, as it shuts down."""
        return self._queue.draining

    @property
    def working(self) -> bool:
        """Whether the worker has not stopped, or not yet."""
        return self._worker.alive

    @property
    def keeps(self) -> bool:
        """Whether the engine writes turns down."""
        return self._persistence.keeps

    @property
    def problem(self) -> str:
        """Why turns are not stored as they should be, as a code; "" if they are, or if none are to be."""
        return self._persistence.problem

    def start(self, *, warm_up: bool = False) -> None:
        """Start the worker. warm_up: if nobody comes in the first moments, do once what takes longer the first time."""
        steps = []
        if warm_up:
            lengths = self.program.buckets
            short = [b for b in lengths if b <= BUCKET_WHILE_OTHERS_DECODE] or lengths[:1]
            tokens = [0, *short][-2] + 1  # as few as run the longest of these: more might need a larger KV tier
            steps = [once(self._planner.warm_up), self._persistence.warm_up(tokens)]
        self._worker.start(WarmUp(steps))

    def check(self, client: str) -> None:
        """Check that a request of this client would be taken in now. Raises Rejected."""
        self._queue.check(client)

    def runs_others(self, client: str) -> bool:
        """Whether answers of other clients than this one are under way."""
        return any(g.asked.request.client != client for g in tuple(self._worker.running))

    def submit(
        self, request: Request, deliver: Callable[[Event], None], go_on: Callable[[], None] = lambda: None
    ) -> Generation:
        """Plan the prompt and queue it. Blocks for template, tokenizer and look-up; raises Rejected.

        `deliver` is called from the worker's and the writer's threads: deltas, then one Done or Failed. `go_on` is
        called now and then while it blocks, to raise when nobody waits for it any more.
        """
        started = time.perf_counter()
        self.check(request.client)
        try:
            prompt = self._planner.plan(request, go_on)
        except Rejected:
            if self.draining:  # which ended what it was prepared in
                self.check(request.client)
            raise
        asked = Asked(request, prompt, deliver, started)
        generation = Generation(asked, self._persistence.begin(asked), self._queue.leave)
        self._queue.put(generation)
        return generation

    def reply(self, key: ReplyKey) -> Reply | None:
        """What a request was answered with before, if it was. Raises StoreError."""
        return self._persistence.reply(key)

    def shutdown(self, grace_s: float = 10.0) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, cut the rest (stored incomplete), stop."""
        self._queue.draining = True
        self._texts.close()  # whoever waits for it is refused
        self._queue.drain(grace_s)
        self._worker.join()
        self._persistence.close()
