"""JSON schemas whose objects have the properties that they name and no others, unless they say that others may follow.

By JSON Schema's rules what a schema does not name may follow. Hardly a client means that, and a small model goes on
with properties of its own till its tokens are spent, or calls a function with arguments that it does not have.
llama.cpp closes objects as well; a client for vLLM leaves out `additionalProperties: false` from what it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties")
_JOINING = ("allOf", "anyOf", "oneOf", "$ref")
# What says of an object that more may follow, or have to.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties", "not")
_OF_OBJECTS = ("properties", "required", *_OPEN)


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` where an object names its properties and says no more of it.

    As it is if anywhere an object is put together from several schemas: what one does not name another one may.
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
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in _OPEN) and _names_all(schema):
        made["additionalProperties"] = False
    return made


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether an object's schema names all properties that it requires."""
    required = schema.get("required", [])
    return isinstance(required, list) and all(isinstance(r, str) and r in schema["properties"] for r in required)


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Schemas within this one, and it."""
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
    """Whether more than one schema tells of the same object."""
    joined = [key for key in _JOINING if key in schema]
    several = len(joined) > 1 or (bool(joined) and any(key in schema for key in _OF_OBJECTS))
    parts = schema.get("allOf")
    return several or (isinstance(parts, list) and len(parts) > 1)
