"""Whether turns are stored now, and if not why: counted each time, said when it begins and when it is over."""

from __future__ import annotations

import logging
import threading

from ssmd.engine.metrics import Metrics
from ssmd.sessions.turn import Removed, StoreError

log = logging.getLogger(__name__)


class Condition:
    """The condition of a store, as those see it who write there. From any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why turns are not stored as they should be: a code of metrics.REASONS, or "" when all is well."""
        return self._reason

    def failed(self, err: StoreError, *, turns: int) -> None:
        """Note that so many turns were lost to the store, or none if their text was kept and their states were not.

        Those whose session was removed meanwhile are not lost to it.
        """
        if isinstance(err, Removed):
            log.info("a turn was not stored: %s", err)
            return
        if turns:
            self._metrics.turns_not_stored(err.reason, turns)
        with self._lock:
            known, self._reason = self._reason == err.reason, err.reason
        what = "a turn was not stored" if turns else "the states of a turn were not stored, its text was"
        if known:
            log.debug("%s again: %s", what, err)
        else:
            log.error("%s: %s (said once; /health and /metrics tell how it goes on)", what, err)

    def well(self) -> None:
        """Note that a turn was stored with all that belongs to it."""
        with self._lock:
            before, self._reason = self._reason, ""
        if before:
            log.warning("turns are stored again")
