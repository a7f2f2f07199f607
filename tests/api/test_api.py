"""The HTTP API over a real engine, store and socket: what OpenAI clients get."""

from __future__ import annotations

import json
import logging
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, chunks, daemon, idle, request, soon, text_of, whole_text

from ssmd.config import Settings
from ssmd.engine.terms import Rejection
from ssmd.sessions.rows.database import FILE


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["llama-f32"]


@pytest.fixture(scope="module")
def tiny(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifact, tmp_path_factory.mktemp("data")) as one:
        yield one


# What is answered.


def test_a_whole_answer(tiny: Daemon) -> None:
    answer = tiny.chat()
    assert answer.status == 200, answer.body
    body = answer.json
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert (body["object"], body["model"]) == ("chat.completion", tiny.model)
    [choice] = body["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert (choice["message"]["role"], choice["finish_reason"], choice["logprobs"]) == ("assistant", "length", None)
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    parts = {"load_ms", "plan_ms", "queue_ms", "restore_ms", "prefill_ms", "shared_ms"}
    named = {"model", "session", "resume", "stored", "state_stored", "stopped", "ttft_ms", "tbt_ms", "context_left"}
    assert usage["ssmd"].keys() == parts | named | {"cut_messages"}
    assert usage["ssmd"]["state_stored"] is True
    assert usage["ssmd"]["ttft_ms"] == pytest.approx(sum(usage["ssmd"][part] for part in parts), abs=0.01)
    assert usage["ssmd"]["stored"] is True
    assert answer.headers["x-ssmd-session"] == usage["ssmd"]["session"]
    assert answer.headers["x-request-id"].startswith("req_")


def test_a_stream_says_the_same_as_a_whole_answer(tiny: Daemon) -> None:
    expected = whole_text(tiny.chat("the same", store=False))
    answer = tiny.chat("the same", store=False, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = chunks(answer)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert text_of(found) == expected
    assert found[-2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in found[:-1])
    assert len({(chunk["id"], chunk["object"], chunk["created"]) for chunk in found}) == 1
    assert found[0]["object"] == "chat.completion.chunk"


def test_usage_comes_only_when_asked_for(tiny: Daemon) -> None:
    found = chunks(tiny.chat(stream=True))
    assert all("usage" not in chunk and chunk["choices"] for chunk in found)


def test_each_event_leaves_when_it_is_there(tiny: Daemon) -> None:
    """Not one block at the end: the first delta is read while the generation still runs."""
    with tiny.served.connect(request(tiny.body(stream=True, max_tokens=300, store=False))) as one:
        head = b""
        while b'"content":"' not in head.replace(b'"content":""', b""):
            head += one.recv(65536)
        assert not idle(tiny)
        assert b"[DONE]" not in head
        tail = head
        while b"[DONE]" not in tail:
            tail += one.recv(65536)


def test_several_choices(tiny: Daemon) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1.5}
    whole = tiny.chat("several", store=False, **asked).json
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 36
    found = chunks(tiny.chat("several", store=False, stream=True, **asked))
    assert [text_of(found, i) for i in range(3)] == texts
    roles = [c["index"] for chunk in found for c in chunk["choices"] if "role" in c["delta"]]
    ends = [c["index"] for chunk in found for c in chunk["choices"] if c["finish_reason"]]
    assert roles == ends == [0, 1, 2]


def test_a_stop_string_ends_the_answer_before_it(tiny: Daemon) -> None:
    full = whole_text(tiny.chat("stop here", max_tokens=40, store=False))
    at = next(i for i in range(len(full) // 2, len(full) - 3) if full.index(full[i : i + 3]) == i)
    stop = full[at : at + 3]
    answer = tiny.chat("stop here", max_tokens=40, stop=["never said before", stop], store=False)
    assert whole_text(answer) == full[:at]
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    assert text_of(chunks(tiny.chat("stop here", max_tokens=40, stop=stop, store=False, stream=True))) == full[:at]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(tiny: Daemon, stream: bool) -> None:
    answer = tiny.chat(logprobs=True, top_logprobs=3, stream=stream, store=False)
    choices = [c for chunk in chunks(answer) for c in chunk["choices"]] if stream else answer.json["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert len(entries) == 12
    for entry in entries:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        ranked = [top["logprob"] for top in entry["top_logprobs"]]
        assert ranked == sorted(ranked, reverse=True)
        assert entry["logprob"] == ranked[0] <= 0  # at temperature 0 the likeliest is taken
        assert entry["token"].encode("utf-8", "replace") == bytes(entry["bytes"]) or "\ufffd" in entry["token"]


def test_a_conversation_is_not_read_again(tiny: Daemon) -> None:
    first = tiny.chat("Who crosses the bridge every morning, and why do they tell stories about it?")
    messages = [
        {"role": "user", "content": "Who crosses the bridge every morning, and why do they tell stories about it?"},
        first.json["choices"][0]["message"],
        {"role": "user", "content": "And then?"},
    ]
    answer = tiny.served.ask("POST", CHAT, tiny.body(messages=messages))
    assert answer.status == 200, answer.body
    second = answer.json["usage"]
    assert second["ssmd"]["session"] == first.headers["x-ssmd-session"]
    assert second["ssmd"]["resume"] == "exact"
    assert second["prompt_tokens_details"]["cached_tokens"] >= first.json["usage"]["prompt_tokens"]


def test_store_false_keeps_nothing(tiny: Daemon) -> None:
    before = tiny.served.ask("GET", "/ssmd/v1/sessions").json
    answer = tiny.chat("keep nothing of this", store=False)
    assert "x-ssmd-session" not in answer.headers
    assert answer.json["usage"]["ssmd"]["stored"] is False
    assert tiny.served.ask("GET", "/ssmd/v1/sessions").json == before


def test_sessions_are_listed_read_and_deleted(tiny: Daemon) -> None:
    answer = tiny.chat("a conversation to look at")
    session = answer.headers["x-ssmd-session"]
    path = f"/ssmd/v1/sessions/{session}"
    listed = tiny.served.ask("GET", "/ssmd/v1/sessions").json["data"]
    assert listed[0]["id"] == session
    assert listed[0]["title"] == "a conversation to look at"
    read = tiny.served.ask("GET", path).json
    [turn] = read["turns"]
    assert (read["head"], turn["complete"]) == (turn["id"], True)
    assert [m["content"] for m in turn["messages"]] == ["a conversation to look at", whole_text(answer)]
    assert tiny.served.ask("DELETE", path).json["deleted"] is True
    for method in ("GET", "DELETE"):
        gone = tiny.served.ask(method, path)
        assert (gone.status, gone.error["code"]) == (404, "session_not_found")
    assert tiny.chat(session=session).status == 404
    assert tiny.served.ask("GET", "/ssmd/v1/sessions/..%2f..").status in (400, 404)


def test_a_session_is_pinned(tiny: Daemon) -> None:
    session = tiny.chat("a conversation to keep").headers["x-ssmd-session"]
    path = f"/ssmd/v1/sessions/{session}"
    assert tiny.served.ask("GET", path).json["pinned"] is False
    for method, pinned in (("POST", True), ("PATCH", False)):
        changed = tiny.served.ask(method, path, {"pinned": pinned})
        assert (changed.status, changed.json["id"], changed.json["pinned"]) == (200, session, pinned)
        assert tiny.served.ask("GET", path).json["pinned"] is pinned
    read = tiny.served.ask("GET", path).json
    assert 0 < read["own_bytes"] <= read["bytes"]
    for body, code in (
        ({}, "missing_required_parameter"),
        ({"pinned": "yes"}, "invalid_value"),
        ({"pinned": None}, "invalid_value"),
        ({"pinned": True, "titel": "x"}, "unknown_parameter"),
        ([], "invalid_json"),
    ):
        refused = tiny.served.ask("POST", path, body)
        assert (refused.status, refused.error["code"]) == (400, code)
    assert tiny.served.ask("POST", "/ssmd/v1/sessions/unknown", {"pinned": True}).error["code"] == "session_not_found"


def test_a_session_gets_a_title(tiny: Daemon) -> None:
    session = tiny.chat("a conversation to name").headers["x-ssmd-session"]
    path = f"/ssmd/v1/sessions/{session}"
    changed = tiny.served.ask("PATCH", path, {"title": "Ein <b>Name</b>", "pinned": True}).json
    assert (changed["title"], changed["pinned"]) == ("Ein <b>Name</b>", True)
    assert tiny.served.ask("GET", path).json["title"] == "Ein <b>Name</b>"
    again = tiny.served.ask("PATCH", path, {"title": None}).json
    assert (again["title"], again["pinned"]) == ("a conversation to name", True)
    for title in ("", "   ", "x" * 201, "a\nb", "\x1b[31m", "a\u202eb", 5, ["x"]):
        refused = tiny.served.ask("PATCH", path, {"pinned": False, "title": title})
        assert (refused.status, refused.error["param"]) == (400, "title"), title
    assert tiny.served.ask("GET", path).json["pinned"] is True
    assert tiny.served.ask("PATCH", "/ssmd/v1/sessions/unknown", {"title": "x"}).error["code"] == "session_not_found"


def test_sessions_are_searched(tiny: Daemon) -> None:
    ids = [tiny.chat(f"Where is the lighthouse of bay {n}?").headers["x-ssmd-session"] for n in range(3)]
    path = "/ssmd/v1/sessions"
    found = tiny.served.ask("GET", f"{path}?search=LIGHTHOUSE+where").json
    assert [one["id"] for one in found["data"]] == ids[::-1]
    assert (found["object"], found["has_more"], found["after"]) == ("list", False, None)
    first = tiny.served.ask("GET", f"{path}?search=lighthouse&limit=2").json
    assert ([one["id"] for one in first["data"]], first["has_more"], first["after"]) == (ids[:0:-1], True, ids[1])
    rest = tiny.served.ask("GET", f"{path}?search=lighthouse&limit=2&after={first['after']}").json
    assert [one["id"] for one in rest["data"]] == ids[:1]
    assert tiny.served.ask("GET", f"{path}?search=lighthouse+nowhere").json["data"] == []
    assert tiny.served.ask("GET", f"{path}?search=%20").json == tiny.served.ask("GET", path).json
    for search in ("x" * 201, "+".join("abcdefghijk")):
        refused = tiny.served.ask("GET", f"{path}?search={search}")
        assert (refused.status, refused.error["param"]) == (400, "search")
    assert tiny.served.ask("GET", f"{path}?search=x&after=nobody").status == 404


def test_a_turn_tells_what_its_answer_took(tiny: Daemon) -> None:
    answers = tiny.chat("What did that take?", n=2)
    usage = answers.json["usage"]
    turns = tiny.served.ask("GET", f"/ssmd/v1/sessions/{answers.headers['x-ssmd-session']}").json["turns"]
    assert [turn["prompt_tokens"] for turn in turns] == [usage["prompt_tokens"]] * 2
    for turn in turns:
        assert turn["usage"]["completion_tokens"] == usage["completion_tokens"] == 24
        assert turn["usage"]["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert turn["usage"]["resume"] == usage["ssmd"]["resume"]
        for name in ("ttft_ms", "prefill_ms", "restore_ms"):
            assert turn["usage"][name] == pytest.approx(usage["ssmd"][name], abs=0.01)


def test_a_session_travels(tiny: Daemon, artifact: Path, tmp_path: Path) -> None:
    session = tiny.chat("a conversation that moves to another machine").headers["x-ssmd-session"]
    exported = tiny.served.ask("GET", f"/ssmd/v1/sessions/{session}/export")
    assert exported.headers["content-disposition"] == f'attachment; filename="{session}.ssmd"'
    elsewhere = tmp_path / "elsewhere"
    with daemon(artifact, elsewhere) as one:
        octets = {"content-type": "application/octet-stream"}
        imported = one.served.ask("POST", "/ssmd/v1/sessions/import", exported.body, octets)
        assert (imported.status, imported.json["id"], imported.json["imported"]) == (201, session, True)
        again = one.served.ask("POST", "/ssmd/v1/sessions/import", exported.body, octets)
        assert again.json["renamed"] is True
        for damaged in (b"", b"x", exported.body[:-1], exported.body + b"x", bytes(100)):
            refused = one.served.ask("POST", "/ssmd/v1/sessions/import", damaged, octets)
            assert (refused.status, refused.error["code"]) == (400, "invalid_session_file")
            assert str(elsewhere) not in refused.error["message"]
        assert one.served.ask("GET", "/ssmd/v1/sessions/unknown/export").status == 404
    assert not list(elsewhere.glob(".transfer-*"))
    assert tiny.store is not None
    assert not list(tiny.store.file.parent.glob(".transfer-*"))


def test_without_a_store_there_are_no_sessions(artifact: Path) -> None:
    with daemon(artifact, None) as one:
        answer = one.chat()
        assert answer.json["usage"]["ssmd"]["stored"] is False
        assert one.served.ask("GET", "/ssmd/v1/sessions").error["code"] == "no_store"


def test_models(tiny: Daemon) -> None:
    [entry] = tiny.served.ask("GET", "/v1/models").json["data"]
    assert (entry["id"], entry["object"]) == (tiny.model, "model")
    assert tiny.served.ask("GET", f"/v1/models/{tiny.model}").json == entry
    folder = tiny.engine.artifact.path.name
    assert tiny.chat(model=folder).status == 200
    for answer in (tiny.served.ask("GET", "/v1/models/gpt-9"), tiny.chat(model="gpt-9")):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert tiny.model in answer.error["message"]


def test_health_and_metrics(tiny: Daemon) -> None:
    tiny.chat()
    health = tiny.served.ask("GET", "/health").json
    assert (health["status"], health["model"], health["runtime"]) == ("ok", tiny.model, "litert")
    prometheus = tiny.served.ask("GET", "/metrics")
    assert prometheus.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"ttft" in prometheus.body
    snapshot = tiny.served.ask("GET", "/ssmd/v1/metrics").json
    assert snapshot["queue"]["running"] == 0


def test_a_daemon_that_stores_nothing_says_so(artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients go on, so the status is 200. /health reports the fault, and it is logged once."""

    def health() -> dict[str, Any]:
        answer = one.served.ask("GET", "/health")
        assert answer.status == 200
        return dict(answer.json)

    with daemon(artifact, tmp_path / "data", busy_ms=50) as one:
        with closing(sqlite3.connect(tmp_path / "data" / FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for i in range(3):
                assert one.chat(f"This is lost {i}").json["usage"]["ssmd"]["stored"] is False
            assert (health()["status"], health()["reason"]) == ("degraded", "locked")
            assert str(tmp_path) not in json.dumps(health()), "whoever asks needs no key"
            other.execute("ROLLBACK")
        snapshot = one.served.ask("GET", "/ssmd/v1/metrics").json
        assert snapshot["turns_not_stored"]["locked"] == 3
        assert b'ssmd_turns_not_stored_total{reason="locked"} 3.0' in one.served.ask("GET", "/metrics").body
        said = [r.message for r in caplog.records if r.levelno >= logging.WARNING and "not stored" in r.message]
        assert len(said) == 1, said
        assert one.chat("This is kept").json["usage"]["ssmd"]["stored"] is True
        soon(lambda: health()["status"] == "ok")
        assert "reason" not in health()
        assert len([r for r in caplog.records if "stored again" in r.message]) == 1


def test_deleting_a_running_session_is_not_a_fault_of_the_store(artifact: Path, tmp_path: Path) -> None:
    with daemon(artifact, tmp_path / "data") as one:
        first = one.chat("Hello")
        session = first.headers["x-ssmd-session"]
        said = {"role": "assistant", "content": whole_text(first)}
        messages = [{"role": "user", "content": "Hello"}, said, {"role": "user", "content": "Go on"}]
        body = one.body(messages=messages, session=session, max_tokens=300, stream=True)
        with one.served.connect(request(body)) as going_on:
            while b'"delta"' not in going_on.recv(65536):
                pass
            assert one.served.ask("DELETE", f"/ssmd/v1/sessions/{session}").status in (200, 204)
            part = b""
            while b"[DONE]" not in part:
                part = going_on.recv(65536)
        snapshot = one.served.ask("GET", "/ssmd/v1/metrics").json
        assert not any(snapshot["turns_not_stored"].values())
        assert one.served.ask("GET", "/health").json["status"] == "ok"
        assert one.served.ask("GET", f"/ssmd/v1/sessions/{session}").status == 404


# What is refused.


def test_refusals_before_anything_runs(tiny: Daemon) -> None:
    long = tiny.chat("river " * 2000)
    assert (long.status, long.error["code"], long.error["param"]) == (400, "context_length_exceeded", "messages")
    assert tiny.chat(temperature=3).error["param"] == "temperature"
    assert tiny.chat(logit_bias={"384": 1}).error["param"] == "logit_bias"
    assert tiny.chat(session="unknown").status == 404
    nan = json.dumps(tiny.body(temperature=float("nan"))).encode()
    assert tiny.served.ask("POST", CHAT, nan).error["code"] == "invalid_json"
    assert tiny.served.ask("POST", CHAT, b"x").error["code"] == "invalid_json"


def test_a_byte_order_mark_before_a_body_is_left_out(tiny: Daemon) -> None:
    body = json.dumps(tiny.body())
    assert tiny.served.ask("POST", CHAT, body.encode("utf-8-sig")).status == 200
    for name in ("utf-16", "utf-32"):
        refused = tiny.served.ask("POST", CHAT, body.encode(name)).error
        said = f"the request body is {name.upper()}; send it as UTF-8"
        assert (refused["code"], refused["message"]) == ("invalid_json", said)
    assert tiny.served.ask("GET", CHAT).status == 405
    assert tiny.served.ask("POST", "/v1/nothing", {}).error["code"] == "not_found"
    assert tiny.served.ask("POST", CHAT, tiny.body(), {"host": "evil.example"}).status == 403
    assert tiny.served.ask("POST", CHAT, tiny.body(), {"origin": "https://evil.example"}).status == 403
    assert tiny.chat("x" * (33 << 20)).status == 413


@pytest.mark.parametrize(
    "base", ["/v1/v1", "//v1", "", "/api/v1", "/v1/", "/openai/v1", "http://localhost/v1", "http://127.0.0.1:1//v1"]
)
def test_a_wrong_base_url_is_answered_as_the_right_one(base: str, tiny: Daemon) -> None:
    ask = tiny.served.ask
    answer = ask("POST", f"{base}/chat/completions", tiny.body(max_tokens=2))
    assert (answer.status, answer.json["object"]) == (200, "chat.completion")
    assert ask("GET", f"{base}/models/").json == ask("GET", "/v1/models").json
    assert ask("GET", f"{base}/models/{tiny.model}").json["id"] == tiny.model
    evil = {"origin": "https://evil.example"}
    assert ask("POST", f"{base}/chat/completions", tiny.body(), evil).status == 403
    assert ask("GET", f"{base}/chat/completions").status == 405


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("GET", "/v1/model", "; did you mean /v1/models?"),
        ("GET", "/helth", "; did you mean /health?"),
        ("GET", "/%2e%2e/etc/passwd", "; GET /v1 lists the endpoints"),
        ("GET", "/ssmd/v1/" + "x" * 5000, "; GET /v1 lists the endpoints"),
    ],
)
def test_an_unknown_path_names_the_nearest_one(method: str, path: str, said: str, tiny: Daemon) -> None:
    answer = tiny.served.ask(method, path, {} if method == "POST" else None)
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"].endswith((said, "…"))
    assert len(answer.error["message"]) <= 2001


def test_a_full_queue_says_when_to_come_back(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with daemon(artifact, None, max_running=1, max_queue=1) as one:
        decode = one.engine.program.decode

        def slowly(*given: Any) -> Any:
            """Keep the first of the 400 tokens until the others were refused."""
            assert go_on.wait(60)
            return decode(*given)

        monkeypatch.setattr(one.engine.program, "decode", slowly)
        body = request(one.body(max_tokens=400, stream=True))
        with one.served.connect(body) as first:
            first.recv(1000)  # it runs
            with one.served.connect(body):
                soon(lambda: one.engine.metrics.snapshot()["queue"]["waiting"] == 1)
                refused = one.chat()
                unread = one.served.ask("POST", CHAT, b"no JSON")
                go_on.set()
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    assert int(refused.headers["retry-after"]) > 0
    assert (unread.status, unread.error["code"]) == (503, "queue_full")
    assert "x-should-retry" not in refused.headers


# Clients that go away.


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_is_not_worked_for(tiny: Daemon, stream: bool) -> None:
    content = f"do not wait for me {stream}"
    with tiny.served.connect(request(tiny.body(content, max_tokens=450, n=4, stream=stream))) as one:
        soon(lambda: not idle(tiny))
        if stream:
            said = one.recv(1000)
            while b'"content"' not in said:  # the headers leave before the prompt is read, and nothing is stored then
                said += one.recv(1000)
        else:
            time.sleep(0.1)
    soon(lambda: idle(tiny), within_s=2)
    assert tiny.store is not None
    sessions = tiny.store.sessions
    soon(lambda: any(session.title == content for session in sessions()))  # what was sent is kept
    turns = tiny.turns(sessions()[0].id)
    assert not any(turn.complete for turn in turns)
    assert all(len(turn.ids) - turn.prompt_tokens < 400 for turn in turns)


def test_who_waits_and_goes_away_is_in_nobody_s_way(artifact: Path) -> None:
    with daemon(artifact, None, max_running=1, max_queue=2) as one:
        with one.served.connect(request(one.body(max_tokens=480, n=8, stream=True))) as first:
            first.recv(1000)
            for _ in range(3):
                waiting = [one.served.connect(request(one.body())) for _ in range(2)]
                soon(lambda: len(one.engine._queue) == 2)
                assert one.chat().status == 503
                for line in waiting:
                    line.close()
                soon(lambda: len(one.engine._queue) == 0)
            assert one.engine.metrics.snapshot()["queue"]["running"] == 1, "the first one runs still"
        soon(lambda: idle(one))


@pytest.mark.parametrize(
    "late", [b"G", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["a byte", "a request"]
)
@pytest.mark.parametrize("end", ["FIN", "RST"])
def test_who_sends_more_and_goes_away_is_not_worked_for(artifact: Path, late: bytes, end: str) -> None:
    with daemon(artifact, None, max_running=1) as one:
        asking = request(one.body(max_tokens=480, n=8))
        running = one.served.connect(asking)
        soon(lambda: one.engine.metrics.snapshot()["queue"]["running"] == 1)
        waiting = one.served.connect(asking)
        soon(lambda: len(one.engine._queue) == 1)
        for each in (running, waiting):
            each.sendall(late)
        time.sleep(0.1)
        _leave(waiting, end)
        soon(lambda: len(one.engine._queue) == 0, within_s=2)
        assert not idle(one), "the first one runs still"
        _leave(running, end)
        soon(lambda: idle(one), within_s=2)


def _leave(one: socket.socket, end: str) -> None:
    if end == "RST":
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


def test_who_does_not_read_is_given_up(artifact: Path, tmp_path: Path) -> None:
    with daemon(artifact, tmp_path, max_running=8, stall_s=0.05) as one:
        body = one.body(max_tokens=450, n=8, stream=True, logprobs=True, top_logprobs=20)
        with one.served.connect(request(body), receive_buffer=4096) as reader:
            reader.recv(1000)
            soon(lambda: idle(one), within_s=20)
            assert one.store is not None
            sessions = one.store.sessions
            soon(lambda: len(sessions()) == 1)
            assert not any(turn.complete for turn in one.turns(sessions()[0].id))


def test_a_shutdown_is_told_by_an_error_event(artifact: Path) -> None:
    with daemon(artifact, None) as one:
        with one.served.connect(request(one.body(max_tokens=450, n=4, stream=True))) as reader:
            received = reader.recv(4000)
            one.host.shutdown(0)
            while b"\r\n0\r\n\r\n" not in received:
                received += reader.recv(65536)
        last = [line for line in received.split(b"\n") if line.startswith(b"data: ")][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert one.served.ask("GET", "/health").status == 503
        assert one.chat().error["code"] == "shutting_down"


def test_a_stream_that_fails_before_its_first_token_has_an_event(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(tiny.engine.program, "decode", broken)
        answer = tiny.chat(stream=True, store=False)
    assert answer.status == 200, "its headers left when the request was accepted"
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line]
    assert [event["error"]["code"] for event in events] == ["generation_failed"]


def test_a_stream_opens_while_its_model_reads(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, goes_on = threading.Event(), threading.Event()
    prefill = tiny.engine.program.prefill

    def slowly(*given: Any) -> Any:
        reads.set()
        assert goes_on.wait(60)
        return prefill(*given)

    with monkeypatch.context() as patched, tiny.served.connect() as client:
        patched.setattr(tiny.engine.program, "prefill", slowly)
        client.sendall(request(tiny.body("Read " + "this " * 90, stream=True)))
        assert reads.wait(60)
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(65536)
        goes_on.set()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nx-ssmd-session: ses_" in head
        assert b"data:" not in head, "its first event comes with its first word"
        rest = head.partition(b"\r\n\r\n")[2]
        while not rest.endswith(b"0\r\n\r\n"):
            rest += client.recv(65536)
        assert b"data: [DONE]" in rest


def test_a_stream_sends_comments_while_it_waits(tiny: Daemon, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon(artifact, None, settings=Settings(stream_comment=0.05)) as one:
        prefill = one.engine.program.prefill

        def slowly(*given: Any) -> Any:
            time.sleep(0.5)
            return prefill(*given)

        quick = one.chat(stream=True).body
        monkeypatch.setattr(one.engine.program, "prefill", slowly)
        slow = one.chat(stream=True).body
    refused = tiny.chat("river " * 2000, stream=True)
    parts = slow.split(b"\n\n")
    comments = [part for part in parts if part == b": waiting"]
    assert len(comments) >= 3
    assert parts[: len(comments)] == comments, "none comes after its first word"
    assert len(parts) - len(comments) == len(quick.split(b"\n\n"))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("fails", [False, True], ids=["it loads", "it fails"])
def test_a_stream_opens_while_its_model_loads(fails: bool, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon(artifact, None, settings=Settings(stream_comment=0.1)) as one:
        lend = one.host.lend

        def slowly(*given: Any) -> Any:
            future: Future[Any] = Future()

            def end() -> None:
                if fails:
                    future.set_exception(Rejection("it does not load", status=503, code="model_load_failed"))
                else:
                    future.set_result(lend(*given).result(30))

            threading.Timer(0.5, end).start()
            return future

        monkeypatch.setattr(one.host, "lend", slowly)
        answer = one.chat(stream=True)
        counted = one.host.metrics.snapshot()["requests"]
    assert answer.status == 200
    assert answer.body.startswith(b": waiting\n\n: waiting\n\n")
    last = answer.body.rstrip().split(b"\n\n")[-1]
    if fails:
        assert json.loads(last[6:])["error"]["code"] == "model_load_failed"
        assert counted == {"ok": 0, "model_load_failed": 1}
    else:
        assert last == b"data: [DONE]"
        assert counted == {"ok": 1}


def test_a_connection_serves_again_after_errors_and_streams(tiny: Daemon) -> None:
    with tiny.served.connect() as one:
        for body in ({"model": "x"}, tiny.body(stream=True, store=False), tiny.body(store=False)):
            one.sendall(request(body))
            assert _read_answer(one).startswith(b"HTTP/1.1 ")


def _read_answer(one: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += one.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if b"content-length" in fields:
        while len(body) < int(fields[b"content-length"]):
            body += one.recv(65536)
    else:
        while not body.endswith(b"0\r\n\r\n"):
            body += one.recv(65536)
    return head
