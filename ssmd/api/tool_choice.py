"""`tool_choice` and `parallel_tool_calls` of a request, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ssmd.api.body import shown
from ssmd.engine.terms import Rejected
from ssmd.text.calls.tool_choice import ToolChoice

_PARAM = "tool_choice"


def read_tool_choice(value: Any, parallel: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """What is said of the tools that are given. Raises Rejected."""
    if parallel is not None and not isinstance(parallel, bool):
        _wrong(f"parallel_tool_calls must be true or false (got {shown(parallel)})", "parallel_tool_calls")
    several = parallel is not False
    if value is None or value == "auto" or value == "none":
        return ToolChoice("none" if value == "none" else "auto", None, several)
    if not tools:
        _wrong(f"{_PARAM} asks for a call, but there are no tools", _PARAM)
    if value == "required":
        return ToolChoice("required", None, several)
    return ToolChoice("required", _named(value, tools), parallel=False)


def _named(value: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """The tool that has to be called."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        about = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
        _wrong(f"{_PARAM} {about} (got {shown(value)})", _PARAM)
    name = function.get("name")
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        _wrong(f"{_PARAM} names {shown(name)}, which is not among the tools", f"{_PARAM}.function.name")
    return str(name)


def _wrong(message: str, param: str) -> NoReturn:
    raise Rejected(message, code="invalid_value", param=param)
