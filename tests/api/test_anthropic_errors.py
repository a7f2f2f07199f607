"""Messages that cannot be, keys, and errors in Anthropic's form."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from api.test_anthropic import MESSAGES, TOOLS, ask, message_of, text, user
from conftest import TinyArtifacts
from daemon import Daemon, daemon, soon
from keyfile import bearer
from serving import serving

from ssmd.api.anthropic.body import REFUSED, MessagesBody, read_message, to_request
from ssmd.api.anthropic.conversation import read_conversation
from ssmd.api.anthropic.errors import error_form
from ssmd.api.http.access import AccessLog
from ssmd.app import create_app
from ssmd.config import Settings
from ssmd.engine.request import Request
from ssmd.engine.terms import Rejection, too_long
from ssmd.text.messages import BlockEnd, Message

Fields = dict[str, Any]
KEY = "a-key-of-anthropics"
CALLED: Fields = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]}
RESULT: Fields = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
IMAGE: Fields = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
DOCUMENT: Fields = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], None) as one:
        yield one


def read(*messages: Fields, system: Any = None) -> tuple[Message, ...]:
    return read_conversation(system, [user("a"), *messages])


def request(unread: set[str] | None = None, **fields: Any) -> Request:
    body = read_message({"model": "tiny", "max_tokens": 9, "messages": [user("a")], **fields})
    return to_request(body, 1000, {}, set() if unread is None else unread)


def refused(**fields: Any) -> Rejection:
    with pytest.raises(Rejection) as caught:
        request(**fields)
    assert caught.value.status == 400
    assert caught.value.param in caught.value.message  # type: ignore[operator]
    assert len(caught.value.message) < 400
    return caught.value


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hello", "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "tool", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([user([])], "messages[0].content"),
        ([user(7)], "messages[0].content"),
        ([user(["a"])], "messages[0].content[0]"),
        ([user([{"text": "a"}])], "messages[0].content[0]"),
        ([user([text("a"), {"type": "text"}])], "messages[0].content[1].text"),
        ([user([{"type": "text", "text": 7}])], "messages[0].content[0].text"),
        ([user([text("a"), IMAGE])], "messages[0].content[1]"),
        ([user([DOCUMENT])], "messages[0].content[0]"),
        ([user([RESULT])], "messages[0].content[0].tool_use_id"),
        ([user("a"), CALLED, user([RESULT | {"tool_use_id": "t2"}])], "messages[2].content[0].tool_use_id"),
        ([user("a"), CALLED, user([RESULT | {"tool_use_id": None}])], "messages[2].content[0].tool_use_id"),
        ([user("a"), CALLED, user([RESULT | {"content": [IMAGE]}])], "messages[2].content[0].content[0]"),
        ([user("a"), CALLED, user([RESULT | {"content": {"a": 1}}])], "messages[2].content[0].content"),
        ([user("a"), CALLED, user([RESULT | {"is_error": "no"}])], "messages[2].content[0].is_error"),
        ([user("a"), CALLED], "messages[1].content"),
        ([user("a"), {**CALLED, "content": CALLED["content"] * 2}, user([RESULT])], "messages[1].content"),
        ([user([CALLED["content"][0]])], "messages[0].content[0]"),
        ([{"role": "assistant", "content": [RESULT]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}], "messages[0].content[0].id"),
        ([{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}], "messages[0].content[0].name"),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]}],
            "messages[0].content[0].input",
        ),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], "messages[0].content[0].thinking"),
        (
            [{"role": "assistant", "content": [{"type": "thinking", "thinking": "a</think>b"}]}],
            "messages[0].content[0].thinking",
        ),
        ([{"role": "system", "content": [IMAGE]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]}], "messages[0].content[0]"),
    ],
)
def test_messages_that_cannot_be(messages: Any, param: str) -> None:
    assert refused(messages=messages).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"system": 7}, "system"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"system": ["a"]}, "system[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"tools": {}}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": TOOLS[:1] * 129}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"output_config": "high"}, "output_config"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        *(({name: [1]}, name) for name in ("n", "stop", "logprobs", "functions", "mirostat", "max_completion_tokens")),
    ],
)
def test_fields_that_cannot_be(fields: Fields, param: str) -> None:
    assert refused(**fields).param == param


def test_fields_of_other_servers_may_ask_for_nothing() -> None:
    for name, values in REFUSED.items():
        for value in values:
            assert request(**{name: value}) == request() or name in MessagesBody.model_fields


def test_choices_and_thinking_are_read() -> None:
    def chosen(**choice: Any) -> tuple[str, str | None, bool]:
        found = request(tools=TOOLS, tool_choice=choice).tool_choice
        return found.mode, found.name, found.parallel

    assert chosen(type="auto") == ("auto", None, True)
    assert chosen(type="auto", disable_parallel_tool_use=True) == ("auto", None, False)
    assert chosen(type="any") == ("required", None, True)
    assert chosen(type="any", disable_parallel_tool_use=True) == ("required", None, False)
    assert chosen(type="tool", name="f") == ("required", "f", False)
    assert chosen(type="none") == ("none", None, True)
    for thinking, variables, budget in (
        ({"type": "adaptive"}, {}, None),
        ({"type": "disabled"}, {"enable_thinking": False}, 0),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}, 1024),
    ):
        found = request(thinking=thinking)
        assert (found.given.variables, found.thinking_budget) == (variables, budget)
    assert request(stop_sequences=["a", "b"], top_k=5, temperature=0.5).stop == ("a", "b")


def test_tools_are_those_of_chat() -> None:
    unread: set[str] = set()
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    mine = {"name": "mcp__server__" + "x" * 100, "description": "d", "input_schema": schema, "strict": True}
    servers = [{"type": kind, "name": kind.partition("_2")[0]} for kind in ("web_search_20250305", "bash_20250124")]
    found = request(unread, tools=[servers[0], {**mine, "type": "custom", "cache_control": {}, "x": 1}, servers[1]])
    function = {"name": mine["name"], "description": "d", "parameters": schema, "strict": True}
    assert found.given.tools == ({"type": "function", "function": function},)
    assert unread == {"tools.web_search", "tools.bash", "tools.x"}


def test_system_prompts_are_one_message() -> None:
    assert read(system="s")[0] == read(system=[text("s")])[0] == Message("system", "s")
    header = "x-anthropic-billing-header: cc_version=1; cch=abc;"
    assert read(system=[text(header), text("s"), text("")])[0] == Message("system", f"{header}\n\ns")
    assert read(system="")[0] == read(system=[])[0] == Message("user", "a")
    within = read({"role": "system", "content": [text("Skills: none.")]})
    assert within[1] == Message("system", "Skills: none.")
    assert read(user(header))[1].content == header, "a user's words stay"


def test_marks_and_unread_fields_of_blocks() -> None:
    ignored: set[str] = set()
    mark = {"type": "ephemeral"}
    blocks = [text(word, cache_control=mark, citations=[{"a": 1}]) for word in "abcd"]
    again = {"role": "assistant", "content": [text("x", citations=None)], "id": "msg_1", "usage": None}
    found = read_conversation([text("s", cache_control=mark)], [user(blocks), again, user("b")], ignored)
    assert found == read_conversation("s", [user("abcd"), {"role": "assistant", "content": "x"}, user("b")])
    assert ignored == {"messages.content.citations", "messages.id"}


def test_the_ends_of_blocks_are_read() -> None:
    """All within a system prompt and users' messages, and marked ones of others. Left out blocks do not count."""
    marked = {"cache_control": {"type": "ephemeral"}}
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "ab"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": "ok"} for name in "ab"]
    conversation = [
        user([text("doc", **marked), text("question")]),
        {"role": "assistant", "content": [text("x"), calls[0], {**calls[1], **marked}]},
        user([results[0], {**results[1], **marked}, text("and", **marked)]),
        user([text("A reminder."), text("Words.")]),
    ]
    header = "x-anthropic-billing-header: cc_version=1.2; cch=abc;"
    system = [text(header), text("One."), text("Two.", **marked), text(""), text("Three.", **marked)]
    blocks = list[BlockEnd]()
    found = read_conversation(system, conversation, None, set(), blocks)
    assert [m.role for m in found] == ["system", "user", "assistant", "tool", "tool", "user", "user"]
    assert blocks == [
        BlockEnd(0, len("One."), marked=False),
        BlockEnd(0, len("One.\n\nTwo."), marked=True),
        BlockEnd(0, None, marked=True),
        BlockEnd(1, 3, marked=True),
        BlockEnd(2, None, marked=True),
        BlockEnd(4, None, marked=True),
        BlockEnd(5, None, marked=True),
        BlockEnd(6, 11, marked=False),
    ]
    tools = [{"name": name, "input_schema": {}} for name in "abc"]
    served = {"type": "web_search_20250305", "name": "web_search", **marked}
    assert request(tools=[served, tools[0], {**tools[1], **marked}, tools[2]]).marked_tools == 2
    assert request(tools=tools).marked_tools == 0


@pytest.mark.parametrize(
    ("blocks", "content"),
    [
        ([{"type": "thinking", "thinking": "hm\n", "signature": "any"}], "<think>\nhm\n</think>\n\nx"),
        ([{"type": "thinking", "thinking": "", "signature": ""}], "x"),
        ([{"type": "redacted_thinking", "data": "c2VjcmV0"}], "x"),
    ],
)
def test_reasoning_comes_back(blocks: list[Fields], content: str) -> None:
    assert read({"role": "assistant", "content": [*blocks, text("x")]}, user("b"))[1].content == content


@pytest.mark.parametrize(
    ("said", "failed", "content"),
    [
        ("12", False, "12"),
        ("12", True, "Error: 12"),
        ("<tool_use_error>no", True, "<tool_use_error>no"),
        ("", None, ""),
    ],
)
def test_results_say_that_they_failed(said: str, failed: bool | None, content: str) -> None:
    assert read(CALLED, user([{**RESULT, "content": said, "is_error": failed}]))[2].content == content


# Over HTTP


def test_errors_have_anthropics_form_and_statuses(tiny: Daemon) -> None:
    cases: list[tuple[Fields, Fields, int, str]] = [
        ({"messages": [user([IMAGE])]}, {}, 400, "invalid_request_error"),
        ({"model": "claude-opus-9"}, {}, 404, "not_found_error"),
        ({}, {"host": "elsewhere.example"}, 403, "permission_error"),
        ({}, {"content-type": "text/plain"}, 415, "invalid_request_error"),
        ({}, {"content-length": str(1 << 40)}, 413, "request_too_large"),
    ]
    body = {"model": tiny.model, "max_tokens": 9, "messages": [user("a")]}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        for fields, headers, status, kind in cases:
            raw = None if "content-length" in headers else {**body, **fields}
            answer = tiny.served.ask("POST", path, raw, headers)
            assert (answer.status, answer.json["error"]["type"]) == (status, kind), answer.body
            assert set(answer.json) == {"type", "error", "request_id"}
            assert set(answer.json["error"]) == {"type", "message"}
            assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    for method, path, status in (("GET", MESSAGES, 405), ("POST", f"{MESSAGES}/batches", 404)):
        answer = tiny.served.ask(method, path, {} if method == "POST" else None)
        assert (answer.status, answer.json["type"]) == (status, "error")
    assert "request-id" not in tiny.chat("a").headers
    assert set(tiny.chat(model="another").json) == {"error"}, "OpenAI's keep theirs"


@pytest.mark.parametrize(
    ("status", "retry_after_s", "is_", "kind"),
    [
        (401, None, 401, "authentication_error"),
        (408, None, 408, "timeout_error"),
        (422, None, 422, "invalid_request_error"),
        (429, 5, 429, "rate_limit_error"),
        (500, None, 500, "api_error"),
        (503, 5, 529, "overloaded_error"),
        (503, None, 500, "api_error"),
        (507, None, 500, "api_error"),
    ],
)
def test_each_status_has_its_kind(status: int, retry_after_s: int | None, is_: int, kind: str) -> None:
    found, body = error_form(Rejection("why", status=status, retry_after_s=retry_after_s), "req_1")
    assert (found, body["error"]["type"], body["request_id"]) == (is_, kind, "req_1")


def test_a_full_queue_is_overloaded(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.engine._queue, "_max_waiting", -1, raising=False)
    full = tiny.engine._queue._full()
    monkeypatch.setattr(tiny.host, "check", lambda client: (_ for _ in ()).throw(full))
    answer = ask(tiny, user("a"))
    assert (answer.status, answer.json["error"]["type"]) == (529, "overloaded_error")
    assert answer.headers["retry-after"] == "5"


def test_an_overlong_prompt_says_what_claude_code_looks_for(tiny: Daemon) -> None:
    for stream in (False, True):
        answer = ask(tiny, user("river " * 2000), stream=stream)
        error = answer.json["error"]
        assert (answer.status, error["type"]) == (400, "invalid_request_error")
        found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum\. ", error["message"])
        assert found, error["message"]
        assert int(found[1]) >= int(found[2]) == 512
    assert "prompt is too long: 9 tokens > 8 maximum" in str(
        error_form(too_long(8, 9, param="messages", advice="Shorten it."), "")[1]
    )
    counted = tiny.served.ask(
        "POST", f"{MESSAGES}/count_tokens", {"model": tiny.model, "messages": [user("river " * 2000)]}
    )
    assert counted.json["input_tokens"] > 2000, "beyond the context too"


def test_more_tokens_than_there_is_room_for_are_clamped(tiny: Daemon) -> None:
    message = message_of(ask(tiny, user("a"), max_tokens=1_000_000, logit_bias={"0": -100, "2": -100}))
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] < 512


def test_places_in_tools_are_anthropics(tiny: Daemon) -> None:
    wrong = [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}]
    for tools, place in (
        (wrong, "tools[0].input_schema.properties.a"),
        ([{"name": "f f", "input_schema": {}}], "tools[0].name "),
        ([{"name": "f", "input_schema": 7}], "tools[0].input_schema "),
        ([*TOOLS, {**TOOLS[0], "description": "other"}], "tools[2].name "),
    ):
        answer = ask(tiny, user("a"), tools=tools, tool_choice={"type": "any"})
        message = answer.json["error"]["message"]
        assert (answer.status, place in message, "function" in message) == (400, True, False), message


def test_strict_refuses_what_would_be_ignored(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None, settings=Settings(strict=True)) as one:
        low, odd = {"output_config": {"effort": "low"}}, {"messages": [user([text("a", x=1)])]}
        unread: list[Fields] = [{"metadata": {}}, low, odd]
        for fields in unread:
            for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
                body = {"model": one.model, "max_tokens": 1, "messages": [user("a")], **fields}
                answer = one.served.ask("POST", path, body)
                assert (answer.status, "there is no parameter" in answer.json["error"]["message"]) == (400, True), path
        assert ask(one, user([text("a", cache_control={"type": "ephemeral"})]), max_tokens=1).status == 200


def test_a_key_comes_in_either_header_and_is_not_logged(tiny: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    lines = io.StringIO()
    log = AccessLog(lines, as_json=True, slow_s=1)
    body = {"model": tiny.model, "max_tokens": 1, "messages": [user("a")]}
    with serving(create_app(tiny.host, Settings(api_key=KEY, offline=True), access=log)) as served:
        for headers, status in (
            ({"x-api-key": KEY}, 200),
            (bearer(KEY), 200),
            ({**bearer(KEY), "x-api-key": "wrong-key-here"}, 200),
            ({"authorization": "Basic abc", "x-api-key": KEY}, 200),
            ({"x-api-key": "wrong-key-here"}, 401),
            ({**bearer("wrong-key-here"), "x-api-key": KEY}, 401),
            ({}, 401),
        ):
            answer = served.ask("POST", MESSAGES, body, headers)
            assert answer.status == status, headers
            if status == 401:
                assert answer.json["error"]["type"] == "authentication_error"
            assert served.ask("GET", "/v1/models", None, headers).status == status
        assert served.ask("HEAD", "/").status == 200
        soon(lambda: lines.getvalue().count("\n") == 15)
    log.close()
    rows = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert sum(row["path"] == MESSAGES for row in rows) == 7
    for told in (lines.getvalue(), caplog.text, answer.body.decode()):
        assert KEY not in told
        assert "wrong-key-here" not in told
