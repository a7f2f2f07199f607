"""The health of a session store, as its writes show it. /health and the metrics read it."""

from __future__ import annotations

import logging
import threading

from ssmd.engine.metrics import Metrics
from ssmd.sessions.turn import StoreError, TurnRemoved

log = logging.getLogger(__name__)


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
