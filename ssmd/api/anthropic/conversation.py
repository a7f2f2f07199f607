"""Anthropic's `system` and `messages`, checked and brought to the normal form of ssmd.text.messages.

A text block is read as its text alone. So a message has one normal form, in whichever way a client writes it: Claude
Code changes strings to blocks between turns, and moves `cache_control`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ssmd.api.http.body import brief
from ssmd.api.openai.messages import MAX_CALL_CHARS, MAX_CALLS, MAX_IGNORED, is_marked
from ssmd.engine.terms import Rejection
from ssmd.text.messages import THINK, THINK_END, BlockEnd, Message, ToolCall
from ssmd.text.volatile import without_volatile

_ROLES = ("user", "assistant", "system")
_BETWEEN = "\n\n"  # between blocks of the system prompt
_ERROR = "Error: "  # before the result of a call that failed, if the result itself names no error
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_READ = {  # fields of each type of block that are read, or need not be
    "text": {"type", "text", "cache_control"},
    "tool_use": {"type", "id", "name", "input", "cache_control"},
    "tool_result": {"type", "tool_use_id", "content", "is_error", "cache_control"},
    "thinking": {"type", "thinking", "signature"},
    "redacted_thinking": {"type", "data"},
}
Blocks = Sequence[tuple[str, dict[str, Any], str]]  # (type, block, place)


def read_conversation(
    system: Any,
    messages: Any,
    ignored: set[str] | None = None,
    dropped: set[str] | None = None,
    blocks: list[BlockEnd] | None = None,
) -> tuple[Message, ...]:
    """Read the system prompt and the messages. Raises Rejection whose param is a path like messages[2].content[0].

    ignored: takes the names of ignored fields, like messages.content.citations. dropped: takes the names of known
    volatile text, which is left out of system prompts; None: all stays. blocks: takes the ends of blocks within
    system prompts and users' messages, and of marked ones, in order.
    """
    if not isinstance(messages, list) or not messages:
        _wrong("messages", "must be a list of at least one message", messages)
    reader = _Reader(set() if ignored is None else ignored, dropped, [] if blocks is None else blocks)
    found = [] if system is None else list(reader.system(system, "system"))
    for i, entry in enumerate(messages):
        found += reader.message(entry, f"messages[{i}]")
    if found[-1].tool_calls:
        where = f"messages[{len(messages) - 1}].content"
        what = f"{where}: a message that calls tools cannot be continued; send the results of the calls after it"
        raise Rejection(what, code="invalid_value", param=where)
    return tuple(found)


class _Reader:
    """Reads messages one after the other. ignored, dropped, blocks: as in read_conversation."""

    def __init__(self, ignored: set[str], dropped: set[str] | None, blocks: list[BlockEnd]) -> None:
        self._ignored, self._dropped, self._ends = ignored, dropped, blocks
        self._calls: set[str] = set()  # ids of the calls so far
        self._number = 0  # index of the next message

    def system(self, content: Any, where: str) -> Iterator[Message]:
        """Read a system prompt. Its blocks become paragraphs of one message. An empty prompt gives no message."""
        if isinstance(content, str):
            text = self._stable(content)
        else:
            text = ""
            for _, block, at in self._blocks(content, where, ("text",)):
                if more := self._stable(_text(block, at)):
                    text += _BETWEEN + more if text else more
                    self._ends.append(BlockEnd(self._number, len(text), is_marked(block)))
        if text:
            yield self._next(Message("system", text))

    def _next(self, message: Message) -> Message:
        """Count a message, and name the end of its last block as the message's own."""
        last = self._ends[-1] if self._ends else None
        if last is not None and (last.message, last.characters) == (self._number, len(message.content)):
            self._ends[-1:] = [replace(last, characters=None)] if last.marked else []
        self._number += 1
        return message

    def _stable(self, text: str) -> str:
        """Return a block of a system prompt without known volatile text."""
        if self._dropped is None:
            return text
        text, name = without_volatile(text)
        self._dropped.update(() if name is None else (name,))
        return text

    def message(self, entry: Any, where: str) -> Iterator[Message]:
        """Read a message. A user's message with results of calls becomes several."""
        if not isinstance(entry, dict):
            _wrong(where, "must be an object with role and content", entry)
        for name in ("role", "content"):
            if entry.get(name) is None:
                at = f"{where}.{name}"
                raise Rejection(f"{at} is required", code="missing_required_parameter", param=at)
        role, content, at = entry["role"], entry["content"], f"{where}.content"
        if role not in _ROLES:
            _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}", role)
        if len(entry) > 2:
            self._leave("messages", entry, {"role", "content"})
        if role == "system":
            yield from self.system(content, at)
        elif isinstance(content, str):
            yield self._next(Message(role, content))
        elif role == "user":
            yield from self._said(content, at)
        else:
            yield self._next(self._answered(content, at))

    def _said(self, content: Any, where: str) -> Iterator[Message]:
        """Read a user's blocks: the results of calls, each a message, and the texts before, between and after them."""
        blocks = self._blocks(content, where, ("text", "tool_result"))
        if not blocks:
            _wrong(where, "must be a string or a list of at least one block", content)
        texts: list[str] = []
        length = 0
        for kind, block, at in blocks:
            if kind == "text":
                texts.append(_text(block, at))
                length += len(texts[-1])
                self._mark(block, length)
                continue
            if texts:
                yield self._next(Message("user", "".join(texts)))
                texts, length = [], 0
            self._mark(block, None)
            yield self._next(self._result(block, at))
        if texts:
            yield self._next(Message("user", "".join(texts)))

    def _mark(self, block: dict[str, Any], characters: int | None) -> None:
        if characters is not None or is_marked(block):
            self._ends.append(BlockEnd(self._number, characters, is_marked(block)))

    def _answered(self, content: Any, where: str) -> Message:
        """Read an assistant's blocks: reasoning, text and calls. The text around calls is one text."""
        blocks = self._blocks(content, where, ("text", "tool_use", "thinking", "redacted_thinking"))
        text = "".join(_text(block, at) for kind, block, at in blocks if kind == "text")
        for _, block, _ in blocks:
            self._mark(block, None)
        calls = tuple(_call(block, at) for kind, block, at in blocks if kind == "tool_use")
        ids = {call.id for call in calls}
        if len(calls) > MAX_CALLS or len(ids) < len(calls):
            what = f"must have at most {MAX_CALLS} calls, each with an id of its own"
            _wrong(where, what, [call.id for call in calls])
        self._calls |= ids
        thoughts = [_thought(block, at) for kind, block, at in blocks if kind == "thinking"]
        thought = "\n".join(filter(None, thoughts))
        if thought and THINK_END not in text:
            text = f"{THINK}\n{thought}\n{THINK_END}\n\n{text}"
        return Message("assistant", text, None, calls)

    def _result(self, block: dict[str, Any], where: str) -> Message:
        of = block.get("tool_use_id")
        if of is None:
            at = f"{where}.tool_use_id"
            raise Rejection(f"{at} is required", code="missing_required_parameter", param=at)
        if not isinstance(of, str) or of not in self._calls:
            _wrong(f"{where}.tool_use_id", "must be the id of one of the tool_use blocks in a message before it", of)
        content, at = block.get("content"), f"{where}.content"
        if isinstance(content, str):
            text = content
        else:
            inner = self._blocks([] if content is None else content, at, ("text",))
            text = "".join(_text(one, place) for _, one, place in inner)
        failed = block.get("is_error")
        if not isinstance(failed, bool | None):
            _wrong(f"{where}.is_error", "must be true or false", failed)
        if failed and "error" not in text.lower():
            text = _ERROR + text
        return Message("tool", text, tool_call_id=of)

    def _blocks(self, content: Any, where: str, kinds: Sequence[str]) -> Blocks:
        """Return blocks with their types and places. Raises Rejection for a type that is not among `kinds`."""
        if not isinstance(content, list):
            _wrong(where, "must be a string or a list of blocks", content)
        found = []
        for i, block in enumerate(content):
            at = f"{where}[{i}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if not isinstance(kind, str):
                _wrong(at, 'must be a block like {"type": "text", "text": "…"}', block)
            if kind not in kinds:
                what = f"{at}: a block of type {brief(kind)} is not supported here; possible: {', '.join(kinds)}"
                raise Rejection(what, code="unsupported_parameter", param=at)
            if not block.keys() <= _READ[kind]:
                self._leave(f"{where.partition('[')[0]}.content", block, _READ[kind])
            found.append((kind, block, at))
        return found

    def _leave(self, of: str, fields: dict[str, Any], read: set[str]) -> None:
        for name, value in fields.items():
            if name not in read and value not in _NOTHING and len(self._ignored) < MAX_IGNORED:
                self._ignored.add(f"{of}.{brief(name)[1:-1]}")


def _text(block: dict[str, Any], where: str) -> str:
    return _string(block.get("text"), f"{where}.text")


def _thought(block: dict[str, Any], where: str) -> str:
    """Return the text of a block of reasoning. Its signature is whatever the client was sent, so it is not read."""
    thought = _string(block.get("thinking"), f"{where}.thinking").strip()
    if THINK_END in thought:
        _wrong(f"{where}.thinking", f"must not hold {THINK_END}", thought)
    return thought


def _call(block: dict[str, Any], where: str) -> ToolCall:
    id_, name = (_short(block.get(one), f"{where}.{one}") for one in ("id", "name"))
    given = block.get("input")
    if not isinstance(given, dict | None):
        _wrong(f"{where}.input", "must be an object", given)
    return ToolCall(id_, name, json.dumps(given or {}, ensure_ascii=False))


def _short(text: Any, where: str) -> str:
    if text is None:
        raise Rejection(f"{where} is required", code="missing_required_parameter", param=where)
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_CALL_CHARS:
        _wrong(where, f"must be a string of 1 to {MAX_CALL_CHARS} characters", text)
    return text


def _string(text: Any, where: str) -> str:
    if text is None:
        raise Rejection(f"{where} is required", code="missing_required_parameter", param=where)
    if not isinstance(text, str):
        _wrong(where, "must be a string", text)
    return text


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)
