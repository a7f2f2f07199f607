"""The health of a session store and the pace of its writes, as the writes show them.

/health and the metrics read the health; the writer and the policy of what to keep read the pace.
"""

from __future__ import annotations

import logging
import threading
import time

from ssmd.engine.metrics import Metrics
from ssmd.sessions.turn import StoreError, TurnRemoved

log = logging.getLogger(__name__)
KNOWN_S = 60.0  # s after which a measured write says nothing any more
SMALL_BYTES = 1 << 20  # bytes of recurrent data below which a state is always worth its write
WORTH = 4  # least ratio of the time a state saves to its write time: most prompts are not repeated
UNKNOWN_MS = 4.0  # ms per MiB, assumed before a state was written


class StoreHealth:
    """The health of a store. Thread-safe.

    Each loss is counted. The log says when losses begin and when they are over.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._reason = ""

    @property
    def reason(self) -> str:
        """Return why turns are not fully stored: a code of metrics.REASONS, or "" if they are."""
        return self._reason

    def failed(self, err: StoreError, *, turns: int) -> None:
        """Note a failed write. turns: number that was lost; 0 if their text was stored but their states were not.

        A turn whose session was removed meanwhile does not count.
        """
        if isinstance(err, TurnRemoved):
            log.info("a turn was not stored: %s", err)
            return
        if turns:
            self._metrics.turns_not_stored(err.reason, turns)
        self._note(err, "a turn was not stored" if turns else "the states of a turn were not stored, its text was")

    def noticed(self, err: StoreError) -> None:
        """Note a fault that was found before a turn failed of it."""
        self._note(err, "turns cannot be stored")

    def _note(self, err: StoreError, what: str) -> None:
        with self._lock:
            known, self._reason = self._reason == err.reason, err.reason
        if known:
            log.debug("%s again: %s", what, err)
        else:
            log.error("%s: %s (logged once; /health and /metrics show the present state)", what, err)

    def well(self) -> None:
        """Note that a turn was stored with its states."""
        with self._lock:
            before, self._reason = self._reason, ""
        if before:
            log.warning("turns are stored again")


class Pace:
    """The recent speed at which states become durable."""

    def __init__(self) -> None:
        self._last = (0.0, 0)  # seconds, bytes
        self._when = 0.0

    def wait_s(self, nbytes: int) -> float:
        """Estimate the seconds that a write of `nbytes` takes; 0.0 without a write in the last KNOWN_S."""
        if time.monotonic() - self._when > KNOWN_S or not nbytes:
            return 0.0
        took_s, of = self._last
        return took_s * max(1.0, nbytes / of) if of > SMALL_BYTES else took_s

    def cost_ms(self, nbytes: int) -> float:
        """Estimate the milliseconds that a large state of `nbytes` takes from all other work."""
        took_s, of = self._last
        return nbytes * (took_s * 1e3 / of if of > SMALL_BYTES else UNKNOWN_MS / (1 << 20))

    def pays(self, nbytes: int, read_ms: float) -> bool:
        """Return True if writing a state of `nbytes` is worth it. read_ms: prefill time that it saves."""
        return nbytes < SMALL_BYTES or read_ms >= WORTH * self.cost_ms(nbytes)

    def note(self, nbytes: int, took_s: float) -> None:
        """Note the time of a write of `nbytes`, or the time that it was given."""
        if nbytes:
            self._when, self._last = time.monotonic(), (took_s, nbytes)
