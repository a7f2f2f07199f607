"""Asking a daemon, and what comes of servers that are none or that break off."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, daemon, idle, soon
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.daemon import client as module
from ssmd.daemon.client import Client
from ssmd.daemon.discovery import Address, DaemonError
from ssmd.machine.network import listen_privately

TOKEN = "t" * 43
RESET = b"a reset in place of an end"
STREAM = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"


@pytest.fixture(scope="module")
def served(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], tmp_path_factory.mktemp("client")) as one:
        yield one


def client(url: str | None, path: Path | None = None, timeout_s: float = 20) -> Client:
    return Client(Address(url, path, os.getpid(), "0.1.0", 0.0, TOKEN), timeout_s)


@contextmanager
def answering(*parts: str | bytes, wait: threading.Event | None = None) -> Iterator[Client]:
    """A server that answers one request with these bytes, waits, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                for part in parts:
                    if part is RESET:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        time.sleep(0.2)  # what was sent before is read
                        return
                    connection.sendall(part.encode() if isinstance(part, str) else part)
                if wait is not None:
                    wait.wait(20)

        thread = threading.Thread(target=serve)
        thread.start()
        yield client(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=2)
        if wait is not None:
            wait.set()
        thread.join()


def test_json_and_refusals(served: Daemon) -> None:
    one = client(served.url)
    assert one.get("/v1/models")["data"][0]["id"] == served.model
    assert one.get("/ssmd/v1/sessions", {"limit": "1"})["data"] == []
    answer = one.send("POST", CHAT, served.body(max_tokens=2))
    assert answer["usage"]["completion_tokens"] == 2
    with pytest.raises(DaemonError, match="there is no model 'x' here") as refused:
        one.send("POST", CHAT, served.body(model="x"))
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    session = answer["usage"]["ssmd"]["session"]
    assert one.send("PATCH", f"/ssmd/v1/sessions/{session}", {"pinned": True})["pinned"] is True
    one.send("DELETE", f"/ssmd/v1/sessions/{session}")


def test_what_is_sent(tmp_path: Path) -> None:
    async def echo(request: Request) -> JSONResponse:
        sent = (await request.body()).decode()
        return JSONResponse(
            {**request.headers, "path": str(request.url.path), "query": request.url.query, "body": sent}
        )

    app = Starlette(routes=[Route("/{any:path}", echo, methods=["GET", "POST"])])
    path = tmp_path / "x.sock"
    with listen_privately(path, 5) as one, serving(app, at=one):
        got = client(None, path).get("/a", {"q": "x & y"})
        assert (
            got.items() >= {"path": "/a", "query": "q=x+%26+y", "body": "", "authorization": f"Bearer {TOKEN}"}.items()
        )
        got = client(None, path).send("POST", "/b", {"ü": [1]})
        assert (got["host"], got["content-type"], json.loads(got["body"])) == (
            "localhost",
            "application/json",
            {"ü": [1]},
        )


def test_a_stream(served: Daemon) -> None:
    with client(served.url).stream(CHAT, served.body(stream=True, max_tokens=5)) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        assert events.headers["x-ssmd-session"].startswith("ses_")
        found = list(events)
    assert events.done
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(DaemonError, match="there is no model"):
        next(iter(client(served.url).stream(CHAT, served.body(stream=True, model="x"))))
    with pytest.raises(DaemonError, match="does not answer like a daemon"):
        list(client(served.url).stream("/v1/models"))


def test_a_stream_that_is_cut_stops_the_answer(served: Daemon) -> None:
    """By its reader between two events, and by another thread while the reader waits."""
    for cut_by_another in (False, True):
        events = client(served.url).stream(CHAT, served.body(stream=True, n=4, max_tokens=450))
        came = iter(events)
        next(came)
        assert not idle(served)
        if cut_by_another:
            threading.Timer(0.05, events.close).start()
            assert len(list(came)) < 4 * 450
        else:
            events.close()
            assert list(came) == []
        assert not events.done
        soon(lambda: idle(served))


def test_a_stream_is_cut_before_it_begins() -> None:
    """As when Ctrl-C comes while the model reads a long prompt."""
    with answering(wait=threading.Event()) as one:
        events = one.stream("/x", {})
        threading.Timer(0.2, events.close).start()
        begin = time.monotonic()
        assert list(events) == []
        assert time.monotonic() - begin < 10
        assert events.headers == {}


def test_a_stream_may_say_nothing_for_longer_than_the_timeout() -> None:
    wait = threading.Event()
    with answering(STREAM, ': begin\n\nevent: x\nid: 1\ndata: {\ndata:  "a": 1}\n\n', wait=wait) as one:
        one._timeout_s = 0.1
        threading.Timer(0.5, wait.set).start()
        events = one.stream("/x")
        assert list(events) == [{"a": 1}]
        assert not events.done


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["SSH-2.0-OpenSSH\r\n"], "does not answer"),
        ([], "does not answer"),
        (["HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{"], "does not answer"),
        (["HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n{"], "does not answer"),
        (["HTTP/1.1 200 OK\r\n\r\n<html>"], "does not answer like"),
        (["HTTP/1.1 200 OK\r\n\r\n", b"[" * 100_000], "does not answer like"),
        (["HTTP/1.1 404 Not Found\r\n\r\n<html>"], "does not answer like"),
        (["HTTP/1.1 404 Not Found\r\n\r\n[1]"], "does not answer like"),
        (['HTTP/1.1 500 No\r\n\r\n{"error": {"message": 1}}'], "does not answer like"),
        (['HTTP/1.1 302 Found\r\nlocation: http://203.0.113.9/\r\n\r\n{"error": "x"}'], "does not answer like"),
    ],
)
def test_what_is_no_daemon(parts: list[str | bytes], said: str) -> None:
    with answering(*parts) as one, pytest.raises(DaemonError, match=said) as error:
        one.get("/x")
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([STREAM, "data: {\n\n"], "does not answer like"),
        ([STREAM, "data: [1]\n\n"], "does not answer like"),
        ([STREAM, "data: {}\n\n", RESET], "went away in the middle"),
        ([STREAM, "data: " + "x" * 3000], "larger than 2000"),
    ],
)
def test_what_is_no_stream(parts: list[str | bytes], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENT_BYTES", 2000)
    with answering(*parts) as one, one.stream("/x") as events, pytest.raises(DaemonError, match=said):
        list(events)


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 2000)
    with answering("HTTP/1.1 200 OK\r\n\r\n" + " " * 3000) as one, pytest.raises(DaemonError, match="larger than 2000"):
        one.get("/x")


def test_nobody_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    for one in (client(f"http://127.0.0.1:{port}"), client(None, tmp_path / "gone.sock")):
        for ask in (lambda: one.get("/x"), lambda: one.stream("/x")):  # noqa: B023 - called here
            with pytest.raises(DaemonError, match=rf"process {os.getpid()}, does not answer \((Conn|No such)") as said:
                ask()
            assert said.value.status is None


def test_one_that_says_nothing() -> None:
    with answering(wait=threading.Event()) as one:
        one._timeout_s = 0.2
        with pytest.raises(DaemonError, match=r"has not answered within 0\.2 s"):
            one.get("/x")


@pytest.mark.parametrize("begin", ["HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"])
def test_one_that_drips(begin: str) -> None:
    """It is never silent for long, and has never said all."""
    gone = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(begin.encode())
            while not gone.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: drip(server.accept()[0]))
        thread.start()
        try:
            one = client(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3)
            with pytest.raises(DaemonError, match=r"has not answered within 0\.3 s"):
                one.get("/x")
            assert not gone.is_set()
        finally:
            gone.set()
            thread.join()


def test_it_is_quick_to_import() -> None:
    """`ssmd ps` takes as long as this, and little more."""
    loaded = (
        "import sys, ssmd.daemon.client; heavy = ('numpy', 'pydantic', 'sqlalchemy', 'starlette', 'httpx2', 'typer');"
        "print([m for m in heavy if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "[]\n"
