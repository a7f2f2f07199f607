"""OpenAI's responses without server state: whole and streamed, items, tools, and conversations that change protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from api.test_anthropic import LONG, message_of
from api.test_anthropic import ask as ask_anthropic
from api.test_calls import CALL, PARIS, SECOND, scripted
from api.test_calls import TOOLS as CHAT_TOOLS
from conftest import ROOT, TinyArtifacts
from daemon import NO_END, Daemon, daemon, quiet, request
from saying import Saying
from serving import Answer

from ssmd.api.http.errors import IGNORED
from ssmd.api.openai.chat import AnswerBody
from ssmd.api.openai.responses.body import ResponsesBody

Fields = dict[str, Any]
RESPONSES = "/v1/responses"
TOOLS: list[Fields] = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]  # type: ignore[dict-item]
DELTAS = {  # by type of item, the event with more of it
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
TEXTS = {"message": "text", "reasoning": "text", "function_call": "arguments", "custom_tool_call": "input"}

HOSTED: list[Fields] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.org"},
    {"type": "image_generation"},
    {"type": "local_shell"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
    {"type": "of_tomorrow"},
]


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


def user(content: Any) -> Fields:
    return {"role": "user", "content": content}


def output(call: Fields, said: Any) -> Fields:
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": said}


def ask(one: Daemon, given: Any, said: str | None = None, **fields: Any) -> Answer:
    """Ask for a response; said: the model's answer."""
    if said is not None:
        scripted(one, said)
    body = {"model": one.model, "max_output_tokens": 300, "temperature": 0, "input": given, **fields}
    return one.served.ask("POST", RESPONSES, body)


def response_of(answer: Answer) -> Fields:
    assert answer.status == 200, answer.body
    found: Fields = answer.json
    return found


def events_of(answer: Answer) -> list[Fields]:
    """The events of a stream: the name of each is its type, and their numbers have no gap."""
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for i, event in enumerate(answer.body.decode().removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == i
    return found


def put_together(events: list[Fields]) -> Fields:
    """The response at the end of a stream. Raises if an event is out of order, or says otherwise than that response."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    items: list[Fields] = []
    text, open_, part = "", False, False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert (open_, event["output_index"]) == (False, len(items))
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            open_, text = True, ""
            continue
        assert (open_, event["output_index"]) == (True, len(items) - 1)
        item = items[-1]
        if kind == "output_item.done":
            assert (part, event["item"]["id"]) == (False, item["id"])
            items[-1] = event["item"]
            open_ = False
            continue
        assert event["item_id"] == item["id"]
        if kind in ("content_part.added", "content_part.done"):
            assert event["content_index"] == 0
            part = kind.endswith("added")
            assert event["part"]["text"] == ("" if part else text)
            continue
        assert part == (item["type"] in ("message", "reasoning"))
        name, _, what = kind.rpartition(".")
        assert name == DELTAS[item["type"]]
        if what == "delta":
            text += event["delta"]
        else:
            assert (what, event[TEXTS[item["type"]]]) == ("done", text)
    assert not open_
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    assert all(event["response"]["id"] == last["response"]["id"] for event in events[:2])
    found: Fields = last["response"]
    return found


def same(response: Fields) -> Fields:
    """A response without ids and times."""
    items = [{**item, "id": None, **({"call_id": None} if "call_id" in item else {})} for item in response["output"]]
    times = dict.fromkeys(("id", "created_at", "completed_at", "usage"))
    return {**response, **times, "output": items}


def text_of(response: Fields) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def cached(usage: Fields) -> int:
    return int(usage["input_tokens_details"]["cached_tokens"])


def test_a_whole_response(tiny: Daemon) -> None:
    answer = ask(tiny, "What about Paris?", "It rains.", instructions="Be short.", metadata={"a": "b"})
    response = response_of(answer)
    assert response["id"].startswith("resp_")
    [message] = response["output"]
    assert message["id"].startswith("msg_")
    assert {**message, "id": None} == {
        "id": None,
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "It rains.", "annotations": [], "logprobs": []}],
    }
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["ssmd"]["session"] == answer.headers["x-ssmd-session"]
    said = {
        "object": "response",
        "status": "completed",
        "model": tiny.model,
        "instructions": "Be short.",
        "metadata": {"a": "b"},
        "max_output_tokens": 300,
        "temperature": 0,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": True,
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
    }
    assert {name: response[name] for name in said} == said
    [turn] = tiny.turns(usage["ssmd"]["session"])
    assert [(m.role, m.content) for m in turn.conversation] == [
        ("system", "Be short."),
        ("user", "What about Paris?"),
        ("assistant", "It rains."),
    ]


def test_a_stream_has_the_items_of_a_response(tiny: Daemon) -> None:
    said = f"<think>\nParis, then.\n</think>\n\nI look.\n{CALL}\n{SECOND}"
    whole = response_of(ask(tiny, "a", said, tools=TOOLS, store=False))
    events = events_of(ask(tiny, "a", said, tools=TOOLS, store=False, stream=True))
    streamed = put_together(events)
    assert same(streamed) == same(whole)
    thinking, spoken, first, second = whole["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "Paris, then."}]
    assert spoken["content"][0]["text"] == "I look."
    assert [(call["name"], call["arguments"]) for call in (first, second)] == [("get_weather", PARIS), ("f", "{}")]
    assert sum(event["type"] == "response.function_call_arguments.delta" for event in events) > 6, "bit by bit"
    usage = whole["usage"]
    reasoned = usage["output_tokens_details"]["reasoning_tokens"]
    thought = len(tiny.engine._texts.tokenizer.encode("\nParis, then.\n"))
    assert thought <= reasoned <= thought + 10 < usage["output_tokens"]
    assert events[0]["response"]["usage"] is None


def test_an_empty_answer_is_an_empty_message(tiny: Daemon) -> None:
    whole = response_of(ask(tiny, "a", "", store=False))
    streamed = put_together(events_of(ask(tiny, "a", "", store=False, stream=True)))
    assert same(streamed) == same(whole)
    assert text_of(whole) == ""
    assert len(whole["output"]) == 1


@pytest.mark.parametrize("said", ["It rains again and again.", f"I look.\n{CALL}", "<think>\nIt goes on and on"])
def test_an_answer_that_is_cut_off_is_incomplete(tiny: Daemon, said: str) -> None:
    fields: Fields = {"tools": TOOLS, "max_output_tokens": 12, "store": False}
    whole = response_of(ask(tiny, "a", said, **fields))
    events = events_of(ask(tiny, "a", said, **fields, stream=True))
    streamed = put_together(events)
    assert same(streamed)["output"] == same(whole)["output"]
    for one in (whole, streamed):
        assert one["status"] == "incomplete"
        assert one["incomplete_details"] == {"reason": "max_output_tokens"}
        assert one["output"][-1]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


def test_a_client_stops_a_response_by_its_id(tiny: Daemon) -> None:
    scripted(tiny, "x", ends=False)
    body = {"model": tiny.model, "input": "on", "logit_bias": NO_END, "stream": True, "max_output_tokens": 4000}
    with tiny.served.connect(request(body, RESPONSES)) as one:
        found = b""
        while b"output_text.delta" not in found:
            found += one.recv(1 << 16)
        id_ = json.loads(found[found.index(b"data: ") + 6 :].split(b"\n")[0])["response"]["id"]
        assert tiny.served.ask("POST", f"/ssmd/v1/requests/{id_}/stop").status == 202
        while not found.endswith(b"0\r\n\r\n"):
            found += one.recv(1 << 16)
    assert b'"incomplete_details":{"reason":"stopped"}' in found


def test_logprobs_come_with_the_text(tiny: Daemon) -> None:
    fields: Fields = {"store": False, "top_logprobs": 2}
    whole = response_of(ask(tiny, "a", "It rains.", **fields))
    streamed = put_together(events_of(ask(tiny, "a", "It rains.", **fields, stream=True)))
    for one in (whole, streamed):
        entries = one["output"][0]["content"][0]["logprobs"]
        assert "".join(bytes(entry["bytes"]).decode() for entry in entries) == "It rains."
        assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    included = response_of(ask(tiny, "a", "It rains.", store=False, include=["message.output_text.logprobs"]))
    assert included["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


# Conversations


def test_a_conversation_goes_on_by_its_items(tiny: Daemon) -> None:
    """The client's ids and statuses mean nothing, and parts are a text."""
    first = response_of(ask(tiny, [user(LONG)], "It rains.", instructions="Be short."))
    quiet(tiny)
    again = [
        {"type": "message", "id": "msg_mine", **user([{"type": "input_text", "text": LONG}])},
        {"type": "reasoning", "id": "rs_mine", "summary": [], "encrypted_content": "gAAAA-of-another-server"},
        {**first["output"][0], "id": "msg_of_nothing", "status": "in_progress", "phase": "final_answer"},
        user("And then?"),
    ]
    second = response_of(ask(tiny, again, "It stops.", instructions="Be short."))
    assert second["usage"]["ssmd"]["session"] == first["usage"]["ssmd"]["session"]
    assert second["usage"]["ssmd"]["resume"] == "exact"
    assert cached(second["usage"]) >= first["usage"]["input_tokens"]
    row = tiny.engine.metrics.snapshot()["recent"][-1]
    assert (row["prompt_tokens"], row["cached_tokens"]) == (second["usage"]["input_tokens"], cached(second["usage"]))


def test_one_conversation_goes_through_all_protocols(tiny: Daemon) -> None:
    """With a call, its result and reasoning, each turn over another protocol."""
    said = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
    scripted(tiny, said)
    asked: list[Fields] = [{"role": "system", "content": "Be short."}, user("Paris? " + LONG)]
    chat = tiny.chat(messages=asked, tools=CHAT_TOOLS, max_tokens=300, logit_bias={}).json
    [call] = chat["choices"][0]["message"]["tool_calls"]
    quiet(tiny)

    made = {"type": "function_call", "call_id": call["id"], **call["function"]}
    told: list[Fields] = [
        user("Paris? " + LONG),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        made,
        output(made, [{"type": "input_text", "text": "12 degrees"}]),
    ]
    second = response_of(ask(tiny, told, "It is cold.", instructions="Be short.", tools=TOOLS))["usage"]
    assert second["ssmd"]["session"] == chat["usage"]["ssmd"]["session"]
    assert second["ssmd"]["resume"] == "exact"
    assert cached(second) >= chat["usage"]["prompt_tokens"] - 1
    quiet(tiny)

    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "any"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": call["id"], "name": "get_weather", "input": {"city": "Paris"}},
    ]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "12 degrees"}
    messages = [
        user("Paris? " + LONG),
        {"role": "assistant", "content": blocks},
        user([result]),
        {"role": "assistant", "content": "It is cold."},
        user("And Rome?"),
    ]
    empty = {"type": "object", "properties": {}}
    tools = [{"name": tool["name"], "input_schema": tool.get("parameters", empty)} for tool in TOOLS]
    third = message_of(ask_anthropic(tiny, *messages, said="Warm.", system="Be short.", tools=tools))["usage"]
    assert third["ssmd"]["session"] == second["ssmd"]["session"]
    assert third["ssmd"]["resume"] == "exact"
    quiet(tiny)

    told += [
        {"role": "assistant", "content": "It is cold."},
        user("And Rome?"),
        {"type": "message", "role": "assistant", "content": "Warm."},
        user("And Oslo?"),
    ]
    fourth = response_of(ask(tiny, told, "Cold.", instructions="Be short.", tools=TOOLS))["usage"]
    assert fourth["ssmd"]["session"] == third["ssmd"]["session"]
    assert fourth["ssmd"]["resume"] == "exact"
    quiet(tiny)

    asked += [
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"},
        {"role": "assistant", "content": "It is cold."},
        user("And Rome?"),
        {"role": "assistant", "content": "Warm."},
        user("And Oslo?"),
        {"role": "assistant", "content": "Cold."},
        user("And Bern?"),
    ]
    scripted(tiny, "Mild.")
    fifth = tiny.chat(messages=asked, tools=CHAT_TOOLS, max_tokens=300, logit_bias={}).json["usage"]
    assert fifth["ssmd"]["session"] == fourth["ssmd"]["session"]
    assert fifth["ssmd"]["resume"] == "exact"
    assert fifth["prompt_tokens_details"]["cached_tokens"] >= fourth["input_tokens"] - 1
    quiet(tiny)

    arguments = json.loads(call["function"]["arguments"])
    mine = [{"function": {"name": call["function"]["name"], "arguments": arguments}}]
    ollama = [
        *asked[:2],
        {"role": "assistant", "content": "I look.", "thinking": "hm", "tool_calls": mine},
        {"role": "tool", "tool_name": call["function"]["name"], "content": "12 degrees"},
        *asked[4:],
        {"role": "assistant", "content": "Mild."},
        user("And Nice?"),
    ]
    scripted(tiny, "Hot.")
    body = {
        "model": tiny.model,
        "messages": ollama,
        "tools": CHAT_TOOLS,
        "stream": False,
        "options": {"num_predict": 300},
    }
    sixth = tiny.served.ask("POST", "/api/chat", {**body, "stream": False}).json
    assert sixth["message"]["content"] == "Hot."
    assert sixth["ssmd"]["session"] == fifth["ssmd"]["session"]
    assert sixth["ssmd"]["resume"] == "exact"
    assert sixth["ssmd"]["cached_tokens"] >= fifth["prompt_tokens"] - 1


def test_reasoning_comes_back_coded(tiny: Daemon) -> None:
    """Codex sends back `encrypted_content` alone, and leaves the text of the reasoning out."""
    asked: Fields = {"include": ["reasoning.encrypted_content"], "store": False}
    first = response_of(ask(tiny, LONG, f"<think>\nhm, ü\n</think>\n\n{CALL}", tools=TOOLS, **asked))
    thinking, call = first["output"]
    told = [user(LONG), {**thinking, "content": None}, call, output(call, "x")]
    body = {"model": tiny.model, "messages": [], "tools": CHAT_TOOLS}
    made = {"id": call["call_id"], "type": "function", "function": {"name": call["name"], "arguments": PARIS}}
    messages = [
        user(LONG),
        {"role": "assistant", "content": "", "reasoning_content": "hm, ü", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "x"},
    ]
    rendered = tiny.served.ask("POST", "/apply-template", {**body, "messages": messages}).json["prompt"]
    tokens = len(tiny.engine._texts.tokenizer.encode(rendered))
    counted = tiny.served.ask("POST", f"{RESPONSES}/input_tokens", {"model": tiny.model, "input": told, "tools": TOOLS})
    assert counted.json == {"object": "response.input_tokens", "input_tokens": tokens}
    assert "encrypted_content" not in response_of(ask(tiny, "a", "<think>\nhm\n</think>\n\nx"))["output"][0]


def test_items_of_one_answer_are_one_message(tiny: Daemon) -> None:
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(3)]
    told = [
        {"type": "message", "role": "developer", "content": "Be short."},
        {"role": "developer", "content": "Be kind."},
        user("a"),
        user([{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]),
        {"role": "assistant", "content": "I look."},
        *calls[:2],
        output(calls[1], "two"),
        output(calls[0], None),
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"type": "reasoning", "summary": []},
        calls[2],
        output(calls[2], "three"),
    ]
    usage = response_of(ask(tiny, told, "ok", tools=TOOLS))["usage"]
    [turn] = tiny.turns(usage["ssmd"]["session"])
    assert [(m.role, m.content, [c.id for c in m.tool_calls]) for m in turn.conversation[:-1]] == [
        ("developer", "Be short.", []),
        ("developer", "Be kind.", []),
        ("user", "a", []),
        ("user", "bc", []),
        ("assistant", "I look.", ["c0", "c1"]),
        ("tool", "two", []),
        ("tool", "", []),
        ("assistant", "One.", []),
        ("assistant", "Two.", []),
        ("assistant", "", ["c2"]),
        ("tool", "three", []),
    ]


# Fields


def test_a_format_is_a_grammar(tiny: Daemon) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
    form = {"type": "json_schema", "name": "city", "strict": True, "schema": schema}
    response = response_of(ask(tiny, "a", "", text={"format": form}, store=False))
    assert json.loads(text_of(response)) == {"city": "Bonn"}
    assert response["text"] == {"format": form}
    plain = response_of(ask(tiny, "a", "{}", text={"format": {"type": "json_object"}, "verbosity": "low"}))
    assert plain["usage"]["ssmd"]["ignored"] == ["text.verbosity"]
    assert text_of(plain) == "{}"
    refused = ask(tiny, "a", text={"format": form}, response_format={"type": "json_object"})
    assert (refused.status, "both constrain" in refused.json["error"]["message"]) == (400, True)


def test_tokens_are_counted_as_the_prompt_has_them(tiny: Daemon) -> None:
    fields: Fields = {"instructions": "Be short.", "tools": [*TOOLS, *HOSTED], "input": "What about Paris?"}
    counted = tiny.served.ask("POST", f"{RESPONSES}/input_tokens", {"model": tiny.model, **fields})
    fields["given"] = fields.pop("input")
    usage = response_of(ask(tiny, said="x", store=False, **fields))["usage"]
    assert counted.json == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_items_of_hosted_tools_are_named(tiny: Daemon) -> None:
    told = [
        user("a"),
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": [{"url": "x"}]}]},
        {**user("c"), "cache": True},
    ]
    named = response_of(ask(tiny, told, "x", store=False))["usage"]["ssmd"]["ignored"]
    assert named == ["input.cache", "input.web_search_call"]


def test_responses_may_be_asked_at_a_wrong_base(tiny: Daemon) -> None:
    body = {"model": tiny.model, "max_output_tokens": 1, "input": "a", "store": False}
    for path in ("/v1/v1/responses", "/responses", "//v1/responses", "/v1/responses/"):
        assert tiny.served.ask("POST", path, body).status == 200, path
    stored = response_of(ask(tiny, "a", "x"))["id"]
    for path in ("/v1/v1/responses", "/responses"):
        assert tiny.served.ask("GET", f"{path}/{stored}").json["id"] == stored
    assert f"POST {RESPONSES}" in tiny.served.ask("GET", "/v1").json["endpoints"]


# docs/responses.md

_ROW = re.compile(r"^\| `(\w+)` \| `(.+?)` \| (honoured|ignored|refused) \|", re.MULTILINE)
ROWS = _ROW.findall((ROOT / "docs" / "responses.md").read_text("utf-8"))


@pytest.mark.parametrize(("name", "example", "what"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_fields_holds(tiny: Daemon, name: str, example: str, what: str) -> None:
    fields = {name: tiny.model if name == "model" else json.loads(example)} | {"max_output_tokens": 2}
    body = {"model": tiny.model, "input": "a", "store": name == "background", "tools": TOOLS, **fields}
    answer = tiny.served.ask("POST", RESPONSES, body)
    if what == "refused":
        assert answer.status == 400
        assert f"{name}" in answer.json["error"]["message"]
        assert "supported" in answer.json["error"]["message"]
        return
    assert answer.status == 200, answer.body
    assert answer.headers.get(IGNORED) == (name if what == "ignored" else None)


def test_the_fields_are_all_in_the_table() -> None:
    assert len(ROWS) > 20
    asked = set(ResponsesBody.model_fields) - set(AnswerBody.model_fields) | {"model", "stream", "store"}
    assert asked - {name for name, *_ in ROWS} == {"session"}
