"""`ssmd ps`: what it makes of the daemon's numbers, as docs/metrics.md has them.

A server of a few lines stands in for the daemon, as no daemon is in all these states at once. That one is found and
asked as it is, is tested in tests/daemon_client/test_running.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from standing import TOKEN, standing_in
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from test_server import environment

from ssmd import __version__
from ssmd.cli.daemon import _told
from ssmd.daemon.discovery import Address

SERIES: dict[str, Any] = {"last": None, "p50": None, "p95": None, "n": 0, "recent": []}


def model(name: str, state: str = "loaded", **fields: Any) -> dict[str, Any]:
    runtime = fields.get("runtime", "litert")
    what = {"id": f"{name}@{runtime}", "name": name, "runtime": runtime, "device": "cpu", "quantization": "int8"}
    how = {"state": state, "problem": None, "pinned": False, "resident_bytes": 181_200_000, "file_bytes": 137_000_000}
    when = {"loaded_at": 0.0, "load_ms": 900.0, "last_used": None, "idle_until": None}
    return {**what, **how, **when, "queue": {"waiting": 0, "running": 0}, "ttft_ms": SERIES, **fields}


def metrics(**fields: Any) -> dict[str, Any]:
    return {
        "version": __version__,
        "pid": os.getpid(),
        "started_at": time.time() - 7300,
        "state": "generating",
        "reason": "",
        "models": [
            model("smollm2", queue={"waiting": 0, "running": 1}),
            model("granite", "loading", runtime="openvino", resident_bytes=None),
            model("mamba", idle_until=time.time() + 252),
            model("pinned", pinned=True, idle_until=None),
            model("kept"),
            model("broken", "failed", problem="file 'model.tflite' is missing", resident_bytes=None),
            model("idle", "unloaded", resident_bytes=None),
        ],
        "memory": {"budget_bytes": 6_000_000_000, "used_bytes": 543_600_000, "resident_bytes": 700_000_000},
        "running": [
            {"id": "gen_1", "session": "ses_1", "model": "smollm2@litert", "phase": "decode", "fed": 30, "to_feed": 30,
             "tokens": 57, "ttft_ms": 139.2, "tokens_per_s": 41.26},
            {"id": "gen_2", "session": "ses_2", "model": "granite@openvino", "phase": "prefill", "fed": 128,
             "to_feed": 800, "tokens": 0, "ttft_ms": None, "tokens_per_s": None},
        ],
        "queue": {"waiting": 3, "running": 2},
        **fields,
    }  # fmt: skip


class Daemon:
    """A server in a daemon's place that answers with metrics."""

    def __init__(self, folder: Path) -> None:
        self.answer: Any = metrics()
        self.asked: list[str] = []
        self._folder = folder

    async def metrics(self, request: Request) -> JSONResponse:
        self.asked.append(request.headers["authorization"])
        return JSONResponse(self.answer)

    def ps(self, *arguments: str) -> str:
        done = commands.ssmd("ps", *arguments, env=environment(self._folder))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    one = Daemon(tmp_path)
    with standing_in(tmp_path / "data", Starlette(routes=[Route("/ssmd/v1/metrics", one.metrics)]), age_s=7300):
        yield one


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_what_people_read(daemon: Daemon) -> None:
    head, models, running = daemon.ps().split("\n\n")
    assert head.startswith(f"ssmd {__version__} at http://127.0.0.1:")
    assert head.endswith(f"process {os.getpid()}, for 2 h: generating, 543.6 MB of 6.0 GB for models")
    assert [cells(line) for line in models.splitlines()] == [
        ["model", "runtime", "device", "quantization", "state", "memory", "until"],
        ["smollm2@litert", "litert", "cpu", "int8", "loaded", "181.2 MB", "in use"],
        ["granite@openvino", "openvino", "cpu", "int8", "loading", "-", "-"],
        ["mamba@litert", "litert", "cpu", "int8", "loaded", "181.2 MB", "in 4 min"],
        ["pinned@litert", "litert", "cpu", "int8", "loaded", "181.2 MB", "pinned"],
        ["kept@litert", "litert", "cpu", "int8", "loaded", "181.2 MB", "for ever"],
        ["broken@litert", "litert", "cpu", "int8", "failed: file 'model.tflite' is missing", "-", "-"],
    ]
    assert [cells(line) for line in running.splitlines()] == [
        ["request", "session", "model", "phase", "tokens", "tokens/s", "first token"],
        ["gen_1", "ses_1", "smollm2@litert", "decode", "57", "41.3", "139 ms"],
        ["gen_2", "ses_2", "granite@openvino", "prefill 128/800", "0", "-", "-"],
        ["3 more wait for their turn"],
    ]
    assert daemon.asked == [f"Bearer {TOKEN}"]


def test_a_request_that_waits_is_counted_once(daemon: Daemon) -> None:
    rows = [{"id": f"gen_{n}", "phase": phase} for n, phase in enumerate(("decode", "waiting", "loading"))]
    daemon.answer = metrics(running=rows, queue={"waiting": 2, "running": 1})
    assert daemon.ps().splitlines()[-1].startswith("gen_2 ")
    daemon.answer = metrics(running=rows, queue={"waiting": 3, "running": 1})
    assert daemon.ps().splitlines()[-1] == "1 more waits for its turn"


def test_what_scripts_read(daemon: Daemon) -> None:
    read = daemon.ps("--json")
    found = json.loads(read)
    assert found["models"] == daemon.answer["models"]
    assert found["running"] == daemon.answer["running"]
    assert found["url"].startswith("http://127.0.0.1:")
    assert found["socket"] is None
    assert TOKEN not in read


def test_one_that_does_nothing(daemon: Daemon) -> None:
    daemon.answer = metrics(state="degraded", reason="disk_full", models=[], running=[], queue={"waiting": 0})
    head, rest = daemon.ps().splitlines()
    assert head.endswith("degraded (disk_full), 543.6 MB of 6.0 GB for models")
    assert rest == "no model is loaded; the first request for one loads it"


def test_nothing_that_it_says_steers_the_terminal(daemon: Daemon) -> None:
    bad = "\x1b]0;x\x07\n\u202eerror: \x9b2J"
    daemon.answer = metrics(state=bad, models=[model(bad, problem=bad)], running=[{"id": bad, "phase": bad}])
    read = daemon.ps()
    assert all(c.isprintable() or c == "\n" for c in read)
    assert read.count("\n") == 8


@pytest.mark.parametrize("answer", [None, [], 7, {}, {"program": "smollm2", "queue": {"waiting": 0, "running": 0}}])
def test_one_that_says_less(daemon: Daemon, answer: Any) -> None:
    """One of another version, say."""
    daemon.answer = answer
    assert daemon.ps().startswith(f"ssmd {__version__} at http://127.0.0.1:")


@pytest.mark.parametrize("value", [None, "x", [], {}, -1, 1e300, 10**400, True, [1, "x", None]])
def test_numbers_that_are_none(daemon: Daemon, value: Any) -> None:
    names = ("resident_bytes", "idle_until", "queue", "pinned", "state", "id", "problem")
    asked = ("id", "phase", "tokens", "tokens_per_s", "ttft_ms", "fed", "to_feed")
    daemon.answer = metrics(
        models=[model("m", **{name: value}) for name in names],
        running=[{"phase": "prefill", name: value} for name in asked],
        memory={"used_bytes": value, "budget_bytes": value},
        queue={"waiting": value},
    )
    daemon.ps()
    address = Address("http://127.0.0.1:1", None, os.getpid(), __version__, time.time(), TOKEN)
    for name in ("models", "memory", "running", "queue", "state", "reason"):
        assert _told(json.loads(json.dumps(metrics(**{name: value}))), address)


def test_it_is_quick(daemon: Daemon, tmp_path: Path) -> None:
    """Neither numpy nor the settings nor what draws tables: they take longer than the daemon's answer."""
    loaded = (
        "import sys, ssmd.cli; sys.argv = ['ssmd', 'ps']\n"
        "try: ssmd.cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'pydantic_settings', 'rich', 'httpx2', 'sqlalchemy') if m in sys.modules])"
    )
    said = subprocess.check_output([sys.executable, "-c", loaded], text=True, env=environment(tmp_path))
    assert said.endswith("\n[]\n")
