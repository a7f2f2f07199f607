"""What the daemon measured: TTFT and TBT, tokens, the queue, checkpoints; for Prometheus (seconds) and as JSON (ms).

Counts live in plain fields under one lock: a request's times between tokens are added in one go when it ends.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TBT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
CHECKPOINT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RECENT_REQUESTS = 256
RECENT_GAPS = 4096
REASONS = ("disk_full", "locked", "damaged", "late", "error")  # why a turn is not stored


class _Histogram:
    """Counts per bucket, the sum, and a ring of recent values; all in ms until it is shown."""

    def __init__(self, bounds_s: tuple[float, ...], recent: int) -> None:
        self._bounds_s = bounds_s
        self._edges_ms = np.array(bounds_s) * 1e3
        self._counts = np.zeros(len(bounds_s) + 1, np.int64)
        self._sum_ms = 0.0
        self.recent: deque[float] = deque(maxlen=recent)

    def add(self, values_ms: Sequence[float]) -> None:
        # A bucket holds the values <= its bound.
        places = np.searchsorted(self._edges_ms, np.asarray(values_ms, np.float64), side="left")
        self._counts += np.bincount(places, minlength=self._counts.size)
        self._sum_ms += float(sum(values_ms))
        self.recent.extend(values_ms)

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        totals = np.cumsum(self._counts)
        names = [*(str(bound) for bound in self._bounds_s), "+Inf"]
        buckets = [(bound, float(n)) for bound, n in zip(names, totals, strict=True)]
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum_ms / 1e3)

    def summary(self) -> dict[str, float | None]:
        if not self.recent:
            return {"last": None, "p50": None, "p95": None}
        p50, p95 = np.percentile(np.array(self.recent), [50, 95])
        return {"last": round(self.recent[-1], 3), "p50": round(float(p50), 3), "p95": round(float(p95), 3)}


class _Key:
    """What was asked with the keys of one name."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(ok=0)
        self.tokens: Counter[str] = Counter(fed=0, cached=0, generated=0)

    def done(self, prompt: int, cached: int, generated: int) -> None:
        self.outcomes["ok"] += 1
        self.tokens.update(fed=prompt - cached, cached=cached, generated=generated)

    def snapshot(self) -> dict[str, Any]:
        return {"requests": dict(self.outcomes), **{f"{kind}_tokens": n for kind, n in self.tokens.items()}}


class Metrics(Collector):
    """All counts of one daemon, with a Prometheus registry of its own. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ttft = _Histogram(TTFT_BOUNDS_S, RECENT_REQUESTS)
        self._tbt = _Histogram(TBT_BOUNDS_S, RECENT_GAPS)
        self._checkpoint = _Histogram(CHECKPOINT_BOUNDS_S, RECENT_REQUESTS)
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._prefill_ms = self._restore_ms = 0.0
        self._outcomes: dict[str, int] = {"ok": 0}
        self._keys: dict[str, _Key] = {}  # by name, of which a file of keys has a bounded number
        self._waiting = self._running = 0
        self._checkpoint_bytes = self._stored_bytes = self._checkpoints = self._left_out = 0
        self._not_stored = dict.fromkeys(REASONS, 0)
        self._healed = {"checkpoints": 0, "turns": 0}
        self._quota_bytes: int | None = None
        self._program: str | None = None
        self._last: dict[str, Any] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def request_done(
        self,
        *,
        ttft_ms: float,
        tbts_ms: Sequence[float],
        prompt_tokens: int,
        cached_tokens: int,
        generated_tokens: int,
        prefill_ms: float,
        restore_ms: float,
        key: str = "",
    ) -> None:
        """A request that ended well. `cached_tokens` of `prompt_tokens` were not fed; `tbts_ms` of all its choices.

        key: the name of the API key that it came with, if that has one.
        """
        with self._lock:
            self._outcomes["ok"] += 1
            if key:
                self._keys.setdefault(key, _Key()).done(prompt_tokens, cached_tokens, generated_tokens)
            self._ttft.add([ttft_ms])
            self._tbt.add(tbts_ms)
            self._prompt_tokens += prompt_tokens
            self._cached_tokens += cached_tokens
            self._generated_tokens += generated_tokens
            self._prefill_ms += prefill_ms
            self._restore_ms += restore_ms
            between = float(sum(tbts_ms))
            self._last = {
                "prompt_tokens": prompt_tokens,
                "cached_tokens": cached_tokens,
                "generated_tokens": generated_tokens,
                "ttft_ms": round(ttft_ms, 3),
                "prefill_ms": round(prefill_ms, 3),
                "restore_ms": round(restore_ms, 3),
                "tokens_per_s": round(len(tbts_ms) / between * 1e3, 2) if between > 0 else None,
            }

    def request_failed(self, code: str, key: str = "") -> None:
        """Count a request that was refused or broke off, by the code of its error. key: as of one that ended well."""
        with self._lock:
            self._outcomes[code] = self._outcomes.get(code, 0) + 1
            if key:
                self._keys.setdefault(key, _Key()).outcomes[code] += 1

    def queue(self, waiting: int, running: int) -> None:
        """Note how many choices wait and decode now."""
        with self._lock:
            self._waiting, self._running = waiting, running

    def checkpoint(self, bytes_stored: int, ms: float) -> None:
        """Count a checkpoint that was written: its bytes in the store and the time it took off the token path."""
        with self._lock:
            self._checkpoints += 1
            self._checkpoint_bytes += bytes_stored
            self._checkpoint.add([ms])

    def checkpoint_left_out(self) -> None:
        """Count a checkpoint that was not written though its turn was: the quota has no room, or what it grew from is
        gone.
        """
        with self._lock:
            self._left_out += 1

    def turns_not_stored(self, reason: str, n: int) -> None:
        """Count turns whose clients were told that they are not stored. reason: one of REASONS."""
        with self._lock:
            self._not_stored[reason] += n

    def healed(self, what: str, n: int) -> None:
        """Count what was found damaged in the store: "checkpoints" taken out, or "turns" written anew."""
        with self._lock:
            self._healed[what] += n

    def damages(self) -> dict[str, int]:
        """What `healed` counted."""
        with self._lock:
            return dict(self._healed)

    def stored_bytes(self, n: int, quota: int | None = None) -> None:
        """Note what the session store holds now, and may hold, bytes."""
        with self._lock:
            self._stored_bytes = n
            self._quota_bytes = quota

    def loaded(self, program: str) -> None:
        """Note the name of the program that answers now."""
        with self._lock:
            self._program = program

    def prometheus(self) -> bytes:
        """Prometheus' text exposition, format 0.0.4; times in seconds, as is its convention."""
        return generate_latest(self._registry)

    def snapshot(self) -> dict[str, Any]:
        """Sum the metrics up for screens, ready for JSON. Counts are since the daemon started; no value yet is null.

        `program` · `ttft_ms`, `tbt_ms`: {last, p50, p95} of the last 256 requests and 4,096 gaps · `tokens_per_s` of
        the last request · `prompt_tokens` = `fed_tokens` + `cached_tokens` · `generated_tokens` · `queue`: {waiting,
        running} · `requests`: {ok, <error code>: n} · `keys`: {<name of an API key>: {requests, fed_tokens,
        cached_tokens, generated_tokens}} · `checkpoints`: {count, bytes, left_out, ms: {last, p50, p95}} ·
        `turns_not_stored`: {<reason>: n} · `healed`: {checkpoints: n, turns: n} that were damaged: taken out, or
        written anew · `stored_bytes`, `quota_bytes` of checkpoints · `last`: the last request's {prompt_tokens,
        cached_tokens, generated_tokens, ttft_ms, prefill_ms, restore_ms, tokens_per_s}
        """
        with self._lock:
            return {
                "program": self._program,
                "ttft_ms": self._ttft.summary(),
                "tbt_ms": self._tbt.summary(),
                "tokens_per_s": None if self._last is None else self._last["tokens_per_s"],
                "prompt_tokens": self._prompt_tokens,
                "fed_tokens": self._prompt_tokens - self._cached_tokens,
                "cached_tokens": self._cached_tokens,
                "generated_tokens": self._generated_tokens,
                "queue": {"waiting": self._waiting, "running": self._running},
                "requests": dict(self._outcomes),
                "keys": {name: key.snapshot() for name, key in self._keys.items()},
                "checkpoints": {
                    "count": self._checkpoints,
                    "bytes": self._checkpoint_bytes,
                    "left_out": self._left_out,
                    "ms": self._checkpoint.summary(),
                },
                "turns_not_stored": dict(self._not_stored),
                "healed": dict(self._healed),
                "stored_bytes": self._stored_bytes,
                "quota_bytes": self._quota_bytes,
                "last": None if self._last is None else dict(self._last),
            }

    def collect(self) -> Iterable[Metric]:
        """List the metrics for the registry."""
        with self._lock:
            requests = CounterMetricFamily("ssmd_requests", "Requests by outcome: ok or error code", labels=["outcome"])
            for code, n in self._outcomes.items():
                requests.add_metric([code], n)
            asked = CounterMetricFamily(
                "ssmd_key_requests", "Requests by the name of their API key", labels=["key", "outcome"]
            )
            tokens = CounterMetricFamily(
                "ssmd_key_tokens",
                "Tokens by the name of their API key: fed, cached or generated",
                labels=["key", "kind"],
            )
            for name, key in self._keys.items():
                for code, n in key.outcomes.items():
                    asked.add_metric([name, code], n)
                for kind, n in key.tokens.items():
                    tokens.add_metric([name, kind], n)
            lost = CounterMetricFamily("ssmd_turns_not_stored", "Turns that were not stored", labels=["reason"])
            for reason, n in self._not_stored.items():
                lost.add_metric([reason], n)
            healed = CounterMetricFamily("ssmd_healed", "What was damaged: taken out, or written anew", labels=["what"])
            for what, n in self._healed.items():
                healed.add_metric([what], n)
            program = GaugeMetricFamily("ssmd_program_info", "The program that is loaded", labels=["program"])
            if self._program is not None:
                program.add_metric([self._program], 1)
            counters = {
                "ssmd_fed_tokens": ("Prompt tokens fed to the model", self._prompt_tokens - self._cached_tokens),
                "ssmd_cached_tokens": ("Prompt tokens that a stored state made unnecessary", self._cached_tokens),
                "ssmd_generated_tokens": ("Tokens generated", self._generated_tokens),
                "ssmd_checkpoint_bytes": ("Bytes of checkpoints written", self._checkpoint_bytes),
                "ssmd_checkpoints_left_out": ("Checkpoints not written, for want of room or parent", self._left_out),
                "ssmd_prefill_seconds": ("Time spent feeding prompts", self._prefill_ms / 1e3),
                "ssmd_restore_seconds": ("Time spent restoring states", self._restore_ms / 1e3),
            }
            gauges = {
                "ssmd_queue_waiting": ("Choices that wait", self._waiting),
                "ssmd_queue_running": ("Choices that decode", self._running),
                "ssmd_stored_bytes": ("Bytes in the session store", self._stored_bytes),
            }
            if self._quota_bytes is not None:
                gauges["ssmd_quota_bytes"] = ("Bytes that the session store may hold", self._quota_bytes)
            return [
                self._ttft.family("ssmd_ttft_seconds", "Time to first token"),
                self._tbt.family("ssmd_tbt_seconds", "Time between tokens"),
                self._checkpoint.family("ssmd_checkpoint_seconds", "Time to write a checkpoint"),
                requests,
                asked,
                tokens,
                lost,
                healed,
                program,
                *(CounterMetricFamily(name, text, value=n) for name, (text, n) in counters.items()),
                *(GaugeMetricFamily(name, text, value=n) for name, (text, n) in gauges.items()),
            ]
