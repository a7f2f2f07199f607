"""Fields of a body that need a decision: unsupported ones, and those that constrain the answer.

Unsupported fields that would change the answer are refused later; all others are ignored and listed.

Structured output: each field of OpenAI, vLLM and llama.cpp that constrains an answer becomes one grammar. JSON has no
spaces between its tokens, and its properties come in the schema's order. So most of the text that is fixed needs no
sampling. A schema with `strict: false` is enforced as well.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from ssmd.api.http.body import StrictModel, brief, parse_object
from ssmd.engine.sampling.bounds import enforceable_lark, enforced, held
from ssmd.engine.terms import Grammar, Rejection
from ssmd.text.closed import closed

log = logging.getLogger(__name__)
Neutral = Mapping[str, tuple[Any, ...]]  # by field, the values that ask for nothing
MOST_NAMED = 32
MAX_NAME_CHARS = 64
MAX_PATH_CHARS = 256  # of a keyword in a schema
MAX_PATHS_CHARS = 2048  # of all these paths together: some proxies take 4 KiB of headers
_MOST_LOGGED = 256  # most names that are logged, of all clients together
# Objects whose inner fields are sorted too. The other objects constrain the answer, so an unknown field is refused.
_OPTIONS = frozenset({"stream_options"})
_ODD = re.compile(r"[^A-Za-z0-9_.:/@$+\[\]-]")
# Other servers' fields that ssmd does not support and that change the answer's shape or meaning. llama.cpp's server:
LLAMA_CPP: Neutral = {
    "adaptive_target": (None, -1),
    "dynatemp_range": (None, 0),
    "grammar_lazy": (None, False),
    "lora": (None, []),
    "mirostat": (None, 0),
    "n_cmpl": (None, 1),
    "n_indent": (None, 0),
    "n_probs": (None, 0),
    "parse_tool_calls": (None, True),
    "post_sampling_probs": (None, False),
    "reasoning_format": (None, "auto", "deepseek"),
    "response_fields": (None, []),
    "return_tokens": (None, False),
    "samplers": (None, []),
    "t_max_predict_ms": (None, -1, 0),
    "top_n_sigma": (None, -1, 0),
}
# vLLM's:
VLLM: Neutral = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "ignore_eos": (None, False),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": (None, False),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "min_tokens": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "watermarking": (None, False),
}
# Ollama's:
OLLAMA: Neutral = {
    "format": (None, ""),
}
OTHERS: Neutral = {**LLAMA_CPP, **VLLM, **OLLAMA}
MAX_CHOICES = 1000
MAX_REGEX_CHARS = 32 << 10
MAX_GBNF_BYTES = 32 << 10
MAX_GBNF_RULES = 256
_COMPACT = {"whitespace_flexible": False}  # llguidance's options are a part of the schema that it reads
Choices = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=MAX_CHOICES)]
Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)]


class Fields:
    """Sorts the fields of an endpoint's bodies. strict: refuse unknown fields unless their value asks for nothing."""

    def __init__(self, read: Mapping[str, FieldInfo], refused: Neutral, *, strict: bool = False) -> None:
        """read: the fields of the endpoint's model. refused: unsupported fields that the endpoint refuses by name."""
        self._nested = {name: nested for name in _OPTIONS & read.keys() if (nested := _nested(read[name].annotation))}
        self._known, self._refused, self._strict = read.keys() | refused.keys(), refused, strict
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def sort(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields of a body to read, and the names of its ignored fields. Raises Rejection."""
        kept: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in fields.items():
            if name in self._nested and isinstance(value, dict):
                kept[name] = self._within(name, value, ignored)
            elif name in self._known:
                if name not in self._refused or value not in self._refused[name]:
                    kept[name] = value
            elif value is not None:
                if self._strict:
                    kept[name] = value
                else:
                    ignored.append(name)
        return kept, self.named(ignored)

    def _within(self, name: str, value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        kept = {}
        for inner, given in value.items():
            if inner in self._nested[name].model_fields or (self._strict and given is not None):
                kept[inner] = given
            elif given is not None:
                ignored.append(f"{name}.{inner}")
        return kept

    def named(self, ignored: Collection[str]) -> tuple[str, ...]:
        """Return ignored fields' names as an answer lists them, and log new ones. Raises Rejection if strict."""
        if not ignored:
            return ()
        if self._strict:
            name = printable(min(ignored))
            raise Rejection(f"there is no parameter {name!r} here", code="unknown_parameter", param=name)
        names = sorted({printable(name) for name in ignored})
        for name in self._unlogged(names):
            log.info("a client sends the field %s, which is ignored (SSMD_STRICT=1 refuses it)", name)
        more = len(names) - MOST_NAMED
        return tuple(names) if more <= 0 else (*names[:MOST_NAMED], f"({more} more)")

    def not_enforced(self, keywords: Collection[str]) -> tuple[str, ...]:
        """Return keywords of a request's schema, as paths, as an answer lists them, and log new ones by their name.

        A path has names of the client's own, so it is not logged. Raises Rejection if strict.
        """
        if not keywords:
            return ()
        if self._strict:
            first = min(keywords)
            said = f"{first} is not enforced here, and SSMD_STRICT=1 refuses what is not; leave it out"
            raise Rejection(said, code="unsupported_schema", param=first)
        for name in self._unlogged({keyword.rpartition(".")[2] for keyword in keywords}):
            log.info("a client sends a schema with %s, which is not enforced (SSMD_STRICT=1 refuses it)", name)
        paths, chars = sorted({printable(keyword, MAX_PATH_CHARS) for keyword in keywords}), 0
        for i, path in enumerate(paths):
            chars += len(path)
            if i == MOST_NAMED or chars > MAX_PATHS_CHARS:
                return (*paths[:i], f"({len(paths) - i} more)")
        return tuple(paths)

    def _unlogged(self, names: Collection[str]) -> Iterator[str]:
        for name in names:
            with self._lock:
                new = name not in self._logged and len(self._logged) < _MOST_LOGGED
                if new:
                    self._logged.add(name)
            if new:
                yield name


def printable(name: str, most: int = MAX_NAME_CHARS) -> str:
    """Return a client's field name made safe for a header, a log and a list: printable ASCII, no comma, cut."""
    safe = _ODD.sub(lambda odd: f"\\x{ord(odd[0]):x}", name[:most])
    return safe if safe == name else f"{safe[:most]}..."


def _nested(annotation: Any) -> type[StrictModel] | None:
    """Return the pydantic model of a field that is an object; None for any other field."""
    options = getattr(annotation, "__args__", (annotation,))
    return next((one for one in options if isinstance(one, type) and issubclass(one, StrictModel)), None)


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
