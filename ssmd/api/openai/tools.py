"""A client's `tools` and template variables, checked: the input of the chat template beside the messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ssmd.api.http.body import brief
from ssmd.api.openai.messages import is_marked
from ssmd.engine.sampling.bounds import enforced
from ssmd.engine.terms import Rejection
from ssmd.text.calls.tool_choice import ToolChoice
from ssmd.text.template import NOTHING_MORE, OWN, TemplateInput

MAX_TOOLS = 128  # as in OpenAI's API: no model can tell more apart
MAX_VARIABLES = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
MAX_NAME = 64
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_NO_ARGUMENTS = {"type": "object", "properties": {}}  # the meaning of missing parameters
# Variables of the template that other servers accept as fields of the request.
ALIASES = ("enable_thinking", "reasoning_effort")

_PARAM = "tool_choice"


def read_given(fields: Mapping[str, Any]) -> TemplateInput:
    """Read the chat template's input from a request's fields. Raises Rejection whose param is a path."""
    tools = _tools(fields.get("tools"), "tools")
    functions = fields.get("functions")
    if functions and tools:
        _wrong("functions", "is the old name of tools; send one of them", functions)
    if functions is not None and not tools:  # the old name, and without the envelope
        listed = functions if isinstance(functions, list) else _wrong("functions", "must be a list", functions)
        tools = _tools([{"function": function} for function in listed], "functions")
    variables = _variables(fields)
    return TemplateInput(tools, variables) if tools or variables else NOTHING_MORE


def marked_tools(tools: Any) -> int:
    """Count the tools of a request up to the last one that is marked to be cached; 0 if none is."""
    listed = tools if isinstance(tools, list) else []
    marked = [i for i, tool in enumerate(listed, 1) if is_marked(tool) or is_marked(tool["function"])]
    return max(marked, default=0)


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        _wrong(where, "must be a list of tools", value)
    if len(value) > MAX_TOOLS:
        what = f"{where} has {len(value)} tools, at most {MAX_TOOLS} are possible"
        raise Rejection(what, code="invalid_value", param=where)
    return checked_tools([tool_of(tool, f"{where}[{i}]") for i, tool in enumerate(value)], where)


def checked_tools(tools: Sequence[Mapping[str, Any]], where: str) -> tuple[Mapping[str, Any], ...]:
    """Return tools that `tool_of` made, in the same order. Raises Rejection for two different ones of one name."""
    named: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        if named.setdefault(tool["function"]["name"], tool) != tool:  # a call's schema would be ambiguous
            at = f"{where}[{i}].function.name"
            _wrong(at, "is the name of another tool", tool["function"]["name"])
    return tuple(tools)


def tool_of(tool: Any, where: str, *, longest: int = MAX_NAME) -> Mapping[str, Any]:
    """Read a tool, a function. longest: characters of its name, at most. Raises Rejection."""
    if not isinstance(tool, dict):
        _wrong(where, "must be an object with type and function", tool)
    kind = tool.get("type", "function")
    if kind != "function":
        what = f"{where}.type: tools of type {brief(kind)} are not supported, functions are"
        raise Rejection(what, code="unsupported_parameter", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        _wrong(f"{where}.function", "must be an object with name, description and parameters", function)
    name = function.get("name")
    if name is None:
        at = f"{where}.function.name"
        raise Rejection(f"{at} is required", code="missing_required_parameter", param=at)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > longest:
        _wrong(f"{where}.function.name", f"must be 1 to {longest} letters, digits, _, . or -", name)
    known = {key: value for key, value in function.items() if value is not None and key != "cache_control"}
    if not isinstance(known.get("description", ""), str):
        _wrong(f"{where}.function.description", "must be a string", known["description"])
    if not isinstance(known.setdefault("parameters", dict(_NO_ARGUMENTS)), dict):
        _wrong(f"{where}.function.parameters", "must be a JSON schema, an object", known["parameters"])
    if not isinstance(known.get("strict", False), bool):
        _wrong(f"{where}.function.strict", "must be true or false", known["strict"])
    return {"type": "function", "function": known}


def _variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the variables. Those of `chat_template_kwargs` override the fields of the same name."""
    given = fields.get("chat_template_kwargs")
    where = "chat_template_kwargs"
    if given is None:
        given = {}
    if not isinstance(given, dict):
        _wrong(where, "must be an object", given)
    if len(given) > MAX_VARIABLES:
        what = f"{where} has {len(given)} names, at most {MAX_VARIABLES} are possible"
        raise Rejection(what, code="invalid_value", param=where)
    for name in given:
        if name in OWN or not _VARIABLE.fullmatch(name):
            param = f"{where}.{brief(name)[1:-1]}"
            raise Rejection(f"{param} is not a valid name of a template variable", code="invalid_value", param=param)
    if not isinstance(thinks := fields.get("enable_thinking"), bool | None):
        _wrong("enable_thinking", "must be true or false", thinks)
    if not isinstance(effort := fields.get("reasoning_effort"), str | None):
        _wrong("reasoning_effort", "must be a string", effort)
    if is_unthinking(fields):
        return {"enable_thinking": False} | given
    return {name: value for name in ALIASES if (value := fields.get(name)) is not None} | given


def is_unthinking(fields: Mapping[str, Any]) -> bool:
    """Return True if a request asks for no reasoning by its effort, and not for reasoning by `enable_thinking`.

    A variable of `chat_template_kwargs` overrides the field.
    """
    thinks = {**fields, **(fields.get("chat_template_kwargs") or {})}.get("enable_thinking")
    return fields.get("reasoning_effort") == "none" and thinks is not True


def variables_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a request that set a variable of the chat template, each with the variable's name."""
    given = fields.get("chat_template_kwargs") or {}
    plain = {name: name for name in ALIASES if fields.get(name) is not None}
    if is_unthinking(fields):  # it is honoured with any template
        del plain["reasoning_effort"]
    return plain | {f"chat_template_kwargs.{name}": name for name, value in given.items() if value is not None}


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)


def read_tool_choice(value: Any, parallel: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Read `tool_choice` and `parallel_tool_calls`. Raises Rejection."""
    if parallel is not None and not isinstance(parallel, bool):
        _wrong_choice(f"parallel_tool_calls must be true or false (got {brief(parallel)})", "parallel_tool_calls")
    several = parallel is not False
    if value is None or value == "auto" or value == "none":
        return ToolChoice("none" if value == "none" else "auto", None, several)
    if not tools:
        _wrong_choice(f"{_PARAM} asks for a call, but there are no tools", _PARAM)
    if value == "required":
        return ToolChoice("required", None, several)
    return ToolChoice("required", _named(value, tools), parallel=False)


def ignored_keywords(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> tuple[str, ...]:
    """Return the keywords, as paths, that are not enforced in arguments which must be valid. Raises Rejection."""
    found: list[str] = []
    for i, tool in enumerate(tools):
        if choice.binds(tool["function"]):
            param = f"tools[{i}].function.parameters"
            found += [param + way for way in enforced(tool["function"]["parameters"], param).ignored]
    return tuple(found)


def _named(value: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the tool that must be called."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        about = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
        _wrong_choice(f"{_PARAM} {about} (got {brief(value)})", _PARAM)
    name = function.get("name")
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        _wrong_choice(f"{_PARAM} names {brief(name)}, which is not among the tools", f"{_PARAM}.function.name")
    return str(name)


def _wrong_choice(message: str, param: str) -> NoReturn:
    raise Rejection(message, code="invalid_value", param=param)
