"""Error responses in their protocol's form, so that SDKs raise what they should.

OpenAI's form, {"error": {message, type, param, code}}, is that of all paths but those with another ErrorForm.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from ssmd.api.http import access
from ssmd.engine.terms import Rejection
from ssmd.machine.spelling import did_you_mean

ExceptionHandler = Callable[[Request, Exception], Awaitable[Response]]
ErrorForm = Callable[[Rejection, str], tuple[int, Mapping[str, Any]]]  # (status, body) of an error and a request's id
MAX_MESSAGE_CHARS = 2000
IGNORED = "x-ssmd-ignored"  # the header that names the fields of a request that were ignored
REPLAYED = "Idempotent-Replayed"  # the header of an answer that an earlier request got
_FORM = "ssmd.error_form"  # in a scope: (ErrorForm, id of the request)
INTERNAL = Rejection("the daemon failed on this request; its log says why", status=500, code="internal_error")


def error_body(error: Rejection) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": cut(error.message), "type": kind, "param": error.param, "code": error.code}}


def cut(message: str) -> str:
    """Return an error's message, cut to a sensible length."""
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"


def set_form(scope: MutableMapping[str, Any], form: ErrorForm, request_id: str) -> None:
    """Note in a request's scope that its errors have this form."""
    scope[_FORM] = form, request_id


def error_response(error: Rejection, scope: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Build an error response in the form of the request's path.

    SDKs retry every 5xx by themselves, so one without a retry time is marked permanent.
    """
    extra = dict(headers or {})
    if error.retry_after_s is not None:
        extra["retry-after"] = str(error.retry_after_s)
    elif error.status >= 500:
        extra["x-should-retry"] = "false"
    form, request_id = scope.get(_FORM, (_openai, ""))
    status, fields = form(error, request_id)
    body = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
    return Response(body, status, extra, "application/json")


def _openai(error: Rejection, request_id: str) -> tuple[int, Mapping[str, Any]]:
    return error.status, error_body(error)


async def _rejected(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Rejection)
    access.note(request.scope, code=exc.code)
    return error_response(exc, request.scope)


async def _http_exception(request: Request, exc: Exception) -> Response:
    """Answer an error of the router: no such path, or no such method."""
    assert isinstance(exc, HTTPException)
    what = f"{request.method} {request.url.path}"
    if exc.status_code == 404:
        known = [route.path for route in request.app.routes if "{" not in route.path]
        advice = did_you_mean(request.url.path, known) or "; GET /v1 lists the endpoints"
        error = Rejection(f"there is nothing at {what}{advice}", status=404, code="not_found")
    elif exc.status_code == 405:
        allowed = ", ".join(_methods(request))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": allowed})
        error = Rejection(f"{what} is not possible; allowed: {allowed}", status=405, code="method_not_allowed")
        access.note(request.scope, code=error.code)
        return error_response(error, request.scope, {"allow": allowed})
    else:
        error = Rejection(f"{what}: {exc.detail}", status=exc.status_code, code="http_error")
    access.note(request.scope, code=error.code)
    return error_response(error, request.scope, exc.headers)


def _methods(request: Request) -> list[str]:
    """Return the methods that the request's path has, those of all its routes."""
    routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
    return sorted({"OPTIONS"}.union(*(one.methods for one in routes)))


async def _crash(request: Request, exc: Exception) -> Response:
    """Answer a request that hit a bug: the server logs the traceback, the client gets INTERNAL."""
    access.note(request.scope, code=INTERNAL.code)
    return error_response(INTERNAL, request.scope)


HANDLERS: Mapping[Any, ExceptionHandler] = {Rejection: _rejected, HTTPException: _http_exception, Exception: _crash}
