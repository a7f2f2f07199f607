"""Errors in Anthropic's form: {"type": "error", "error": {type, message}, "request_id": …}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ssmd.api.http.errors import cut
from ssmd.engine.terms import PromptTooLong, Rejection

OVERLOADED = 529
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    OVERLOADED: "overloaded_error",
}
# At this the anthropic library's tool_runner (2.14) sends all messages, without `thread`, from then on.
_NO_THREADS = {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
# Places in a tool, in the words of OpenAI, in which the engine names them.
_PLACE = re.compile(r"(\btools\[\d+\])\.function\b(?:\.(parameters)\b)?")


def error_form(error: Rejection, request_id: str) -> tuple[int, dict[str, Any]]:
    """Return (status, body) of an error. A status that Anthropic does not have becomes the nearest one."""
    status = error.status
    if status > 500:  # the header retry-after names the seconds
        status = OVERLOADED if error.retry_after_s is not None else 500
    return status, {**error_body(error, status), "request_id": request_id}


def error_body(error: Rejection, status: int) -> dict[str, Any]:
    """Return the body of an error without the request's id, as events have it."""
    body = {"type": _KINDS.get(status, "invalid_request_error"), "message": cut(_message(error))}
    return {"type": "error", "error": body | (_NO_THREADS if error.param == "thread" else {})}


def event_body(error: Rejection) -> Mapping[str, Any]:
    """Return the data of the event that ends a stream."""
    body = error_form(error, "")[1]
    del body["request_id"]  # the stream's headers have it
    return body


def _message(error: Rejection) -> str:
    """Return an error's message. Claude Code compacts its history at the words for a prompt that is too long."""
    if isinstance(error, PromptTooLong):
        return f"prompt is too long: {error.tokens} tokens > {error.context} maximum. {error.advice}"
    return _PLACE.sub(lambda found: found[1] + (".input_schema" if found[2] else ""), error.message)
