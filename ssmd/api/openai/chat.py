"""/v1/chat/completions: OpenAI's chat, read and written as a whole answer or a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ssmd.api.generate.answer import Answer, ParsedRequest, ResponseInfo, WholeChoice, own_usage
from ssmd.api.http import sse
from ssmd.api.http.errors import error_body
from ssmd.api.openai.chat_body import NOT_BUILT, ChatBody, read_chat, to_request
from ssmd.api.openai.fields import Fields
from ssmd.api.openai.tools import ignored_keywords, variables_of
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.host.host import Host
from ssmd.engine.request import LEAST_LOGPROB, Delta, FinishReason, Request, TokenLogprob, Usage
from ssmd.engine.terms import Rejection


def endpoint(on: Service) -> Endpoint:
    """Build the endpoint."""
    fields = Fields(ChatBody.model_fields, NOT_BUILT, strict=on.settings.strict)
    truncate, keep_volatile = on.settings.truncation == "auto", on.settings.keep_volatile
    return on.front(partial(_read, on.host, fields, truncate, keep_volatile))


def _read(host: Host, sorting: Fields, truncate: bool, keep_volatile: bool, fields: dict[str, Any]) -> ParsedRequest:
    """Read a body's fields. truncate: the default of `truncation`. keep_volatile: the setting. Raises Rejection."""
    fields, ignored = sorting.sort(fields)
    body = read_chat(fields)
    model = host.shelf.find(body.model)
    unread: set[str] = set()
    dropped: set[str] = set()
    request = to_request(
        body,
        model.manifest.vocabulary,
        model.defaults,
        truncate=truncate,
        unread=unread,
        dropped=None if keep_volatile else dropped,
    )
    ignored = (*ignored, *sorting.named(unread), *sorting.not_enforced(not_enforced(request)))
    name = model.named(body.model)
    written = partial(ChatAnswer, name, model.manifest.build, request.n)
    return ParsedRequest(
        model,
        request,
        stream=bool(body.stream),
        answer=partial(written, stream=bool(body.stream), include_usage=body.include_usage),
        followed=partial(written, stream=True, include_usage=True),
        keep_alive_s=body.keep_alive,
        background=bool(body.background),
        ignored=ignored,
        dropped=tuple(sorted(dropped)),
        variables=variables_of(vars(body)),
        named=sorting.named,
    )


def not_enforced(request: Request) -> tuple[str, ...]:
    """Return the keywords of schemas that the answer need not keep. A required call replaces another schema."""
    choice = request.tool_choice
    own = request.grammar.ignored if request.grammar is not None and choice.mode != "required" else ()
    return own + ignored_keywords(request.given.tools, choice)


class ChatAnswer(Answer):
    """A `chat.completion`, or its `chat.completion.chunk`s."""

    def __init__(
        self, model: str, build: str, choices: int, head: ResponseInfo, *, stream: bool, include_usage: bool
    ) -> None:
        """Begin an answer. model: its name as the client sent it."""
        self._choices, self._include_usage, self._head = choices, include_usage, head
        self._envelope: dict[str, Any] = {
            "id": f"chatcmpl-{head.id}",
            "object": "chat.completion.chunk" if stream else "chat.completion",
            "created": head.created,
            "model": model,
            "system_fingerprint": f"fp_{build[:12]}",
        }
        if stream and include_usage:
            self._envelope["usage"] = None

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        written = [
            {
                "index": i,
                "message": _message(choice),
                "logprobs": _logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for i, choice in enumerate(choices)
        ]
        return {**self._envelope, "choices": written, "usage": _usage(usage, self._head)}

    def opening(self) -> Iterator[bytes]:
        for i in range(self._choices):
            yield self._chunk(i, {"role": "assistant", "content": "", "refusal": None})

    def delta(self, delta: Delta) -> bytes:
        return self._chunk(delta.index, _delta(delta), logprobs=delta.logprobs)

    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterator[bytes]:
        for i, reason in enumerate(finish_reasons):
            yield self._chunk(i, {}, finish_reason=reason)
        if self._include_usage:
            yield sse.encode({**self._envelope, "choices": [], "usage": _usage(usage, self._head)})
        yield sse.DONE

    def failure(self, error: Rejection) -> bytes:
        return sse.encode(error_body(error))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: FinishReason | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}
        return sse.encode({**self._envelope, "choices": [choice]})


def _message(choice: WholeChoice) -> dict[str, Any]:
    """Build an assistant's message. Beside calls, an empty content is null, as in OpenAI's API."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _delta(delta: Delta) -> dict[str, Any]:
    call = delta.call
    if call is None:
        return {"reasoning_content" if delta.reasoning else "content": delta.text}
    function = {"name": call.name, "arguments": call.arguments} if call.name else {"arguments": call.arguments}
    begins = {"id": call.id, "type": "function"} if call.name else {}
    return {"tool_calls": [{"index": call.number, **begins, "function": function}]}


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": [logprob(entry) for entry in entries], "refusal": None} if entries else None


def logprob(entry: TokenLogprob) -> dict[str, Any]:
    """Return a token with its log-probability, and those of the likeliest ones."""
    return {
        **_token(entry.token, entry.utf8, entry.logprob),
        "top_logprobs": [_token(token, utf8, logprob) for token, utf8, logprob in entry.top],
    }


def _token(token: str, utf8: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": max(float(logprob), LEAST_LOGPROB), "bytes": list(utf8)}


def _usage(usage: Usage, head: ResponseInfo) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "ssmd": own_usage(usage, head.ignored, head.dropped),
    }
