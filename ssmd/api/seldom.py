"""The log of what strangers can cause: a few lines a minute of each kind, and how many more there were."""

from __future__ import annotations

import logging
import time

_SELDOM_S = 60.0
TOO_MANY = "too many connections"
_LOGGERS = (
    *("asyncio", "uvicorn.error"),
    *("ssmd.api.connections", "ssmd.api.security", "ssmd.api.front", "ssmd.api.delivery", "ssmd.api.download"),
    *("ssmd.api.requests",),
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
