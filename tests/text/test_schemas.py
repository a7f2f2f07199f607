"""Schemas made enforceable: keywords that forbid nothing go, annotations are reported, and the rest is an error."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from text.test_forced import vocabulary

from ssmd.text.patterns import translated
from ssmd.text.schemas import FORMATS, UnsupportedSchema, enforceable

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
CAT: Schema = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": FLAG}, "required": ["kind"]}
DOG: Schema = {"type": "object", "properties": {"kind": {"const": "dog"}, "s": STRING}, "required": ["kind"]}
CITY: Schema = {"type": "object", "properties": {"a": {"type": "string"}}}
ANIMALS: Schema = {"Cat": CAT, "Dog": DOG}
REFERENCES = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]


def without(schema: Schema, *keys: str) -> Schema:
    return {key: value for key, value in schema.items() if key not in keys}


# Schemas with keywords that forbid nothing, each with the schema that remains.
EMPTY: list[tuple[Schema, Any]] = [
    ({"type": "object", "propertyNames": STRING}, {"type": "object"}),
    ({"propertyNames": {}}, {}),
    ({"propertyNames": True, "additionalProperties": FLAG}, {"additionalProperties": FLAG}),
    ({"propertyNames": {"type": ["string", "null"], "description": "a name"}}, {}),
    ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
    ({"not": False}, {}),
    ({"type": "null", "not": {"not": {}}}, {"type": "null"}),
    ({"anyOf": [STRING, {"not": {}}]}, {"anyOf": [STRING, False]}),
    ({"type": "object", "properties": {"a": {"not": {}}}}, {"type": "object", "properties": {"a": False}}),
    ({"items": {"anyOf": [{"not": {}}, False]}}, {"items": False}),
    ({"if": FLAG}, {}),
    ({"then": FLAG, "else": False}, {}),
    ({"if": FLAG, "then": {}, "else": True}, {}),
    ({"minContains": 2, "maxContains": 3}, {}),
    ({"contains": FLAG, "minContains": 0}, {}),
    ({"contains": {}, "minItems": 1, "minContains": 2}, {"minItems": 2}),
    ({"dependentRequired": {}}, {}),
    ({"dependentRequired": {"a": []}, "dependentSchemas": {"a": {}}, "dependencies": {"a": ["b"]}, "required": ["b"]}, {
        "required": ["b"]}),
    ({"unevaluatedProperties": True, "unevaluatedItems": {}}, {}),
    ({"unevaluatedProperties": False, "properties": {"a": FLAG}}, {
        "properties": {"a": FLAG}, "additionalProperties": False}),
    ({"prefixItems": [FLAG], "unevaluatedItems": False}, {"prefixItems": [FLAG], "items": False}),
    ({"items": [FLAG], "unevaluatedItems": False}, {"items": [FLAG], "additionalItems": False}),
    ({"minLength": 4.0, "maxItems": 2.0}, {"minLength": 4, "maxItems": 2}),
    ({"$schema": "https://json-schema.org/draft-07/schema#", "type": "null"}, {
        "$schema": "https://json-schema.org/draft-07/schema#", "type": "null"}),
    ({"$schema": "https://example.com/mine", "type": "null"}, {"type": "null"}),
    ({"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, {}),
    ({"maximum": 10**400}, {}),
    ({"exclusiveMinimum": -3.5e38, "exclusiveMaximum": 2**63}, {
        "exclusiveMinimum": -(2**62), "exclusiveMaximum": 2**62}),
    ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -(2**62), "maximum": 2**63 - 1}),
    ({"properties": {"a": FLAG}, "minProperties": 0}, {"properties": {"a": FLAG}}),
    ({"properties": {"a": FLAG}, "maxProperties": 1, "additionalProperties": False}, {
        "properties": {"a": FLAG}, "additionalProperties": False}),
]  # fmt: skip
# Keywords written as others that llguidance enforces.
OTHERWISE: list[tuple[Schema, Schema]] = [
    ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": FLAG}, {
        "properties": {"a": FLAG, "b": FLAG}, "additionalProperties": False}),
    ({"propertyNames": {"type": "string", "const": "a"}, "properties": {"a": STRING, "b": FLAG}}, {
        "properties": {"a": STRING}, "additionalProperties": False}),
    ({"propertyNames": False}, {"properties": {}, "additionalProperties": False}),
    ({"propertyNames": {"type": "integer"}}, {"properties": {}, "additionalProperties": False}),
    ({"propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a"]}}}, {
        "properties": {"a": True}, "$defs": {"E": {"enum": ["a"]}}, "additionalProperties": False}),
    ({"propertyNames": {"pattern": "^k\\d$"}, "additionalProperties": FLAG}, {
        "patternProperties": {"^k\\d$": FLAG}, "additionalProperties": False}),
    ({"propertyNames": {"minLength": 2}}, {
        "patternProperties": {"^(?s:.{2,})$": True}, "additionalProperties": False}),
    ({"propertyNames": {"maxLength": 3}}, {
        "patternProperties": {"^(?s:.{0,3})$": True}, "additionalProperties": False}),
    ({"allOf": [{"properties": {"a": FLAG}}, {"$ref": "#/$defs/B"}], "unevaluatedProperties": False, "$defs": {
        "B": {"properties": {"b": FLAG}}}}, {
        "allOf": [{"properties": {"a": FLAG}}, {"$ref": "#/$defs/B"}], "$defs": {"B": {"properties": {"b": FLAG}}},
        "properties": {"a": True, "b": True}, "additionalProperties": False}),
    ({"oneOf": REFERENCES, "$defs": ANIMALS}, {"anyOf": REFERENCES, "$defs": ANIMALS}),
    ({"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}], "$defs": ANIMALS}, {
        "anyOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}], "$defs": ANIMALS}),
    ({"oneOf": [{"const": 1, "title": "One"}, {"const": 2}, {"enum": [3, "1"]}]}, {
        "anyOf": [{"const": 1, "title": "One"}, {"const": 2}, {"enum": [3, "1"]}]}),
    # Only the discriminator tells these apart. So the property becomes a required one.
    ({"oneOf": REFERENCES, "discriminator": {"propertyName": "kind"}, "$defs": {
        "Cat": without(CAT, "required"), "Dog": DOG | {"required": ["s"]}}}, {
        "anyOf": REFERENCES, "$defs": {"Cat": without(CAT, "required") | {"required": ["kind"]}, "Dog": DOG | {
            "required": ["s", "kind"]}}}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), [*EMPTY, *OTHERWISE])
def test_a_keyword_goes_or_is_written_otherwise(schema: Schema, expected: Any) -> None:
    before = deepcopy(schema)
    for wrap in (
        lambda one: one,
        lambda one: {"$defs": one.get("$defs", {}), "properties": {"x": without(one, "$defs")}},
    ):
        found = enforceable(wrap(schema))
        assert json.dumps(found.schema, sort_keys=True) == json.dumps(wrap(expected), sort_keys=True)
        assert found.ignored == ()
    assert schema == before
    assert enforceable(expected).schema == expected


UNCHANGED: list[Any] = [
    True,
    {},
    CAT,
    {"anyOf": [STRING, {"type": "null"}], "default": {"not": {}}, "examples": [{"uniqueItems": True}]},
    {"enum": [{"format": "x"}], "const": {"propertyNames": {}}},
    {"type": "object", "properties": {"not": STRING, "format": STRING, "uniqueItems": FLAG}, "required": ["not"]},
    {"type": "integer", "format": "int32", "pattern": "(?=a)"},
    {"type": "string", "format": "date-time", "pattern": r"^\d{4}-\/[\w-.]+$", "minLength": 0},
    {"oneOf": [{"enum": ["a"]}, {"enum": ["b"]}, {"type": "null"}, CAT, {"type": "array"}]},
    {"oneOf": [CAT, DOG]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"type": "object", "required": ["a"], "minProperties": 1, "x-order": 3},
    {"allOf": 3, "required": 7, "properties": [], "$ref": 4, "enum": "a", "type": {}, "minimum": "x", "minItems": None},
]


@pytest.mark.parametrize("schema", UNCHANGED)
def test_a_schema_without_such_keywords_stays_as_it_is(schema: Any) -> None:
    found = enforceable(schema)
    assert json.dumps(found.schema) == json.dumps(schema)  # in the same order, so that the grammar is the same
    assert found.ignored == ()


IGNORED: list[tuple[Schema, Schema, list[str]]] = [
    (STRING | {"format": "int-phone"}, STRING, [".format"]),
    (STRING | {"format": "cuid", "pattern": "^c"}, STRING | {"pattern": "^c"}, [".format"]),
    (STRING | {"format": "duration", "pattern": "^P(?!$)"}, STRING | {"format": "duration"}, [".pattern"]),
    ({"items": {"pattern": "a(?=b)"}}, {"items": {}}, [".items.pattern"]),
    ({"type": "array", "uniqueItems": True, "maxItems": 2}, {"type": "array", "maxItems": 2}, [".uniqueItems"]),
    (STRING | {"contentEncoding": "base64"}, STRING | {"contentEncoding": "base64"}, [".contentEncoding"]),
    ({"properties": {"a b": STRING | {"format": "x"}}}, {"properties": {"a b": STRING}}, ['.properties["a b"].format']),
    ({"anyOf": [FLAG, STRING | {"format": "x"}]}, {"anyOf": [FLAG, STRING]}, [".anyOf[1].format"]),
    ({"$defs": {"A": {"format": "x"}}}, {"$defs": {"A": {}}}, [".$defs.A.format"]),
    ({"propertyNames": {"format": "uuid"}}, {}, [".propertyNames.format"]),
    (
        {"oneOf": [{"type": "object"}, {"required": ["k"]}], "discriminator": {"propertyName": "k"}},
        {"anyOf": [{"type": "object"}, {"required": ["k"]}]},
        [".oneOf"],
    ),
    (  # a property that neither names does not tell them apart
        {"oneOf": [{"$ref": "#/$defs/A"}] * 2, "discriminator": {"propertyName": "k"}, "$defs": {"A": CITY}},
        {"anyOf": [{"$ref": "#/$defs/A"}] * 2, "$defs": {"A": CITY}},
        [".oneOf"],
    ),
]


@pytest.mark.parametrize(("schema", "expected", "ignored"), IGNORED)
def test_an_annotation_is_left_out_and_reported(schema: Schema, expected: Schema, ignored: list[str]) -> None:
    found = enforceable(schema)
    assert found.schema == expected
    assert list(found.ignored) == ignored


REFUSED: list[tuple[Any, str]] = [
    ({"not": {}}, ".not"),
    ({"allOf": [{}, {"not": {}}]}, ".allOf[1].not"),
    ({"anyOf": [False, {"not": True}]}, ".anyOf[0]"),
    ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}, ".properties.a.not"),
    (False, ""),
    ({"items": {"not": STRING}}, ".items.not"),
    ({"if": FLAG, "then": STRING}, ".if"),
    ({"contains": FLAG}, ".contains"),
    ({"contains": {}, "maxContains": 1}, ".contains"),
    ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    ({"dependentSchemas": {"a": CAT}}, ".dependentSchemas"),
    ({"unevaluatedProperties": FLAG}, ".unevaluatedProperties"),
    ({"anyOf": [CAT, DOG], "unevaluatedProperties": False}, ".unevaluatedProperties"),
    ({"$dynamicRef": "#a"}, ".$dynamicRef"),
    ({"propertyNames": {"enum": ["a"]}, "required": ["b"]}, ".propertyNames"),
    ({"propertyNames": {"pattern": "^a"}, "properties": {"b": FLAG}}, ".propertyNames"),
    ({"propertyNames": {"$ref": "#"}}, ".propertyNames"),
    ({"propertyNames": {"$ref": "#/nowhere"}}, ".propertyNames"),
    ({"propertyNames": {"anyOf": [{"const": "a"}]}}, ".propertyNames"),
    ({"patternProperties": {"a(?!b)": FLAG}}, '.patternProperties["a(?!b)"]'),
    ({"properties": {"a": {"pattern": "a" * 20_000}}}, ".properties.a.pattern"),
    ({"properties": {str(i): FLAG for i in range(10_000)}}, ""),
]


@pytest.mark.parametrize(("schema", "way"), REFUSED)
def test_a_keyword_that_decides_the_shape_is_an_error(schema: Any, way: str) -> None:
    for wrap, at in (
        (lambda one: one, ""),
        (lambda one: {"type": "object", "properties": {"x": one}, "required": ["x"]}, ".properties.x"),
    ):
        with pytest.raises(UnsupportedSchema) as caught:
            enforceable(wrap(schema))
        assert caught.value.way == (at + way if "keys" not in caught.value.why else "")
        assert caught.value.why


OVERLAPPING: list[Schema] = [
    {"oneOf": [{"const": 1}, {"const": 1.0}], "$defs": {}},
    {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Any"}], "$defs": {"Cat": CAT, "Any": {"type": "object"}}},
    {"oneOf": REFERENCES, "$defs": {"Cat": without(CAT, "required"), "Dog": without(DOG, "required")}},
    {"oneOf": REFERENCES, "$defs": {"Cat": without(CAT, "type"), "Dog": without(DOG, "type")}},  # both take a number
    {"oneOf": [{"$ref": "#/$defs/A"}, {"type": "object", "properties": {"b": FLAG}}], "$defs": {
        "A": {"type": "object", "properties": {"a": FLAG}, "required": ["a"]}}},  # an open object may have both
]  # fmt: skip


@pytest.mark.parametrize("schema", OVERLAPPING)
def test_schemas_that_may_overlap_stay_one_of(schema: Schema) -> None:
    assert enforceable(schema).schema == schema


def test_closed_objects_with_other_required_names_are_apart() -> None:
    a, b = ({"type": "object", "properties": {name: FLAG}, "required": [name]} for name in "ab")
    schema = {"oneOf": [{"$ref": "#/$defs/A"}, b], "$defs": {"A": a}}
    assert "anyOf" in enforceable(schema).schema
    assert "oneOf" in enforceable({**schema, "type": "object", "required": []}).schema  # then objects stay open


def doubling(keyword: str) -> Schema:
    """A schema that has 2^40 parts if its references are followed without a bound."""
    defs = {str(i): {keyword: [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}
    return {**defs, "40": {"type": "object", "properties": {"a": FLAG}}}


def test_references_are_followed_within_a_bound() -> None:
    assert "oneOf" in enforceable({"oneOf": [{"$ref": "#/$defs/0"}] * 9, "$defs": doubling("anyOf")}).schema
    wide = {f"{i}": {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 400} for i in range(11)}
    with pytest.raises(UnsupportedSchema, match="unevaluatedProperties"):
        enforceable({"allOf": [{"$ref": "#/$defs/0"}] * 2, "unevaluatedProperties": False, "$defs": wide})


PATTERNS = [  # JavaScript's, Rust's, a text that matches, and one that does not
    (r"^\d+\/\d+$", r"^\d+\/\d+$", "1/2", "12"),
    (r"^[\w-.]+$", r"^[\w-.]+$", "a-.", "a b"),
    (r"^[a-\d]$", r"^[a\-\d]$", "-", "b"),
    (r"^[!--a]$", r"^[!-\-a]$", "'", "b"),
    (r"^[^!--a]$", r"^[^!-\-a]$", "b", "-"),
    (r"^[--a]$", r"^[\--a]$", "A", "b"),
    (r"^[[a]$", r"^[\[a]$", "[", "b"),
    (r"^[a&&b]$", r"^[a&\&b]$", "&", "c"),
    (r"^{[a-z]+}$", r"^\{[a-z]+}$", "{ab}", "ab"),
    (r"^a{,5}$", r"^a\{,5}$", "a{,5}", "aa"),
    (r"^a{2,}b{1}$", r"^a{2,}b{1}$", "aaab", "ab"),
    (r"^\i\-\@\<$", r"^i\-\@<$", "i-@<", "x"),
    (r"^[^]$", r"^[\s\S]$", "x", ""),
    (r"^\cA\0[\b]$", r"^\x01\x00[\x08]$", "\x01\x00\x08", "A"),
    (r"^\uD83D\uDE00\u0041$", r"^\u{1F600}\u0041$", "😀A", "A"),
    (r"^[\uD83D\uDE00]$", r"^[\u{1F600}]$", "😀", "A"),
    (r"^\p{L}\u$", r"^\p{L}u$", "äu", "1u"),
    (r"^$|^a$", r"^$|^a$", "a", "b"),
]
NO_PATTERNS = (
    *(r"(?=a)b", r"(?!a)b", r"(?<=a)b", r"(?<!a)b", r"\bfoo", r"\Bx", r"(a)\1", r"(?<n>a)\k<n>", r"(a^)*", r"a(b$)+c"),
    r"^\uD83D$",
)  # fmt: skip


@pytest.mark.parametrize(("pattern", "expected", "text", "other"), PATTERNS)
def test_a_pattern_of_javascript_is_translated(pattern: str, expected: str, text: str, other: str) -> None:
    written = translated(pattern)
    assert written == expected
    assert allows({"pattern": written}, text)
    assert not allows({"pattern": written}, other)
    assert translated(expected) == expected


@pytest.mark.parametrize("pattern", NO_PATTERNS)
def test_a_pattern_without_an_equivalent_has_none(pattern: str) -> None:
    assert translated(pattern) is None


def allows(schema: Schema, text: str) -> bool:
    """Return True if llguidance takes a text for valid."""
    known, _ = vocabulary(())
    grammar = json.dumps({"grammars": [{"json_schema": {"type": "string", **schema}}]})
    matcher = LLMatcher(known, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = known.tokenize_str(json.dumps(text, ensure_ascii=False))
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_the_known_formats_are_those_of_llguidance() -> None:
    names = {"regex", "iri", "uri-reference", "uri-template", "json-pointer", "idn-email", "binary", "byte", "int64"}
    for name in FORMATS | names:
        grammar = json.dumps({"grammars": [{"json_schema": {"type": "string", "format": name}}]})
        assert ("Unknown format" not in LLMatcher.validate_grammar(grammar)) == (name in FORMATS), name


WORDS = """
    type enum const format pattern multipleOf required uniqueItems then else minimum maximum exclusiveMinimum allOf
    anyOf oneOf prefixItems items additionalItems additionalProperties propertyNames minLength maxLength minItems
    maxItems not if minProperties maxProperties contains minContains maxContains dependentRequired dependentSchemas
    dependencies $ref $defs unevaluatedItems unevaluatedProperties properties patternProperties discriminator
    propertyName $schema $id
"""
KEYWORDS = WORDS.split()
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    st.sampled_from(
        ["", "#", "#/$defs/a", "#/properties/a", "string", "object", "a", "(?=a)", "[", "\\", "date", "^a{"]
    ),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*KEYWORDS, "a", "b c"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=400)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=5))
def test_no_schema_is_another_error_or_is_altered(schema: Schema) -> None:
    before = deepcopy(schema)
    try:
        found = enforceable(schema)
    except UnsupportedSchema as err:
        assert err.why  # noqa: PT017
    else:
        assert not isinstance(found.schema, bool)
        json.dumps(found.schema)
    assert schema == before
