"""/v1/completions: a prompt as it is, without a template and without a session, as OpenAI had it before chat."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from starlette.routing import Route

from ssmd.api import sse
from ssmd.api.answer import Answer, Asking, Head, WholeChoice, own_usage
from ssmd.api.completions_body import FIELDS, REFUSED, read_completion, to_raw_request
from ssmd.api.errors import error_body
from ssmd.api.fields import Fields
from ssmd.api.front import Front
from ssmd.api.under_way import UnderWay
from ssmd.engine.host.host import Host
from ssmd.engine.request import LEAST_LOGPROB, Delta, FinishReason, TokenLogprob, Usage
from ssmd.engine.terms import Rejected

PATH = "/v1/completions"


def routes(host: Host, under_way: UnderWay, stall_s: float, *, strict: bool = False) -> list[Route]:
    """The endpoint, for `app.create_app`. strict: the setting."""
    front = Front(host, partial(_read, host, Fields(FIELDS, REFUSED, strict=strict)), under_way, stall_s)
    return [Route(PATH, front, methods=["POST"])]


def _read(host: Host, sorting: Fields, fields: dict[str, Any]) -> Asking:
    """What a body asks for. Raises Rejected."""
    fields, ignored = sorting.sort(fields)
    own, shared = read_completion(fields)
    model = host.shelf.find(shared.model)
    request = to_raw_request(own, shared, model.manifest.vocabulary, model.defaults)
    name = model.id if "@" in shared.model else model.name
    written = partial(CompletionAnswer, name, model.manifest.build, announced=bool(shared.background))
    return Asking(
        model,
        request,
        stream=bool(shared.stream),
        answer=partial(written, stream=bool(shared.stream), include_usage=shared.include_usage),
        followed=partial(written, stream=True, include_usage=True),
        keep_alive_s=shared.keep_alive,
        background=bool(shared.background),
        ignored=ignored,
    )


class CompletionAnswer(Answer):
    """A `text_completion`, whole or in pieces that look the same."""

    def __init__(
        self, model: str, build: str, head: Head, *, stream: bool, include_usage: bool, announced: bool = False
    ) -> None:
        """model: as the client calls it. announced: a stream says how the answer is called before its first word."""
        self._include_usage, self._ignored, self._announced = include_usage, head.ignored, announced
        self._envelope: dict[str, Any] = {
            "id": f"cmpl-{head.id}",
            "object": "text_completion",
            "created": head.created,
            "model": model,
            "system_fingerprint": f"fp_{build[:12]}",
        }
        if stream and include_usage:
            self._envelope["usage"] = None
        self._offsets: dict[int, _Offset] = {}  # of each choice

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        written = [
            {
                "index": i,
                "text": choice.text,
                "logprobs": self._logprobs(i, choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for i, choice in enumerate(choices)
        ]
        return {**self._envelope, "choices": written, "usage": self._usage(usage)}

    def opening(self) -> Iterator[bytes]:
        if self._announced:
            yield sse.encode({**self._envelope, "choices": []})

    def delta(self, delta: Delta) -> bytes:
        return self._chunk(delta.index, delta.text, self._logprobs(delta.index, delta.logprobs), None)

    def ending(self, finish_reasons: Sequence[FinishReason], usage: Usage) -> Iterator[bytes]:
        for i, reason in enumerate(finish_reasons):
            yield self._chunk(i, "", None, reason)
        if self._include_usage:
            yield sse.encode({**self._envelope, "choices": [], "usage": self._usage(usage)})
        yield sse.DONE

    def failure(self, error: Rejected) -> bytes:
        return sse.encode(error_body(error))

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return sse.encode({**self._envelope, "choices": [choice]})

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The old shape, of four lists. Tokens are by their names; the one that came is among the likeliest."""
        if not entries:
            return None
        offset = self._offsets.setdefault(index, _Offset())
        return {
            "tokens": [_name(entry.token, entry.utf8) for entry in entries],
            "token_logprobs": [_bounded(entry.logprob) for entry in entries],
            "top_logprobs": [
                {_name(token, utf8): _bounded(p) for token, utf8, p in entry.top}
                | {_name(entry.token, entry.utf8): _bounded(entry.logprob)}
                for entry in entries
            ],
            "text_offset": [offset.past(entry.utf8) for entry in entries],
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "ssmd": own_usage(usage, self._ignored),
        }


class _Offset:
    """Where in a choice's text each of its tokens begins, in characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at = 0

    def past(self, utf8: bytes) -> int:
        """Where the next token begins, of these bytes."""
        at = self._at
        self._at += len(self._utf8.decode(utf8))
        return at


def _name(token: str, utf8: bytes) -> str:
    """A token as a name: a part of a character by its bytes, as OpenAI writes it, for many look alike as text."""
    return token if "\ufffd" not in token else "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _bounded(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB)
