"""A client's `messages`, `tools` and template variables, checked and in the normal form of ssmd.text.messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from ssmd.api.http.body import brief
from ssmd.engine.sampling.bounds import enforced
from ssmd.engine.terms import Rejection
from ssmd.text.calls.tool_choice import ToolChoice
from ssmd.text.messages import ROLES, THINK, THINK_END, BlockEnd, Message, Role, ToolCall
from ssmd.text.template import NOTHING_MORE, OWN, TemplateInput
from ssmd.text.volatile import without_volatile

MAX_CALLS = 64  # calls of a message
MAX_IGNORED = 64  # names of ignored fields that are listed
MAX_CALL_CHARS = 256  # characters of a call's name, and of its id
_KNOWN: dict[str, Role] = {role: role for role in ROLES if role != "tool"}
_SYSTEM = ("system", "developer")
_FIELDS = {"role", "content", "name"}
_ASSISTANT_FIELDS = {"reasoning_content", "reasoning", "tool_calls", "function_call", "refusal"}
_TOOL_FIELDS = {"tool_call_id"}
# Other fields of a message are for other servers and are ignored. These would be content for the model to read.
_CONTENT = {"audio", "attachments", "file", "files", "image", "images", "image_url", "input_audio", "video", "videos"}
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_NAME = re.compile(r"[\w-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Content parts of an assistant that hold reasoning, in the words of Anthropic, LangChain and the AI SDK.
_REASONING = ("thinking", "reasoning", "redacted_thinking", "redacted-reasoning")
MAX_TOOLS = 128  # as in OpenAI's API: no model can tell more apart
MAX_VARIABLES = 64
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]+")
MAX_NAME = 64
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_NO_ARGUMENTS = {"type": "object", "properties": {}}  # the meaning of missing parameters
# Variables of the template that other servers accept as fields of the request.
ALIASES = ("enable_thinking", "reasoning_effort")
_PARAM = "tool_choice"


def read_messages(
    value: Any,
    ignored: set[str] | None = None,
    dropped: set[str] | None = None,
    blocks: list[BlockEnd] | None = None,
) -> tuple[Message, ...]:
    """Read the messages of a request. Raises Rejection whose param is a path like messages[2].content[0].

    ignored: takes the names of ignored fields, like messages.annotations. dropped: takes the names of known volatile
    text that is left out of the system prompt; None: that text stays. blocks: takes the ends of parts within
    system prompts and users' messages, and of marked ones, in order.
    """
    if not isinstance(value, list):
        _wrong("messages", "must be a list of messages", value)
    if not value:
        _wrong("messages", "must hold at least one message", value)
    reader = _Reader(set() if ignored is None else ignored, [] if blocks is None else blocks)
    entries = enumerate(value) if dropped is None else _stable(value, dropped)
    messages = tuple(
        [_plain(entry) or reader.message(entry, f"messages[{i}]", n) for n, (i, entry) in enumerate(entries)]
    )
    if messages[-1].tool_calls:
        where = f"messages[{len(messages) - 1}].tool_calls"
        what = f"{where}: an answer that calls tools cannot be continued; send the results of the calls after it"
        raise Rejection(what, code="invalid_value", param=where)
    return messages


def is_marked(block: Mapping[str, Any]) -> bool:
    """Return True if a block, message or tool has a mark to cache up to its end."""
    mark = block.get("cache_control")
    return isinstance(mark, dict) and mark.get("type") == "ephemeral"


def _plain(entry: Any) -> Message | None:
    """Read a message of only a role and a text, as most of a long conversation are; None if it has other fields."""
    if type(entry) is dict and len(entry) == 2:
        role, content = entry.get("role"), entry.get("content")
        if type(role) is str and role in _KNOWN and type(content) is str:
            return Message(_KNOWN[role], content)
    return None


def _stable(value: Sequence[Any], dropped: set[str]) -> Iterable[tuple[int, Any]]:
    """Return a request's messages with their places, those of the system prompt without known volatile text.

    A message without other text is left out, unless it is the only one. dropped: as in read_messages.
    """
    system = list(takewhile(lambda entry: isinstance(entry, dict) and entry.get("role") in _SYSTEM, value))
    names: set[str] = set()
    kept = [(i, stable) for i, entry in enumerate(system) if (stable := _without_volatile(entry, names)) is not None]
    if not names or not (kept or len(value) > len(system)):
        return enumerate(value)
    dropped |= names
    return [*kept, *enumerate(value[len(system) :], len(system))]


def _without_volatile(entry: dict[str, Any], names: set[str]) -> dict[str, Any] | None:
    """Return a system message without known volatile text, whose names it adds; None if it has no other content."""
    content = entry.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    kept: list[Any] = []
    found = False
    for block in blocks:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        stable, name = without_volatile(text) if isinstance(text, str) else ("", None)
        if name is None:
            kept.append(block)
            continue
        found = True
        names.add(name)
        if stable:
            kept.append({**block, "text": stable})
    if not found:
        return entry
    return {**entry, "content": kept if isinstance(content, list) else kept[0]["text"]} if kept else None


class _Reader:
    """Reads messages one after the other. ignored, blocks: as in read_messages."""

    def __init__(self, ignored: set[str], blocks: list[BlockEnd]) -> None:
        self._ignored, self._blocks = ignored, blocks
        self._calls: dict[str, str] = {}  # names of the calls so far, by id

    def message(self, entry: Any, where: str, number: int) -> Message:
        """Read a message. number: its index among those that are kept."""
        if not isinstance(entry, dict):
            _wrong(where, "must be an object with role and content", entry)
        message = self._message(entry, where)
        if isinstance(entry.get("content"), list):
            self._blocks += _ends(entry["content"], message, number)
        if is_marked(entry):
            self._blocks.append(BlockEnd(number, None, marked=True))
        return message

    def _message(self, entry: dict[str, Any], where: str) -> Message:
        if "role" not in entry:
            raise Rejection(f"{where}.role is required", code="missing_required_parameter", param=f"{where}.role")
        if entry["role"] in ("tool", "function"):
            self._look_at_the_rest(entry, _FIELDS | _TOOL_FIELDS, where)
            return self._result(entry, where)
        role = _role(entry["role"], f"{where}.role")
        self._look_at_the_rest(entry, _FIELDS | _ASSISTANT_FIELDS if role == "assistant" else _FIELDS, where)
        name = _name(entry, f"{where}.name")
        if role != "assistant":
            for key in ("tool_calls", "function_call", "tool_call_id"):
                if entry.get(key) not in _NOTHING:
                    _wrong(f"{where}.{key}", f"cannot be of a message of role {role!r}", entry[key])
            return Message(role, self._content(entry.get("content"), role, f"{where}.content"), name)
        refusal = _refusal(entry, where)
        content = self._content(entry.get("content"), role, f"{where}.content") or refusal
        for key in ("reasoning_content", "reasoning"):
            content = _with_reasoning(entry.get(key), content, f"{where}.{key}")
        if isinstance(entry.get("content"), list):
            content = self._with_thoughts(entry["content"], content)
        return Message(role, content, name, self._made(entry, where))

    def _with_thoughts(self, parts: list[Any], content: str) -> str:
        """Return the content with the parts' reasoning before it, unless there is reasoning already.

        Fields of these parts that are not read are ignored by name.
        """
        found = [(part, *_thought(part)) for part in parts if _is_reasoning(part)]
        thought = "\n".join(text for _, _, text in found if text).strip()
        read = thought != "" and THINK_END not in content and THINK_END not in thought
        for part, key, _ in found:
            for name, value in part.items():
                if name != "type" and value not in _NOTHING and not (read and name == key):
                    self._leave("messages.content", name)
        return _with_reasoning(thought, content, "") if read else content

    def _look_at_the_rest(self, entry: dict[str, Any], known: set[str], where: str) -> None:
        """Refuse content that cannot be shown to the model, and note other ignored fields."""
        for key, value in entry.items():
            if key in known or value in _NOTHING or (key == "cache_control" and is_marked(entry)):
                continue
            if key in _CONTENT:
                _not_built(f"{where}.{key}")
            self._leave("messages", key)

    def _leave(self, of: str, key: str) -> None:
        if len(self._ignored) < MAX_IGNORED:
            self._ignored.add(f"{of}.{brief(key)[1:-1]}")

    def _made(self, entry: dict[str, Any], where: str) -> tuple[ToolCall, ...]:
        """Read the calls of an assistant's message."""
        listed, old = entry.get("tool_calls"), entry.get("function_call")
        if listed is None:
            listed = []
        if not isinstance(listed, list):
            _wrong(f"{where}.tool_calls", "must be a list of calls", listed)
        if len(listed) > MAX_CALLS:
            what = f"{where}.tool_calls has {len(listed)} calls, at most {MAX_CALLS} are possible"
            raise Rejection(what, code="invalid_value", param=f"{where}.tool_calls")
        if not listed and old is not None:
            calls = [_function(f"call_{len(self._calls)}", old, f"{where}.function_call")]
        else:
            calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(listed)]
        if len({call.id for call in calls}) < len(calls):
            _wrong(f"{where}.tool_calls", "must have an id of its own for each call", [call.id for call in calls])
        self._calls |= {call.id: call.name for call in calls}
        return tuple(calls)

    def _result(self, entry: dict[str, Any], where: str) -> Message:
        """Read the result of a call. A result in the old form belongs to the last call of that function."""
        content = self._content(entry.get("content"), "tool", f"{where}.content")
        name = None if entry.get("name") is None else self._called(entry, f"{where}.name")
        if entry["role"] == "function":
            of = next((id_ for id_ in reversed(self._calls) if self._calls[id_] == name), None)
            if of is None:
                _wrong(f"{where}.name", "must be the function of a function_call before it", entry.get("name"))
            return Message("tool", content, name, tool_call_id=of)
        of = entry.get("tool_call_id")
        if of is None:
            at = f"{where}.tool_call_id"
            raise Rejection(f"{at} is required for role 'tool'", code="missing_required_parameter", param=at)
        if not isinstance(of, str) or of not in self._calls:
            _wrong(f"{where}.tool_call_id", "must be the id of one of the tool_calls in a message before it", of)
        return Message("tool", content, name, tool_call_id=of)

    def _called(self, entry: dict[str, Any], where: str) -> str:
        """Return the function's name in a result. A history from elsewhere may have names that `tools` may not."""
        name = _short(entry["name"], where)
        if _CONTROL.search(name) and name not in self._calls.values():
            _wrong(where, "must not hold control characters", name)
        return name

    def _content(self, content: Any, role: Role, where: str) -> str:
        if content is None:
            if role in ("assistant", "tool"):
                return ""
            raise Rejection(f"{where} is required for role {role!r}", code="missing_required_parameter", param=where)
        if isinstance(content, str):
            return content
        if not isinstance(content, list) or not (content or role in ("assistant", "tool")):
            _wrong(where, "must be a string or a list of text parts", content)
        apart = role == "assistant"  # its reasoning is not content
        parts = ((i, part) for i, part in enumerate(content) if not (apart and _is_reasoning(part)))
        return "".join(self._part(part, f"{where}[{i}]") for i, part in parts)

    def _part(self, part: Any, where: str) -> str:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            _wrong(where, 'must be an object like {"type": "text", "text": "…"}', part)
        kind = part["type"]
        if kind not in ("text", "refusal"):
            _not_built(where, f"content of type {brief(kind)}")
        for key, value in part.items():
            if key not in ("type", kind) and value not in _NOTHING and not (key == "cache_control" and is_marked(part)):
                self._leave("messages.content", key)
        text = part.get(kind)
        if not isinstance(text, str):
            _wrong(f"{where}.{kind}", "must be a string", text)
        return text


def _ends(parts: Sequence[dict[str, Any]], message: Message, number: int) -> Iterator[BlockEnd]:
    """Yield the ends of parts that are marked, or within a system prompt or a user's message. number: its index."""
    within = message.role in _SYSTEM or message.role == "user"  # a template may show others' content elsewhere
    at = 0
    for i, part in enumerate(parts, 1):
        at += len(part[part["type"]]) if within else 0
        if (marked := is_marked(part)) or (within and i < len(parts)):
            yield BlockEnd(number, at if within and i < len(parts) else None, marked)


def _call(call: Any, where: str) -> ToolCall:
    if not isinstance(call, dict):
        _wrong(where, "must be an object with id, type and function", call)
    if call.get("type", "function") != "function":
        _not_built(f"{where}.type", f"a call of type {brief(call['type'])}")
    return _function(_short(call.get("id"), f"{where}.id"), call.get("function"), f"{where}.function")


def _function(id_: str, function: Any, where: str) -> ToolCall:
    if not isinstance(function, dict):
        _wrong(where, "must be an object with name and arguments", function)
    name, arguments = _short(function.get("name"), f"{where}.name"), function.get("arguments")
    if arguments is None:
        arguments = ""
    elif isinstance(arguments, dict):  # Ollama's form
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not isinstance(arguments, str):  # invalid JSON comes from an answer that was cut off, and is kept
        _wrong(f"{where}.arguments", "must be a string, JSON in it", arguments)
    return ToolCall(id_, name, arguments)


def _short(text: Any, where: str) -> str:
    if text is None:
        raise Rejection(f"{where} is required", code="missing_required_parameter", param=where)
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_CALL_CHARS:
        _wrong(where, f"must be a string of 1 to {MAX_CALL_CHARS} characters", text)
    return text


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _REASONING


def _thought(part: dict[str, Any]) -> tuple[str, str]:
    """Return the field that holds a part's reasoning, and its text. Both are "" for a part without reasoning."""
    for key in ("thinking", "reasoning", "text", "summary", "content"):
        value = part.get(key)
        listed = value if isinstance(value, list) else [value]
        texts = [text.get("text") if isinstance(text, dict) else text for text in listed]
        said = [text for text in texts if isinstance(text, str) and text]
        if said and len(said) == len(texts):
            return key, "".join(said)
    return "", ""


def _refusal(entry: dict[str, Any], where: str) -> str:
    """Return the text of an assistant that refused to answer: such a message has no content."""
    refusal = entry.get("refusal")
    if not isinstance(refusal, str | None):
        _wrong(f"{where}.refusal", "must be a string", refusal)
    return refusal or ""


def _with_reasoning(reasoning: Any, content: str, where: str) -> str:
    """Return the content with a client's separate reasoning put back before it, where templates expect it."""
    if reasoning is None or reasoning == "":
        return content
    if not isinstance(reasoning, str):
        _wrong(where, "must be a string", reasoning)
    if THINK_END in reasoning:
        _wrong(where, f"must not hold {THINK_END}", reasoning)
    if THINK_END in content:
        if Message("assistant", content).reasoning != reasoning.strip():
            _wrong(where, "differs from the reasoning that the message has already; send it once", reasoning)
        return content
    return f"{THINK}\n{reasoning.strip()}\n{THINK_END}\n\n{content}"


def _role(role: Any, where: str) -> Role:
    for known in _KNOWN.values():
        if role == known:
            return known
    _wrong(where, f"must be one of {', '.join(ROLES)}", role)


def _name(entry: dict[str, Any], where: str) -> str | None:
    name = entry.get("name")
    if name is None:
        return None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _wrong(where, "must be 1 to 64 letters, digits, _ or -", name)
    return name


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)


def _not_built(param: str, what: str | None = None) -> NoReturn:
    raise Rejection(f"{param}: {what or 'this'} is not supported", code="unsupported_parameter", param=param)


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
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name) or len(name) > longest:
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
