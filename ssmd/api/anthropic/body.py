"""The body of /v1/messages: Anthropic's fields, and ssmd's own that chat completions have too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn

from ssmd.api.anthropic.conversation import read_conversation
from ssmd.api.http.body import Id, brief, validate
from ssmd.api.openai.chat import AnswerBody, GenerationBody, Stops, generation, without_refused
from ssmd.api.openai.fields import OTHERS, Neutral, of_schema
from ssmd.api.openai.messages import MAX_TOOLS, checked_tools, is_marked, tool_of
from ssmd.engine.request import Request
from ssmd.engine.terms import Grammar, Rejection
from ssmd.model.defaults import MAX_INT, Defaults
from ssmd.text.calls.tool_choice import AUTO, ToolChoice
from ssmd.text.messages import BlockEnd
from ssmd.text.template import NOTHING_MORE, TemplateInput

LONGEST_NAME = 128  # characters of a tool's name
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_THINKS = "enable_thinking"  # the variable of chat templates
_TOOL = ("name", "description", "input_schema", "strict")  # fields of a tool that are read
_HINTS = ("type", "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples")
# Fields of OpenAI's that would change the answer, each with the values that ask for nothing; and other servers'.
REFUSED: Neutral = {
    **OTHERS,
    "functions": (None, []),
    "logprobs": (None, False),
    "max_completion_tokens": (None,),
    "n": (None, 1),
    "parallel_tool_calls": (None, True),
    "stop": (None, "", []),
    "thread": (None, False),  # asks for the messages to be kept here: later requests would have the new ones alone
    "top_logprobs": (None, 0),
}


class MessagesBody(AnswerBody):
    """The fields of a message, and of /v1/messages/count_tokens."""

    messages: Any
    system: Any = None
    stop_sequences: Stops | None = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    output_format: Any = None  # the older place of output_config.format
    session: Id | None = None
    truncation: Literal["auto", "disabled"] | None = None


def read_message(fields: Mapping[str, Any]) -> MessagesBody:
    """Read the fields of a request. Raises Rejection that names a wrong, unknown or unsupported one."""
    return validate(MessagesBody, without_refused(fields, REFUSED))


def to_request(
    body: MessagesBody,
    vocabulary: int,
    defaults: Defaults,
    unread: set[str],
    *,
    truncate: bool = False,
    dropped: set[str] | None = None,
) -> Request:
    """Return the request to the engine. Raises Rejection.

    vocabulary: number of token ids. defaults: the model's, for options that the body leaves out. unread: takes the
    names of fields that are ignored. truncate: the default of `truncation`. dropped: as of `read_conversation`.
    """
    blocks: list[BlockEnd] = []
    messages = read_conversation(body.system, body.messages, unread, dropped, blocks)
    tools, marked = _read_tools(body.tools, unread)
    variables, budget = _read_thinking(body.thinking, unread)
    shared = {name: value for name, value in body if name in GenerationBody.model_fields}
    asked = GenerationBody.model_construct(**shared, stop=body.stop_sequences)
    request = generation(asked, vocabulary, defaults, False, 0)
    return replace(
        request,
        messages=messages,
        session=body.session,
        truncate=truncate if body.truncation is None else body.truncation == "auto",
        given=TemplateInput(tools, variables) if tools or variables else NOTHING_MORE,
        blocks=tuple(blocks),
        marked_tools=marked,
        grammar=_read_form(body, request.grammar, unread),
        thinking_budget=budget,
        tool_choice=_read_choice(body.tool_choice, tools, unread),
    )


def variables_of(body: MessagesBody) -> dict[str, str]:
    """Return the fields that only set a variable of the chat template, each with the variable's name."""
    return {"thinking": _THINKS} if isinstance(body.thinking, dict) and body.thinking.get("type") == "enabled" else {}


def _read_tools(value: Any, unread: set[str]) -> tuple[tuple[Mapping[str, Any], ...], int]:
    """Read the tools as functions, and count those up to the last marked one.

    Those that Anthropic's own servers run are left out, and named.
    """
    if value is None:
        return (), 0
    if not isinstance(value, list):
        _wrong("tools", "must be a list of tools", value)
    if len(value) > MAX_TOOLS:
        _wrong("tools", f"must be at most {MAX_TOOLS} tools", len(value))
    found, marked = [], 0
    for i, tool in enumerate(value):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            _wrong(where, "must be an object with name, description and input_schema", tool)
        if tool.get("type") not in (None, "custom"):
            unread.add(f"tools.{brief(tool.get('name') or tool['type'])[1:-1]}")
            continue
        name, description, schema, strict = (tool.get(field) for field in _TOOL)
        if schema is None:
            at = f"{where}.input_schema"
            raise Rejection(f"{at} is required", code="missing_required_parameter", param=at)
        function = {"name": name, "description": description, "parameters": schema, "strict": strict}
        found.append(tool_of({"function": function}, where, longest=LONGEST_NAME))
        unread.update(f"tools.{brief(one)[1:-1]}" for one in tool if one not in _TOOL + _HINTS)
        marked = len(found) if is_marked(tool) else marked
    return checked_tools(found, "tools"), marked


def _read_choice(value: Any, tools: tuple[Mapping[str, Any], ...], unread: set[str]) -> ToolChoice:
    if value is None:
        return AUTO
    fields = _object(value, "tool_choice", ("type", "name", "disable_parallel_tool_use"), unread)
    kind, name, alone = (fields.get(one) for one in ("type", "name", "disable_parallel_tool_use"))
    if not isinstance(alone, bool | None):
        _wrong("tool_choice.disable_parallel_tool_use", "must be true or false", alone)
    if kind not in ("auto", "any", "tool", "none"):
        _wrong("tool_choice.type", "must be auto, any, tool or none", kind)
    if kind in ("auto", "none"):
        return ToolChoice("none" if kind == "none" else "auto", None, not alone)
    if not tools:
        _wrong("tool_choice", "asks for a call, but there are no tools", value)
    if kind == "any":
        return ToolChoice("required", None, not alone)
    if name not in [tool["function"]["name"] for tool in tools]:
        _wrong("tool_choice.name", "must be the name of one of the tools", name)
    return ToolChoice("required", str(name), parallel=False)


def _read_thinking(value: Any, unread: set[str]) -> tuple[dict[str, Any], int | None]:
    """Return (variables of the template, tokens of reasoning at most). Other types leave both to the model."""
    if value is None:
        return {}, None
    fields = _object(value, "thinking", ("type", "budget_tokens"), unread)
    kind, budget = fields.get("type"), fields.get("budget_tokens")
    if kind not in THINKING:
        _wrong("thinking.type", f"must be one of {', '.join(THINKING)}", kind)
    if budget is not None and not (type(budget) is int and 0 <= budget <= MAX_INT):
        _wrong("thinking.budget_tokens", f"must be a whole number from 0 to {MAX_INT}", budget)
    if kind == "disabled":
        return {_THINKS: False}, 0
    return {_THINKS: True} if kind == "enabled" else {}, budget


def _read_form(body: MessagesBody, grammar: Grammar | None, unread: set[str]) -> Grammar | None:
    """Return the grammar of the answer: of `output_config.format`, or of another field that has one."""
    config = _object(body.output_config or {}, "output_config", ("format",), unread)
    for where, form in (("output_config.format", config.get("format")), ("output_format", body.output_format)):
        if form is None:
            continue
        fields = _object(form, where, ("type", "schema"), unread)
        if fields.get("type") != "json_schema":
            _wrong(f"{where}.type", "must be json_schema", fields.get("type"))
        if grammar is not None:
            said = f"{where} and {grammar.param} both constrain the answer; send one"
            raise Rejection(said, code="invalid_value", param=where)
        grammar = of_schema(fields.get("schema"), f"{where}.schema")
    return grammar


def _object(value: Any, where: str, read: tuple[str, ...], unread: set[str]) -> dict[str, Any]:
    """Return an object, and name its fields that are not read."""
    if not isinstance(value, dict):
        _wrong(where, "must be an object", value)
    unread.update(f"{where}.{brief(name)[1:-1]}" for name in value if name not in read and value[name] is not None)
    return value


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)
