"""Actions in threads, so that the window never waits: one of each at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ssmd.daemon.discovery import DaemonError

MOST = 8  # at once


@dataclass(frozen=True)
class Outcome:
    """The result of an action. key: the action's. words: a message for the user, or the returned value."""

    key: str
    words: str
    failed: bool


class ActionRunner:
    """A runner of actions, each in a thread, which reports its result there."""

    def __init__(self, told: Callable[[Outcome], None]) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def busy(self, key: str) -> bool:
        """Return True if an action is running."""
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
