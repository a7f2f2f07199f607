"""Limits on connections: how long one may be idle, and how many may be open. `LogLimiter` rate-limits their log lines.

uvicorn's own deadline begins only after the first answer. Here a connection is *idle* from its first moment until a
request's head is complete, and again from the end of the answer. An idle connection has a deadline. Where there are
too many connections, an idle one is closed first, then a pending upload of the client with the most pending uploads.
A connection whose request is being answered is not closed.

The event loop pays for parts, not for bytes. So a request's head has a limit of lines, and a body in tiny pieces is
parsed a few pieces at a time, with other connections served in between.

Only reading shows that a client closed its connection. So the daemon reads on while it answers a request, and keeps
the bytes for the next request. A client that sends more than LATE_BYTES of them is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssmd.machine import network
from ssmd.machine.network import place_of, process_at

log = logging.getLogger(__name__)
HEAD_S = 10.0  # deadline for a request's head: from the connection's first moment, later from the head's first byte
IDLE_S = 65  # deadline between two requests; longer than clients' own 5 to 60 s, so that the client closes first
STALL_S = 40.0  # deadline for a client that reads nothing of its answer; a stream gives up before, and logs it
MOST = 4096
EVENTS = 64  # most events parsed for one connection in its turn
REST_S = 0.001  # pause after such a turn; without it the loop would hardly release the interpreter to decoding threads
LATE_BYTES = 64 << 10  # most bytes a client may send ahead (its next request) before its answer has ended
MOST_LINES = 256  # most lines of a head, and of the trailer behind a body
AT_ONCE = 4  # most connections accepted before the open ones are served again
BACKLOG = 512  # most connections that wait in the system to be accepted
_SPARE = 64
_LINES = re.compile(rb"(?:(?!\r?\n)[^\n]*\n){%d}" % (MOST_LINES + 1))

_SELDOM_S = 60.0
TOO_MANY = "too many connections"
_LOGGERS = (
    *("asyncio", "uvicorn.error"),
    *("ssmd.api.http.connections", "ssmd.api.http.security", "ssmd.api.generate.front"),
    *("ssmd.api.generate.answer", "ssmd.api.generate.answer", "ssmd.api.own.sessions"),
    "ssmd.api.openai.responses.background",
)
_BY_STRANGERS = {  # messages that any client can cause: how often a minute each is logged
    "socket.accept() out of system resource": 1,
    "Invalid HTTP request": 1,
    "Unsupported upgrade": 1,
    "No supported WebSocket library": 0,  # logged together with the one before; there is nothing to install
    "ASGI callable returned without": 1,  # a client that does not read is given up in the middle of an answer
    TOO_MANY: 1,
    "refused ": 30,
    "%s %s: the client went away": 30,
    "request %s: the client went away": 30,
    "request %s: the client has not read": 30,
    "request %s: a follower has not read": 30,
    "a follower of a response has not read": 30,
    "a client reads so slowly": 30,
}


@dataclass(frozen=True)
class Limits:
    """Bounds for one server. `most`: connections at a time."""

    most: int = MOST
    head_s: float = HEAD_S
    stall_s: float = STALL_S

    @staticmethod
    def here() -> Limits:
        """Return limits for the file descriptors that are left when models and the database are open.

        Each connection is counted with a file: an import and an export have one.
        """
        free = network.left()
        return Limits(most=max(1, min(MOST, (free - min(_SPARE, free // 4)) // 2)))


def limit(config: Config, limits: Limits, first: Callable[[], None] = lambda: None) -> None:
    """Apply these limits to uvicorn's connections, before it starts, and rate-limit logs that any client can cause.

    first: called when a client connects while no connection was open.
    """
    of_server = {"limits": limits, "idle": {}, "awaited": {}, "first": staticmethod(first)}
    config.http = type("Connection", (_Connection,), of_server)
    config.backlog = AT_ONCE  # for asyncio this is also the number of connections accepted at a time
    config.timeout_keep_alive = IDLE_S
    keep_short()


def hold(listening: Iterable[socket.socket]) -> None:
    """Set the system's backlog of sockets that listen already: connections wait there until they are accepted."""
    for one in listening:
        one.listen(BACKLOG)


class _Lines(ReceiveBuffer):
    """The bytes received and not parsed yet. Limits a head's lines: one costs as much as thousands of bytes."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if _LINES.match(self._data):
            raise h11.RemoteProtocolError(f"more than {MOST_LINES} lines", error_status_hint=431)
        return super().maybe_extract_lines()


class _Parser(h11.Connection):
    """Parses a connection's requests. left: events left in this turn; at 0 the parser acts as if no bytes were left."""

    left = 0

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._receive_buffer = _Lines()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.left == 0:
            return h11.NEED_DATA
        self.left -= 1
        if self.their_state is h11.MUST_CLOSE:  # the client announced this as its last request
            return h11.NEED_DATA
        event = super().next_event()
        return h11.NEED_DATA if event is h11.PAUSED else event  # at PAUSED uvicorn would miss a disconnect

    @property
    def waiting(self) -> int:
        """Count the bytes received and not parsed yet."""
        return len(self._receive_buffer)


class _Flow(FlowControl):
    """Reads from a connection unless uvicorn has paused it or `held` is set while received bytes are unparsed."""

    held = False

    def pause_reading(self) -> None:
        self.read_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self.read_paused = False
        if not self.held:
            self._transport.resume_reading()

    def hold(self, held: bool) -> None:
        self.held = held
        if held or self.read_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class _Connection(H11Protocol):
    limits: Limits
    idle: dict[_Connection, None]  # this server's idle connections, the longest idle first
    awaited: dict[str, dict[_Connection, None]]  # by client, the connections with a pending upload, the oldest first
    first: Callable[[], None]
    conn: _Parser
    flow: _Flow

    _place = ""  # of its client
    _rest: asyncio.Handle | None = None
    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in the class above it
        super().connection_made(transport)
        if len(self.connections) == 1:
            self.first()
        self.conn, self.flow = _Parser(), _Flow(transport)
        process = process_at(transport.get_extra_info("socket"))
        if process is not None:  # a Unix socket's clients have no addresses: use the process
            self.client = (f"process.{process}", 0)
        self._place = "" if self.client is None else place_of(self.client[0])
        if len(self.connections) > self.limits.most and not self._make_room():
            log.warning(TOO_MANY + ": %d are open and none is idle; a new one is closed", self.limits.most)
            transport.abort()
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.pop(self, None)
        self._await_body(False)
        self._head, self._reading = _cancelled(self._head), _cancelled(self._reading)

    def data_received(self, data: bytes) -> None:
        # Drop a request whose client has hung up already, before work on it begins.
        if data.startswith(b"POST ") and network.has_hung_up(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        super().data_received(data)
        if self._is_answering() and not self.cycle.more_body and self.conn.waiting > LATE_BYTES:
            self.transport.abort()
        self._watch_head()

    def handle_events(self) -> None:
        """Parse at most EVENTS of the received events now, and the rest after other connections had their turn."""
        self.conn.left = EVENTS
        super().handle_events()
        more = self.conn.left == 0
        if more and self._rest is None:
            self._rest = self.loop.call_later(REST_S, self._go_on)
        if more != self.flow.held:
            self.flow.hold(more)
        self._await_body(self._is_answering() and self.cycle.more_body)

    def _go_on(self) -> None:
        self._rest = None
        if not self.transport.is_closing():
            self.handle_events()
            self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_body(False)
        self._watch_head()
        self._watch_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_reader()

    def _make_room(self) -> bool:
        """Close one connection to make room for this new one. Returns False if none may be closed.

        The longest idle connection goes first, unless bytes of its answer are still unsent. If none is idle, the oldest
        pending upload of the client with the most goes, if it has at least two more than the new client.
        """
        for one in self.idle:
            if one.transport.get_write_buffer_size() == 0:
                del self.idle[one]
                one.transport.abort()
                return True
        most = max(self.awaited, key=lambda place: len(self.awaited[place]), default=self._place)
        if len(self.awaited.get(most, ())) <= len(self.awaited.get(self._place, ())) + 1:
            return False
        one = next(iter(self.awaited[most]))
        one._await_body(False)
        one.transport.abort()
        return True

    def _await_body(self, awaited: bool) -> None:
        """Note if a part of the request's body is still to come."""
        mine = self.awaited.setdefault(self._place, {})
        if awaited:
            mine.setdefault(self)
        else:
            mine.pop(self, None)
        if not mine:
            del self.awaited[self._place]

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_head(self) -> None:
        if self.transport.is_closing() or self._is_answering():
            self.idle.pop(self, None)
            self._head = _cancelled(self._head)
            return
        self.idle.setdefault(self)
        if self._head is None and (self.cycle is None or self.conn.trailing_data[0]):
            self._head = self.loop.call_later(self.limits.head_s, self.timeout_keep_alive_handler)

    def _watch_reader(self) -> None:
        """Restart the deadline by which the client must have read something, if unsent bytes are left."""
        self._reading = _cancelled(self._reading)
        if size := self.transport.get_write_buffer_size():
            self._reading = self.loop.call_later(self.limits.stall_s, self._read_since, size)

    def _read_since(self, before: int) -> None:
        # While writing is paused or the connection closes, the buffer does not grow.
        stuck = self.flow.write_paused or self.transport.is_closing()
        if stuck and self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_reader()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None


def keep_short() -> None:
    """Rate-limit the log lines that any client can cause."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, LogLimiter) for one in logger.filters):
            logger.addFilter(LogLimiter())


class LogLimiter(logging.Filter):
    """Passes the messages of _BY_STRANGERS a few times a minute, and then adds the number of those left out."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # by message: (start of its minute, times seen in it)

    def filter(self, record: logging.LogRecord) -> bool:
        kind = next((start for start in _BY_STRANGERS if str(record.msg).startswith(start)), None)
        if kind is None:
            return True
        now, most = time.monotonic(), _BY_STRANGERS[kind]
        since, seen = self._seen.get(kind, (now, 0))
        if now - since >= _SELDOM_S:
            if seen > most:
                record.msg = f"{record.msg} ({seen - most} more like it before, not written)"
            since, seen = now, 0
        self._seen[kind] = (since, seen + 1)
        return seen < most
