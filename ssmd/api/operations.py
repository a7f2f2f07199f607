"""The declaration of the HTTP API: each route's purpose, its input, and every status that it may answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from ssmd.api import shapes
from ssmd.api.anthropic import body as messages_body
from ssmd.api.anthropic import messages as anthropic_messages
from ssmd.api.anthropic.errors import OVERLOADED
from ssmd.api.http import keys
from ssmd.api.openai import chat_body, completions, tokenize, unserved
from ssmd.api.openai.fields import Neutral
from ssmd.api.openai.messages import MAX_CALLS
from ssmd.api.openai.tools import MAX_TOOLS
from ssmd.api.own import metrics, models, pulls, sessions, tickets

EVENTS, BINARY, HTML = "text/event-stream", "application/octet-stream", "text/html; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# The statuses of every route: bad header fields, key, Host, Origin, rights or body length, and a daemon that ends.
_EVERYWHERE = {
    400: "The request, or a field of it, is invalid; `param` names it.",
    401: "A key is set, and the request has no key or a wrong one.",
    403: "This Host, Origin or key is not allowed.",
    413: "The body is larger than `SSMD_MAX_BODY_BYTES`.",
    503: "It is not possible now; `retry-after` says when to try again, if that may help.",
}
_OPEN = {status: why for status, why in _EVERYWHERE.items() if status != 401}
_BODY = {
    408: "The body did not arrive in time.",
    415: "The body is not `application/json`, or compressed.",
}
_GONE = {404: "It does not exist here."}
_ANSWERS = {
    **_GONE,
    422: "The `Idempotency-Key` came before with another body.",
    500: "The model failed.",
}
# Anthropic has no 503; a request that can be repeated is told when.
_MESSAGES = {
    **{status: why for status, why in (_EVERYWHERE | _BODY | _ANSWERS).items() if status != 503},
    OVERLOADED: _EVERYWHERE[503],
}
_SPACE = {507: "The disk has no room for it."}
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


@dataclass(frozen=True)
class RequestBody:
    """A body. shape: its model. refused: known fields that are not supported. more: schemas in place of the model's.

    lenient: unknown fields are ignored and named. optional: it may be left out.
    """

    shape: type[BaseModel]
    refused: Neutral = field(default_factory=dict)
    more: Mapping[str, Schema] = field(default_factory=dict)
    lenient: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Operation:
    """A route and a method. good: the status of a success. answer: its shape, or media types. bad: every other status.

    query: parameters, by name.
    """

    summary: str
    tag: str
    good: int = 200
    answer: type[BaseModel] | tuple[str, ...] = shapes.Rows
    also: tuple[str, ...] = ()  # media types beside JSON
    bad: Mapping[int, str] = field(default_factory=lambda: _EVERYWHERE)
    body: RequestBody | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    open: bool = False  # it needs no key
    error: type[BaseModel] = shapes.Error


_STOP: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_LIMIT: Schema = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, {"type": "null"}]}
_LIMITS = dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), _LIMIT)
_KEEP: Schema = {"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": completions.MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": completions.MAX_PROMPTS},
    ]
}
_CHAT = RequestBody(
    chat_body.ChatBody,
    chat_body.NOT_BUILT,
    {"messages": MESSAGES, "tools": TOOLS, "stop": _STOP, "keep_alive": _KEEP, **_LIMITS},
    lenient=True,
)
_COMPLETION = RequestBody(
    completions.CompletionBody,
    completions.REFUSED,
    {"prompt": _PROMPT, "stop": _STOP, "keep_alive": _KEEP, **_LIMITS},
    lenient=True,
)
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
        "keep_alive": _KEEP,
        "max_tokens": _LIMIT,
    },
    lenient=True,
)
_SESSION_ID = "/ssmd/v1/sessions/{session}"
_NO_STORE = {**_EVERYWHERE, **_GONE}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation("The page", "page", answer=(HTML,), bad=_OPEN, open=True),
    ("GET", "/page/{file}"): Operation("A file of the page", "page", answer=("*/*",), bad=_OPEN | _GONE, open=True),
    ("GET", "/docs"): Operation("This interface, to be read", "page", answer=(HTML,), bad=_OPEN, open=True),
    ("GET", "/openapi.json"): Operation("This document", "page", answer=("application/json",), bad=_OPEN, open=True),
    ("GET", "/v1"): Operation("This daemon, and its endpoints", "OpenAI", answer=shapes.Root),
    ("GET", "/v1/"): Operation("The same", "OpenAI", answer=shapes.Root),
    ("POST", "/v1/chat/completions"): Operation(
        "An answer to a conversation, whole or as a stream of chunks",
        "OpenAI",
        answer=shapes.ChatCompletion,
        also=(EVENTS,),
        bad=_EVERYWHERE | _BODY | _ANSWERS,
        body=_CHAT,
    ),
    ("POST", "/v1/completions"): Operation(
        "The continuation of a prompt, whole or as a stream of chunks",
        "OpenAI",
        answer=shapes.Completion,
        also=(EVENTS,),
        bad=_EVERYWHERE | _BODY | _ANSWERS,
        body=_COMPLETION,
    ),
    ("POST", anthropic_messages.PATH): Operation(
        "An answer to a conversation, whole or as a stream of events",
        "Anthropic",
        answer=shapes.Message,
        also=(EVENTS,),
        bad=_MESSAGES,
        body=_MESSAGE,
        error=shapes.AnthropicError,
    ),
    ("POST", f"{anthropic_messages.PATH}/count_tokens"): Operation(
        "The tokens of a conversation",
        "Anthropic",
        answer=shapes.TokenCount,
        bad={status: why for status, why in _MESSAGES.items() if status not in (422, 500)},
        body=_MESSAGE,
        error=shapes.AnthropicError,
    ),
    ("GET", "/v1/models"): Operation("The models that this daemon serves", "OpenAI", answer=shapes.Models),
    ("GET", "/v1/models/{model}"): Operation("One of them", "OpenAI", answer=shapes.Model, bad=_EVERYWHERE | _GONE),
    ("POST", "/tokenize"): Operation(
        "Text to ids",
        "llama.cpp",
        answer=shapes.Tokens,
        bad=_EVERYWHERE | _BODY | _GONE,
        body=RequestBody(tokenize.TokenizeBody, lenient=True),
    ),
    ("POST", "/detokenize"): Operation(
        "Ids to text",
        "llama.cpp",
        answer=shapes.Content,
        bad=_EVERYWHERE | _BODY | _GONE,
        body=RequestBody(tokenize.DetokenizeBody, lenient=True),
    ),
    ("POST", "/apply-template"): Operation(
        "Messages to the prompt that the model reads",
        "llama.cpp",
        answer=shapes.Prompt,
        bad=_EVERYWHERE | _BODY | _GONE,
        body=_CHAT,
    ),
    ("GET", "/ssmd/v1/requests/{id}/stream"): Operation(
        "An answer under way, followed", "requests", answer=(EVENTS,), bad=_EVERYWHERE | _GONE
    ),
    ("POST", "/ssmd/v1/requests/{id}/stop"): Operation(
        "End it", "requests", 202, answer=shapes.StoppedRequest, bad=_EVERYWHERE | _GONE
    ),
    ("GET", "/ssmd/v1/models"): Operation("The installed models, loaded or not", "models"),
    ("PATCH", "/ssmd/v1/models/{model}"): Operation(
        "Pin a model, or unpin it",
        "models",
        answer=shapes.LoadedModel,
        bad=_EVERYWHERE | _BODY | _GONE,
        body=RequestBody(models.ModelChanges),
    ),
    ("POST", "/ssmd/v1/models/{model}/load"): Operation(
        "Load a model", "models", answer=shapes.LoadedModel, bad=_EVERYWHERE | _GONE
    ),
    ("POST", "/ssmd/v1/models/{model}/unload"): Operation(
        "Unload a model", "models", answer=shapes.LoadedModel, bad=_EVERYWHERE | _GONE
    ),
    ("GET", "/health"): Operation("The health of the daemon", "daemon", answer=shapes.Health, bad=_OPEN, open=True),
    ("GET", "/metrics"): Operation("Numbers for Prometheus", "daemon", answer=(PROMETHEUS,)),
    ("GET", "/ssmd/v1/metrics"): Operation("The same for people's screens", "daemon", answer=shapes.Metrics),
    ("GET", "/ssmd/v1/metrics/stream"): Operation(
        "The same, whenever it changes",
        "daemon",
        answer=(EVENTS,),
        query={
            "interval": {
                "type": "number",
                "minimum": metrics.PERIOD_S,
                "maximum": metrics.MOST_S,
                "default": metrics.PERIOD_S,
            }
        },
    ),
    ("GET", "/ssmd/v1/runtimes"): Operation("The runtimes and devices that can be used", "daemon"),
    ("POST", "/ssmd/v1/stop"): Operation("Stop the daemon, as SIGTERM does", "daemon", 202, answer=shapes.Shutdown),
    ("GET", "/ssmd/v1/catalog"): Operation("The models that can be pulled", "pulls"),
    ("GET", "/ssmd/v1/pulls"): Operation("The progress of all pulls", "pulls"),
    ("POST", "/ssmd/v1/pulls"): Operation(
        "Pull a model", "pulls", 202, answer=shapes.Pull, bad=_EVERYWHERE | _BODY, body=RequestBody(pulls.PullBody)
    ),
    ("DELETE", "/ssmd/v1/pulls/{id}"): Operation("Cancel one", "pulls", answer=shapes.Pull, bad=_EVERYWHERE | _GONE),
    ("GET", "/ssmd/v1/sessions"): Operation(
        "The stored sessions",
        "sessions",
        answer=shapes.Sessions,
        bad=_NO_STORE,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
            "after": {"type": "string"},
            "search": {"type": "string", "maxLength": sessions.MAX_SEARCH},
        },
    ),
    ("POST", "/ssmd/v1/sessions/import"): Operation(
        "A session from a file",
        "sessions",
        201,
        answer=shapes.Session,
        bad=_NO_STORE | _SPACE | {408: _BODY[408]},
        query={"reread": {"enum": ["true", "false"], "default": "false"}},
    ),
    ("GET", _SESSION_ID): Operation("One with its turns", "sessions", answer=shapes.SessionTurns, bad=_NO_STORE),
    ("PATCH", _SESSION_ID): Operation(
        "Pin or rename it",
        "sessions",
        answer=shapes.Session,
        bad=_NO_STORE | _BODY,
        body=RequestBody(sessions.SessionChanges),
    ),
    ("DELETE", _SESSION_ID): Operation("Remove it", "sessions", answer=shapes.DeletedSession, bad=_NO_STORE),
    ("GET", f"{_SESSION_ID}/export"): Operation(
        "Its file",
        "sessions",
        answer=(BINARY,),
        bad=_NO_STORE | _SPACE,
        query={"state": {"enum": ["true", "false", "all"], "default": "true"}},
    ),
    ("POST", f"{_SESSION_ID}/fork"): Operation(
        "A new session that begins at one of its turns",
        "sessions",
        201,
        answer=shapes.Session,
        bad=_NO_STORE | _BODY,
        body=RequestBody(sessions.ForkBody, optional=True),
    ),
    ("POST", keys.TICKETS): Operation("Make a ticket with a key's rights", "tickets", answer=shapes.Ticket),
    ("POST", keys.REDEEM): Operation(
        "A key for a ticket",
        "tickets",
        answer=shapes.Key,
        bad=_OPEN | _BODY,
        body=RequestBody(tickets.RedeemBody),
        open=True,
    ),
}
OPERATIONS["POST", _SESSION_ID] = OPERATIONS["PATCH", _SESSION_ID]
for _path in unserved.WHY:
    OPERATIONS["POST", _path] = Operation("Not served here, and why", "OpenAI", 404, answer=shapes.Error)
