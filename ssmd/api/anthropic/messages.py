"""/v1/messages: Anthropic's messages, read and written as a whole message or a stream of events; and their tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ssmd.api.anthropic.body import REFUSED, MessagesBody, read_message, to_request, variables_of
from ssmd.api.anthropic.errors import event_body
from ssmd.api.generate.answer import Answer, ParsedRequest, ResponseInfo, WholeChoice, own_usage
from ssmd.api.openai.chat import not_enforced
from ssmd.api.openai.fields import Fields
from ssmd.api.openai.tokenize import MAX_TOKENS, TextEndpoints
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.engine import Engine
from ssmd.engine.host.host import Host
from ssmd.engine.request import Delta, FinishReason, Usage
from ssmd.engine.terms import Rejection
from ssmd.text.arguments import arguments_so_far

_SIGNATURE = "c3NtZA=="  # of reasoning; clients send it back, and it is not read
_EMPTY: Mapping[str, Mapping[str, Any]] = {  # blocks at their beginning
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def endpoint(on: Service) -> Endpoint:
    """Build the endpoint of messages."""
    fields = Fields(MessagesBody.model_fields, REFUSED, strict=on.settings.strict)
    truncate, keep_volatile = on.settings.truncation == "auto", on.settings.keep_volatile
    return on.front(partial(_read, on.host, fields, truncate, keep_volatile))


class TokenCounts(TextEndpoints):
    """The endpoint that counts a prompt's tokens."""

    def __init__(self, on: Service) -> None:
        super().__init__(on)
        self._fields = Fields(MessagesBody.model_fields, REFUSED, strict=on.settings.strict)
        self._keeps = on.settings.keep_volatile

    async def count(self, http: HttpRequest) -> Response:
        """Answer with the number of tokens of a prompt, beyond the model's context too."""

        def work(body: MessagesBody, engine: Engine, go_on: Callable[[], None]) -> bytes:
            unread: set[str] = set()
            dropped = None if self._keeps else set[str]()
            request = to_request(body, engine.artifact.manifest.vocabulary, {}, unread, dropped=dropped)
            self._fields.named(unread)
            return json.dumps({"input_tokens": engine.count(request, MAX_TOKENS, go_on)}).encode()

        return await self.answer(http, self._fields, read_message, work)


def _read(host: Host, sorting: Fields, truncate: bool, keep_volatile: bool, fields: dict[str, Any]) -> ParsedRequest:
    """Read a body's fields. truncate, keep_volatile: the settings. Raises Rejection."""
    fields, ignored = sorting.sort(fields)
    body = read_message(fields)
    model = host.shelf.find(body.model)
    unread: set[str] = set()
    dropped: set[str] = set()
    request = to_request(
        body,
        model.manifest.vocabulary,
        model.defaults,
        unread,
        truncate=truncate,
        dropped=None if keep_volatile else dropped,
    )
    ignored = (*ignored, *sorting.named(unread), *sorting.not_enforced(not_enforced(request)))
    name = model.named(body.model)
    return ParsedRequest(
        model,
        request,
        stream=bool(body.stream),
        answer=partial(MessageAnswer, name),
        followed=partial(MessageAnswer, name),
        keep_alive_s=body.keep_alive,
        background=bool(body.background),
        ignored=ignored,
        dropped=tuple(sorted(dropped)),
        variables=variables_of(body),
        named=sorting.named,
    )


class MessageAnswer(Answer):
    """A message, or its events: blocks of reasoning, text and calls, one after the other."""

    def __init__(self, model: str, head: ResponseInfo) -> None:
        """Begin an answer. model: its name as the client sent it."""
        self._head = head
        self._message: dict[str, Any] = {
            "id": f"msg_{head.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._begun = self._called = False
        self._block = -1  # number of the last block
        self._kind = ""  # of the block that is open; "" if none is

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        [choice] = choices
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": _SIGNATURE})
        if choice.text:
            content.append({"type": "text", "text": choice.text})
        for call in choice.calls:
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_so_far(call.arguments)}
            )
        stop = _stop(choice.finish_reason, usage, called=bool(choice.calls))
        return {**self._message, "content": content, **stop, "usage": self._usage(usage)}

    def opening(self) -> Iterator[bytes]:
        """Return nothing: the first event has the counts of the prompt, which are known with the first word."""
        return iter(())

    def delta(self, delta: Delta) -> bytes:
        call = delta.call
        if call is None:
            kind = "thinking" if delta.reasoning else "text"
            more = {"type": f"{kind}_delta", kind: delta.text}
            return self._begin() + self._more(kind, _EMPTY[kind], more) if delta.text else b""
        head = self._begin()
        if call.name:  # each call is a block of its own
            head += self._end_block()
            self._called = True
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        more = {"type": "input_json_delta", "partial_json": call.arguments}
        return head + self._more("tool_use", block, more)

    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterator[bytes]:
        [reason] = finish_reasons
        yield self._begin() + self._end_block()
        stop = _stop(reason, usage, called=self._called)
        yield _event({"type": "message_delta", "delta": stop, "usage": self._usage(usage)})
        yield _event({"type": "message_stop"})

    def failure(self, error: Rejection) -> bytes:
        return _event(event_body(error))

    def _begin(self) -> bytes:
        """Return the first events, unless they were sent."""
        if self._begun:
            return b""
        self._begun = True
        usage = self._head.usage() or Usage.of_nothing(self._head.session, 0.0)
        message = {**self._message, "usage": _tokens(usage)}
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def _more(self, kind: str, block: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        """Return more of a block of this kind, which is begun if another one is open."""
        head = b""
        if kind != self._kind:
            head, self._kind = self._end_block(), kind
            self._block += 1
            head += _event({"type": "content_block_start", "index": self._block, "content_block": block})
        return head + _event({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _end_block(self) -> bytes:
        kind, self._kind = self._kind, ""
        if not kind:
            return b""
        at, signed = self._block, b""
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            signed = _event({"type": "content_block_delta", "index": at, "delta": delta})
        return signed + _event({"type": "content_block_stop", "index": at})

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {**_tokens(usage), "ssmd": own_usage(usage, self._head.ignored, self._head.dropped)}


def _tokens(usage: Usage) -> dict[str, int]:
    """Return the counts of tokens. Those of the prompt are three: restored, fed and kept, and only fed."""
    kept = usage.saved_tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - kept,
        "cache_creation_input_tokens": kept,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(reason: FinishReason, usage: Usage, *, called: bool) -> dict[str, str | None]:
    """Return why a message ended. A call that the client named counts as one, other than in OpenAI's API."""
    found = next((stop for stop in usage.stop_strings if stop is not None), None)
    if found is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": found}
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if called and not usage.stopped else "end_turn", "stop_sequence": None}


def _event(data: Mapping[str, Any]) -> bytes:
    """Encode an event. JSON escapes line ends, so that the data is one line."""
    raw = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {raw}\n\n".encode()
