"""The adapter from messages, tools and variables to a template's input, in which all control tokens' text is inert.

Input from outside is hostile, a tool's result most of all. For a template that does not support tools they are written
as plain text in the Hermes format. Most open models were trained on it, so others can often follow it too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ssmd.text.arguments import arguments_so_far, read_arguments
from ssmd.text.messages import Message, ToolCall
from ssmd.text.template import TemplateInput

_KEPT = 32  # prepared inputs that are cached, one for each set of tools and variables
MAX_KEPT_CHARS = 256 << 10  # JSON of an input that is cached: 128 large tools have less, and a body may have 32 MB
_UNSHOWN = ("strict",)  # fields of a function that are for the server, not for the model
# A template that goes through the arguments of a call: it fails for arguments that are a text.
_ITEMS = re.compile(r"\barguments\s*\|\s*items\b|\barguments\.items\(")
_NINE = re.compile(r"[A-Za-z0-9]{9}")  # the form of ids that Mistral's templates require
_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with the function's name and its arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class AdaptedInput:
    """A request's tools and variables, as the template gets them.

    given: the template's input. system: text on tools for the system prompt, where the template does not support them.
    key: hash of both, "" if both are empty.
    """

    given: TemplateInput
    system: str
    key: str


class MessageAdapter:
    """The adapter of one template. Thread-safe."""

    def __init__(
        self, source: str, escape: Callable[[str], str], takes_system: Callable[[], bool] = lambda: True
    ) -> None:
        """source: the template's source. escape: makes control tokens' text inert.

        takes_system: returns True if the template renders a system prompt. It is called only if the template does not
        support tools.
        """
        self._escape, self._takes_system = escape, takes_system
        self._knows_developer = "developer" in source  # if not, a developer's message becomes a system message
        self.knows_tools = re.search(r"\btools\b", source) is not None
        self._wants_nine = "length 9" in source
        self._wants_objects = _ITEMS.search(source) is not None
        self._names = frozenset(re.findall(r"\w+", source))
        self._kept = lru_cache(maxsize=_KEPT)(self._told)

    def told(self, given: TemplateInput) -> AdaptedInput:
        """Return the tools and variables for the template. Variables that its source does not name are left out."""
        return self._kept(given) if len(given.text) <= MAX_KEPT_CHARS else self._told(given)

    def _told(self, given: TemplateInput) -> AdaptedInput:
        tools = tuple(_shown(tool) for tool in given.tools)
        variables = {name: value for name, value in given.variables.items() if name in self._names}
        system = self._escape(system_prompt(tools)) if tools and not self.knows_tools else ""
        shown = TemplateInput(self._inert(tools) if self.knows_tools else (), self._inert(variables))
        if not (system or shown.tools or shown.variables):
            return AdaptedInput(shown, "", "")
        return AdaptedInput(shown, system, hashlib.sha256(json.dumps([shown.text, system]).encode()).hexdigest())

    def conversation(
        self, messages: Sequence[Message], told: AdaptedInput, *, tools_last: bool = False
    ) -> tuple[list[Message], int]:
        """Return a conversation for the template, and the number of messages added in front of it (0 or 1).

        tools_last: as of `first`.
        """
        shown = [self.message(m) for m in messages]
        if not told.system:
            return shown, 0
        first, added = self.first(messages[0], told, tools_last=tools_last)
        return [first, *(shown if added else shown[1:])], added

    def first(self, message: Message, told: AdaptedInput, *, tools_last: bool = False) -> tuple[Message, int]:
        """Return the first message for the template, and 1 if it was added in front of this one, else 0.

        Text on tools stands before a client's system prompt, whose end changes more often: agents write the date or the
        state of a project there. tools_last: it stands behind it, as older sessions have it.
        """
        shown = self.message(message)
        if not told.system:
            return shown, 0
        if shown.role in ("system", "developer"):
            parts = (shown.content, told.system) if tools_last else (told.system, shown.content)
            return replace(shown, content="\n\n".join(filter(None, parts))), 0
        if shown.role == "user" and not self._takes_system():
            return replace(shown, content=f"{told.system}\n\n{shown.content}"), 0
        return Message("system", told.system), 1

    def orders_tools(self, message: Message, told: AdaptedInput) -> bool:
        """Return True if this first message's place before or behind the text on tools can differ."""
        return bool(told.system and message.content) and message.role in ("system", "developer")

    def alternating(
        self, messages: Sequence[Message], told: AdaptedInput, *, tools_last: bool = False
    ) -> list[Message]:
        """Return a conversation for a template whose roles must alternate.

        Results of tools that became user's messages are joined with adjacent ones, and with the user's next message. So
        are system messages within the conversation, as user's messages.
        tools_last: as of `first`.
        """
        shown, added = self.conversation(messages, told, tools_last=tools_last)
        found = shown[:added]
        after_joined = False
        for message, one in zip(messages, shown[added:], strict=True):
            within = one.role == "system" and bool(found)
            one = replace(one, role="user") if within else one
            joins = within or message.role == "tool"
            if found and found[-1].role == one.role == "user" and (joins or after_joined):
                found[-1] = replace(one, content=f"{found[-1].content}\n{one.content}")
            else:
                found.append(one)
            after_joined = joins
        return found

    def message(self, message: Message) -> Message:
        """Return a message for the template."""
        if not self.knows_tools:
            message = in_words(message)
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        escape = self._escape
        name = message.name and escape(message.name)
        if not message.tool_calls and message.tool_call_id is None:
            return Message(role, escape(message.content), name)
        calls = tuple(self._call(call) for call in message.tool_calls)
        result_of = None if message.tool_call_id is None else self._id(message.tool_call_id)
        return Message(role, escape(message.content), name, calls, result_of)

    def _call(self, call: ToolCall) -> ToolCall:
        arguments = read_arguments(call.arguments)
        if arguments is None and self._wants_objects:  # of a call that was cut off, for example
            arguments = read_arguments(json.dumps(arguments_so_far(call.arguments))) or {}
        if arguments is None:
            inert = self._escape(call.arguments)
        else:  # JSON's escapes may spell a control token's text, so the parsed values are escaped
            inert = json.dumps(self._inert(arguments), ensure_ascii=False)
        return ToolCall(self._id(call.id), self._escape(call.name), inert)

    def _id(self, id_: str) -> str:
        if self._wants_nine and not _NINE.fullmatch(id_):
            return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[:9]
        return self._escape(id_)

    def _inert(self, value: Any) -> Any:
        """Return a JSON value with control tokens' text made inert in its texts and names."""
        if isinstance(value, str):
            return self._escape(value)
        if isinstance(value, Mapping):
            return {self._escape(name): self._inert(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._inert(one) for one in value)
        return value


def _shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool without the fields that are not for the model."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not any(name in function for name in _UNSHOWN):
        return tool
    return {**tool, "function": {name: value for name, value in function.items() if name not in _UNSHOWN}}


def system_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of a system prompt that describes the tools and the notation of calls."""
    return _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def in_words(message: Message) -> Message:
    """Return a message without tool fields: calls become part of its text, a call's result a user's message.

    Other messages are returned unchanged.
    """
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    said = [message.content] if message.content else []
    return replace(message, content="\n".join([*said, *map(_called, message.tool_calls)]), tool_calls=())


def _called(call: ToolCall) -> str:
    # Arguments stand as the model wrote them: its next prompt then goes on from what it was fed. Clients in JavaScript
    # write them again without spaces, which models seldom do.
    arguments = call.arguments.strip() or "{}"
    known = read_arguments(arguments)
    if known is None:
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments == json.dumps(known, ensure_ascii=False, separators=(",", ":")):
        arguments = json.dumps(known, ensure_ascii=False)
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
