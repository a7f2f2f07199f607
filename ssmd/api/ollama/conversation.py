"""Ollama's messages, brought to the form of OpenAI's API; and the `context` of /api/generate.

Ollama's calls need no ids. Their results name the function, or come in the order of the calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ssmd.api.http.body import brief, parse_object
from ssmd.engine.terms import Rejection
from ssmd.text.messages import THINK_END

MAX_CONTEXT_BYTES = 64 << 10  # of a conversation as JSON; the event loop writes it with the answer
_MARK = 0x73736D  # the first number of a context
_PIECE = 3  # bytes of a number: clients keep them as 32 bits
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_TEXT_ONLY = "images are not supported: the models here read text only; ask without them"
Messages = list[dict[str, str]]


def read_images(value: Any, where: str) -> None:
    """Raise Rejection if there are images."""
    if value not in _NOTHING:
        raise Rejection(f"{where}: {_TEXT_ONLY}", code="unsupported_parameter", param=where)


def as_openai(messages: Any) -> Any:
    """Return the messages in the form of OpenAI's API, as `read_messages` takes and checks them.

    Raises Rejection for a part that only Ollama's form has: images, thinking, and a result that belongs to no call.
    """
    if not isinstance(messages, list):
        return messages
    reader = _Reader()
    return [reader.message(entry, f"messages[{i}]") for i, entry in enumerate(messages)]


class _Reader:
    """Reads messages one after the other, and gives each call an id."""

    def __init__(self) -> None:
        self._ids: set[str] = set()  # of all calls so far
        self._unnamed = 0  # calls so far that had no id
        self._last: list[tuple[str, Any]] = []  # (id, function) of the calls that were made last
        self._open: list[tuple[str, Any]] = []  # those of them without a result so far

    def message(self, entry: Any, where: str) -> Any:
        """Return a message in OpenAI's form; another value as it is."""
        if not isinstance(entry, dict):
            return entry
        role = entry.get("role")
        if len(entry) == 2 and type(entry.get("content")) is str and role != "tool":
            return entry  # most of a long conversation
        fields = dict(entry)
        read_images(fields.pop("images", None), f"{where}.images")
        if fields.get("content") is None and role in ("system", "user"):
            fields["content"] = ""
        if role == "assistant":
            self._answered(fields, where)
        elif role == "tool":
            self._result(fields, where)
        return fields

    def _answered(self, fields: dict[str, Any], where: str) -> None:
        thinking = fields.pop("thinking", None)
        if not isinstance(thinking, str | None) or THINK_END in (thinking or ""):
            _wrong(f"{where}.thinking", f"must be a text without {THINK_END}", thinking)
        if thinking:
            fields["reasoning_content"] = thinking
        calls = fields.get("tool_calls")
        if isinstance(calls, list) and calls:
            self._last = []
            fields["tool_calls"] = [self._call(call) for call in calls]
            self._open = list(self._last)

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        id_ = call.get("id")
        if id_ in _NOTHING:
            id_ = self._new_id()
            self._unnamed += 1
        function = call.get("function")
        if isinstance(id_, str):
            self._ids.add(id_)
            self._last.append((id_, function.get("name") if isinstance(function, dict) else None))
        return {**call, "id": id_}

    def _new_id(self) -> str:
        n = len(self._ids)
        while f"call_{n}" in self._ids:
            n += 1
        return f"call_{n}"

    def _result(self, fields: dict[str, Any], where: str) -> None:
        """Put the id of its call into a result.

        An id that no call has is left to `read_messages`, unless calls came without theirs: many clients drop them.
        """
        id_, name = fields.pop("tool_call_id", None), fields.pop("tool_name", None)
        old_name = fields.pop("name", None)
        name = old_name if name in _NOTHING else name
        lost = isinstance(id_, str) and id_ not in self._ids and self._unnamed
        if id_ in _NOTHING or lost:
            id_ = self._place(name, where)
        fields["tool_call_id"] = id_
        self._open = [call for call in self._open if call[0] != id_]

    def _place(self, name: Any, where: str) -> str:
        """Return the id of the call that a result belongs to: the first one of that name, else the first one."""
        if name in _NOTHING:
            if not self._open:
                what = f"{where} is a tool's result, but every call before it has its result"
                raise Rejection(what, code="invalid_value", param=where)
            return self._open[0][0]
        found = [id_ for id_, function in (*self._open, *self._last) if function == name]
        if not found:
            _wrong(f"{where}.tool_name", "must be the function of a call in the answer before it", name)
        return found[0]


def pack(messages: Sequence[dict[str, str]]) -> list[int] | None:
    """Return a conversation as a `context`: numbers that clients send back. None if it is longer than they may be."""
    raw = json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode()
    if len(raw) > MAX_CONTEXT_BYTES:
        return None
    return [_MARK, len(raw), *(int.from_bytes(raw[i : i + _PIECE]) for i in range(0, len(raw), _PIECE))]


def unpack(context: Any) -> Messages:
    """Return the conversation in a `context` that `pack` made. Raises Rejection for any other value."""
    if context in _NOTHING:
        return []
    try:
        if not isinstance(context, list) or any(type(one) is not int for one in context):
            raise ValueError("not a list of whole numbers")
        if len(context) < 3 or context[0] != _MARK or not 0 < context[1] <= MAX_CONTEXT_BYTES:
            raise ValueError("no mark")
        if len(context) != 2 + -(-context[1] // _PIECE):
            raise ValueError("not the length that it names")
        raw = b"".join(_pieces(context[2:], context[1]))
        found = parse_object(b'{"messages":' + raw + b"}")["messages"]
        if not isinstance(found, list) or not all(map(_is_message, found)):
            raise ValueError("no messages")
    except (ValueError, OverflowError, Rejection):
        said = (
            f"context is not one that this daemon returned (got {brief(context)}); leave it out to begin anew, or send "
            "the conversation to /api/chat"
        )
        raise Rejection(said, code="invalid_value", param="context") from None
    return found


def _pieces(numbers: Sequence[int], nbytes: int) -> Iterator[bytes]:
    for number in numbers:
        yield number.to_bytes(min(_PIECE, nbytes))
        nbytes -= _PIECE


def _is_message(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"role", "content"}
        and entry["role"] in ("system", "user", "assistant")
        and isinstance(entry["content"], str)
    )


def _wrong(param: str, what: str, value: Any) -> NoReturn:
    raise Rejection(f"{param} {what} (got {brief(value)})", code="invalid_value", param=param)
