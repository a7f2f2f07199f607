"""Structured output: each field of OpenAI, vLLM and llama.cpp that constrains an answer becomes one grammar.

JSON has no spaces between its tokens, and its properties come in the schema's order. So most of the text that is fixed
needs no sampling. A schema with `strict: false` is enforced as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from ssmd.api.http.body import StrictModel, brief, parse_object
from ssmd.engine.sampling.bounds import enforceable_lark, enforced, held
from ssmd.engine.terms import Grammar, Rejection
from ssmd.text.closed import closed

MAX_CHOICES = 1000
MAX_REGEX_CHARS = 32 << 10
MAX_GBNF_BYTES = 32 << 10
MAX_GBNF_RULES = 256
_COMPACT = {"whitespace_flexible": False}  # llguidance's options are a part of the schema that it reads

Choices = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=MAX_CHOICES)]
Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)]


class JsonSchema(StrictModel):
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None  # llama.cpp's place for it


class StructuredOutputs(StrictModel):
    json_: Annotated[Any, Field(alias="json")] = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(StrictModel):
    """The fields of a body that constrain the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Any = None
    grammar: str | None = None


def grammar_of(body: StructuredFields) -> Grammar | None:
    """Return the grammar of the answer; None if it is free. Raises Rejection for an invalid or a second constraint."""
    asked: dict[str, Callable[[str], Grammar]] = {}

    def ask(param: str, value: Any, make: Callable[[Any, str], Grammar]) -> None:
        if value is not None:
            asked[param] = lambda name: make(value, name)

    if (form := body.response_format) is not None:
        _ask_for_format(form, ask)
    if (outputs := body.structured_outputs) is not None:
        ask("structured_outputs.json", outputs.json_, of_schema)
        ask("structured_outputs.regex", outputs.regex, of_regex)
        ask("structured_outputs.choice", outputs.choice, of_choice)
        ask("structured_outputs.grammar", outputs.grammar, of_grammar)
        ask("structured_outputs.json_object", {"type": "object"} if outputs.json_object else None, of_schema)
    ask("guided_json", body.guided_json, of_schema)
    ask("guided_regex", body.guided_regex, of_regex)
    ask("guided_choice", body.guided_choice, of_choice)
    ask("guided_grammar", body.guided_grammar, of_grammar)
    ask("json_schema", body.json_schema, of_schema)
    ask("grammar", body.grammar or None, of_grammar)
    if len(asked) > 1:
        said = " and ".join(asked)
        raise Rejection(f"{said} both constrain the answer; send one", code="invalid_value", param=[*asked][1])
    return next((make(param) for param, make in asked.items()), None)


def _ask_for_format(form: ResponseFormat, ask: Callable[[str, Any, Callable[[Any, str], Grammar]], None]) -> None:
    if form.type == "text" and (form.json_schema is not None or form.schema_ is not None):
        raise _wrong("response_format.type", "is text, which has no schema")
    if form.type == "json_object":
        if form.json_schema is not None:
            raise _wrong("response_format.json_schema", "is only possible with type json_schema")
        param = "response_format" if form.schema_ is None else "response_format.schema"
        ask(param, {"type": "object"} if form.schema_ is None else form.schema_, of_schema)
    if form.type == "json_schema":
        inner = form.json_schema.schema_ if form.json_schema is not None else form.schema_
        param = "response_format.schema" if form.json_schema is None else "response_format.json_schema.schema"
        if inner is None:
            param = "response_format.json_schema" if form.json_schema is None and form.schema_ is None else param
            raise Rejection(f"{param} is required", code="missing_required_parameter", param=param)
        ask(param, inner, of_schema)


def of_schema(schema: Any, param: str) -> Grammar:
    """Return the grammar of a JSON schema, given as an object or as text. Raises Rejection."""
    if isinstance(schema, str):
        try:
            schema = parse_object(schema.encode())
        except Rejection as err:
            raise _wrong(param, f"is not a JSON schema: {err.message.removeprefix('the request body ')}") from None
    if not isinstance(schema, dict):
        raise _wrong(param, f"is not a JSON schema (got {brief(schema)}); that is an object")
    found = enforced(schema, param)
    compact = closed(found.schema) | {"x-guidance": _COMPACT}
    text = json.dumps({"grammars": [{"json_schema": compact}]}, ensure_ascii=False)
    return Grammar(text, param, ignored=tuple(param + way for way in found.ignored), numbers=True)


def of_regex(regex: str, param: str) -> Grammar:
    """Return the grammar of a regular expression for the whole text; digits, letters and spaces are ASCII only."""
    from llguidance import regex_to_lark

    return Grammar(f"start: /{regex_to_lark(regex, 'dws')}/", param)


def of_choice(choices: list[str], param: str) -> Grammar:
    """Return the grammar of one of these texts."""
    return Grammar("start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices), param)


def of_grammar(text: str, param: str) -> Grammar:
    """Return the grammar of a text in llama.cpp's GBNF, or in Lark's syntax. Raises Rejection."""
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    if not text.strip():
        raise _wrong(param, "is empty")
    if is_lark_syntax(text):
        read, ignored = enforceable_lark(text, param)
        return Grammar(held(read), param, ignored=ignored)
    if len(text.encode()) > MAX_GBNF_BYTES or text.count("::=") > MAX_GBNF_RULES:
        raise _wrong(param, f"is too large: {MAX_GBNF_BYTES} bytes and {MAX_GBNF_RULES} rules are possible in GBNF")
    try:
        return Grammar(held(any_to_lark(text)), param)
    except RecursionError:
        raise _wrong(param, "is nested too deeply") from None
    except Exception as err:  # the converter raises plain exceptions
        raise _wrong(param, f"is not a grammar in GBNF or Lark: {str(err)[:200]}") from None


def _wrong(param: str, why: str) -> Rejection:
    return Rejection(f"{param} {why}", code="invalid_value", param=param)
