"""Whether the other end of a connection hung up."""

from __future__ import annotations

import select
import socket
import sys


def has_hung_up(one: socket.socket) -> bool:
    """Whether the other end is closed, or half so, where the system tells that before all that came is read (Linux)."""
    if sys.platform != "linux":
        return False
    polled = select.poll()
    polled.register(one, select.POLLRDHUP)
    return bool(polled.poll(0))
