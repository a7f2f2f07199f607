"""Objects of a JSON schema that are closed to properties it does not name, and objects that are left as they are."""

from __future__ import annotations

from typing import Any

import pytest

from ssmd.text.closed import closed

Schema = dict[str, Any]
CITY: Schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED = CITY | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (CITY, CLOSED),
        ({"properties": {"a": CITY}}, {"properties": {"a": CLOSED}, "additionalProperties": False}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [CITY, True]}, {"prefixItems": [CLOSED, True]}),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [CITY]}, {"allOf": [CLOSED]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": CITY}}, {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}}),
        ({"type": "object", "additionalProperties": CITY}, {"type": "object", "additionalProperties": CLOSED}),
    ],
)
def test_what_is_named_is_all(schema: Schema, expected: Schema) -> None:
    before = repr(schema)
    assert closed(schema) == expected
    assert closed(expected) == expected
    assert repr(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        CITY | {"additionalProperties": True},
        CITY | {"additionalProperties": {"type": "integer"}},
        CITY | {"patternProperties": {"^x": {"type": "integer"}}},
        CITY | {"required": ["city", "size"]},
        CITY | {"minProperties": 2},
        CITY | {"anyOf": [{"properties": {"a": CITY}}]},
        CITY | {"$ref": "#/$defs/a", "$defs": {"a": CITY}},
        {"allOf": [CITY, {"properties": {"size": {"type": "integer"}}}]},
        {"items": {"allOf": [{"$ref": "#/$defs/a"}, CITY]}, "$defs": {"a": CITY}},
        {"const": CITY},
        {"enum": [CITY]},
        CITY | {"required": "city"},
        CITY | {"required": [["city"]]},
        {"properties": ["city"]},
        {"allOf": 7, "items": 7},
        True,
        "city",
    ],
)
def test_what_is_left_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema
