"""Server-sent events over ASGI: LF only, one write an event; id: and retry: lines would break the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

DONE = b"data: [DONE]\n\n"


class ClientStalled(Exception):
    """A client that has not read for too long."""


def encode(value: Mapping[str, Any]) -> bytes:
    """Encode one event. JSON escapes line ends, so that the data is one line."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream:
    """A response under way. Every method raises ClientStalled if the client reads nothing for `stall_s` seconds."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s

    async def open(self, headers: Mapping[str, str]) -> None:
        fields = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await self._write({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, event: bytes) -> None:
        await self._write({"type": "http.response.body", "body": event, "more_body": True})

    async def close(self) -> None:
        await self._write({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise ClientStalled from None
