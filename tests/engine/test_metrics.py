"""What is counted comes out right: the Prometheus text through its own parser, the JSON, and from many threads."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from ssmd.engine.metrics import TBT_BOUNDS_S, Metrics


def done(metrics: Metrics, ttft_ms: float = 20.0, tbts_ms: tuple[float, ...] = (10.0, 30.0), key: str = "") -> None:
    metrics.request_done(
        ttft_ms=ttft_ms,
        tbts_ms=tbts_ms,
        prompt_tokens=100,
        cached_tokens=90,
        generated_tokens=3,
        prefill_ms=5.0,
        restore_ms=2.5,
        key=key,
    )


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(metrics.prometheus().decode())
        for s in family.samples
    }


def test_prometheus_shows_seconds_and_counts() -> None:
    metrics = Metrics()
    done(metrics, 20.0, (1.0, 10.0, 10.1, 9000.0))
    done(metrics, 2500.0, ())
    metrics.request_failed("queue_full")
    metrics.queue(3, 2)
    metrics.checkpoint(1000, 4.0)
    metrics.checkpoint(500, 6.0)
    metrics.stored_bytes(12345, 99999)
    metrics.loaded("smollm2")
    found = samples(metrics)
    assert found["ssmd_ttft_seconds_count", ()] == 2
    assert found["ssmd_ttft_seconds_sum", ()] == pytest.approx(2.52)
    assert found["ssmd_ttft_seconds_bucket", (("le", "0.025"),)] == 1
    assert found["ssmd_ttft_seconds_bucket", (("le", "2.5"),)] == 2
    assert found["ssmd_tbt_seconds_bucket", (("le", "0.001"),)] == 1
    assert found["ssmd_tbt_seconds_bucket", (("le", "0.01"),)] == 2
    assert found["ssmd_tbt_seconds_bucket", (("le", "0.02"),)] == 3
    assert found["ssmd_tbt_seconds_bucket", (("le", "2.5"),)] == 3
    assert found["ssmd_tbt_seconds_bucket", (("le", "+Inf"),)] == 4
    assert found["ssmd_requests_total", (("outcome", "ok"),)] == 2
    assert found["ssmd_requests_total", (("outcome", "queue_full"),)] == 1
    assert found["ssmd_fed_tokens_total", ()] == 20
    assert found["ssmd_cached_tokens_total", ()] == 180
    assert found["ssmd_generated_tokens_total", ()] == 6
    assert found["ssmd_checkpoint_bytes_total", ()] == 1500
    assert found["ssmd_checkpoint_seconds_count", ()] == 2
    assert found["ssmd_queue_waiting", ()] == 3
    assert found["ssmd_queue_running", ()] == 2
    assert found["ssmd_stored_bytes", ()] == 12345
    assert found["ssmd_quota_bytes", ()] == 99999
    assert found["ssmd_checkpoints_left_out_total", ()] == 0
    assert found["ssmd_program_info", (("program", "smollm2"),)] == 1


def test_the_snapshot_is_json_in_milliseconds() -> None:
    metrics = Metrics()
    empty = json.loads(json.dumps(metrics.snapshot(), allow_nan=False))
    assert empty["ttft_ms"] == {"last": None, "p50": None, "p95": None}
    assert empty["tokens_per_s"] is None
    assert empty["last"] is None
    for ttft in (10.0, 20.0, 30.0):
        done(metrics, ttft)
    metrics.checkpoint(7, 1.5)
    metrics.checkpoint_left_out()
    shown = json.loads(json.dumps(metrics.snapshot(), allow_nan=False))
    assert shown["ttft_ms"] == {"last": 30.0, "p50": 20.0, "p95": 29.0}
    assert shown["tbt_ms"]["last"] == 30.0
    assert shown["tokens_per_s"] == 50.0
    assert (shown["prompt_tokens"], shown["fed_tokens"], shown["cached_tokens"]) == (300, 30, 270)
    assert shown["checkpoints"] == {"count": 1, "bytes": 7, "left_out": 1, "ms": {"last": 1.5, "p50": 1.5, "p95": 1.5}}
    assert shown["requests"] == {"ok": 3}
    assert shown["queue"] == {"waiting": 0, "running": 0}


def test_each_key_is_counted_by_its_name() -> None:
    metrics = Metrics()
    assert metrics.snapshot()["keys"] == {}
    assert b"ssmd_key_requests_total{" not in metrics.prometheus()
    for key in ("alice", "bob", "alice", ""):
        done(metrics, key=key)
    metrics.request_failed("queue_full", "bob")
    metrics.request_failed("queue_full")
    shown = json.loads(json.dumps(metrics.snapshot(), allow_nan=False))
    assert shown["keys"] == {
        "alice": {"requests": {"ok": 2}, "fed_tokens": 20, "cached_tokens": 180, "generated_tokens": 6},
        "bob": {"requests": {"ok": 1, "queue_full": 1}, "fed_tokens": 10, "cached_tokens": 90, "generated_tokens": 3},
    }
    assert (shown["requests"], shown["generated_tokens"]) == ({"ok": 4, "queue_full": 2}, 12)
    families = text_string_to_metric_families(metrics.prometheus().decode())
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert found["ssmd_key_requests_total", "bob", "queue_full"] == 1
    assert found["ssmd_key_requests_total", "alice", "ok"] == 2
    assert found["ssmd_key_tokens_total", "alice", "cached"] == 180


def test_percentiles_are_of_recent_requests_only() -> None:
    metrics = Metrics()
    for _ in range(300):
        done(metrics, 1000.0, (500.0,) * 20)
    for _ in range(256):
        done(metrics, 1.0, (2.0,) * 20)
    shown = metrics.snapshot()
    assert shown["ttft_ms"]["p95"] == 1.0
    assert shown["tbt_ms"]["p95"] == 2.0


def test_many_threads_lose_nothing() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(200):
            done(metrics)
            metrics.request_failed("x")
            metrics.checkpoint(1, 1.0)
            metrics.snapshot()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    metrics.prometheus()
    for thread in threads:
        thread.join()
    found = samples(metrics)
    assert found["ssmd_requests_total", (("outcome", "ok"),)] == 800
    assert found["ssmd_requests_total", (("outcome", "x"),)] == 800
    assert found["ssmd_tbt_seconds_count", ()] == 1600
    assert found["ssmd_checkpoint_bytes_total", ()] == 800


def test_nothing_is_global() -> None:
    done(Metrics())
    assert samples(Metrics())["ssmd_ttft_seconds_count", ()] == 0
    assert not [f for f in REGISTRY.collect() if f.name.startswith("ssmd")]


def test_buckets_agree_with_a_plain_count() -> None:
    metrics = Metrics()
    values = np.random.default_rng(0).exponential(50.0, 5000)
    done(metrics, 1.0, tuple(values.tolist()))
    found = samples(metrics)
    for bound in TBT_BOUNDS_S:
        assert found["ssmd_tbt_seconds_bucket", (("le", str(bound)),)] == (values <= bound * 1e3).sum()
