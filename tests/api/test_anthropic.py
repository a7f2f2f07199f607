"""Anthropic's messages: whole and streamed, their blocks, counts, and conversations that change the protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from api.test_calls import CALL, PARIS, SECOND, scripted
from api.test_calls import TOOLS as CHAT_TOOLS
from conftest import ROOT, TinyArtifacts
from daemon import NO_END, Daemon, daemon, quiet, request
from saying import Saying
from serving import Answer

from ssmd.api.anthropic.body import MessagesBody
from ssmd.api.http.errors import IGNORED
from ssmd.api.openai.chat import AnswerBody
from ssmd.sessions.rows.checkpoints import CheckpointResult
from ssmd.sessions.rows.faults import DiskFull

Fields = dict[str, Any]
MESSAGES = "/v1/messages"
TOOLS = [
    {
        "name": tool["function"]["name"],  # type: ignore[index]
        "input_schema": tool["function"].get("parameters", {"type": "object", "properties": {}}),  # type: ignore[attr-defined]
    }
    for tool in CHAT_TOOLS
]
LONG = "Tell me a story about a river, a bridge and the people who cross it every morning. " * 4


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


def user(content: Any) -> Fields:
    return {"role": "user", "content": content}


def answered(content: Any) -> Fields:
    return {"role": "assistant", "content": content}


def text(said: str, **fields: Any) -> Fields:
    return {"type": "text", "text": said, **fields}


def ask(one: Daemon, *messages: Fields, said: str | None = None, **fields: Any) -> Answer:
    """Ask for a message; said: the model's answer."""
    if said is not None:
        scripted(one, said)
    body = {"model": one.model, "max_tokens": 300, "temperature": 0, "messages": list(messages), **fields}
    return one.served.ask("POST", f"{MESSAGES}?beta=true", body)


def message_of(answer: Answer) -> Fields:
    assert answer.status == 200, answer.body
    found: Fields = answer.json
    return found


def events_of(answer: Answer) -> list[Fields]:
    """The events of a stream; the name of each is its type."""
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(events: list[Fields]) -> Fields:
    """The message of a stream, put together as Anthropic's clients do. Raises if its events are out of order."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    message = dict(events[0]["message"])
    content: list[Fields] = []
    open_, raw = False, ""
    for event in events[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert (open_, event["index"]) == (False, len(content))
            content.append(dict(event["content_block"]))
            open_, raw = True, ""
            continue
        assert (open_, event["index"]) == (True, len(content) - 1)
        block = content[-1]
        if kind == "content_block_stop":
            open_ = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(raw or "{}")
            continue
        assert kind == "content_block_delta"
        delta = event["delta"]
        assert (
            delta["type"]
            in {
                "text": ("text_delta",),
                "thinking": ("thinking_delta", "signature_delta"),
                "tool_use": ("input_json_delta",),
            }[block["type"]]
        )
        if delta["type"] == "input_json_delta":
            raw += delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]
    assert not open_
    ending, last = events[-2:]
    assert (ending["type"], last["type"]) == ("message_delta", "message_stop")
    return {**message, "content": content, **ending["delta"], "usage": ending["usage"]}


def total(usage: Fields) -> int:
    """The tokens of a prompt: their three counts together."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return int(sum(usage[name] for name in names))


def same(message: Fields) -> Fields:
    """A message without its id, its calls' ids, and times."""
    content = [{**block, "id": None} if block["type"] == "tool_use" else block for block in message["content"]]
    return {**message, "id": None, "content": content, "usage": None}


def test_a_whole_message(tiny: Daemon) -> None:
    answer = ask(tiny, user("What about Paris?"), said="It rains.", system="Be short.")
    message = message_of(answer)
    assert message["id"].startswith("msg_")
    assert {**message, "id": None, "usage": None} == {
        "id": None,
        "type": "message",
        "role": "assistant",
        "model": tiny.model,
        "content": [{"type": "text", "text": "It rains."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": None,
    }
    usage = message["usage"]
    assert usage["ssmd"]["session"] == answer.headers["x-ssmd-session"]
    assert usage["output_tokens"] > 1
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    [turn] = tiny.turns(usage["ssmd"]["session"])
    assert [(m.role, m.content) for m in turn.conversation] == [
        ("system", "Be short."),
        ("user", "What about Paris?"),
        ("assistant", "It rains."),
    ]


def test_a_stream_has_the_events_of_a_message(tiny: Daemon) -> None:
    said = f"<think>\nParis, then.\n</think>\n\nI look.\n{CALL}\n{SECOND}"
    whole = message_of(ask(tiny, user("a"), said=said, tools=TOOLS, store=False))
    events = events_of(ask(tiny, user("a"), said=said, tools=TOOLS, store=False, stream=True))
    streamed = put_together(events)
    assert same(streamed) == same(whole)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, spoken, first, second = whole["content"]
    assert thinking["thinking"] == "Paris, then."
    assert thinking["signature"]
    assert spoken["text"] == "I look."
    assert [(call["name"], call["input"]) for call in (first, second)] == [
        ("get_weather", json.loads(PARIS)),
        ("f", {}),
    ]
    assert whole["stop_reason"] == "tool_use"
    assert sum(event.get("delta", {}).get("type") == "input_json_delta" for event in events) > 6, "bit by bit"
    begun = events[0]["message"]["usage"]
    assert total(begun) == total(streamed["usage"]) == total(whole["usage"]) > 50
    assert 0 < begun["output_tokens"] < streamed["usage"]["output_tokens"], "as many as are there"


def test_an_empty_answer_has_no_blocks(tiny: Daemon) -> None:
    whole = message_of(ask(tiny, user("a"), said="", store=False))
    streamed = put_together(events_of(ask(tiny, user("a"), said="", store=False, stream=True)))
    assert whole["content"] == streamed["content"] == []
    assert whole["stop_reason"] == streamed["stop_reason"] == "end_turn"
    assert ask(tiny, user("a"), answered([]), user("b"), said="x").status == 200


@pytest.mark.parametrize(
    ("said", "fields", "stop"),
    [
        ("It rains.", {}, ("end_turn", None)),
        ("It rains. END more", {"stop_sequences": ["no", "END"]}, ("stop_sequence", "END")),
        ("It rains.", {"stop_sequences": ["END"]}, ("end_turn", None)),
        ("It rains again and again.", {"max_tokens": 3}, ("max_tokens", None)),
        (CALL, {"tools": TOOLS}, ("tool_use", None)),
        (CALL, {}, ("end_turn", None)),
        ("", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, ("tool_use", None)),
        (CALL, {"tools": TOOLS, "tool_choice": {"type": "none"}}, ("end_turn", None)),
    ],
)
def test_why_a_message_ends(tiny: Daemon, said: str, fields: Fields, stop: tuple[str, str | None]) -> None:
    whole = message_of(ask(tiny, user("a"), said=said, store=False, **fields))
    streamed = put_together(events_of(ask(tiny, user("a"), said=said, store=False, stream=True, **fields)))
    for one in (whole, streamed):
        assert (one["stop_reason"], one["stop_sequence"]) == stop
    assert [block["type"] for block in whole["content"]] == [block["type"] for block in streamed["content"]]


def test_an_answer_given_again_names_its_stop_sequence(tiny: Daemon) -> None:
    scripted(tiny, "It rains. END more")
    body = {"model": tiny.model, "max_tokens": 30, "messages": [user("again")], "stop_sequences": ["END"]}
    key = {"idempotency-key": "once"}
    first, second = (tiny.served.ask("POST", MESSAGES, body, key) for _ in range(2))
    assert second.headers["idempotent-replayed"] == "true"
    assert first.json["stop_sequence"] == "END"
    assert second.json == first.json
    streamed = tiny.served.ask("POST", MESSAGES, {**body, "stream": True}, {"idempotency-key": "twice"})
    replayed = tiny.served.ask("POST", MESSAGES, {**body, "stream": True}, {"idempotency-key": "twice"})
    assert replayed.headers["idempotent-replayed"] == "true"
    assert put_together(events_of(replayed)) == {
        **put_together(events_of(streamed)),
        "usage": put_together(events_of(replayed))["usage"],
    }


def test_a_call_that_is_cut_off_has_its_input_so_far(tiny: Daemon) -> None:
    for n in range(20, 160, 5):
        message = message_of(ask(tiny, user("a"), said=CALL, tools=TOOLS, max_tokens=n, store=False))
        if message["stop_reason"] == "tool_use":
            break
        for block in (one for one in message["content"] if one["type"] == "tool_use"):
            assert (
                PARIS.startswith(json.dumps(block["input"]).removesuffix('"}').removesuffix("}")) or not block["input"]
            )
    else:
        raise AssertionError("no call came to its end")
    assert n > 40, "some were cut off"


# Conversations


def fed(usage: Fields) -> int:
    return int(usage["input_tokens"] + usage["cache_creation_input_tokens"])


def test_counts_are_those_of_the_engine(tiny: Daemon) -> None:
    first = message_of(ask(tiny, user(LONG), said="It rains."))["usage"]
    assert first["cache_read_input_tokens"] == 0
    quiet(tiny)
    again = [user(LONG), answered("It rains."), user("And then?")]
    second = message_of(ask(tiny, *again, said="It stops."))["usage"]
    row = tiny.engine.metrics.snapshot()["recent"][-1]
    assert (row["prompt_tokens"], row["cached_tokens"]) == (total(second), second["cache_read_input_tokens"])
    assert second["cache_read_input_tokens"] >= total(first)
    assert fed(second) < 30
    unstored = message_of(ask(tiny, user("Not kept: " + LONG), said="x", store=False))["usage"]
    assert (unstored["cache_creation_input_tokens"], unstored["cache_read_input_tokens"]) == (0, 0)
    assert unstored["input_tokens"] == total(unstored)


@pytest.fixture
def paying(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of each prompt is worth its write, however fast this machine reads."""
    monkeypatch.setattr("ssmd.engine.metrics.Pace.pays", lambda *_: True)


def test_what_is_kept_of_a_prompt_is_counted(tiny: Daemon, paying: None) -> None:
    ask_ = [user("Kept: " + LONG)]
    first = message_of(ask(tiny, *ask_, said="It rains."))["usage"]
    assert first["input_tokens"] == 1, "the state before the last token is kept"
    assert first["cache_creation_input_tokens"] == total(first) - 1
    quiet(tiny)
    again = message_of(ask(tiny, *ask_, said="It rains."))["usage"]
    assert again["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert (again["cache_creation_input_tokens"], again["input_tokens"]) == (0, 1)
    streamed = events_of(ask(tiny, user("Streamed: " + LONG), said="x", stream=True))
    begun, done = streamed[0]["message"]["usage"], streamed[-2]["usage"]
    for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"):
        assert begun[name] == done[name]
    assert begun["cache_creation_input_tokens"] > 50


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_kept_of_an_unstored_prompt_is_counted(
    tiny: Daemon, paying: None, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is not stored, but its state is."""
    asked: Fields = {"store": False, "prompt_cache_retention": "24h", "stream": stream}

    def usage(*, told: bool = True, **fields: Any) -> Fields:
        answer = ask(tiny, user(f"Sealed {stream}: {LONG}"), said="x", **{**asked, **fields})
        if not stream:
            return message_of(answer)["usage"]  # type: ignore[no-any-return]
        events = events_of(answer)
        begun, done = events[0]["message"]["usage"], events[-2]["usage"]
        same = all(done[name] == begun[name] for name in begun if name != "output_tokens")
        assert same == told, "a stream begins before its states are written"
        return done  # type: ignore[no-any-return]

    first = usage()
    assert (first["cache_creation_input_tokens"], first["input_tokens"]) == (total(first) - 1, 1)
    again = usage()
    assert again["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    unkept = usage(prompt_cache_retention="none", system="Otherwise.")
    assert unkept["cache_creation_input_tokens"] == 0
    assert tiny.store is not None

    def full(*_: Any) -> Any:
        raise DiskFull("there is no room")

    for n, keep in enumerate((full, lambda *_: CheckpointResult(None, why_not="the disk is full"))):
        monkeypatch.setattr(tiny.store, "keep", keep)
        lost = usage(told=False, system=f"Another one, {n}.")
        assert lost["cache_creation_input_tokens"] == 0, "no state of it was written"
        assert lost["input_tokens"] == total(lost)


def test_blocks_in_front_of_a_change_are_not_read_again(tiny: Daemon, paying: None) -> None:
    """A block of the system prompt, and a marked one of the user's message."""

    def usage(project: str, question: str) -> Fields:
        document = text(f"Document: {LONG}", cache_control={"type": "ephemeral"})
        asked = user([document, text(question)])
        return message_of(ask(tiny, asked, said="x", system=[text(f"Blocks: {LONG}"), text(project)]))["usage"]  # type: ignore[no-any-return]

    first = usage("One.", "Why?")
    assert usage("Two.", "Why?")["cache_read_input_tokens"] > total(first) / 2 - 2 * 64
    assert usage("One.", "How?")["cache_read_input_tokens"] > total(first) - 2 * 64


FORMS: dict[str, tuple[Any, Any, Any]] = {  # of the same system prompt, question and answer
    "strings": ("Be short.", LONG, "It rains."),
    "blocks": ([text("Be short.")], [text(LONG)], [text("It rains.")]),
    "marked": (
        [text("Be short.", cache_control={"type": "ephemeral"})],
        [text(LONG, cache_control={"type": "ephemeral", "ttl": "1h"})],
        [text("It rains.", citations=None)],
    ),
    "split": ("Be short.", [text(LONG[:9]), text(LONG[9:])], [text("It "), text("rains.")]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("begun", ["strings", "marked"])
def test_forms_of_a_message_are_one_message(tiny: Daemon, begun: str, form: str) -> None:
    system, question, _ = FORMS[begun]
    first = message_of(ask(tiny, user(question), said="It rains.", system=system))["usage"]
    quiet(tiny)
    system, question, said = FORMS[form]
    again = [user(question), answered(said), user([text("And then?", cache_control={"type": "ephemeral"})])]
    second = message_of(ask(tiny, *again, said="It stops.", system=system))["usage"]
    assert second["ssmd"]["session"] == first["ssmd"]["session"]
    assert second["ssmd"]["resume"] == "exact"
    assert second["cache_read_input_tokens"] >= total(first)


def test_a_conversation_goes_from_chat_to_messages_and_back(tiny: Daemon) -> None:
    """With a call, its result and reasoning, each turn over the other protocol."""
    said = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
    scripted(tiny, said)
    asked: list[Fields] = [{"role": "system", "content": "Be short."}, user("Paris? " + LONG)]
    chat = tiny.chat(messages=asked, tools=CHAT_TOOLS, max_tokens=300, logit_bias={}).json
    [call] = chat["choices"][0]["message"]["tool_calls"]
    quiet(tiny)

    thinking, spoken = {"type": "thinking", "thinking": "hm", "signature": "any"}, text("I look.")
    made = {"type": "tool_use", "id": call["id"], "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [text("12 degrees")]}
    told = [user("Paris? " + LONG), answered([thinking, spoken, made]), user([result])]
    second = message_of(ask(tiny, *told, said="It is cold.", system="Be short.", tools=TOOLS))["usage"]
    assert second["ssmd"]["session"] == chat["usage"]["ssmd"]["session"]
    assert second["ssmd"]["resume"] == "exact"
    assert second["cache_read_input_tokens"] >= chat["usage"]["prompt_tokens"] - 1
    quiet(tiny)

    asked += [
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"},
        {"role": "assistant", "content": "It is cold."},
        user("And Rome?"),
    ]
    scripted(tiny, "Warm.")
    third = tiny.chat(messages=asked, tools=CHAT_TOOLS, max_tokens=300, logit_bias={}).json["usage"]
    assert third["ssmd"]["session"] == second["ssmd"]["session"]
    assert third["ssmd"]["resume"] == "exact"
    assert third["prompt_tokens_details"]["cached_tokens"] >= total(second) - 1
    quiet(tiny)

    told += [answered("It is cold."), user("And Rome?"), answered([text("Warm.")]), user("And Oslo?")]
    fourth = message_of(ask(tiny, *told, said="Cold.", system=[text("Be short.")], tools=TOOLS))["usage"]
    assert fourth["ssmd"]["session"] == third["ssmd"]["session"]
    assert fourth["ssmd"]["resume"] == "exact"
    assert fourth["cache_read_input_tokens"] >= third["prompt_tokens"] - 1


def test_a_follower_and_a_stop_find_a_message_by_its_id(tiny: Daemon) -> None:
    body = {"model": tiny.model, "max_tokens": 4000, "messages": [user("on")], "logit_bias": NO_END, "background": True}
    scripted(tiny, "x", ends=False)
    with tiny.served.connect(request({**body, "stream": True, "store": False}, MESSAGES)) as one:
        found = b""
        while b"text_delta" not in found:
            found += one.recv(1 << 16)
        id_ = json.loads(found[found.index(b"data: ") + 6 :].split(b"\n")[0])["message"]["id"]
        assert tiny.served.ask("POST", f"/ssmd/v1/requests/{id_}/stop").status == 202
        followed = tiny.served.ask("GET", f"/ssmd/v1/requests/{id_}/stream")
        while not found.endswith(b"0\r\n\r\n"):
            found += one.recv(1 << 16)
    assert b'"stop_reason":"end_turn"' in found
    assert b'"stopped":true' in found
    if followed.status == 200:
        assert put_together(events_of(followed))["id"] == id_
    else:
        assert followed.status == 404


# Fields


def test_fields_that_do_nothing_are_named(tiny: Daemon) -> None:
    """As Claude Code sends them; no beta or version of the interface is refused."""
    betas = {"anthropic-beta": "claude-code-20250219,of-tomorrow-2030-01-01", "anthropic-version": "2026-10-21"}
    body = {
        "model": tiny.model,
        "max_tokens": 32_000,
        "messages": [user([text("a")]), {"role": "system", "content": "Skills: none."}],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    }
    scripted(tiny, "It rains.")
    answer = tiny.served.ask("POST", f"{MESSAGES}?beta=true", body, betas)
    message = message_of(answer)
    named = ["context_management", "metadata", "output_config.effort", "tools.web_search"]
    assert sorted(message["usage"]["ssmd"]["ignored"]) == named
    assert sorted(answer.headers[IGNORED].split(", ")) == named
    assert message["stop_reason"] == "end_turn"


def test_a_format_is_a_grammar(tiny: Daemon) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        message = message_of(ask(tiny, user("a"), said="", store=False, **fields))
        assert json.loads(message["content"][0]["text"]) == {"city": "Bonn"}
    refused = ask(tiny, user("a"), output_config={"format": form}, response_format={"type": "json_object"})
    assert (refused.status, "both constrain" in refused.json["error"]["message"]) == (400, True)


def test_tokens_are_counted_as_the_prompt_has_them(tiny: Daemon) -> None:
    fields: Fields = {"system": [text("Be short.")], "tools": TOOLS, "thinking": {"type": "adaptive"}}
    body = {"model": tiny.model, "messages": [user("What about Paris?")], **fields}
    counted = tiny.served.ask("POST", f"{MESSAGES}/count_tokens?beta=true", body)
    usage = message_of(ask(tiny, user("What about Paris?"), said="x", store=False, **fields))["usage"]
    assert counted.json == {"input_tokens": total(usage)}


def test_a_list_of_calls_and_texts_keeps_its_order(tiny: Daemon) -> None:
    call = [{"type": "tool_use", "id": f"toolu_{i}", "name": "f", "input": {"n": i}} for i in range(2)]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "two"},
        text("between"),
        {"type": "tool_result", "tool_use_id": "toolu_0", "content": [text("o"), text("ne")], "is_error": True},
        text("after "),
        text("all", cache_control={"type": "ephemeral"}),
    ]
    message = message_of(ask(tiny, user("a"), answered(call), user(results), said="ok", tools=TOOLS))
    [turn] = tiny.turns(message["usage"]["ssmd"]["session"])
    told = [(m.role, m.content, m.tool_call_id) for m in turn.conversation[2:-1]]
    assert told == [
        ("tool", "two", "toolu_1"),
        ("user", "between", None),
        ("tool", "Error: one", "toolu_0"),
        ("user", "after all", None),
    ]


def test_any_protocol_may_be_asked_at_a_wrong_base(tiny: Daemon) -> None:
    body = {"model": tiny.model, "max_tokens": 1, "messages": [user("a")], "store": False}
    for path in ("/v1/v1/messages", "/anthropic/v1/messages", "//v1/messages", "/v1/messages/", "/messages"):
        assert tiny.served.ask("POST", path, body).status == 200, path
    assert tiny.served.ask("HEAD", "/").status == tiny.served.ask("GET", "/").status == 200
    assert f"POST {MESSAGES}" in tiny.served.ask("GET", "/v1").json["endpoints"]


# docs/anthropic.md

_ROW = re.compile(r"^\| `(\w+)` \| `(.+?)` \| (honoured|ignored|refused) \|", re.MULTILINE)
ROWS = _ROW.findall((ROOT / "docs" / "anthropic.md").read_text("utf-8"))


@pytest.mark.parametrize(("name", "example", "what"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_fields_holds(tiny: Daemon, name: str, example: str, what: str) -> None:
    fields = {name: tiny.model if name == "model" else json.loads(example)}
    body = {"model": tiny.model, "max_tokens": 2, "messages": [user("a")], "store": False, "tools": TOOLS, **fields}
    answer = tiny.served.ask("POST", MESSAGES, {**body, "max_tokens": 2})
    if what == "refused":
        assert (answer.status, f"'{name}' is not supported" in answer.json["error"]["message"]) == (400, True)
        return
    assert answer.status == 200, answer.body
    assert answer.headers.get(IGNORED) == (name if what == "ignored" else None)


def test_the_fields_are_all_in_the_table() -> None:
    assert len(ROWS) > 15
    asked = set(MessagesBody.model_fields) - set(AnswerBody.model_fields) | {"model", "max_tokens", "stream"}
    assert asked - {name for name, *_ in ROWS} == {"output_format", "session", "truncation"}
