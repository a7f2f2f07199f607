"""Connections: how long one may say nothing, and how many there may be. `Seldom` keeps what is logged of them short.

uvicorn's own deadline begins when a first answer was sent. Here a connection is *idle* from its first moment until a
request's head is whole, and again from the end of the answer. An idle one has a deadline, and goes first when there
are too many; then one whose body is still awaited, of the client that has most of these. What is answered is not
touched.

Bytes cost the event loop little, what they are parted into costs much: heads may have so many lines, and of a body in
tiny pieces only some are looked at before others have their turn.

A client that goes away is seen by reading alone. So reading goes on while a request is answered; what comes meanwhile
is kept for the next request, and whoever sends more than a little of it is let go.
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

from ssmd.machine import descriptors, hangup
from ssmd.machine.hosts import place_of
from ssmd.machine.privatesocket import process_at

log = logging.getLogger(__name__)
HEAD_S = 10.0  # for a request's head: from the connection's first moment, later from the head's first byte
IDLE_S = 65  # between two requests; clients keep theirs for 5 to 60 s, and should be the ones who let go
STALL_S = 40.0  # for an answer of which nothing is read; a stream gives up before that, and says so in the log
MOST = 4096
EVENTS = 64  # of one connection, before others have their turn
REST_S = 0.001  # and then; who only asks for the next turn hardly lets go of the interpreter, and no model decodes
LATE_BYTES = 64 << 10  # that may come after a request before its answer has ended: the next request, of who is in haste
MOST_LINES = 256  # of a head, and of what may follow a body
AT_ONCE = 4  # that are taken in before others are served again
BACKLOG = 512  # that wait in the system meanwhile
_SPARE = 64
_LINES = re.compile(rb"(?:(?!\r?\n)[^\n]*\n){%d}" % (MOST_LINES + 1))

_SELDOM_S = 60.0
TOO_MANY = "too many connections"
_LOGGERS = (
    *("asyncio", "uvicorn.error"),
    *("ssmd.api.http.connections", "ssmd.api.http.security", "ssmd.api.generate.front"),
    *("ssmd.api.generate.delivery", "ssmd.api.generate.in_flight", "ssmd.api.own.sessions"),
)
_BY_STRANGERS = {  # how often a minute each of these is written
    "socket.accept() out of system resource": 1,
    "Invalid HTTP request": 1,
    "Unsupported upgrade": 1,
    "No supported WebSocket library": 0,  # said with the one before; there is nothing to install
    "ASGI callable returned without": 1,  # who does not read is given up in the midst of an answer
    TOO_MANY: 1,
    "refused ": 30,
    "%s %s: the client went away": 30,
    "request %s: the client went away": 30,
    "request %s: the client has not read": 30,
    "request %s: who follows it has not read": 30,
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
        """Limits within what descriptors are left, when models and the database are open.

        Every connection may need a file too: an import and an export have one.
        """
        free = descriptors.left()
        return Limits(most=max(1, min(MOST, (free - min(_SPARE, free // 4)) // 2)))


def limit(config: Config, limits: Limits, first: Callable[[], None] = lambda: None) -> None:
    """Give uvicorn's connections these limits, before it starts, and keep the log of what strangers cause short.

    first: called when somebody connects while nobody was.
    """
    of_server = {"limits": limits, "idle": {}, "awaited": {}, "first": staticmethod(first)}
    config.http = type("Connection", (_Connection,), of_server)
    config.backlog = AT_ONCE  # which to asyncio also is how many it takes in at a time
    config.timeout_keep_alive = IDLE_S
    keep_short()


def hold(listening: Iterable[socket.socket]) -> None:
    """Let those that come faster than they are taken in wait in the system; when the server listens already."""
    for one in listening:
        one.listen(BACKLOG)


class _Lines(ReceiveBuffer):
    """What came and was not looked at yet. Each line of a head costs as much as thousands of its bytes."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if _LINES.match(self._data):
            raise h11.RemoteProtocolError(f"more than {MOST_LINES} lines", error_status_hint=431)
        return super().maybe_extract_lines()


class _Parser(h11.Connection):
    """A connection's requests. left: how many more events there are in this turn; then it is as if no more had come."""

    left = 0

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._receive_buffer = _Lines()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.left == 0:
            return h11.NEED_DATA
        self.left -= 1
        if self.their_state is h11.MUST_CLOSE:  # it said that this request is its last one
            return h11.NEED_DATA
        event = super().next_event()
        return h11.NEED_DATA if event is h11.PAUSED else event  # uvicorn would read no more, and see nobody leave

    @property
    def waiting(self) -> int:
        """Bytes that came and were not looked at yet."""
        return len(self._receive_buffer)


class _Flow(FlowControl):
    """Reads from a connection while neither uvicorn has enough nor `held` says that there is something to look at."""

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
    idle: dict[_Connection, None]  # of this server, the one that is idle for longest first
    awaited: dict[str, dict[_Connection, None]]  # by client those whose bodies are to come, the longest first
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
        if process is not None:  # clients are told apart by where they are: here there are no addresses
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
        # It would be seen before there is an answer.
        if data.startswith(b"POST ") and hangup.has_hung_up(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        super().data_received(data)
        if self._is_answering() and not self.cycle.more_body and self.conn.waiting > LATE_BYTES:
            self.transport.abort()
        self._watch_head()

    def handle_events(self) -> None:
        """Look at what came; where that is many events, at some of them now and at the rest after others' turns."""
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
        """Close the connection that is idle for longest, if one is, not one whose answer is still on its way; else of
        the client with most bodies to come, if these are more than of who comes now, the one awaited longest.
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
        """Note whether something is to come of the body of a request."""
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
        """Begin anew to wait for a sign that the client reads, if there is something to read."""
        self._reading = _cancelled(self._reading)
        if size := self.transport.get_write_buffer_size():
            self._reading = self.loop.call_later(self.limits.stall_s, self._read_since, size)

    def _read_since(self, before: int) -> None:
        # Nothing is added to what waits while writing is paused or the connection is closing.
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
    """Keep the log of what strangers cause short."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, Seldom) for one in logger.filters):
            logger.addFilter(Seldom())


class Seldom(logging.Filter):
    """Lets messages that strangers can cause through a few times a minute, and then tells how many there were more."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # since when, and how often

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
