"""A request that comes again gets the answer that it got and adds no turn: one that is named, or an SDK's retry."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, chunks, daemon, idle, request, soon, text_of
from lossy import losing
from openai_client import openai
from serving import Answer
from sqlalchemy import func, select
from starlette.datastructures import Headers
from test_server import running

from ssmd.api.generate import idempotency
from ssmd.api.generate.fair_reading import FairPool
from ssmd.api.generate.idempotency import Repeats
from ssmd.engine.persist import writer as writer_module
from ssmd.engine.persist.persistence import Persistence
from ssmd.runtime.protocol import Handle, Logits
from ssmd.sessions.rows.schema import reply
from ssmd.sessions.store import CommitResult, Store

RETRY = {"x-stainless-retry-count": "1"}
RANDOM = {"temperature": 1, "max_tokens": 8}  # an answer that another run would not give


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["granite-int8"]


@pytest.fixture(scope="module")
def tiny(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifact, tmp_path_factory.mktemp("data"), max_running=2, max_queue=2) as one:
        yield one


def named(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


def ask(one: Daemon, content: str, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return one.served.ask("POST", CHAT, one.body(content, **{**RANDOM, **fields}), headers)


def session_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return answer.headers["x-ssmd-session"]


def leave_after(one: Daemon, body: dict[str, Any], headers: str = "", events: int = 4) -> str:
    """Ask for a stream, read some of its events, go away. The session in which that was kept."""
    assert one.store is not None
    before = {s.id for s in one.store.sessions()}
    head, _, rest = request({**body, "stream": True}).partition(b"\r\n")
    with one.served.connect(head + b"\r\n" + headers.encode() + rest) as line:
        seen = b""
        while seen.count(b"data: ") < events:
            seen += line.recv(1 << 16)
    found: list[str] = []

    def kept() -> bool:
        assert one.store is not None
        found[:] = [s.id for s in one.store.sessions() if s.id not in before]
        return bool(found)

    soon(kept)
    return found[0]


def test_the_same_again(tiny: Daemon) -> None:
    first = ask(tiny, "once", named("once"), logprobs=True, top_logprobs=2, n=2)
    again = ask(tiny, "once", named("once"), logprobs=True, top_logprobs=2, n=2)
    assert again.json == first.json
    assert session_of(again) == session_of(first)
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert len(tiny.turns(session_of(first))) == 2, "its two choices"
    other = ask(tiny, "once", named("another"), logprobs=True, top_logprobs=2, n=2)
    assert session_of(other) != session_of(first)
    assert other.json["choices"] != first.json["choices"]


def test_a_stream_again(tiny: Daemon) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    first = chunks(ask(tiny, "stream", named("stream"), **options))
    again = ask(tiny, "stream", named("stream"), **options)
    found = chunks(again)
    assert again.headers["idempotent-replayed"] == "true"
    assert text_of(found) == text_of(first)
    assert (found[0], found[-2], found[-1]) == (first[0], first[-2], first[-1])
    said = [[p for c in got for choice in c["choices"] if choice["logprobs"] for p in choice["logprobs"]["content"]]
            for got in (first, found)]  # fmt: skip
    assert said[0] == said[1]
    assert len(said[0]) == 8


def test_a_final_assistant_message_is_not_given_back(tiny: Daemon) -> None:
    """The continued message is not part of the answer."""
    body = tiny.body("x", **RANDOM)
    body["messages"].append({"role": "assistant", "content": "It was"})
    first, again = (tiny.served.ask("POST", CHAT, body, named("begun")) for _ in range(2))
    assert again.json == first.json
    assert again.headers["idempotent-replayed"] == "true"


def test_another_body_under_the_same_name(tiny: Daemon) -> None:
    first = ask(tiny, "one thing", named("reused"))
    other = ask(tiny, "another thing", named("reused"))
    assert (other.status, other.error["code"], other.error["param"]) == (
        422,
        "idempotency_key_reused",
        "Idempotency-Key",
    )
    assert ask(tiny, "one thing", named("reused")).json == first.json


@pytest.mark.parametrize("key", ["", "k" * 256, "tab\there", "Gr\u00fc\u00dfe"])
def test_names_that_are_none(tiny: Daemon, key: str) -> None:
    refused = ask(tiny, "hello", named(key))
    assert (refused.status, refused.error["param"]) == (400, "Idempotency-Key")


def test_a_refused_request_does_not_use_up_its_name(tiny: Daemon) -> None:
    assert ask(tiny, "hm", named("free"), top_p=7).status == 400
    assert ask(tiny, "hm", named("free"), session="ses_none").status == 404
    assert "idempotent-replayed" not in ask(tiny, "hm", named("free")).headers


def test_the_second_waits_for_the_first(tiny: Daemon) -> None:
    answers: list[Answer] = []
    asking = [
        threading.Thread(target=lambda: answers.append(ask(tiny, "wait", named("wait"), max_tokens=150)))
        for _ in range(3)
    ]
    for one in asking:
        one.start()
    soon(lambda: bool(answers) or not idle(tiny), within_s=60)
    assert ask(tiny, "another body", named("wait")).error["code"] == "idempotency_key_reused"
    for one in asking:
        one.join()
    assert answers[0].json == answers[1].json == answers[2].json
    assert sum("idempotent-replayed" in a.headers for a in answers) == 2
    assert len(tiny.turns(session_of(answers[0]))) == 1


def test_one_that_waits_can_leave(tiny: Daemon) -> None:
    body = tiny.body("wait", temperature=1, max_tokens=200)
    raw = request(body).replace(b"\r\n", b"\r\nIdempotency-Key: leave\r\n", 1)
    first = tiny.served.connect(raw)
    soon(lambda: not idle(tiny))
    tiny.served.connect(raw).close()
    first.settimeout(60)
    assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")
    first.close()


def test_a_retry_without_a_name(tiny: Daemon) -> None:
    first = ask(tiny, "retry")
    again = ask(tiny, "retry", RETRY)
    assert again.json == first.json
    assert len(tiny.turns(session_of(first))) == 1
    on_purpose = ask(tiny, "retry", {"x-stainless-retry-count": "0"})
    assert on_purpose.json["id"] != first.json["id"]
    assert ask(tiny, "retry", RETRY).json == on_purpose.json, "the last one is meant"
    assert ask(tiny, "never asked", RETRY).status == 200
    for odd in ("-1", "x", "", "1e9", "99999"):
        assert "idempotent-replayed" not in ask(tiny, "retry", {"x-stainless-retry-count": odd}).headers


def test_a_retry_of_a_refused_request_runs(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that an earlier request of the same body got is not what it asked for."""
    first = ask(tiny, "busy")
    decode, go_on = tiny.engine.program.decode, threading.Event()

    def slowly(handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        """None of 400 tokens ends before all are there, however busy the machine is."""
        go_on.wait(0.02)
        return decode(handles, tokens)

    monkeypatch.setattr(tiny.engine.program, "decode", slowly)
    lines = [tiny.served.connect(request(tiny.body(f"load {i}", max_tokens=400, stream=True))) for i in range(2)]
    soon(lambda: tiny.engine.metrics.snapshot()["queue"]["running"] == 2)
    lines += [tiny.served.connect(request(tiny.body(f"wait {i}", stream=True))) for i in range(2)]
    soon(lambda: tiny.engine.metrics.snapshot()["queue"]["waiting"] == 2)
    assert ask(tiny, "busy").status == 503
    go_on.set()
    for line in lines:
        line.close()
    soon(lambda: idle(tiny))
    second = ask(tiny, "busy", RETRY)
    assert second.json["id"] != first.json["id"]
    assert ask(tiny, "busy", {"x-stainless-retry-count": "2"}).json == second.json


def test_refusals_of_one_body_are_bounded(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200,000, which took 0.5 ms each, and as many entries, on the event loop."""
    monkeypatch.setattr(idempotency, "MOST_FAILURES", 100)
    repeats = Repeats(tiny.host, FairPool(lambda client: False))
    steps: list[int] = []

    class Counted(deque[tuple[float, str]]):
        def __iter__(self) -> Any:
            steps.append(len(self))
            return super().__iter__()

    monkeypatch.setattr(idempotency, "deque", Counted)
    for i in range(1000):
        repeats.remember_failure(b"one body", str(i))
    assert not steps, "it walks over all of them"
    assert (len(repeats._failures[b"one body"]), repeats._failed) == (100, 100)
    assert repeats._take_failure(b"one body") == ["900"], "the oldest that is kept"
    for i in range(1000):
        repeats.remember_failure(b"%d" % i)
    assert len(repeats._failures) == repeats._failed == 100, "those of one body went first"
    assert repeats._take_failure(b"899") == []
    assert [repeats._take_failure(b"999") for _ in range(2)] == [[""], []]
    assert len(repeats._failures) == repeats._failed == 99


def test_a_failure_is_forgotten_in_time(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = Repeats(tiny.host, FairPool(lambda client: False))
    for _ in range(3):
        repeats.remember_failure(b"one body")
    time.sleep(0.01)
    monkeypatch.setattr(idempotency, "FAILURE_LASTS_S", 0.0)
    repeats.remember_failure(b"another")
    assert (list(repeats._failures), repeats._failed) == ([b"another"], 1)
    time.sleep(0.01)
    assert repeats._take_failure(b"another") == []
    assert (len(repeats._failures), repeats._failed) == (0, 0)


@pytest.mark.parametrize("header", ["", "Idempotency-Key: cut\r\n"])
def test_a_retry_takes_the_place_of_a_broken_answer(tiny: Daemon, header: str) -> None:
    body = tiny.body(f"cut {header}", temperature=1, max_tokens=300)
    session = leave_after(tiny, body, header)
    assert tiny.store is not None
    [broken] = tiny.turns(session)
    assert not broken.complete
    fields = {**body, "stream": True, "max_tokens": 300}
    again = tiny.served.ask("POST", CHAT, fields, {**RETRY, **(named("cut") if header else {})})
    text = text_of(chunks(again))
    assert session_of(again) == session
    [turn] = tiny.turns(session)
    assert (turn.complete, turn.answer.content) == (True, text)
    assert (tiny.store.session(session).turns, tiny.store.session(session).head) == (1, turn.id)


def test_a_broken_answer_that_was_continued_stays(tiny: Daemon) -> None:
    body = tiny.body("go on after the cut", temperature=1, max_tokens=300)
    session = leave_after(tiny, body)
    assert tiny.store is not None
    [broken] = tiny.turns(session)
    follow = [*body["messages"], {"role": "assistant", "content": broken.answer.content}]
    follow.append({"role": "user", "content": "And?"})
    assert session_of(tiny.chat(messages=follow)) == session
    again = tiny.served.ask("POST", CHAT, {**body, "stream": True}, RETRY)
    assert session_of(again) == session
    assert [t.parent for t in tiny.turns(session)] == [None, broken.id, None]
    assert tiny.store.session(session).turns == 3


def test_what_is_not_stored_is_not_remembered(tiny: Daemon) -> None:
    assert tiny.store is not None
    with tiny.store.reading() as connection:
        before = connection.scalar(select(func.count()).select_from(reply))
    first, again = (ask(tiny, "secret", named("secret"), store=False) for _ in range(2))
    assert first.json["id"] != again.json["id"]
    with tiny.store.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(reply)) == before


def test_another_keys_name_is_another_domain() -> None:
    def mark(owner: str) -> idempotency.RequestIdentity:
        return idempotency.read_mark(Headers({"idempotency-key": "k"}), b"{}", owner, CHAT)

    assert mark("one").key == mark("one").key
    assert mark("one").key.digest != mark("two").key.digest


@pytest.mark.parametrize("retries", [False, True])
def test_another_endpoint_asks_for_something_else(tiny: Daemon, retries: bool) -> None:
    """One body fits Ollama's prompt in a template and a raw completion, another one chats and warm beginnings."""
    prompt = {"model": tiny.model, "prompt": f"a {retries}", "stream": False}
    system = {"model": tiny.model, "messages": [{"role": "system", "content": f"{retries} " * 20}], "max_tokens": 4}
    for first, second, body in (("/api/generate", "/v1/completions", prompt), (CHAT, "/ssmd/v1/warm", system)):
        header = RETRY if retries else named(first)
        assert tiny.served.ask("POST", first, body, header).status == 200
        soon(lambda: idle(tiny))
        answer = tiny.served.ask("POST", second, body, header)
        assert "idempotent-replayed" not in answer.headers
        assert answer.status == (200 if retries else 422), answer.body
        again = tiny.served.ask("POST", first, body, header)
        assert again.headers["idempotent-replayed"] == "true"


def test_deleted_with_its_session(tiny: Daemon) -> None:
    first = ask(tiny, "delete me", named("deleted"), logprobs=True)
    assert tiny.served.ask("DELETE", f"/ssmd/v1/sessions/{session_of(first)}").status == 200
    again = ask(tiny, "delete me", named("deleted"), logprobs=True)
    assert "idempotent-replayed" not in again.headers
    assert session_of(again) != session_of(first)


def test_after_a_restart(artifact: Path, tmp_path: Path) -> None:
    with daemon(artifact, tmp_path / "data") as one:
        first = ask(one, "restart", named("kept"))
        alike = ask(one, "restart, unnamed")
    with daemon(artifact, tmp_path / "data") as one:
        assert ask(one, "restart", named("kept")).json == first.json
        assert ask(one, "restart, unnamed", RETRY).json == alike.json
        assert one.store is not None
        assert sum(s.turns for s in one.store.sessions()) == 2


def test_its_time_ends(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon(artifact, tmp_path / "data") as one:
        assert one.store is not None
        monkeypatch.setattr(idempotency, "NAMED_LASTS", timedelta(microseconds=1))
        first = ask(one, "short", named("short"))
        monkeypatch.undo()
        again = ask(one, "short", named("short"))
        assert again.json["id"] != first.json["id"]
        with one.store.reading() as connection:
            assert connection.scalar(select(func.count()).select_from(reply)) == 1, "the old one went"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("key", [None, "from-the-sdk"])
def test_the_openai_client_loses_an_answer(tiny: Daemon, stream: bool, key: str | None) -> None:
    body = tiny.body(f"lost {stream} {key}", **RANDOM, stream=stream)
    if key is not None:
        body["extra_headers"] = named(f"{key} {stream}")
    with losing(2, tiny.served.port) as proxy:
        got = openai("retried", proxy.served.url, {"body": body, "max_retries": 2})
    assert got["retries"] == 2
    assert len(proxy.seen) == 3
    assert got["headers"]["idempotent-replayed"] == "true"
    [turn] = tiny.turns(got["headers"]["x-ssmd-session"])
    said = text_of(got["answer"]) if stream else got["answer"]["choices"][0]["message"]["content"]
    assert turn.answer.content == said


def test_killed_between_commit_and_answer(artifact: Path, tmp_path: Path) -> None:
    """The turn is written, the client has not heard of it, the daemon is dead: the retry finds it."""
    with running(tmp_path, str(artifact)) as (process, served):

        def kill() -> None:
            process.kill()
            process.wait()

        with losing(1, served.port, kill) as proxy:
            model = served.ask("GET", "/v1/models").json["data"][0]["id"]
            body = {"model": model, "messages": [{"role": "user", "content": "Survive"}], "max_tokens": 8}
            asked = {"body": {**body, "logit_bias": {"0": -100, "2": -100}}, "max_retries": 8}
            got: list[Any] = []
            asking = threading.Thread(target=lambda: got.append(openai("retried", proxy.served.url, asked)))
            asking.start()
            process.wait(timeout=60)
            with running(tmp_path, str(artifact)) as (_, again):
                proxy.port = again.port
                asking.join()
    [answer] = got
    assert answer["headers"]["idempotent-replayed"] == "true"
    store = Store.open(tmp_path / "data")
    [session] = store.sessions()
    [turn] = store.turns(session.id)
    assert turn.answer.content == answer["answer"]["choices"][0]["message"]["content"]
    store.close()


def test_an_answer_that_could_not_be_stored_is_not_replayed(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 0.4)
    with daemon(artifact, tmp_path / "data", busy_ms=500) as one:
        assert one.store is not None
        earlier = ask(one, "locked")
        other = sqlite3.connect(one.store.file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        lost = ask(one, "locked")
        assert isinstance(one.engine._persistence, Persistence)
        one.engine._persistence._writer.flush()  # until it gave up: it waits a little longer than the client
        other.close()
        assert lost.json["usage"]["ssmd"]["stored"] is False
        again = ask(one, "locked", RETRY)
        assert again.json["id"] not in (earlier.json["id"], lost.json["id"])
        assert again.json["usage"]["ssmd"]["stored"] is True


@pytest.mark.parametrize("n", [1, 2])
def test_a_reply_says_that_its_state_came_after_its_text(
    n: int, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 60)
    with daemon(artifact, tmp_path / "data") as one:
        assert isinstance(one.engine._persistence, Persistence)
        one.engine._persistence._writer.pace.note(8 << 20, 600.0)  # so the text goes first
        # Seeded: one answer in 30 has bytes that are no text, and its end is read again when idle.
        first, again = (ask(one, "slowly", named("slowly"), n=n, seed=0) for _ in range(2))
        assert first.json["usage"]["ssmd"]["state_stored"] is True
        assert again.headers["idempotent-replayed"] == "true"
        assert again.json == first.json


def test_a_retry_of_an_answer_that_was_given_up_runs(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was told that it is not stored, and lost the answer: it is not there, and comes once."""
    with daemon(artifact, tmp_path / "data") as one:
        assert one.store is not None
        commit = one.store.commit

        def slowly(*args: Any, **fields: Any) -> CommitResult:
            time.sleep(0.5)
            return commit(*args, **fields)

        monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 0.05)
        monkeypatch.setattr(writer_module, "TEXT_PATIENCE_S", 0.1)
        monkeypatch.setattr(one.store, "commit", slowly)
        first = ask(one, "slow disk")
        assert first.json["usage"]["ssmd"]["stored"] is False
        monkeypatch.undo()
        again = ask(one, "slow disk", RETRY)
        assert again.json["usage"]["ssmd"]["stored"] is True
        assert again.json["id"] != first.json["id"]
        assert [s.turns for s in one.store.sessions()] == [1]


def test_a_failure_inside_does_not_use_up_the_name(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("as a bug would")

    monkeypatch.setattr(tiny.engine, "submit", fails)
    assert ask(tiny, "a bug", named("bug")).status == 500
    monkeypatch.undo()
    body = tiny.body("a bug", **RANDOM)
    assert tiny.served.ask("POST", CHAT, body, named("bug"), timeout=15).status == 200
