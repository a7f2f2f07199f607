"""Actions in threads, so that the window never waits: one of each at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ssmd.daemon.discovery import DaemonError

MOST = 8  # at once


@dataclass(frozen=True)
class Outcome:
    """What came of an action. key: which it was; words: for people, or what it returned."""

    key: str
    words: str
    failed: bool


class Doing:
    """Runs actions, and tells in their threads what came of each."""

    def __init__(self, told: Callable[[Outcome], None]) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def busy(self, key: str) -> bool:
        """Whether an action is under way."""
        with self._lock:
            return key in self._busy

    def do(self, key: str, action: Callable[[], str]) -> bool:
        """Begin an action. False if it is under way already, or too many others are."""
        with self._lock:
            if key in self._busy or len(self._busy) >= MOST:
                return False
            self._busy.add(key)
        threading.Thread(target=self._do, args=(key, action), name="ssmd-tray-action", daemon=True).start()
        return True

    def _do(self, key: str, action: Callable[[], str]) -> None:
        try:
            outcome = Outcome(key, action(), False)
        except (DaemonError, OSError) as err:
            outcome = Outcome(key, str(err), True)
        finally:
            with self._lock:
                self._busy.discard(key)
        self._told(outcome)
