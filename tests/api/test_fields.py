"""docs/fields.md against the daemon: each row is sent, and what it says becomes of it."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TinyArtifacts
from daemon import Daemon, daemon
from openai_client import client_python

from ssmd.api.http.body import parse_object
from ssmd.api.http.errors import IGNORED
from ssmd.api.openai.chat import NOT_BUILT, ChatBody, read_chat, to_request
from ssmd.api.openai.fields import MAX_PATHS_CHARS, MOST_NAMED, Fields, printable
from ssmd.config import Settings
from ssmd.model.artifact import SpecialTokens
from ssmd.text.template import ChatTemplate

_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| `(.+?)` \| (\w+)(?: of `(\w+)`)? \|", re.MULTILINE)
_NAMES = (
    "import json; from openai.types.chat.completion_create_params import CompletionCreateParamsBase as One;"
    "print(json.dumps(sorted({*One.__annotations__, 'stream'})))"
)


@dataclass(frozen=True)
class Row:
    """A row of the table. of: which servers know the field. what: becomes of it. target: of an alias."""

    name: str
    of: str
    example: Any
    what: str
    target: str


ROWS = [
    Row(name, of, json.loads(example), what, target)
    for name, of, example, what, target in _ROW.findall((ROOT / "docs" / "fields.md").read_text("utf-8"))
]
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "messages": {"max_tokens": 1},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f"}}], "max_completion_tokens": 3},
}


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["mamba-f32"]


@pytest.fixture(scope="module")
def tiny(artifact: Path) -> Iterator[Daemon]:
    with daemon(artifact, None) as one:
        yield one


@pytest.fixture(scope="module")
def strict(artifact: Path) -> Iterator[Daemon]:
    with daemon(artifact, None, settings=Settings(strict=True)) as one:
        yield one


def test_the_table_has_every_field_of_openai_and_of_the_code() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) > 130
    done = subprocess.run([client_python(), "-c", _NAMES], capture_output=True, text=True, check=True, timeout=60)
    openais = set(json.loads(done.stdout))
    assert openais == {row.name for row in ROWS if "OpenAI" in row.of}
    assert {*ChatBody.model_fields, *NOT_BUILT} <= set(names)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_holds(row: Row, tiny: Daemon, strict: Daemon) -> None:
    fields: dict[str, Any] = {
        "max_tokens": None,
        "logit_bias": None,
        **WITH.get(row.name, {"max_completion_tokens": 3}),
    }
    fields[row.name] = tiny.model if row.name == "model" else row.example
    answer, strictly = tiny.chat(**fields), strict.chat(**fields)
    if row.what == "refused":
        for one in (answer, strictly):
            assert (one.status, one.error["code"], one.error["param"]) == (400, "unsupported_parameter", row.name)
        for neutral in NOT_BUILT[row.name]:
            assert tiny.chat(**{**fields, row.name: neutral}).status == 200
        return
    assert answer.status == 200, answer.body
    if row.what in ("ignored", "template"):  # the tiny model's template looks no variable up
        name = f"{row.name}.x" if isinstance(row.example, dict) and row.what == "template" else row.name
        assert answer.json["usage"]["ssmd"]["ignored"] == [name]
        assert answer.headers[IGNORED] == name
        assert (strictly.status, strictly.error["code"]) == (400, "unknown_parameter")
        assert strictly.error["param"] == name
        return
    assert strictly.status == 200
    assert IGNORED not in answer.headers
    assert b'"ignored"' not in answer.body
    if row.what == "alias":
        assert request(**{row.name: row.example}) == request(**{row.target: row.example}) != request()
    else:
        assert row.what == "honoured"


def request(**fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
    return to_request(read_chat(body), 1000)


def test_no_limit_and_all_tokens_have_a_number() -> None:
    everything = request(max_tokens=2**31 - 1)
    assert request(max_tokens=-1) == request(max_completion_tokens=-1) == request(n_predict=-1) == everything
    assert request(top_k=-1) == request(top_k=0) == request()


def test_options_that_ask_for_nothing_pass(tiny: Daemon) -> None:
    """Where nothing is streamed too."""
    asking_nothing: list[dict[str, Any]] = [{}, {"include_usage": False}, {"include_obfuscation": None}]
    for options in asking_nothing:
        answer = tiny.chat(stream_options=options)
        assert (answer.status, IGNORED in answer.headers) == (200, False)
    answer = tiny.chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": True})
    assert answer.headers[IGNORED] == "stream_options.include_obfuscation"
    assert b'"ignored":["stream_options.include_obfuscation"]' in answer.body


ODD = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "cuid", "pattern": "^c"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2},
        "the secret name": {"enum": ["a"], "type": "string", "contentEncoding": "base64"},
        "by": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": False},
    },
}
SECRET = r"[\x22the\x20secret\x20name\x22]"
PATHS = ["properties.id.format", "properties.tags.uniqueItems", f"properties{SECRET}.contentEncoding..."]


def asked_for(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": ODD}, "guided_json"),
        ({"response_format": {"type": "json_schema", "schema": ODD}}, "response_format.schema"),
        ({"tools": [asked_for(ODD)], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [asked_for(ODD)], "tool_choice": FUNCTION, "guided_json": ODD}, "tools[0].function.parameters"),
        ({"tools": [asked_for(ODD, strict=True)]}, "tools[0].function.parameters"),
        ({"tools": [asked_for(ODD)]}, ""),
        ({"tools": [asked_for(ODD, strict=True)], "tool_choice": "none"}, ""),
    ],
)
def test_keywords_that_are_not_enforced_are_named(
    fields: dict[str, Any], param: str, tiny: Daemon, strict: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"max_tokens": None, "max_completion_tokens": 3, "logit_bias": None, **fields}
    with caplog.at_level(logging.INFO, "ssmd.api.openai.fields"):
        answer, strictly = tiny.chat(**asked), strict.chat(**asked)
    assert answer.status == 200, answer.body
    assert "secret" not in caplog.text  # names of properties are the client's own text
    expected = [f"{param}.{path}" for path in PATHS] if param else []
    assert answer.headers.get(IGNORED, "") == ", ".join(expected)
    assert answer.json["usage"]["ssmd"].get("ignored", []) == expected
    if param:
        assert (strictly.status, strictly.error["code"]) == (400, "unsupported_schema")
        assert strictly.error["param"] == f"{param}.properties.id.format"
        assert "SSMD_STRICT=1" in strictly.error["message"]
    else:
        assert strictly.status == 200, strictly.body


def test_completions_name_keywords_that_are_not_enforced(tiny: Daemon) -> None:
    body = {"model": tiny.model, "prompt": "a", "max_tokens": 3, "guided_json": {"type": "string", "format": "cuid"}}
    answer = tiny.served.ask("POST", "/v1/completions", body)
    assert answer.headers[IGNORED] == "guided_json.format"
    assert answer.json["usage"]["ssmd"]["ignored"] == ["guided_json.format"]


def test_long_lists_of_keywords_are_cut(tiny: Daemon) -> None:
    names = [f"{i:03}{'x' * 97}" for i in range(90)]
    schema = {"type": "object", "properties": {name: {"type": "string", "format": "cuid"} for name in names}}
    ignored = tiny.chat(guided_json=schema).json["usage"]["ssmd"]["ignored"]
    assert ignored[0] == f"guided_json.properties.{names[0]}.format"
    assert sum(map(len, ignored)) < MAX_PATHS_CHARS + 20
    assert ignored[-1] == f"({len(names) - len(ignored) + 1} more)"


def test_hostile_names_are_printable_and_few(tiny: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    names = ["a\r\nx-evil: 1", "é, ü", "\u202e", "x" * 100_000, '"', "", " ", *(f"k{i:05}" for i in range(10_000))]
    hostile: dict[str, Any] = dict.fromkeys(names, 1)
    with caplog.at_level(logging.INFO, "ssmd.api.openai.fields"):
        answer = tiny.chat(**hostile)
    assert answer.status == 200, answer.body
    ignored = answer.json["usage"]["ssmd"]["ignored"]
    assert len(ignored) == MOST_NAMED + 1
    assert ignored[-1] == f"({len(names) - MOST_NAMED} more)"
    assert all(one.isascii() and one.isprintable() and "," not in one and len(one) < 70 for one in ignored)
    assert answer.headers[IGNORED] == ", ".join(ignored)
    assert 0 < len(caplog.records) <= 256
    before = len(caplog.records)
    tiny.chat(**hostile)
    assert len(caplog.records) == before


def test_names_that_cannot_be_printed_stay_apart() -> None:
    assert printable("top_k") == "top_k"
    assert printable("a,b c\n") == "a\\x2cb\\x20c\\xa..."


def test_a_repeated_and_a_followed_answer_say_it_too(artifact: Path, tmp_path: Path) -> None:
    with daemon(artifact, tmp_path) as one:
        raw = json.dumps({**one.body(), "cache_prompt": True}).encode()
        first, again = (one.served.ask("POST", "/v1/chat/completions", raw, {"idempotency-key": "a"}) for _ in range(2))
        assert again.headers["idempotent-replayed"] == "true"
        assert first.headers[IGNORED] == again.headers[IGNORED] == "cache_prompt"
        assert again.json["usage"]["ssmd"]["ignored"] == ["cache_prompt"]


def test_variables_that_the_template_looks_up_are_not_ignored(artifact: Path, tmp_path: Path) -> None:
    """Neutral values are not ignored either. Followers and streams get the header with the other fields, too."""
    with daemon(artifact, tmp_path) as one:
        engine, source = one.engine, (artifact / "chat_template.jinja").read_text("utf-8")
        template = ChatTemplate(source + "{% if enable_thinking %} think{% endif %}", SpecialTokens())
        engine._texts = replace(engine._texts, template=template)
        asked: dict[str, Any] = {"enable_thinking": True, "chat_template_kwargs": {"y": 1, "z": None}}
        assert one.chat(**asked).json["usage"]["ssmd"]["ignored"] == ["chat_template_kwargs.y"]
        assert one.chat(**asked, stream=True).headers[IGNORED] == "chat_template_kwargs.y"
        assert IGNORED not in one.chat(enable_thinking=True, reasoning_effort=None).headers


def test_what_is_read_is_what_was_sent_but_for_what_is_ignored() -> None:
    sorting = Fields(ChatBody.model_fields, NOT_BUILT)
    raw = b'{"model": "tiny", "messages": [], "echo": false, "cache_prompt": true, "best_of": 2, "x": null}'
    assert sorting.sort(parse_object(raw)) == ({"model": "tiny", "messages": [], "best_of": 2}, ("cache_prompt",))
