"""Costly grammars at a daemon as a process: they stop no other client, and do not delay the end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, soon
from serving import Answer, Served
from test_server import running
from whole.test_strangers import children, most_resident

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits memory and says so much of a process"
)


@pytest.fixture
def served(artifacts: TinyArtifacts, tmp_path: Path) -> Iterator[tuple[int, Served]]:
    with running(tmp_path, str(artifacts["llama-f32"])) as (process, one):
        yield process.pid, one


def body(content: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "llama", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}).encode()


def costly(number: int) -> dict[str, Any]:
    """Return a schema of remainders by 100,000,000 and more; each of them takes minutes and gigabytes."""
    least = {"type": "integer", "multipleOf": 10_007}
    return {"$ref": "#/$defs/a", "multipleOf": 10_009 + 2 * number, "$defs": {"a": least}}


class Hostile(threading.Thread):
    """A client at an address of its own that asks for a costly grammar."""

    def __init__(self, served: Served, number: int, place: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120, source_address=(place, 0))
        self._body = body(f"{number}", **(fields or {"json_schema": costly(number)}))
        self.answer: Answer | None = None
        self.sent = threading.Event()
        self.start()

    def run(self) -> None:
        with closing(self.connection), suppress(OSError):
            self.connection.request("POST", CHAT, self._body, {"content-type": "application/json"})
            self.sent.set()
            response = self.connection.getresponse()
            self.answer = Answer(response.status, {}, response.read())


def processor_s(process: int) -> float:
    """Return the processor time of a process, without its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_costly_grammars_stop_no_other_client(served: tuple[int, Served]) -> None:
    process, one = served
    assert one.ask("POST", CHAT, body("first", guided_regex="[ab]{2}")).status == 200
    spent, most = processor_s(process), most_resident(process)
    parameters = {"properties": {"n": {"$ref": "#/x", "multipleOf": 10_009}}, "x": {"multipleOf": 10_007}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    places = ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3"]
    asked = [Hostile(one, i, place) for i, place in enumerate(places)]
    asked.append(Hostile(one, 9, "127.0.0.5", tools=[tool]))
    assert all(hostile.sent.wait(10) for hostile in asked)
    for i in range(3):
        assert one.ask("POST", CHAT, body(f"beside {i}")).status == 200
        assert one.ask("POST", CHAT, body(f"beside {i}", guided_choice=["yes", "no"])).status == 200
        assert one.ask("GET", "/health").json["status"] == "ok"
    assert any(hostile.answer is None for hostile in asked)
    assert one.ask("POST", CHAT, body("after", guided_regex="[ab]{3}")).status == 200
    for hostile in asked:
        hostile.join(100)
        assert hostile.answer is not None
        assert (hostile.answer.status, hostile.answer.error["code"]) == (400, "unsupported_schema")
    assert asked[-1].answer is not None
    assert asked[-1].answer.error["param"] == "tools[0].function.parameters"
    assert processor_s(process) - spent < 4
    assert most_resident(process) - most < 64 << 20


def test_a_client_that_leaves_waits_for_no_trial(served: tuple[int, Served]) -> None:
    _, one = served
    asked = [Hostile(one, i, "127.0.0.1") for i in range(8)]
    for hostile in asked:
        assert hostile.sent.wait(10)
        assert hostile.connection.sock is not None
        hostile.connection.sock.shutdown(2)
    assert one.ask("POST", CHAT, body("after", guided_regex="[ab]{3}")).status == 200
    for hostile in asked:
        hostile.join(30)
        assert hostile.answer is None


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_end_does_not_wait_for_a_trial(sent: signal.Signals, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with running(tmp_path, str(artifacts["llama-f32"])) as (process, one):
        asked = [Hostile(one, i, f"127.0.0.{1 + i}") for i in range(3)]
        soon(lambda: bool(children(process.pid)))
        [child] = children(process.pid)
        process.send_signal(sent)
        assert process.wait(20) == 0
        for hostile in asked:
            hostile.join(5)
        assert {hostile.answer.status for hostile in asked if hostile.answer is not None} <= {503}
        assert not Path(f"/proc/{child}").exists()
