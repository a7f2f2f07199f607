"""A proxy in front of a daemon, which records its clients' requests and the fields that the daemon ignored."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")  # headers of one connection


@dataclass(frozen=True)
class Exchange:
    """One request. ignored: the fields that the daemon says it ignored."""

    path: str
    body: dict[str, Any]
    status: int
    ignored: tuple[str, ...]


class Proxy:
    """Listens at `port` of this machine and hands on to the daemon at another one."""

    def __init__(self, port: int, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges
        self.port = port

    def taken(self) -> list[Exchange]:
        """Return the requests since the last call, without those that have no body."""
        found = self._exchanges.copy()
        del self._exchanges[: len(found)]
        return found


@contextlib.contextmanager
def overheard(daemon_port: int) -> Iterator[Proxy]:
    exchanges: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._hand_on(b"")

        def do_POST(self) -> None:
            self._hand_on(self.rfile.read(int(self.headers.get("content-length", 0))))

        def _hand_on(self, body: bytes) -> None:
            upstream = http.client.HTTPConnection("127.0.0.1", daemon_port, timeout=300)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            with contextlib.closing(upstream), contextlib.suppress(ConnectionError):  # a client that leaves
                upstream.request(self.command, self.path, body or None, headers)
                answer = upstream.getresponse()
                ignored = (answer.getheader("x-ssmd-ignored") or "").split(", ")
                if body:
                    given = json.loads(body)
                    exchanges.append(Exchange(self.path, given, answer.status, tuple(filter(None, ignored))))
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.end_headers()
                while part := answer.read1(65536):
                    self.wfile.write(part)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Proxy(server.server_address[1], exchanges)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
