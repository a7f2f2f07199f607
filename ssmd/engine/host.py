"""The host: loads models when they are asked for, within a budget of memory, and lets idle ones go.

One thread loads and lets go, one model at a time, in the order in which they were asked for. A model that answers
somebody is never let go; where others hold the memory that one needs, who comes to them waits until it was loaded.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from ssmd.engine.engine import Engine
from ssmd.engine.hosted import Hosted, Lease, NoRoom, make_room, refused
from ssmd.engine.metrics import Live, Metrics, ModelMetrics
from ssmd.engine.queue import unavailable
from ssmd.engine.request import Rejected
from ssmd.engine.shelf import Model, Shelf, unusable
from ssmd.engine.turns import Turns
from ssmd.engine.writer import Writer
from ssmd.machine import memory
from ssmd.machine.size import show_size

log = logging.getLogger(__name__)
DRAINING = "draining"  # the state of a daemon that comes to its end
KEEP_ALIVE_S = 300.0
ROOM_S = 60.0  # for which a model waits until others that answer somebody can go
RETRY_S = 30.0  # after which a load that failed is tried again, if it is asked for
_LOOK_S = 1.0  # how often to look at models that were replaced or removed
_SOON_S = 0.1
_RETRY_AFTER_S = 5
Open = Callable[[Model, ModelMetrics, Turns], Engine]


class Host:
    """Has models, by the shelf's ids. Its methods may be called from any thread, and none of them waits."""

    def __init__(
        self,
        shelf: Shelf,
        open_: Open,
        metrics: Metrics,
        writer: Writer | None = None,
        *,
        trial: Callable[[Model], None] = lambda model: None,
        keep_alive_s: float = KEEP_ALIVE_S,
        budget: int | None = None,
        max_waiting: int = 512,
    ) -> None:
        """open_: loads a model and starts its engine. writer: of the store that all keep turns in. trial: finds out,
        in a process of its own, whether that can be done; minutes may pass, in which others are loaded. keep_alive_s:
        how long a model stays after its last request, infinite for ever. budget: bytes that loaded models may take;
        None: as many as the machine has free now, and one model whatever it takes. max_waiting: requests, for one
        model.
        """
        self.shelf, self.metrics, self.writer = shelf, metrics, writer
        self.draining = False
        self.starting = True
        free = memory.available()
        self.budget = budget if budget is not None else free
        self._strict = budget is not None
        self._open, self._trial = open_, trial
        self._keep_alive_s, self._max_waiting = keep_alive_s, max_waiting
        self._turns: dict[str, Turns] = {}
        self._changed = threading.Condition()
        self._hosted: dict[str, Hosted] = {}
        self._wanted: deque[Hosted] = deque()
        self._ended = self._news = False
        self._runtimes: set[str] = set()  # whose libraries are in this process
        self._thread = threading.Thread(target=self._run, name="ssmd-host", daemon=True)
        self._thread.start()
        metrics.live = self.live

    # what the API asks

    @property
    def keeps(self) -> bool:
        """Whether turns are written down."""
        return self.writer is not None

    @property
    def problem(self) -> str:
        """Why turns are not stored as they should be, as a code; "" if they are, or if none are to be."""
        return "" if self.writer is None else self.writer.condition.reason

    @property
    def working(self) -> bool:
        """Whether a thread that computes has not stopped, or not yet."""
        return any(engine.working for engine in self._engines())

    def check(self, client: str) -> None:
        """Check that a request of this client would be taken in now, by whatever model. Raises Rejected."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        refusal = None
        for engine in self._engines():
            try:
                engine.check(client)
                return
            except Rejected as err:
                refusal = err
        if refusal is not None and not self._wanted:
            raise refusal

    def runs_others(self, client: str) -> bool:
        """Whether answers of other clients than this one are under way."""
        return any(engine.runs_others(client) for engine in self._engines())

    def lend(self, model: Model, keep_alive_s: float | None = None) -> Future[Lease]:
        """A loaded model for one request, at once or when it is loaded; its exception is a Rejected.

        keep_alive_s: from now on for this model; None: as it was. Who gives up waiting calls `give_up`.
        """
        future: Future[Lease] = Future()
        with self._changed:
            try:
                hosted = self._enter(model)
                self._check_open(hosted)
            except Rejected as err:
                future.set_exception(err)
                return future
            if keep_alive_s is not None:
                hosted.keep_alive_s = keep_alive_s
            hosted.last_used = time.time()
            if hosted.is_loaded and not hosted.leaving and hosted.model is model:
                self._hand_out(hosted, future)
            else:
                self._want(hosted, future)
        return future

    def give_up(self, future: Future[Lease]) -> None:
        """Want a lease no longer; one that came is given back."""
        if not future.cancel():
            future.add_done_callback(lambda done: None if done.exception() else done.result().release())
        with self._changed:
            for hosted in self._wanted:
                if future in hosted.waiting:
                    hosted.waiting.remove(future)
        self._wake()

    def load(self, model: Model) -> Future[Lease]:
        """Load a model though nobody asks it anything; also one that failed just now. The lease is to be released."""
        with self._changed:
            self._enter(model).failed_at = 0.0
        return self.lend(model)

    def unload(self, model: Model) -> None:
        """Let a model go as soon as it answers nobody; nothing if it is not loaded."""
        with self._changed:
            hosted = self._hosted.get(model.id)
            if hosted is not None and hosted.is_loaded:
                hosted.leaving = True
                hosted.status = "unloading"
                self._wake()

    def pin(self, model: Model, pinned: bool) -> None:
        """Keep a model once it is loaded, whatever others need and however long nobody asks; or no longer."""
        with self._changed:
            hosted = self._enter(model)
            hosted.pinned = pinned
            self._expire(hosted)
            self._wake()

    def live(self) -> Live:
        """What is so at this moment, for screens."""
        with self._changed:
            hosted = dict(self._hosted)
        try:
            models = self.shelf.models()
        except Rejected:
            models = []
        there = {model.id: hosted.get(model.id) or Hosted(model, self._keep_alive_s) for model in models}
        there |= {id_: one for id_, one in hosted.items() if one.is_loaded}  # removed, and not yet let go
        rows = [one.row() for one in there.values()]
        running = [{"model": id_, **row} for id_, one in there.items() if one.engine for row in one.engine.rows()]
        used = sum(one.nbytes for one in hosted.values() if one.is_loaded)
        held = {"budget_bytes": self.budget, "used_bytes": used, "resident_bytes": memory.resident()}
        return Live(self._state(bool(running)), self.problem, rows, running, held)

    def pulse(self) -> object:
        """What is another one when `live` or the metrics may be: for who asks often."""
        with self._changed:
            models = [(h.status, h.pinned, len(h.waiting), h.idle_until) for h in self._hosted.values()]
            busy = any(h.leases for h in self._hosted.values())
        state = self.draining, self.starting, self.problem
        return self.metrics.changes, models, state, time.monotonic() if busy else None

    def foremost(self) -> Model | None:
        """The model that was asked last of those that are loaded, or the only one there is."""
        with self._changed:
            loaded = [h for h in self._hosted.values() if h.is_loaded]
        if loaded:
            return max(loaded, key=lambda h: h.last_used or 0.0).model
        models = self.shelf.models()
        return models[0] if len(models) == 1 else None

    def row(self, model: Model) -> dict[str, object]:
        """What is known of one model, ready for JSON."""
        with self._changed:
            return (self._hosted.get(model.id) or Hosted(model, self._keep_alive_s)).row()

    def shutdown(self, grace_s: float = 10.0) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, cut the rest (stored incomplete), let all go."""
        with self._changed:
            self.draining = True
            for hosted in self._wanted:
                self._fail(hosted, unavailable("the server is shutting down", "shutting_down"))
            self._wanted.clear()
            self._changed.notify_all()
        until = time.monotonic() + grace_s
        engines = self._engines()
        for engine in engines:
            engine.drain()
        for engine in engines:
            engine.shutdown(max(0.0, until - time.monotonic()))
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Free everything, after `shutdown`; a load that is under way is waited for."""
        self.shutdown(0)
        self._thread.join()
        for hosted in self._hosted.values():
            if hosted.engine is not None:
                hosted.engine.shutdown(0)
                hosted.engine.program.close()
                hosted.engine = None
        if self.writer is not None:
            self.writer.close()

    def _give_back(self, hosted: Hosted) -> None:
        with self._changed:
            hosted.leases -= 1
            hosted.last_used = time.time()
            self._expire(hosted)
            if not hosted.leases:
                self._wake()

    # with the lock held

    def _enter(self, model: Model) -> Hosted:
        hosted = self._hosted.get(model.id)
        if hosted is None:
            hosted = self._hosted[model.id] = Hosted(model, self._keep_alive_s)
        return hosted

    def _check_open(self, hosted: Hosted) -> None:
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if hosted.status == "failed" and time.time() - hosted.failed_at < RETRY_S and hosted.model.is_current:
            raise refused(hosted.model.id, hosted.problem, code="model_load_failed")
        if len(hosted.waiting) >= self._max_waiting:
            why = f"is being loaded, and {self._max_waiting} requests wait for it already; try again later"
            raise refused(hosted.model.id, why, code="queue_full", retry_after_s=_RETRY_AFTER_S)

    def _want(self, hosted: Hosted, future: Future[Lease]) -> None:
        hosted.waiting.append(future)
        if hosted not in self._wanted:
            hosted.wanted_at = time.monotonic()
            self._wanted.append(hosted)
        self._wake()

    def _hand_out(self, hosted: Hosted, future: Future[Lease]) -> None:
        if future.set_running_or_notify_cancel():
            hosted.leases += 1
            hosted.idle_until = None
            assert hosted.engine is not None
            future.set_result(Lease(hosted.engine, hosted.model, partial(self._give_back, hosted)))

    def _expire(self, hosted: Hosted) -> None:
        """Say until when a model stays that nobody has."""
        free = hosted.is_loaded and not (hosted.leases or hosted.pinned or hosted.keep_alive_s == math.inf)
        hosted.idle_until = time.time() + hosted.keep_alive_s if free else None

    def _fail(self, hosted: Hosted, why: Rejected) -> None:
        while hosted.waiting:
            future = hosted.waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(why)

    # the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._news or self._ended, timeout=self._next_look_s())
                self._news = False
                if self._ended:
                    return
            try:
                self._let_go()
                self._load_next()
            except Exception:
                log.exception("the host failed at a piece of work")

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def _next_look_s(self) -> float | None:
        now = time.time()
        due = [h.idle_until - now for h in self._hosted.values() if h.is_loaded and h.idle_until is not None]
        if self._wanted or any(h.leaving and h.is_loaded for h in self._hosted.values()):
            due.append(_SOON_S)
        if any(h.is_loaded for h in self._hosted.values()):
            due.append(_LOOK_S)
        return max(_SOON_S, min(due)) if due else None

    def _let_go(self) -> None:
        """Let go of what is to go, and answers nobody."""
        with self._changed:
            loaded = [h for h in self._hosted.values() if h.is_loaded]
        for hosted in loaded:
            if not hosted.leaving and not hosted.model.is_current:
                log.info("model %s was replaced or removed: it is let go when nobody asks it any more", hosted.model.id)
                with self._changed:
                    hosted.leaving = True
            due = hosted.idle_until is not None and hosted.idle_until <= time.time()
            if hosted.leaving or due:
                self._unload(hosted, at_once=hosted.leaving)

    def _unload(self, hosted: Hosted, *, at_once: bool = False) -> bool:
        """Let a model go that answers nobody, unless it has something to do for later that it can go on with."""
        engine = hosted.engine
        if engine is None or hosted.leases or not (at_once or engine.idle):
            return engine is None
        memory.trim()
        before = memory.resident() or 0
        with self._changed:
            if hosted.leases:
                return False
            hosted.engine, hosted.status, hosted.leaving = None, "unloading", False
            hosted.loaded_at = hosted.idle_until = None
        engine.shutdown()
        engine.program.close()
        del engine
        gc.unfreeze()  # what the daemon froze when it was ready, or below
        gc.collect()
        gc.freeze()
        memory.trim()
        with self._changed:
            hosted.status = "unloaded"
            hosted.weight = max(0, before - (memory.resident() or 0))
        log.info("model %s was let go", hosted.model.id)
        return True

    def _load_next(self) -> None:
        with self._changed:
            for one in [h for h in self._wanted if not h.waiting]:
                self._wanted.remove(one)  # nobody waits any more
                self._give_room_back(one)
            hosted = next((h for h in self._wanted if h.tried is not None), None)
            if hosted is None:
                return
        try:
            model = self.shelf.find(hosted.model.id)
            if hosted.is_loaded and not (hosted.leaving or hosted.model is not model):
                self._loaded(hosted)
                return
            if hosted.is_loaded and not self._unload(hosted, at_once=True):
                return  # those who have it come to their end first
            if hosted.model is not model:
                hosted.model, hosted.tried = model, False
            if model.found.problem:
                raise unusable(model.id, model.found.problem)
            if not hosted.tried:
                hosted.tried, hosted.status, hosted.problem = None, "loading", ""
                threading.Thread(target=self._try, args=(hosted,), name="ssmd-trial", daemon=True).start()
                self._wake()
                return
            if not self._make_room(hosted):
                return
            self._load(hosted)
        except Rejected as err:
            self._failed(hosted, err)

    def _make_room(self, hosted: Hosted) -> bool:
        """Whether there is room for a model now. Raises Rejected."""
        if self.budget is None:
            return True
        with self._changed:
            loaded = [h for h in self._hosted.values() if h.is_loaded]
            budget = self.budget
            if not self._strict:
                free = memory.available()
                if free is not None:
                    budget = min(budget, free + sum(h.nbytes for h in loaded))
                least = hosted.nbytes + sum(h.nbytes for h in loaded if h.pinned)
                if budget < least:
                    sizes = show_size(hosted.nbytes), show_size(budget)
                    log.warning("model %s takes about %s of memory, and %s are free", hosted.model.id, *sizes)
                    budget = least
            try:
                going = make_room(hosted, loaded, budget)
            except NoRoom as err:
                raise refused(hosted.model.id, f"is not loaded: {err}", code="no_memory") from err
            busy = [h.model.id for h in going if h.leases]
            late = time.monotonic() - hosted.wanted_at > ROOM_S
            for one in going:
                one.leaving = one.leaving or not late
        if busy and late:
            raise refused(
                hosted.model.id,
                f"is not loaded: its memory is held by {', '.join(busy)}, which answered others for {ROOM_S:.0f} s",
                code="no_memory",
                retry_after_s=_RETRY_AFTER_S,
            )
        return all([self._unload(one, at_once=True) for one in going])

    def _load(self, hosted: Hosted) -> None:
        model = hosted.model
        with self._changed:
            hosted.status, hosted.problem = "loading", ""
        before, started = memory.resident() or 0, time.perf_counter()
        turns = self._turns.setdefault(model.manifest.device_class, Turns())
        try:
            engine = self._open(model, self.metrics.of(model.id), turns)
        except Exception as err:
            raise self._unloadable(hosted, err) from err
        with self._changed:
            hosted.engine, hosted.status = engine, "loaded"
            hosted.load_ms = round((time.perf_counter() - started) * 1e3, 1)
            hosted.loaded_at = time.time()
            hosted.resident = max(0, (memory.resident() or 0) - before)
            if model.manifest.runtime in self._runtimes:
                hosted.weight = hosted.resident
            self._runtimes.add(model.manifest.runtime)
        gc.freeze()
        memory.trim()
        log.info("model %s was loaded in %.0f ms", model.id, hosted.load_ms)
        self._loaded(hosted)

    def _try(self, hosted: Hosted) -> None:
        """Find out whether a model can be loaded, in a thread of its own."""
        model = hosted.model
        try:
            self._trial(model)
        except Exception as err:
            why = self._unloadable(hosted, err)
            with self._changed:
                hosted.tried = False
                self._failed(hosted, why)
            return
        with self._changed:
            hosted.tried = True
            if hosted not in self._wanted:  # nobody waits any more
                hosted.status = "unloaded"
        self._wake()

    def _unloadable(self, hosted: Hosted, err: Exception) -> Rejected:
        """What who waits for a model is told that cannot be loaded; it is noted with it, and in the log."""
        known = type(err).__module__.startswith("ssmd") or isinstance(err, OSError)
        if not (known and self.starting):  # then who starts the daemon is told
            log.error("model %s could not be loaded: %s", hosted.model.id, err, exc_info=None if known else err)
        why = f"could not be loaded: {err if known else 'its runtime failed, see the log of the daemon'}"
        return refused(hosted.model.id, why, code="model_load_failed")

    def _loaded(self, hosted: Hosted) -> None:
        with self._changed:
            self._serve_next(hosted)
            while hosted.waiting:
                self._hand_out(hosted, hosted.waiting.popleft())
            self._expire(hosted)
            self._news = True

    def _failed(self, hosted: Hosted, why: Rejected) -> None:
        with self._changed:
            self._serve_next(hosted)
            hosted.status = "loaded" if hosted.is_loaded else "failed"
            if not hosted.is_loaded:
                hosted.problem = why.message.removeprefix(f"model {hosted.model.id} ")
            if why.code == "model_load_failed":  # the others cost nothing to find out again
                hosted.failed_at = time.time()
            self._fail(hosted, why)
            self._news = True

    def _serve_next(self, hosted: Hosted) -> None:
        """Note that a model is loaded, or is not to be."""
        self._give_room_back(hosted)
        if hosted in self._wanted:  # a shutdown has told those who waited already
            self._wanted.remove(hosted)

    def _give_room_back(self, hosted: Hosted) -> None:
        """Those that were to go for this one need not."""
        for other in self._hosted.values():
            if other is not hosted and other.is_loaded and other.status == "loaded":
                other.leaving = False

    def _engines(self) -> list[Engine]:
        return [engine for h in tuple(self._hosted.values()) if (engine := h.engine) is not None]

    def _state(self, running: bool) -> str:
        if self.draining:
            return DRAINING
        if self.starting:
            return "starting"
        if self.problem:
            return "degraded"
        return "generating" if running else "idle"
