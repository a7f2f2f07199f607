"""/api/chat and /api/generate: read, and answered whole or as lines; they also load and unload models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from ssmd.api.generate.answer import Answer, ParsedRequest, ResponseInfo, WholeChoice, own_usage
from ssmd.api.ollama.body import (
    CHAT_REFUSED,
    GENERATE_REFUSED,
    AskBody,
    OllamaChatBody,
    OllamaGenerateBody,
    chat_request,
    generate_request,
    read_chat,
    read_generate,
    variables_of,
)
from ssmd.api.ollama.conversation import Messages, pack
from ssmd.api.ollama.errors import LINES, error_body, line
from ssmd.api.openai.chat import ChatAnswer, logprob, not_enforced
from ssmd.api.openai.fields import Fields
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.host.host import Host
from ssmd.engine.host.models import Model
from ssmd.engine.request import CallDelta, Delta, FinishReason, Request, TokenLogprob, Usage
from ssmd.engine.terms import Rejection
from ssmd.text.arguments import arguments_so_far
from ssmd.text.messages import ToolCall

_NS = 1_000_000  # in a millisecond
Only = Literal["load", "unload"]
Said = Callable[..., dict[str, Any]]  # (text, reasoning, calls) as an answer has them


def chat(on: Service) -> Endpoint:
    """Build the endpoint of /api/chat."""
    return on.front(
        Reader(on, Fields(OllamaChatBody.model_fields, CHAT_REFUSED, strict=on.settings.strict)).chat, LINES
    )


def generate(on: Service) -> Endpoint:
    """Build the endpoint of /api/generate."""
    fields = Fields(OllamaGenerateBody.model_fields, GENERATE_REFUSED, strict=on.settings.strict)
    return on.front(Reader(on, fields).generate, LINES)


class Reader:
    """Reads the bodies of one of the two endpoints. Its methods raise Rejection."""

    def __init__(self, on: Service, sorting: Fields) -> None:
        self._host: Host = on.host
        self._sorting = sorting
        self._truncate, self._keeps = on.settings.truncation == "auto", on.settings.keep_volatile

    def chat(self, fields: dict[str, Any]) -> ParsedRequest:
        """Read a body of /api/chat."""
        fields, ignored = self._sorting.sort(fields)
        body = read_chat(fields)
        model = self._host.shelf.find(body.model)
        if not body.messages and isinstance(body.messages, list | None):
            return _only(body, model, ignored, said_in_chat)
        unread, dropped = set[str](), set[str]()
        request = chat_request(
            body,
            model.manifest.vocabulary,
            model.defaults,
            unread,
            truncate=self._truncate,
            dropped=None if self._keeps else dropped,
        )
        written = partial(OllamaAnswer, body.model, said_in_chat)
        return self._parsed(body, model, request, written, (*ignored, *self._sorting.named(unread)), dropped)

    def generate(self, fields: dict[str, Any]) -> ParsedRequest:
        """Read a body of /api/generate."""
        fields, ignored = self._sorting.sort(fields)
        body = read_generate(fields)
        model = self._host.shelf.find(body.model)
        if not body.prompt and not body.images:
            return _only(body, model, ignored, said_of_prompt)
        unread, dropped = set[str](), set[str]()
        request, told = generate_request(
            body,
            model.manifest.vocabulary,
            model.defaults,
            unread,
            truncate=self._truncate,
            dropped=None if self._keeps else dropped,
        )
        written = partial(OllamaAnswer, body.model, said_of_prompt, told=told or None)
        return self._parsed(body, model, request, written, (*ignored, *self._sorting.named(unread)), dropped)

    def _parsed(
        self,
        body: AskBody,
        model: Model,
        request: Request,
        written: partial[OllamaAnswer],
        ignored: tuple[str, ...],
        dropped: set[str],
    ) -> ParsedRequest:
        return ParsedRequest(  # a follower gets server-sent events, in the form that the page reads
            model,
            request,
            stream=body.stream is not False,
            answer=written,
            followed=partial(
                ChatAnswer, model.named(body.model), model.manifest.build, 1, stream=True, include_usage=True
            ),
            keep_alive_s=body.keep_alive,
            ignored=(*ignored, *self._sorting.not_enforced(not_enforced(request))),
            dropped=tuple(sorted(dropped)),
            variables={} if request.raw is not None else variables_of(body),
            named=self._sorting.named,
        )


def _only(body: AskBody, model: Model, ignored: tuple[str, ...], said: Said) -> ParsedRequest:
    """Return a request that loads a model, or unloads it."""
    what: Only = "unload" if body.unloads else "load"
    written = partial(OllamaAnswer, body.model, said, only=what)
    return ParsedRequest(
        model,
        Request(()),
        stream=False,
        answer=written,
        followed=written,
        keep_alive_s=body.keep_alive,
        only=what,
        ignored=ignored,
    )


def said_in_chat(text: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the field of an answer's line that holds the text: `message`, as /api/chat has it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return {"message": message}


def said_of_prompt(text: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the part of an answer that has its words, for /api/generate, which has no calls."""
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


class OllamaAnswer(Answer):
    """An answer, or its lines: pieces of the text, each call whole, and a last line with the counts."""

    def __init__(
        self, model: str, said: Said, head: ResponseInfo, *, told: Messages | None = None, only: Only | None = None
    ) -> None:
        """Begin an answer.

        model: its name as the client sent it. told: the conversation before the answer, for `context`; None: none is
        returned. only: the reason for which there is nothing to say.
        """
        self._model, self._said, self._head, self._told, self._only = model, said, head, told, only
        self._texts: list[str] = []  # sent so far
        self._calls = 0  # begun so far
        self._call: tuple[CallDelta, list[str]] | None = None  # a call that is not complete, and its arguments
        self._logprobs: list[TokenLogprob] = []  # not sent yet

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        if self._only is not None:
            loaded = {"load_duration": _ns(usage.load_ms), "total_duration": _ns(usage.load_ms)}
            return {**self._envelope(), **self._said(""), "done": True, "done_reason": self._only, **loaded}
        [choice] = choices
        self._texts.append(choice.text)
        calls = [_call(i, call) for i, call in enumerate(choice.calls)]
        said = self._said(choice.text, choice.reasoning, calls)
        logprobs = {"logprobs": [logprob(entry) for entry in choice.logprobs]} if choice.logprobs else {}
        return {**self._envelope(), **said, **logprobs, **self._end(choice.finish_reason, usage)}

    def opening(self) -> Iterator[bytes]:
        """Return nothing: a stream begins with its first word."""
        return iter(())

    def delta(self, delta: Delta) -> bytes:
        self._logprobs += delta.logprobs
        if delta.call is None:
            head = self._end_call()
            if not delta.text:
                return head
            if delta.reasoning:
                return head + self._line(self._said("", delta.text))
            self._texts.append(delta.text)
            return head + self._line(self._said(delta.text))
        head = b""
        if delta.call.name:
            head, self._call = self._end_call(), (delta.call, [])
        if self._call is not None:
            self._call[1].append(delta.call.arguments)
        return head

    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterator[bytes]:
        [reason] = finish_reasons
        yield self._end_call()
        yield self._line(self._said(""), self._end(reason, usage))

    def failure(self, error: Rejection) -> bytes:
        return line(error_body(error))

    def _envelope(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": rfc3339(datetime.now(UTC))}

    def _line(self, said: Mapping[str, Any], end: Mapping[str, Any] | None = None) -> bytes:
        logprobs = {"logprobs": [logprob(entry) for entry in self._logprobs]} if self._logprobs else {}
        self._logprobs = []
        return line({**self._envelope(), **said, **logprobs, **({"done": False} if end is None else end)})

    def _end_call(self) -> bytes:
        """Return the line of the call that is open, now that it is complete."""
        if self._call is None:
            return b""
        (first, arguments), self._call = self._call, None
        call = _call(self._calls, ToolCall(first.id, first.name, "".join(arguments)))
        self._calls += 1
        return self._line(self._said("", "", [call]))

    def _end(self, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """Return the fields of the end. Their times add up to the whole, but for planning and waiting."""
        drawn_ms = (usage.tbt_ms or 0.0) * max(0, usage.completion_tokens - 1)
        context = None
        if self._told is not None:
            context = pack([*self._told, {"role": "assistant", "content": "".join(self._texts)}])
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            **({} if context is None else {"context": context}),
            "total_duration": _ns(usage.ttft_ms + drawn_ms),
            "load_duration": _ns(usage.load_ms),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(usage.restore_ms + usage.prefill_ms),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(usage.shared_ms + drawn_ms),
            "ssmd": {
                "cached_tokens": usage.cached_tokens,
                **own_usage(usage, self._head.ignored, self._head.dropped),
            },
        }


def rfc3339(at: datetime) -> str:
    """Write a time in UTC as Ollama does."""
    return at.isoformat().replace("+00:00", "Z")


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    arguments = arguments_so_far(call.arguments)
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def _ns(ms: float) -> int:
    """Return nanoseconds, at least 1: clients divide by them."""
    return max(1, round(ms * _NS))
