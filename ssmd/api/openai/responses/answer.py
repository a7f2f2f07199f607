"""A response as it is written: one object, or events, each with the next sequence number."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from ssmd.api.generate.answer import Answer, ResponseInfo, WholeChoice, own_usage
from ssmd.api.http.body import object_with
from ssmd.api.http.errors import cut
from ssmd.api.openai.responses.items import INPUT, sealed
from ssmd.api.openai.responses.tools import ToolOrigin
from ssmd.engine.request import LEAST_LOGPROB, Delta, FinishReason, TokenLogprob, Usage, joined
from ssmd.engine.terms import Rejection
from ssmd.text.arguments import read_arguments

_GENERATION = "gen_"  # before the digits of an answer's id in the engine
_RESPONSE = "resp_"
_PREFIXES = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}
Item = dict[str, Any]


def response_id(answer: str) -> str:
    """Return the id of a response. answer: the engine's id of the answer."""
    return _RESPONSE + answer


@dataclass(frozen=True)
class ResponseForm:
    """The parts of a response object that are known from its request. model: its name as the client sent it."""

    model: str
    echo: Mapping[str, Any]  # fields of the request that the object repeats
    store: bool
    origins: Mapping[str, ToolOrigin]  # of the tools, by the name that the model knows
    encrypts: bool  # reasoning comes as `encrypted_content` too

    @property
    def background(self) -> bool:
        """Return True if the response goes on without its client."""
        return bool(self.echo.get("background"))

    def item(self, kind: str, id_: str, **fields: Any) -> Item:
        """Return an item of the output. id_: the digits of its id."""
        return {"id": f"{_PREFIXES[kind]}_{id_}", "type": kind, "status": "completed", **fields}

    def reasoning(self, id_: str, text: str) -> Item:
        content = [{"type": "reasoning_text", "text": text}]
        item = self.item("reasoning", id_, summary=[], content=content)
        return {**item, "encrypted_content": sealed(text)} if self.encrypts else item

    def message(self, id_: str, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Item:
        return self.item("message", id_, role="assistant", content=[_part(text, logprobs)])

    def call(self, id_: str, call_id: str, name: str, arguments: str) -> Item:
        """Return a call under the name that the client gave its tool."""
        origin = self.origins.get(name) or ToolOrigin("function", name)
        inner = {} if origin.namespace is None else {"namespace": origin.namespace}
        fields = {"call_id": call_id, "name": origin.name, **inner}
        if origin.kind == "custom":
            return self.item("custom_tool_call", id_, **fields, input=_input(arguments))
        return self.item("function_call", id_, **fields, arguments=arguments)


class ResponseAnswer(Answer):
    """A response. Its output is items: reasoning, a message, and calls."""

    def __init__(self, form: ResponseForm, encoded: str, head: ResponseInfo, after: int = -1) -> None:
        """Begin an answer. encoded: the form's echo in JSON, made once as it may be long.

        after: the number of the last event that its client has; those up to it are made, and not sent.
        """
        self._form, self._head, self.after = form, head, after
        self._progresses = False  # it was sent that work has begun
        self._encoded = encoded
        self._digits = head.id.removeprefix(_GENERATION)
        self._sent = 0  # events
        self._output: list[Item] = []  # items that are complete
        self._open: _OpenItem | None = None

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        [choice] = choices
        self.after = sys.maxsize  # the events make the output, and are not sent
        for delta in choice.deltas if choice.logprobs else joined(choice.deltas):
            self.delta(delta)
        status, why = ending(choice.finish_reason, usage, background=self._form.background)
        deque(self.closing(status, why, usage), maxlen=0)
        return self._joined(self._response(status, self._output, usage, why)).encode()

    def opening(self) -> Iterator[bytes]:
        if self._form.background:  # it may wait for long; `response.in_progress` comes with the first word
            yield self._about("created", "queued")
            yield self._about("queued", "queued")
            return
        yield self._about("created", "in_progress")
        yield self._progress()

    def _progress(self) -> bytes:
        if self._progresses:
            return b""
        self._progresses = True
        return self._about("in_progress", "in_progress")

    def delta(self, delta: Delta) -> bytes:
        if delta.call is None and not delta.text and not delta.logprobs:
            return b""
        return self.part(delta)

    def part(self, delta: Delta) -> bytes:
        """Return the events of a delta, also of an empty one."""
        return self._progress() + self._part(delta)

    def _part(self, delta: Delta) -> bytes:
        call = delta.call
        if call is None:
            kind = "reasoning" if delta.reasoning else "message"
            head = b"" if self._open is not None and self._open.kind == kind else self._close() + self._begin(kind)
            assert self._open is not None, "an item was begun"
            self._open.texts.append(delta.text)
            if delta.reasoning:
                return head + self._more("reasoning_text.delta", content_index=0, delta=delta.text)
            logprobs = [_logprob(entry) for entry in delta.logprobs]
            self._open.logprobs += logprobs
            return head + self._more("output_text.delta", content_index=0, delta=delta.text, logprobs=logprobs)
        head = b""
        if call.name:  # each call is an item of its own
            origin = self._form.origins.get(call.name)
            kind = "function_call" if origin is None or origin.kind == "function" else "custom_tool_call"
            head = self._close() + self._begin(kind, call.id, call.name)
        if not call.arguments:
            return head
        assert self._open is not None, "a call begins with its name"
        self._open.texts.append(call.arguments)
        if self._open.kind == "custom_tool_call":  # its input is known when the text around it is complete
            return head
        return head + self._more("function_call_arguments.delta", delta=call.arguments)

    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterator[bytes]:
        [reason] = finish_reasons
        yield from self.closing(*ending(reason, usage, background=self._form.background), usage)

    def closing(
        self, status: str, why: str | None, usage: Usage | None, completed_at: int | None = None
    ) -> Iterator[bytes]:
        """Yield the events after the last word. why: the reason of an incomplete response."""
        empty = not self._output and self._open is None
        if not (empty and status == "cancelled"):
            yield self._progress()
            if empty or (self._open is not None and self._open.kind == "reasoning"):
                yield self._close() + self._begin("message")
            yield self._close("completed" if status == "completed" else "incomplete")
        event = "incomplete" if status == "cancelled" else status  # OpenAI has no event of its own for it
        yield self._about(event, status, usage, why, completed_at=completed_at)

    def failure(self, error: Rejection) -> bytes:
        head = b"".join(self.opening()) if not self._sent else self._close("incomplete")
        return head + self._about("failed", "failed", error=error)

    def at_least(self, number: int) -> None:
        """Give the next event this number, or a higher one."""
        self._sent = max(self._sent, number)

    def object(self, status: str, error: Rejection | None = None) -> bytes:
        """Return the response without an output, as JSON."""
        return self._joined(self._response(status, [], error=error)).encode()

    def _id(self, index: int) -> str:
        return f"{self._digits}_{index}"

    def _response(
        self,
        status: str,
        output: Sequence[Item],
        usage: Usage | None = None,
        why: str | None = None,
        error: Rejection | None = None,
        completed_at: int | None = None,
    ) -> dict[str, Any]:
        """Return the response object without the fields of its request."""
        head, failed = self._head, None if error is None else {"code": error.code, "message": cut(error.message)}
        return {
            "id": response_id(head.id),
            "object": "response",
            "created_at": head.created,
            "status": status,
            **({"completed_at": completed_at or int(time.time())} if status == "completed" else {}),
            "error": failed,
            "incomplete_details": None if why is None else {"reason": why},
            "model": self._form.model,
            "output": list(output),
            "store": self._form.store if usage is None else usage.stored,
            "usage": None if usage is None else usage_of(usage, self._head),
        }

    def _about(
        self,
        event: str,
        status: str,
        usage: Usage | None = None,
        why: str | None = None,
        error: Rejection | None = None,
        completed_at: int | None = None,
    ) -> bytes:
        """Encode an event with the whole response."""
        if self._sent <= self.after:  # it may be long
            return self._encode(event, "")
        response = self._joined(self._response(status, self._output, usage, why, error, completed_at))
        return self._encode(f"response.{event}", f'"response":{response}')

    def _joined(self, response: Mapping[str, Any]) -> str:
        """Encode a response object with the fields of its request, which were encoded before, in another thread."""
        return f"{_json(response)[:-1]},{self._encoded[1:]}"

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> bytes:
        self._open = _OpenItem(kind, self._id(len(self._output)), call_id, name, [], [])
        item = {**self._item(), "status": "in_progress"}
        if kind in ("message", "reasoning"):
            item["content"] = []
        head = self._send("output_item.added", item=item)
        if kind == "message":
            return head + self._more("content_part.added", content_index=0, part=_part("", ()))
        if kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            return head + self._more("content_part.added", content_index=0, part=part)
        return head

    def _close(self, status: str = "completed") -> bytes:
        """Return the events that end the open item, if one is."""
        if self._open is None:
            return b""
        item, text = {**self._item(), "status": status}, self._open.text
        kind = self._open.kind
        if kind == "message":
            [part] = item["content"]
            told = self._more("output_text.done", content_index=0, text=text, logprobs=self._open.logprobs)
            told += self._more("content_part.done", content_index=0, part=part)
        elif kind == "reasoning":
            [part] = item["content"]
            told = self._more("reasoning_text.done", content_index=0, text=text)
            told += self._more("content_part.done", content_index=0, part=part)
        elif kind == "custom_tool_call":
            told = self._more("custom_tool_call_input.delta", delta=item["input"])
            told += self._more("custom_tool_call_input.done", input=item["input"])
        else:
            told = self._more("function_call_arguments.done", name=item["name"], arguments=text)
        told += self._send("output_item.done", item=item)
        self._output.append(item)
        self._open = None
        return told

    def _item(self) -> Item:
        """Return the open item as far as it came."""
        one = self._open
        assert one is not None, "an item is open"
        if one.kind == "message":
            return self._form.message(one.id, one.text, one.logprobs)
        if one.kind == "reasoning":
            return self._form.reasoning(one.id, one.text)
        return self._form.call(one.id, one.call_id, one.name, one.text)

    def _more(self, event: str, **fields: Any) -> bytes:
        """Encode an event about the open item."""
        assert self._open is not None, "an item is open"
        return self._send(event, item_id=f"{_PREFIXES[self._open.kind]}_{self._open.id}", **fields)

    def _send(self, event: str, **fields: Any) -> bytes:
        return self._encode(f"response.{event}", _json({"output_index": len(self._output), **fields})[1:-1])

    def _encode(self, event: str, fields: str) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        if number <= self.after:
            return b""
        return f'event: {event}\ndata: {{"type":"{event}","sequence_number":{number},{fields}}}\n\n'.encode()


@dataclass
class _OpenItem:
    """An item that is being written. id: its digits. call_id, name: of a call. texts: text or arguments so far."""

    kind: str
    id: str
    call_id: str
    name: str
    texts: list[str]
    logprobs: list[dict[str, Any]]

    @property
    def text(self) -> str:
        return "".join(self.texts)


def encoded(echo: Mapping[str, Any]) -> str:
    """Encode the fields of a request that its response repeats."""
    few = {name: value for name, value in echo.items() if name != "tools"}
    return object_with("tools", echo["tools"], few).decode() if "tools" in echo else _json(echo)


def usage_of(usage: Usage, head: ResponseInfo) -> dict[str, Any]:
    """Return the usage of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "ssmd": own_usage(usage, head.ignored, head.dropped),
    }


def ending(
    reason: FinishReason, usage: Usage, *, background: bool = False, complete: bool = True
) -> tuple[str, str | None]:
    """Return (status, the reason of an incomplete response). complete: False if it broke off."""
    if background and usage.stopped:
        return "cancelled", None
    if usage.stopped or not complete:
        return "incomplete", "stopped"
    return ("incomplete", "max_output_tokens") if reason == "length" else ("completed", None)


def _part(text: str, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _input(arguments: str) -> str:
    """Return the text that a custom tool is called with: as far as it came, or all if the model wrote no such call."""
    found: Any = read_arguments(arguments)
    if found is None:
        with suppress(ValueError):
            found = from_json(arguments, allow_partial="trailing-strings")
    text = found.get(INPUT, "") if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else arguments


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [_token(token, utf8, logprob) for token, utf8, logprob in entry.top]
    return {**_token(entry.token, entry.utf8, entry.logprob), "top_logprobs": top}


def _token(token: str, utf8: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": max(float(logprob), LEAST_LOGPROB), "bytes": list(utf8)}


def _json(value: Mapping[str, Any]) -> str:
    """Encode an object. JSON escapes line ends, so that it is one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
