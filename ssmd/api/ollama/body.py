"""The bodies of /api/chat and /api/generate: Ollama's fields, and ssmd's own that chat completions have too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from ssmd.api.http.body import WHOLE, Id, StrictModel, brief, validate
from ssmd.api.ollama.conversation import as_openai, read_images, unpack
from ssmd.api.openai.chat import GenerationBody, KeepAlive, generation, without_refused
from ssmd.api.openai.fields import Neutral, of_schema
from ssmd.api.openai.messages import read_given, read_messages
from ssmd.engine.request import Request
from ssmd.engine.terms import Grammar, Rejection
from ssmd.model.defaults import BREAKERS, OPTIONS, Defaults

_NO_FORM = ("", None)
_LIMIT = "num_predict"
OPTION_NAMES = frozenset(
    (
        *(name for key, one in OPTIONS.items() if key != "max_tokens" for name in (key, *one.aliases)),
        *(BREAKERS, "logit_bias", "seed", "stop", _LIMIT),
    )
)
_NOTHING: tuple[Any, ...] = (None, "", [], {})
# Fields that would change the answer, each with the values that ask for nothing.
CHAT_REFUSED: Neutral = {"tool_choice": (None, "auto"), "n": (None, 1)}
GENERATE_REFUSED: Neutral = {"suffix": (None, ""), "template": (None, ""), "n": (None, 1)}


class AskBody(StrictModel):
    """The fields that /api/chat and /api/generate share."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    stream: bool | None = None
    format: Any = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None  # of the model, from the end of this request
    think: bool | Literal["low", "medium", "high", "max", ""] | None = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    session: Id | None = None
    store: bool | None = None

    @property
    def unloads(self) -> bool:
        """Return True if the model is to go at once."""
        return self.keep_alive == 0


class OllamaChatBody(AskBody):
    """The fields of /api/chat."""

    messages: Any = None
    tools: Any = None


class OllamaGenerateBody(AskBody):
    """The fields of /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: Any = None
    images: Any = None


def read_chat(fields: Mapping[str, Any]) -> OllamaChatBody:
    """Read the fields of /api/chat. Raises Rejection that names a wrong, unknown or unsupported one."""
    return validate(OllamaChatBody, without_refused(fields, CHAT_REFUSED))


def read_generate(fields: Mapping[str, Any]) -> OllamaGenerateBody:
    """Read the fields of /api/generate. Raises Rejection that names a wrong, unknown or unsupported one."""
    return validate(OllamaGenerateBody, without_refused(fields, GENERATE_REFUSED))


def chat_request(
    body: OllamaChatBody,
    vocabulary: int,
    defaults: Defaults,
    unread: set[str],
    *,
    truncate: bool,
    dropped: set[str] | None,
) -> Request:
    """Return the request to the engine. Raises Rejection. The arguments are those of `asked`, and `read_messages`."""
    messages = read_messages(as_openai(body.messages), unread, dropped)
    return replace(asked(body, vocabulary, defaults, unread, truncate=truncate, tools=body.tools), messages=messages)


def generate_request(
    body: OllamaGenerateBody,
    vocabulary: int,
    defaults: Defaults,
    unread: set[str],
    *,
    truncate: bool,
    dropped: set[str] | None,
) -> tuple[Request, list[dict[str, str]]]:
    """Return (request to the engine, the conversation before its answer). Raises Rejection, as `chat_request`.

    A prompt that is `raw` has no conversation.
    """
    read_images(body.images, "images")
    request = asked(body, vocabulary, defaults, unread, truncate=truncate)
    prompt = body.prompt or ""
    if body.raw:
        for name in ("context", "system"):
            if getattr(body, name) not in _NOTHING:
                said = f"{name} is not possible with raw: true, which takes the prompt as it is; leave one of them out"
                raise Rejection(said, code="invalid_value", param=name)
        return replace(request, raw=prompt, given=Request(()).given, thinking_budget=None, truncate=False), []
    told = unpack(body.context)
    if body.system:  # the same one that the conversation began with, or another one in its place
        told = [{"role": "system", "content": body.system}, *(one for one in told if one["role"] != "system")]
    told.append({"role": "user", "content": prompt})
    return replace(request, messages=read_messages(told, unread, dropped)), told


def asked(
    body: AskBody, vocabulary: int, defaults: Defaults, unread: set[str], *, truncate: bool, tools: Any = None
) -> Request:
    """Return a request to the engine that has no prompt yet. Raises Rejection.

    vocabulary: number of token ids. defaults: the model's, for options that the body leaves out. unread: takes the
    names of ignored options. truncate: the default of `truncate`.
    """
    if body.top_logprobs and not body.logprobs:
        raise Rejection("top_logprobs is only possible with logprobs: true", code="invalid_value", param="top_logprobs")
    try:
        sampling = validate(GenerationBody, {"model": body.model, **_options(body.options or {}, unread)})
        request = generation(sampling, vocabulary, defaults, bool(body.logprobs), body.top_logprobs or 0)
    except Rejection as err:
        raise _of_option(err) from None
    return replace(
        request,
        store=body.store is not False,
        session=body.session,
        truncate=truncate if body.truncate is None else body.truncate,
        grammar=_grammar(body.format),
        given=read_given({"tools": tools, **_variables(body.think)}),
        thinking_budget=0 if body.think is False else None,
    )


def variables_of(body: AskBody) -> dict[str, str]:
    """Return the fields that only set a variable of the chat template, each with the variable's name."""
    if body.think is True:
        return {"think": "enable_thinking"}
    return {"think.level": "reasoning_effort"} if body.think else {}


def _variables(think: bool | str | None) -> dict[str, Any]:
    if think is None or think == "":
        return {}
    return {"enable_thinking": bool(think)} | ({"reasoning_effort": think} if isinstance(think, str) else {})


def _options(options: Mapping[str, Any], unread: set[str]) -> dict[str, Any]:
    """Return Ollama's options as fields of a completion. unread: takes the names of those that are ignored."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name not in OPTION_NAMES:
            unread.add(f"options.{brief(name)[1:-1]}")
        elif name == _LIMIT:  # -1 and -2: no limit but the context's
            found["max_tokens"] = -1 if _is_number(value) and value <= 0 else value
        elif not (name == "seed" and _is_number(value) and value < 0):  # a negative one means any seed
            found[name] = value
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _of_option(error: Rejection) -> Rejection:
    """Return the error with the option's name as Ollama has it."""
    param = error.param or ""
    name = f"options.{_LIMIT}{param[10:]}" if param.startswith("max_tokens") else f"options.{param}"
    starts = bool(param) and error.message.startswith(param)
    said = f"{name}{error.message[len(param) :]}" if starts else f"options: {error.message}"
    return Rejection(said, code=error.code, param=name if param else "options")


def _grammar(form: Any) -> Grammar | None:
    if form in _NO_FORM:
        return None
    if form == "json":
        return of_schema({"type": "object"}, "format")
    if not isinstance(form, dict):
        _wrong("format", 'must be "json" or a JSON schema, an object', form)
    return of_schema(form, "format")


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)
