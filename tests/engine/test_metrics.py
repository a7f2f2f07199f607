"""Counters come out right: the Prometheus text through its own parser, the JSON, and from many threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from ssmd.engine.metrics import TBT_BOUNDS_S, LiveStatus, Metrics, Series
from ssmd.engine.prometheus import Exposition

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ROW = {
    "id": "m@litert",
    "runtime": "litert",
    "device": "cpu",
    "quantization": "int8",
    "build": "abc",
    "state": "loaded",
    "resident_bytes": 5,
    "queue": {"waiting": 3, "running": 2},
}


def done(metrics: Metrics, ttft_ms: float = 20.0, tbts_ms: tuple[float, ...] = (10.0, 30.0), key: str = "") -> None:
    model = metrics.of("m@litert")
    model.first_token(ttft_ms=ttft_ms, prompt_tokens=100, cached_tokens=90, prefill_ms=5.0, restore_ms=2.5)
    model.tokens([], 1)
    for gap in tbts_ms:
        model.tokens([gap], 1)
    came_to: dict[str, float] = {"prompt_tokens": 100, "cached_tokens": 90, "generated_tokens": 1 + len(tbts_ms)}
    came_to |= {"prefill_ms": 5.0, "restore_ms": 2.5}
    rate = len(tbts_ms) / sum(tbts_ms) * 1e3 if tbts_ms else None
    model.ended({**came_to, "ttft_ms": ttft_ms, "tokens_per_s": rate}, "ok", key, id_="gen_1", session="s")


def samples(metrics: Metrics) -> Samples:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(Exposition(metrics).text().decode())
        for s in family.samples
    }


def shown(metrics: Metrics) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(metrics.snapshot(), allow_nan=False))
    return found


def test_prometheus_shows_seconds_and_counts() -> None:
    metrics, model = Metrics(), ("model", "m@litert")
    done(metrics, 20.0, (1.0, 10.0, 10.1, 9000.0))
    done(metrics, 2500.0, ())
    metrics.request_failed("queue_full")
    metrics.checkpoint(1000, 4.0)
    metrics.checkpoint(500, 6.0)
    metrics.stored_bytes(12345, 99999)
    metrics.live = lambda: LiveStatus(models=[ROW], memory={"budget_bytes": 77, "used_bytes": 33})
    found = samples(metrics)
    assert found["ssmd_ttft_seconds_count", (model,)] == 2
    assert found["ssmd_ttft_seconds_sum", (model,)] == pytest.approx(2.52)
    assert found["ssmd_ttft_seconds_bucket", (("le", "0.025"), model)] == 1
    assert found["ssmd_ttft_seconds_bucket", (("le", "2.5"), model)] == 2
    for bound, number in (("0.001", 1), ("0.01", 2), ("0.02", 3), ("2.5", 3), ("+Inf", 4)):
        assert found["ssmd_tbt_seconds_bucket", (("le", bound), model)] == number
    assert found["ssmd_requests_total", (("outcome", "ok"),)] == 2
    assert found["ssmd_requests_total", (("outcome", "queue_full"),)] == 1
    assert found["ssmd_fed_tokens_total", (model,)] == 20
    assert found["ssmd_cached_tokens_total", (model,)] == 180
    assert found["ssmd_generated_tokens_total", (model,)] == 6
    assert found["ssmd_prefill_seconds_total", (model,)] == pytest.approx(0.01)
    assert found["ssmd_checkpoint_bytes_total", ()] == 1500
    assert found["ssmd_checkpoint_seconds_count", ()] == 2
    assert found["ssmd_queue_waiting", (model,)] == 3
    assert found["ssmd_queue_running", (model,)] == 2
    assert found["ssmd_stored_bytes", ()] == 12345
    assert found["ssmd_quota_bytes", ()] == 99999
    assert found["ssmd_memory_budget_bytes", ()] == 77
    assert found["ssmd_memory_used_bytes", ()] == 33
    assert found["ssmd_checkpoints_left_out_total", ()] == 0
    assert found["ssmd_model_loaded", (model,)] == 1
    assert [
        name for name, labels in found if name == "ssmd_build_info" and dict(labels).keys() == {"version", "python"}
    ]
    about = (("build", "abc"), ("device", "cpu"), model, ("quantization", "int8"), ("runtime", "litert"))
    assert found["ssmd_model_info", about] == 1
    if Path("/proc").exists():
        assert found["process_resident_memory_bytes", ()] > 1e6


def test_the_snapshot_is_json_in_milliseconds() -> None:
    metrics = Metrics()
    empty = shown(metrics)
    nothing = {"p50": None, "p95": None, "n": 0}
    assert empty["ttft_ms"] == {"last": None, **nothing, "since_start": nothing, "recent": []}
    assert empty["last"] is None
    for ttft in (10.0, 20.0, 30.0):
        done(metrics, ttft)
    metrics.checkpoint(7, 1.5)
    metrics.checkpoint_left_out()
    full = shown(metrics)
    assert (full["ttft_ms"]["last"], full["ttft_ms"]["recent"]) == (30.0, [10.0, 20.0, 30.0])
    assert full["ttft_ms"]["p50"] == pytest.approx(20.0, rel=0.01)
    assert full["ttft_ms"]["p95"] == pytest.approx(30.0, rel=0.01)
    assert full["tbt_ms"]["last"] == 30.0
    assert full["tokens_per_s"]["last"] == 50.0
    assert full["cached_share"]["last"] == 0.9
    assert (full["prompt_tokens"], full["fed_tokens"], full["cached_tokens"]) == (300, 30, 270)
    counts = {"count": 1, "bytes": 7, "left_out": 1}
    assert {name: full["checkpoints"][name] for name in counts} == counts
    assert full["checkpoints"]["ms"]["last"] == 1.5
    assert full["requests"] == {"ok": 3}
    assert full["queue"] == {"waiting": 0, "running": 0}


def test_tokens_count_when_they_come_and_cancelled_answers_count() -> None:
    metrics = Metrics()
    model = metrics.of("m@litert")
    model.first_token(ttft_ms=8.0, prompt_tokens=10, cached_tokens=0, prefill_ms=5.0, restore_ms=0.0)
    model.tokens([], 1)
    model.tokens([4.0], 1)
    under_way = shown(metrics)
    assert (under_way["ttft_ms"]["last"], under_way["tbt_ms"]["last"], under_way["generated_tokens"]) == (8.0, 4.0, 2)
    assert under_way["requests"] == {"ok": 0}
    before = metrics.changes
    tokens = {"prompt_tokens": 10, "cached_tokens": 0, "generated_tokens": 2}
    model.ended({**tokens, "prefill_ms": 5.0, "restore_ms": 0.0, "ttft_ms": 8.0, "tokens_per_s": 250.0}, "cancelled")
    assert metrics.changes > before
    after = shown(metrics)
    assert after["requests"] == {"ok": 0, "cancelled": 1}
    assert (after["last"]["generated_tokens"], after["tokens_per_s"]["last"]) == (2, 250.0)
    assert after["generated_tokens"] == 2, "it was counted before"


def test_models_are_counted_apart_and_together() -> None:
    metrics = Metrics()
    metrics.live = lambda: LiveStatus(models=[ROW, {**ROW, "id": "other@openvino"}])
    done(metrics, 10.0)
    metrics.of("other@openvino").first_token(
        ttft_ms=40.0, prompt_tokens=7, cached_tokens=0, prefill_ms=1.0, restore_ms=0.0
    )
    first, second = shown(metrics)["models"]
    assert (first["ttft_ms"]["n"], second["ttft_ms"]["n"], shown(metrics)["ttft_ms"]["n"]) == (1, 1, 2)
    assert (first["prompt_tokens"], second["prompt_tokens"], shown(metrics)["prompt_tokens"]) == (100, 7, 107)
    assert "recent" not in first["ttft_ms"], "one line for all is enough"
    assert metrics.of("m@litert") is not None
    done(metrics, 10.0)
    assert shown(metrics)["models"][0]["ttft_ms"]["n"] == 2, "what was counted before stays"


def test_each_key_is_counted_by_its_name() -> None:
    metrics = Metrics()
    assert metrics.snapshot()["keys"] == {}
    assert b"ssmd_key_requests_total{" not in Exposition(metrics).text()
    for key in ("alice", "bob", "alice", ""):
        done(metrics, key=key)
    metrics.request_failed("queue_full", "bob")
    metrics.request_failed("queue_full")
    full = shown(metrics)
    assert full["keys"] == {
        "alice": {"requests": {"ok": 2}, "fed_tokens": 20, "cached_tokens": 180, "generated_tokens": 6},
        "bob": {"requests": {"ok": 1, "queue_full": 1}, "fed_tokens": 10, "cached_tokens": 90, "generated_tokens": 3},
    }
    assert (full["requests"], full["generated_tokens"]) == ({"ok": 4, "queue_full": 2}, 12)
    families = text_string_to_metric_families(Exposition(metrics).text().decode())
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert found["ssmd_key_requests_total", "bob", "queue_full"] == 1
    assert found["ssmd_key_requests_total", "alice", "ok"] == 2
    assert found["ssmd_key_tokens_total", "alice", "cached"] == 180


def test_percentiles_are_of_the_last_five_minutes_and_of_all() -> None:
    now = 1e6
    series = Series(clock=lambda: now)
    series.add([500.0] * 20)
    now += 200
    series.add([2.0] * 80)
    both = series.summary()
    assert (both["n"], both["p50"], both["p95"]) == (100, pytest.approx(2.0, rel=0.01), pytest.approx(500.0, rel=0.01))
    now += 110
    later = series.summary()
    assert (later["n"], later["p95"]) == (80, pytest.approx(2.0, rel=0.01))
    assert later["since_start"]["n"] == 100
    assert later["since_start"]["p95"] == pytest.approx(500.0, rel=0.01)
    now += 300
    quiet = series.summary()
    assert (quiet["n"], quiet["p50"], quiet["p95"], quiet["last"]) == (0, None, None, 2.0)
    assert len(quiet["recent"]) == 100
    series.add([0.0])
    assert series.summary()["p50"] == 0.0
    assert len(series._slots) == 1, "what is old is forgotten"


@pytest.mark.parametrize("scale", [0.01, 1.0, 3e4])
def test_percentiles_agree_with_numpy(scale: float) -> None:
    values = np.random.default_rng(1).lognormal(0, 1.5, 5000) * scale
    series = Series()
    series.add(values.tolist())
    found = series.summary()
    for name, part in (("p50", 50), ("p95", 95)):
        assert found[name] == pytest.approx(np.percentile(values, part, method="inverted_cdf"), rel=0.0101, abs=6e-4)


def test_many_threads_lose_nothing() -> None:
    metrics, model = Metrics(), ("model", "m@litert")

    def work() -> None:
        for _ in range(200):
            done(metrics)
            metrics.request_failed("x")
            metrics.checkpoint(1, 1.0)
            metrics.snapshot()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    Exposition(metrics).text()
    for thread in threads:
        thread.join()
    found = samples(metrics)
    assert found["ssmd_requests_total", (("outcome", "ok"),)] == 800
    assert found["ssmd_requests_total", (("outcome", "x"),)] == 800
    assert found["ssmd_tbt_seconds_count", (model,)] == 1600
    assert found["ssmd_checkpoint_bytes_total", ()] == 800


def test_nothing_is_global() -> None:
    done(Metrics())
    assert not [name for name, _ in samples(Metrics()) if name == "ssmd_ttft_seconds_count"]
    assert not [f for f in REGISTRY.collect() if f.name.startswith("ssmd")]


def test_buckets_agree_with_a_plain_count() -> None:
    metrics = Metrics()
    values = np.random.default_rng(0).exponential(50.0, 5000)
    done(metrics, 1.0, tuple(values.tolist()))
    found = samples(metrics)
    for bound in TBT_BOUNDS_S:
        labels = (("le", str(bound)), ("model", "m@litert"))
        assert found["ssmd_tbt_seconds_bucket", labels] == (values <= bound * 1e3).sum()


def test_the_last_requests_are_told_one_by_one() -> None:
    metrics = Metrics()
    assert metrics.snapshot()["recent"] == []
    for n in range(35):
        done(metrics, ttft_ms=n)
    recent = metrics.snapshot()["recent"]
    assert [row["ttft_ms"] for row in recent] == [*range(5, 35)]
    row = recent[-1]
    assert (row["id"], row["session"], row["model"], row["outcome"]) == ("gen_1", "s", "m@litert", "ok")
    assert (row["prompt_tokens"], row["cached_tokens"], row["generated_tokens"]) == (100, 90, 3)
    assert row["saved_ms"] == 90 * 5.0 / 10 - 2.5


def test_nothing_is_said_to_be_saved_before_anything_was_read() -> None:
    """Nor of a request that had no first token, nor by what another model takes."""
    metrics = Metrics()
    came_to: dict[str, float | None] = {
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "generated_tokens": 0,
        "ttft_ms": None,
        "tokens_per_s": None,
    }
    came_to |= {"prefill_ms": 0.0, "restore_ms": 0.0}
    done(metrics)
    metrics.of("other").ended({**came_to, "ttft_ms": 3.0, "cached_tokens": 9}, "ok")
    metrics.of("m@litert").ended(came_to, "cancelled")
    assert [row["saved_ms"] for row in metrics.snapshot()["recent"]] == [42.5, None, None]
