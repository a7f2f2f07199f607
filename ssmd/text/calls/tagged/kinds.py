"""The types of a parameter's values by its schema, and the JSON of a value that stands without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from ssmd.text.calls.scalar import is_number, quoted, scalar
from ssmd.text.schemas import allows_all, resolve, type_of, types_of

ALL = types_of({})
TEXT = frozenset({"string"})
# Words for values that no text stands for otherwise. Templates write Python's, models also JSON's.
CONSTANTS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("True", "true"), ("boolean", "true")),
    **dict.fromkeys(("False", "false"), ("boolean", "false")),
    **dict.fromkeys(("None", "null"), ("null", "null")),
}
_MAX_DEPTH = 12  # references and alternatives that are followed
Known = dict[int, frozenset[str]]


def kinds(schema: Any, root: Any, known: Known | None = None, depth: int = 0) -> frozenset[str]:
    """Return the types of the values that a schema may allow; all types for one that refers to itself.

    root: references begin there. known: results by id, so that each part is read once, however often it is referred to.
    """
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return ALL
    known = {} if known is None else known
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = ALL
    found = types_of(schema)
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        found &= frozenset(map(type_of, listed))
    if isinstance(reference := schema.get("$ref"), str):
        found &= kinds(resolve(root, reference), root, known, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(many := schema.get(key), list):
            found &= frozenset[str]().union(*(kinds(one, root, known, depth + 1) for one in many))
    if isinstance(many := schema.get("allOf"), list):
        found = found.intersection(*(kinds(one, root, known, depth + 1) for one in many))
    known[id(schema)] = found
    return found


def kinds_of(parameters: Any) -> dict[str, frozenset[str]]:
    """Return the types of each parameter that a tool's schema names. Those of all others stand under ""."""
    found: dict[str, frozenset[str]] = {}
    known: Known = {}
    parts, seen = [(parameters, 0)], set[int]()
    while parts:
        schema, depth = parts.pop()
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or id(schema) in seen:
            continue
        seen.add(id(schema))
        properties = schema.get("properties")
        for name, one in properties.items() if isinstance(properties, dict) else ():
            found[name] = found.get(name, frozenset()) | kinds(one, parameters, known)
        patterns = schema.get("patternProperties")
        others = [*(patterns.values() if isinstance(patterns, dict) else ()), schema.get("additionalProperties")]
        for one in others:
            if isinstance(one, dict) and not allows_all(one):
                found[""] = found.get("", frozenset()) | kinds(one, parameters, known)
        if isinstance(reference := schema.get("$ref"), str):
            parts.append((resolve(parameters, reference), depth + 1))
        for key in ("allOf", "anyOf", "oneOf"):
            many = schema.get(key)
            parts += [(one, depth + 1) for one in many] if isinstance(many, list) else []
    return found


def read_value(text: str, allowed: frozenset[str]) -> str:
    """Return the JSON of a value. allowed: the types that its schema allows.

    A text that may be a string is one, unless it is exactly a value of another type that is allowed. A text that is no
    value of JSON or Python becomes a string.
    """
    if "string" not in allowed:
        return scalar(text.strip(), key=False)
    word, written = CONSTANTS.get(text, ("", ""))
    if word in allowed:
        return written
    if is_number(text) and ("number" in allowed or ("integer" in allowed and text.lstrip("-").isdigit())):
        return text
    kind = {"{": "object", "[": "array"}.get(text.lstrip()[:1])
    if kind in allowed:
        try:
            from_json(text, allow_inf_nan=False)
        except ValueError:
            return quoted(text)
        return text.strip()
    return quoted(text)
