"""The page that /docs is: the OpenAPI document as plain HTML, without scripts and without anything from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

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


def written(document: dict[str, Any]) -> str:
    """The page of a document."""
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
    """A schema in a few words, as HTML."""
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
