"""The metrics over HTTP while a daemon works: every token when it comes, and a stream of events for watchers."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from keyfile import bearer, written
from several import GRANITE, LLAMA, LONG, METRICS, STREAM, Events, Several, little_room, several

from ssmd.api.own import metrics

PARTS = ("load_ms", "plan_ms", "queue_ms", "restore_ms", "prefill_ms", "shared_ms")
ALICE, BOB, SCREEN = "alice-has-this-one", "bob-has-this-one", "screens-look-at-this"
KEYS = f"alice {ALICE}\nbob {BOB}\nscreen {SCREEN} read-only\n"


def begun(stream: Any) -> None:
    """Wait for the first word of an answer."""
    got = b""
    while b'"content":"' not in got.replace(b'"content":""', b""):
        got += stream.recv(65536)


def finished(stream: Any) -> None:
    """Read an answer to its end."""
    got = b""
    while b"[DONE]" not in got:
        got = got[-16:] + stream.recv(65536)


# The JSON.


MOVING = (["generated_tokens"], ["tbt_ms", "n"])


def test_the_numbers_move_while_an_answer_is_generated(three: Several) -> None:
    before = three.metrics()
    assert (before["state"], before["running"], before["ttft_ms"]["n"]) == ("idle", [], 0)
    with three.asking("llama", **LONG) as stream:
        begun(stream)
        polls = [three.metrics()]

        def moved() -> bool:
            poll = three.metrics()
            grown = all(value(poll, path) > value(polls[-1], path) for path in MOVING)
            if grown and poll["running"][0]["tokens"] > polls[-1]["running"][0]["tokens"]:
                polls.append(poll)
                return True
            return False

        for _ in range(4):
            soon(moved)
        finished(stream)
    rows = [poll["running"][0] for poll in polls]
    assert [poll["state"] for poll in polls] == ["generating"] * 5
    assert {row["phase"] for row in rows} == {"decode"}
    assert len({(row["id"], row["session"], row["model"]) for row in rows}) == 1
    assert rows[0]["model"] == LLAMA
    assert rows[0]["ttft_ms"] == polls[0]["ttft_ms"]["last"] > 0
    assert all(row["tokens_per_s"] > 0 for row in rows[1:])
    assert polls[0]["requests"] == {"ok": 0}, "it is not over"
    soon(lambda: three.metrics()["requests"] == {"ok": 1})
    after = three.metrics()
    assert after["last"]["generated_tokens"] == after["generated_tokens"] == 3200
    assert after["tokens_per_s"]["last"] == after["last"]["tokens_per_s"] > 0
    assert (after["state"], after["running"]) == ("idle", [])


def value(of: Any, path: list[str]) -> Any:
    for name in path:
        of = of[name]
    return of


def test_a_cancelled_answer_counts(three: Several) -> None:
    with three.asking("llama") as stream:
        begun(stream)
        soon(lambda: three.metrics()["generated_tokens"] > 2)
    soon(lambda: "cancelled" in three.metrics()["requests"])
    found = three.metrics()
    assert found["requests"] == {"ok": 0, "cancelled": 1}
    assert found["ttft_ms"]["n"] == found["tokens_per_s"]["n"] == 1
    assert 0 < found["last"]["generated_tokens"] == found["generated_tokens"] < 400
    assert three.row(LLAMA)["generated_tokens"] == found["generated_tokens"]


def test_the_parts_of_the_time_to_the_first_token_add_up(three: Several) -> None:
    """Of requests that wait for their model, go on from a state, read much, wait for a lane, and come together."""
    text = "Tell me a story about a river. " * 8
    first = three.chat("llama", text)
    talk = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": first.json["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And then?"},
    ]
    again = three.chat("llama", messages=talk)
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda n: three.chat("llama", f"{n} {text}", n=1 + n % 3, seed=n), range(12)))
    for answer in (first, again, *together):
        assert answer.status == 200, answer.body
        told = answer.json["usage"]["ssmd"]
        assert all(told[part] >= 0 for part in PARTS), told
        assert sum(told[part] for part in PARTS) == pytest.approx(told["ttft_ms"], abs=0.01), told
    asked = [answer.json["usage"]["ssmd"] for answer in (first, again, *together)]
    assert asked[0]["load_ms"] > 10
    assert all(told["load_ms"] < 10 for told in asked[1:])
    assert asked[1]["restore_ms"] > 0
    assert all(told["prefill_ms"] > 0 for told in asked)
    assert max(told["queue_ms"] for told in asked) > 1, "there are eight lanes"
    assert max(told["shared_ms"] for told in asked) > 1
    three.quiet()
    last = three.metrics()["last"]
    assert sum(last[part] for part in PARTS) == pytest.approx(last["ttft_ms"], abs=0.01)


def test_what_is_over_is_told_one_by_one(models: Path) -> None:
    with several(models, api_keys_file=written(models.parent / "keys", KEYS)) as one:
        text = "Tell me a story about a river. " * 8
        first = one.chat("llama", text, bearer(ALICE))
        again = one.chat("llama", text, bearer(ALICE))
        one.chat("llama", text, bearer(BOB))
        one.quiet()
        soon(lambda: len(one.metrics(bearer(ALICE))["recent"]) == 3)
        recent = one.metrics(bearer(ALICE))["recent"]
    for row, answer in zip(recent, (first, again), strict=False):
        usage = answer.json["usage"]
        assert f"chatcmpl-{row['id']}" == answer.json["id"]
        assert row["session"] == usage["ssmd"]["session"]
        assert (row["model"], row["outcome"]) == (LLAMA, "ok")
        assert row["prompt_tokens"] == usage["prompt_tokens"]
        assert row["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        for name in ("ttft_ms", "prefill_ms", "restore_ms"):
            assert row[name] == pytest.approx(usage["ssmd"][name], abs=0.01)
        assert row["ended_at"] == pytest.approx(time.time(), abs=120)
    assert recent[0]["saved_ms"] == 0
    assert recent[1]["saved_ms"] != 0
    assert (recent[2]["id"], recent[2]["session"], recent[2]["model"]) == (None, None, LLAMA)
    assert not any("owner" in row for row in recent)


def test_sessions_are_counted_now_and_then(three: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    assert three.metrics()["sessions"] == {"count": 0, "pinned": 0}
    id_ = three.chat("llama").headers["x-ssmd-session"]
    three.ask("PATCH", f"/ssmd/v1/sessions/{id_}", {"pinned": True})
    three.chat("llama", "Another one")
    assert three.metrics()["sessions"] == {"count": 0, "pinned": 0}, "that was counted just now"
    monkeypatch.setattr(metrics, "AGED_S", 0.0)
    assert three.metrics()["sessions"] == {"count": 2, "pinned": 1}


def test_numbers_are_there_though_the_store_is_not(three: Several, tmp_path: Path) -> None:
    three.chat("llama")
    three.quiet()
    for file in (tmp_path / "data").glob("sessions.sqlite*"):
        file.write_bytes(b"no database at all " * 1000)
    for path in (METRICS, "/metrics"):
        assert three.ask("GET", path).status == 200, path


def test_what_others_ask_is_not_told(models: Path) -> None:
    """A busy daemon cannot hide that it is busy: only details of the requests are left out."""
    with several(models, api_keys_file=written(models.parent / "keys", KEYS)) as one:
        with one.asking("llama", headers=bearer(BOB), **LONG) as stream, Events(one.served, bearer(SCREEN)) as screen:
            begun(stream)
            seen = {name: one.metrics(bearer(key))["running"] for name, key in (("bob", BOB), ("alice", ALICE))}
            soon(lambda: "decode" in [row["phase"] for event in screen.found[-1:] for row in event["running"]])
            with Events(one.served, bearer(BOB)) as bobs:
                soon(lambda: bool(bobs.found))
            [row] = screen.found[-1]["running"]
            [own] = bobs.found[0]["running"]
            finished(stream)
        [mine], [theirs] = seen["bob"], seen["alice"]
        assert mine["id"] == own["id"]
        assert mine["id"].startswith("gen_")
        assert mine["session"].startswith("ses_")
        for hidden in (theirs, row):
            assert (hidden["id"], hidden["session"], hidden["phase"]) == (None, None, "decode")
            assert hidden.keys() == mine.keys()
        assert "owner" not in mine
        assert mine["session"].encode() not in b"".join(screen.raw)
        one.quiet()
        keys = one.metrics(bearer(ALICE))["keys"]
        assert keys["bob"]["generated_tokens"] == 3200
        assert one.ask("GET", STREAM).status == 401


# The stream.


def test_at_most_four_events_a_second_and_none_without_changes(three: Several) -> None:
    with Events(three.served) as watching:
        soon(lambda: bool(watching.found))
        time.sleep(0.8)
        assert len(watching.found) == 1, "nothing came"
        assert watching.found[0]["state"] == "idle"
        with ExitStack() as stack:
            streams = [stack.enter_context(three.asking("llama", f"On and on, {n}", **LONG)) for n in range(2)]
            begun(streams[0])
            from_, since = len(watching.found), time.monotonic()
            for stream in streams:
                finished(stream)
            lasted = time.monotonic() - since
            during = watching.found[from_:]
        assert lasted > 0.6, "too short to tell"
        assert 1 <= len(during) <= lasted / metrics.PERIOD_S + 1
        # A late reader sees two close together, but not five in half of their time.
        assert all(b - a > 2 * metrics.PERIOD_S for a, b in zip(watching.times, watching.times[4:], strict=False))
        soon(lambda: watching.found[-1]["running"] == [])
        assert any(event["state"] == "generating" for event in during)
        soon(lambda: watching.found[-1]["requests"]["ok"] == 2)
        tokens = [event["generated_tokens"] for event in watching.found]
        assert tokens == sorted(tokens)
        three.quiet()
        time.sleep(0.6)
        before = len(watching.found)
        time.sleep(1)
        assert len(watching.found) == before, "all is quiet again"


def test_who_asks_for_fewer_events_misses_no_state(three: Several) -> None:
    with Events(three.served) as all_, Events(three.served, query="?interval=60") as few:
        soon(lambda: bool(all_.found and few.found))
        with three.asking("llama", "On and on", **LONG) as stream:
            begun(stream)
            soon(lambda: few.found[-1]["state"] == "generating")
            finished(stream)
        soon(lambda: few.found[-1]["state"] == "idle" and few.found[-1]["running"] == [])
        soon(lambda: all_.found[-1]["requests"]["ok"] == 1)
        assert len(few.found) < len(all_.found)


def test_fewer_events_tell_what_came_in_between(three: Several) -> None:
    with Events(three.served) as all_, Events(three.served, query="?interval=0.7") as few:
        soon(lambda: bool(few.found))
        three.chat("llama")
        soon(lambda: all_.found[-1]["requests"]["ok"] == 1)
        soon(lambda: few.raw[-1] == all_.raw[-1])


@pytest.mark.parametrize(
    "query", ["interval=0.1", "interval=61", "interval=nan", "interval=soon", "interval=", "every=1"]
)
def test_what_is_no_interval_is_refused(query: str, three: Several) -> None:
    answer = three.ask("GET", f"{STREAM}?{query}")
    assert answer.status == 400
    assert answer.json["error"]["param"] == query.partition("=")[0]


def test_what_happens_to_models_is_news(three: Several, artifacts: TinyArtifacts) -> None:
    def states() -> dict[str, str]:
        return {row["id"]: row["state"] for row in watching.found[-1]["models"]} if watching.found else {}

    with Events(three.served) as watching:
        soon(lambda: states() != {})
        with three.held_back(GRANITE) as gate, ThreadPoolExecutor() as threads:
            loading = threads.submit(three.ask, "POST", "/ssmd/v1/models/granite/load")
            assert gate.reached.wait(10)
            soon(lambda: states()[GRANITE] == "loading")
            gate.opened.set()
            loading.result(30)
        soon(lambda: states()[GRANITE] == "loaded")
        three.ask("PATCH", "/ssmd/v1/models/granite", {"pinned": True})
        soon(lambda: any(row["pinned"] for row in watching.found[-1]["models"]))
        three.ask("POST", "/ssmd/v1/models/granite/unload")
        soon(lambda: states()[GRANITE] == "unloaded")


def test_what_only_time_changes_comes_too(
    three: Several, artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As percentiles of the last minutes, and models that are installed."""
    monkeypatch.setattr(metrics, "AGED_S", 0.4)
    with Events(three.served) as watching:
        soon(lambda: bool(watching.found))
        time.sleep(1.2)
        assert len(watching.found) == 1
        shutil.copytree(artifacts["mamba-f32"], three.models / "mamba" / "litert-cpu-f32")
        soon(lambda: len(watching.found) == 2)
        assert "mamba@litert" in [row["id"] for row in watching.found[1]["models"]]


def test_all_listeners_get_the_same(three: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are shown one snapshot: it is made no more often for many."""
    made, snapshot = list[float](), three.host.metrics.snapshot

    def counted() -> dict[str, Any]:
        made.append(time.monotonic())
        return snapshot()

    monkeypatch.setattr(three.host.metrics, "snapshot", counted)
    with ExitStack() as stack:
        began = time.monotonic()
        all_of_them = [stack.enter_context(Events(three.served)) for _ in range(20)]
        soon(lambda: all(one.found for one in all_of_them))
        stream = stack.enter_context(three.asking("llama"))
        finished(stream)
        soon(lambda: all(one.found[-1]["requests"]["ok"] == 1 for one in all_of_them))
        lasted = time.monotonic() - began
        assert len(made) <= lasted / metrics.PERIOD_S + 2
        assert len({one.raw[-1] for one in all_of_them}) == 1
        assert {one.raw[0] for one in all_of_them} == {all_of_them[0].raw[0]}
    soon(lambda: stopped(made))
    three.chat("llama")
    before = len(made)
    time.sleep(0.6)
    assert len(made) == before, "nobody listens"


def stopped(made: list[float]) -> bool:
    return time.monotonic() - made[-1] > 0.6


def test_the_first_event_after_a_start_knows_the_store(models: Path) -> None:
    with several(models) as one:
        one.chat("llama")
        one.quiet()
        soon(lambda: one.metrics()["stored_bytes"] > 0)
    with several(models) as one, Events(one.served) as watching:
        soon(lambda: bool(watching.found))
        assert watching.found[0]["stored_bytes"] > 0
        assert watching.found[0]["quota_bytes"] == 8 << 30


def test_who_does_not_read_is_dropped(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ssmd.api.own.metrics")
    monkeypatch.setattr(metrics, "PERIOD_S", 0.001)
    with several(models, stall_s=0.3, at=little_room()) as one:
        raw = f"GET {STREAM} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        with one.served.connect(raw, receive_buffer=4096), Events(one.served) as watching:
            soon(lambda: bool(watching.found))
            until = time.monotonic() + 30
            while "has not read for" not in caplog.text:
                assert time.monotonic() < until
                one.chat("llama", "On and on", max_tokens=400)
            before = len(watching.found)
            one.chat("llama")
            soon(lambda: len(watching.found) > before)


def test_it_ends_when_the_daemon_does(models: Path) -> None:
    with several(models) as one, Events(one.served) as idle, one.asking("llama", max_tokens=450) as stream:
        begun(stream)
        soon(lambda: bool(idle.found))
        one.host.shutdown(0.5)
        assert idle.ended.wait(5)
        assert idle.found[-1]["state"] == "draining"
        assert one.metrics()["state"] == "draining"
        with Events(one.served) as late:
            assert late.ended.wait(5)
            assert [event["state"] for event in late.found] == ["draining"]


def test_a_failure_ends_it_and_the_next_who_asks_is_served(three: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    with Events(three.served) as watching:
        soon(lambda: bool(watching.found))
        with monkeypatch.context() as broken:
            broken.setattr(three.host, "pulse", lambda: 1 / 0)
            assert watching.ended.wait(5)
        with Events(three.served) as again:
            soon(lambda: bool(again.found))


def test_its_head_alone(three: Several) -> None:
    asked = f"HEAD {STREAM} HTTP/1.1\r\nhost: localhost\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with three.served.connect(asked.encode()) as one:
        one.settimeout(5)
        got = b""
        while b'"status"' not in got:
            got += one.recv(65536)
    assert b"content-type: text/event-stream" in got
    assert got.count(b"HTTP/1.1 200 OK") == 2
    refused = three.ask("POST", STREAM)
    assert refused.status == 405
