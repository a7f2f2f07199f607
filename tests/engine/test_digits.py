"""Digits of numbers in answers to a schema: bounded, but for strings, and where the schema itself wants more."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import vocabularies

from ssmd.api.openai.fields import of_regex, of_schema
from ssmd.engine.sampling.grammar import Grammars
from ssmd.engine.terms import Grammar
from ssmd.text.calls.forced import forced
from ssmd.text.calls.formats import FORMATS, Format

MOST = 400
TOKENS: tuple[str, ...] = ("byte-level", "qwen", "llama", "byte fallback")


@cache
def grammars(name: str) -> Grammars:
    tokenizer = vocabularies.opened(name)
    return Grammars(tokenizer, [vocabularies.id_of(name, stop(name))], tokenizer.vocabulary)


def stop(name: str) -> str:
    return "</s>" if name == "byte fallback" else "<|im_end|>"


def greedy(grammar: Grammar, likes: str, name: str = "byte-level") -> str:
    """Return the answer of a model that says the first of these characters that it may, and else anything."""
    tokenizer, guide = vocabularies.opened(name), grammars(name).read(grammar)
    end = vocabularies.id_of(name, stop(name))
    pieces = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in range(tokenizer.vocabulary)]
    tokens: list[int] = []
    while not guide.ended and len(tokens) < MOST:
        allowed = np.flatnonzero(guide.mask() == 0).tolist()
        liked = (token for like in likes for token in allowed if token != end and pieces[token][:1] == like)
        token = next(liked, end if end in allowed else allowed[0])
        if token == end:
            break
        tokens.append(token)
        guide.take(token)
    return vocabularies.decoded(tokenizer, tokens)


def numbers(**schema: Any) -> Grammar:
    return of_schema(schema, "json_schema")


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize(
    ("schema", "likes", "expected"),
    [
        ({"type": "integer"}, "7", r"7{19}"),
        ({"type": "integer"}, "-7", r"-7{19}"),
        ({"type": "integer", "minimum": 5}, "7", r"7{19}"),
        ({"type": "number"}, "7", r"7{19}"),
        ({"type": "number"}, "7.", r"7{19}\.7{17}"),
        ({"type": "number"}, ".07", r"0\.0{17}"),
        ({"type": "number"}, "e7", r"7e7{2}"),
        ({"type": "number"}, "e-7", r"-7e-7{2}"),
        ({"type": "number", "minimum": 0, "maximum": 1}, ".70", r"0\.7{17}"),
        ({"type": ["number", "null"]}, "7", r"7{19}"),
        ({}, "7", r"7{19}"),
        ({"properties": {"b": {"type": "number", "minimum": 10, "maximum": 99}}}, '{"b1.}', r'\{"b":11\.1{17}\}'),
        ({"type": "array", "items": {"type": "number"}, "maxItems": 2}, "[7,]", r"\[7{19},7{19}\]"),
    ],
)
def test_digits_of_a_number_are_bounded(name: str, schema: dict[str, Any], likes: str, expected: str) -> None:
    text = greedy(of_schema(schema, "json_schema"), likes, name)
    assert re.fullmatch(expected, text), text
    json.loads(text)


@pytest.mark.parametrize("format_", ["date-time", "time"])
def test_digits_of_a_fraction_of_a_second_are_bounded(format_: str) -> None:
    text = greedy(numbers(type="string", format=format_), '"012T:.')
    assert re.search(r"[0-9]\.[0-9]{9}[Z+-]", text, re.IGNORECASE), text


@pytest.mark.parametrize(
    ("schema", "digits"),
    [
        ({"type": "string", "minLength": 60, "maxLength": 60}, 60),
        ({"type": "string", "pattern": "^[0-9a-f]{64}$"}, 64),
        ({"type": "string", "pattern": "^[0-9]{40}$"}, 40),
        ({"type": "string", "pattern": "^id-[0-9]{40}-x$"}, 40),
        ({"type": "number", "minimum": 1e-25, "maximum": 3e-25}, 25),  # no other answer is valid
        ({"enum": ["12345678901234567890123456789012"]}, 32),
        ({"const": 0.12345678901234568}, 18),
    ],
)
def test_digits_are_free_in_strings_and_where_needed(schema: dict[str, Any], digits: int) -> None:
    text = greedy(of_schema(schema, "json_schema"), '"701')
    assert max(map(len, re.findall("[0-9]+", text))) >= digits - 1, text
    json.loads(text)


def test_digits_of_a_regex_are_free() -> None:
    assert greedy(of_regex(r"[0-9]{50}", "guided_regex"), "7") == "7" * 50


@pytest.mark.parametrize("format_", FORMATS, ids=lambda one: one.name)
def test_digits_in_a_forced_call_are_bounded(format_: Format) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    text = forced(format_, tools, several=False, thought=None, controls={})
    assert re.search(r"[^0-9]7{19}[^0-9]", greedy(Grammar(text, "tools", numbers=True), "7"))


def test_a_copied_guide_bounds_its_own_digits() -> None:
    guide = grammars("byte-level").read(numbers(type="integer"))
    seven = vocabularies.id_of("byte-level", "7")
    for _ in range(18):
        guide.take(seven)
    other = grammars("byte-level").read(numbers(type="integer"))
    assert (guide.mask()[seven], other.mask()[seven]) == (0, 0)
    guide.take(seven)
    other.take(seven)
    assert (guide.mask()[seven], other.mask()[seven]) == (-np.inf, 0)
