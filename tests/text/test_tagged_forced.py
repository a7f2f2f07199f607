"""Grammars of forced calls in tags: valid arguments pass as the template renders them, others do not."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from reading import read
from text.test_forced import vocabulary
from text.test_tagged_calls import call

from ssmd.engine.sampling.trial import limits
from ssmd.text.calls.forced import forced
from ssmd.text.calls.formats import QWEN_3_5
from ssmd.text.calls.tagged.kinds import kinds_of
from ssmd.text.schemas import UnsupportedSchema, enforceable

END = "\n</parameter>\n"
# Of each schema of one argument: values that pass, and values that do not.
SCHEMAS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "string": ({"type": "string"}, ["", "12", "a\n b\n", "x</parameter> y\n</parameter>z", "<b>", "True"], []),
    "integer": ({"type": "integer", "minimum": 0, "maximum": 99}, [0, 42], [100, "x", 1.5, None]),
    "number": ({"type": "number", "minimum": 0, "maximum": 1}, [0.5, 1], [2, "x"]),
    "boolean": ({"type": "boolean"}, [True, False], ["true", None, 1]),
    "null": ({"type": "null"}, [None], ["null", False]),
    "one boolean": ({"type": "boolean", "enum": [True]}, [True], [False]),
    "string or null": ({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]}, ["x", None], ["abcdef"]),
    "integer or null": ({"type": ["integer", "null"], "maximum": 9, "minimum": 0}, [9, None], [10, "x"]),
    "enum": ({"type": "string", "enum": ["on", "1", 'a"\n b']}, ["on", "1", 'a"\n b'], ["off", ""]),
    "mixed enum": ({"enum": ["on", 1, True, None, [1]]}, ["on", 1, True, None, [1]], ["off", 2, False, [2]]),
    "const": ({"const": "x"}, ["x"], ["y"]),
    "pattern": ({"type": "string", "pattern": r"^[a-z]{2}/\d$"}, ["ab/1"], ["ab/12", "xab/1", "ab1"]),
    "open pattern": ({"type": "string", "pattern": "a|^b$", "maxLength": 4}, ["xax", "b", "a"], ["bx", "c"]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["éé", "a\nb"], ["a", "abcd"]),
    "date": ({"type": "string", "format": "date"}, ["2026-11-28"], ["2026-13-01", "today"]),
    "date-time": ({"type": "string", "format": "date-time"}, ["2026-11-28T09:05:00.5Z"], ["2026-11-28"]),
    "email": ({"type": "string", "format": "email"}, ["a.b@example.org"], ["a@", "a"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["01234567"]),
    "ipv6": ({"type": "string", "format": "ipv6"}, ["::1", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1::2::3", "1:2"]),
    "uri": ({"type": "string", "format": "uri"}, ["https://a.org/b?c=%20#d"], ["a b", "//x"]),
    "object": (
        {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "boolean"}}, "required": ["x"]},
        [{"x": 1}, {"x": 1, "y": True}],
        [{}, {"x": "1"}, "x", {"x": 1, "z": 1}],
    ),
    "list": (
        {"type": "array", "items": {"enum": ["a", "</parameter>"]}, "maxItems": 2},
        [[], ["a", "</parameter>"]],
        [["b"]],
    ),
    "string or list": (
        {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
        ["x", '{"a": 1}', "2026", [1, 2]],
        [[1, 2, 3], {"a": 12345}],
    ),
    # Strings that begin as numbers do are none of these.
    "date or number": (
        {"anyOf": [{"type": "string", "maxLength": 10}, {"type": "number", "maximum": 9, "minimum": 0}]},
        ["2026-11-28", "-x", "5 a", "5.", "007", "1e", "", "{", 5, 0.5],
        [10, -1, "5\n"],
    ),
    "digits or integer": (
        {"type": ["string", "integer"], "maxLength": 4, "maximum": 9, "minimum": 0},
        ["5.5", "9a", "[1]", 7],
        [10, "-5"],
    ),
    "words or constants": (
        {"anyOf": [{"type": "string", "maxLength": 6}, {"const": False}, {"type": "null"}]},
        ["Truth", "none", "TRUE", False, None],
        ["true", "True", "false", "null"],
    ),
    "reference": ({"$ref": "#/$defs/state"}, ["on", "off"], ["x"]),
    "list of references": ({"type": "array", "items": {"$ref": "#/$defs/state"}, "maxItems": 1}, [["on"]], [["x"]]),
    "all of": (
        {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]},
        ["ab"],
        ["a", "abcd"],
    ),
    "anything": ({}, ["x", 1, {"a": [None]}, True], []),
}
UNBOUNDED = ("string", "anything", "email", "uri", "number")  # texts that are drawn at random do not end


def parameters_of(schema: Any) -> dict[str, Any]:
    definitions = {"state": {"enum": ["on", "off"]}}
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": definitions}


@cache
def grammar_of(name: str) -> str:
    return grammar(parameters_of(SCHEMAS[name][0]))


def grammar(parameters: Any) -> str:
    tools = [{"function": {"name": "f", "parameters": enforceable(parameters).schema}}]
    return forced(QWEN_3_5, tools, several=False, thought=None, controls={})


def passes(text: str, lark: str) -> bool:
    known, _ = vocabulary(())
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(lark), limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    ids = known.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def written(value: Any) -> str:
    """A value as the template renders it."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_valid_values_pass_and_no_others(name: str) -> None:
    schema, valid, invalid = SCHEMAS[name]
    parameters, lark = parameters_of(schema), grammar_of(name)
    for value in valid:
        text = call(("a", written(value)))
        assert passes(text, lark), value
        [(_, arguments, whole)] = read(QWEN_3_5, [text], tools={"f": parameters}).calls
        assert (json.loads(arguments), whole) == ({"a": value}, True)
    for value in invalid:
        assert not passes(call(("a", written(value))), lark), value
    assert not passes(call(), lark)
    assert not passes(call(("a", written(valid[0])), ("b", "x")), lark)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in UNBOUNDED])
def test_what_is_drawn_is_valid(name: str) -> None:
    known, _ = vocabulary(())
    mask = allocate_token_bitmask(1, known.vocab_size)
    parameters = parameters_of(SCHEMAS[name][0])
    for seed in range(4):
        drawn, ids = random.Random(seed), list[int]()
        matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar_of(name)), limits=limits())
        while not matcher.is_accepting():
            assert len(ids) < 2000
            fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: known.vocab_size]).tolist()
            ids.append(drawn.choice([token for token in allowed if token != 2]))
            assert matcher.consume_token(ids[-1])
        text = known.decode_bytes(ids).decode()
        [(_, arguments, whole)] = read(QWEN_3_5, [text], tools={"f": parameters}).calls
        assert whole
        jsonschema.validate(json.loads(arguments), parameters, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    ("parameters", "valid", "invalid"),
    [
        (None, [{}], [{"a": 1}]),
        ({"properties": {}}, [{}], [{"a": 1}]),
        ({"type": "object"}, [{}, {"a": "x", "b-c": "y"}], [{"a>b": "x"}]),
        (
            {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
            [{}, {"a": 1}, {"b": 1}],
            [{"b": 1, "a": 1}],
        ),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "x"}]),
        (
            {"patternProperties": {"^x": {"type": "boolean"}}, "additionalProperties": False},
            [{"xy": True}],
            [{"y": True}],
        ),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"properties": {"a": {"type": "integer"}}}}}, [{"a": 1}], [{"a": "x"}]),
        (
            {"anyOf": [{"properties": {n: {"type": "integer"}}, "required": [n]} for n in ("a", "b")]},
            [{"a": 1}, {"b": 1}],
            [{}, {"a": 1, "b": 1}],
        ),
    ],
)
def test_arguments_have_the_shape_of_their_schema(
    parameters: Any, valid: list[Mapping[str, Any]], invalid: list[Mapping[str, Any]]
) -> None:
    tools = [
        {"function": {"name": "f", "parameters": parameters and enforceable({"type": "object", **parameters}).schema}}
    ]
    lark = forced(QWEN_3_5, tools, several=False, thought=None, controls={})
    for value in valid:
        assert passes(call(*((key, written(one)) for key, one in value.items())), lark), value
    for value in invalid:
        assert not passes(call(*((key, written(one)) for key, one in value.items())), lark), value


@pytest.mark.parametrize(
    "text", ["x</parameter></function>", "x</parameter>\n<parameter=b>", "</function>\n</tool_call>"]
)
def test_a_forced_string_is_never_read_as_its_end(text: str) -> None:
    known, _ = vocabulary(())
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar_of("string")))
    ids = known.tokenize_str(f"<tool_call>\n<function=f>\n<parameter=a>\n{text}")
    assert matcher.try_consume_tokens(ids) < len(ids)


@pytest.mark.parametrize(
    ("parameters", "way"),
    [
        ({"properties": {"a>b": {}}}, '.properties["a>b"]'),
        ({"properties": {"a": {"type": "string", "pattern": "(^a|b)c"}}}, ".properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "$ref": "#/properties/a"}}}, ".properties.a"),
        ({"properties": {"a": {}}, "minProperties": 1}, ".minProperties"),
    ],
)
def test_what_tags_cannot_hold_is_an_error_with_its_place(parameters: Any, way: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        grammar({"type": "object", **parameters})
    assert caught.value.way == way


def _doubled(levels: int) -> dict[str, Any]:
    """A schema that refers twice to the next level, and so on: 2^levels ways."""
    refs = {f"l{i}": {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 8} for i in range(levels)}
    return {**refs, f"l{levels}": {"type": "string"}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"$ref": "#/$defs/l0"}}, "$defs": _doubled(10)},
        {"$ref": "#/$defs/l0", "$defs": _doubled(10)},
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{n}": {}}} for n in "ab"]} for i in range(30)]},
        {"properties": {"a": {"type": "string", "anyOf": [{"$ref": "#/properties/a"}] * 8}}},
    ],
)
def test_hostile_schemas_are_refused_at_once(parameters: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": {"type": "object", **parameters}}}]
    with pytest.raises(UnsupportedSchema):
        forced(QWEN_3_5, tools, several=False, thought=None, controls={})
    assert len(kinds_of(parameters)) < 100


pieces = ["</parameter>", "\n", " ", "<parameter=", "b", ">", "</function>", "<function=", "</tool_call>", "</", "x"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(pieces), max_size=8).map("".join))
def test_a_forced_string_is_read_as_it_was_allowed(text: str) -> None:
    """The grammar's ends of a value are the reader's."""
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a"]}
    said = call(("a", text))
    found = [json.loads(arguments) for _, arguments, _ in read(QWEN_3_5, [said], tools={"f": parameters}).calls]
    if passes(said, grammar_of("string")):
        assert found == [{"a": text}]
    elif "<parameter=" not in text:  # of these tags, the reader takes only the tool's own as an end
        assert found != [{"a": text}] or "\n</parameter>\n" in f"\n{text}\n"
