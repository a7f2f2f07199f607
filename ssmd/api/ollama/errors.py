"""Errors in Ollama's form, {"error": text}, and lines of JSON, in which Ollama streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ssmd.api.http.errors import cut
from ssmd.api.http.sse import StreamFormat
from ssmd.engine.terms import Rejection

_TRUNCATION = ("truncation=auto", "truncate: true")  # the engine's words, and Ollama's
# Ollama's clients parse each line as JSON, which may begin with spaces: a space is no event.
LINES = StreamFormat("application/x-ndjson", b" ")


def error_form(error: Rejection, request_id: str) -> tuple[int, dict[str, Any]]:
    """Return (status, body) of an error."""
    return error.status, error_body(error)


def error_body(error: Rejection) -> dict[str, Any]:
    """Return the body of an error, or the line that ends a stream."""
    return {"error": cut(error.message.replace(*_TRUNCATION))}


def line(value: Mapping[str, Any]) -> bytes:
    """Encode a line of a stream. JSON escapes line ends."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
