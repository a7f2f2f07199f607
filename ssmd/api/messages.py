"""A client's `messages` list, checked and brought to the normal form of ssmd.text.messages."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from ssmd.api.body import shown
from ssmd.engine.request import Rejected
from ssmd.text.messages import ROLES, THINK, THINK_END, Message, Role

_KNOWN: dict[str, Role] = {role: role for role in ROLES}
_FIELDS = {"role", "content", "name"}
_ASSISTANT_FIELDS = {"reasoning_content"}
# What SDKs put into an assistant's message when they echo it: nothing in these values can be lost.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "tool_calls": (None, []),
}
# No character from which a special token's text could be made: templates render names as they are.
_NAME = re.compile(r"[\w-]{1,64}")


def read_messages(value: Any) -> tuple[Message, ...]:
    """Read the messages of a request. Raises Rejected whose param says where, like messages[2].content[0]."""
    if not isinstance(value, list):
        _wrong("messages", "must be a list of messages", value)
    if not value:
        _wrong("messages", "must hold at least one message", value)
    return tuple([_plain(entry) or _message(entry, f"messages[{i}]") for i, entry in enumerate(value)])


def _plain(entry: Any) -> Message | None:
    """A message of a role and a text, which most of a long conversation are; None if it has to be looked at."""
    if type(entry) is dict and len(entry) == 2:
        role, content = entry.get("role"), entry.get("content")
        if type(role) is str and role in _KNOWN and type(content) is str:
            return Message(_KNOWN[role], content)
    return None


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        _wrong(where, "must be an object with role and content", entry)
    if "role" not in entry:
        raise Rejected(f"{where}.role is required", code="missing_required_parameter", param=f"{where}.role")
    role = _role(entry["role"], f"{where}.role")
    for key, value in entry.items():
        if key in _FIELDS or (role == "assistant" and key in _ASSISTANT_FIELDS):
            continue
        if key not in _NEUTRAL or role != "assistant":
            param = f"{where}.{shown(key)[1:-1]}"
            raise Rejected(f"there is no field {param!r} here", code="unknown_parameter", param=param)
        if value not in _NEUTRAL[key]:
            _not_built(f"{where}.{key}")
    content = _content(entry.get("content"), role, f"{where}.content")
    if role == "assistant":
        content = _with_reasoning(entry.get("reasoning_content"), content, f"{where}.reasoning_content")
    return Message(role, content, _name(entry, f"{where}.name"))


def _with_reasoning(reasoning: Any, content: str, where: str) -> str:
    """Reasoning that a client keeps apart goes back to where the model wrote it: templates find it there."""
    if reasoning is None or reasoning == "":
        return content
    if not isinstance(reasoning, str):
        _wrong(where, "must be a string", reasoning)
    if THINK_END in reasoning:
        _wrong(where, f"must not hold {THINK_END}", reasoning)
    if THINK_END in content:
        if Message("assistant", content).reasoning != reasoning.strip():
            _wrong(where, "differs from the reasoning that the content begins with; send it once", reasoning)
        return content
    return f"{THINK}\n{reasoning.strip()}\n{THINK_END}\n\n{content}"


def _role(role: Any, where: str) -> Role:
    for known in ROLES:
        if role == known:
            return known
    if role in ("tool", "function"):
        _not_built(where, f"role {role!r}")
    _wrong(where, f"must be one of {', '.join(ROLES)}", role)


def _name(entry: dict[str, Any], where: str) -> str | None:
    name = entry.get("name")
    if name is None:
        return None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _wrong(where, "must be 1 to 64 letters, digits, _ or -", name)
    return name


def _content(content: Any, role: Role, where: str) -> str:
    if content is None:
        if role == "assistant":
            return ""
        raise Rejected(f"{where} is required for role {role!r}", code="missing_required_parameter", param=where)
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        _wrong(where, "must be a string or a list of text parts", content)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        _wrong(where, 'must be an object like {"type": "text", "text": "…"}', part)
    if part["type"] != "text":
        _not_built(where, f"content of type {shown(part['type'])}")
    unknown = set(part) - {"type", "text"}
    if unknown:
        param = f"{where}.{shown(min(unknown))[1:-1]}"
        raise Rejected(f"there is no field {param!r} here", code="unknown_parameter", param=param)
    text = part.get("text")
    if not isinstance(text, str):
        _wrong(f"{where}.text", "must be a string", text)
    return text


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejected(f"{param} {what} (got {shown(value)})", code="invalid_value", param=param)


def _not_built(param: str, what: str | None = None) -> NoReturn:
    raise Rejected(f"{param}: {what or 'this'} is not supported", code="unsupported_parameter", param=param)
