"""Connections that say nothing, half of something, or too much at once; over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import h11
import pytest
import uvicorn
from daemon import soon
from h11._receivebuffer import ReceiveBuffer
from serving import Served, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ssmd.api.generate import answer
from ssmd.api.generate.answer import ClientGone
from ssmd.api.http import connections
from ssmd.api.http.connections import LATE_BYTES, Limits, LogLimiter
from ssmd.engine.request import Delta
from ssmd.machine.network import listen_privately

WHOLE = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF = WHOLE[:-3]
WAITS = WHOLE.replace(b"/", b"/waits", 1)
LONG = b"GET /long HTTP/1.1\r\nhost: localhost\r\n"
LONG_BYTES = 64 << 20  # more than the sockets' buffers hold
go_on = threading.Event()
waiting: list[object] = []


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """/ is answered at once, /waits when the test says so, /long with many bytes; /holds holds everybody up."""
    if scope["path"] == "/holds":
        time.sleep(0.3)
    if scope["path"] == "/waits":
        waiting.append(scope["client"])
    while scope["path"] == "/waits" and not go_on.is_set():
        await asyncio.sleep(0.01)
    size = LONG_BYTES if scope["path"] == "/long" else 2
    head = [(b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for at in range(0, size, 65536):
        part = b"." * min(65536, size - at)
        await send({"type": "http.response.body", "body": part, "more_body": at + len(part) < size})


@pytest.fixture
def hurried() -> Iterator[Served]:
    """Little time and room."""
    go_on.clear()
    waiting.clear()
    with serving(_app, Limits(most=4, head_s=0.7, stall_s=1)) as one:
        yield one


def _answer(one: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\r\n\r\n.."):
        part = one.recv(65536)
        assert part, received
        received += part
    return received


def _closed(one: socket.socket) -> bool:
    """Wait for the end of a connection."""
    try:
        while one.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("begun", [b"", b"G", HALF], ids=["silent", "a letter", "half a head"])
def test_a_head_that_does_not_come_ends_the_connection(hurried: Served, begun: bytes) -> None:
    with hurried.connect(begun) as one:
        assert _closed(one)


def test_a_head_that_drips_ends_at_the_same_time(hurried: Served) -> None:
    with hurried.connect(HALF) as one, pytest.raises((BrokenPipeError, ConnectionResetError)):
        _drip(one)  # each byte is in time, the whole is not


def _drip(one: socket.socket) -> None:
    for _ in range(400):
        one.sendall(b"x")
        time.sleep(0.05)


def test_the_second_head_has_a_deadline_too(hurried: Served) -> None:
    with hurried.connect(WHOLE) as one:
        assert _answer(one)
        time.sleep(1)  # to say nothing between two requests is no half head
        one.sendall(WHOLE)
        assert _answer(one)
        one.sendall(HALF)
        assert _closed(one)
    with hurried.connect(WHOLE + HALF) as one:
        assert _answer(one)
        assert _closed(one)


def test_an_answer_that_takes_long_is_not_cut(hurried: Served) -> None:
    with hurried.connect(WAITS) as one:
        time.sleep(1.2)
        go_on.set()
        assert _answer(one)


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "later"])
def test_a_request_sent_before_the_answer_is_answered_after_it(hurried: Served, apart: bool) -> None:
    with hurried.connect(WAITS + (b"" if apart else WHOLE)) as one:
        soon(lambda: len(waiting) == 1)
        if apart:
            for byte in WHOLE:
                one.sendall(bytes([byte]))
        go_on.set()
        received = b""
        while received.count(b"\r\n\r\n..") < 2:
            received += one.recv(65536)
        assert received.count(b"HTTP/1.1 200") == 2


def test_who_sends_much_before_the_answer_is_let_go(hurried: Served) -> None:
    with hurried.connect(WAITS) as little, hurried.connect(WAITS) as much:
        soon(lambda: len(waiting) == 2)
        little.sendall(b"\r\n" * (LATE_BYTES // 2))
        with suppress(BrokenPipeError, ConnectionResetError):
            much.sendall(b"\r\n" * LATE_BYTES)
        assert _closed(much)
        go_on.set()
        assert little.recv(15) == b"HTTP/1.1 200 OK"


def test_what_follows_a_last_request_is_not_looked_at(hurried: Served) -> None:
    with hurried.connect(WAITS[:-2] + b"connection: close\r\n\r\n") as one:
        soon(lambda: len(waiting) == 1)
        one.sendall(WHOLE)
        time.sleep(0.1)
        go_on.set()
        assert _answer(one).startswith(b"HTTP/1.1 200")


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="this system does not tell who has left")
def test_what_somebody_asked_who_has_left_is_not_looked_at(hurried: Served) -> None:
    with hurried.connect(WHOLE.replace(b"/", b"/holds", 1)) as first, hurried.connect(b"") as second:
        time.sleep(0.1)  # the first is being answered: what the others do is seen all at once
        hurried.connect(WAITS.replace(b"GET", b"POST")).close()
        second.sendall(WHOLE)
        second.shutdown(socket.SHUT_WR)  # what is answered at once is
        assert _answer(first)
        assert _answer(second)
        assert hurried.ask("GET", "/").status == 200
    assert not waiting


def test_the_one_idle_for_longest_makes_room(hurried: Served) -> None:
    with hurried.connect(WAITS) as busy, hurried.connect(WHOLE) as kept:
        assert _answer(kept)
        soon(lambda: len(waiting) == 1)
        others = [hurried.connect(HALF) for _ in range(6)]
        assert _closed(kept)
        assert hurried.ask("GET", "/").status == 200
        go_on.set()
        assert _answer(busy)
    for one in others:
        one.close()


def test_where_none_is_idle_a_new_one_is_closed(hurried: Served) -> None:
    busy = [hurried.connect(WAITS) for _ in range(4)]
    soon(lambda: len(waiting) == 4)
    with hurried.connect() as one:
        assert _closed(one)
    go_on.set()
    for one in busy:
        with one:
            assert _answer(one)
    assert hurried.ask("GET", "/").status == 200


def test_bodies_that_do_not_come_make_room_for_who_has_none() -> None:
    asked: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(len(asked))
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b".."})

    begun = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nhalf"
    with serving(app, Limits(most=4)) as served:
        others = [served.connect(begun) for _ in range(4)]
        soon(lambda: len(asked) == 4)
        with served.connect() as one_more:  # of the client that has them all
            assert _closed(one_more)
        where = ("127.0.0.1", served.port)
        with socket.create_connection(where, 30, ("127.0.0.2", 0)) as honest:
            honest.sendall(begun + b"other")
            assert _answer(honest)
        assert _closed(others[0])
        others[1].sendall(b"other")
        assert _answer(others[1])
        for one in others:
            one.close()


@pytest.mark.parametrize("close", [b"", pytest.param(b"connection: close\r\n", marks=pytest.mark.full)])
def test_an_answer_that_is_not_read_is_given_up(hurried: Served, close: bytes) -> None:
    with hurried.connect(LONG + close + b"\r\n", receive_buffer=4096) as one:
        time.sleep(2.5)
        assert _length(one) < LONG_BYTES


def test_a_slow_reader_gets_all(hurried: Served) -> None:
    with hurried.connect(LONG + b"connection: close\r\n\r\n") as one:
        assert _length(one, pauses=6) > LONG_BYTES


def _length(one: socket.socket, pauses: int = 0) -> int:
    received = 0
    try:
        while part := one.recv(1 << 20):
            received += len(part)
            if pauses:
                time.sleep(0.25)
                pauses -= 1
    except ConnectionResetError:
        pass
    return received


def test_descriptors_that_run_out_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio tries again every second, here sooner, and as often as its backlog each time."""
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.2)
    seldom = LogLimiter()
    logging.getLogger("asyncio").addFilter(seldom)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients: list[socket.socket] = []

    async def accept(listening: socket.socket) -> None:
        async with await asyncio.start_server(lambda reader, writer: writer.close(), sock=listening):
            await asyncio.sleep(0.7)

    with asyncio.Runner() as runner, socket.create_server(("127.0.0.1", 0)) as listening:
        runner.get_loop()
        clients += [socket.create_connection(listening.getsockname()) for _ in range(20)]
        os.close(none := os.dup(listening.fileno()))  # the lowest that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (none, hard))
        try:
            runner.run(accept(listening))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            logging.getLogger("asyncio").removeFilter(seldom)
            for one in clients:
                one.close()
    assert len([one for one in caplog.records if "out of system resource" in one.getMessage()]) == 1


def test_a_body_of_tiny_pieces_does_not_hold_up_the_others() -> None:
    """One read may bring 40,000 pieces. They are the body, in order, and others are served between them."""
    seen, longest = hashlib.sha256(), 0.0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal longest
        beat = asyncio.create_task(watch())
        more = True
        while more:
            message = await receive()
            seen.update(message["body"])
            more = message["more_body"]
        beat.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b".."})

    async def watch() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    body = bytes(i % 251 for i in range(50_000))
    pieces = b"".join(b"1\r\n%c\r\n" % one for one in body)
    with serving(app) as one, one.connect(WHOLE[:-2] + b"transfer-encoding: chunked\r\n\r\n") as many:
        many.sendall(pieces + b"0\r\n\r\n")
        assert _answer(many)
        assert seen.digest() == hashlib.sha256(body).digest()
        many.sendall(WHOLE)
        assert _answer(many)
        assert longest < 0.05, longest  # of processor time; at once they take a quarter of a second


def test_a_head_of_many_lines_is_refused() -> None:
    lines = b"a:\r\n" * (connections.MOST_LINES + 1)
    with serving(_app) as one, one.connect(WHOLE[:-2] + lines) as many:
        assert many.recv(65536).startswith(b"HTTP/1.1 400")
        assert _closed(many)
    with serving(_app) as one:
        few = {f"x-{i}": "a" for i in range(connections.MOST_LINES - 10)}
        assert one.ask("GET", "/", headers=few).status == 200


@pytest.mark.parametrize(
    ("lines", "status"), [(connections.MOST_LINES - 1, b"204"), (connections.MOST_LINES + 1, b"400")]
)
def test_what_follows_a_body_has_as_many_lines_as_a_head_at_most(lines: int, status: bytes) -> None:
    async def read(request: Request) -> Response:
        assert await request.body() == b"a"
        return Response(status_code=204)

    body = b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    raw = WHOLE[:-2] + body + b"a:\r\n" * lines + b"\r\n"
    with serving(Starlette(routes=[Route("/", read)])) as one, one.connect(raw) as many:
        assert many.recv(65536).startswith(b"HTTP/1.1 " + status)


def test_the_parser_keeps_what_came_where_lines_are_counted() -> None:
    """It says so nowhere: with an h11 that keeps it elsewhere nothing would be counted."""
    assert type(h11.Connection(h11.SERVER)._receive_buffer) is ReceiveBuffer


def test_a_crowd_at_the_door_does_not_hold_up_who_is_inside() -> None:
    """Few are taken in before others are served again, and those outside are not sent away meanwhile."""
    open_files: list[int] = []
    all_outside = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/inside":
            all_outside.wait(10)  # nothing is taken in meanwhile
            for _ in range(100):
                open_files.append(len(os.listdir("/proc/self/fd")))
                await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b".."})

    with serving(app) as one:
        inside = one.connect(b"GET /inside HTTP/1.1\r\nhost: x\r\n\r\n")
        outside = []
        for _ in range(100):
            outside.append(socket.create_connection(("127.0.0.1", one.port), timeout=1))
            outside[-1].sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        all_outside.set()
        for each in (inside, *outside):
            each.settimeout(30)
            assert _answer(each).startswith(b"HTTP/1.1 200")
            each.close()
    grown = [after - before for before, after in pairwise(open_files)]
    assert 0 < max(grown) <= connections.AT_ONCE


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not tell")
def test_at_a_socket_clients_are_told_apart_by_process(tmp_path: Path) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    path = tmp_path / "ssmd.sock"
    ask = ["curl", "-sS", "--unix-socket", str(path), "http://localhost/"]
    with serving(app, at=listen_privately(path, 8)), socket.socket(socket.AF_UNIX) as here:
        others = [subprocess.Popen(ask) for _ in range(2)]
        assert [one.wait(30) for one in others] == [0, 0]
        here.connect(str(path))
        here.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert here.recv(100).startswith(b"HTTP/1.1 204")
    assert sorted(seen) == sorted(f"process.{pid}" for pid in (os.getpid(), *(one.pid for one in others)))


def test_who_reads_too_slowly_fills_no_disk(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(answer.log, "filters", [])
    monkeypatch.setattr(answer, "MOST_WAITING", 0)
    connections.limit(uvicorn.Config(_app, log_config=None), Limits())

    async def many() -> None:
        for _ in range(1000):
            with pytest.raises(ClientGone):
                answer.Delivery()(Delta(0, "a"))

    asyncio.run(many())
    assert len([one for one in caplog.records if "reads so slowly" in one.getMessage()]) == 30


def test_strangers_who_are_refused_fill_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are told each minute, and then how many there were more; what is not theirs is told always."""
    seldom = LogLimiter()

    def record(text: str) -> logging.LogRecord:
        return logging.LogRecord("ssmd.api.http.security", logging.INFO, "", 0, text, ("GET", "/", "no"), None)

    told = [seldom.filter(record("refused %s %s: %s")) for _ in range(1000)]
    assert told == [True] * 30 + [False] * 970
    for text in (
        "%s %s: the client went away before it had sent all",
        "request %s: the client went away",
        "request %s: the client has not read for %.0f s, given up",
    ):
        assert sum(seldom.filter(record(text)) for _ in range(1000)) == 30
    assert not seldom.filter(record("No supported WebSocket library detected. Please use ..."))
    assert all(seldom.filter(record("%s %s: %s")) for _ in range(100))
    monkeypatch.setattr("ssmd.api.http.connections._SELDOM_S", 0.0)
    late = record("refused %s %s: %s")
    assert seldom.filter(late)
    assert late.getMessage() == "refused GET /: no (970 more like it before, not written)"
