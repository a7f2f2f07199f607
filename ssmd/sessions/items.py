"""Messages as they are stored and exported: a list of items, named as in OpenAI's Responses.

A message is an item. Each call of an assistant's message is an item right after it. A call's result is an item too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ssmd.text.messages import Message, ToolCall

Item = dict[str, Any]


def items_of(turn_id: str, messages: Sequence[Message]) -> tuple[list[Item], list[Item]]:
    """Convert a turn's messages to items: (input, answer). The answer is the last message.

    Each item gets an id, which follows from the turn's id and its place.
    """
    said = [list(_items(m)) for m in messages]
    items = [{"id": _id(turn_id, i), **item} for i, item in enumerate(item for one in said for item in one)]
    answer = len(items) - len(said[-1])
    return items[:answer], items[answer:]


def messages_of(items: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Convert items to messages. Raises ValueError, TypeError or KeyError if they are invalid."""
    messages: list[Message] = []
    calls: dict[int, list[ToolCall]] = {}  # by index of their message
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            said = {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
            messages.append(Message.from_json(said | {"name": item.get("name")}))
        elif kind == "function_call":
            if not messages or messages[-1].role != "assistant":
                raise ValueError("a function call does not follow an assistant's message")
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = ToolCall.from_json({"id": item["call_id"], "function": function})
            calls.setdefault(len(messages) - 1, []).append(call)
        elif kind == "message" and item.get("role") != "tool":
            fields = {name: item.get(name) for name in ("role", "content", "name")}
            messages.append(Message.from_json(fields))
        else:
            raise ValueError(f"an item of type {kind!r} is of a newer version")
    for i, made in calls.items():
        messages[i] = replace(messages[i], tool_calls=tuple(made))
    return tuple(messages)


def _items(message: Message) -> Iterable[Item]:
    if message.tool_call_id is not None:
        named = {} if message.name is None else {"name": message.name}
        output = {"call_id": message.tool_call_id, "output": message.content}
        yield {"type": "function_call_output", **output, **named}
        return
    yield {"type": "message", **replace(message, tool_calls=()).to_json()}
    for call in message.tool_calls:
        yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _id(turn_id: str, index: int) -> str:
    return f"item_{hashlib.blake2b(f'{turn_id} {index}'.encode(), digest_size=12).hexdigest()}"
