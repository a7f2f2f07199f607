"""/v1/chat/completions: how OpenAI's chat is read and written, as a whole answer or a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from starlette.routing import Route

from ssmd.api import sse
from ssmd.api.chat_body import ChatBody, read_chat, to_request
from ssmd.api.errors import error_body
from ssmd.api.front import Answer, Asking, Front, Head, WholeChoice, own_usage
from ssmd.engine.host import Host
from ssmd.engine.request import LEAST_LOGPROB, Delta, FinishReason, Rejected, TokenLogprob, Usage
from ssmd.engine.shelf import Model


def routes(host: Host, stall_s: float, *, truncate: bool = False) -> list[Route]:
    """The endpoint, for `server.create_app`. truncate: as the setting `truncation` has it."""
    front = Front(host, partial(_read, host, truncate), stall_s)
    return [Route("/v1/chat/completions", front, methods=["POST"])]


def _read(host: Host, truncate: bool, fields: dict[str, Any]) -> Asking:
    """What a body asks for. Raises Rejected."""
    body = read_chat(fields)
    model = host.shelf.find(body.model)
    request = to_request(body, model.manifest.vocabulary, truncate=truncate)
    return Asking(model, request, bool(body.stream), partial(ChatAnswer, body, model), body.keep_alive)


class ChatAnswer(Answer):
    """A `chat.completion`, or its `chat.completion.chunk`s."""

    def __init__(self, body: ChatBody, model: Model, head: Head) -> None:
        self._choices = body.n or 1
        self._include_usage = body.include_usage
        self._envelope: dict[str, Any] = {
            "id": f"chatcmpl-{head.id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": head.created,
            "model": model.id if "@" in body.model else model.name,
            "system_fingerprint": f"fp_{model.manifest.build[:12]}",
        }
        if body.stream and body.include_usage:
            self._envelope["usage"] = None

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        written = [
            {
                "index": i,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": _logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for i, choice in enumerate(choices)
        ]
        return {**self._envelope, "choices": written, "usage": _usage(usage)}

    def opening(self) -> Iterator[bytes]:
        for i in range(self._choices):
            yield self._chunk(i, {"role": "assistant", "content": "", "refusal": None})

    def delta(self, delta: Delta) -> bytes:
        return self._chunk(delta.index, {"content": delta.text}, logprobs=delta.logprobs)

    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterator[bytes]:
        for i, reason in enumerate(finish_reasons):
            yield self._chunk(i, {}, finish_reason=reason)
        if self._include_usage:
            yield sse.encode({**self._envelope, "choices": [], "usage": _usage(usage)})
        yield sse.DONE

    def failure(self, error: Rejected) -> bytes:
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


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": [_logprob(entry) for entry in entries], "refusal": None} if entries else None


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {
        **_token(entry.token, entry.utf8, entry.logprob),
        "top_logprobs": [_token(token, utf8, logprob) for token, utf8, logprob in entry.top],
    }


def _token(token: str, utf8: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": max(float(logprob), LEAST_LOGPROB), "bytes": list(utf8)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "ssmd": own_usage(usage),
    }
