"""/v1/chat/completions: OpenAI's chat, its body read, its answer written whole or as a stream of chunks.

Each of OpenAI's parameters is supported, harmless, or refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, create_model, field_validator

from ssmd.api.generate.answer import Answer, ParsedRequest, ResponseInfo, WholeChoice, own_usage
from ssmd.api.http import sse
from ssmd.api.http.body import WHOLE, Id, StrictModel, brief, validate
from ssmd.api.http.errors import error_body
from ssmd.api.openai.fields import OTHERS, Fields, StructuredFields, grammar_of
from ssmd.api.openai.messages import (
    ignored_keywords,
    is_unthinking,
    marked_tools,
    read_given,
    read_messages,
    read_tool_choice,
    variables_of,
)
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.host.host import Host
from ssmd.engine.request import LEAST_LOGPROB, Delta, FinishReason, Request, Retention, TokenLogprob, Usage
from ssmd.engine.sampling.params import Dry, SamplingParams
from ssmd.engine.terms import Rejection
from ssmd.machine.duration import MAX_S, parse_duration
from ssmd.model.defaults import BREAKERS, MAX_BREAKER_CHARS, MAX_BREAKERS, MAX_INT, OPTIONS, Defaults, Option
from ssmd.text.messages import BlockEnd

MAX_N = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
Value = TypeVar("Value", int, float)
_OF_SAMPLING = OPTIONS.keys() & {one.name for one in fields(SamplingParams)}
# Parameters that are not supported, each with the values that ask for nothing.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    **OTHERS,
}


def _of(option: Option, low: float | None = None) -> Any:
    """Return the type of an option's field, for pydantic. low: least value, if it is not the option's."""
    bounds = Field(ge=option.low if low is None else low, le=option.high)
    return (Annotated[int, bounds, WHOLE] if option.whole else Annotated[float, bounds]) | None


Budget = Annotated[int, Field(ge=0, le=MAX_INT), WHOLE]
Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)]
Count = Annotated[int, Field(ge=OPTIONS["max_tokens"].low, le=OPTIONS["max_tokens"].high)]
Limit = Annotated[Count, BeforeValidator(lambda value: MAX_INT if value == -1 and type(value) is int else value), WHOLE]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(fail_fast=True, max_length=MAX_STOPS)
]
ShortText = Annotated[str, Field(max_length=1000)]


def _seconds(value: Any) -> Any:
    """Return the seconds of a time as clients write it, infinite if it is negative; other values unchanged."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if 0 <= value <= MAX_S else math.inf
    return parse_duration(value) if isinstance(value, str) else value


KeepAlive = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_seconds)]  # infinite: for ever
Bias = Annotated[float, Field(ge=-100, le=100)]


def _first_wrong(is_right: Callable[[Any], bool], value: Any) -> Any:
    """Return the first wrong entry of a dict, if there is one: pydantic would report all."""
    if isinstance(value, dict):
        wrong = next(((k, v) for k, v in value.items() if not is_right(v)), None)
        return value if wrong is None else dict([wrong])
    return value


_FIRST_BIAS = BeforeValidator(partial(_first_wrong, lambda v: type(v) in (int, float) and -100 <= v <= 100))
_FIRST_TEXT = BeforeValidator(partial(_first_wrong, lambda v: isinstance(v, str)))
Metadata = Annotated[dict[str, str], _FIRST_TEXT, Field(max_length=16)]


class StreamOptions(StrictModel):
    include_usage: bool | None = None


_SAMPLING: dict[str, Any] = {
    name: (_of(option, low=-1 if name == "top_k" else None), None)  # -1, vLLM's, and 0: all
    for key, option in OPTIONS.items()
    if key != "max_tokens"
    for name in (key, *option.aliases)
}


class AnswerBody(create_model("SamplingBody", __base__=StructuredFields, **_SAMPLING)):  # type: ignore[misc]  # made at run time
    """The fields that all protocols share. Those of sampling are made of the table OPTIONS."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    stream: bool | None = None
    max_tokens: Limit | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Field(fail_fast=True, max_length=MAX_BREAKERS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    logit_bias: Annotated[dict[str, Bias], _FIRST_BIAS] | None = None
    store: bool | None = None
    prompt_cache_retention: Literal["24h", "in_memory", "in-memory", "none"] | None = None  # with store: false
    keep_alive: KeepAlive | None = None  # of the model, from the end of this request
    background: bool | None = None


class GenerationBody(AnswerBody):
    """The fields that chat and text completions share."""

    stream_options: StreamOptions | None = None
    max_completion_tokens: Limit | None = None
    n_predict: Limit | None = None  # llama.cpp's name of it
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    stop: Stops | None = None
    # Accepted and without effect: they are for the records of a hosted service.
    metadata: Metadata | None = None
    prompt_cache_key: ShortText | None = None
    safety_identifier: ShortText | None = None
    service_tier: ShortText | None = None
    user: ShortText | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list_of_one(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(GenerationBody):
    """The fields of a chat completion."""

    messages: Any
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    session: Id | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # For the chat template, see messages.py.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    chat_template_kwargs: Any = None
    enable_thinking: Any = None
    reasoning_effort: Any = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None  # vLLM's name of it
    reasoning_budget_tokens: Annotated[int, Field(ge=-1, le=MAX_INT), WHOLE] | None = None  # llama.cpp's; -1: no bound


def read_chat(fields: dict[str, Any]) -> ChatBody:
    """Read the fields of a chat request. Raises Rejection that names a wrong, unknown or unsupported parameter."""
    return validate(ChatBody, without_refused(fields, NOT_BUILT))


def without_refused(fields: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the fields without those that ask for nothing. Raises Rejection if one asks for something unsupported."""
    kept = {}
    for name, value in fields.items():
        if name not in refused:
            kept[name] = value
        elif value not in refused[name]:
            raise Rejection(
                f"parameter {name!r} is not supported here (got {brief(value)}); leave it out",
                code="unsupported_parameter",
                param=name,
            )
    return kept


def to_request(
    body: ChatBody,
    vocabulary: int,
    defaults: Defaults = MappingProxyType({}),
    *,
    truncate: bool = False,
    unread: set[str] | None = None,
    dropped: set[str] | None = None,
) -> Request:
    """Return the request to the engine. Raises Rejection.

    truncate: the default of `truncation`. unread: takes the names of parts of its messages that are ignored.
    dropped: as of `read_messages`. The others as of `generation`.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise Rejection("top_logprobs is only possible with logprobs: true", code="invalid_value", param="top_logprobs")
    blocks: list[BlockEnd] = []
    messages = read_messages(body.messages, unread, dropped, blocks)
    given = read_given(vars(body))
    budget = _one_of(
        thinking_budget=body.thinking_budget,
        thinking_token_budget=body.thinking_token_budget,
        reasoning_budget_tokens=None if body.reasoning_budget_tokens == -1 else body.reasoning_budget_tokens,
    )
    return replace(
        generation(body, vocabulary, defaults, bool(body.logprobs), body.top_logprobs or 0),
        messages=messages,
        session=body.session,
        truncate=truncate if body.truncation is None else body.truncation == "auto",
        given=given,
        blocks=tuple(blocks),
        marked_tools=marked_tools(body.tools),
        thinking_budget=0 if budget is None and is_unthinking(vars(body)) else budget,
        tool_choice=read_tool_choice(body.tool_choice, body.parallel_tool_calls, given.tools),
    )


def generation(body: GenerationBody, vocabulary: int, defaults: Defaults, logprobs: bool, top_logprobs: int) -> Request:
    """Return a request to the engine that has no prompt yet. Raises Rejection.

    vocabulary: number of token ids. defaults: the model's, for options that the body leaves out.
    """
    if body.include_usage and not body.stream:
        raise Rejection(
            "stream_options is only possible with stream: true", code="invalid_value", param="stream_options"
        )
    options: dict[str, Any] = {name: default.value for name, default in defaults.items()} | _sent(body)
    try:
        sampling = SamplingParams(
            **{name: options[name] for name in _OF_SAMPLING if name in options},
            dry=_dry(options, prompt=vars(body)["dry_multiplier"] is not None),
            seed=body.seed,
            logit_bias=_logit_bias(body.logit_bias or {}, vocabulary),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )
    except ValueError as err:
        raise Rejection(str(err), code="invalid_value") from None
    return Request(
        messages=(),
        sampling=sampling,
        max_tokens=int(options.get("max_tokens", Request.max_tokens)),
        stop=tuple(dict.fromkeys(body.stop or ())),
        n=body.n or 1,
        store=body.store is not False,
        retention=_RETENTIONS.get(body.prompt_cache_retention or ""),
        grammar=grammar_of(body),
    )


_RETENTIONS: Mapping[str, Retention] = {
    "24h": "24h",
    "in_memory": "in_memory",
    "in-memory": "in_memory",
    "none": "none",
}


def _sent(body: GenerationBody) -> dict[str, Any]:
    """Return the options that a body sets, by name. Raises Rejection if two names of one option have other values."""
    fields = vars(body)
    sent = {name: _one_of(**{n: fields[n] for n in (name, *one.aliases)}) for name, one in OPTIONS.items()}
    sent[BREAKERS] = fields[BREAKERS]
    sent["max_tokens"] = _one_of(**{n: fields[n] for n in ("max_tokens", "max_completion_tokens", "n_predict")})
    if sent["top_k"] is not None:
        sent["top_k"] = max(0, sent["top_k"])
    return {name: value for name, value in sent.items() if value is not None}


def _dry(options: Mapping[str, Any], *, prompt: bool) -> Dry | None:
    """Return the penalty. prompt: False for a model's default, which must not spoil a copy of the prompt."""
    if not options.get("dry_multiplier"):
        return None
    asked: dict[str, Any] = {
        "base": options.get("dry_base"),
        "allowed_length": options.get("dry_allowed_length"),
        "last_n": options.get("dry_penalty_last_n"),
        "breakers": tuple(options[BREAKERS]) if BREAKERS in options else None,
        "prompt": prompt,
    }
    return Dry(options["dry_multiplier"], **{name: value for name, value in asked.items() if value is not None})


def _one_of(**named: Value | None) -> Value | None:
    """Return the value of a parameter with two names. Raises Rejection, with the first name, if the values differ."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        said = " and ".join(f"{name} ({value})" for name, value in given.items())
        raise Rejection(
            f"{said} have different values; send one of them", code="invalid_value", param=next(iter(given))
        )
    return next(iter(given.values()), None)


def _logit_bias(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key) or int(key) >= vocabulary:
            raise Rejection(
                f"logit_bias: {brief(key)} is not a token id of this model; ids go from 0 to {vocabulary - 1}",
                code="invalid_value",
                param="logit_bias",
            )
        bias[int(key)] = float(value)
    return bias


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
