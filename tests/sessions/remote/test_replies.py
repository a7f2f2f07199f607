"""Two real daemons and a database: a retry with an Idempotency-Key that reaches the other gets the first answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from remotes import DatabasePlace
from sessions.remote.test_roaming import PATIENT, Machine, until

CLAIMS = "; import time; from ssmd.sessions.remote import claims"
QUICK = PATIENT + CLAIMS + "; claims.LEASE_S, claims.RENEW_S, claims.CLAIM_S = 2.0, 0.3, 30.0"
# Its answers begin a while after their claim, so that a test can stop it between the two.
SLOW = QUICK + (
    "; real = claims.Claims._hold"
    "\ndef hold(self, held):\n    real(self, held)\n    time.sleep(1.5)\n    return held"
    "\nclaims.Claims._hold = hold"
)
Answer = tuple[int, dict[str, str], Any]


class Caller(threading.Thread):
    """A request that is under way."""

    def __init__(self, machine: Machine, key: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.machine, self.key, self.fields = machine, key, fields
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.answer = ask(self.machine, self.key, **self.fields)

    def result(self) -> Answer:
        self.join(60)
        assert self.answer is not None
        return self.answer


def begin(machine: Machine, key: str | None, **fields: Any) -> http.client.HTTPConnection:
    """Send a request whose answer another run would not give."""
    connection = http.client.HTTPConnection("127.0.0.1", machine.daemon.port, timeout=60)
    said = [{"role": "user", "content": "Tell me of a river."}]
    body = {"model": "tiny", "messages": said, "temperature": 1.5, "max_tokens": 12, **fields}
    headers = {"content-type": "application/json"} | ({} if key is None else {"Idempotency-Key": key})
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection


def ask(machine: Machine, key: str | None, **fields: Any) -> Answer:
    with contextlib.closing(begin(machine, key, **fields)) as connection:
        response = connection.getresponse()
        raw = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, json.loads(raw) if raw[:1] == b"{" else raw.decode()


def text_of(answer: Answer) -> str:
    assert answer[0] == 200, answer
    return str(answer[2]["id"] + answer[2]["choices"][0]["message"]["content"])


@contextmanager
def pair(at: Path, artifact: Path, database: DatabasePlace, first: str = QUICK) -> Iterator[tuple[Machine, Machine]]:
    both = Machine(at / "a", artifact, database.setting), Machine(at / "b", artifact, database.setting)
    both[0].daemon.before, both[1].daemon.before = first, QUICK
    with both[0].daemon, both[1].daemon:
        name = both[0].daemon.get("/v1/models")[1]["data"][0]["id"]
        for one in both:
            one.name = name
            one.sent()
        yield both


@pytest.fixture
def artifact(artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSMD_ACK", "remote")
    return artifacts["llama-f32"]


def claimed(database: DatabasePlace) -> bool:
    return bool(database.sql("SELECT 1 FROM ssmd.reply"))


def send(machine: Machine, number: signal.Signals) -> None:
    assert machine.daemon.process is not None
    machine.daemon.process.send_signal(number)


def test_a_retry_elsewhere_gets_the_first_answer(artifact: Path, tmp_path: Path, database: DatabasePlace) -> None:
    """Whole and as a stream. Another body under the key is refused, and the answer goes with its session."""
    with pair(tmp_path, artifact, database) as (a, b):
        first = ask(a, "one", model=a.name)
        assert first[2]["usage"]["ssmd"]["remote"] == "sent"
        again = ask(b, "one", model=a.name)
        assert text_of(again) == text_of(first)
        assert again[1]["idempotent-replayed"] == "true"
        assert len(database.sql("SELECT 1 FROM ssmd.turn")) == 1
        assert ask(b, "one", model=a.name, max_tokens=13)[0] == 422
        other = ask(b, "two", model=a.name)
        assert text_of(other) != text_of(first)
        session = first[1]["x-ssmd-session"]
        done = a.command("rm", session)
        assert done.returncode == 0, done.stderr
        until(lambda: not database.sql(f"SELECT 1 FROM ssmd.reply WHERE session = '{session}'"))
        assert text_of(ask(b, "one", model=a.name)) != text_of(first)


def test_a_retry_waits_for_the_other_machine(artifact: Path, tmp_path: Path, database: DatabasePlace) -> None:
    with pair(tmp_path, artifact, database, SLOW) as (a, b):
        first = Caller(a, "one", model=a.name)
        until(lambda: claimed(database))
        second = Caller(b, "one", model=a.name)
        assert text_of(second.result()) == text_of(first.result())
        assert len(database.sql("SELECT 1 FROM ssmd.turn")) == 1


def test_a_retry_is_answered_after_a_kill(artifact: Path, tmp_path: Path, database: DatabasePlace) -> None:
    """The first daemon is killed in its stream. Then it answers as the other did."""
    with pair(tmp_path, artifact, database) as (a, b):
        asked = begin(a, "one", model=a.name, stream=True, max_tokens=400)
        response = asked.getresponse()
        assert b"data" in response.readline()
        send(a, signal.SIGSTOP)
        second = Caller(b, "one", model=a.name, stream=True, max_tokens=400)
        time.sleep(0.5)
        assert second.is_alive()
        a.daemon.kill()
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert b"[DONE]" not in response.read()
        asked.close()
        answer = second.result()
        assert answer[0] == 200
        assert "[DONE]" in answer[2]
        a.daemon.start()
        a.sent()
        again = ask(a, "one", model=a.name, stream=True, max_tokens=400)
        assert again[1]["idempotent-replayed"] == "true"
        assert identity(again) == identity(answer)


def identity(answer: Answer) -> tuple[str, str]:
    parts = [json.loads(line[6:]) for line in answer[2].splitlines() if line.startswith("data: {")]
    return parts[0]["id"], "".join(c["delta"].get("content") or "" for part in parts for c in part["choices"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_machine_that_slept_records_no_answer(
    stream: bool, artifact: Path, tmp_path: Path, database: DatabasePlace
) -> None:
    """It answers as the other did; a stream that has said another text ends with an error."""
    with pair(tmp_path, artifact, database, SLOW) as (a, b):
        first = Caller(a, "one", model=a.name, stream=stream)
        until(lambda: claimed(database))
        send(a, signal.SIGSTOP)
        try:
            second = ask(b, "one", model=a.name, stream=stream)
        finally:
            send(a, signal.SIGCONT)
        late = first.result()
        if stream:
            assert "answered_elsewhere" in late[2]
            retried = ask(a, "one", model=a.name, stream=True)
            assert identity(retried) == identity(second)
        else:
            assert text_of(late) == text_of(second)
            assert late[1]["idempotent-replayed"] == "true"
            assert text_of(ask(a, "one", model=a.name, stream=stream)) == text_of(second)
        [[session]] = database.sql("SELECT session FROM ssmd.reply")
        if stream:
            assert session == second[1]["x-ssmd-session"]


def test_a_request_with_a_key_is_answered_offline(artifact: Path, tmp_path: Path, database: DatabasePlace) -> None:
    """Each machine gives its own answer then, and says that it waits."""
    with pair(tmp_path, artifact, database) as (a, b):
        database.go_away()
        own, other = ask(a, "one", model=a.name), ask(b, "one", model=a.name)
        assert text_of(own) != text_of(other)
        assert own[2]["usage"]["ssmd"]["remote"] == other[2]["usage"]["ssmd"]["remote"] == "waiting"
        assert text_of(ask(a, "one", model=a.name)) == text_of(own)
        database.come_back()


def test_a_retry_does_not_wait_for_a_full_machine(artifact: Path, tmp_path: Path, database: DatabasePlace) -> None:
    """Its turn waits for room, perhaps for days. Each machine gives its own answer then."""
    with pair(tmp_path, artifact, database) as (a, b):
        database.sql("INSERT INTO ssmd.quota VALUES ('ssmd', '', 1)")
        own = ask(a, "one", model=a.name)
        assert own[2]["usage"]["ssmd"]["remote"] == "waiting"
        other = Caller(b, "one", model=a.name)
        other.join(20)
        assert other.answer is not None
        assert text_of(other.answer) != text_of(own)
        assert text_of(ask(a, "one", model=a.name)) == text_of(own)


def test_an_attempt_that_fails_frees_its_key(artifact: Path, tmp_path: Path, database: DatabasePlace) -> None:
    with pair(tmp_path, artifact, database, SLOW) as (a, b):
        with contextlib.closing(begin(a, "one", model=a.name)):
            until(lambda: claimed(database))
        until(lambda: not claimed(database))  # its client left
        assert ask(b, "one", model=a.name)[0] == 200
