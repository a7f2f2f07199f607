"""The body of a chat completion request: each of OpenAI's parameters is supported, harmless, or refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, field_validator

from ssmd.api.http.body import Id, StrictModel, shown, validate
from ssmd.api.openai.fields import OTHERS
from ssmd.api.openai.messages import read_messages
from ssmd.api.openai.structured import Structured, grammar_of
from ssmd.api.openai.tools import read_given, read_tool_choice
from ssmd.engine.request import Request
from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.sampling.penalties import Dry
from ssmd.engine.terms import Rejected
from ssmd.machine.duration import MAX_S, parse_duration
from ssmd.model.defaults import BREAKERS, MAX_BREAKER_CHARS, MAX_BREAKERS, MAX_INT, OPTIONS, Defaults

MAX_N = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
Value = TypeVar("Value", int, float)
_OF_SAMPLING = OPTIONS.keys() & {field.name for field in dataclasses.fields(SamplingParams)}

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


def _within(name: str) -> Any:
    """Return the bounds of an option, for pydantic."""
    return Field(ge=OPTIONS[name].low, le=OPTIONS[name].high)


Count = Annotated[int, _within("max_tokens")]
Budget = Annotated[int, Field(ge=0, le=MAX_INT)]
Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)]
Limit = Annotated[Count, BeforeValidator(lambda value: MAX_INT if value == -1 and type(value) is int else value)]
Penalty = Annotated[float, _within("repetition_penalty")]
ShortText = Annotated[str, Field(max_length=1000)]
Seconds = Annotated[float, Field(allow_inf_nan=True)]  # infinite: for ever


Bias = Annotated[float, Field(ge=-100, le=100)]


def _first_wrong(is_right: Callable[[Any], bool], value: Any) -> Any:
    """Return the first wrong entry of a dict, if there is one: pydantic would report all."""
    if isinstance(value, dict):
        wrong = next(((k, v) for k, v in value.items() if not is_right(v)), None)
        return value if wrong is None else dict([wrong])
    return value


_FIRST_BIAS = BeforeValidator(partial(_first_wrong, lambda v: type(v) in (int, float) and -100 <= v <= 100))
_FIRST_TEXT = BeforeValidator(partial(_first_wrong, lambda v: isinstance(v, str)))


class StreamOptions(StrictModel):
    include_usage: bool | None = None


class ChatBody(Structured):
    model: Annotated[str, Field(min_length=1, max_length=4096)]
    messages: Any
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n_predict: Limit | None = None  # llama.cpp's name of it
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None  # -1, vLLM's, and 0: all
    min_p: Annotated[float, _within("min_p")] | None = None
    typical_p: Annotated[float, _within("typical_p")] | None = None
    xtc_probability: Annotated[float, _within("xtc_probability")] | None = None
    xtc_threshold: Annotated[float, _within("xtc_threshold")] | None = None
    dry_multiplier: Annotated[float, _within("dry_multiplier")] | None = None
    dry_base: Annotated[float, _within("dry_base")] | None = None
    dry_allowed_length: Annotated[int, _within("dry_allowed_length")] | None = None
    dry_penalty_last_n: Annotated[int, _within("dry_penalty_last_n")] | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Field(fail_fast=True, max_length=MAX_BREAKERS)] | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None  # llama.cpp's and Ollama's name of it
    repeat_last_n: Annotated[int, _within("repeat_last_n")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(fail_fast=True, max_length=MAX_STOPS),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: Annotated[dict[str, Bias], _FIRST_BIAS] | None = None
    session: Id | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    keep_alive: Seconds | None = None  # of the model, from the end of this request
    background: bool | None = None
    # For the chat template, see tools.py.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    chat_template_kwargs: Any = None
    enable_thinking: Any = None
    reasoning_effort: Any = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None  # vLLM's name of it
    reasoning_budget_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None  # llama.cpp's; -1: no bound
    # Accepted and without effect: they are for the accounting of hosted services.
    metadata: Annotated[dict[str, str], _FIRST_TEXT, Field(max_length=16)] | None = None
    prompt_cache_key: ShortText | None = None
    safety_identifier: ShortText | None = None
    service_tier: ShortText | None = None
    user: ShortText | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list_of_one(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("keep_alive", mode="before")
    @classmethod
    def _keep_alive_is_a_time(cls, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return value if 0 <= value <= MAX_S else math.inf
        return parse_duration(value) if isinstance(value, str) else value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def read_chat(fields: dict[str, Any]) -> ChatBody:
    """Read the fields of a chat request. Raises Rejected that names a wrong, unknown or unsupported parameter."""
    known = {}
    for name, value in fields.items():
        if name not in NOT_BUILT:
            known[name] = value
        elif value not in NOT_BUILT[name]:
            raise Rejected(
                f"parameter {name!r} is not supported here (got {shown(value)}); leave it out",
                code="unsupported_parameter",
                param=name,
            )
    return validate(ChatBody, known)


def to_request(
    body: ChatBody,
    vocabulary: int,
    defaults: Defaults = MappingProxyType({}),
    *,
    truncate: bool = False,
    unread: set[str] | None = None,
) -> Request:
    """Return the request to the engine. Raises Rejected.

    vocabulary: number of token ids. defaults: the model's, for options that the body leaves out. truncate: the default
    of `truncation`. unread: takes the names of parts of its messages that are ignored.
    """
    if body.include_usage and not body.stream:
        raise Rejected(
            "stream_options is only possible with stream: true", code="invalid_value", param="stream_options"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise Rejected("top_logprobs is only possible with logprobs: true", code="invalid_value", param="top_logprobs")
    messages = read_messages(body.messages, unread)
    given = read_given(vars(body))
    bias = _logit_bias(body.logit_bias or {}, vocabulary)
    options: dict[str, Any] = {name: default.value for name, default in defaults.items()} | _said(body)
    try:
        sampling = SamplingParams(
            **{name: options[name] for name in _OF_SAMPLING if name in options},
            dry=_dry(options, prompt=body.dry_multiplier is not None),
            seed=body.seed,
            logit_bias=bias,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
        )
    except ValueError as err:
        raise Rejected(str(err), code="invalid_value") from None
    return Request(
        messages=messages,
        sampling=sampling,
        max_tokens=int(options.get("max_tokens", Request.max_tokens)),
        stop=tuple(dict.fromkeys(body.stop or ())),
        n=body.n or 1,
        session=body.session,
        store=body.store is not False,
        truncate=truncate if body.truncation is None else body.truncation == "auto",
        given=given,
        grammar=grammar_of(body),
        thinking_budget=_one_of(
            thinking_budget=body.thinking_budget,
            thinking_token_budget=body.thinking_token_budget,
            reasoning_budget_tokens=None if body.reasoning_budget_tokens == -1 else body.reasoning_budget_tokens,
        ),
        tool_choice=read_tool_choice(body.tool_choice, body.parallel_tool_calls, given.tools),
    )


def _said(body: ChatBody) -> dict[str, Any]:
    """Return the options that a body sets, by name. Raises Rejected if two names of one option have other values."""
    said = {name: getattr(body, name) for name in (*OPTIONS, BREAKERS)}
    said["max_tokens"] = _one_of(
        max_tokens=body.max_tokens, max_completion_tokens=body.max_completion_tokens, n_predict=body.n_predict
    )
    said["repetition_penalty"] = _one_of(repetition_penalty=body.repetition_penalty, repeat_penalty=body.repeat_penalty)
    if body.top_k is not None:
        said["top_k"] = max(0, body.top_k)
    return {name: value for name, value in said.items() if value is not None}


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
    """Return the value of a parameter with two names. Raises Rejected, with the first name, if the values differ."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        said = " and ".join(f"{name} ({value})" for name, value in given.items())
        raise Rejected(f"{said} have different values; send one of them", code="invalid_value", param=next(iter(given)))
    return next(iter(given.values()), None)


def _logit_bias(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key) or int(key) >= vocabulary:
            raise Rejected(
                f"logit_bias: {shown(key)} is not a token id of this model; ids go from 0 to {vocabulary - 1}",
                code="invalid_value",
                param="logit_bias",
            )
        bias[int(key)] = float(value)
    return bias
