"""The body of a completion request: a prompt in place of messages, and all that chat has but what is chat's alone."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from ssmd.api.body import StrictModel, shown, validate
from ssmd.api.chat_body import MAX_N, NOT_BUILT, ChatBody, read_chat, to_request
from ssmd.api.fields import Neutral
from ssmd.engine.request import Raw, Request
from ssmd.engine.terms import Rejected
from ssmd.model.defaults import Defaults

MAX_PROMPTS = 64
MAX_CHOICES = 128  # of all prompts together
DEFAULT_TOKENS = 16  # as OpenAI has it
# Of chat alone. What would change an answer is refused here, each with the values that ask for nothing:
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
# and what tells a template, or of reasoning, is as unknown as any other name.
_UNKNOWN_HERE = frozenset(
    (
        *("add_generation_prompt", "chat_template", "chat_template_kwargs", "documents", "enable_thinking"),
        *("include_reasoning", "parallel_tool_calls", "reasoning", "reasoning_effort"),
        *("reasoning_budget_tokens", "thinking_budget", "thinking_token_budget"),
    )
)
_WORD = [{"role": "user", "content": "x"}]  # for who reads the fields of chat, which has messages


class PromptBody(StrictModel):
    """What a completion has and a chat has not."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None


_OF_CHAT = _REFUSED_HERE.keys() | _UNKNOWN_HERE
FIELDS = {
    **{name: field for name, field in ChatBody.model_fields.items() if name not in _OF_CHAT},
    **PromptBody.model_fields,
}
REFUSED: Neutral = {
    **{name: values for name, values in NOT_BUILT.items() if name not in _OF_CHAT | FIELDS.keys()},
    **_REFUSED_HERE,
}


def read_completion(fields: dict[str, Any]) -> tuple[PromptBody, ChatBody]:
    """Read the fields of a completion request. Raises Rejected naming the parameter that is wrong or not built."""
    for name, value in fields.items():
        if name in _UNKNOWN_HERE:
            raise Rejected(f"there is no parameter {name!r} here", code="unknown_parameter", param=name)
        if name in _REFUSED_HERE and value not in _REFUSED_HERE[name]:
            raise Rejected(
                f"parameter {name!r} is not supported here (got {shown(value)}); leave it out",
                code="unsupported_parameter",
                param=name,
            )
    own = validate(PromptBody, {name: value for name, value in fields.items() if name in PromptBody.model_fields})
    rest = {k: v for k, v in fields.items() if k not in PromptBody.model_fields and k not in _REFUSED_HERE}
    return own, read_chat({**rest, "messages": _WORD})


def to_raw_request(
    own: PromptBody, shared: ChatBody, vocabulary: int, defaults: Defaults = MappingProxyType({})
) -> Request:
    """Return the request to the engine. `vocabulary`: number of token ids. `defaults`: the model's. Raises Rejected."""
    request = to_request(shared, vocabulary, defaults)
    if own.echo and own.logprobs is not None:
        raise Rejected(
            "logprobs of the prompt's own tokens are not supported: leave echo or logprobs out",
            code="unsupported_parameter",
            param="logprobs",
        )
    if own.best_of is not None and own.best_of != request.n:
        raise Rejected(
            f"best_of ({own.best_of}) other than n ({request.n}) is not supported; leave it out",
            code="unsupported_parameter",
            param="best_of",
        )
    first, *more = _prompts(own.prompt, vocabulary)
    said = (shared.max_tokens, shared.max_completion_tokens, shared.n_predict) != (None, None, None)
    limited = said or "max_tokens" in defaults
    raw = replace(
        request,
        messages=(),
        raw=first,
        more=tuple(more),
        echo=bool(own.echo),
        max_tokens=request.max_tokens if limited else DEFAULT_TOKENS,
        sampling=replace(request.sampling, logprobs=own.logprobs is not None, top_logprobs=own.logprobs or 0),
    )
    if raw.choices > MAX_CHOICES:
        raise Rejected(
            f"{1 + len(more)} prompts of {raw.n} choices are more than {MAX_CHOICES}", code="invalid_value", param="n"
        )
    return raw


def _prompts(value: Any, vocabulary: int) -> list[Raw]:
    """One prompt or several: each a text, or ids."""
    if value is None:
        raise Rejected("prompt is required", code="missing_required_parameter", param="prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", "a string, a list of strings, of token ids, or of lists of token ids", value)
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
    for i, one in enumerate(value):
        if type(one) is not int or not 0 <= one < vocabulary:
            raise _wrong(f"{where}[{i}]", f"a token id from 0 to {vocabulary - 1}", one)
    return tuple(value)


def _wrong(where: str, what: str, value: Any) -> Rejected:
    return Rejected(f"{where}: expected {what} (got {shown(value)})", code="invalid_value", param=where)
