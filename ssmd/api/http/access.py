"""The access log: a line for each request, when its answer has ended. No text of a client is in it.

The path is the route's own template, or `?` for an unknown one. A line has no query, no header, and no model that is
not installed here. A thread writes the lines, so that a slow reader of stdout holds up no answer.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssmd.api.http.keys import name_of
from ssmd.config import Settings
from ssmd.engine.request import Usage
from ssmd.machine.spelling import printable

METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"})
MOST_WAITING = 10_000  # limit on lines that wait to be written; further ones are left out, and counted
_CLOSE_S = 2.0
_ENTRY = "ssmd.access"  # key in a scope
_SESSION = "session"  # name of a path's parameter
Fields = dict[str, Any]


@dataclass
class Entry:
    """The facts of a request, collected until its line is written. whole: the answer was sent to its end."""

    begun: float = field(default_factory=time.perf_counter)
    status: int | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)  # of the answer
    code: str | None = None
    received: int = 0
    sent: int = 0
    whole: bool = False
    answer: str | None = None
    model: str | None = None
    usage: Usage | None = None


class AccessLog:
    """Writes a line for each request. slow_s: time in seconds from which on a request is marked as slow."""

    def __init__(self, stream: TextIO, *, as_json: bool, slow_s: float) -> None:
        self._stream, self._as_json, self._slow_s = stream, as_json, slow_s
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="ssmd-access", daemon=True)
        self._thread.start()

    @staticmethod
    def of(settings: Settings) -> AccessLog | None:
        """Return the log on stdout, or None if the settings do not enable it."""
        if not settings.access_log:
            return None
        return AccessLog(sys.stdout, as_json=settings.access_log_format == "json", slow_s=settings.slow_request)

    async def answer(self, app: ASGIApp, routes: Sequence[Route], scope: Scope, receive: Receive, send: Send) -> None:
        """Let `app` answer a request, and write its line once that has ended, also by an exception."""
        entry = scope[_ENTRY] = Entry()

        async def receive_counted() -> Message:
            message = await receive()
            entry.received += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status, entry.headers = message["status"], dict(message["headers"])
            else:
                entry.sent += len(message.get("body", b""))
                entry.whole = not message.get("more_body", False)
            await send(message)

        try:
            await app(scope, receive_counted, send_counted)
        finally:
            self._write(entry, scope, routes)

    def _write(self, entry: Entry, scope: Scope, routes: Sequence[Route]) -> None:
        if self._lines.qsize() >= MOST_WAITING:
            self._left_out += 1
            return
        fields = _fields(entry, scope, routes, self._slow_s)
        self._lines.put(json.dumps(fields) if self._as_json else _line(fields))

    def close(self) -> None:
        """Write the waiting lines, for at most _CLOSE_S."""
        self._lines.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # stdout was closed
                left_out, self._left_out = self._left_out, 0
                if left_out:
                    note = {"left_out": left_out}
                    self._stream.write(f"{json.dumps(note) if self._as_json else _line(note)}\n")
                self._stream.write(f"{line}\n")
                self._stream.flush()


def note(scope: Mapping[str, Any], **known: Any) -> None:
    """Set fields of a request's entry; do nothing without an access log."""
    if (entry := scope.get(_ENTRY)) is not None:
        for name, value in known.items():
            setattr(entry, name, value)


def _fields(entry: Entry, scope: Scope, routes: Sequence[Route], slow_s: float) -> Fields:
    taken_s = time.perf_counter() - entry.begun
    template, parts = _place(scope, routes)
    succeeded = entry.status is not None and entry.status < 400
    usage = entry.usage
    fields: Fields = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "method": scope["method"] if scope["method"] in METHODS else "?",
        "path": template,
        "status": entry.status,
        "ms": round(taken_s * 1e3, 1),
        "received": entry.received,
        "sent": entry.sent,
        "request": entry.headers.get(b"x-request-id", b"").decode() or None,
        "key": name_of(scope) or None,
        "error": entry.code,
        "answer": entry.answer,
        "session": entry.headers.get(b"x-ssmd-session", b"").decode() or (parts.get(_SESSION) if succeeded else None),
        "model": None if entry.model is None else printable(entry.model),
    }
    if usage is not None:
        fields |= {
            "ttft_ms": round(usage.ttft_ms, 1),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": usage.completion_tokens,
        }
    if not entry.whole:
        fields["broken_off"] = True
    if (taken_s if usage is None else usage.ttft_ms / 1e3) >= slow_s:
        fields["slow"] = True
    return {name: value for name, value in fields.items() if value is not None or name == "status"}


def _place(scope: Scope, routes: Sequence[Route]) -> tuple[str, Mapping[str, Any]]:
    """Return (template of the route, parameters in its path); ("?", {}) if no route matches."""
    best: tuple[str, Mapping[str, Any]] = ("?", {})
    for route in routes:
        match, found = route.matches(scope)
        if match is Match.FULL:
            return route.path_format, found["path_params"]
        if match is Match.PARTIAL:  # the method differs
            best = route.path_format, found["path_params"]
    return best


def _line(fields: Fields) -> str:
    return " ".join(_words(fields))


def _words(fields: Fields) -> Iterator[str]:
    for name, value in fields.items():
        if value is True:
            yield name
        elif name in ("time", "method", "path"):
            yield str(value)
        elif name == "status":
            yield "-" if value is None else str(value)
        else:
            yield f"{name}={value}"
