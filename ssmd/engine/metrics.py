"""Measurements of the daemon: TTFT, TBT, tokens and checkpoints, and of its store's writes: their health and pace.

They are for all models and for each. Tokens count at once. docs/metrics.md describes each field. Prometheus gets the
same numbers in seconds (prometheus.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import HistogramMetricFamily

from ssmd.sessions.turn import StoreError, TurnRemoved

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TBT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
CHECKPOINT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
CANCELLED = "cancelled"  # outcome of a request whose client left
STOPPED = "stopped"  # outcome of a request that was stopped on demand
RECENT = 30  # ended requests that are listed one by one
_OF_ONE = ("prompt_tokens", "cached_tokens", "generated_tokens", "ttft_ms", "prefill_ms", "restore_ms", "tokens_per_s")
REASONS = ("disk_full", "read_only", "locked", "damaged", "replaced", "late", "error")  # why a turn is not stored
RECENT_S = 300  # window of the recent percentiles
_SLOT_S = 10  # values leave the window in slots of this many seconds
RECENT_VALUES = 120  # values that a series lists one by one
_GROWTH = math.log(1.019)
_NOTHING = -2000  # bucket of 0, below all others
log = logging.getLogger(__name__)
KNOWN_S = 60.0  # s after which a measured write says nothing any more
SMALL_BYTES = 1 << 20  # bytes of recurrent data below which a state is always worth its write
WORTH = 4  # least ratio of the time a state saves to its write time: most prompts are not repeated
UNKNOWN_MS = 4.0  # ms per MiB, assumed before a state was written


class Series:
    """One quantity with many values. Its owner locks.

    clock: seconds, never going back.

    Percentiles come from a sketch with buckets 1.9 % wide (DDSketch, Masson et al. 2019). They are at most 1 % off.
    The sketch is as small after a year as after a minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=RECENT_VALUES)
        self._ever: Counter[int] = Counter()
        self._slots: deque[tuple[int, Counter[int]]] = deque()  # by time; the newest is last

    def add(self, values: Iterable[float]) -> None:
        """Add values, each 0 or more."""
        slot = int(self._clock() // _SLOT_S)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
            self._forget(slot)
        young, ever = self._slots[-1][1], self._ever
        for value in values:
            place = _place(value)
            young[place] += 1
            ever[place] += 1
            self._recent.append(value)

    def summary(self, *, recent: bool = True) -> dict[str, Any]:
        """Return {last, p50, p95, n, since_start: {p50, p95, n}, recent}.

        p50, p95 and n are of the last five minutes, `since_start` of all values. None stands for no value.
        """
        self._forget(int(self._clock() // _SLOT_S))
        lately: Counter[int] = Counter()
        for _, counts in self._slots:
            lately.update(counts)
        last = round(self._recent[-1], 3) if self._recent else None
        found = {"last": last, **_percentiles(lately), "since_start": _percentiles(self._ever)}
        return found | {"recent": [round(value, 3) for value in self._recent]} if recent else found

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - RECENT_S // _SLOT_S:
            self._slots.popleft()


class Histogram:
    """Counts by bucket and the sum, as Prometheus has them. Kept in ms, exported in seconds. Its owner locks."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._edges_ms = [bound * 1e3 for bound in bounds_s]
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_ms = 0.0

    def add(self, values_ms: Iterable[float]) -> None:
        """Count values. A bucket holds the values up to and including its bound."""
        for value in values_ms:
            self._counts[bisect_left(self._edges_ms, value)] += 1
            self._sum_ms += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add this histogram to a metric family."""
        names, total, buckets = [*map(str, self._bounds_s), "+Inf"], 0, []
        for name, n in zip(names, self._counts, strict=True):
            total += n
            buckets.append((name, float(total)))
        family.add_metric(labels, buckets, self._sum_ms / 1e3)


@dataclass(eq=False)
class Numbers:
    """Numbers of the answers of one model, or of all models."""

    ttft_ms: Series = field(default_factory=Series)
    tbt_ms: Series = field(default_factory=Series)
    tokens_per_s: Series = field(default_factory=Series)  # of each answer, after its first token
    cached_share: Series = field(default_factory=Series)  # of each prompt: the share that was not fed
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    tbt: Histogram = field(default_factory=lambda: Histogram(TBT_BOUNDS_S))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_ms: float = 0.0
    restore_ms: float = 0.0

    @property
    def fed_tokens(self) -> int:
        """Count the prompt tokens that the model read."""
        return self.prompt_tokens - self.cached_tokens

    def summary(self, *, recent: bool = True) -> dict[str, Any]:
        """Return all numbers, ready for JSON. recent: include the last values one by one."""
        return {
            "ttft_ms": self.ttft_ms.summary(recent=recent),
            "tbt_ms": self.tbt_ms.summary(recent=recent),
            "tokens_per_s": self.tokens_per_s.summary(recent=recent),
            "cached_share": self.cached_share.summary(recent=recent),
            "prompt_tokens": self.prompt_tokens,
            "fed_tokens": self.fed_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
        }


class _Key:
    """Requests and tokens of the API keys of one name."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(ok=0)
        self.tokens: Counter[str] = Counter(fed=0, cached=0, generated=0)

    def snapshot(self) -> dict[str, Any]:
        return {"requests": dict(self.outcomes), **{f"{kind}_tokens": n for kind, n in self.tokens.items()}}


@dataclass(frozen=True)
class LiveStatus:
    """The daemon's present state, beside the counts: a part of `Metrics.snapshot`."""

    state: str = "idle"
    reason: str = ""
    models: Sequence[dict[str, Any]] = ()  # a row each, with its `id`
    running: Sequence[dict[str, Any]] = ()  # a row for each waiting or running request; `owner`: its key's name
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def queue(self) -> dict[str, int]:
        """Count the requests that wait, and those under way."""
        return {what: sum(row["queue"][what] for row in self.models) for what in ("waiting", "running")}


class ModelMetrics:
    """Counts the answers of one model, for the model and for the totals. From any thread."""

    def __init__(self, metrics: Metrics, model: str, mine: Numbers) -> None:
        self._metrics, self._model, self._mine = metrics, model, mine

    def tokens(self, gaps_ms: Sequence[float], new: int) -> None:
        """Count a step's tokens. gaps_ms: times since the tokens before. new: tokens that are part of an answer."""
        metrics = self._metrics
        with metrics.lock:
            for numbers in (self._mine, metrics.total):
                numbers.tbt_ms.add(gaps_ms)
                numbers.tbt.add(gaps_ms)
                numbers.generated_tokens += new
            metrics.changes += 1

    def first_token(
        self, *, ttft_ms: float, prompt_tokens: int, cached_tokens: int, prefill_ms: float, restore_ms: float
    ) -> None:
        """Count a prompt that got its first token. `cached_tokens` of `prompt_tokens` were not fed."""
        metrics = self._metrics
        with metrics.lock:
            for numbers in (self._mine, metrics.total):
                numbers.ttft_ms.add([ttft_ms])
                numbers.ttft.add([ttft_ms])
                numbers.cached_share.add([cached_tokens / prompt_tokens])
                numbers.prompt_tokens += prompt_tokens
                numbers.cached_tokens += cached_tokens
                numbers.prefill_ms += prefill_ms
                numbers.restore_ms += restore_ms
            metrics.changes += 1

    def ended(
        self, last: dict[str, Any], outcome: str, key: str = "", *, id_: str = "", session: str | None = None
    ) -> None:
        """Count a request that ran. outcome: "ok", the code of its error, CANCELLED or STOPPED.

        last: {prompt_tokens, cached_tokens, generated_tokens, ttft_ms, …, tokens_per_s} of the request. A value is
        None if the request ended before it was known. key: name of its API key, "" if the key has no name. id_,
        session: of the request.
        """
        metrics = self._metrics
        with metrics.lock:
            metrics.count(outcome, key)
            if key and last["ttft_ms"] is not None:
                fed = last["prompt_tokens"] - last["cached_tokens"]
                tokens = metrics.keys.setdefault(key, _Key()).tokens
                tokens.update(fed=fed, cached=last["cached_tokens"], generated=last["generated_tokens"])
            if last["tokens_per_s"] is not None:
                for numbers in (self._mine, metrics.total):
                    numbers.tokens_per_s.add([last["tokens_per_s"]])
            if last["ttft_ms"] is not None:
                metrics.last = last
            row = {"id": id_, "session": session, "model": self._model, "ended_at": round(time.time(), 3)}
            row |= {"outcome": outcome, **{name: last[name] for name in _OF_ONE}, "saved_ms": self._saved_ms(last)}
            metrics.recent.append(row | {"owner": key})

    @property
    def ms_per_token(self) -> float | None:
        """Return the time that a fed token took so far; None if none was fed."""
        fed = self._mine.fed_tokens
        return self._mine.prefill_ms / fed if fed else None

    def _saved_ms(self, last: dict[str, Any]) -> float | None:
        """Estimate the ms that cached tokens saved, from the time that a fed token took so far."""
        each_ms = self.ms_per_token
        if each_ms is None or last["ttft_ms"] is None:
            return None
        return round(float(last["cached_tokens"]) * each_ms - float(last["restore_ms"]), 3)


class Metrics:
    """All counts of one daemon. Every method may be called from any thread. Access fields with `lock` held."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changes = 0  # grows with every count
        self.total = Numbers()
        self.models: dict[str, Numbers] = {}
        self.outcomes: Counter[str] = Counter(ok=0)
        self.keys: dict[str, _Key] = {}  # by name; the file of keys bounds their number
        self.last: dict[str, Any] | None = None
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.sessions: dict[str, int] | None = None
        self.checkpoint_ms = Series()
        self.checkpoint_times = Histogram(CHECKPOINT_BOUNDS_S)
        self.checkpoints = self.checkpoint_nbytes = self.left_out = self.stored = 0
        self.not_stored = dict.fromkeys(REASONS, 0)
        self.healings = {"checkpoints": 0, "turns": 0}
        self.warm = {"requests": 0, "tokens": 0}
        self.quota: int | None = None
        self.live: Callable[[], LiveStatus] = LiveStatus

    def of(self, model: str) -> ModelMetrics:
        """Return the counter of a model's answers. Counts made before under the same id stay."""
        with self.lock:
            return ModelMetrics(self, model, self.models.setdefault(model, Numbers()))

    def request_failed(self, code: str, key: str = "") -> None:
        """Count a request that never ran. code: of its error, or CANCELLED or STOPPED. key: name of its API key."""
        with self.lock:
            self.count(code, key)

    def count(self, outcome: str, key: str) -> None:
        """Count a request by its outcome. The caller holds the lock."""
        self.changes += 1
        self.outcomes[outcome] += 1
        if key:
            self.keys.setdefault(key, _Key()).outcomes[outcome] += 1

    def checkpoint(self, bytes_stored: int, ms: float) -> None:
        """Count a written checkpoint: its bytes in the store, and the ms it took outside the token path."""
        with self.lock:
            self.changes += 1
            self.checkpoints += 1
            self.checkpoint_nbytes += bytes_stored
            self.checkpoint_ms.add([ms])
            self.checkpoint_times.add([ms])

    def checkpoint_left_out(self, count: int = 1) -> None:
        """Count checkpoints that were not written though their turn was.

        The quota has no room, their parent is gone, or the disk is too slow.
        """
        with self.lock:
            self.left_out += count

    def turns_not_stored(self, reason: str, n: int) -> None:
        """Count turns that were reported to clients as not stored. reason: one of REASONS."""
        with self.lock:
            self.changes += 1
            self.not_stored[reason] += n

    def healed(self, what: str, n: int) -> None:
        """Count repaired damage of the store. what: "checkpoints" (removed) or "turns" (written again)."""
        with self.lock:
            self.changes += 1
            self.healings[what] += n

    def warm_begun(self, tokens: int) -> None:
        """Count a request that started from a warm beginning. tokens: those that it did not read."""
        with self.lock:
            self.changes += 1
            self.warm["requests"] += 1
            self.warm["tokens"] += tokens

    def damages(self) -> dict[str, int]:
        """Return the counts of `healed`."""
        with self.lock:
            return dict(self.healings)

    def stored_bytes(self, n: int, quota: int | None = None) -> None:
        """Note the bytes that the session store holds now, and its quota."""
        with self.lock:
            self.changes += n != self.stored
            self.stored, self.quota = n, quota

    def stored_sessions(self, count: int, pinned: int) -> None:
        """Note how many sessions the store has now, and how many of them are pinned."""
        with self.lock:
            now = {"count": count, "pinned": pinned}
            self.changes += now != self.sessions
            self.sessions = now

    def snapshot(self) -> dict[str, Any]:
        """Return all counts since the daemon started and its present state, ready for JSON (docs/metrics.md).

        A value that is not there yet is None. Times are in ms.
        """
        live = self.live()
        with self.lock:
            models = [row | self.models.get(row["id"], Numbers()).summary(recent=False) for row in live.models]
            return {
                "state": live.state,
                "reason": live.reason,
                "models": models,
                "memory": live.memory,
                "running": list(live.running),
                "queue": live.queue,
                **self.total.summary(),
                "requests": dict(self.outcomes),
                "keys": {name: key.snapshot() for name, key in self.keys.items()},
                "checkpoints": {
                    "count": self.checkpoints,
                    "bytes": self.checkpoint_nbytes,
                    "left_out": self.left_out,
                    "ms": self.checkpoint_ms.summary(),
                },
                "turns_not_stored": dict(self.not_stored),
                "healed": dict(self.healings),
                "warm": dict(self.warm),
                "stored_bytes": self.stored,
                "quota_bytes": self.quota,
                "sessions": self.sessions,
                "last": self.last,
                "recent": list(self.recent),
            }


def _place(value: float) -> int:
    """Return the bucket of a value by its logarithm; _NOTHING for 0."""
    return math.ceil(math.log(value) / _GROWTH) if value > 1e-9 else _NOTHING


def _value(place: int) -> float:
    """Return the middle of a bucket, which stands for its values."""
    return 0.0 if place == _NOTHING else math.exp((place - 0.5) * _GROWTH)


def _percentiles(counts: Counter[int]) -> dict[str, Any]:
    n = counts.total()
    return {"p50": _percentile(counts, n, 0.50), "p95": _percentile(counts, n, 0.95), "n": n}


def _percentile(counts: Counter[int], n: int, part: float) -> float | None:
    """Return the smallest value that is not below the share `part` of all values; None if there are none."""
    rank = max(1, math.ceil(part * n))
    for place in sorted(counts):
        rank -= counts[place]
        if rank <= 0:
            return round(_value(place), 3)
    return None


class StoreHealth:
    """The health of a store. Thread-safe.

    Each loss is counted. The log says when losses begin and when they are over.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._reason = ""

    @property
    def reason(self) -> str:
        """Return why turns are not fully stored: a code of metrics.REASONS, or "" if they are."""
        return self._reason

    def failed(self, err: StoreError, *, turns: int) -> None:
        """Note a failed write. turns: number that was lost; 0 if their text was stored but their states were not.

        A turn whose session was removed meanwhile does not count.
        """
        if isinstance(err, TurnRemoved):
            log.info("a turn was not stored: %s", err)
            return
        if turns:
            self._metrics.turns_not_stored(err.reason, turns)
        self._note(err, "a turn was not stored" if turns else "the states of a turn were not stored, its text was")

    def noticed(self, err: StoreError) -> None:
        """Note a fault that was found before a turn failed of it."""
        self._note(err, "turns cannot be stored")

    def _note(self, err: StoreError, what: str) -> None:
        with self._lock:
            known, self._reason = self._reason == err.reason, err.reason
        if known:
            log.debug("%s again: %s", what, err)
        else:
            log.error("%s: %s (logged once; /health and /metrics show the present state)", what, err)

    def well(self) -> None:
        """Note that a turn was stored with its states."""
        with self._lock:
            before, self._reason = self._reason, ""
        if before:
            log.warning("turns are stored again")


class Pace:
    """The recent speed at which states become durable."""

    def __init__(self) -> None:
        self._last = (0.0, 0)  # seconds, bytes
        self._when = 0.0

    def wait_s(self, nbytes: int) -> float:
        """Estimate the seconds that a write of `nbytes` takes; 0.0 without a write in the last KNOWN_S."""
        if time.monotonic() - self._when > KNOWN_S or not nbytes:
            return 0.0
        took_s, of = self._last
        return took_s * max(1.0, nbytes / of) if of > SMALL_BYTES else took_s

    def cost_ms(self, nbytes: int) -> float:
        """Estimate the milliseconds that a large state of `nbytes` takes from all other work."""
        took_s, of = self._last
        return nbytes * (took_s * 1e3 / of if of > SMALL_BYTES else UNKNOWN_MS / (1 << 20))

    def pays(self, nbytes: int, read_ms: float) -> bool:
        """Return True if writing a state of `nbytes` is worth it. read_ms: prefill time that it saves."""
        return nbytes < SMALL_BYTES or read_ms >= WORTH * self.cost_ms(nbytes)

    def note(self, nbytes: int, took_s: float) -> None:
        """Note the time of a write of `nbytes`, or the time that it was given."""
        if nbytes:
            self._when, self._last = time.monotonic(), (took_s, nbytes)
