"""/openapi.json and /docs: the declared surface, put together by FastAPI at the first request for it.

FastAPI answers nothing here: to import it takes 0.2 s of a start, and no token passes it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ssmd import __version__

DOCUMENT, PAGE = "/openapi.json", "/docs"
PATHS = frozenset({DOCUMENT, PAGE})
_COMPONENTS = "#/components/schemas/"
_EVENTS = {"description": "Events whose data is a chunk in JSON, or [DONE] at the end; with stream: true."}


def routes() -> list[Route]:
    async def document(request: Request) -> Response:
        return Response(await asyncio.to_thread(_encoded), media_type="application/json")

    async def page(request: Request) -> Response:
        html, policy = await asyncio.to_thread(_page)
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
        return Response(html, headers=headers, media_type="text/html")

    return [Route(DOCUMENT, document), Route(PAGE, page)]


@cache
def described() -> dict[str, Any]:
    """The OpenAPI document of the whole surface."""
    from fastapi import FastAPI
    from pydantic.json_schema import models_json_schema

    from ssmd.api.shapes import Error
    from ssmd.api.surface import OPERATIONS

    app = FastAPI(
        title="ssmd",
        version=__version__,
        summary="An inference daemon for state-space and hybrid language models that never re-reads a conversation",
        openapi_url=None,
    )
    bodies = {one.body.shape for one in OPERATIONS.values() if one.body is not None}
    by_name = sorted(bodies, key=_name)
    named, schemas = models_json_schema([(one, "validation") for one in by_name], ref_template=_COMPONENTS + "{model}")
    for (method, path), one in OPERATIONS.items():
        bad: dict[int | str, dict[str, Any]] = {
            status: {"model": Error, "description": why} for status, why in one.bad.items() if status != one.good
        }
        good: dict[str, Any] = {"description": one.summary}
        if isinstance(one.answer, tuple):
            good["content"] = {kind: {"schema": {}} for kind in one.answer}
        else:
            good["model"] = one.answer
            if one.also:
                good["content"] = {kind: {"schema": _EVENTS} for kind in one.also}
        extra: dict[str, Any] = {"parameters": _parameters(path, one.query)}
        if one.body is not None:
            schema = _taken(schemas["$defs"][_of(named, one.body.shape)], one.body)
            extra["requestBody"] = {
                "required": not one.body.optional,
                "content": {"application/json": {"schema": schema}},
            }
        if one.open:
            extra["security"] = []
        app.add_api_route(
            path,
            _nothing,
            methods=[method],
            status_code=one.good,
            responses={one.good: good, **bad},
            response_class=Response if isinstance(one.answer, tuple) else _json(),
            summary=one.summary,
            description="",
            tags=[one.tag],
            operation_id=f"{method.lower()} {_RESOURCES.get(path, path)}".translate(_WORDS).strip("_"),
            openapi_extra=extra,
        )
    found = app.openapi()
    components = found.setdefault("components", {})
    own = {name: schema for name, schema in schemas["$defs"].items() if name not in {_name(one) for one in bodies}}
    components.setdefault("schemas", {}).update(own)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    found["security"] = [{}, {"key": []}]  # none is needed where none is set
    return found


_WORDS = str.maketrans(" /-.{}", "______")
_RESOURCES = {"/v1/": "/v1/root"}  # names in operation ids, for paths whose own name another path has


def _json() -> type[Response]:
    from starlette.responses import JSONResponse

    return JSONResponse


def _nothing() -> None:
    """What FastAPI takes for the endpoint."""


def _name(shape: type[Any]) -> str:
    return shape.__name__


def _of(named: dict[Any, Any], shape: type[Any]) -> str:
    ref: str = named[shape, "validation"]["$ref"]
    return ref.removeprefix(_COMPONENTS)


def _taken(schema: dict[str, Any], body: Any) -> dict[str, Any]:
    """A body's schema, with what its model does not say."""
    properties = {name: _without_title(one) for name, one in schema.get("properties", {}).items()}
    refused = {
        name: {"enum": list(values), "description": "not built; these values ask for nothing"}
        for name, values in body.refused.items()
    }
    taken = {**schema, "properties": {**properties, **refused, **body.more}}
    if body.lenient:
        taken["additionalProperties"] = True
    return taken


def _without_title(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "title"}


def _parameters(path: str, query: Any) -> list[dict[str, Any]]:
    within = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in within
    ]
    found += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query.items()]
    return found


@cache
def _encoded() -> bytes:
    return json.dumps(described(), separators=(",", ":")).encode()


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets it have its own style and nothing else."""
    from ssmd.api.reference import STYLE, written

    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return written(described()).encode(), policy
