"""A proxy that loses answers: the server has given them, the client's connection ends before it gets a byte."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving import Served


class Proxy:
    """Hands each request on to `port` and, but for the first `lose` answers, each answer back."""

    def __init__(self, port: int, lose: int, lost: Callable[[], None] | None) -> None:
        self.port = port
        self.seen: list[bytes] = []  # the requests, as they came
        self._lose = lose
        self._lost = lost
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def served(self) -> Served:
        return Served(self._listening.getsockname()[1])

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                with client, contextlib.suppress(OSError):  # a server that is down: the client sees its line end
                    self._pass_on(client)

    def _pass_on(self, client: socket.socket) -> None:
        client.settimeout(60)
        raw = b""
        while b"\r\n\r\n" not in raw:
            raw += client.recv(1 << 16) or b"\r\n\r\n"
        head, _, body = raw.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        while length is not None and len(body) < int(length[1]):
            body += client.recv(1 << 16)
        self.seen.append(head + b"\r\n\r\n" + body)
        head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head) + b"\r\nconnection: close"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as server:
            server.sendall(head + b"\r\n\r\n" + body)
            answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
        if self._lose:
            self._lose -= 1
            if self._lost is not None:
                self._lost()
        else:
            client.sendall(answer)


@contextmanager
def losing(answers: int, port: int, lost: Callable[[], None] | None = None) -> Iterator[Proxy]:
    """`lost` is called when an answer came and was thrown away, before the client learns of it."""
    proxy = Proxy(port, answers, lost)
    try:
        yield proxy
    finally:
        proxy.close()
