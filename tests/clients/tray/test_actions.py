"""Actions of the tray: on real daemons that load, start and end, and on servers that offer more or less."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import TinyArtifacts
from daemon import soon
from noted import note_all
from several import LLAMA, Several, models_folder, several
from standing import found_at, standing_in
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from test_server import environment

from ssmd.daemon.discovery import DaemonError, find, running
from ssmd_tray import actions, starting
from ssmd_tray.doing import MOST, ActionRunner, Outcome
from ssmd_tray.starting import Command, command_of


@pytest.fixture(scope="module")
def served(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    with several(models_folder(artifacts, tmp_path_factory.mktemp("actions") / "models")) as one:
        yield one


def test_models(served: Several, tmp_path: Path) -> None:
    with found_at(tmp_path, served.served.url):
        assert actions.load(tmp_path, LLAMA) == f"{LLAMA} is loaded"
        assert served.row(LLAMA)["state"] == "loaded"
        actions.pin(tmp_path, LLAMA, True)
        assert served.row(LLAMA)["pinned"] is True
        actions.pin(tmp_path, LLAMA, False)
        assert actions.unload(tmp_path, LLAMA).startswith(LLAMA)
        soon(lambda: served.row(LLAMA)["state"] == "unloaded")
        with pytest.raises(DaemonError, match="there is no model"):
            actions.load(tmp_path, "x y")
    with pytest.raises(DaemonError, match="no daemon answers"):
        actions.load(tmp_path, LLAMA)


class Scripted:
    """A daemon of a few lines: answers to a path are those that it was given, else 404 as of an older one."""

    def __init__(self, **answers: Response) -> None:
        self.asked: list[tuple[str, str]] = []
        self._answers = answers
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        self.asked.append((request.scope["raw_path"].decode(), (await request.body()).decode()))
        return self._answers.get(request.url.path.rpartition("/")[2]) or refused(404, "not_found")


def refused(status: int, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": "not here", "type": "x", "param": None, "code": code}}, status)


def test_stop_a_request(tmp_path: Path) -> None:
    one = Scripted(stop=JSONResponse({"id": "gen_1", "object": "request.stopped"}, 202))
    with standing_in(tmp_path, one.app):
        assert actions.stop_request(tmp_path, "gen_1") == "the answer was stopped"
        actions.stop_request(tmp_path, "../../stop?x")
    assert [path for path, _ in one.asked] == [
        "/ssmd/v1/requests/gen_1/stop",
        "/ssmd/v1/requests/..%2F..%2Fstop%3Fx/stop",
    ]
    with standing_in(tmp_path, Scripted(stop=refused(404, "request_not_found")).app):
        assert actions.stop_request(tmp_path, "gen_1") == "that answer is over already"
    with (
        standing_in(tmp_path, Scripted().app, version="0.0.9"),
        pytest.raises(DaemonError, match=r"ssmd 0\.0\.9, cannot stop"),
    ):
        actions.stop_request(tmp_path, "gen_1")
    with standing_in(tmp_path, Scripted(stop=refused(403, "x")).app), pytest.raises(DaemonError, match="not here"):
        actions.stop_request(tmp_path, "gen_1")


def test_the_page(tmp_path: Path) -> None:
    ticket = "A-z_0" * 8
    one = Scripted(tickets=JSONResponse({"ticket": ticket, "expires_in": 60}))
    with standing_in(tmp_path, one.app) as url:
        assert actions.page(tmp_path) == f"{url}/#ticket={ticket}"
    assert one.asked == [("/ssmd/v1/tickets", "{}")]
    with standing_in(tmp_path, Scripted().app), pytest.raises(DaemonError, match="has no page"):
        actions.page(tmp_path)
    for bad in (7, None, "short", "x" * 5000, "javascript:alert(1) " * 3):
        answer = JSONResponse({"ticket": bad})
        with standing_in(tmp_path, Scripted(tickets=answer).app), pytest.raises(DaemonError, match="gives no ticket"):
            actions.page(tmp_path)


def test_the_page_needs_a_port(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as at:
        at.bind(str(path))
        with found_at(tmp_path / "data", None, socket=path), pytest.raises(DaemonError, match="page needs a port"):
            actions.page(tmp_path / "data")


def test_start_restart_stop(artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is started again has the options that it had."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    data, artifact = tmp_path / "data", str(artifacts["llama-f32"])
    data.mkdir(mode=0o700)
    note_all([artifact], data)
    command = Command((sys.executable, "-m", "ssmd", "serve", "--threads", "1", artifact), tmp_path)
    try:
        first = starting.start(data, command)
        assert running(data) == first.pid
        told = command_of(first.pid)
        assert told is not None
        assert (told.arguments[1:], told.folder) == (command.arguments[1:], tmp_path)
        with pytest.raises(DaemonError, match="another ssmd daemon"):
            actions.start(data)
        said = actions.restart(data)
        second = find(data)
        assert second is not None
        assert said == f"the daemon answers at {second.place}, process {second.pid}"
        assert second.pid != first.pid
        again = command_of(second.pid)
        assert again is not None
        assert again.arguments == told.arguments
        with ThreadPoolExecutor() as threads:
            restarted = threads.submit(actions.restart, data)
            soon(lambda: find(data) is None)
            said = actions.stop(data)  # what was asked for last is how it is in the end
            third = re.search(r"process (\d+)", restarted.result())
            assert third is not None
            assert said == f"the daemon, process {third[1]}, has ended"
        assert find(data) is None
    finally:
        with contextlib.suppress(DaemonError):
            actions.stop(data)


def test_start_takes_the_port_that_the_last_daemon_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    data = tmp_path / "data"
    try:
        actions.start(data)
        first = find(data)
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        soon(lambda: find(data) is None)
        actions.start(data, first.url)
        second = find(data)
        assert second is not None
        assert (second.url, second.pid != first.pid) == (first.url, True)
        actions.stop(data)
        taken = urlsplit(str(first.url)).port
        assert taken is not None
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", taken))
            one.listen()
            actions.start(data, first.url)
            third = find(data)
        assert third is not None
        assert third.url != first.url, "another program has it now"
    finally:
        with contextlib.suppress(DaemonError):
            actions.stop(data)


def test_a_port_is_not_shared_to_see_whether_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """SO_REUSEADDR: on Windows a bind beside a program that listens would succeed with it."""
    given: list[tuple[int, ...]] = []

    class Noted(socket.socket):
        def setsockopt(self, *option: Any) -> None:
            given.append(option)
            super().setsockopt(*option)

    monkeypatch.setattr(socket, "socket", Noted)
    with socket.create_server(("127.0.0.1", 0)) as one:
        given.clear()
        for platform, options in (("win32", 0), ("linux", 1)):
            monkeypatch.setattr(sys, "platform", platform)
            assert not actions._is_free(one.getsockname()[1])
            assert len(given) == options
            given.clear()


def test_one_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own words are told."""
    for name, value in environment(tmp_path, SSMD_QUOTA="much").items():
        monkeypatch.setenv(name, value)
    data = tmp_path / "data"
    with pytest.raises(DaemonError, match=r"the daemon did not start: .*much"):
        actions.start(data)
    with pytest.raises(DaemonError, match="cannot start /nowhere/python"):
        starting.start(data, Command(("/nowhere/python", "serve")))
    silent = Command((sys.executable, "-c", "import time; time.sleep(2)"))
    with pytest.raises(DaemonError, match="does not answer after 0 s"):
        starting.start(data, silent, longest_s=0.3)


def test_what_is_no_daemon_has_no_command() -> None:
    assert command_of(os.getpid()) is None
    assert command_of(1 << 30) is None


def test_each_is_done_once_at_a_time() -> None:
    came: list[Outcome] = []
    wait = threading.Event()
    doing = ActionRunner(came.append)

    def slow() -> str:
        wait.wait(10)
        return "done"

    def fails() -> str:
        raise DaemonError("no")

    assert doing.do("slow", slow)
    assert not doing.do("slow", slow)
    assert doing.busy("slow")
    assert doing.do("fails", fails)
    soon(lambda: came == [Outcome("fails", "no", True)])
    more = [doing.do(str(i), slow) for i in range(MOST + 3)]
    assert more.count(True) == MOST - 1
    wait.set()
    soon(lambda: len(came) == MOST + 1)
    assert Outcome("slow", "done", False) in came
    assert not doing.busy("slow")


def test_many_clicks_make_one_request(tmp_path: Path) -> None:
    async def slow(_: Request) -> Response:
        time.sleep(0.3)
        asked.append(1)
        return JSONResponse({"state": "loaded"})

    asked: list[Any] = []
    came: list[Outcome] = []
    doing = ActionRunner(came.append)
    with standing_in(tmp_path, Starlette(routes=[Route("/{path:path}", slow, methods=["POST"])])):
        for _ in range(10):
            doing.do("load m", lambda: actions.load(tmp_path, "m"))
        soon(lambda: len(came) == 1)
    assert len(asked) == 1
