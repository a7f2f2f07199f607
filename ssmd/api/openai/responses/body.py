"""The body of /v1/responses: OpenAI's fields, and ssmd's own that chat completions have too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from ssmd.api.http.body import WHOLE, Id, brief, validate
from ssmd.api.openai.chat import NOT_BUILT, AnswerBody, GenerationBody, Limit, Metadata, generation, without_refused
from ssmd.api.openai.fields import Neutral, of_schema
from ssmd.api.openai.responses.items import read_input, read_instructions
from ssmd.api.openai.responses.state import History
from ssmd.api.openai.responses.tools import ResponseTools, read_choice, read_tools
from ssmd.engine.request import Request
from ssmd.engine.terms import Grammar, Rejection
from ssmd.model.defaults import Defaults
from ssmd.sessions.rows.conversations import Conversation
from ssmd.text.messages import Message
from ssmd.text.template import NOTHING_MORE, TemplateInput

MAX_ID = 128  # characters of an id
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
# Fields that would change the answer, each with the values that ask for nothing.
REFUSED: Neutral = {
    **NOT_BUILT,
    "functions": (None, []),
    "logprobs": (None, False),
    "max_completion_tokens": (None,),
    "messages": (None,),
    "n": (None, 1),
    "prompt": (None,),
    "stop": (None, "", []),
}


class ResponsesBody(AnswerBody):
    """The fields of a response, and of /v1/responses/input_tokens."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    conversation: Any = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=MAX_ID)] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Any = None
    text: Any = None
    include: Any = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    session: Id | None = None


@dataclass(frozen=True)
class ResponseRequest:
    """A response's request, and what of it its answer repeats. echo: fields of the response object."""

    request: Request
    tools: ResponseTools
    encrypts: bool  # reasoning comes as `encrypted_content` too
    echo: Mapping[str, Any]
    conversation: Conversation | None  # that it goes on from, as it was read
    instructed: bool  # its messages begin with its instructions
    given: int  # messages of its input


def read_response(fields: Mapping[str, Any]) -> ResponsesBody:
    """Read the fields of a request. Raises Rejection that names a wrong, unknown or unsupported one."""
    if fields.get("conversation") is not None and fields.get("previous_response_id") is not None:
        raise Rejection(
            "Mutually exclusive parameters: conversation and previous_response_id cannot both be sent; leave one out",
            code="mutually_exclusive_parameters",
            param="conversation",
        )
    return validate(ResponsesBody, without_refused(fields, REFUSED))


def to_request(
    body: ResponsesBody,
    vocabulary: int,
    defaults: Defaults,
    unread: set[str],
    *,
    truncate: bool = False,
    dropped: set[str] | None = None,
    history: History | None = None,
) -> ResponseRequest:
    """Return the request to the engine. Raises Rejection.

    vocabulary: number of token ids. defaults: the model's, for options that the body leaves out. unread: takes the
    names of fields that are ignored. truncate: the default of `truncation`. dropped: as of `read_input`. history: of
    stored responses; None: none are stored.
    """
    history = History(None) if history is None else history
    before, session, conversation = tuple[Message, ...](), body.session, None
    if body.conversation is not None:
        before, conversation = history.conversation(_read_conversation(body.conversation))
        session = conversation.id
    elif body.previous_response_id is not None:
        before, session = history.before(body.previous_response_id)
    if body.session not in (None, session):
        named = "previous_response_id" if conversation is None else "conversation"
        said = f"session and {named} name different sessions; send one of them"
        raise Rejection(said, code="invalid_value", param="session")
    head = read_instructions(body.instructions, dropped)
    messages = read_input(body.input, unread, dropped, before=(*head, *before), stored=history.item)
    tools = read_tools(body.tools, unread)
    choice = read_choice(body.tool_choice, body.parallel_tool_calls, tools, unread)
    included = _read_include(body.include, unread)
    effort, variables, budget = _read_reasoning(body.reasoning, unread)
    shared = {name: value for name, value in body if name in GenerationBody.model_fields}
    if body.max_output_tokens is not None:
        if body.max_tokens not in (None, body.max_output_tokens):
            _wrong("max_output_tokens", "and max_tokens have different values; send one of them", body.max_tokens)
        shared["max_tokens"] = body.max_output_tokens
    logprobs = _LOGPROBS in included or bool(body.top_logprobs)
    asked = GenerationBody.model_construct(**shared)
    request = generation(asked, vocabulary, defaults, logprobs, body.top_logprobs or 0)
    grammar, form = _read_form(body, request.grammar, unread)
    request = replace(
        request,
        messages=messages,
        session=session,
        truncate=truncate if body.truncation is None else body.truncation == "auto",
        given=TemplateInput(tools.functions, variables) if tools.functions or variables else NOTHING_MORE,
        grammar=grammar,
        thinking_budget=budget,
        tool_choice=choice,
    )
    echo = {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "temperature": request.sampling.temperature,
        "text": {"format": form},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "auto" if request.truncate else "disabled",
    }
    if conversation is not None:
        request = replace(request, conversation=conversation.id)
        echo["conversation"] = {"id": conversation.id}
    given = len(messages) - len(before) - len(head)
    return ResponseRequest(request, tools, _ENCRYPTED in included, echo, conversation, bool(head), given)


def variables_of(body: ResponsesBody) -> dict[str, str]:
    """Return the fields that only set a variable of the chat template, each with the variable's name."""
    effort = body.reasoning.get("effort") if isinstance(body.reasoning, dict) else None
    return {} if effort in (None, "none") else {"reasoning.effort": "reasoning_effort"}


def _read_conversation(value: Any) -> str:
    """Return the id of a conversation, which is given alone or in an object."""
    where = "conversation.id" if isinstance(value, dict) else "conversation"
    id_ = value.get("id") if isinstance(value, dict) else value
    if not isinstance(id_, str) or not 1 <= len(id_) <= MAX_ID:
        _wrong(where, "must be the id of a conversation", id_)
    return id_


def _read_reasoning(value: Any, unread: set[str]) -> tuple[str | None, dict[str, Any], int | None]:
    """Return (effort, variables of the template, tokens of reasoning at most). The model's own by default."""
    if value is None:
        return None, {}, None
    fields = _object(value, "reasoning", ("effort",), unread)
    effort = fields.get("effort")
    if effort is None:
        return None, {}, None
    if effort not in EFFORTS:
        _wrong("reasoning.effort", f"must be one of {', '.join(EFFORTS)}", effort)
    if effort == "none":
        return effort, {"enable_thinking": False}, 0
    return effort, {"reasoning_effort": effort}, None


def _read_include(value: Any, unread: set[str]) -> set[str]:
    if value is None:
        return set()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        _wrong("include", "must be a list of strings", value)
    known = {_ENCRYPTED, _LOGPROBS}
    unread.update(f"include.{brief(one)[1:-1]}" for one in value if one not in known)
    return set(value) & known


def _read_form(
    body: ResponsesBody, grammar: Grammar | None, unread: set[str]
) -> tuple[Grammar | None, Mapping[str, Any]]:
    """Return the grammar of the answer, of `text.format` or of another field that has one, and the format."""
    text = _object({} if body.text is None else body.text, "text", ("format",), unread)
    form = text.get("format")
    if form is None:
        return grammar, {"type": "text"}
    where = "text.format"
    fields = _object(form, where, ("type", "name", "schema", "strict", "description"), unread)
    kind = fields.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        _wrong(f"{where}.type", "must be text, json_object or json_schema", kind)
    if kind == "text":
        return grammar, {"type": "text"}
    if grammar is not None:
        said = f"{where} and {grammar.param} both constrain the answer; send one"
        raise Rejection(said, code="invalid_value", param=where)
    if kind == "json_object":
        return of_schema({"type": "object"}, where), {"type": kind}
    if fields.get("schema") is None:
        param = f"{where}.schema"
        raise Rejection(f"{param} is required", code="missing_required_parameter", param=param)
    return of_schema(fields["schema"], f"{where}.schema"), form


def _object(value: Any, where: str, read: tuple[str, ...], unread: set[str]) -> dict[str, Any]:
    """Return an object, and name its fields that are not read."""
    if not isinstance(value, dict):
        _wrong(where, "must be an object", value)
    unread.update(f"{where}.{brief(name)[1:-1]}" for name in value if name not in read and value[name] is not None)
    return value


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)
