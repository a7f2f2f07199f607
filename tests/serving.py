"""A real uvicorn on a free port, in a thread, for tests."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ssmd.api.http import connections

GRACE_S = 2.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)


@dataclass(frozen=True)
class Served:
    """An app that listens at 127.0.0.1:port."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Answer:
        """One request on a connection of its own. `body`: bytes are sent as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"content-type": "application/json"} if raw is not None else {}
        try:
            connection.request(method, path, raw, {**fields, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def connect(self, raw: bytes = b"", *, receive_buffer: int | None = None, at: str | None = None) -> socket.socket:
        """A bare connection on which `raw` was sent. at: the client's address, by which clients are told apart."""
        one = socket.socket()
        one.settimeout(30)
        if receive_buffer is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if at is not None:
            one.bind((at, 0))
        one.connect(("127.0.0.1", self.port))
        one.sendall(raw)
        return one


@contextmanager
def serving(
    app: ASGIApp, limits: connections.Limits | None = None, *, at: socket.socket | None = None
) -> Iterator[Served]:
    """At a socket that listens, else at any free port."""
    at = at or socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
    connections.limit(config, limits or connections.Limits())
    server = _Server(config)
    thread = threading.Thread(target=server.run, args=([at],), name="event-loop", daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    connections.hold([at])
    try:
        yield Served(0 if at.family == socket.AF_UNIX else at.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


class _Server(uvicorn.Server):
    """Ends some milliseconds after it is to: uvicorn's own looks ten times a second, and then sleeps as long."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers have GRACE_S to come to their end."""
        for one in (*self.servers, *(sockets or ())):
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        until = time.monotonic() + GRACE_S
        while (self.server_state.connections or self.server_state.tasks) and time.monotonic() < until:
            await asyncio.sleep(0.005)
        for task in self.server_state.tasks:
            task.cancel()
