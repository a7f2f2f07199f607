"""A large file on its way to a client: how many there are, how fast they must be taken, and what they leave free."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon, soon
from serving import Answer, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from ssmd.api.http.connections import Limits
from ssmd.api.own import sessions
from ssmd.api.own.sessions import MOST_OF_ONE, PassingFile, removed

LONG_BYTES = 64 << 20  # more than the sockets' buffers hold


@pytest.mark.parametrize("reads", [0, 512])
def test_an_export_that_is_not_read_or_in_drops_leaves_no_file(tmp_path: Path, reads: int) -> None:
    """The connection drops a client that reads nothing; the export drops one that reads too slowly."""
    file = tmp_path / "export"

    async def export(request: Request) -> PassingFile:
        file.write_bytes(b"." * LONG_BYTES)
        held = contextlib.ExitStack()
        held.enter_context(removed(file))
        return PassingFile(file, held, within_s=1 if reads else 1000)

    app = Starlette(routes=[Route("/long", export)])
    raw = b"GET /long HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(app, Limits(stall_s=1000 if reads else 1)) as one, one.connect(raw, receive_buffer=4096) as client:
        soon(file.exists)

        def gone() -> bool:
            if reads:
                client.recv(reads)
            return not file.exists()

        soon(gone, within_s=60)


def test_an_export_that_is_read_slowly_but_well_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LEAST_BYTES", 2 << 20)
    file = tmp_path / "export"
    file.write_bytes(b"." * (size := LONG_BYTES // 2))

    async def export(request: Request) -> PassingFile:
        return PassingFile(file, contextlib.ExitStack(), within_s=0.8)

    app = Starlette(routes=[Route("/long", export)])
    raw = b"GET /long HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    received = 0
    with serving(app) as one, one.connect(raw) as client:
        while part := client.recv(4 << 20, socket.MSG_WAITALL):
            received += len(part)
            time.sleep(0.2)
    assert received > size


@pytest.fixture
def large(artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon all whose exports are large."""

    def export(store: object, session: str, file: Path, **_: Any) -> None:
        file.touch()
        os.truncate(file, LONG_BYTES)

    monkeypatch.setattr(sessions, "export_session", export)
    with daemon(artifacts["mamba-f32"], tmp_path) as one:
        yield one


def test_few_exports_are_on_their_way_at_a_time(large: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST", MOST_OF_ONE + 1)
    with contextlib.ExitStack() as stack:

        def on_its_way(address: str) -> socket.socket:
            one = stack.enter_context(_export(large, address))
            assert one.recv(15) == b"HTTP/1.1 200 OK"
            return one

        mine = [on_its_way("127.0.0.1") for _ in range(MOST_OF_ONE)]
        _is_refused(large.served.ask("GET", "/ssmd/v1/sessions/s/export"))
        on_its_way("127.0.0.2")
        with _export(large, "127.0.0.3") as third:
            assert third.recv(12) == b"HTTP/1.1 503"
        assert len(list(tmp_path.glob("*.ssmd"))) == MOST_OF_ONE + 1
        mine.pop().close()
        soon(lambda: len(list(tmp_path.glob("*.ssmd"))) == MOST_OF_ONE)
        on_its_way("127.0.0.1")
    soon(lambda: not list(tmp_path.glob("*.ssmd")))


def _export(one: Daemon, address: str) -> socket.socket:
    made = socket.socket()
    made.settimeout(30)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.bind((address, 0))
    made.connect(("127.0.0.1", one.served.port))
    made.sendall(b"GET /ssmd/v1/sessions/s/export HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return made


def _is_refused(answer: Answer) -> None:
    assert (answer.status, answer.error["code"]) == (503, "exports_full")
    assert int(answer.headers["retry-after"]) > 0


def test_an_export_leaves_room_for_the_turns_of_others(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(artifacts["mamba-f32"], tmp_path) as one:
        path = f"/ssmd/v1/sessions/{one.chat().headers['x-ssmd-session']}/export"
        assert one.served.ask("GET", path).status == 200
        monkeypatch.setattr(sessions, "SPARE_BYTES", 1 << 50)
        for _ in range(MOST_OF_ONE + 1):
            refused = one.served.ask("GET", path)
            assert (refused.status, refused.error["code"]) == (507, "storage_error")
            assert "free" in refused.error["message"]
            assert str(tmp_path) not in refused.error["message"]
        assert not list(tmp_path.glob("*.transfer-*"))
