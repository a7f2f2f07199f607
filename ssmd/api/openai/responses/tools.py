"""The tools of a response, and the choice among them: functions, custom tools, and namespaces of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from ssmd.api.http.body import brief
from ssmd.api.openai.messages import MAX_TOOLS, checked_tools, tool_of
from ssmd.api.openai.responses.items import INPUT, flat_name
from ssmd.api.openai.responses.lark import NoRegex, regex_of
from ssmd.engine.sampling.bounds import check_size, enforced
from ssmd.engine.terms import Rejection
from ssmd.text.calls.tool_choice import ToolChoice

MAX_LISTED = 1024  # tools of a choice, each of which is compared with all of the request
LONGEST_NAME = 128  # characters of a tool's name, a namespace included
_PATTERN = f".properties.{INPUT}.pattern"  # in the schema of a custom tool
_IN_TOOLS = re.compile(rf"tools\[(\d+)\]\.function\b(\.parameters{re.escape(_PATTERN)}\Z)?")
_FUNCTION = {"type", "name", "description", "parameters", "strict"}
_CUSTOM = {"type", "name", "description", "format"}


@dataclass(frozen=True)
class ToolOrigin:
    """A tool as the client named it; the model knows it by a single name."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


Origins = Mapping[str, ToolOrigin]  # by the name that the model knows


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a request. functions: as templates get them. places: of each in the request."""

    functions: tuple[Mapping[str, Any], ...] = ()
    places: tuple[str, ...] = ()
    origins: Mapping[str, ToolOrigin] | None = None
    left_out: bool = False  # some are run by a server, and are left out here

    def named(self, kind: Any, name: Any, namespace: Any) -> str | None:
        """Return the name that the model knows of a tool; None if there is no such tool."""
        for flat, origin in (self.origins or {}).items():
            if (origin.kind, origin.name) == (kind, name) and namespace in (None, origin.namespace):
                return flat
        return None

    def not_enforced(self, choice: ToolChoice) -> list[str]:
        """Return the keywords, as paths, that are not enforced in arguments which must be valid. Raises Rejection."""
        found: list[str] = []
        for tool, place in zip(self.functions, self.places, strict=True):
            if choice.binds(tool["function"]):
                param = f"{place}.parameters"
                try:
                    schema = enforced(tool["function"]["parameters"], param)
                    check_size(schema.schema, param)
                except Rejection as err:
                    raise _replaced(err, f"{param}{_PATTERN}", f"{place}.format.definition") from None
                found += [param + way for way in schema.ignored]
        return found

    def placed(self, error: Rejection) -> Rejection:
        """Return an error of the engine, which has the tools in one list, with its place in the request."""
        found = _IN_TOOLS.match(error.param or "")
        if found is None or int(found[1]) >= len(self.places):
            return error
        place = self.places[int(found[1])]
        if found[2] == f".parameters{_PATTERN}":
            return _replaced(error, found[0], f"{place}.format.definition")
        return _replaced(error, f"tools[{found[1]}].function", place)


def read_tools(value: Any, unread: set[str]) -> ResponseTools:
    """Read the tools. Those that OpenAI's servers run are left out, and named in `unread`. Raises Rejection."""
    if value is None:
        return ResponseTools()
    if not isinstance(value, list):
        _wrong("tools", "must be a list of tools", value)
    functions: list[Mapping[str, Any]] = []
    places: list[str] = []
    origins: dict[str, ToolOrigin] = {}
    left_out = False

    def take(tool: Any, where: str, namespace: str | None) -> None:
        nonlocal left_out
        if not isinstance(tool, dict):
            _wrong(where, "must be a tool, an object with type and name", tool)
        kind = tool.get("type", "function")
        if kind == "namespace" and namespace is None:
            inner, name = tool.get("tools"), tool.get("name")
            if not isinstance(name, str) or not name or not isinstance(inner, list):
                _wrong(where, "must be a namespace with a name and a list of tools", tool)
            for j, one in enumerate(inner):
                take(one, f"{where}.tools[{j}]", name)
            return
        if kind not in ("function", "custom"):
            if not isinstance(kind, str):
                _wrong(f"{where}.type", "must be a string", kind)
            unread.add(f"tools.{brief(kind)[1:-1]}")
            left_out = True
            return
        if len(functions) == MAX_TOOLS:  # before more grammars are read
            _wrong("tools", f"must be at most {MAX_TOOLS} tools, those in namespaces included", MAX_TOOLS + 1)
        read = _function(tool, where, namespace) if kind == "function" else _custom(tool, where, namespace, unread)
        known = _FUNCTION if kind == "function" else _CUSTOM
        unread.update(f"tools.{brief(one)[1:-1]}" for one in tool if one not in known and tool[one] is not None)
        functions.append(read)
        places.append(where)
        origins[read["function"]["name"]] = ToolOrigin(kind, tool["name"], namespace)

    for i, tool in enumerate(value):
        take(tool, f"tools[{i}]", None)
    try:
        checked = checked_tools(functions, "tools")
    except Rejection as err:
        raise _placed(err, places) from None
    return ResponseTools(checked, tuple(places), origins, left_out)


def read_choice(value: Any, parallel: bool | None, tools: ResponseTools, unread: set[str]) -> ToolChoice:
    """Read `tool_choice` and `parallel_tool_calls`. Raises Rejection."""
    several = parallel is not False
    if value is None or value in ("auto", "none"):
        return ToolChoice("none" if value == "none" else "auto", None, several)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "allowed_tools":
        return _allowed(value, several, tools, unread)
    if isinstance(kind, str) and kind not in ("function", "custom"):  # a tool that is left out cannot be called
        unread.add("tool_choice")
        return ToolChoice("auto", None, several)
    if value == "required" and not tools.functions and tools.left_out:
        unread.add("tool_choice")
        return ToolChoice("auto", None, several)
    if not tools.functions:
        _wrong("tool_choice", "asks for a call, but there are no tools", value)
    if value == "required":
        return ToolChoice("required", None, several)
    if kind is None:
        _wrong("tool_choice", 'must be "none", "auto", "required" or an object like {"type": "function", …}', value)
    name = tools.named(kind, value.get("name"), value.get("namespace"))
    if name is None:
        _wrong("tool_choice.name", "must be the name of one of the tools", value.get("name"))
    return ToolChoice("required", name, parallel=False)


def _allowed(value: Mapping[str, Any], several: bool, tools: ResponseTools, unread: set[str]) -> ToolChoice:
    """Read a choice among some of the tools: one that must be called is, several are not told from the others."""
    mode, listed = value.get("mode", "auto"), value.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        _wrong("tool_choice", "must have a mode, auto or required, and a list of tools", value)
    if len(listed) > MAX_LISTED:
        _wrong("tool_choice.tools", f"must be at most {MAX_LISTED} tools", len(listed))
    entries = [one for one in listed if isinstance(one, dict)]
    names = {tools.named(one.get("type", "function"), one.get("name"), one.get("namespace")) for one in entries} - {
        None
    }
    if not names or mode == "auto":
        if len(names) < len(tools.functions):
            unread.add("tool_choice.tools")
        return ToolChoice("auto", None, several)
    if len(names) == 1:
        return ToolChoice("required", names.pop(), parallel=False)
    if len(names) < len(tools.functions):
        unread.add("tool_choice.tools")
    return ToolChoice("required", None, several)


def _function(tool: Mapping[str, Any], where: str, namespace: str | None) -> Mapping[str, Any]:
    function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
    return _read(function, where, namespace)


def _custom(tool: Mapping[str, Any], where: str, namespace: str | None, unread: set[str]) -> Mapping[str, Any]:
    """Read a custom tool as a function of one text, which follows the tool's pattern if it has one."""
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        _wrong(f"{where}.format", "must be an object with a type, text or grammar", form)
    text: dict[str, Any] = {"type": "string"}
    description, strict = tool.get("description"), None
    if form["type"] == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str) or not definition.strip():
            _wrong(f"{where}.format", "must have a syntax, lark or regex, and a definition", form)
        pattern = definition if syntax == "regex" else _pattern(definition)
        if pattern is None:  # a text inside JSON cannot follow it; the model reads it
            unread.add("tools.format")
        else:
            text["pattern"], strict = f"^({pattern})$", True
        if syntax == "lark" and isinstance(description, str | None):
            description = f"{description or ''}\n\nThe input follows this grammar, in Lark:\n{definition}".strip()
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function = {"name": tool.get("name"), "description": description, "parameters": schema, "strict": strict}
    return _read(function, where, namespace)


def _pattern(grammar: str) -> str | None:
    """Return the pattern of the texts of a grammar in Lark; None if it has none that can be enforced."""
    try:
        pattern = regex_of(grammar)
        enforced({"type": "string", "pattern": f"^({pattern})$"}, "")
    except (NoRegex, Rejection):
        return None
    return pattern


def _read(function: dict[str, Any], where: str, namespace: str | None) -> Mapping[str, Any]:
    """Read a function. Errors name its place in the request, which has no `function` around it."""
    name = function["name"]
    if isinstance(name, str):
        function["name"] = flat_name(namespace, name)
    try:
        return tool_of({"function": function}, where, longest=LONGEST_NAME)
    except Rejection as err:
        raise _replaced(err, f"{where}.function", where) from None


def _placed(error: Rejection, places: Sequence[str]) -> Rejection:
    """Return the error for two tools of one name, with its place in the request."""
    index = int((error.param or "")[len("tools[") :].partition("]")[0])
    return _replaced(error, error.param or "", f"{places[index]}.name")


def _replaced(error: Rejection, place: str, by: str) -> Rejection:
    """Return an error with another place in its text and its param."""
    message, param = (text.replace(place, by) for text in (error.message, error.param or ""))
    return Rejection(message, status=error.status, code=error.code, param=param)


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)
