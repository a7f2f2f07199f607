"""Server-sent events over ASGI: LF only, one write an event; id: and retry: lines would break the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Send

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"  # clients ignore it; it tells them, and proxies, that the connection lives


@dataclass(frozen=True)
class StreamFormat:
    """A form of streams. comment: bytes that clients ignore, between events."""

    media_type: str
    comment: bytes


EVENTS = StreamFormat("text/event-stream; charset=utf-8", COMMENT)


class ClientStalled(Exception):
    """A client that has not read for too long."""


def encode(value: Mapping[str, Any]) -> bytes:
    """Encode one event. JSON escapes line ends, so that the data is one line."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream:
    """A response under way. Every method raises ClientStalled if the client reads nothing for `stall_s` seconds."""

    def __init__(self, send: Send, stall_s: float, silence_s: float = 10.0, form: StreamFormat = EVENTS) -> None:
        """silence_s: seconds between comments in `kept_alive`."""
        self.opened = False
        self._send, self._form = send, form
        self._stall_s, self._silence_s = stall_s, silence_s

    @asynccontextmanager
    async def kept_alive(self, headers: Mapping[str, str]) -> AsyncIterator[None]:
        """Send a comment every `silence_s` seconds until the context ends; the first opens the stream with `headers`.

        Nothing else may write meanwhile.
        """
        over = asyncio.Event()
        pulse = asyncio.create_task(self._pulse(headers, over))
        try:
            yield
        finally:
            over.set()
            await pulse  # a comment on its way is sent whole

    async def _pulse(self, headers: Mapping[str, str], over: asyncio.Event) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    await over.wait()
                return
            except TimeoutError:
                if not self.opened:
                    await self.open(headers)
                await self.write(self._form.comment)

    async def open(self, headers: Mapping[str, str]) -> None:
        self.opened = True
        fields = {
            "content-type": self._form.media_type,
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
