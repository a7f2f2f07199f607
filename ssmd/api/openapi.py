"""/openapi.json and /docs: the description of the API, built by FastAPI at the first request for it.

FastAPI serves no request: importing it takes 0.2 s, so the import waits for that first request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cache, partial
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ssmd import __version__
from ssmd.api.generate.fair_reading import SharedResult
from ssmd.api.operation import Operation, Right, Service

_COMPONENTS = "#/components/schemas/"
_EVENTS = {"description": "Events whose data is a chunk in JSON, or [DONE] at the end; with stream: true."}

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .4rem 0; }
summary code { font-weight: 600; }
details { border-top: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
details > :not(summary) { margin-left: 1rem; }
table { border-collapse: collapse; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; }
pre { overflow-x: auto; font-size: .85rem; }
"""
_REF = "#/components/schemas/"


class Description:
    """The two handlers. Both answers are made together, once, and served from memory then."""

    def __init__(self, on: Service) -> None:
        self._pool, self._made = on.pool, SharedResult(partial(_made, on.operations), "description")

    async def document(self, request: Request) -> Response:
        return Response((await self._made.get(self._pool))[0], media_type="application/json")

    async def page(self, request: Request) -> Response:
        _, html, policy = await self._made.get(self._pool)
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
        return Response(html, headers=headers, media_type="text/html")


@cache
def described(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Return the OpenAPI document of these operations."""
    from fastapi import FastAPI
    from pydantic.json_schema import models_json_schema

    from ssmd.api import shapes

    app = FastAPI(
        title="ssmd",
        version=__version__,
        summary="An inference daemon for state-space and hybrid language models that never re-reads a conversation",
        openapi_url=None,
    )
    bodies = {one.body.shape for one in operations if one.body is not None}
    by_name = sorted(bodies, key=_name)
    named, schemas = models_json_schema([(one, "validation") for one in by_name], ref_template=_COMPONENTS + "{model}")
    for one in operations:
        bad: dict[int | str, dict[str, Any]] = {
            status: {"model": getattr(shapes, one.error), "description": why}
            for status, why in one.bad.items()
            if status != one.status
        }
        good: dict[str, Any] = {"description": one.summary}
        if isinstance(one.answer, tuple):
            good["content"] = {kind: {"schema": {}} for kind in one.answer}
        else:
            good["model"] = getattr(shapes, one.answer)
            if one.also:
                good["content"] = {kind: {"schema": _EVENTS} for kind in one.also}
        extra: dict[str, Any] = {"parameters": _parameters(one.template, one.query)}
        if one.body is not None:
            schema = _taken(schemas["$defs"][_of(named, one.body.shape)], one.body)
            extra["requestBody"] = {
                "required": not one.body.optional,
                "content": {"application/json": {"schema": schema}},
            }
        if one.right is Right.NONE:
            extra["security"] = []
        app.add_api_route(
            one.template,
            _nothing,
            methods=[one.method],
            status_code=one.status,
            responses={one.status: good, **bad},
            response_class=Response if isinstance(one.answer, tuple) else _json(),
            summary=one.summary,
            description="",
            tags=[one.tag],
            operation_id=f"{one.method.lower()} {_RESOURCES.get(one.path, one.template)}".translate(_WORDS).strip("_"),
            openapi_extra=extra,
        )
    found = app.openapi()
    components = found.setdefault("components", {})
    own = {
        name: schema for name, schema in schemas.get("$defs", {}).items() if name not in {_name(one) for one in bodies}
    }
    components.setdefault("schemas", {}).update(own)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    found["security"] = [{}, {"key": []}]  # no key is needed if none is set
    return found


_WORDS = str.maketrans(" /-.{}", "______")
_RESOURCES = {"/v1/": "/v1/root"}  # names in operation ids, for paths whose own name another path has


def _json() -> type[Response]:
    from starlette.responses import JSONResponse

    return JSONResponse


def _nothing() -> None:
    """Stand in for the endpoint in FastAPI's app."""


def _name(shape: type[Any]) -> str:
    return shape.__name__


def _of(named: dict[Any, Any], shape: type[Any]) -> str:
    ref: str = named[shape, "validation"]["$ref"]
    return ref.removeprefix(_COMPONENTS)


def _taken(schema: dict[str, Any], body: Any) -> dict[str, Any]:
    """Return a body's schema, with the additions that its model lacks."""
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
def _made(operations: tuple[Operation, ...]) -> tuple[bytes, bytes, str]:
    """Return the document, the page, and the policy that allows the page's own style and nothing else."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    document = described(operations)
    return json.dumps(document, separators=(",", ":")).encode(), written(document).encode(), policy


def written(document: dict[str, Any]) -> str:
    """Return the page of a document."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])}: HTTP</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('summary', ''))}.</p>",
        '<p>The same for programs: <a href="/openapi.json">openapi.json</a>.</p>',
    ]
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tags.setdefault(operation["tags"][0], []).extend(_operation(method, path, operation))
    for tag, operations in tags.items():
        parts += [f"<h2>{escape(tag)}</h2>", *operations]
    parts.append("<h2>Objects</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts += [f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>', *_schema(schema)]
        parts.append("</details>")
    return "".join([*parts, "</body></html>"])


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}</summary>"
    if parameters := operation.get("parameters"):
        yield "<h4>Parameters</h4><table>"
        for one in parameters:
            yield f"<tr><td><code>{escape(one['name'])}</code><td>{one['in']}<td>{_kind(one['schema'])}</tr>"
        yield "</table>"
    if body := operation.get("requestBody"):
        yield "<h4>Body</h4>"
        for content in body["content"].values():
            yield from _schema(content["schema"])
    yield "<h4>Answers</h4><table>"
    for status, answer in operation["responses"].items():
        kinds = [f"{escape(kind)}: {_kind(one.get('schema', {}))}" for kind, one in answer.get("content", {}).items()]
        yield f"<tr><td>{escape(status)}<td>{escape(answer['description'])}<td>{'<br>'.join(kinds)}</tr>"
    yield "</table></details>"


def _schema(schema: dict[str, Any]) -> Iterator[str]:
    properties = schema.get("properties")
    if not properties:
        yield f"<pre>{escape(json.dumps(schema, indent=1, ensure_ascii=False))}</pre>"
        return
    required = schema.get("required", [])
    yield "<table>"
    for name, one in properties.items():
        needed = "required" if name in required else ""
        yield f"<tr><td><code>{escape(name)}</code><td>{needed}<td>{_kind(one)}</tr>"
    yield "</table>"


def _kind(schema: dict[str, Any]) -> str:
    """Describe a schema in a few words, as HTML."""
    if (ref := schema.get("$ref", "")).startswith(_REF):
        name = escape(ref.removeprefix(_REF))
        return f'<a href="#{name}">{name}</a>'
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_kind, options)))
    if "enum" in schema or "const" in schema:
        return " or ".join(
            f"<code>{escape(json.dumps(one))}</code>" for one in schema.get("enum", [schema.get("const")])
        )
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in schema]
    return escape(" ".join([str(schema.get("type", "anything")), *bounds]))
