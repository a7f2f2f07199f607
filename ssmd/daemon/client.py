"""The client of a running daemon, at its port or its socket, with its own token. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from ssmd.daemon.answers import Shape, fits
from ssmd.daemon.discovery import Address, DaemonError
from ssmd.machine import network

MAX_ANSWER_BYTES = 256 << 20
MAX_EVENT_BYTES = 16 << 20
_T = TypeVar("_T")
_NONE: Mapping[str, str] = MappingProxyType({})
_BROKEN = (OSError, http.client.HTTPException, ValueError)  # http.client raises ValueError for a chunk without a size


class Client:
    """A daemon, with a connection for each request. May be used from several threads."""

    def __init__(self, address: Address, timeout_s: float = 30.0) -> None:
        """timeout_s: for a whole answer; for a stream it is the time to connect."""
        self.address = address
        self._timeout_s = timeout_s

    def get(self, path: str, query: Mapping[str, str] = _NONE, *, holds: Shape = object) -> Any:
        """Request JSON. holds: the required shape of the answer.

        Raises DaemonError, with the daemon's own message if it refuses.
        """
        return self.send("GET", f"{path}?{urlencode(query)}" if query else path, holds=holds)

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, holds: Shape = object) -> Any:
        """Send JSON, or nothing, and return the JSON of the answer; None if it is empty. holds: its required shape.

        Raises DaemonError.
        """
        connection = self._sent(method, path, body)
        late = _Deadline(connection, self._timeout_s)
        try:
            with self._answer(connection) as response:
                answer = self._json(self._whole(response))
        except DaemonError:
            if not late.passed:
                raise
        finally:
            late.end()
            connection.close()
        if late.passed:  # a cut answer may look whole
            raise self._silent(TimeoutError())
        if not fits(answer, holds):
            raise self._foreign()
        return answer

    def stream(self, path: str, body: Mapping[str, Any] | None = None) -> Events:
        """Send JSON, or a GET without a body. Raises DaemonError if that cannot be sent.

        The caller waits for the answer when it reads the events: a long prompt takes minutes, and may be cut meanwhile.
        """
        connection = self._sent("GET" if body is None else "POST", path, body)
        assert connection.sock is not None
        connection.sock.settimeout(None)  # a daemon that ends closes the connection
        return Events(self, connection)

    def _sent(self, method: str, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPConnection:
        """Return a connection on which the request was sent."""
        connection = self._connection()
        raw = None if body is None else json.dumps(body).encode()
        headers = {"Host": "localhost", "Authorization": f"Bearer {self.address.token}"}
        headers |= {} if raw is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, raw, headers)
        except BaseException as err:
            connection.close()
            if isinstance(err, _BROKEN):
                raise self._silent(err) from err
            raise
        return connection

    def _answer(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """Return an answer whose head has come. Raises DaemonError if its status is not a success."""
        try:
            response = connection.getresponse()
        except _BROKEN as err:
            raise self._silent(err) from err
        if not 200 <= response.status < 300:
            with response:
                raise self._refusal(response)
        return response

    def _connection(self) -> http.client.HTTPConnection:
        if self.address.url is None:
            assert self.address.socket is not None
            return _SocketConnection(self.address.socket, self._timeout_s)
        parts = urlsplit(self.address.url)
        assert parts.hostname is not None
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self._timeout_s)

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        try:
            raw = response.read(MAX_ANSWER_BYTES + 1)
            if response.length and len(raw) <= MAX_ANSWER_BYTES:
                raise http.client.IncompleteRead(raw)
        except _BROKEN as err:
            raise self._silent(err) from err
        if len(raw) > MAX_ANSWER_BYTES:
            raise DaemonError(f"the daemon's answer is larger than {MAX_ANSWER_BYTES} bytes")
        return raw

    def _json(self, raw: bytes) -> Any:
        try:
            return json.loads(raw) if raw else None
        except (ValueError, RecursionError):
            raise self._foreign() from None

    def _refusal(self, response: http.client.HTTPResponse) -> DaemonError:
        """Build the error of a refusal, with the daemon's message if it has one."""
        answer = self._json(self._whole(response))
        error = answer.get("error") if isinstance(answer, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if not isinstance(error, dict) or not isinstance(message, str):
            return self._foreign()
        code = error.get("code")
        return DaemonError(message, status=response.status, code=code if isinstance(code, str) else None)

    def _silent(self, err: Exception) -> DaemonError:
        if isinstance(err, TimeoutError):
            why = f"has not answered within {self._timeout_s:g} s"
        else:
            why = f"does not answer ({getattr(err, 'strerror', None) or str(err) or type(err).__name__})"
        address = self.address
        return DaemonError(f"the daemon at {address.place}, process {address.pid}, {why}; `ssmd logs` may say why")

    def _foreign(self) -> DaemonError:
        return DaemonError(f"the server at {self.address.place} does not answer like a daemon of ssmd")


class Events:
    """Server-sent events as dicts, in their order. Ends after `[DONE]`, or when the stream ends.

    done: True if `[DONE]` came. An event that reports an error is an event.
    """

    def __init__(self, client: Client, connection: http.client.HTTPConnection) -> None:
        assert connection.sock is not None
        self.done = False
        self._client = client
        self._connection = connection
        self._socket: socket.socket = connection.sock
        self._response: http.client.HTTPResponse | None = None
        self._reading = self._closed = False

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the answer's headers, by name in lower case. Waits for them. Raises DaemonError without a stream."""
        response = self._head()
        return {} if response is None else {name.lower(): value for name, value in response.getheaders()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the events. Raises DaemonError if the daemon refuses, or breaks off."""
        lines: list[bytes] = []
        while (line := self._line()) is not None:
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                event, lines = b"\n".join(lines), []
                if event == b"[DONE]":
                    self.done = True
                    break
                yield self._event(event)
        self.close()

    def close(self) -> None:
        """Cut the stream; the daemon then stops generating for it.

        May be called from any thread and from a signal handler, also while a thread waits for an event: that ends then.
        """
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._reading:
            self._release()

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _head(self) -> http.client.HTTPResponse | None:
        """Return the answer once its head has come; None if the stream was cut before."""
        if self._response is None:
            self._response = self._wait(self._answer, None)
        return self._response

    def _answer(self) -> http.client.HTTPResponse:
        response = self._client._answer(self._connection)
        if response.headers.get_content_type() != "text/event-stream":
            response.close()
            raise self._client._foreign()
        return response

    def _line(self) -> bytes | None:
        """Return the next line without its end; None after the last one. Raises DaemonError."""
        response = self._head()
        line = b"" if response is None else self._wait(lambda: response.readline(MAX_EVENT_BYTES + 1), b"")
        if line.endswith(b"\n"):
            return line.rstrip(b"\r\n")
        self.close()
        if len(line) > MAX_EVENT_BYTES:
            raise DaemonError(f"an event of the daemon's answer is larger than {MAX_EVENT_BYTES} bytes")
        return None

    def _wait(self, read: Callable[[], _T], cut: _T) -> _T:
        """Return the result of `read`, or `cut` if the stream is closed. Raises DaemonError, and closes the stream."""
        self._reading = True
        try:
            return cut if self._closed else read()
        except _BROKEN as err:
            if self._closed:
                return cut
            self._closed = True
            if isinstance(err, DaemonError):
                raise
            raise DaemonError("the daemon went away in the middle of an answer") from err
        finally:
            self._reading = False
            if self._closed:
                self._release()

    def _event(self, raw: bytes) -> dict[str, Any]:
        event = self._client._json(raw)
        if not isinstance(event, dict):
            raise self._client._foreign()
        return event

    def _release(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()


class _Deadline:
    """Cuts a connection after a time: a socket's own timeout never ends if a few bytes come now and then."""

    def __init__(self, connection: http.client.HTTPConnection, seconds: float) -> None:
        assert connection.sock is not None
        self.passed = False
        self._socket: socket.socket = connection.sock  # which the connection may have given to the answer
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()

    def _cut(self) -> None:
        self.passed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = network.connect(self._path, self.timeout)
