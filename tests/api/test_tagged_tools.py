"""A daemon whose model writes calls in tags (Qwen3.5): in every protocol, forced, cut, echoed, with its reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from api.test_calls import calls_of, choice_of, scripted
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, chunks, daemon, quiet
from keeping import whole
from saying import Saying
from strangers import forged

TEMPLATE = (Path(__file__).parents[1] / "data" / "templates" / "qwen3.5.jinja").read_text("utf-8")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "f"}},
]
GIVEN = {"city": "12\n <b>é</b>", "days": 3, "exact": True}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n <b>é</b>\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
SECOND = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
SHORT = (
    "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n"
    "<parameter=b>\nFalse\n</parameter>\n</function>\n</tool_call>"
)
SHORT_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}},
        },
    }
]
SAID = f"I think.\n</think>\n\nI look.\n\n{CALL}\n{SECOND}"


@contextmanager
def tagged(artifact: Path, folder: Path, template: str) -> Iterator[Daemon]:
    made = forged(artifact, folder / "artifact", {"chat_template.jinja": template.encode()})
    with daemon(made, folder / "data", as_program=Saying) as one:
        yield one


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with tagged(artifacts["mamba-f32"], tmp_path_factory.mktemp("tagged"), TEMPLATE) as one:
        yield one


@pytest.fixture(scope="module")
def tiny_qwen(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Its context has 512 tokens, so the template's text on calls is left out."""
    text = re.sub(r"    \{\{- '\\n\\nIf you choose.*?\}\}\n", "", TEMPLATE)
    assert len(text) < len(TEMPLATE) - 800
    with tagged(artifacts["qwen3.5-f32"], tmp_path_factory.mktemp("qwen"), text) as one:
        yield one


def body_of(one: Daemon, said: str, content: str, **fields: Any) -> dict[str, Any]:
    scripted(one, said)
    return one.body(content, **{"tools": TOOLS, "max_tokens": 400, "logit_bias": {}, **fields})


def events(answer: Any) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    assert answer.status == 200, answer.body
    lines = answer.body.decode().splitlines() if isinstance(answer.body, bytes) else answer.body.splitlines()
    found = (line.removeprefix("data: ") for line in lines if line.startswith(("data: ", "{")))
    return [json.loads(line) for line in found if line != "[DONE]"]


def test_calls_stream_in_chat_completions(tiny: Daemon) -> None:
    found = chunks(tiny.served.ask("POST", CHAT, body_of(tiny, SAID, "chat", stream=True)))
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I think."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls_of(found)]
    assert calls == [("weather", GIVEN), ("f", {})]
    assert sum("tool_calls" in delta for delta in deltas) > 6, "the arguments come bit by bit"
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_stream_in_responses(tiny: Daemon) -> None:
    scripted(tiny, SAID)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"model": tiny.model, "input": "responses", "tools": tools, "max_output_tokens": 400, "stream": True}
    found = events(tiny.served.ask("POST", "/v1/responses", body))
    pieces = [one["delta"] for one in found if one["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 6
    output = found[-1]["response"]["output"]
    calls = [(one["name"], json.loads(one["arguments"])) for one in output if one["type"] == "function_call"]
    assert calls == [("weather", GIVEN), ("f", {})]


def test_calls_stream_in_messages(tiny: Daemon) -> None:
    scripted(tiny, SAID)
    tools = [{"name": "weather", "input_schema": PARAMETERS}, {"name": "f", "input_schema": {"type": "object"}}]
    messages = [{"role": "user", "content": "messages"}]
    body = {"model": tiny.model, "messages": messages, "tools": tools, "max_tokens": 400, "stream": True}
    found = events(tiny.served.ask("POST", "/v1/messages", body))
    names = {one["index"]: one["content_block"].get("name") for one in found if one["type"] == "content_block_start"}
    pieces: dict[int, list[str]] = {}
    for one in found:
        if one["type"] == "content_block_delta" and one["delta"]["type"] == "input_json_delta":
            pieces.setdefault(one["index"], []).append(one["delta"]["partial_json"])
    calls = [(name, json.loads("".join(pieces.get(i, [])) or "{}")) for i, name in names.items() if name]
    assert calls == [("weather", GIVEN), ("f", {})]
    assert max(map(len, pieces.values())) > 6


def test_calls_come_in_ollamas_chat(tiny: Daemon) -> None:
    scripted(tiny, SAID)
    messages = [{"role": "user", "content": "ollama"}]
    found = events(tiny.served.ask("POST", "/api/chat", {"model": tiny.model, "messages": messages, "tools": TOOLS}))
    calls = [call["function"] for one in found for call in one["message"].get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", GIVEN), ("f", {})]
    assert "".join(one["message"].get("thinking", "") for one in found) == "I think."


@pytest.mark.parametrize("thinks", [True, False])
def test_an_echoed_call_continues_the_state(tiny_qwen: Daemon, thinks: bool) -> None:
    one, tokenizer = tiny_qwen, tiny_qwen.engine._texts.tokenizer
    said = f"Hm.\n</think>\n\n{SHORT}" if thinks else SHORT
    given: dict[str, Any] = {"tools": SHORT_TOOLS, **({} if thinks else {"enable_thinking": False})}
    question = {"role": "user", "content": f"Thinking is {thinks}."}
    first = one.served.ask("POST", CHAT, body_of(one, said, question["content"], **given, max_tokens=150))
    message = choice_of(first)["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": "12", "b": false}']
    quiet(one)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    body = body_of(one, "So.", "", **given, max_tokens=2) | {"messages": [question, message, result]}
    second = one.served.ask("POST", CHAT, body)
    choice_of(second)
    before, after = (answer.json["usage"] for answer in (first, second))
    assert after["ssmd"]["session"] == before["ssmd"]["session"]
    assert one.store is not None
    stored = [whole(one.store, turn.id)[0][before["prompt_tokens"] :] for turn in one.turns(before["ssmd"]["session"])]
    tokens = tokenizer.encode(said)
    for ids in stored:
        assert ids[: len(tokens)] == tokens, "the template renders the model's tokens"
    assert after["prompt_tokens_details"]["cached_tokens"] >= before["prompt_tokens"] + len(tokens)
    assert after["ssmd"]["resume"] == "exact"


def test_a_call_that_max_tokens_cuts_can_be_echoed(tiny: Daemon) -> None:
    said = SAID[: SAID.index("</b>")]
    body = body_of(tiny, said, "cut")
    body["max_tokens"] = len(tiny.engine._texts.tokenizer.encode(said))
    choice = choice_of(tiny.served.ask("POST", CHAT, body))
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["arguments"]) == ("length", '{"city": "12\\n <b>é')
    scripted(tiny, "Fine.\n</think>\n\nSo.")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Error: no JSON."}
    messages = [{"role": "user", "content": "cut"}, choice["message"], result]
    again = choice_of(tiny.served.ask("POST", CHAT, {**body, "messages": messages, "max_tokens": 50}))
    assert again["message"]["content"] == "So."


def test_a_stop_string_cuts_a_value(tiny: Daemon) -> None:
    choice = choice_of(tiny.served.ask("POST", CHAT, body_of(tiny, SAID, "stop", stop="é")))
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["arguments"]) == ("stop", '{"city": "12\\n <b>')


def test_a_forced_call_is_valid_and_continues_its_state(tiny: Daemon) -> None:
    """The model says nothing by itself: every token is drawn among those that the grammar allows."""
    tiny.engine.program.say()  # type: ignore[attr-defined]
    properties = {
        "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "integer", "minimum": 1, "maximum": 7}]},
        "unit": {"enum": ["K", "°C", None]},
        "city": {"type": "string", "maxLength": 6},
        "exact": {"type": "boolean"},
        "hours": {"type": "array", "items": {"enum": [6, "12"]}, "maxItems": 2},
    }
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "g", "parameters": parameters}}]
    asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none"}
    for seed in range(3):
        content = f"Draw {seed}."
        first = tiny.chat(content, **asked, temperature=1.5, seed=seed, max_tokens=900, logit_bias={})
        choice = choice_of(first)
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
        quiet(tiny)
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        messages = [{"role": "user", "content": content}, choice["message"], result]
        second = tiny.chat(messages=messages, tools=tools, enable_thinking=False, max_tokens=2)
        before, after = (answer.json["usage"] for answer in (first, second))
        assert after["prompt_tokens_details"]["cached_tokens"] > before["prompt_tokens"], "the call is not read again"
        assert after["ssmd"]["session"] == before["ssmd"]["session"]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a>b": {"type": "string"}}}, '.properties["a>b"]'),
        ({"properties": {"a": {"type": "string", "pattern": "^(a$|b)"}}}, ".properties.a.pattern"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, ".properties.a"),
    ],
)
def test_parameters_that_tags_cannot_hold_are_refused(tiny: Daemon, schema: dict[str, Any], place: str) -> None:
    tools = [{"type": "function", "function": {"name": "g", "parameters": {"type": "object", **schema}}}]
    answer = tiny.chat("refused", tools=tools, tool_choice="required")
    assert answer.status == 400
    assert answer.json["error"]["param"].startswith(f"tools[0].function.parameters{place}")
    assert answer.json["error"]["code"] == "unsupported_schema"
    assert tiny.chat("not refused", tools=tools, max_tokens=2).status == 200


def test_reasoning_effort_none_turns_the_reasoning_off(tiny: Daemon) -> None:
    answer = tiny.served.ask("POST", CHAT, body_of(tiny, "So.", "effort", reasoning_effort="none"))
    assert choice_of(answer)["message"]["content"] == "So."
    assert "ignored" not in answer.json["usage"]["ssmd"]


def test_a_forced_string_goes_through_a_trial(tiny: Daemon) -> None:
    """Its JSON schema would need none, but its pattern of tags has another cost."""
    costly = {"type": "object", "properties": {"a": {"type": "string", "minLength": 90_000}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "g", "parameters": costly}}]
    known = tiny.engine._grammars._trials._verdicts
    before = len(known)
    answer = tiny.chat("trial", tools=tools, tool_choice="required", max_tokens=2)
    assert len(known) > before
    assert answer.status == 400
    assert answer.json["error"]["param"].startswith("tools[0].function.parameters"), answer.json
    assert "costly" in answer.json["error"]["message"]
