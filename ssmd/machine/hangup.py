"""Hang-ups: of a connection, and SIGHUP."""

from __future__ import annotations

import select
import signal
import socket
import sys
from collections.abc import Callable


def has_hung_up(one: socket.socket) -> bool:
    """Whether the other end is closed, or half so, where the system tells that before all that came is read (Linux)."""
    if sys.platform != "linux":
        return False
    polled = select.poll()
    polled.register(one, select.POLLRDHUP)
    return bool(polled.poll(0))


def on_hangup(do: Callable[[], None]) -> None:
    """Do that whenever SIGHUP comes; on Windows it never does."""
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, lambda *_: do())
