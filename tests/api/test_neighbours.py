"""Every POST of openapi.json by sixty clients at once, beside another client: a short form of benchmarks/neighbours.py.

Work of the sixty is held at the gate, so that nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon, idle, request, soon
from endpoints import BODIES, LEFT_OUT, Sizes, Target, requests

from ssmd.api.generate.fair_reading import AT_ONCE, FairPool
from ssmd.api.openapi import described
from ssmd.api.operations import OPERATIONS
from ssmd.machine import memory

CROWD, OTHER = "127.0.0.1", "127.0.0.2"  # clients are told apart by address
COUNT = 60
SMALL = Sizes(text=6_000, ids=1_500, words=20)
LOOP_MS = 15.0  # most processor time of the event loop for one request of the sixty, and for its body
MORE_MB = 200
PATHS = sorted(
    path for path, methods in described(OPERATIONS)["paths"].items() if "post" in methods and path not in LEFT_OUT
)


class Gate:
    """Holds the crowd's work at the gate."""

    def __init__(self) -> None:
        self.begun = 0
        self.open = threading.Event()
        self.shut = False
        self._run, self._counting = FairPool.run, threading.Lock()

    async def run(self, pool: FairPool, work: Callable[[], Any], client: str, *more: Any, **options: Any) -> Any:
        """Take the place of FairPool.run."""

        def held() -> Any:
            with self._counting:
                self.begun += 1
            assert self.open.wait(60)
            return work()

        return await self._run(pool, held if self.shut and client == CROWD else work, client, *more, **options)


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], tmp_path_factory.mktemp("data"), max_queue=2 * COUNT) as one:
        yield one


@pytest.fixture(scope="module")
def asked(tiny: Daemon) -> dict[str, bytes]:
    """A request for each path."""
    session = tiny.chat("Keep this.").headers["x-ssmd-session"]
    file = tiny.served.ask("GET", f"/ssmd/v1/sessions/{session}/export").body
    document = tiny.served.ask("GET", "/openapi.json").json
    return dict(requests(document, Target(tiny.model, session, file, SMALL)))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()

    async def run(pool: FairPool, *given: Any, **options: Any) -> Any:
        return await made.run(pool, *given, **options)

    monkeypatch.setattr(FairPool, "run", run)
    yield made
    made.open.set()


@pytest.mark.parametrize("path", PATHS)
def test_sixty_at_once_leave_others_their_turn(tiny: Daemon, asked: dict[str, bytes], gate: Gate, path: str) -> None:
    soon(lambda: idle(tiny))
    before, spent = memory.resident() or 0, _loop_ms()
    with tiny.served.connect(request(tiny.body(stream=True, max_tokens=64)), at=OTHER) as stream:
        gate.shut = True
        crowd = [tiny.served.connect(asked[path], at=CROWD) for _ in range(COUNT)]
        statuses: list[int] = []
        answers = threading.Thread(target=lambda: statuses.extend(map(_status, crowd)))
        answers.start()
        soon(lambda: gate.begun == AT_ONCE or len(statuses) == COUNT, within_s=30)
        assert gate.begun or "requestBody" not in described(OPERATIONS)["paths"][path]["post"], (
            "it reads bodies past the gate"
        )

        assert b"data: [DONE]" in _whole(stream), "a stream goes on"
        for other in ("/health", "/metrics", "/v1/models", "/openapi.json"):
            with tiny.served.connect(f"GET {other} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode(), at=OTHER) as one:
                assert _status(one) == 200, other
        with tiny.served.connect(request(tiny.body(max_tokens=1)), at=OTHER) as one:
            assert _status(one) == 200, "a chat of another client"
        assert gate.begun in (0, AT_ONCE), "of the sixty few are worked on at a time"

        gate.open.set()
        answers.join(60)
    assert len(statuses) == COUNT
    assert set(statuses) <= {200, 201, 202, 400, 403, 404, 501}, "each gets its answer"
    assert (memory.resident() or 0) - before < MORE_MB << 20
    if sys.platform == "linux":
        assert (_loop_ms() - spent) / COUNT < LOOP_MS, "the event loop does the work itself"
    for one in crowd:
        one.close()


def test_a_new_endpoint_needs_a_body() -> None:
    document: dict[str, Any] = {"paths": {path: {"post": {}} for path in (*BODIES, *LEFT_OUT)}}
    on = Target("tiny", "ses_x", b"file", SMALL)
    assert {path for path, _ in requests(document, on)} == BODIES.keys()
    document["paths"]["/v1/new"] = {"post": {}}
    assert "/v1/new" in dict(requests(document, on)), "one that takes none is in by default"
    document["paths"]["/v1/new"] = {"post": {"requestBody": {}}}
    with pytest.raises(LookupError, match="has no body for POST /v1/new: add to BODIES"):
        list(requests(document, on))
    del document["paths"]["/v1/new"], document["paths"]["/tokenize"]
    with pytest.raises(LookupError, match=r"names /tokenize: openapi\.json has no such POST"):
        list(requests(document, on))


def _status(one: socket.socket) -> int:
    one.settimeout(60)
    head = one.recv(1 << 16)
    return int(head.split(b" ", 2)[1]) if head else 0


def _whole(one: socket.socket) -> bytes:
    one.settimeout(60)
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        part = one.recv(1 << 16)
        assert part, found
        found += part
    return found


def _loop_ms() -> float:
    """Processor time that the daemon's event loop has used, ms."""
    if sys.platform != "linux":
        return 0.0
    [thread] = [one for one in threading.enumerate() if one.name == "event-loop"]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) * 1e3
