"""/v1/completions: a prompt as it is, without a template and without a session, as in OpenAI's API before chat."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from ssmd.api.generate.answer import Answer, ParsedRequest, ResponseInfo, WholeChoice, own_usage
from ssmd.api.http import sse
from ssmd.api.http.body import WHOLE, brief, validate, whole_list
from ssmd.api.http.errors import error_body
from ssmd.api.openai.chat import MAX_N, NOT_BUILT, GenerationBody, generation, without_refused
from ssmd.api.openai.fields import Fields, Neutral
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.host.host import Host
from ssmd.engine.request import LEAST_LOGPROB, Delta, FinishReason, Raw, Request, TokenLogprob, Usage
from ssmd.engine.terms import Rejection
from ssmd.model.defaults import Defaults

MAX_PROMPTS = 64
MAX_CHOICES = 128  # of all prompts together
DEFAULT_TOKENS = 16  # OpenAI's default
# Fields of chat alone. Those that would change an answer are refused, each with the values that ask for nothing.
_REFUSED_HERE: Neutral = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "messages": (None,),
    "modalities": (None, ["text"]),
    "session": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None,),
    "truncation": (None, "disabled"),
}
# Fields for a template, or about reasoning, are refused as unknown.
_UNKNOWN_HERE = frozenset(
    (
        *("add_generation_prompt", "chat_template", "chat_template_kwargs", "documents", "enable_thinking"),
        *("include_reasoning", "parallel_tool_calls", "reasoning", "reasoning_effort"),
        *("reasoning_budget_tokens", "thinking_budget", "thinking_token_budget"),
    )
)


def endpoint(on: Service) -> Endpoint:
    """Build the endpoint."""
    fields = Fields(CompletionBody.model_fields, REFUSED, strict=on.settings.strict)
    return on.front(partial(_read, on.host, fields))


def _read(host: Host, sorting: Fields, fields: dict[str, Any]) -> ParsedRequest:
    """Read a body's fields. Raises Rejection."""
    fields, ignored = sorting.sort(fields)
    body = read_completion(fields)
    model = host.shelf.find(body.model)
    request = to_raw_request(body, model.manifest.vocabulary, model.defaults)
    name = model.named(body.model)
    written = partial(CompletionAnswer, name, model.manifest.build, announced=bool(body.background))
    return ParsedRequest(
        model,
        request,
        stream=bool(body.stream),
        answer=partial(written, stream=bool(body.stream), include_usage=body.include_usage),
        followed=partial(written, stream=True, include_usage=True),
        keep_alive_s=body.keep_alive,
        background=bool(body.background),
        ignored=(*ignored, *sorting.not_enforced(() if request.grammar is None else request.grammar.ignored)),
    )


class CompletionAnswer(Answer):
    """A `text_completion`, whole or in pieces of the same shape."""

    def __init__(
        self, model: str, build: str, head: ResponseInfo, *, stream: bool, include_usage: bool, announced: bool = False
    ) -> None:
        """Begin an answer. model: its name as the client sent it. announced: a stream sends the id before the text."""
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
        self._offsets: dict[int, _Offset] = {}  # by choice

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

    def failure(self, error: Rejection) -> bytes:
        return sse.encode(error_body(error))

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return sse.encode({**self._envelope, "choices": [choice]})

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return the old shape, of four lists. Tokens are by name; the chosen one is added to the likeliest."""
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
    """The offset at which the next token begins in a choice's text, in characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at = 0

    def past(self, utf8: bytes) -> int:
        """Return the offset at which the next token begins, then move past its bytes."""
        at = self._at
        self._at += len(self._utf8.decode(utf8))
        return at


def _name(token: str, utf8: bytes) -> str:
    """Return a token's name. A part of a character is named by its bytes, as in OpenAI's API: many look alike."""
    return token if "\ufffd" not in token else "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _bounded(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB)


class CompletionBody(GenerationBody):
    """The fields of a text completion."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None


REFUSED: Neutral = {
    **{n: values for n, values in NOT_BUILT.items() if n not in _UNKNOWN_HERE | CompletionBody.model_fields.keys()},
    **_REFUSED_HERE,
}


def read_completion(fields: dict[str, Any]) -> CompletionBody:
    """Read the fields of a completion request. Raises Rejection that names a wrong or unsupported parameter."""
    for name in fields:
        if name in _UNKNOWN_HERE:
            raise Rejection(f"there is no parameter {name!r} here", code="unknown_parameter", param=name)
    return validate(CompletionBody, without_refused(fields, REFUSED))


def to_raw_request(body: CompletionBody, vocabulary: int, defaults: Defaults = MappingProxyType({})) -> Request:
    """Return the request to the engine. `vocabulary`: number of token ids. `defaults`: the model's.

    Raises Rejection.
    """
    request = generation(body, vocabulary, defaults, body.logprobs is not None, body.logprobs or 0)
    if body.echo and body.logprobs is not None:
        raise Rejection(
            "logprobs of the prompt's own tokens are not supported: leave echo or logprobs out",
            code="unsupported_parameter",
            param="logprobs",
        )
    if body.best_of is not None and body.best_of != request.n:
        raise Rejection(
            f"best_of ({body.best_of}) other than n ({request.n}) is not supported; leave it out",
            code="unsupported_parameter",
            param="best_of",
        )
    first, *more = _prompts(body.prompt, vocabulary)
    sent = (body.max_tokens, body.max_completion_tokens, body.n_predict) != (None, None, None)
    limited = sent or "max_tokens" in defaults
    raw = replace(
        request,
        raw=first,
        more=tuple(more),
        echo=bool(body.echo),
        max_tokens=request.max_tokens if limited else DEFAULT_TOKENS,
    )
    if raw.choices > MAX_CHOICES:
        raise Rejection(
            f"{1 + len(more)} prompts of {raw.n} choices are more than {MAX_CHOICES}", code="invalid_value", param="n"
        )
    return raw


def _prompts(value: Any, vocabulary: int) -> list[Raw]:
    """Read one prompt or several: each a text, or ids. Raises Rejection."""
    if value is None:
        raise Rejection("prompt is required", code="missing_required_parameter", param="prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", "a string, a list of strings, of token ids, or of lists of token ids", value)
    value = whole_list(value)
    if type(value[0]) is int:
        return [_ids(value, "prompt", vocabulary)]
    if len(value) > MAX_PROMPTS:
        raise _wrong("prompt", f"at most {MAX_PROMPTS} prompts", value)
    found: list[Raw] = []
    for i, one in enumerate(value):
        if isinstance(one, list):
            found.append(_ids(one, f"prompt[{i}]", vocabulary))
        elif isinstance(one, str) and isinstance(value[0], str):
            found.append(one)
        else:
            raise _wrong(f"prompt[{i}]", f"{'a string' if isinstance(value[0], str) else 'a list of token ids'}", one)
    return found


def _ids(value: list[Any], where: str, vocabulary: int) -> tuple[int, ...]:
    if not value:
        raise _wrong(where, "at least one token id", value)
    value = whole_list(value)
    for i, one in enumerate(value):
        if type(one) is not int or not 0 <= one < vocabulary:
            raise _wrong(f"{where}[{i}]", f"a token id from 0 to {vocabulary - 1}", one)
    return tuple(value)


def _wrong(where: str, what: str, value: Any) -> Rejection:
    return Rejection(f"{where}: expected {what} (got {brief(value)})", code="invalid_value", param=where)
