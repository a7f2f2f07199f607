"""The host: the models of a daemon, loaded on request (loader.py), and lent to requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from ssmd.engine.decode.sharing import unavailable
from ssmd.engine.host.loader import (
    RETRY_AFTER_S,
    HostedModel,
    LeaseFuture,
    LeaseRequest,
    Loader,
    ModelLease,
    Open,
    refused,
)
from ssmd.engine.host.models import Model, ModelIndex
from ssmd.engine.metrics import LiveStatus, Metrics
from ssmd.engine.persist.writer import Writer
from ssmd.engine.terms import Rejection
from ssmd.machine import memory

DRAINING = "draining"  # the state of a daemon that comes to its end
KEEP_ALIVE_S = 300.0
RETRY_S = 30.0  # s before a request has a failed load tried again


class Host:
    """Models by their shelf ids. Thread-safe; only `shutdown` and `close` wait."""

    def __init__(
        self,
        shelf: ModelIndex,
        open_: Open,
        metrics: Metrics,
        writer: Writer | None = None,
        *,
        trial: Callable[[Model], None] = lambda model: None,
        keep_alive_s: float = KEEP_ALIVE_S,
        budget: int | None = None,
        max_waiting: int = 512,
    ) -> None:
        """Start the loader; no model is loaded yet.

        open_: loads a model and starts its engine.
        writer: of the store for the turns of all models; None stores nothing.
        trial: tries in a process of its own whether a model can be loaded. It may take minutes; others are loaded
        meanwhile.
        keep_alive_s: time a model stays loaded after its last request; infinite for ever.
        budget: bytes that loaded models may take; None: what is free now, and one model even if it takes more.
        budget: bytes that loaded models may take; None: the memory that is free, and one model even if it takes more.
        """
        self.shelf, self.metrics, self.writer = shelf, metrics, writer
        self.draining = False
        self.leaving = False  # /health says that the daemon ends; requests are still answered
        self._keep_alive_s, self._max_waiting = keep_alive_s, max_waiting
        self._loader = Loader(shelf, open_, trial, metrics, keep_alive_s=keep_alive_s, budget=budget)
        metrics.live = self.live

    @property
    def budget(self) -> int | None:
        """Return the bytes that loaded models may take together; None if this machine's memory is unknown."""
        return self._loader.budget.nbytes

    def ready(self) -> None:
        """Note that the daemon is ready: its first models are loaded. From now on all load failures are logged."""
        self._loader.starting = False

    @property
    def starting(self) -> bool:
        """Return True until `ready`."""
        return self._loader.starting

    @property
    def keeps(self) -> bool:
        """Return True if turns are stored."""
        return self.writer is not None

    @property
    def problem(self) -> str:
        """Return the code for why turns are not fully stored; "" if they are, or if none are to be."""
        return "" if self.writer is None else self.writer.condition.reason

    def look(self) -> None:
        """Note if the store's file lost its name, before a turn fails of it. Costs a few `stat` calls."""
        if self.writer is not None:
            self.writer.look()

    @property
    def working(self) -> bool:
        """Return True if the worker of any loaded model runs."""
        return any(engine.working for engine in self._loader.engines())

    @property
    def busy(self) -> bool:
        """Return True if a request has a model, or waits for one."""
        with self._loader.changed:
            return any(h.leases or h.waiting for h in self._loader.hosted.values())

    def check(self, client: str) -> None:
        """Raise Rejection if no model would accept a request of this client now."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        refusal = None
        for engine in self._loader.engines():
            try:
                engine.check(client)
                return
            except Rejection as err:
                refusal = err
        if refusal is not None and not self._loader.wanted:
            raise refusal

    def runs_others(self, client: str) -> bool:
        """Return True if answers to other clients are under way."""
        return any(engine.runs_others(client) for engine in self._loader.engines())

    def lend(
        self, model: Model, keep_alive_s: float | None = None, asker: LeaseRequest | None = None
    ) -> Future[ModelLease]:
        """Lend a loaded model to one request, at once or when it is loaded. The future's exception is a Rejection.

        keep_alive_s: the model's new value; None: unchanged.
        asker: the request, to be listed while it waits.
        A caller that stops waiting calls `give_up`.
        """
        future = LeaseFuture(asker)
        with self._loader.changed:
            try:
                hosted = self._loader.enter(model)
                self._check_open(hosted)
            except Rejection as err:
                future.set_exception(err)
                return future
            if keep_alive_s is not None:
                hosted.keep_alive_s = keep_alive_s
            hosted.last_used = time.time()
            if hosted.unloads and hosted.model is model and not self._loader.wanted:
                hosted.leaving, hosted.status = False, "loaded"  # a new request cancels the unloading
            if hosted.is_loaded and not hosted.leaving and hosted.model is model:
                self._loader.hand_out(hosted, future)
            else:
                self._loader.want(hosted, future)
        return future

    def give_up(self, future: Future[ModelLease]) -> None:
        """Stop waiting for a lease. One that was granted is released."""
        if not future.cancel():
            future.add_done_callback(lambda done: None if done.exception() else done.result().release())
        with self._loader.changed:
            for hosted in self._loader.wanted:
                hosted.waiting = deque(one for one in hosted.waiting if one is not future)
        self._loader.wake()

    def look_for_warm(self) -> None:
        """Have the loaded models read warm beginnings without a state, when no request waits."""
        for engine in self._loader.engines():
            engine.look_for_warm()

    def load(self, model: Model) -> Future[ModelLease]:
        """Load a model without a request, even if it failed just now. The caller releases the lease."""
        with self._loader.changed:
            self._loader.enter(model).failed_at = 0.0
        return self.lend(model)

    def unload(self, model: Model) -> None:
        """Unload a model once its requests have ended. Does nothing if it is not loaded."""
        with self._loader.changed:
            hosted = self._loader.hosted.get(model.id)
            if hosted is not None and hosted.is_loaded:
                hosted.leaving = True
                hosted.status = "unloading"
                self._loader.wake()

    def pin(self, model: Model, pinned: bool) -> None:
        """Pin a model, or unpin it. A pinned model stays once it is loaded, used or not, whatever others need."""
        with self._loader.changed:
            hosted = self._loader.enter(model)
            hosted.pinned = pinned
            if pinned and hosted.status == "loaded":  # it was to go for another one
                hosted.leaving = False
            hosted.expire()
            self._loader.wake()

    def live(self) -> LiveStatus:
        """Return the state of this moment, for screens."""
        with self._loader.changed:
            hosted = dict(self._loader.hosted)
        try:
            models = self.shelf.models()
        except Rejection:
            models = []
        there = {model.id: hosted.get(model.id) or HostedModel(model, self._keep_alive_s) for model in models}
        there |= {id_: one for id_, one in hosted.items() if one.is_loaded}  # removed, and not unloaded yet
        requests = {id_: one.requests() for id_, one in there.items()}
        rows = [one.row(requests[id_]) for id_, one in there.items()]
        running = [row for mine in requests.values() for row in mine]
        used = sum(one.nbytes + one.busy_bytes for one in hosted.values() if one.is_loaded)
        held = {"budget_bytes": self.budget, "used_bytes": used}
        seen = {"resident_bytes": memory.resident(), "mapped_bytes": memory.mapped()}
        answering = any(row["phase"] != "loading" for row in running)
        return LiveStatus(self._state(answering), self.problem, rows, running, held | seen)

    def pulse(self) -> tuple[object, object]:
        """Return a cheap version stamp of `live` and the metrics: (state, everything else).

        Pollers compare it. While a request has a model, the second part changes with every call.
        """
        with self._loader.changed:
            models = [(h.status, h.stage, h.pinned, len(h.waiting), h.idle_until) for h in self._loader.hosted.values()]
            busy = any(h.leases for h in self._loader.hosted.values())
        state = self.draining, self.leaving, self._loader.starting, self.problem, busy
        return (models, state), (self.metrics.changes, time.monotonic() if busy else None)

    def loading(self) -> list[dict[str, object]]:
        """Describe the models that are being loaded, ready for JSON. seconds: since a request asked for it."""
        with self._loader.changed:
            now, loading = time.monotonic(), [h for h in self._loader.wanted if h.status == "loading"]
            return [
                {"model": h.model.id, "stage": h.stage or None, "seconds": round(now - h.wanted_at, 1)} for h in loading
            ]

    def foremost(self) -> Model | None:
        """Return the loaded model that was requested last, or else the only model there is.

        None if no model is loaded and there is not exactly one.
        """
        with self._loader.changed:
            loaded = [h for h in self._loader.hosted.values() if h.is_loaded]
        if loaded:
            return max(loaded, key=lambda h: h.last_used or 0.0).model
        models = self.shelf.models()
        return models[0] if len(models) == 1 else None

    def row(self, model: Model) -> dict[str, object]:
        """Describe one model, ready for JSON."""
        with self._loader.changed:
            hosted = self._loader.hosted.get(model.id) or HostedModel(model, self._keep_alive_s)
        return hosted.row(hosted.requests())

    def shutdown(self, grace_s: float = 10.0) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, cut the rest (stored incomplete), unload all."""
        with self._loader.changed:
            self.draining = True
            for hosted in self._loader.wanted:  # which the loader takes out, one of them once it is loaded
                hosted.fail(unavailable("the server is shutting down", "shutting_down"))
            self._loader.changed.notify_all()
        until = time.monotonic() + grace_s
        engines = self._loader.engines()
        for engine in engines:
            engine.drain()
        for engine in engines:
            engine.shutdown(max(0.0, until - time.monotonic()))
        self._loader.end()

    def close(self) -> None:
        """Shut down and free everything. Waits for a load that is under way."""
        self.shutdown(0)
        self._loader.join()
        for hosted in self._loader.hosted.values():
            if hosted.engine is not None:
                hosted.engine.shutdown(0)
                hosted.engine.program.close()
                hosted.engine = None
        if self.writer is not None:
            self.writer.close()

    def _check_open(self, hosted: HostedModel) -> None:
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if hosted.status == "failed" and time.time() - hosted.failed_at < RETRY_S and hosted.model.is_current:
            raise refused(hosted.model.id, hosted.problem, code="model_load_failed")
        if len(hosted.waiting) >= self._max_waiting:
            why = (
                f"is still loading, and {self._max_waiting} requests wait for it already: too many requests. "
                f"Please try again in {RETRY_AFTER_S} seconds."
            )
            raise refused(hosted.model.id, why, code="queue_full", retry_after_s=RETRY_AFTER_S)

    def _state(self, running: bool) -> str:
        if self.draining or self.leaving:
            return DRAINING
        if self._loader.starting:
            return "starting"
        if self.problem:
            return "degraded"
        return "generating" if running else "idle"
