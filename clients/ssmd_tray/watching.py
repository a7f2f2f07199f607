"""The watch on a daemon: its metrics as they change, over its stream, else by polling, and its absence.

Times are of the monotonic clock, so that setting the system's clock has no effect.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmd.daemon import discovery
from ssmd.daemon.client import Client, Events
from ssmd.daemon.discovery import Address, DaemonError

METRICS = "/ssmd/v1/metrics"
STREAM = "/ssmd/v1/metrics/stream"
_A_SECOND = "?interval=1"  # between two events of one state: each costs the answers some time
_NO_STREAM = (404, 405, 406, 501)  # of a daemon that has none


@dataclass(frozen=True)
class Paces:
    """Seconds between checks of a daemon, and for which it may be silent."""

    generating: float = 1.0  # between polls
    idle: float = 5.0
    away: float = 1.0  # before the first look for a daemon; each next wait is twice as long
    away_most: float = 30.0
    events: float = 0.2  # least time between events of the stream: a faster daemon is not read faster
    told: float = 1.0  # between reports of one state: drawing them takes processor time from answers
    silent_generating: float = 3.0  # of the stream, before the daemon is requested
    silent: float = 15.0
    answer: float = 5.0
    stream_again: float = 60.0  # after it was polled because its stream broke


@dataclass(frozen=True)
class Observation:
    """The daemon's state at a moment. found: its metrics; None: it is away, and `problem` says why.

    at: seconds of the monotonic clock. process: id of the process that uses the data directory, or None. how: "stream",
    "polled" or "".
    """

    at: float
    found: Mapping[str, Any] | None = None
    address: Address | None = None
    process: int | None = None
    problem: str = ""
    how: str = ""


class Watch:
    """A watcher that follows the daemon of a data directory in a thread, and reports each sight there."""

    def __init__(self, data_dir: Path, saw: Callable[[Observation], None], paces: Paces | None = None) -> None:
        self._data_dir = data_dir
        self._saw = saw
        self._paces = Paces() if paces is None else paces
        self._changed = threading.Condition()
        self._ended = self._called = False
        self._backoff_s = self._paces.away
        self._polled: tuple[Address, float] | None = None  # one whose stream is of no use, and until when
        self._events: Events | None = None
        self._thread = threading.Thread(target=self._watch, name="ssmd-tray-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it and wait for that. Not from `saw`."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            events = self._events
        if events is not None:
            events.close()
        self._thread.join(self._paces.answer + 1)

    def look(self) -> None:
        """Look now, however long there was nothing to see."""
        with self._changed:
            self._called = True
            self._changed.notify_all()

    def _watch(self) -> None:
        while not self._ended:
            begin = time.monotonic()
            try:
                seen = self._round()
            except DaemonError as err:
                seen = Observation(time.monotonic(), problem=str(err))
            if seen is not None and not self._ended:
                self._saw(seen)
            if time.monotonic() - begin > self._paces.away:  # it was there for a while
                self._backoff_s = self._paces.away
                if seen is None:  # and may have gone: that is looked at now
                    continue
            self._sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, self._paces.away_most)

    def _round(self) -> Observation | None:
        """Follow the daemon while it is there; then why it is not. Raises DaemonError if it cannot be looked for."""
        address = discovery.find(self._data_dir)
        if address is None:
            process = discovery.running(self._data_dir)
            if process is None:
                return Observation(time.monotonic(), problem=f"no daemon runs on {self._data_dir}")
            self._backoff_s = self._paces.away  # it will be there soon
            return Observation(time.monotonic(), process=process, problem="a daemon starts, ends, or repairs")
        client = Client(address, self._paces.answer)
        try:
            if self._polled is None or self._polled[0] != address or time.monotonic() > self._polled[1]:
                self._follow(client)
                return None  # it reported its end, or the end of the stream: the next look shows which
            self._poll(client)
        except DaemonError as err:
            with contextlib.suppress(DaemonError):
                if discovery.find(self._data_dir) is None:
                    return Observation(time.monotonic(), problem=f"the daemon, process {address.pid}, has gone")
            return Observation(time.monotonic(), None, address, address.pid, str(err))
        return None

    def _follow(self, client: Client) -> None:
        """Report the stream's events until it ends. Raises DaemonError if neither it nor the daemon answers."""
        reading = _StreamReader(client.stream(STREAM + _A_SECOND), self._changed, self._paces.events)
        with self._changed:
            self._events = reading.events
        came = False
        try:
            while not self._ended:
                event = reading.next(self._patience(reading.last), self)
                if event is not None:
                    came = True
                    self._tell(event, client, "stream")
                    reading.rest(self._paces.told, self, event.get("state"))
                elif reading.error is not None:
                    if came and reading.error.status not in _NO_STREAM:
                        raise reading.error
                    self._ask(client)  # which fails where all does
                    again = float("inf") if reading.error.status in _NO_STREAM else time.monotonic()
                    self._polled = client.address, again + self._paces.stream_again
                    return
                elif reading.over:
                    return
                elif not self._ended:
                    self._ask(client)
        finally:
            reading.events.close()
            with self._changed:
                self._events = None

    def _patience(self, last: Mapping[str, Any] | None) -> float:
        """Return the seconds that the stream may be silent before the daemon is requested."""
        idle = last is not None and last.get("state") != "generating"
        return self._paces.silent if idle else self._paces.silent_generating

    def _poll(self, client: Client) -> None:
        """Ask until it does not answer, or its stream may be tried again."""
        assert self._polled is not None
        while not self._ended and time.monotonic() <= self._polled[1]:
            found = self._ask(client)
            self._sleep(self._paces.generating if found.get("state") == "generating" else self._paces.idle)

    def _ask(self, client: Client) -> Mapping[str, Any]:
        found = client.get(METRICS)
        if not isinstance(found, dict):
            raise DaemonError(f"what answers at {client.address.place} does not speak as a daemon of ssmd does")
        self._tell(found, client, "polled")
        return found

    def _tell(self, found: Mapping[str, Any], client: Client, how: str) -> None:
        self._backoff_s = self._paces.away
        if not self._ended:
            self._saw(Observation(time.monotonic(), found, client.address, client.address.pid, "", how))

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._called, seconds)
            if self._called:
                self._backoff_s = self._paces.away
            self._called = False


class _StreamReader:
    """A stream that is read in a thread of its own, of which the youngest event counts."""

    def __init__(self, events: Events, changed: threading.Condition, between_s: float) -> None:
        self.events = events
        self.last: Mapping[str, Any] | None = None
        self.error: DaemonError | None = None
        self.over = False
        self._new: Mapping[str, Any] | None = None
        self._changed = changed
        self._between_s = between_s
        self._thread = threading.Thread(target=self._read, name="ssmd-tray-stream", daemon=True)
        self._thread.start()

    def next(self, within_s: float, watch: Watch) -> Mapping[str, Any] | None:
        """Return the newest event that was not taken yet; None if none comes in this time, or none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self.over or watch._ended or watch._called, within_s)
            watch._called = False
            event, self._new = self._new, None
            return event

    def rest(self, seconds: float, watch: Watch, state: object) -> None:
        """Wait while the daemon stays in this state and `look` is not called. `next` returns the newest event then."""

        def over() -> bool:
            other = self._new is not None and self._new.get("state") != state
            return other or self.over or watch._ended or watch._called

        with self._changed:
            self._changed.wait_for(over, seconds)

    def _read(self) -> None:
        error = None
        try:
            for event in self.events:
                with self._changed:
                    self._new = self.last = event
                    self._changed.notify_all()
                time.sleep(self._between_s)  # a faster daemon has to wait, and drops old events
        except DaemonError as err:
            error = err
        with self._changed:
            self.over, self.error = True, error
            self._changed.notify_all()
