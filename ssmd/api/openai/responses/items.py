"""The input of a response: items, checked and brought to the normal form of ssmd.text.messages.

An answer is one message there, whatever its items are: reasoning, text and calls. So a conversation has the same
messages here as over chat, and its state is found whichever of the two began it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ssmd.api.http.body import brief
from ssmd.api.openai.messages import MAX_CALL_CHARS, MAX_CALLS, MAX_IGNORED
from ssmd.engine.terms import Rejection
from ssmd.text.messages import ROLES, THINK, THINK_END, Message, Role, ToolCall
from ssmd.text.volatile import without_volatile

INPUT = "input"  # the name of a custom tool's only argument
_ROLES: dict[str, Role] = {role: role for role in ROLES if role != "tool"}
_SYSTEM = ("system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_SEALED = "ssmd:"  # before reasoning that a client keeps without looking inside
_READ = {  # fields of each type of item that are read, or need not be
    "message": {"type", "id", "status", "phase", "role", "content"},
    "function_call": {"type", "id", "status", "call_id", "name", "namespace", "arguments"},
    "custom_tool_call": {"type", "id", "status", "call_id", "name", "namespace", "input"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "custom_tool_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "summary", "content", "encrypted_content"},
}
_READ_IN_PARTS = {"type", "annotations", "logprobs"}
# Items of tools that a server runs. The model did not see them here, so they are left out and named.
_LEFT_OUT = frozenset(
    (
        *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call"),
        *("computer_call_output", "file_search_call", "image_generation_call", "local_shell_call"),
        *("local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
        *("shell_call", "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call"),
    )
)


def flat_name(namespace: Any, name: str) -> str:
    """Return the name by which the model knows a tool: that of a namespace stands before it."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def sealed(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, which clients send back unread. It is coded, not secret."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def read_instructions(instructions: str | None, dropped: set[str] | None = None) -> tuple[Message, ...]:
    """Return the message of a request's instructions; none if they are empty, or known volatile text alone.

    dropped: as of `read_input`.
    """
    reader = _Reader(set(), dropped, None)
    if instructions:
        reader.system("system", instructions)
    return tuple(reader.messages)


def read_input(
    value: Any,
    ignored: set[str] | None = None,
    dropped: set[str] | None = None,
    *,
    before: Sequence[Message] = (),
    stored: Callable[[str, str], dict[str, Any]] | None = None,
) -> tuple[Message, ...]:
    """Read the input of a request. Raises Rejection whose param is a path like input[2].content.

    ignored: takes the names of ignored fields and items, like input.web_search_call. dropped: takes the names of known
    volatile text, which is left out of the system prompt; None: all stays. before: the instructions, and the
    conversation that the input goes on from. stored: returns the item of an id, which stands at a place; None if none
    is stored. Returns the messages of both, one after the other.
    """
    reader = _Reader(set() if ignored is None else ignored, dropped, stored)
    reader.go_on(before)
    if value is None:
        raise Rejection("input is required", code="missing_required_parameter", param="input")
    if isinstance(value, str):
        reader.messages.append(Message("user", value))
        return tuple(reader.messages)
    if not isinstance(value, list) or not value:
        _wrong("input", "must be a text or a list of at least one item", value)
    for i, item in enumerate(value):
        reader.item(item, i)
    reader.end_answer()
    nothing = len(reader.messages) == len(before)  # then an answer before it would be continued, and kept twice
    if nothing and (not before or before[-1].role == "assistant"):
        raise Rejection("input has no item that a model reads", code="invalid_value", param="input")
    if calls := reader.messages[-1].tool_calls:
        raise Rejection(
            f"No tool output found for function call {brief(calls[-1].id)[1:-1]}: send the outputs of the calls too",
            code="invalid_value",
            param="input",
        )
    return tuple(reader.messages)


def read_items(
    value: Sequence[Any],
    *,
    param: str = "items",
    before: Sequence[Message] = (),
    stored: Callable[[str, str], dict[str, Any]] | None = None,
) -> tuple[Message, ...]:
    """Read items that a model may read later. Raises Rejection whose param is a path like items[2].content.

    param: the name of the list. before, stored: as of `read_input`. Returns the messages of both, one after the other.
    """
    reader = _Reader(set(), None, stored, param)
    reader.go_on(before)
    for i, item in enumerate(value):
        if isinstance(item, dict) and isinstance(item.get("type"), str) and item["type"] in _LEFT_OUT:
            what = f"{param}[{i}]: an item of type {brief(item['type'])} cannot be kept: no model here reads it"
            raise Rejection(what, code="unsupported_parameter", param=f"{param}[{i}]")
        reader.item(item, i)
    reader.end_answer()
    return tuple(reader.messages)


class _Reader:
    """Reads items one after the other. ignored, dropped: as in read_input. param: the name of their list."""

    def __init__(
        self,
        ignored: set[str],
        dropped: set[str] | None,
        stored: Callable[[str, str], dict[str, Any]] | None,
        param: str = "input",
    ) -> None:
        self._param = param
        self.messages: list[Message] = []
        self._ignored, self._dropped, self._stored = ignored, dropped, stored
        self._calls: set[str] = set()  # ids of the calls so far
        # The answer that is read: items without an item of another party between them.
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._made: dict[str, ToolCall] = {}

    def go_on(self, before: Sequence[Message]) -> None:
        """Add the conversation that the input goes on from."""
        self.messages += before
        self._calls |= {call.id for message in before for call in message.tool_calls}

    def item(self, item: Any, index: int) -> None:
        """Read one item. Raises Rejection."""
        if type(item) is dict and len(item) == 2 and type(item.get("content")) is str:
            role = item.get("role")
            if role == "user":
                self._say("user", item["content"])
                return
        where = f"{self._param}[{index}]"
        if not isinstance(item, dict):
            _wrong(where, "must be an item, an object", item)
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            _wrong(f"{where}.type", "must be a string", kind)
        if kind == "item_reference" and self._stored is not None:
            if not isinstance(item.get("id"), str):
                _wrong(f"{where}.id", "must be the id of an item", item.get("id"))
            item = self._stored(item["id"], f"{where}.id")
            kind = item["type"]
        if kind in _LEFT_OUT:
            self._leave(f"input.{kind}")
            return
        if kind not in _READ:
            more = ": send the conversation itself" if kind.startswith("compaction") else ""
            what = f"{where}: an item of type {brief(kind)} is not supported{more}"
            raise Rejection(what, code="unsupported_parameter", param=where)
        if not item.keys() <= _READ[kind]:
            for name, value in item.items():
                if name not in _READ[kind] and value not in _NOTHING:
                    self._leave(f"input.{brief(name)[1:-1]}")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind.endswith("_output"):
            self._output(item, where)
        else:
            self._call(kind, item, where)

    def system(self, role: Role, text: str) -> None:
        """Add a message of the system prompt, without known volatile text. One that has nothing else is left out."""
        name = None
        if self._dropped is not None and all(one.role in _SYSTEM for one in self.messages):
            text, name = without_volatile(text)
            self._dropped.update(() if name is None else (name,))
        if text or name is None:
            self.messages.append(Message(role, text))

    def end_answer(self) -> None:
        """Add the answer that was read so far, if there is one."""
        text, thought = "".join(self._texts), "\n".join(filter(None, self._thoughts))
        if not (self._texts or self._made or thought):
            return
        if thought and THINK_END not in text:
            text = f"{THINK}\n{thought}\n{THINK_END}\n\n{text}"
        self.messages.append(Message("assistant", text, None, tuple(self._made.values())))
        self._thoughts, self._texts, self._made = [], [], {}

    def _message(self, item: dict[str, Any], where: str) -> None:
        for name in ("role", "content"):
            if item.get(name) is None:
                at = f"{where}.{name}"
                raise Rejection(f"{at} is required", code="missing_required_parameter", param=at)
        role = _ROLES.get(item["role"]) if isinstance(item["role"], str) else None
        if role is None:
            _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}", item["role"])
        text = self._text(item["content"], f"{where}.content")
        if role == "assistant":
            if self._texts and not self._made:  # two messages are two answers, unless calls stand between them
                self.end_answer()
            self._texts.append(text)
        else:
            self._say(role, text)

    def _say(self, role: Role, text: str) -> None:
        self.end_answer()
        if role in _SYSTEM:
            self.system(role, text)
        else:
            self.messages.append(Message(role, text))

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        """Read reasoning: its text, or else what `sealed` made of it, or else its summary."""
        if self._texts and not self._made:
            self.end_answer()
        kept = item.get("encrypted_content")
        if not isinstance(kept, str | None):
            _wrong(f"{where}.encrypted_content", "must be a string", kept)
        found = self._text(item.get("content") or [], f"{where}.content") or _unsealed(kept or "")
        found = (found or self._text(item.get("summary") or [], f"{where}.summary")).strip()
        if THINK_END in found:
            _wrong(f"{where}.content", f"must not hold {THINK_END}", found)
        self._thoughts.append(found)

    def _call(self, kind: str, item: dict[str, Any], where: str) -> None:
        id_, name = (_short(item.get(one), f"{where}.{one}") for one in ("call_id", "name"))
        if not isinstance(item.get("namespace"), str | None):
            _wrong(f"{where}.namespace", "must be a string", item["namespace"])
        given = item.get("arguments" if kind == "function_call" else "input")
        if not isinstance(given, str | None):
            at = f"{where}.{'arguments' if kind == 'function_call' else 'input'}"
            _wrong(at, "must be a string", given)
        if kind == "custom_tool_call":
            given = json.dumps({INPUT: given or ""}, ensure_ascii=False)
        if id_ in self._made:
            _wrong(f"{where}.call_id", "must not be the id of another call of the same answer", id_)
        if len(self._made) == MAX_CALLS:
            _wrong(where, f"is one call too many: an answer may have {MAX_CALLS}", name)
        self._made[id_] = ToolCall(id_, flat_name(item.get("namespace"), name), given or "")
        self._calls.add(id_)

    def _output(self, item: dict[str, Any], where: str) -> None:
        of = item.get("call_id")
        if of is None:
            at = f"{where}.call_id"
            raise Rejection(f"{at} is required", code="missing_required_parameter", param=at)
        if not isinstance(of, str) or of not in self._calls:
            said = f"No tool call found for function call output with call_id {brief(of)}"
            raise Rejection(said, code="invalid_value", param=f"{where}.call_id")
        self.end_answer()
        output = item.get("output")
        text = "" if output is None else self._text(output, f"{where}.output")
        self.messages.append(Message("tool", text, tool_call_id=of))

    def _text(self, content: Any, where: str) -> str:
        """Return the text of a content, which is a string or a list of parts."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            _wrong(where, "must be a string or a list of parts", content)
        return "".join(self._part(part, f"{where}[{i}]") for i, part in enumerate(content))

    def _part(self, part: Any, where: str) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            _wrong(where, 'must be a part like {"type": "input_text", "text": "…"}', part)
        if kind not in _TEXTS:
            what = f"{where}: content of type {brief(kind)} is not supported, text is"
            raise Rejection(what, code="unsupported_parameter", param=where)
        field = "refusal" if kind == "refusal" else "text"
        if not part.keys() <= _READ_IN_PARTS | {field}:
            for name, value in part.items():
                if name not in _READ_IN_PARTS and name != field and value not in _NOTHING:
                    self._leave(f"input.content.{brief(name)[1:-1]}")
        text = part.get(field)
        if not isinstance(text, str):
            _wrong(f"{where}.{field}", "must be a string", text)
        return text

    def _leave(self, name: str) -> None:
        if len(self._ignored) < MAX_IGNORED:
            self._ignored.add(name)


def _unsealed(kept: str) -> str:
    """Return the reasoning that `sealed` made a text of; "" for a text of another server."""
    if not kept.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(kept.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _short(text: Any, where: str) -> str:
    if text is None:
        raise Rejection(f"{where} is required", code="missing_required_parameter", param=where)
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_CALL_CHARS:
        _wrong(where, f"must be a string of 1 to {MAX_CALL_CHARS} characters", text)
    return text


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)
