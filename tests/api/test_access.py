"""The access log of a real daemon: a line for each request, whatever became of it, and no text of a client in it."""

from __future__ import annotations

import http.client
import json
import re
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from forked import DaemonProcess
from keyfile import written

from ssmd.model.artifact import Artifact

SECRET = "WHISPERED"
HOSTILE = f"/v1/%0a%1b[31m{SECRET}?q={SECRET}"
KEYS = "alice key-of-alice\nprobe key-of-probe read-only\n"
CHAT = "/v1/chat/completions"


def lines(log: Path) -> list[str]:
    """Return the lines of the access log without the /health requests from before the daemon was ready."""
    found = [line for line in log.read_text().splitlines() if re.match(r'\{"time|\d{4}-\d\d-\d\dT', line)]
    return [line for line in found if not re.search(r'GET"?,? ("path": ")?/health', line)]


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    given = {"authorization": "Bearer key-of-alice", "content-type": "application/json"} | headers
    connection.putrequest(method, path, skip_host="host" in headers)
    sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    for name, value in (given | {"content-length": str(len(sent))}).items():
        connection.putheader(name, value)
    connection.endheaders(sent)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"{SECRET} a story"}],
        "max_tokens": 6,
        "temperature": 0,
        **more,
    }


@pytest.mark.parametrize("written_as", ["json", "text"])
def test_every_request_has_a_line_without_its_text(
    written_as: str, artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSMD_API_KEYS_FILE", str(written(tmp_path / "keys", KEYS)))
    monkeypatch.setenv("SSMD_MAX_BODY_BYTES", "4096")
    monkeypatch.setenv("SSMD_SLOW_REQUEST", "0")
    options = ("--access-log", "--access-log-format", written_as)
    log, path = tmp_path / "data.log", artifacts["llama-f32"]
    model = Artifact.open(path).manifest.name
    with DaemonProcess(path, tmp_path / "data", *options) as daemon:
        port, statuses = daemon.port, list[int]()
        for asked in (
            partial(ask, port, "POST", CHAT, chat(model)),
            partial(ask, port, "POST", CHAT, chat(model, stream=True, unknown_field=SECRET)),
            partial(ask, port, "GET", f"/ssmd/v1/sessions?search={SECRET}"),
            partial(ask, port, "GET", f"/ssmd/v1/sessions/{SECRET}"),
            partial(ask, port, "GET", HOSTILE),
            partial(ask, port, SECRET, "/health"),
            partial(ask, port, "GET", "/v1/models", host=f"{SECRET}.example"),
            partial(ask, port, "GET", "/v1/models", authorization=f"Bearer {SECRET}"),
            partial(ask, port, "POST", CHAT, chat(model), authorization="Bearer key-of-probe"),
            partial(ask, port, "POST", CHAT, b" " * 5000),
            partial(ask, port, "POST", CHAT, chat(SECRET)),
        ):
            statuses.append(asked())
            soon(lambda: len(lines(log)) == len(statuses))
        assert statuses == [200, 200, 200, 404, 404, 405, 403, 401, 403, 413, 404]
        leave_in_the_middle(port, model)
        soon(lambda: len(lines(log)) == 12)
        found = lines(log)
    assert SECRET not in "\n".join(found)
    assert all(line.isprintable() for line in found)
    if written_as == "text":
        assert re.fullmatch(
            rf"\S+Z POST {CHAT} 200 ms=[\d.]+ received=\d+ sent=\d+ request=req_\w+ key=alice answer=gen_\w+ "
            r"session=ses_\w+ model=\S+ ttft_ms=[\d.]+ prompt_tokens=\d+ cached_tokens=0 generated_tokens=6 slow",
            found[0],
        ), found[0]
        assert found[4].split()[1:4] == ["GET", "?", "404"]
        return
    told = [json.loads(line) for line in found]
    assert [one["status"] for one in told[:11]] == statuses
    whole, stream, search, session, nowhere, method, host, wrong, probe, large, unknown = told[:11]
    assert (whole["key"], whole["path"], whole["generated_tokens"], whole["slow"]) == ("alice", CHAT, 6, True)
    assert stream["cached_tokens"] > 0
    assert stream["sent"] > 500
    assert [one["path"] for one in (search, session, nowhere)] == [
        "/ssmd/v1/sessions",
        "/ssmd/v1/sessions/{session}",
        "?",
    ]
    assert (method["method"], method["path"], method["error"]) == ("?", "/health", "method_not_allowed")
    assert [one.get("key") for one in (host, wrong, probe)] == [None, None, "probe"]
    assert [one["error"] for one in (host, wrong, probe)] == ["host_not_allowed", "invalid_api_key", "read_only_key"]
    assert [one["error"] for one in (large, unknown)] == ["body_too_large", "model_not_found"]
    assert not any("session" in one or "broken_off" in one for one in told[2:11])
    left = told[11]
    assert (left["status"], left["broken_off"], left["answer"][:4]) == (200, True, "gen_")


def leave_in_the_middle(port: int, model: str) -> None:
    """Ask for a long stream, and go away at its first bytes."""
    body = json.dumps(chat(model, stream=True, max_tokens=2000, logit_bias={"0": -100, "2": -100})).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key-of-alice\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        connection.recv(1)
