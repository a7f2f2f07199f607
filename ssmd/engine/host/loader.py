"""The loader: the one thread of a host that loads and unloads models, one at a time, on request.

A model with running requests is never unloaded. If another model needs its memory, new requests for it wait until that
one is loaded or refused.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ssmd.engine.engine import Engine
from ssmd.engine.host.models import Model, ModelIndex, unusable_model
from ssmd.engine.metrics import Metrics, ModelMetrics
from ssmd.engine.terms import Rejection
from ssmd.machine import memory
from ssmd.machine.progress import reported
from ssmd.machine.size import show_size

log = logging.getLogger(__name__)
ROOM_S = 60.0  # s that a model waits for busy ones to end their answers, before it is refused
RETRY_AFTER_S = 5
_LOOK_S = 1.0  # s between looks for models that were replaced or removed
_SOON_S = 0.1
Open = Callable[[Model, ModelMetrics, Callable[[int], bool]], Engine]

TIMES_FILES = 2.0  # memory of a model, in bytes of its files, lanes and workspaces included: 1.8 to 2.0 measured
LEAST_BYTES = 32 << 20
Status = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class Loader:
    """A host's models by their shelf ids, and the queue of models to load.

    Unless a method says otherwise, its caller holds `changed` or is the loader's thread.
    starting: until the daemon is ready, known load failures are left to the process that starts it, and are not logged.
    """

    def __init__(
        self,
        shelf: ModelIndex,
        open_: Open,
        trial: Callable[[Model], None],
        metrics: Metrics,
        *,
        keep_alive_s: float,
        budget: int | None,
    ) -> None:
        """Start the loader's thread. The parameters are the Host's."""
        self.changed = threading.Condition()
        self.hosted: dict[str, HostedModel] = {}
        self.wanted: deque[HostedModel] = deque()
        self.starting = True
        self.budget = Budget(budget)
        self._shelf, self._metrics, self._keep_alive_s = shelf, metrics, keep_alive_s
        self._open, self._trial = open_, trial
        self._runtimes: set[str] = set()  # runtimes whose libraries are in this process
        self._ended = self._news = False
        self._trims = memory.TrimSchedule(time.monotonic(), time.process_time(), memory.resident() or 0)
        self._thread = threading.Thread(target=self._run, name="ssmd-host", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop loading models. From any thread."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    def join(self) -> None:
        """Wait until a load that is under way is over. From any thread."""
        self._thread.join()

    def enter(self, model: Model) -> HostedModel:
        """Return the record of a model; a new one if the model has none."""
        hosted = self.hosted.get(model.id)
        if hosted is None:
            hosted = self.hosted[model.id] = HostedModel(model, self._keep_alive_s)
        return hosted

    def want(self, hosted: HostedModel, future: LeaseFuture) -> None:
        """Queue a model for loading. future: the lease that waits for it."""
        hosted.waiting.append(future)
        if hosted not in self.wanted:
            hosted.wanted_at = time.monotonic()
            self.wanted.append(hosted)
        self.wake()

    def hand_out(self, hosted: HostedModel, future: Future[ModelLease]) -> None:
        """Lend a loaded model to a request, unless that was cancelled."""
        if future.set_running_or_notify_cancel():
            hosted.leases += 1
            hosted.idle_until = None
            assert hosted.engine is not None
            future.set_result(ModelLease(hosted.engine, hosted.model, partial(self._give_back, hosted)))

    def room(self, mine: HostedModel, nbytes: int) -> bool:
        """Return True if a model's answers may take `nbytes` more memory. From any thread.

        Memory is reserved for models that passed their trial and wait to be loaded, unless `mine` is itself to be
        unloaded.
        """
        with self.changed:
            coming = [] if mine.leaving else [h for h in self.wanted if h.tried and not h.is_loaded]
            return self.budget.fits_answer(nbytes, self._loaded_ones(), coming)

    def _give_back(self, hosted: HostedModel) -> None:
        with self.changed:
            hosted.leases -= 1
            hosted.last_used = time.time()
            hosted.expire()
            if not hosted.leases:
                self.wake()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._news or self._ended, timeout=self._next_look_s())
                self._news = False
                if self._ended:
                    return
            try:
                self._let_go()
                self._load_next()
                self._trim()
            except Exception:
                log.exception("the host failed at a piece of work")

    def wake(self) -> None:
        """Wake the thread, to look for work. From any thread."""
        with self.changed:
            self._news = True
            self.changed.notify_all()

    def _next_look_s(self) -> float | None:
        now = time.time()
        due = [h.idle_until - now for h in self.hosted.values() if h.is_loaded and h.idle_until is not None]
        if self.wanted or any(h.leaving and h.is_loaded for h in self.hosted.values()):
            due.append(_SOON_S)
        if any(h.is_loaded for h in self.hosted.values()):
            due.append(_LOOK_S)
        return max(_SOON_S, min(due)) if due else None

    def _trim(self) -> None:
        """Return freed memory to the system when it is time.

        Python's collector looks at the number of its objects only, and one of them may hold megabytes of a library.
        """
        if self._trims.due(time.monotonic(), time.process_time(), lambda: memory.resident() or 0):
            gc.collect()
            memory.trim()
            self._trims.trimmed(time.monotonic(), time.process_time(), memory.resident() or 0)

    def _let_go(self) -> None:
        """Unload models without requests that are due: replaced, removed, marked `leaving`, or past `idle_until`."""
        with self.changed:
            loaded = self._loaded_ones()
        for hosted in loaded:
            if not hosted.leaving and not hosted.model.is_current:
                log.info("model %s was replaced or removed: it is unloaded when no request uses it", hosted.model.id)
                with self.changed:
                    hosted.leaving = True
            due = hosted.idle_until is not None and hosted.idle_until <= time.time()
            if hosted.leaving or due:
                self._unload(hosted, at_once=hosted.leaving)

    def _unload(self, hosted: HostedModel, *, at_once: bool = False) -> bool:
        """Unload a model that has no requests. Return True if it is unloaded.

        at_once: do not wait until its engine has done its deferred work.
        """
        engine = hosted.engine
        if engine is None or hosted.leases or not (at_once or engine.idle):
            return engine is None
        memory.trim()
        before = memory.resident() or 0
        with self.changed:
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
        with self.changed:
            hosted.status = "unloaded"
            hosted.weight = max(0, before - (memory.resident() or 0))
        log.info("model %s was unloaded", hosted.model.id)
        return True

    def _load_next(self) -> None:
        """Go on with the first wanted model. If that has to wait, go on with later ones that do not delay it."""
        with self.changed:
            for one in [h for h in self.wanted if not h.waiting]:
                self.wanted.remove(one)  # no request waits for it any more
                self._give_room_back(one)
            wanted = [h for h in self.wanted if h.tried is not None]
        ahead = 0  # bytes that earlier models in the queue wait for
        for hosted in wanted:
            try:
                model = self._shelf.installed(hosted.model.id)
                if hosted.is_loaded and not (hosted.leaving or hosted.model is not model):
                    self._loaded(hosted)
                    return
                if hosted.is_loaded and not self._unload(hosted, at_once=True):
                    self._check_patience(hosted)
                    continue  # its running requests end first
                if hosted.model is not model:
                    hosted.model, hosted.tried = model, False
                if model.found.problem:
                    raise unusable_model(model.id, model.found.problem)
                if not hosted.tried:
                    hosted.tried, hosted.status, hosted.problem, hosted.stage = None, "loading", "", ""
                    threading.Thread(target=self._try, args=(hosted,), name="ssmd-trial", daemon=True).start()
                elif self._make_room(hosted, ahead):
                    self._load(hosted)
                    return
                else:
                    hosted.stage = "waiting for memory that other models hold"
                    ahead += hosted.nbytes
            except Rejection as err:
                self._failed(hosted, err)

    def _check_patience(self, hosted: HostedModel) -> None:
        """Raise Rejection if requests have waited ROOM_S for older ones to end, so that the model can load again."""
        if time.monotonic() - hosted.wanted_at > ROOM_S:
            why = f"has to be unloaded first, but has answered other requests for {ROOM_S:.0f} s"
            raise refused(hosted.model.id, why, code="model_busy", retry_after_s=RETRY_AFTER_S)

    def _make_room(self, hosted: HostedModel, ahead: int) -> bool:
        """Return True if a model can be loaded now; unload others for it. Raises Rejection.

        ahead: bytes that earlier models in the queue wait for. This model must not take them.
        """
        if self.budget.nbytes is None:
            return True
        with self.changed:
            loaded = self._loaded_ones()
            budget = self.budget.for_model(hosted, loaded)
            try:
                going = make_room(hosted, loaded, budget)
            except NoMemory as err:
                raise refused(hosted.model.id, f"is not loaded: {err}", code="no_memory") from err
            late = time.monotonic() - hosted.wanted_at > ROOM_S
            busy = in_the_way(hosted, loaded, going, budget)
            if ahead:
                beside = ahead + sum(h.nbytes for h in loaded if h.pinned)
                if not (going or busy) and hosted.nbytes + beside <= budget:
                    return True
                if late:
                    why = f"is not loaded: models requested before it have waited for memory for {ROOM_S:.0f} s"
                    raise refused(hosted.model.id, why, code="no_memory", retry_after_s=RETRY_AFTER_S)
                return False
            for one in going:
                if one.engine is not None and not late:
                    one.engine.recall()  # give queued requests back: they would run first, however many they are
                one.leaving = one.leaving or not late
        if busy and late:
            raise refused(
                hosted.model.id,
                f"is not loaded: its memory is held by {', '.join(busy)}, which answered others for {ROOM_S:.0f} s",
                code="no_memory",
                retry_after_s=RETRY_AFTER_S,
            )
        return all([self._unload(one, at_once=True) for one in going]) and not busy

    def _load(self, hosted: HostedModel) -> None:
        model = hosted.model
        with self.changed:
            hosted.status, hosted.problem = "loading", ""
        before, started = memory.resident() or 0, time.perf_counter()
        try:
            with reported(hosted.report):
                engine = self._open(model, self._metrics.of(model.id), partial(self.room, hosted))
        except Exception as err:
            raise self._unloadable(hosted, err) from err
        load_ms = round((time.perf_counter() - started) * 1e3, 1)
        gc.freeze()
        memory.trim()
        log.info("model %s was loaded in %.0f ms", model.id, load_ms)
        with self.changed:  # one lock: a reader that sees it loaded also sees `idle_until`
            hosted.engine, hosted.status = engine, "loaded"
            hosted.load_ms, hosted.loaded_at = load_ms, time.time()
            hosted.resident = max(0, (memory.resident() or 0) - before)
            if model.manifest.runtime in self._runtimes:
                hosted.weight = hosted.resident
            self._runtimes.add(model.manifest.runtime)
            self._loaded(hosted)

    def _try(self, hosted: HostedModel) -> None:
        """Try in a thread of its own if a model can be loaded, and note the result."""
        model = hosted.model
        try:
            with reported(hosted.report):
                self._trial(model)
        except Exception as err:
            why = self._unloadable(hosted, err)
            with self.changed:
                hosted.tried = False
                self._failed(hosted, why)
            return
        with self.changed:
            hosted.tried = True
            if hosted not in self.wanted:  # no request waits for it any more
                hosted.status = "unloaded"
        self.wake()

    def _unloadable(self, hosted: HostedModel, err: Exception) -> Rejection:
        """Turn a load failure into the error that its waiting requests get. Log it."""
        known = type(err).__module__.startswith("ssmd") or isinstance(err, OSError)
        if not (known and self.starting):  # else the process that starts the daemon reports it
            log.error("model %s could not be loaded: %s", hosted.model.id, err, exc_info=None if known else err)
        why = f"could not be loaded: {err if known else 'its runtime failed, see the log of the daemon'}"
        return refused(hosted.model.id, why, code="model_load_failed")

    def _loaded(self, hosted: HostedModel) -> None:
        with self.changed:
            self._serve_next(hosted)
            while hosted.waiting:
                self.hand_out(hosted, hosted.waiting.popleft())
            hosted.expire()
            self._news = True

    def _failed(self, hosted: HostedModel, why: Rejection) -> None:
        with self.changed:
            self._serve_next(hosted)
            hosted.status = "loaded" if hosted.is_loaded else "failed"
            if not hosted.is_loaded:
                hosted.problem = why.message.removeprefix(f"model {hosted.model.id} ")
            if why.code == "model_load_failed":  # the others cost nothing to find out again
                hosted.failed_at = time.time()
                self._shelf.avoid(hosted.model)
            hosted.fail(why)
            self._news = True

    def _serve_next(self, hosted: HostedModel) -> None:
        """Take a model out of the queue: it is loaded, or refused."""
        self._give_room_back(hosted)
        if hosted in self.wanted:  # a shutdown fails its requests, which takes it out too
            self.wanted.remove(hosted)

    def _give_room_back(self, hosted: HostedModel) -> None:
        """Keep the models that were to be unloaded for this one."""
        for other in self.hosted.values():
            if other is not hosted and other.status == "loaded" and other.model.is_current:
                other.leaving = False

    def _loaded_ones(self) -> list[HostedModel]:
        return [h for h in self.hosted.values() if h.is_loaded]

    def engines(self) -> list[Engine]:
        """List the engines of the loaded models. From any thread."""
        return [engine for h in tuple(self.hosted.values()) if (engine := h.engine) is not None]


class ModelLease:
    """A loaded model, which stays loaded until the lease is released."""

    def __init__(self, engine: Engine, model: Model, give_back: Callable[[], None]) -> None:
        self.engine, self.model = engine, model
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give the model back. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass(frozen=True)
class LeaseRequest:
    """A request that waits for a model."""

    id: str
    session: str | None = None  # the id that the request names
    owner: str = ""  # name of its key


class LeaseFuture(Future[ModelLease]):
    """A lease that is not granted yet. asker: the request that waits for it, if there is one."""

    def __init__(self, asker: LeaseRequest | None = None) -> None:
        super().__init__()
        self.asker = asker

    def row(self, asker: LeaseRequest) -> dict[str, Any]:
        """Return the progress of its request, ready for JSON, with the keys of Generation.row."""
        nothing = {"fed": 0, "to_feed": None, "tokens": 0, "ttft_ms": None, "tokens_per_s": None}
        return {"id": asker.id, "session": asker.session, "phase": "loading", **nothing, "owner": asker.owner}


@dataclass(eq=False)
class HostedModel:
    """A model in a host, which does the locking. Times are in seconds since 1970, unless a comment says otherwise."""

    model: Model
    keep_alive_s: float  # s it stays loaded after its last request; inf: for ever
    pinned: bool = False
    status: Status = "unloaded"
    engine: Engine | None = None
    leases: int = 0  # requests that use it
    waiting: deque[LeaseFuture] = field(default_factory=deque)  # leases not granted yet
    wanted_at: float = 0.0  # monotonic s
    tried: bool | None = False  # its trial load passed; None while the trial runs
    leaving: bool = False  # it is to be unloaded; new requests wait until it was
    stage: str = ""  # while it loads: the present stage, in words
    problem: str = ""  # why it could not be loaded
    failed_at: float = 0.0
    loaded_at: float | None = None
    load_ms: float | None = None
    last_used: float | None = None
    idle_until: float | None = None
    resident: int | None = None  # bytes the process grew by at load, with its runtime's library if that was new
    weight: int = 0  # bytes of the model alone: measured at load if the library was there, and as freed at unload

    @property
    def is_loaded(self) -> bool:
        return self.engine is not None

    @property
    def unloads(self) -> bool:
        """Return True if it is still loaded after a request to unload it."""
        return self.engine is not None and self.status == "unloading"

    @property
    def least(self) -> int:
        """Return the bytes of memory that it takes, estimated from its files."""
        return max(LEAST_BYTES, int(TIMES_FILES * self.model.found.nbytes))

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory to count for it: `least`, or `weight` if that is more."""
        return max(self.least, self.weight)

    @property
    def busy_bytes(self) -> int:
        """Return the bytes of memory that its running answers take besides."""
        engine = self.engine
        return 0 if engine is None else engine.busy_bytes

    def report(self, stage: str, done: int, of: int, unit: str) -> None:
        """Note the stage of its load. The parameters are those of `progress.Report`."""
        self.stage = stage

    def expire(self) -> None:
        """Set `idle_until`; to None while it is leased, pinned, not loaded or kept for ever."""
        free = self.is_loaded and not (self.leases or self.pinned or self.keep_alive_s == math.inf)
        self.idle_until = time.time() + self.keep_alive_s if free else None

    def fail(self, why: Rejection) -> None:
        """Fail all requests that wait for it with this error."""
        while self.waiting:
            future = self.waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(why)

    def requests(self) -> list[dict[str, Any]]:
        """List the progress of its requests, running or waiting for it to load, ready for JSON."""
        engine = self.engine
        rows = [] if engine is None else engine.rows()
        rows += [one.row(one.asker) for one in tuple(self.waiting) if one.asker is not None and not one.done()]
        return [{"model": self.model.id, **row} for row in rows]

    def row(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Describe the model, ready for JSON. rows: its `requests`."""
        found, engine = self.model.found, self.engine
        m = found.manifest
        waiting = len(self.waiting) + sum(row["phase"] == "waiting" for row in rows)
        return {
            "id": self.model.id,
            "name": self.model.name,
            "runtime": "" if m is None else m.runtime,
            "device": "" if m is None else m.device_class if engine is None else engine.device,
            "build": "" if m is None else m.build,
            "lineage": "" if m is None else m.lineage,
            "quantization": "" if m is None else m.quantization,
            "context": None if m is None else m.context,
            "state": self.status,
            "stage": self.stage or None if self.status == "loading" else None,
            "problem": self.problem or found.problem or None,
            "pinned": self.pinned,
            "resident_bytes": self.resident if self.is_loaded else None,
            "file_bytes": found.nbytes,
            "loaded_at": self.loaded_at,
            "load_ms": self.load_ms,
            "last_used": self.last_used,
            "idle_until": self.idle_until,
            "queue": {"waiting": waiting, "running": sum(row["phase"] not in ("waiting", "loading") for row in rows)},
        }


def refused(asked: str, why: str, *, code: str, retry_after_s: int | None = None) -> Rejection:
    """Build the 503 error for requests whose model cannot be used now."""
    return Rejection(f"model {asked} {why}", status=503, code=code, param="model", retry_after_s=retry_after_s)


class Budget:
    """Bytes of memory that models and their answers may take together.

    nbytes: the limit; None if this machine's memory is unknown, and then everything fits.
    """

    def __init__(self, asked: int | None) -> None:
        """Set the limit to `asked` bytes, or to the memory that is free now.

        Without `asked`, a model may be loaded even if it takes more.
        """
        self.nbytes = memory.available() if asked is None else asked
        self._strict = asked is not None

    def fits_answer(self, nbytes: int, loaded: Sequence[HostedModel], coming: Sequence[HostedModel]) -> bool:
        """Return True if an answer may take `nbytes` more.

        coming: models that wait to be loaded; their memory is reserved.
        If the user set no limit, each engine bounds its answers by the machine's memory itself.
        """
        wanted = nbytes + sum(one.nbytes for one in coming)
        if self._strict and self.nbytes is not None:
            return wanted + _held(loaded) <= self.nbytes
        free = memory.available() if coming else None
        return free is None or wanted <= free

    def for_model(self, wanted: HostedModel, loaded: Sequence[HostedModel]) -> int:
        """Return the bytes that a model and the loaded ones may take together, at this moment."""
        assert self.nbytes is not None
        free = None if self._strict else memory.available()
        if free is None:
            return self.nbytes
        nbytes = min(self.nbytes, free + _held(loaded))
        least = wanted.nbytes + sum(one.nbytes for one in loaded if one.pinned)
        if nbytes < least:
            sizes = show_size(wanted.nbytes), show_size(nbytes)
            log.warning("model %s takes about %s of memory, and %s are free", wanted.model.id, *sizes)
        return max(nbytes, least)


class NoMemory(Exception):
    """A model that can never be loaded beside those that stay; the message says why."""


def make_room(wanted: HostedModel, loaded: Sequence[HostedModel], budget: int) -> list[HostedModel]:
    """Pick the models to unload for a new one: idle models first, least recently used first.

    Raises NoMemory if it cannot fit beside the pinned models. Only file sizes decide that. Measured sizes depend on how
    many answers a model gave: by them, a model that was loaded once could be refused for ever.
    """
    others = [one for one in loaded if one is not wanted]
    pinned = sum(one.least for one in others if one.pinned)
    if wanted.least + pinned > budget:
        beside = f", of which pinned models hold {show_size(pinned)}" if pinned else ""
        raise NoMemory(
            f"it takes about {show_size(wanted.least)} of memory, and models may take {show_size(budget)}{beside}; "
            "raise it with --memory-budget"
        )
    over = wanted.nbytes + sum(one.nbytes for one in others) - budget
    chosen: list[HostedModel] = []
    for one in sorted(others, key=lambda one: (one.leases > 0, one.last_used or 0.0)):
        if over <= 0:
            break
        if not one.pinned:
            chosen.append(one)
            over -= one.nbytes
    return chosen


def in_the_way(
    wanted: HostedModel, loaded: Sequence[HostedModel], going: Sequence[HostedModel], nbytes: int
) -> list[str]:
    """List the ids of models whose answers must end before the new one fits, when `going` go and the others stay."""
    stay = [one for one in loaded if one is not wanted and one not in going]
    busy = [one.model.id for one in going if one.leases]
    if wanted.nbytes + _held(stay) > nbytes:
        busy += [one.model.id for one in stay if one.busy_bytes]
    return busy


def _held(loaded: Sequence[HostedModel]) -> int:
    return sum(one.nbytes + one.busy_bytes for one in loaded)
