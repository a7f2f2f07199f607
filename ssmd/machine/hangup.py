"""A check if the other end of a connection hung up."""

from __future__ import annotations

import select
import socket
import sys


def has_hung_up(one: socket.socket) -> bool:
    """Return True if the other end closed the connection, or half of it, even with bytes unread. Linux only."""
    if sys.platform != "linux":
        return False
    polled = select.poll()
    polled.register(one, select.POLLRDHUP)
    return bool(polled.poll(0))
