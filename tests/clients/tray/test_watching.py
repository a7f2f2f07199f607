"""Watching daemons: real ones that answer, end and are killed; and servers that are none, old, slow or hostile."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon, idle, soon
from serving import serving
from several import LONG
from standing import TOKEN, found_at, standing_in
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from test_server import long_stream, running
from watched import QUICK, Seen, metrics

from ssmd.app import create_app
from ssmd.config import Settings
from ssmd.machine.network import listen_privately
from ssmd_tray.history import History
from ssmd_tray.seeing import ViewBuilder
from ssmd_tray.view import Icon
from ssmd_tray.watching import METRICS, STREAM


@pytest.fixture(scope="module")
def served(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], tmp_path_factory.mktemp("watched")) as one:
        yield one


def test_a_daemon_that_answers(served: Daemon, tmp_path: Path) -> None:
    """Over its stream: idle, each step of an answer, idle; and the lines get the values that came meanwhile."""
    seeing = ViewBuilder()
    with found_at(tmp_path, served.url), Seen(tmp_path) as seen:
        first = seen.wait(lambda s: s.found is not None)
        assert (first.how, seeing.view(first).icon) == ("stream", Icon.IDLE)
        served.chat(max_tokens=400, **LONG)
        soon(lambda: idle(served))
        last = seen.wait(lambda s: s.found is not None and s.found["state"] == "idle" and bool(s.found["last"]))
    views = [seeing.view(sight) for sight in seen.sights]
    assert Icon.GENERATING in [view.icon for view in views]
    at_work = next(view for view in views if view.requests and view.requests[0].id)
    assert at_work.requests[0].id is not None
    assert at_work.requests[0].id.startswith("gen_")
    shown = seeing.view(last)
    assert shown.icon == Icon.IDLE
    assert shown.ttft.last.endswith("ms")
    assert shown.ttft.points
    assert shown.tbt.points
    assert shown.base_url == f"{served.url}/v1"


def test_killed_in_the_middle_of_an_answer_and_back(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """With a key set: the tray has the daemon's own token."""
    data, key = tmp_path / "data", {"SSMD_API_KEY": "k" * 20}
    data.mkdir(mode=0o700)
    artifact, seeing = artifacts["mamba-f32"], ViewBuilder()
    with Seen(data) as seen:
        assert "no daemon runs" in seen.wait(lambda s: s.found is None).problem
        with running(tmp_path, str(artifact), extra={"SSMD_API_KEY": ""}) as (process, one):
            first = seen.wait(lambda s: s.found is not None)
            assert first.process == process.pid
            with long_stream(one, artifact.name, tokens=40_000):  # which no machine ends between two polls
                seen.wait(lambda s: seeing.view(s).icon == Icon.GENERATING)
                process.kill()
                killed = time.monotonic()
                away = seen.wait(lambda s: s.found is None)
                assert away.at - killed < 10, "it is seen at once"
                process.wait()
                seen.wait(lambda s: s.process is None and "no daemon runs" in s.problem)
        with running(tmp_path, str(artifact), extra=key) as (process, _):
            again = seen.wait(lambda s: s.found is not None)
            assert (again.process, again.how) == (process.pid, "stream")
            assert seeing.view(again).icon == Icon.IDLE
            process.send_signal(signal.SIGSTOP)  # it hangs, and its sockets do not
            hung = seen.wait(lambda s: s.found is None)
            assert "has not answered within 0.5 s" in hung.problem
            assert (hung.process, seeing.view(hung).icon) == (process.pid, Icon.AWAY)
            process.send_signal(signal.SIGCONT)
            seen.wait(lambda s: s.found is not None)
            process.terminate()
            seen.wait(lambda s: s.found is None and s.process is None)


def test_at_a_socket(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with (
        daemon(artifacts["llama-f32"], None) as one,
        listen_privately(path, 5) as at,
        serving(create_app(one.host, Settings()), at=at),
        found_at(tmp_path / "data", None, socket=path),
        Seen(tmp_path / "data") as seen,
    ):
        sight = seen.wait(lambda s: s.found is not None)
    view = ViewBuilder().view(sight)
    assert (sight.how, view.base_url) == ("stream", None)
    assert "need a port" in view.why_no_url


def test_where_nobody_is_looks_grow_rare(tmp_path: Path) -> None:
    with Seen(tmp_path) as seen:
        time.sleep(1.5)
        times = [sight.at for sight in seen.sights]
        between = [b - a for a, b in pairwise(times)]
        assert 4 <= len(between) <= 7, between
        for found, wanted in zip(between, (0.05, 0.1, 0.2, 0.4, 0.4), strict=False):
            assert wanted <= found < wanted + 0.15, between
        looks = len(seen.sights)
        seen.watch.look()
        soon(lambda: len(seen.sights) >= looks + 3, within_s=1)


class Scripted:
    """A daemon of a few lines. stream: None, a status, or events without end."""

    def __init__(self, answer: Any, stream: Any = 404, every_s: float = 0.0) -> None:
        self.answer, self.stream, self.every_s = answer, stream, every_s
        self.asked: list[tuple[str, float]] = []
        self.app = Starlette(routes=[Route(METRICS, self.metrics), Route(STREAM, self.events)])

    async def metrics(self, request: Request) -> Response:
        self.asked.append((METRICS, time.monotonic()))
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        return self.answer if isinstance(self.answer, Response) else JSONResponse(self.answer)

    async def events(self, request: Request) -> Response:
        self.asked.append((STREAM, time.monotonic()))
        if isinstance(self.stream, int):
            return error(self.stream)

        async def lines() -> AsyncIterator[bytes]:
            for _ in range(100_000):
                for event in self.stream:
                    yield event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
                    await asyncio.sleep(self.every_s)

        return StreamingResponse(lines(), media_type="text/event-stream")

    def times(self, path: str) -> list[float]:
        return [at for asked, at in self.asked if asked == path]


def error(status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": "you may not", "type": "x", "param": None, "code": "x"}}, status)


def test_one_without_a_stream_is_polled(tmp_path: Path) -> None:
    """An older one; often while it generates, and rarely while it does not. Its version is told."""
    one = Scripted(metrics("idle"))
    with standing_in(tmp_path, one.app, version="0.0.9"), Seen(tmp_path) as seen:
        sight = seen.wait(lambda s: s.found is not None)
        assert sight.how == "polled"
        assert "the daemon is ssmd 0.0.9, this is" in ViewBuilder().view(sight).notice
        one.asked.clear()
        time.sleep(0.9)
        rare = len(one.asked)
        one.answer = metrics("generating")
        seen.wait(lambda s: s.found is not None and s.found["state"] == "generating")
        one.asked.clear()
        time.sleep(0.9)
        often = len(one.asked)
    assert 3 <= rare <= 5
    assert 9 <= often <= 19
    assert one.times(STREAM) == []


@pytest.mark.parametrize("stream", [[b"data: [1]\n\n"], [b"data: {\n\n"], 500])
def test_one_whose_stream_is_none(tmp_path: Path, stream: Any) -> None:
    """It is polled, and its stream is tried again from time to time."""
    one = Scripted(metrics(), stream)
    with standing_in(tmp_path, one.app), Seen(tmp_path, replace(QUICK, stream_again=0.25)) as seen:
        seen.wait(lambda s: s.how == "polled")
        time.sleep(0.75)
    assert 2 <= len(one.times(STREAM)) <= 5
    assert len(one.times(METRICS)) <= 9


@pytest.mark.parametrize(("status", "said"), [(401, "you may not"), (503, "you may not"), (200, "does not speak")])
def test_one_that_refuses(tmp_path: Path, status: int, said: str) -> None:
    one = Scripted(JSONResponse([1]) if status == 200 else error(status), stream=status if status != 200 else 404)
    with standing_in(tmp_path, one.app), Seen(tmp_path) as seen:
        sight = seen.wait(lambda s: s.found is None and s.address is not None)
        assert said in sight.problem
        view = ViewBuilder().view(sight)
        assert (view.icon, view.answers, view.runs) == (Icon.AWAY, False, True)
        time.sleep(0.75)
    assert len(one.times(METRICS)) <= 6, "it is asked ever less often"


def test_one_that_never_stops_talking(tmp_path: Path) -> None:
    """It is read no faster than people look, and what they see is not old."""
    one = Scripted(metrics(), [metrics("generating", models=[])])
    with standing_in(tmp_path, one.app), Seen(tmp_path) as seen:
        seen.wait(lambda s: s.how == "stream")
        time.sleep(1)
    assert len(seen.sights) <= 1.5 / QUICK.events


def test_a_stream_that_falls_silent_is_asked_about(tmp_path: Path) -> None:
    one = Scripted(metrics("idle"), [metrics("generating")], every_s=60)
    with standing_in(tmp_path, one.app), Seen(tmp_path) as seen:
        seen.wait(lambda s: s.how == "stream")
        seen.wait(lambda s: s.how == "polled" and s.found is not None and s.found["state"] == "idle")
    assert len(one.times(STREAM)) == 1


@pytest.mark.parametrize(
    "said", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n\r\n<html>", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 99999]
)
def test_what_is_no_daemon(tmp_path: Path, said: bytes) -> None:
    with bare(said) as url, found_at(tmp_path, url), Seen(tmp_path) as seen:
        sight = seen.wait(lambda s: s.found is None and s.address is not None)
        assert sight.problem
        assert TOKEN not in sight.problem


@contextmanager
def bare(said: bytes) -> Iterator[str]:
    """Serve the same bytes to each connection, then hang up."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)

        def serve() -> None:
            while not ended.is_set():
                with suppress(TimeoutError, OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        ended.set()
        thread.join()


def test_a_file_that_is_not_believed(tmp_path: Path) -> None:
    with found_at(tmp_path, "http://127.0.0.1:9"), Seen(tmp_path) as seen:
        (tmp_path / "daemon.json").write_text("{}")
        assert "is not trusted" in seen.wait(lambda s: "trusted" in s.problem).problem


def test_it_ends_at_once(served: Daemon, tmp_path: Path) -> None:
    with found_at(tmp_path, served.url):
        with Seen(tmp_path) as seen:
            seen.wait(lambda s: s.how == "stream")
            begin = time.monotonic()
        assert time.monotonic() - begin < 1


def test_lines_of_the_last_minutes() -> None:
    def series(n: int, *recent: float) -> dict[str, Any]:
        return {"since_start": {"n": n}, "recent": list(recent)}

    line = History()
    line.add(series(2, 1.0, 2.0), 100.0)
    assert line.points(100.0) == (), "of what came before nobody knows when"
    line.add(series(4, 1.0, 2.0, 10.0, 30.0), 100.5)
    line.add(series(5, 10.0, 30.0, 50.0), 100.9)
    line.add(series(5, 10.0, 30.0, 50.0), 101.5)
    assert [(point.age_s, point.ms) for point in line.points(102.0)] == [(2.0, 30.0)], "a mean for each second"
    line.restart()
    line.add(series(1, 7.0), 200.0)
    assert [point.ms for point in line.points(200.0)] == [30.0, 7.0]
    for second in range(1000):
        line.add(series(2 + second, 1.0), 201.0 + second)
    assert len(line.points(1201.0)) == 300
    assert len(line.points(9999.0)) == 0


@pytest.mark.parametrize("bad", [None, "x", -1, 1e300, float("nan"), [], {}, [None, "x", -5]])
def test_a_series_that_is_none(bad: Any) -> None:
    line = History()
    for n, recent in ((1, bad), (bad, [1.0]), (3, [bad]), (10**15, [1.0])):
        line.add({"since_start": {"n": n}, "recent": recent}, 1.0)
        line.add({"since_start": bad, "recent": recent}, 1.0)
    assert all(point.ms >= 0 for point in line.points(1.0))
