"""Random JSON schemas of the kinds that programs send, and the grammar of one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ssmd.api.openai.fields import of_schema
from ssmd.engine.terms import Grammar

NAMES = ("name", "the_name_of_the_city", "tags", "is open", "größe", 'a"b', "n")
SCALARS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 7, "maximum": 700},
    {"type": "number", "minimum": 0, "maximum": 1.5},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "null"], "maximum": 50, "minimum": 0},
    {"enum": ["small", "big", 3, None, True]},
    {"const": {"a": [1, 2.5, "ü"]}},
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """An object, whose properties are required or not."""
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=4))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties:
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    others = draw(st.sampled_from([False, None, {"type": "boolean"}]))  # that nothing is said of them means no others
    return schema if others is None else schema | {"additionalProperties": others}


def _wider(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    either = st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    return st.one_of(objects(inner), arrays, either)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas that any answer can end of."""
    return st.recursive(st.sampled_from(SCALARS), _wider, max_leaves=6)


def grammar_of(schema: dict[str, Any]) -> Grammar:
    """Return the grammar of a schema."""
    return of_schema(schema, "response_format.json_schema.schema")
