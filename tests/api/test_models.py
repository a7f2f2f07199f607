"""Several models over HTTP: which one a name means, how each is loaded, kept and unloaded, and waiting requests."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from keyfile import bearer, written
from several import GRANITE, LLAMA, LONG, OTHER, Several, models_folder, several

MODELS = "/ssmd/v1/models"
KEYS = "alice alice-has-this-one\nscreen screens-look-at-this read-only\n"


@pytest.fixture(scope="module")
def all_day(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """For tests that leave it as they find it, but for what is loaded."""
    with several(models_folder(artifacts, tmp_path_factory.mktemp("day") / "models")) as one:
        yield one


def ids(one: Several) -> list[str]:
    return [entry["id"] for entry in one.ask("GET", "/v1/models").json["data"]]


def loaded(one: Several) -> set[str]:
    return {row["id"] for row in one.metrics()["models"] if row["state"] == "loaded"}


def received(stream: Any, until: bytes) -> bytes:
    got = b""
    while until not in got:
        more = stream.recv(65536)
        assert more, got
        got += more
    return bytes(got)


# Names.


@pytest.mark.parametrize(
    ("asked", "answers", "calls_itself"),
    [
        ("llama", LLAMA, "llama"),
        ("granite", GRANITE, "granite"),
        (LLAMA, LLAMA, LLAMA),
        (OTHER, OTHER, OTHER),
        ("llama@openvino-cpu-f32", OTHER, OTHER),
    ],
)
def test_a_name_picks_a_model(asked: str, answers: str, calls_itself: str, all_day: Several) -> None:
    before = all_day.row(answers)["generated_tokens"]
    answer = all_day.chat(asked)
    assert answer.status == 200, answer.body
    assert answer.json["model"] == calls_itself
    assert all_day.row(answers)["generated_tokens"] == before + 8
    entry = all_day.ask("GET", f"/v1/models/{asked}").json
    assert entry["id"] == calls_itself
    assert f"fp_{entry['ssmd']['build'][:12]}" == answer.json["system_fingerprint"]


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("lama", "did you mean llama? "),
        ("Granit", "did you mean granite? "),
        ("gpt-4o", ""),
        ("llama@wgpu", "did you mean llama@litert or llama@openvino? "),
        ("llama@opnvino", "did you mean llama@openvino? "),
        ("llama@", "did you mean llama"),
        ("@litert", "did you mean llama@litert? "),
        ("../models/llama", ""),
        ("\x1b[31mred", ""),
        ("x" * 4000, ""),
    ],
)
def test_an_unknown_name_is_told_what_there_is(asked: str, hint: str, all_day: Several) -> None:
    error = all_day.chat(asked).error
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")
    assert "granite, llama" in error["message"]
    assert hint in error["message"]
    assert ("did you mean" in error["message"]) == bool(hint)
    assert len(error["message"]) < 250
    assert error["message"].isprintable()
    assert all_day.chat(asked).status == 404


def test_unknown_names_at_every_endpoint(all_day: Several) -> None:
    asked = [
        ("GET", "/v1/models/lama", None),
        ("GET", "/v1/models/a/b/c", None),
        ("POST", f"{MODELS}/lama/load", None),
        ("POST", f"{MODELS}/llama@wgpu/unload", None),
        ("PATCH", f"{MODELS}/lama", {"pinned": True}),
    ]
    for method, path, body in asked:
        answer = all_day.ask(method, path, body)
        assert (answer.status, answer.error["code"]) == (404, "model_not_found"), path
    for method, path in (("POST", f"{MODELS}/llama/lod"), ("GET", f"{MODELS}/a/b/c"), ("POST", f"{MODELS}//load")):
        assert all_day.ask(method, path).status == 404, path
    for method, path in (("GET", f"{MODELS}/llama/load"), ("DELETE", f"{MODELS}/llama"), ("POST", "/v1/models")):
        assert all_day.ask(method, path).status == 405, path


def test_a_name_with_several_runtimes_is_listed_with_each(all_day: Several) -> None:
    listed = all_day.ask("GET", "/v1/models").json
    assert listed["object"] == "list"
    entries = {entry["id"]: entry for entry in listed["data"]}
    assert [*entries] == ["granite", "llama", LLAMA, OTHER]
    assert entries["llama"]["ssmd"] == entries[LLAMA]["ssmd"], "what the name alone stands for"
    assert entries[OTHER]["ssmd"]["runtime"] == "openvino"
    own = entries["llama"]["ssmd"]
    assert entries["llama"]["context_length"] == entries["llama"]["max_model_len"] == own["context"] > 0
    assert entries["llama"]["meta"] == {"n_ctx": own["context"], "n_vocab": own["vocabulary"]}
    for id_, entry in entries.items():
        assert all_day.ask("GET", f"/v1/models/{id_}").json == entry
    rows = all_day.ask("GET", MODELS).json
    assert [row["id"] for row in rows["data"]] == [GRANITE, LLAMA, OTHER]
    assert rows["memory"].keys() == {"budget_bytes", "used_bytes", "resident_bytes", "mapped_bytes"}
    assert 0 < rows["memory"]["mapped_bytes"] < rows["memory"]["resident_bytes"]


def test_what_is_listed_is_what_lies_there_now(three: Several, artifacts: TinyArtifacts) -> None:
    assert ids(three) == ["granite", "llama", LLAMA, OTHER]
    shutil.copytree(artifacts["mamba-f32"], three.models / "mamba" / "litert-cpu-f32")
    assert ids(three) == ["granite", "llama", LLAMA, OTHER, "mamba"]
    assert "context_length" not in three.ask("GET", "/v1/models/mamba").json, "nothing bounds it"
    assert three.chat("mamba").status == 200
    assert "mamba@litert" in loaded(three)
    shutil.rmtree(three.models / "llama" / "openvino-cpu-f32")
    assert ids(three) == ["granite", "llama", "mamba"]
    assert three.chat(OTHER).error["code"] == "model_not_found"
    shutil.rmtree(three.models / "mamba")
    assert ids(three) == ["granite", "llama"]
    soon(lambda: loaded(three) == set())
    assert [row["id"] for row in three.metrics()["models"]] == [GRANITE, LLAMA]


def test_a_broken_manifest_is_one_models_problem(three: Several) -> None:
    manifest = three.models / "granite" / "litert-cpu-int8" / "artifact.json"
    manifest.unlink()  # it is a link
    manifest.write_text("{")
    assert ids(three) == ["llama", LLAMA, OTHER]
    assert three.chat("llama").status == 200
    answer = three.chat("granite")
    assert (answer.status, answer.error["code"]) == (503, "model_unusable")
    assert answer.headers["x-should-retry"] == "false"
    [row] = [row for row in three.metrics()["models"] if row["name"] == "granite"]
    assert row["problem"]
    assert three.ask("POST", f"{MODELS}/granite/load").error["code"] == "model_unusable"
    assert three.ask("POST", f"{MODELS}/{row['id']}/load").error["code"] == "model_unusable"
    assert three.ask("GET", "/v1/models/granite").error["code"] == "model_unusable"
    soon(lambda: three.leases() == 0)


# How long a model stays.


@pytest.mark.parametrize(
    ("keep_alive", "stays_s"),
    [("5m", 300), (300, 300), (0.5, 0.5), ("1h30m", 5400), ("90", 90), (-1, math.inf), ("-1", math.inf), (1e12, None)],
)
def test_how_long_it_stays_is_said_with_a_request(keep_alive: Any, stays_s: float | None, all_day: Several) -> None:
    assert all_day.chat("llama", keep_alive=keep_alive).status == 200
    soon(lambda: all_day.leases() == 0)
    until, now = all_day.row(LLAMA)["idle_until"], time.time()
    if stays_s in (math.inf, None):
        assert until is None
    else:
        assert until == pytest.approx(now + float(stays_s or 0), abs=5)
    assert all_day.chat("llama", keep_alive=300).status == 200


@pytest.mark.parametrize("keep_alive", [0, "0", "0s"])
def test_nothing_stays_with_0(keep_alive: Any, all_day: Several) -> None:
    assert all_day.chat("llama", keep_alive=keep_alive).status == 200
    soon(lambda: all_day.row(LLAMA)["state"] == "unloaded")


@pytest.mark.parametrize("keep_alive", ["", "soon", "5 minutes", "5m!", "-", "1e3", True, [], {"s": 5}, "9" * 5000])
def test_nonsense_is_refused_by_name(keep_alive: Any, all_day: Several) -> None:
    answer = all_day.chat("granite", keep_alive=keep_alive)
    assert answer.status == 400
    assert answer.error["param"] == "keep_alive"
    assert len(answer.error["message"]) < 300


def test_null_leaves_it_as_it_is(all_day: Several) -> None:
    all_day.chat("llama", keep_alive=1000)
    all_day.chat("llama", keep_alive=None)
    soon(lambda: all_day.leases() == 0)
    assert all_day.row(LLAMA)["idle_until"] == pytest.approx(time.time() + 1000, abs=5)
    all_day.chat("llama", keep_alive=300)


# Loading, letting go, pinning.


def test_a_model_is_loaded_and_let_go_by_hand(three: Several) -> None:
    assert loaded(three) == set()
    row = three.ask("POST", f"{MODELS}/llama/load").json
    assert (row["id"], row["state"], row["problem"]) == (LLAMA, "loaded", None)
    assert row["load_ms"] > 0
    assert row["loaded_at"] == pytest.approx(time.time(), abs=60)
    assert three.ask("POST", f"{MODELS}/llama/load").json["loaded_at"] == row["loaded_at"], "it is there"
    assert three.ask("POST", f"{MODELS}/{OTHER}/load").json["id"] == OTHER
    assert loaded(three) == {LLAMA, OTHER}
    assert three.ask("POST", f"{MODELS}/llama/unload").json["state"] in ("unloading", "unloaded")
    soon(lambda: three.row(LLAMA)["state"] == "unloaded")
    assert loaded(three) == {OTHER}
    assert three.ask("POST", f"{MODELS}/llama/unload").json["state"] == "unloaded", "nothing to do"
    assert three.chat("llama").status == 200
    soon(lambda: three.leases() == 0)


def test_who_is_answered_is_answered_to_the_end(three: Several) -> None:
    with three.asking("llama") as stream:
        received(stream, b'"content":"')
        assert three.ask("POST", f"{MODELS}/llama/unload").json["state"] == "unloading"
        with ThreadPoolExecutor() as threads:
            next_one = threads.submit(three.chat, "llama")
            rest = received(stream, b"\r\n0\r\n\r\n")
            assert b'"finish_reason":"length"' in rest
            assert next_one.result(30).status == 200
    three.quiet()


def test_who_asks_for_what_is_to_go_by_hand_takes_that_back(three: Several) -> None:
    with three.asking("llama", **{**LONG, "n": 4}) as stream:
        received(stream, b'"content":"')
        assert three.ask("POST", f"{MODELS}/llama/unload").json["state"] == "unloading"
        assert three.chat("llama").status == 200
        assert len(three.metrics()["running"]) == 1, "it did not wait for the other one's end"
        assert three.row(LLAMA)["state"] == "loaded"
    three.quiet()


def test_pinning(three: Several) -> None:
    row = three.ask("PATCH", f"{MODELS}/llama", {"pinned": True}).json
    assert (row["id"], row["pinned"], row["state"]) == (LLAMA, True, "unloaded")
    assert three.chat("llama", keep_alive=0).status == 200
    time.sleep(0.3)
    assert (three.row(LLAMA)["state"], three.row(LLAMA)["idle_until"]) == ("loaded", None)
    assert three.ask("PATCH", f"{MODELS}/llama", {"pinned": False}).json["pinned"] is False
    soon(lambda: three.row(LLAMA)["state"] == "unloaded")
    for body, param in (({}, "pinned"), ({"pinned": 1}, "pinned"), ({"pinned": True, "x": 1}, "x"), ([], None)):
        answer = three.ask("PATCH", f"{MODELS}/llama", body)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert three.row(LLAMA)["pinned"] is False


def test_a_read_only_key_looks_and_no_more(models: Path) -> None:
    file = written(models.parent / "keys", KEYS)
    with several(models, api_keys_file=file) as one:
        screen, alice = bearer("screens-look-at-this"), bearer("alice-has-this-one")
        for path in ("/v1/models", "/v1/models/llama", MODELS, "/ssmd/v1/metrics", "/metrics"):
            assert one.ask("GET", path, headers=screen).status == 200, path
            assert one.ask("GET", path).status == 401, path
        for method, path, body in (
            ("POST", f"{MODELS}/llama/load", None),
            ("POST", f"{MODELS}/llama/unload", None),
            ("PATCH", f"{MODELS}/llama", {"pinned": True}),
        ):
            refused = one.ask(method, path, body, screen)
            assert (refused.status, refused.error["code"]) == (403, "read_only_key"), path
        assert one.ask("POST", f"{MODELS}/llama/load", headers=alice).status == 200


# Models that are not loaded, and the requests that wait for them.


def test_what_cannot_be_loaded_is_told_and_not_asked_for_again(three: Several) -> None:
    graph = next((three.models / "granite").rglob("*.tflite"))
    good = graph.read_bytes()
    graph.unlink()  # it is a link
    graph.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for _ in range(2):
        answer = three.chat("granite")
        assert (answer.status, answer.error["code"]) == (503, "model_load_failed")
        assert (answer.headers["x-should-retry"], "retry-after" in answer.headers) == ("false", False)
        assert "granite@litert could not be loaded" in answer.error["message"]
    row = three.row(GRANITE)
    assert (row["state"], row["resident_bytes"]) == ("failed", None)
    assert row["problem"] in answer.error["message"]
    assert three.metrics()["requests"]["model_load_failed"] == 2
    assert three.chat("llama").status == 200
    assert three.ask("POST", f"{MODELS}/granite/load").error["code"] == "model_load_failed"
    graph.write_bytes(good)
    assert three.ask("POST", f"{MODELS}/granite/load").status == 200
    assert three.chat("granite").status == 200
    assert three.row(GRANITE)["problem"] is None
    soon(lambda: three.leases() == 0)


def test_a_name_means_another_runtime_if_the_first_cannot_load(three: Several) -> None:
    graph = next((three.models / "llama").rglob("*.tflite"))
    good = graph.read_bytes()
    graph.unlink()  # it is a link
    graph.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with three.asking("llama", max_tokens=4, stream_options={"include_usage": True}) as stream:
        assert b'"finish_reason":"length"' in received(stream, b"[DONE]")
    assert (three.row(LLAMA)["state"], three.row(OTHER)["state"]) == ("failed", "loaded")
    assert three.row(OTHER)["generated_tokens"] == 4
    assert three.chat("llama").status == 200
    assert three.chat(LLAMA).error["code"] == "model_load_failed", "it was asked for by name"
    assert three.metrics()["requests"] == {"ok": 2, "model_load_failed": 1}
    shutil.rmtree(graph.parent.parent / "openvino-cpu-f32")
    assert three.chat("llama").error["code"] == "model_load_failed", "there is no other one"
    graph.write_bytes(good)
    assert three.ask("POST", f"{MODELS}/llama/load").json["id"] == LLAMA
    assert three.chat("llama").status == 200


def test_who_asks_much_of_one_model_does_not_keep_another_out(models: Path) -> None:
    """Requests that wait for a lane are given back when their model is to go, behind the one that needs the memory."""
    with several(models, memory_budget=40 << 20, max_running=2) as one, ThreadPoolExecutor(30) as threads:
        many = [threads.submit(one.chat, "llama", f"On {n}", max_tokens=60, **LONG) for n in range(12)]
        soon(lambda: len(one.metrics()["running"]) == 12)
        assert one.chat("granite").status == 200
        ended = sum(each.done() for each in many)
        assert ended < 6
        assert [each.result(60).status for each in many] == [200] * 12
        assert {each.result().json["usage"]["completion_tokens"] for each in many} == {8 * 60}
        one.quiet()
        found = one.metrics()
        assert found["requests"] == {"ok": 13}
        assert found["generated_tokens"] == 12 * 8 * 60 + 8
        soon(lambda: one.leases() == 0)


def test_who_was_given_back_may_leave_and_be_stopped(models: Path) -> None:
    with several(models, memory_budget=40 << 20, max_running=1) as one, one.held_back(GRANITE) as gate:
        with one.asking("llama", "First", max_tokens=200, **LONG) as first, ThreadPoolExecutor() as threads:
            received(first, b'"content":"')
            with one.asking("llama", "I leave"):
                soon(lambda: len(one.metrics()["running"]) == 2)
                stopped = threads.submit(one.chat, "llama", "I am stopped", background=False)
                soon(lambda: len(one.metrics()["running"]) == 3)
                granite = threads.submit(one.chat, "granite")
                assert gate.reached.wait(30), "only what was begun was in its way"
                rows = [row for row in one.metrics()["running"] if row["model"] == LLAMA]
                assert [row["phase"] for row in rows] == ["loading"] * 2
                assert b"[DONE]" in received(first, b"[DONE]")
            soon(lambda: one.row(LLAMA)["queue"]["waiting"] == 1)
            [row] = [row for row in one.metrics()["running"] if row["model"] == LLAMA]
            assert one.ask("POST", f"/ssmd/v1/requests/{row['id']}/stop").status == 202
            answer = stopped.result(30)
            assert (answer.status, answer.json["usage"]["ssmd"]["stopped"]) == (200, True)
            gate.opened.set()
            assert granite.result(30).status == 200
        one.quiet()
        assert one.metrics()["requests"] == {"ok": 2, "cancelled": 1, "stopped": 1}
        soon(lambda: one.leases() == 0)
        assert one.ask("GET", f"/ssmd/v1/requests/{row['id']}/stream").status == 404


def test_what_has_no_room_is_told_who_has_it(models: Path) -> None:
    with several(models, memory_budget=80 << 20, pin=("llama",)) as one:
        assert one.row(LLAMA)["pinned"]
        one.host._loader.budget.nbytes = 40 << 20
        answer = one.chat("granite")
        assert (answer.status, answer.error["code"]) == (503, "no_memory")
        assert answer.headers["x-should-retry"] == "false"
        assert "--memory-budget" in answer.error["message"]
        assert one.row(GRANITE)["state"] == "failed"
        assert one.row(GRANITE)["problem"] in answer.error["message"]
        assert one.chat("llama").status == 200


def test_a_stream_goes_on_while_others_wait_for_a_model(three: Several) -> None:
    asked = three.asking("llama", max_tokens=200, **LONG)
    with asked as stream, three.held_back(GRANITE) as gate, ThreadPoolExecutor() as threads:
        received(stream, b'"content":"')
        waiting = [threads.submit(three.chat, "granite", f"Who is there, {n}?") for n in range(3)]
        assert gate.reached.wait(10)
        soon(lambda: three.row(GRANITE)["queue"] == {"waiting": 3, "running": 0})
        assert three.row(GRANITE)["state"] == "loading"
        assert three.metrics()["state"] == "generating"
        assert b'"finish_reason":"length"' in received(stream, b"\r\n0\r\n\r\n")
        assert not any(one.done() for one in waiting)
        time.sleep(0.2)
        gate.opened.set()
        answers = [one.result(30) for one in waiting]
    assert [answer.status for answer in answers] == [200] * 3
    for answer in answers:
        told = answer.json["usage"]["ssmd"]
        assert told["load_ms"] > 200
        assert told["ttft_ms"] > told["load_ms"]
    assert three.row(GRANITE)["ttft_ms"]["p50"] > 200, "to wait for a model is part of it"
    three.quiet()


def test_who_leaves_while_the_model_loads_holds_nothing(three: Several) -> None:
    with three.held_back(GRANITE) as gate:
        with three.asking("granite", "I shall not wait"), three.asking("granite", "Nor shall I"):
            assert gate.reached.wait(10)
            soon(lambda: three.row(GRANITE)["queue"]["waiting"] == 2)
        soon(lambda: three.row(GRANITE)["queue"]["waiting"] == 0)
        assert three.metrics()["requests"]["cancelled"] == 2, "they count as others who leave"
        gate.opened.set()
        soon(lambda: three.row(GRANITE)["state"] == "loaded")
    soon(lambda: three.leases() == 0)
    assert three.row(GRANITE)["generated_tokens"] == 0
    assert three.row(GRANITE)["idle_until"] == pytest.approx(time.time() + 300, abs=10)
    assert three.chat("granite").status == 200
    soon(lambda: three.leases() == 0)


def test_who_left_is_in_nobodys_way(models: Path) -> None:
    with several(models, max_queue=1) as one, one.held_back(GRANITE) as gate:
        with one.asking("granite"):
            assert gate.reached.wait(10)
            refused = one.chat("granite")
            assert (refused.status, refused.error["code"]) == (503, "queue_full")
            assert refused.headers["retry-after"]
        with ThreadPoolExecutor() as threads:
            soon(lambda: one.row(GRANITE)["queue"]["waiting"] == 0)
            mine = threads.submit(one.chat, "granite")
            soon(lambda: one.row(GRANITE)["queue"]["waiting"] == 1)
            gate.opened.set()
            assert mine.result(30).status == 200


def test_who_leaves_in_the_middle_gives_the_model_back(three: Several) -> None:
    with three.asking("llama") as stream:
        received(stream, b'"content":"')
        assert three.leases() == 1
    soon(lambda: three.leases() == 0)
    soon(lambda: three.metrics()["requests"].get("cancelled") == 1)
    refused = three.chat("llama", logit_bias={"99999999": 1})
    assert refused.status == 400
    three.chat("llama", "word " * 3000)
    three.chat("llama", session="ses_unknown")
    soon(lambda: three.leases() == 0)  # what is refused holds nothing


def test_a_load_goes_on_when_who_asked_for_it_leaves(three: Several) -> None:
    with three.held_back(GRANITE) as gate:
        raw = f"POST {MODELS}/granite/load HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()
        with three.served.connect(raw):
            assert gate.reached.wait(10)
        gate.opened.set()
        soon(lambda: three.row(GRANITE)["state"] == "loaded")
    soon(lambda: three.leases() == 0)


def test_a_shutdown_in_the_middle_of_a_load(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    with several(models) as one, one.held_back(GRANITE) as gate, ThreadPoolExecutor() as threads:
        waiting = threads.submit(one.chat, "granite")
        assert gate.reached.wait(10)
        one.host.shutdown(0)
        assert waiting.result(10).error["code"] == "shutting_down"
        gate.opened.set()
    assert "failed at a piece of work" not in caplog.text


def test_a_repeated_request_waits_for_the_first_without_a_lease(three: Several) -> None:
    with three.held_back(GRANITE) as gate, ThreadPoolExecutor() as threads:
        name = {"idempotency-key": "once"}
        both = [threads.submit(three.chat, "granite", headers=name) for _ in range(2)]
        assert gate.reached.wait(10)
        soon(lambda: three.row(GRANITE)["queue"]["waiting"] == 1)
        gate.opened.set()
        first, second = (one.result(30) for one in both)
    assert first.json == second.json
    soon(lambda: three.leases() == 0)
    assert three.row(GRANITE)["generated_tokens"] == 8


def test_many_clients_of_all_models_at_once(models: Path) -> None:
    """With memory for one model they take turns. No request is refused, and each answer is what it is alone."""
    with several(models, memory_budget=40 << 20) as one:
        names = ("llama", OTHER, "granite")
        alone = {name: said(one, name) for name in names}
        found: list[tuple[str, str]] = []

        def work(n: int) -> None:
            for turn in range(3):
                name = names[(n + turn) % 3]
                found.append((name, said(one, name)))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 12
        assert all(text == alone[name] for name, text in found)
        soon(lambda: one.leases() == 0)
        assert len(loaded(one)) == 1


def said(one: Several, name: str) -> str:
    answer = one.chat(name, store=False)
    assert answer.status == 200, answer.body
    return json.dumps(answer.json["choices"])
