"""Schemas as programs write them, and as hostile ones might: accepted or refused with a place, and answers valid."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import vocabularies
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssmd.api.openai.fields import of_schema
from ssmd.engine.sampling.grammar import Grammars
from ssmd.engine.terms import Grammar, Rejection

Schema = dict[str, Any]
CORPUS: dict[str, dict[str, Schema]] = json.loads((ROOT / "tests" / "data" / "schemas.json").read_text("utf-8"))
# Those that no answer can be valid by, each with its place. zod 3 writes "IPv4 or IPv6 network" as "both".
REFUSED = {
    ("zod 4", "never"): ".not",
    ("zod 3", "undefined"): ".not",
    ("zod 3", "never"): ".not",
    ("zod 3", "nan"): ".not",
    ("zod 3", "cidr"): "",
    ("zod 4, openapi-3.0", "null"): "",
}
MOST = 300  # tokens of an answer
WALKS = 3


@cache
def grammars() -> Grammars:
    tokenizer = vocabularies.opened("byte-level")
    return Grammars(tokenizer, [stop()], tokenizer.vocabulary)


@cache
def stop() -> int:
    return vocabularies.id_of("byte-level", "<|im_end|>")


@cache
def closing() -> frozenset[int]:
    """Tokens that end strings, objects and lists: a walk that takes them comes to its end."""
    tokenizer = vocabularies.opened("byte-level")
    return frozenset(t for t in range(tokenizer.vocabulary) if tokenizer.token_bytes(t)[:1] in (b'"', b"}", b"]"))


def walk(grammar: Grammar, seed: int) -> str | None:
    """Return a random answer under the grammar's masks; None if it does not end."""
    tokenizer, guide, chance = vocabularies.opened("byte-level"), grammars().read(grammar), random.Random(seed)
    tokens: list[int] = []
    while not guide.ended and len(tokens) < MOST:
        allowed = np.flatnonzero(guide.mask() == 0).tolist()
        ends = [token for token in allowed if token in closing() or token == stop()]
        token = chance.choice(ends if ends and chance.random() < 0.3 else allowed)
        if token == stop():
            break
        tokens.append(token)
        guide.take(token)
    return vocabularies.decoded(tokenizer, tokens) if len(tokens) < MOST else None


def without(schema: Any, paths: tuple[str, ...], way: str = "s") -> Any:
    """Return a schema without the keywords at these paths, and without patterns that Python cannot read."""
    if isinstance(schema, list):
        return [without(one, paths, f"{way}[{i}]") for i, one in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    named = {key: f"{way}.{key}" if key.replace("$", "").isidentifier() else None for key in schema}
    return {
        key: without(value, paths, named[key] or f"{way}[{json.dumps(key)}]")
        for key, value in schema.items()
        if named[key] not in paths and not (key == "pattern" and "\\p{" in str(value))  # Python has no such classes
    }


def validator(schema: Schema) -> Any:
    """Return jsonschema's validator, by `$schema`, or of draft 4 for a schema with that draft's exclusive bounds."""
    draft_4 = re.search(r'"exclusiveM[a-z]+": (true|false)', json.dumps(schema))
    kind = jsonschema.Draft4Validator if draft_4 else jsonschema.validators.validator_for(schema)
    return kind(schema)


@pytest.mark.parametrize("writer", CORPUS)
def test_a_written_schema_is_kept_or_refused_by_place(writer: str) -> None:
    refused: dict[tuple[str, str], Rejection] = {}
    endless: list[str] = []
    for name, schema in CORPUS[writer].items():
        before = json.dumps(schema)
        try:
            grammar = of_schema(schema, "s")
            texts = [text for seed in range(WALKS) if (text := walk(grammar, seed)) is not None]
        except Rejection as err:
            refused[writer, name] = err
            continue
        assert json.dumps(schema) == before
        held = without(schema, grammar.ignored)
        for text in texts:
            validator(held).validate(json.loads(text))
        endless += [] if texts else [name]
    assert {key: err.param for key, err in refused.items()} == {
        key: f"s{way}" for key, way in REFUSED.items() if key[0] == writer
    }
    assert {err.code for err in refused.values()} <= {"unsupported_schema"}
    assert not any("\n" in err.message for err in refused.values())
    assert len(endless) <= 0.1 * len(CORPUS[writer]), endless  # a random text seldom ends as some patterns want


LEAVES = st.sampled_from(
    (
        *({"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"not": {}}, False),
        *(
            {"type": "string", "maxLength": 2},
            {"type": ["string", "null"], "maxLength": 1},
            {"const": "a"},
            {"const": 1},
        ),
        *({"enum": ["a", 1.0, None]}, {"enum": [True, 2]}, {"type": "string", "format": "cuid", "pattern": "^c?$"}),
    )
)
MORE = st.fixed_dictionaries(
    {},
    optional={
        "additionalProperties": st.sampled_from([False, {"type": "boolean"}]),
        "propertyNames": st.sampled_from([{"type": "string"}, {"enum": ["a", "k"]}, {"maxLength": 2}]),
        "unevaluatedProperties": st.booleans(),
        "minProperties": st.integers(0, 2),
    },
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    """An object of a few properties."""
    properties = draw(st.dictionaries(st.sampled_from("abk"), inner, max_size=3))
    required = draw(st.lists(st.sampled_from([*properties] or ["a"]), unique=True))
    return {"type": "object", "properties": properties, "required": required, **draw(MORE)}


@st.composite
def joined(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    """An object, a list, or schemas that are joined, some by reference."""
    kind = draw(st.sampled_from(["object", "object", "array", "oneOf", "oneOf", "anyOf", "allOf"]))
    if kind == "object":
        return draw(objects(inner))
    if kind == "array":
        return {"type": "array", "items": draw(inner), "maxItems": 2, "uniqueItems": False}
    references = st.sampled_from([{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}])
    many = draw(
        st.lists(inner | references if kind != "allOf" else inner, min_size=1, max_size=3 if kind != "allOf" else 1)
    )
    return {kind: many} | draw(st.sampled_from([{}, {}, {"discriminator": {"propertyName": "k"}}]))


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(schema=joined(st.recursive(LEAVES, joined, max_leaves=5)), x=objects(LEAVES), y=objects(LEAVES))
def test_an_answer_to_joined_schemas_is_valid(schema: Any, x: Any, y: Any) -> None:
    whole = schema | {"$defs": {"X": x, "Y": y}}
    try:
        grammar = of_schema(whole, "s")
        texts = [walk(grammar, seed) for seed in range(2)]
    except Rejection:
        return
    held = jsonschema.Draft202012Validator(without(whole, grammar.ignored))
    for text in texts:
        if text is not None:
            held.validate(json.loads(text))
