"""Grammars over every kind of tokenizer: what may be said is what a plain reference takes, and nothing is said else."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import vocabularies
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemas import grammar_of, schemas
from vocabularies import each_kind

from ssmd.api.openai.fields import of_choice, of_grammar, of_regex, of_schema
from ssmd.engine.sampling.grammar import FORCED_LEAST, MAX_BYTES, Grammars, Guide
from ssmd.engine.terms import Grammar, Rejection

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"the_name_of_the_city": {"type": "string", "maxLength": 8}, "people": {"enum": ["few", "many"]}},
    "required": ["the_name_of_the_city", "people"],
    "additionalProperties": False,
}


PADDING = 3  # ids that a model has beyond its vocabulary


@cache
def grammars(name: str) -> Grammars:
    tokenizer = vocabularies.opened(name)
    return Grammars(tokenizer, [stop_of(name)], tokenizer.vocabulary + PADDING)


def stop_of(name: str) -> int:
    return vocabularies.id_of(name.removesuffix(vocabularies.APART), "<|im_end|>")


def said(name: str, grammar: Grammar, seed: int = 0, *, most: int = 400, forced: bool = False) -> str | None:
    """Return a random text of the grammar; None if it does not end within `most` tokens."""
    tokenizer, guide, chance = vocabularies.opened(name), grammars(name).read(grammar), random.Random(seed)
    tokens: list[int] = []
    while not guide.ended and len(tokens) < most:
        token = chance.choice(allowed(guide))
        if token == stop_of(name):
            break
        assert token < tokenizer.vocabulary
        tokens += [token, *guide.take(token, most if forced else 0)]
    return vocabularies.decoded(tokenizer, tokens) if len(tokens) < most else None


def allowed(guide: Guide) -> list[int]:
    """The tokens that may come."""
    found: list[int] = np.flatnonzero(guide.mask() == 0).tolist()
    return found


@each_kind
@pytest.mark.parametrize(
    "regex", [r"[0-9]{3} [a-z]{1,4}", r"(the|quick) (fox|dog)!?", r"gr(ü|ö)ße[rn]?", r"\d+\.\d{2}"]
)
def test_a_regex_is_matched_from_beginning_to_end(name: str, regex: str) -> None:
    if name.startswith("unigram") and not regex.isascii():
        pytest.skip("where characters begin alike, llguidance has to spell that beginning, and it has no bytes")
    for seed in range(8):
        text = said(name, of_regex(regex, "guided_regex"), seed)
        assert text is None or re.fullmatch(regex, text), text


@each_kind
def test_a_choice_is_one_of_them(name: str) -> None:
    choices = ["the fox", "the dog", "quick", "the  dog", "größer 日本"]
    if not name.startswith("unigram"):
        choices.append('a "quoted" \\\\ one')  # of these characters that one has none
    texts = {said(name, of_choice(choices, "guided_choice"), seed) for seed in range(12)}
    assert texts <= set(choices)
    assert len(texts) > 1


@pytest.mark.parametrize("name", ["byte-level", "qwen", "byte fallback"])
def test_a_space_at_the_beginning_is_said(name: str) -> None:
    """Also where a decoder takes one away there."""
    choices = {" the dog", " fox", "fox"}
    assert {said(name, of_choice(sorted(choices), "guided_choice"), seed) for seed in range(30)} == choices


@pytest.mark.parametrize("name", ["byte-level", "qwen", "byte fallback", "byte-level, prefix space"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas(), seed=st.integers(0, 3), forced=st.booleans())
def test_what_a_schema_allows_validates(name: str, schema: dict[str, Any], seed: int, forced: bool) -> None:
    text = said(name, grammar_of(schema), seed, forced=forced)
    if text is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_control_tokens_come_only_where_a_grammar_names_them() -> None:
    tokenizer = vocabularies.opened("byte-level")
    guide = grammars("byte-level").read(of_grammar("start: <|im_start|> /.*/", "grammar"))
    named = vocabularies.id_of("byte-level", "<|im_start|>")
    assert allowed(guide) == [named]
    guide.take(named)
    controls = [token for token in allowed(guide) if tokenizer.is_control(token)]
    assert controls == [stop_of("byte-level")]
    assert len(allowed(guide)) > 100


def test_forced_tokens_come_at_once_and_copies_are_independent() -> None:
    tokenizer = vocabularies.opened("byte-level")
    first = grammars("byte-level").read(grammar_of(CITY))
    other = first.copy()
    [start] = allowed(first)
    forced = first.take(start, room=100)
    assert len(forced) >= FORCED_LEAST
    whole = tokenizer.token_bytes(start) + b"".join(map(tokenizer.token_bytes, forced))
    assert b'{"the_name_of_the_city":"'.startswith(whole)
    assert other.take(start, room=FORCED_LEAST + 1) == forced[: FORCED_LEAST + 1]
    assert other.take(forced[FORCED_LEAST + 1], room=FORCED_LEAST - 1) == []
    assert allowed(other) == forced[FORCED_LEAST + 2 : FORCED_LEAST + 3]
    assert len(allowed(first)) > 1


def test_a_grammar_that_was_read_before_begins_anew() -> None:
    found, other = grammars.__wrapped__("qwen"), of_regex("[ab]{3}", "guided_regex")
    for _ in range(2):
        guide = found.read(grammar_of(CITY))
        start = allowed(guide)
        guide.take(start[0])
        assert allowed(found.read(grammar_of(CITY))) == start != allowed(found.read(other))
    for n in range(20):  # more than are kept
        found.read(of_regex(f"x{n}", "guided_regex"))
    assert allowed(found.read(grammar_of(CITY))) == start


def test_nothing_is_made_before_the_first_grammar() -> None:
    code = "import sys, ssmd.app, ssmd.server; assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_many_threads_read_grammars_at_once() -> None:
    found = grammars.__wrapped__("qwen")
    ended: list[str] = []

    def read() -> None:
        guide = found.read(grammar_of(CITY))
        guide.take(allowed(guide)[0])
        ended.append("well")

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 8


ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {**CITY, "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}}


def chain(links: int) -> dict[str, Any]:
    """A schema whose objects stand within each other by references."""
    of = [{"properties": {"x": {"$ref": f"#/$defs/{i // 400}/{i + 1}"}}} for i in range(links)]
    groups = {str(n): {str(i): of[i] for i in range(links) if i // 400 == n} for n in range(links // 400 + 1)}
    return {"$ref": "#/$defs/0/0", "$defs": groups}


# The process would end at these.
LEAST: dict[str, Any] = {"type": "integer", "minimum": -(2**64), "exclusiveMaximum": -(2**63)}
RULES = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(6000)) + 'a6000: "x"\n'
REFUSED: list[tuple[dict[str, Any], str]] = [
    (LEAST, ".exclusiveMaximum"),
    ({"items": {"type": "number", "multipleOf": 1e300}}, ".items.multipleOf"),
    ({"minimum": 2**63}, ".minimum"),
    ({"maximum": -(10**400)}, ".maximum"),
    ({"minimum": 2**53 + 1}, ".minimum"),  # it would be one less
    (chain(1600), ""),
    ({"$ref": "http://x/a", "$defs": {"a": {"$id": "http://x/a", **chain(1600)}}}, ""),
    ({"items": {"minProperties": 2}}, ".items.minProperties"),
    ({"required": ["a"], "properties": {"a": {}}, "minProperties": 3}, ".minProperties"),
    ({"properties": {"a": {"type": "string", "pattern": "(a|b)?" * 3000}}}, ".properties.a.pattern"),
    ({"properties": {"a": {"items": {"not": {"type": "string"}}}}}, ".properties.a.items.not"),
    ({"properties": {"a b": {"if": {}, "then": {"type": "null"}}}}, '.properties["a b"].if'),
    ({"anyOf": [{"type": "integer"}, {"items": {"contains": {"type": "null"}}}]}, ".anyOf[1].items.contains"),
    ({"properties": {"a": {"type": "strin"}}}, ".properties.a.type"),
    ({"properties": {"a": {"$ref": "http://127.0.0.1:9/a.json"}}}, ".properties.a.$ref"),
    ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, ".properties.a.$ref"),
    ({"$ref": "#/$defs/nowhere"}, ".$ref"),
    ({"$ref": "#"}, ""),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, ""),
    (ENDLESS, ""),
    ({"enum": []}, ""),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ".minimum"),
    ({"properties": {f"p{i}": True for i in range(501)}}, ".properties"),
    ({"anyOf": [{"const": i} for i in range(501)]}, ".anyOf"),
    ({"patternProperties": {"(?=a)b": True}}, '.patternProperties["(?=a)b"]'),
    ({"properties": {"a": {"type": "string", "pattern": "a("}}}, ".properties.a.pattern"),
    ({"pattern": "a("}, ".pattern"),
    ({"patternProperties": {"a(": True}}, '.patternProperties["a("]'),
    ({"items": {"propertyNames": {"pattern": "a("}}}, ".items.propertyNames.pattern"),
    ({"items": {"propertyNames": {"minLength": 3, "maxLength": 2}}}, ".items.propertyNames"),
    ({"properties": {"a": {"properties": {"b": "string"}}}}, ".properties.a.properties.b"),
    ({"properties": {"a": {"enum": "b"}}}, ".properties.a.enum"),
    ({"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}, ".properties.a.oneOf"),
    ({"not": {}}, ".not"),
    ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}, ".properties.a.not"),
    ({"anyOf": [{"not": True}, False]}, ".anyOf[0].not"),
    ({"properties": {"a": {"type": "string", "maxLength": "4"}}}, ".properties.a.maxLength"),
    ({"properties": {"a": {"required": "b"}}}, ".properties.a.required"),
    ({"allOf": [{"items": {}}, {"type": "string", "minLength": 3, "maxLength": 2}]}, ".allOf[1].minLength"),
    ({"properties": {"a": {"properties": {"b": {}}, "minProperties": 1}}}, ".properties.a.minProperties"),
    ({"items": {"propertyNames": {"const": "a"}, "required": ["b"]}}, ".items.propertyNames"),
    ({"items": {"propertyNames": {"not": {"const": "a"}}}}, ".items.propertyNames.not"),
    ({"allOf": [{"anyOf": [{"properties": {f"k{i}_{j}": True}} for j in range(8)]} for i in range(8)]}, ""),
    ({"items": {"type": "number", "multipleOf": 1e-12}}, ".items.multipleOf"),
    ({"properties": {"multipleOf": {"multipleOf": 7}, "a": {"multipleOf": 0}}}, ".properties.a.multipleOf"),
    ({"properties": {"a": {"type": "array", "items": 3}}}, ".properties.a.items"),
    ({"items": {"additionalProperties": "string"}}, ".items.additionalProperties"),
    ({"properties": {"a": {"anyOf": [{"type": "null"}, "string"]}}}, ".properties.a.anyOf[1]"),
    ({"properties": {"a": {"type": ["null", "strin"]}}}, ".properties.a.type"),
    ({"items": {"required": ["a", 1]}}, ".items.required"),
]


@pytest.mark.parametrize(("schema", "way"), REFUSED)
def test_a_schema_that_is_not_supported_is_refused_with_its_path(schema: dict[str, Any], way: str) -> None:
    with pytest.raises(Rejection) as caught:
        grammars("qwen").read(of_schema(schema, "response_format"))
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "unsupported_schema",
        f"response_format{way}",
    )
    assert caught.value.param
    assert caught.value.message.startswith(caught.value.param)


@pytest.mark.parametrize(
    "text",
    [
        "start: " + "(" * 3000 + '"a"' + ")" * 3000,
        'start: a\na: "x" a\n',
        "start: nowhere",
        "start: /(/",
        "start: /a/" + " " * MAX_BYTES,
        "start: <|nowhere|>",
        "start: %json {",
        'start: /a/ | ""  | start start nowhere',
    ],
)
def test_so_is_any_other_grammar(text: str) -> None:
    with pytest.raises(Rejection) as caught:
        grammars("qwen").read(Grammar(text, "grammar"))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", "grammar")


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (RULES, "grammar"),
        (RULES.upper().replace("START", "start"), "grammar"),
        (f"start: /{'(a|b)?' * 10_000}/", "grammar"),
        (f"start: a\na: %json {json.dumps(LEAST)}", "grammar.%json[0].minimum"),
        ("start: %json {'a': 1}", "grammar"),
    ],
)
def test_a_grammar_that_would_end_the_process_is_not_read(text: str, param: str) -> None:
    with pytest.raises(Rejection) as caught:
        grammars("qwen").read(of_grammar(text, "grammar"))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("text", "becomes", "ignored"),
    [
        (
            'start: a | b // %json {"not": {}}\na: %json{"type": "object", "propertyNames": {"type": "string"}} "x"\n'
            'b: "%json {" /%json \\[/ %json { "properties" : {"é": {"type": "string", "format": "cuid"}}}\n',
            'start: a | b // %json {"not": {}}\na: %json{"type": "object"} "x"\n'
            'b: "%json {" /%json \\[/ %json {"properties": {"é": {"type": "string"}}}\n',
            ("grammar.%json[1].properties.é.format",),
        ),
        (
            'start: %json {"x-guidance": {"whitespace_flexible": false}, "type": "array", "uniqueItems": false}',
            'start: %json {"type": "array", "x-guidance": {"whitespace_flexible": false}}',
            (),
        ),
    ],
)
def test_schemas_in_lark_are_made_enforceable(text: str, becomes: str, ignored: tuple[str, ...]) -> None:
    made = of_grammar(text, "grammar")
    assert (made.text.removesuffix('\n%llguidance {"no_forcing": true}\n'), made.ignored) == (becomes, ignored)
    assert grammars("byte-level").read(made).goes_on


@pytest.mark.parametrize(
    ("inner", "param"),
    [
        ('{"type": "array", "items": {"not": {"type": "string"}}}', "grammar.%json[1].items.not"),
        ('{"if": {"const": 1}, "then": {"const": 2}}', "grammar.%json[1].if"),
        ('{"const": 1e400}', "grammar"),
        ('{"const": NaN}', "grammar"),
    ],
)
def test_a_schema_in_lark_that_is_not_held_to_is_refused(inner: str, param: str) -> None:
    with pytest.raises(Rejection) as caught:
        of_grammar(f'start: %json {{"type": "null"}} a\na: %json {inner}\n', "grammar")
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_disallowed_token_is_an_error_and_no_other_may_follow() -> None:
    guide = grammars("byte-level").read(grammar_of(CITY))
    with pytest.raises(Rejection, match="cannot be followed any further") as caught:
        guide.take(vocabularies.id_of("byte-level", "x"))
    assert (caught.value.status, caught.value.code) == (500, "grammar_failed")
    with pytest.raises(Rejection):
        guide.take(vocabularies.id_of("byte-level", "{"))


def test_a_grammar_that_no_text_fits_is_named_as_the_error() -> None:
    guide = grammars("byte-level").read(of_grammar('start: "go" A\nA: /x/ & /y/\n', "guided_grammar"))
    for token in vocabularies.library("byte-level").encode("go").ids:
        guide.take(token)
    with pytest.raises(Rejection, match="guided_grammar cannot be followed any further: no text fits it") as caught:
        guide.mask()
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "grammar_failed", "guided_grammar")


FOR_EVER = (
    'start: A B\nA: /a*/\nB: "a"\n',
    'root ::= x "a"\nx ::= [a]+\n',
    'start: "," SPACES " a"\nSPACES: " "*\n%llguidance {"no_forcing": false}\n',
)


def test_what_is_bound_to_come_for_ever_holds_up_nobody() -> None:
    """In a process of its own: llguidance would not let go of this one."""
    code = (
        "import sys; sys.path.insert(0, 'tests/engine'); sys.path.insert(0, 'tests'); import test_grammar as own\n"
        "for text in own.FOR_EVER:\n"
        "    for seed in range(9):\n"
        "        own.said('byte-level', own.of_grammar(text, 'grammar'), seed, most=30, forced=True)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_what_is_bound_to_come_is_still_said_at_once() -> None:
    guide = grammars("byte-level").read(of_grammar('root ::= [ab] "the quick brown fox" [ab]{2}', "grammar"))
    assert len(guide.take(vocabularies.id_of("byte-level", "a"), 100)) >= FORCED_LEAST
