"""Responses that cannot be: items, tools and fields with their places, and errors in the middle of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api.test_responses import HOSTED, RESPONSES, TOOLS, ask, events_of, output, put_together, user
from conftest import TinyArtifacts
from daemon import NO_END, Daemon, daemon, request

from ssmd.api.openai.responses.body import REFUSED, ResponsesBody, read_response, to_request
from ssmd.api.openai.responses.items import read_input, read_instructions
from ssmd.config import Settings
from ssmd.engine.request import Request
from ssmd.engine.terms import Rejection

Fields = dict[str, Any]
CALLED: Fields = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
IMAGE: Fields = {"type": "input_image", "image_url": "https://example.org/x.png"}
FILE: Fields = {"type": "input_file", "file_id": "file_1"}
TEXT: Fields = {"type": "input_text", "text": "a"}
ODD = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], None) as one:
        yield one


def asked(unread: set[str] | None = None, **fields: Any) -> Request:
    body = read_response({"model": "tiny", "input": "a", **fields})
    read = to_request(body, 1000, {}, set() if unread is None else unread)
    read.tools.not_enforced(read.request.tool_choice)
    return read.request


def refused(**fields: Any) -> Rejection:
    with pytest.raises(Rejection) as caught:
        asked(**fields)
    assert caught.value.status == 400
    assert len(caught.value.message) < 400
    return caught.value


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        (7, "input"),
        ({}, "input"),
        ([], "input"),
        ([[]], "input[0]"),
        (["hello"], "input[0]"),
        ([HOSTED[0] | {"type": "web_search_call"}], "input"),
        ([{"type": 7}], "input[0].type"),
        ([{"type": "of_tomorrow"}], "input[0]"),
        ([{"type": "compaction", "encrypted_content": "x"}], "input[0]"),
        ([{"type": "item_reference", "id": 7}], "input[0].id"),
        ([{"content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": ["user"], "content": "a"}], "input[0].role"),
        ([user(7)], "input[0].content"),
        ([user(["a"])], "input[0].content[0]"),
        ([user([{"text": "a"}])], "input[0].content[0]"),
        ([user([TEXT, {"type": "input_text"}])], "input[0].content[1].text"),
        ([user([TEXT, IMAGE])], "input[0].content[1]"),
        ([user("a"), user([FILE])], "input[1].content[0]"),
        ([{**user([IMAGE]), "role": "developer"}], "input[0].content[0]"),
        ([CALLED], "input"),
        ([user("a"), CALLED, {**CALLED, "call_id": "c2"}], "input"),
        ([CALLED, CALLED, output(CALLED, "x")], "input[1].call_id"),
        ([{**CALLED, "call_id": None}], "input[0].call_id"),
        ([{**CALLED, "name": ""}], "input[0].name"),
        ([{**CALLED, "name": "f" * 257}], "input[0].name"),
        ([{**CALLED, "arguments": {}}], "input[0].arguments"),
        ([{**CALLED, "namespace": 7}], "input[0].namespace"),
        ([{**CALLED, "type": "custom_tool_call", "input": 7}], "input[0].input"),
        ([{**CALLED, "call_id": f"c{i}"} for i in range(65)], "input[64]"),
        ([output(CALLED, "x")], "input[0].call_id"),
        ([CALLED, output({**CALLED, "call_id": "c2"}, "x")], "input[1].call_id"),
        ([CALLED, output({**CALLED, "call_id": None}, "x")], "input[1].call_id"),
        ([CALLED, output(CALLED, [TEXT, IMAGE])], "input[1].output[1]"),
        ([CALLED, output(CALLED, {"a": 1})], "input[1].output"),
        ([{"type": "reasoning", "content": "a</think>b"}], "input[0].content"),
        ([{"type": "reasoning", "encrypted_content": 7}], "input[0].encrypted_content"),
        ([{"type": "reasoning", "summary": [7]}], "input[0].summary[0]"),
    ],
)
def test_items_that_cannot_be(given: Any, param: str) -> None:
    assert refused(input=given).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"instructions": 7}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5, "max_tokens": 6}, "max_output_tokens"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"include": "x"}, "include"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"text": []}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": ODD}}}, "text.format.schema.properties.a.not"),
        ({"tools": {}}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"type": 7}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [*HOSTED, {"type": "function", "name": "f f"}]}, f"tools[{len(HOSTED)}].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 7}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "strict": 7}]}, "tools[0].strict"),
        (
            {"tools": [*HOSTED[:1], {"type": "function", "name": "f", "parameters": ODD, "strict": True}]},
            "tools[1].parameters.properties.a.not",
        ),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [*HOSTED, *TOOLS, {**TOOLS[0], "description": "other"}]}, f"tools[{len(HOSTED) + 2}].name"),
        ({"tools": [{"type": "function", "name": f"f{i}"} for i in range(129)]}, "tools"),
        ({"tools": [{"type": "custom", "name": "c", "format": "x"}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": TOOLS}, "tool_choice.name"),
        ({"tool_choice": {"type": "custom", "name": "f"}, "tools": TOOLS}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "all"}, "tools": TOOLS}, "tool_choice"),
        ({"background": 5}, "background"),
        ({"conversation": {"id": "conv_1"}, "previous_response_id": "resp_1"}, "conversation"),
        ({"stream_options": None, "prompt": {"id": "x"}}, "prompt"),
        *(({name: [1]}, name) for name in ("n", "stop", "logprobs", "functions", "messages", "mirostat")),
    ],
)
def test_fields_that_cannot_be(fields: Fields, param: str) -> None:
    assert refused(**fields).param == param


def test_fields_of_other_servers_may_ask_for_nothing() -> None:
    for name, values in REFUSED.items():
        for value in values:
            assert asked(**{name: value}) == asked() or name in ResponsesBody.model_fields


def test_choices_and_reasoning_are_read() -> None:
    def chosen(choice: Any, **more: Any) -> tuple[str, str | None, bool]:
        found = asked(tools=[*TOOLS, {"type": "custom", "name": "c"}], tool_choice=choice, **more).tool_choice
        return found.mode, found.name, found.parallel

    assert chosen(None) == ("auto", None, True)
    assert chosen("auto", parallel_tool_calls=False) == ("auto", None, False)
    assert chosen("required") == ("required", None, True)
    assert chosen({"type": "function", "name": "f"}) == ("required", "f", False)
    assert chosen({"type": "custom", "name": "c"}) == ("required", "c", False)
    assert chosen("none") == ("none", None, True)
    for reasoning, variables, budget in (
        ({}, {}, None),
        ({"effort": None, "summary": "auto"}, {}, None),
        ({"effort": "none"}, {"enable_thinking": False}, 0),
        ({"effort": "high"}, {"reasoning_effort": "high"}, None),
    ):
        found = asked(reasoning=reasoning)
        assert (found.given.variables, found.thinking_budget) == (variables, budget)


def test_known_volatile_text_is_left_out_of_instructions() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.197.e0d; cc_entrypoint=cli; cch=abc;\n"
    dropped: set[str] = set()
    [system] = read_instructions(header + "Be short.", dropped)
    [_, said] = read_input([user(header + "a")], None, dropped, before=[system])
    assert (system.content, said.content) == ("Be short.", header + "a")
    assert dropped == {"x-anthropic-billing-header"}
    assert read_instructions(header + "Be short.")[0].content == header + "Be short."


def test_ten_thousand_items_are_read() -> None:
    given = [one for i in range(5000) for one in (user(f"question {i}"), {"role": "assistant", "content": "x"})]
    assert len(read_input([*given, user("last")])) == 10_001


# Over HTTP


def test_errors_are_openais(tiny: Daemon) -> None:
    cases: list[tuple[Fields, Fields, int, str | None]] = [
        ({"input": [user([IMAGE])]}, {}, 400, "input[0].content[0]"),
        ({"model": "gpt-9"}, {}, 404, "model"),
        ({}, {"content-type": "text/plain"}, 415, None),
    ]
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        for fields, headers, status, param in cases:
            answer = tiny.served.ask("POST", path, {"model": tiny.model, "input": "a", **fields}, headers)
            assert (answer.status, answer.error["param"]) == (status, param), answer.body
            assert answer.error["type"] == "invalid_request_error"


def test_an_overlong_prompt_says_what_chat_says(tiny: Daemon) -> None:
    long = "river " * 2000
    chat = tiny.chat(long).error
    for stream in (False, True):
        answer = ask(tiny, long, stream=stream)
        assert answer.status == 400
        assert answer.error == {**chat, "param": "input"}
    assert chat["code"] == "context_length_exceeded"
    counted = tiny.served.ask("POST", f"{RESPONSES}/input_tokens", {"model": tiny.model, "input": long})
    assert counted.json["input_tokens"] > 2000, "beyond the context too"
    cut = ask(tiny, [user(long), user("a")], truncation="auto", max_output_tokens=1)
    assert (cut.status, cut.json["usage"]["ssmd"]["cut_messages"]) == (200, 1)


def test_more_tokens_than_there_is_room_for_are_clamped(tiny: Daemon) -> None:
    answer = ask(tiny, "a", max_output_tokens=1_000_000, logit_bias=NO_END)
    assert answer.json["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer.json["usage"]["output_tokens"] < 512


def test_strict_refuses_what_would_be_ignored(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None, settings=Settings(strict=True)) as one:
        unread: list[Fields] = [{"user": "x"}, {"reasoning": {"summary": "auto"}}, {"tools": HOSTED}]
        for fields in unread:
            for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
                body = {"model": one.model, "input": "a", **fields}
                answer = one.served.ask("POST", path, body)
                assert (answer.status, "there is no parameter" in answer.error["message"]) == (400, True), path


def test_what_is_not_built_says_what_to_do(tiny: Daemon) -> None:
    compact = tiny.served.ask("POST", f"{RESPONSES}/compact", {"model": tiny.model, "input": "a"})
    assert (compact.status, compact.error["code"]) == (400, "not_supported")
    assert "truncation" in compact.error["message"]
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "a"}
    socket = tiny.served.ask("GET", RESPONSES, headers=upgrade)
    assert (socket.status, socket.error["code"]) == (400, "not_supported")
    assert "stream" in socket.error["message"]


def test_a_stream_that_breaks_off_ends_with_failed(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None) as one:
        body = {"model": one.model, "input": "on", "logit_bias": NO_END, "stream": True, "max_output_tokens": 400}
        with one.served.connect(request(body, RESPONSES)) as stream:
            found = b""
            while b"output_text.delta" not in found:
                found += stream.recv(1 << 16)
            one.engine.shutdown(0)
            while not found.endswith(b"0\r\n\r\n"):
                found += stream.recv(1 << 16)
    last = json.loads(found[found.rindex(b"data: ") + 6 :].split(b"\n")[0])
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert set(last["response"]["error"]) == {"code", "message"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_a_stream_that_fails_before_its_first_word(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events begin with 0 all the same."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(tiny.engine.program, "prefill", fail)
    events = events_of(ask(tiny, "a", stream=True))
    response = put_together(events)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert response["output"] == []
