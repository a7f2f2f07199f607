"""The tray's view of a daemon: states, texts, and nothing by which a hostile daemon could do harm."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watched import metrics, model, request

from ssmd import __version__
from ssmd.daemon.discovery import Address
from ssmd_tray.seeing import ViewBuilder
from ssmd_tray.view import MOST_ROWS, Icon, View
from ssmd_tray.watching import Observation

WITH = "generating: smollm2@litert"
LOADING = [model("m", "loading")]
ADDRESS = Address("http://127.0.0.1:7763", None, 42, __version__, 1000.0, "t" * 43)


def view(found: Any, **fields_: Any) -> View:
    return ViewBuilder(lambda: 1100.0).view(Observation(0.0, found, ADDRESS, 42, **fields_))


@pytest.mark.parametrize(
    ("found", "icon", "headline"),
    [
        (metrics(), Icon.IDLE, "idle: smollm2@litert on cpu"),
        (metrics(models=[]), Icon.IDLE, "idle, no model is loaded"),
        (metrics("generating", running=[request()]), Icon.GENERATING, "generating: smollm2@litert"),
        (metrics("generating"), Icon.GENERATING, "generating"),
        (metrics("generating", models=LOADING), Icon.LOADING, "loading: m@litert"),
        (metrics("generating", models=LOADING, running=[request("loading")]), Icon.LOADING, "loading: m@litert"),
        (metrics("generating", models=LOADING, running=[request()]), Icon.GENERATING, WITH),
        (metrics("degraded", reason="disk_full", running=[request()]), Icon.DEGRADED, "degraded"),
        (metrics("draining"), Icon.LOADING, "comes to its end"),
        (metrics("starting", models=[]), Icon.LOADING, "starts"),
        ({}, Icon.IDLE, "idle, no model is loaded"),
    ],
)  # fmt: skip
def test_states(found: Any, icon: Icon, headline: str) -> None:
    shown = view(found)
    assert (shown.icon, shown.headline) == (icon, headline)


def test_numbers() -> None:
    shown = view(metrics(sessions={"count": 12, "pinned": 3}))
    assert (shown.ttft.last, shown.ttft.p50, shown.ttft.p95) == ("12.0 ms", "11.0 ms", "20.0 ms")
    assert "time to first token: last 12.0 ms, median 11.0 ms" in shown.ttft.spoken
    assert (shown.rate, shown.cached) == ("12.0", "90% (median 50%)")
    assert (shown.stored, shown.stored_share) == ("1.0 GB of 8.0 GB, 12 sessions, 3 pinned", 0.125)
    assert shown.daemon == f"ssmd {__version__} at http://127.0.0.1:7763, process 42, for 2 min"
    assert shown.tooltip == "ssmd: idle: smollm2@litert on cpu\nTTFT 12.0 ms, TBT 12.0 ms"
    assert view(metrics()).stored == "1.0 GB of 8.0 GB", "an older one does not count sessions"


def test_rows() -> None:
    rows = [
        model("a", "loaded", pinned=True),
        model("b", "loaded", queue={"running": 1}),
        model("c", "loaded", idle_until=1100.0 + 252),
        model("d", "failed", problem="file 'x' is missing", resident_bytes=None),
        model("e", "loading", resident_bytes=None),
        model("f", "unloaded", resident_bytes=None),
    ]
    shown = view(
        metrics("generating", models=rows, running=[request("prefill", tokens=0, tokens_per_s=None), request(id=None)])
    )
    assert [(m.doing, m.loaded, m.busy, m.pinned) for m in shown.models] == [
        ("loaded", True, False, True),
        ("in use", True, False, False),
        ("loaded, goes in 4 min", True, False, False),
        ("failed: file 'x' is missing", False, False, False),
        ("loading", False, True, False),
        ("not loaded", False, False, False),
    ]
    assert [(r.id, r.doing) for r in shown.requests] == [
        ("gen_1", "prefill 30/90"),
        (None, "decode, 57 tokens, 41 tokens/s"),
    ]
    many = view(metrics(models=rows * 20, running=[request()] * 99))
    assert (len(many.models), many.more_models) == (MOST_ROWS, 120 - MOST_ROWS)
    assert (len(many.requests), many.more_requests) == (MOST_ROWS, 99 - MOST_ROWS)


def test_away() -> None:
    gone = ViewBuilder().view(Observation(0.0, problem="no daemon runs on /x"))
    assert (gone.icon, gone.headline, gone.notice) == (Icon.AWAY, "away", "no daemon runs on /x")
    assert (gone.answers, gone.runs, gone.base_url, gone.ttft.last) == (False, False, None, "-")
    begins = ViewBuilder().view(Observation(0.0, process=7, problem="a daemon starts"))
    assert (begins.icon, begins.runs, begins.daemon) == (Icon.LOADING, True, "process 7")
    hung = view(None, problem="it said nothing for 5 s")
    assert (hung.icon, hung.runs, hung.answers) == (Icon.AWAY, True, False)


def test_a_clock_that_is_set() -> None:
    """Back to before the daemon's start, and on by years: ages are not negative, lines stay where they are."""
    now = [1100.0]
    seeing = ViewBuilder(lambda: now[0])
    series = {"since_start": {"n": 1}, "recent": [5.0]}
    seeing.view(Observation(10.0, metrics(ttft_ms={"since_start": {"n": 0}, "recent": []}), ADDRESS, 42))
    seeing.view(Observation(11.0, metrics(ttft_ms=series), ADDRESS, 42))
    for moment in (0.0, 1e11):
        now[0] = moment
        shown = seeing.view(
            Observation(20.0, metrics(ttft_ms=series, models=[model("m", idle_until=1200.0)]), ADDRESS, 42)
        )
        assert [(point.age_s, point.ms) for point in shown.ttft.points] == [(9.0, 5.0)]
        assert "-" not in shown.daemon.partition("for ")[2]


_ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        "",
        "x",
        -1,
        0,
        1e300,
        10**400,
        float("nan"),
        float("inf"),
        True,
        [],
        {},
        [1, "x", None, {}],
        {"last": "x"},
        {"n": -1},
    ]
)
_ROW = st.fixed_dictionaries({}, optional=dict.fromkeys((*model("m"), *request()), _ODD))
_ROWS = st.lists(_ROW, max_size=3) | _ODD
_FOUND = st.fixed_dictionaries(
    {}, optional={**dict.fromkeys(metrics(sessions={}), _ODD), "models": _ROWS, "running": _ROWS}
)


@given(_FOUND)
def test_whatever_it_says(found: Any) -> None:
    seeing = ViewBuilder(lambda: 1100.0)
    for _ in range(2):
        check(seeing.view(Observation(time.monotonic(), found, ADDRESS, 42)))


@pytest.mark.parametrize("bad", ["<b>x</b>", "\x1b]0;x\x07", "\u202eexe.txt", "a\nb", "x" * 1_000_000, "\ud800"])
def test_texts_that_would_steer(bad: str) -> None:
    names = {"state": bad, "reason": bad}
    shown = view(
        metrics(**names, models=[model(bad, bad, problem=bad, device=bad)], running=[request(bad, id=bad, model=bad)])
    )
    check(shown)
    check(view(metrics("degraded", reason=bad)))
    check(view(None, problem=bad))


def check(shown: View) -> None:
    """All texts are short lines that can be seen."""
    assert shown.icon in Icon
    rows: list[Any] = [shown, *shown.requests, *shown.models, shown.ttft, shown.tbt]
    texts = [getattr(row, one.name) for row in rows for one in fields(row)]
    for text in texts:
        if isinstance(text, str) and not (text.startswith("gen_") or text in [row.id for row in shown.requests]):
            assert len(text) <= 500
            assert all(c.isprintable() for c in text.replace("\n", "", 1 if text == shown.tooltip else 0)), text


def test_the_folder_is_named(tmp_path: Path) -> None:
    assert str(tmp_path) in ViewBuilder().view(Observation(0.0, problem=f"no daemon runs on {tmp_path}")).notice
