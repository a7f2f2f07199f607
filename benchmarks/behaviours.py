"""The behaviours that other servers' own tests ask of the four protocols, as requests and checks of their answers."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Fields = dict[str, Any]
LLAMA, VLLM, OLLAMA = "llama.cpp", "vLLM", "Ollama"
CITY: Fields = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
SAY: list[Fields] = [{"role": "user", "content": "Say hello"}]
TOOL: Fields = {"name": "weather", "description": "Get the weather.", "input_schema": CITY}
USE: Fields = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
CALLING: Fields = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 100}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Fields
    body: Any  # JSON, or a list of a stream's objects


@dataclass(frozen=True)
class Server:
    """The daemon at `url`."""

    url: str
    model: str

    def ask(self, path: str, body: Fields | None = None, method: str = "POST") -> Answer:
        """Send a request. Returns a stream's events or lines as a list."""
        at = urlsplit(self.url)
        with contextlib.closing(http.client.HTTPConnection(at.hostname or "", at.port, timeout=300)) as connection:
            raw = json.dumps(body) if body is not None else None
            connection.request(method, path, raw, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        kind = response.headers.get_content_type()
        made: Any = text
        if kind == "text/event-stream":
            lines = [one.removeprefix("data: ") for one in text.splitlines() if one.startswith("data: ")]
            made = [json.loads(one) for one in lines if one != "[DONE]"]
        elif kind == "application/x-ndjson":
            made = [json.loads(one) for one in text.splitlines()]
        elif text and kind == "application/json":
            made = json.loads(text)
        return Answer(response.status, dict(response.headers), made)

    def messages(self, **fields: Any) -> Answer:
        known = {"model": self.model, "max_tokens": 16, "messages": SAY, "temperature": 0}
        return self.ask("/v1/messages", {name: one for name, one in {**known, **fields}.items() if one is not None})

    def said(self, **fields: Any) -> Any:
        """Return the message that answers, which must be one."""
        answer = self.messages(**fields)
        assert answer.status == 200, f"{answer.status}: {answer.body}"
        if not fields.get("stream"):
            assert answer.body["type"] == "message"
        return answer.body

    def responses(self, **fields: Any) -> Answer:
        known = {"model": self.model, "max_output_tokens": 16, "input": "Say hello", "temperature": 0}
        return self.ask("/v1/responses", {**known, **fields})

    def chat(self, **fields: Any) -> Answer:
        known = {"model": self.model, "max_tokens": 16, "messages": SAY, "temperature": 0}
        return self.ask("/v1/chat/completions", {**known, **fields})

    def ollama(self, path: str, **fields: Any) -> Answer:
        return self.ask(path, {"model": self.model, "options": {"num_predict": 16, "temperature": 0}, **fields})


@dataclass(frozen=True)
class Behaviour:
    """One behaviour. says: the sentence for the table. check: raises if it fails. differs: why ssmd has another one."""

    source: str
    says: str
    check: Callable[[Server], None]
    differs: str


BEHAVIOURS: list[Behaviour] = []
Check = Callable[[Server], None]


def asks(source: str, says: str, differs: str = "") -> Callable[[Check], Check]:
    """Add a check to the list."""

    def add(check: Check) -> Check:
        BEHAVIOURS.append(Behaviour(source, says, check, differs))
        return check

    return add


def refused(answer: Answer, *words: str) -> None:
    """Fail unless an answer is a 400 whose message has these words."""
    assert answer.status == 400, f"{answer.status}: {answer.body}"
    message = answer.body["error"] if isinstance(answer.body["error"], str) else answer.body["error"]["message"]
    assert all(word in message for word in words), message


def kinds(events: Sequence[Fields]) -> list[str]:
    return [str(one["type"]) for one in events if one["type"] != "ping"]


@asks(LLAMA, "Messages: a message has type, role, blocks of text, a stop_reason, counts with cache_read_input_tokens")
def _(server: Server) -> None:
    body = server.said()
    assert body["role"] == "assistant"
    assert body["content"][0]["type"] == "text"
    assert body["stop_reason"] in ("end_turn", "max_tokens")
    counts = [body["usage"][name] for name in ("cache_read_input_tokens", "input_tokens", "output_tokens")]
    assert all(isinstance(count, int) for count in counts)
    assert counts[-1] > 0
    assert "timings" not in body


@asks(LLAMA, "Messages: system as text; content in parts; a conversation with an assistant's message")
def _(server: Server) -> None:
    server.said(system="You are terse.")
    server.said(messages=[{"role": "user", "content": [{"type": "text", "text": one} for one in ("Say", " hello")]}])
    server.said(messages=[*SAY, {"role": "assistant", "content": "Hi!"}, *SAY])


@asks(LLAMA, "Messages, streamed: the events in order, with a message without content first")
def _(server: Server) -> None:
    events = server.said(stream=True)
    found = kinds(events)
    assert found[:2] == ["message_start", "content_block_start"]
    assert found[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["type"], start["role"], start["content"]) == ("message", "assistant", [])
    usage = start["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] > 0
    deltas = [one for one in events if one["type"] == "content_block_delta"]
    assert deltas
    assert all(one["index"] == 0 and one["delta"]["type"] == "text_delta" for one in deltas)
    last = next(one for one in events if one["type"] == "message_delta")
    assert last["delta"]["stop_reason"] in ("end_turn", "max_tokens")
    assert last["usage"]["output_tokens"] > 0


@asks(LLAMA, "Messages: count_tokens gives input_tokens alone, with and without a system prompt, without max_tokens")
def _(server: Server) -> None:
    body = {"model": server.model, "messages": SAY}
    plain = server.ask("/v1/messages/count_tokens", body)
    longer = server.ask("/v1/messages/count_tokens", {**body, "system": "You are terse and kind."})
    assert plain.status == longer.status == 200
    assert 0 < plain.body["input_tokens"] < longer.body["input_tokens"]
    assert "output_tokens" not in plain.body


@asks(LLAMA, "Messages: a call is a block with id, name and an object, and the stop_reason is tool_use")
def _(server: Server) -> None:
    body = server.said(**CALLING)
    [block] = [one for one in body["content"] if one["type"] == "tool_use"]
    assert body["stop_reason"] == "tool_use"
    assert block["id"]
    assert (block["name"], list(block["input"])) == ("weather", ["city"])


@asks(LLAMA, "Messages, streamed: the parts of a call's input are its JSON; indices count up, each block is closed")
def _(server: Server) -> None:
    events = server.said(**CALLING, stream=True)
    starts = [one for one in events if one["type"] == "content_block_start"]
    stops = [one for one in events if one["type"] == "content_block_stop"]
    assert [one["index"] for one in starts] == [*range(len(starts))] == [one["index"] for one in stops]
    call = next(one for one in starts if one["content_block"]["type"] == "tool_use")
    assert call["content_block"]["name"] == "weather"
    mine = [one["delta"] for one in events if one["type"] == "content_block_delta" and one["index"] == call["index"]]
    assert isinstance(json.loads("".join(one["partial_json"] for one in mine)), dict)


@asks(LLAMA, "Messages: a tool's result as text, behind text in one message, and with is_error; also without `tools`")
def _(server: Server) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny"}
    before = [*SAY, {"role": "assistant", "content": [USE]}]
    for content in ([result], [{"type": "text", "text": "Here:"}, result], [{**result, "is_error": True}]):
        body = server.said(messages=[*before, {"role": "user", "content": content}], tools=[TOOL])
        assert body["content"]
    server.said(messages=[*before, {"role": "user", "content": [result]}])


@asks(LLAMA, "Messages: an image for a model without sight is refused by name")
def _(server: Server) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    refused(server.messages(messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]), "image")


@asks(LLAMA, "Messages: stop_sequences, temperature, top_p, top_k, metadata and thinking are taken")
def _(server: Server) -> None:
    taken: list[Fields] = [
        *({"stop_sequences": ["\n", "END"]}, {"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 40}),
        *({"metadata": {"user_id": "one"}}, {"thinking": {"type": "enabled", "budget_tokens": 50}}),
    ]
    for fields in taken:
        server.said(**fields)


@asks(LLAMA, "Messages: a request without messages is refused")
def _(server: Server) -> None:
    refused(server.messages(messages=None), "messages")


@asks(LLAMA, "Messages: an empty list of messages is answered", "refused, as Anthropic does")
def _(server: Server) -> None:
    server.said(messages=[])


@asks(LLAMA, "Messages and chat have each its own form and its own names of counts")
def _(server: Server) -> None:
    chat, message = server.chat().body, server.said()
    assert (chat["object"], "choices" in chat, "content" in message) == ("chat.completion", True, True)
    assert {"prompt_tokens", "completion_tokens"} <= {*chat["usage"]}
    assert {"input_tokens", "output_tokens"} <= {*message["usage"]}


@asks(VLLM, "Messages: role system within messages, as text and as blocks, beside a system prompt")
def _(server: Server) -> None:
    for content in ("Be terse.", [{"type": "text", "text": "Be terse."}]):
        server.said(messages=[{"role": "system", "content": content}, *SAY], system="Be kind.")
    server.said(messages=[*SAY, {"role": "system", "content": "Be terse."}])


@asks(VLLM, "Messages: another role is refused")
def _(server: Server) -> None:
    refused(server.messages(messages=[{"role": "tool", "content": "x"}]), "role")


@asks(VLLM, "Messages: tool_use without id or name, tool_result without tool_use_id are refused")
def _(server: Server) -> None:
    result: Fields = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}]}
    for name in ("id", "name"):
        use = {key: value for key, value in USE.items() if key != name}
        refused(server.messages(messages=[*SAY, {"role": "assistant", "content": [use]}, result]), name)
    blank: Fields = {"role": "user", "content": [{"type": "tool_result", "content": "x"}]}
    refused(server.messages(messages=[*SAY, {"role": "assistant", "content": [USE]}, blank]), "tool_use_id")


@asks(VLLM, "Messages: tool_use without input is refused", "read as a call without arguments")
def _(server: Server) -> None:
    use = {key: value for key, value in USE.items() if key != "input"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
    called = {"role": "assistant", "content": [use]}
    refused(server.messages(messages=[*SAY, called, {"role": "user", "content": [result]}]), "input")


@asks(VLLM, "Messages: a text block without text, an image without source, thinking without its text are refused")
def _(server: Server) -> None:
    for role, kind in (("user", "text"), ("user", "image"), ("assistant", "thinking")):
        block: Fields = {"role": role, "content": [{"type": kind}]}
        after = SAY if role == "assistant" else []
        refused(server.messages(messages=[*after, block, *after]))


@asks(VLLM, "Messages: an empty text, an input without fields, thinking without signature, redacted thinking are taken")
def _(server: Server) -> None:
    use = {**USE, "input": {}}
    thinking = [{"type": "thinking", "thinking": "Hm."}, {"type": "redacted_thinking", "data": "opaque"}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    server.said(messages=[{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "Hi"}]}])
    server.said(
        messages=[*SAY, {"role": "assistant", "content": [*thinking, use]}, {"role": "user", "content": [result]}]
    )


@asks(LLAMA, "Responses: text.format as schema, as JSON object, as text")
def _(server: Server) -> None:
    schema = {"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}
    answer = server.responses(text={"format": schema})
    text = answer.body["output"][-1]["content"][0]["text"]
    assert text == '"foooooo"', text
    for kind in ("json_object", "text"):
        assert server.responses(text={"format": {"type": kind}}).status == 200


@asks(LLAMA, "Responses: a schema format without a schema is refused")
def _(server: Server) -> None:
    refused(server.responses(text={"format": {"type": "json_schema", "name": "test"}}), "schema")


@asks(LLAMA, "Responses: ids begin with resp_ and msg_; system and user as items; an unknown field changes nothing")
def _(server: Server) -> None:
    items = [{"role": "system", "content": "Book"}, *SAY]
    answer = server.responses(input=items, timings_per_token=True, return_progress=True)
    assert answer.status == 200
    assert answer.body["id"].startswith("resp_")
    assert answer.body["output"][0]["id"].startswith("msg_")


@asks(LLAMA, "Responses, streamed: one response id and one item id in all events, and the deltas are the text")
def _(server: Server) -> None:
    events = server.responses(stream=True).body
    assert [one["type"] for one in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert {one["response"]["id"] for one in events if "response" in one} == {last["id"]}
    items = {one["item_id"] for one in events if "item_id" in one} | {
        one["item"]["id"] for one in events if "item" in one
    }
    assert items == {last["output"][0]["id"]}
    text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    assert text == last["output"][0]["content"][0]["text"]


@asks(
    LLAMA,
    "Responses: `timings_per_token` and `return_progress` have llama.cpp's own events",
    "ignored and named; ssmd's times are in `usage.ssmd`",
)
def _(server: Server) -> None:
    answer = server.responses(stream=True, timings_per_token=True, return_progress=True)
    assert any("timings" in one for one in answer.body), "there are no timings"


@asks(LLAMA, "Chat: response_format as schema, as JSON object, as text; a wrong one is refused")
def _(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "test", "schema": {"const": "42"}}}
    assert server.chat(response_format=schema).body["choices"][0]["message"]["content"] == '"42"'
    for kind in ("json_object", "text"):
        assert server.chat(response_format={"type": kind}).status == 200
    for wrong in ("sound", 123):
        refused(server.chat(response_format={"type": wrong}))
    refused(server.chat(response_format={"type": "json_schema", "json_schema": {"schema": 123}}))


@asks(LLAMA, "Chat, streamed: the first delta has the role and content null or empty, the last chunk the finish_reason")
def _(server: Server) -> None:
    chunks = [one for one in server.chat(stream=True).body if one["choices"]]
    first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
    assert first["delta"]["role"] == "assistant"
    assert not first["delta"].get("content")
    assert last["finish_reason"] in ("stop", "length")


@asks(LLAMA, "Chat: stream_options.include_usage gives a last chunk with counts and no choices")
def _(server: Server) -> None:
    *_, last = server.chat(stream=True, stream_options={"include_usage": True}).body
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


@asks(LLAMA, "Chat: logprobs with top_logprobs, one for each token; logit_bias; grammar; apply-template")
def _(server: Server) -> None:
    answer = server.chat(logprobs=True, top_logprobs=3, max_tokens=5).body
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(len(one["top_logprobs"]) == 3 and one["logprob"] <= 0 for one in content)
    assert server.chat(logit_bias={"5": -100}).status == 200
    assert server.chat(grammar='root ::= "yes" | "no"').body["choices"][0]["message"]["content"] in ("yes", "no")
    assert server.ask("/apply-template", {"model": server.model, "messages": SAY}).status == 200


@asks(OLLAMA, "Ollama: GET and HEAD of /, /api/version, /api/tags")
def _(server: Server) -> None:
    assert "Ollama" in str(server.ask("/", method="GET").body)
    assert server.ask("/", method="HEAD").status == 200
    assert server.ask("/api/version", method="GET").body["version"]
    [first, *_] = server.ask("/api/tags", method="GET").body["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= {*first}


@asks(OLLAMA, "Ollama: show gives details, model_info and capabilities; an unknown model is a 404 with `error` as text")
def _(server: Server) -> None:
    shown = server.ask("/api/show", {"model": server.model}).body
    assert {"details", "model_info", "capabilities"} <= {*shown}
    for path in ("/api/show", "/api/chat", "/api/generate"):
        answer = server.ask(path, {"model": "no-such-model", "messages": SAY, "prompt": "x"})
        assert answer.status == 404
        assert "no-such-model" in answer.body["error"]


@asks(OLLAMA, "Ollama: a chat's last line has done_reason, counts and durations; those before it have the text")
def _(server: Server) -> None:
    *parts, last = server.ollama("/api/chat", messages=SAY).body
    assert all(not one["done"] for one in parts)
    assert "".join(one["message"]["content"] for one in parts)
    assert last["done"]
    assert last["done_reason"] in ("stop", "length")
    durations = [last[f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")]
    assert all(isinstance(one, int) for one in durations)
    assert durations[0] >= durations[-1]
    assert min(last["prompt_eval_count"], last["eval_count"]) > 0


@asks(OLLAMA, "Ollama: generate without a prompt, and chat without messages, load the model: done_reason load")
def _(server: Server) -> None:
    for path in ("/api/generate", "/api/chat"):
        answer = server.ask(path, {"model": server.model, "stream": False})
        assert (answer.status, answer.body["done"], answer.body["done_reason"]) == (200, True, "load")


@asks(OLLAMA, "Ollama: a request without a model is refused")
def _(server: Server) -> None:
    for path in ("/api/chat", "/api/generate"):
        refused(server.ask(path, {"messages": SAY, "prompt": "x"}), "model")


@asks(OLLAMA, "Ollama: format json and a schema; a message with a wrong role is refused")
def _(server: Server) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = server.ollama("/api/chat", messages=SAY, format=schema, stream=False).body
    assert isinstance(json.loads(answer["message"]["content"])["ok"], bool)
    assert server.ollama("/api/chat", messages=SAY, format="json", stream=False).status == 200
    refused(server.ollama("/api/chat", messages=[{"role": "nurse", "content": "x"}]), "role")


@asks(OLLAMA, "Ollama: keep_alive 0 without a prompt unloads the model: done_reason unload")
def _(server: Server) -> None:
    answer = server.ask("/api/generate", {"model": server.model, "keep_alive": 0, "stream": False})
    assert (answer.status, answer.body["done_reason"]) == (200, "unload")
