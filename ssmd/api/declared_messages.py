"""The JSON schemas of messages and tools, as the interface declares them."""

from __future__ import annotations

from typing import Any

from ssmd.api.messages import MAX_CALLS
from ssmd.api.tools import MAX_TOOLS

Schema = dict[str, Any]
_TEXT_PARTS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    },
}
_CALL: Schema = {
    "type": "object",
    "required": ["id", "function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}
TOOLS: Schema = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                    "description": {"type": "string"},
                    "parameters": {"type": "object"},
                    "strict": {"type": "boolean"},
                },
            },
        },
    },
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [{"type": "string"}, _TEXT_PARTS, {"type": "null"}]},
            "name": {"type": "string", "pattern": r"^[\w-]{1,64}$"},
            "reasoning_content": {"type": ["string", "null"]},
            "tool_calls": {"type": "array", "items": _CALL, "maxItems": MAX_CALLS},
            "tool_call_id": {"type": "string"},
        },
    },
}
