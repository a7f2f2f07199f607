"""The metrics in Prometheus' text exposition, format 0.0.4. Times are in seconds, as is its convention."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ssmd import __version__
from ssmd.engine.metrics import LiveStatus, Metrics, Numbers


class Exposition(Collector):
    """A daemon's metrics in a registry of its own, with those of its process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """List the metrics for the registry."""
        live = self._metrics.live()
        with self._metrics.lock:
            return [*_answers(self._metrics.models), *_requests(self._metrics), *_store(self._metrics), *_now(live)]


def _answers(models: Mapping[str, Numbers]) -> Iterable[Metric]:
    ttft = HistogramMetricFamily("ssmd_ttft_seconds", "Time to first token", labels=["model"])
    tbt = HistogramMetricFamily("ssmd_tbt_seconds", "Time between tokens", labels=["model"])
    counters = {
        "ssmd_fed_tokens": "Prompt tokens fed to the model",
        "ssmd_cached_tokens": "Prompt tokens that a stored state made unnecessary",
        "ssmd_generated_tokens": "Tokens generated",
        "ssmd_prefill_seconds": "Time spent feeding prompts",
        "ssmd_restore_seconds": "Time spent restoring states",
    }
    families = {name: CounterMetricFamily(name, text, labels=["model"]) for name, text in counters.items()}
    for model, numbers in models.items():
        numbers.ttft.add_to(ttft, [model])
        numbers.tbt.add_to(tbt, [model])
        families["ssmd_fed_tokens"].add_metric([model], numbers.fed_tokens)
        families["ssmd_cached_tokens"].add_metric([model], numbers.cached_tokens)
        families["ssmd_generated_tokens"].add_metric([model], numbers.generated_tokens)
        families["ssmd_prefill_seconds"].add_metric([model], numbers.prefill_ms / 1e3)
        families["ssmd_restore_seconds"].add_metric([model], numbers.restore_ms / 1e3)
    return [ttft, tbt, *families.values()]


def _requests(metrics: Metrics) -> Iterable[Metric]:
    requests = CounterMetricFamily("ssmd_requests", "Requests by outcome: ok or error code", labels=["outcome"])
    for code, n in metrics.outcomes.items():
        requests.add_metric([code], n)
    asked = CounterMetricFamily("ssmd_key_requests", "Requests by the name of their API key", labels=["key", "outcome"])
    tokens = CounterMetricFamily(
        "ssmd_key_tokens", "Tokens by the name of their API key: fed, cached or generated", labels=["key", "kind"]
    )
    for name, key in metrics.keys.items():
        for code, n in key.outcomes.items():
            asked.add_metric([name, code], n)
        for kind, n in key.tokens.items():
            tokens.add_metric([name, kind], n)
    return [requests, asked, tokens]


def _store(metrics: Metrics) -> Iterable[Metric]:
    checkpoint = HistogramMetricFamily("ssmd_checkpoint_seconds", "Time to write a checkpoint", labels=[])
    metrics.checkpoint_times.add_to(checkpoint, [])
    lost = CounterMetricFamily("ssmd_turns_not_stored", "Turns that were not stored", labels=["reason"])
    for reason, n in metrics.not_stored.items():
        lost.add_metric([reason], n)
    healed = CounterMetricFamily("ssmd_healed", "What was damaged: taken out, or written anew", labels=["what"])
    for what, n in metrics.healings.items():
        healed.add_metric([what], n)
    written = CounterMetricFamily(
        "ssmd_checkpoint_bytes", "Bytes of checkpoints written", value=metrics.checkpoint_nbytes
    )
    left_out = CounterMetricFamily(
        "ssmd_checkpoints_left_out", "Checkpoints not written, for want of room or parent", value=metrics.left_out
    )
    stored = GaugeMetricFamily("ssmd_stored_bytes", "Bytes in the session store", value=metrics.stored)
    families: list[Metric] = [checkpoint, lost, healed, written, left_out, stored]
    if metrics.quota is not None:
        text = "Bytes that the session store may hold"
        families.append(GaugeMetricFamily("ssmd_quota_bytes", text, value=metrics.quota))
    return families


def _now(live: LiveStatus) -> Iterable[Metric]:
    build = GaugeMetricFamily("ssmd_build_info", "The daemon's version", labels=["version", "python"])
    build.add_metric([__version__, platform.python_version()], 1)
    about = ("runtime", "device", "quantization", "build")
    degraded = GaugeMetricFamily(
        "ssmd_degraded", "1 while turns are not stored as they should be", value=bool(live.reason)
    )
    info = GaugeMetricFamily("ssmd_model_info", "The models installed", labels=["model", *about])
    loaded = GaugeMetricFamily("ssmd_model_loaded", "Whether a model is loaded", labels=["model"])
    resident = GaugeMetricFamily("ssmd_model_resident_bytes", "Bytes that loading a model took", labels=["model"])
    waiting = GaugeMetricFamily("ssmd_queue_waiting", "Requests that wait", labels=["model"])
    running = GaugeMetricFamily("ssmd_queue_running", "Requests under way", labels=["model"])
    for row in live.models:
        model = row["id"]
        info.add_metric([model, *(row[one] for one in about)], 1)
        loaded.add_metric([model], row["state"] == "loaded")
        resident.add_metric([model], row["resident_bytes"] or 0)
        waiting.add_metric([model], row["queue"]["waiting"])
        running.add_metric([model], row["queue"]["running"])
    budget = GaugeMetricFamily("ssmd_memory_budget_bytes", "Bytes that loaded models may take")
    used = GaugeMetricFamily("ssmd_memory_used_bytes", "Bytes that loaded models are reckoned with")
    for family, name in ((budget, "budget_bytes"), (used, "used_bytes")):
        if live.memory.get(name) is not None:
            family.add_metric([], live.memory[name])
    return [build, degraded, info, loaded, resident, waiting, running, budget, used]
