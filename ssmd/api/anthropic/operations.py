"""The operations of Anthropic's API."""

from __future__ import annotations

from ssmd.api.anthropic import body as messages_body
from ssmd.api.anthropic import messages
from ssmd.api.anthropic.errors import OVERLOADED, error_form
from ssmd.api.openai.messages import MAX_TOOLS
from ssmd.api.openai.operations import KEEP, LIMIT
from ssmd.api.operation import BODY, EVENTS, GENERATION, GONE, Operation, RequestBody, Schema

_INSTEAD = {503: OVERLOADED}  # Anthropic's clients come back after a 529; they know no 503
_BLOCKS: Schema = {
    "type": "array",
    "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
}
_CONVERSATION: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
        },
    },
}
_ANTHROPIC_TOOLS: Schema = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "description": {"type": "string"},
            "input_schema": {"type": "object"},
            "strict": {"type": "boolean"},
        },
    },
}
_FORMAT: Schema = {
    "type": "object",
    "required": ["type", "schema"],
    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
}
_SYSTEM: Schema = {"anyOf": [{"type": "string"}, _BLOCKS, {"type": "null"}]}
_MESSAGE = RequestBody(
    messages_body.MessagesBody,
    messages_body.REFUSED,
    {
        "messages": _CONVERSATION,
        "system": _SYSTEM,
        "tools": _ANTHROPIC_TOOLS,
        "tool_choice": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": {"type": "string"},
                "disable_parallel_tool_use": {"type": "boolean"},
            },
        },
        "thinking": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": list(messages_body.THINKING)},
                "budget_tokens": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            },
        },
        "output_config": {"type": "object", "properties": {"format": _FORMAT}},
        "output_format": _FORMAT,
        "keep_alive": KEEP,
        "max_tokens": LIMIT,
    },
    lenient=True,
)

OPERATIONS = (
    Operation(
        "POST",
        "/v1/messages",
        messages.endpoint,
        "Anthropic",
        "An answer to a conversation, whole or as a stream of events",
        about="[Anthropic's messages](anthropic.md), for Claude Code and others",
        pool="chats",
        answer="Message",
        also=(EVENTS,),
        errors=BODY | GENERATION,
        error="AnthropicError",
        error_form=error_form,
        instead=_INSTEAD,
        body=_MESSAGE,
        any_base=True,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        lambda on: on.one(messages.TokenCounts).count,
        "Anthropic",
        "The tokens of a conversation",
        about="the number of tokens of such a message's prompt",
        pool="texts",
        answer="TokenCount",
        errors=BODY | GONE,
        error="AnthropicError",
        error_form=error_form,
        instead=_INSTEAD,
        body=_MESSAGE,
        any_base=True,
    ),
)
