"""JSON schemas closed to properties that they do not name, unless they allow others explicitly.

JSON Schema allows properties that a schema does not name. Hardly any client means that. A small model then adds
properties of its own until its tokens are spent, or calls a function with arguments that it does not have.
llama.cpp closes objects too. Clients written for vLLM leave `additionalProperties: false` out of their requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties")
_JOINING = ("allOf", "anyOf", "oneOf", "$ref")
# Keywords by which an object's schema allows or requires properties that it does not name.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties", "not")
_OF_OBJECTS = ("properties", "required", *_OPEN)


def closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` wherever an object only names its properties.

    The schema is returned unchanged if any object in it is composed of several schemas: one of them may name a
    property that another does not.
    """
    return schema if any(map(_joins, _schemas(schema))) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made: dict[Any, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            made[key] = {name: _closed(one) for name, one in value.items()}
        elif key in _LISTED and isinstance(value, list):
            made[key] = [_closed(one) for one in value]
        else:
            made[key] = _closed(value) if key in _ALONE else value
    if names_all(schema):
        made["additionalProperties"] = False
    return made


def names_all(schema: dict[str, Any]) -> bool:
    """Return True if an object's schema names properties, all that it requires too, and does not allow others."""
    if not isinstance(schema.get("properties"), dict) or any(key in schema for key in _OPEN):
        return False
    required = schema.get("required", [])
    return isinstance(required, list) and all(isinstance(r, str) and r in schema["properties"] for r in required)


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield this schema and all schemas within it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            parts = list(value.values())
        elif key in _LISTED and isinstance(value, list):
            parts = value
        else:
            parts = [value] if key in _ALONE else []
        for part in parts:
            yield from _schemas(part)


def _joins(schema: dict[str, Any]) -> bool:
    """Return True if more than one schema describes the same object."""
    joined = [key for key in _JOINING if key in schema]
    several = len(joined) > 1 or (bool(joined) and any(key in schema for key in _OF_OBJECTS))
    parts = schema.get("allOf")
    return several or (isinstance(parts, list) and len(parts) > 1)
