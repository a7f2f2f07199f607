"""The operations of OpenAI's responses and conversations."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from ssmd.api.openai.operations import KEEP, LIMIT
from ssmd.api.openai.responses import body as responses_body
from ssmd.api.openai.responses import create
from ssmd.api.openai.responses.conversations import (
    MAX_ADDED,
    AddedItemsBody,
    ConversationBody,
    Conversations,
    DescriptionBody,
)
from ssmd.api.openai.responses.create import InputTokens
from ssmd.api.openai.responses.state import StoredResponses
from ssmd.api.openai.responses.stored import MAX_ITEMS
from ssmd.api.operation import BODY, EVENTS, GENERATION, GONE, SPACE, Endpoint, Operation, RequestBody, Schema, Service
from ssmd.engine.terms import Rejection

_ITEMS: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "object"}},
    ]
}
_TOOLS: Schema = {
    "type": "array",
    "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
}
_ADDED: Schema = {"type": "array", "maxItems": MAX_ADDED, "items": {"type": "object"}}
_PAGE: dict[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_RETRIEVAL: dict[str, Schema] = {
    "stream": {"type": "boolean", "default": False},
    "starting_after": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
_CONVERSATION = "/v1/conversations/{id}"
_RESPONSE = RequestBody(
    responses_body.ResponsesBody,
    responses_body.REFUSED,
    {
        "input": _ITEMS,
        "conversation": {"type": ["string", "object", "null"]},
        "tools": _TOOLS,
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]},
        "reasoning": {"type": ["object", "null"], "properties": {"effort": {"enum": list(responses_body.EFFORTS)}}},
        "text": {"type": ["object", "null"], "properties": {"format": {"type": "object"}}},
        "include": {"type": ["array", "null"], "items": {"type": "string"}},
        "keep_alive": KEEP,
        "max_tokens": LIMIT,
        "max_output_tokens": LIMIT,
    },
    lenient=True,
)


def _refused(said: str) -> Callable[[Service], Endpoint]:
    async def refuse(request: Request) -> Response:
        raise Rejection(said, code="not_supported")

    return lambda on: refuse


OPERATIONS = (
    Operation(
        "POST",
        "/v1/responses",
        create.endpoint,
        "Responses",
        "An answer to a list of items, whole or as a stream of events",
        about="[OpenAI's responses](responses.md), for Codex, the Agents SDK and others",
        pool="chats",
        answer="Response",
        also=(EVENTS,),
        errors=BODY | GENERATION,
        body=_RESPONSE,
        any_base=True,
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        lambda on: on.one(InputTokens).count,
        "Responses",
        "The tokens of a list of items",
        about="the number of tokens of such a response's prompt",
        pool="texts",
        answer="TokenCount",
        errors=BODY | GONE,
        body=_RESPONSE,
        any_base=True,
    ),
    Operation(
        "POST",
        "/v1/responses/compact",
        _refused(
            "/v1/responses/compact is not supported here: leave out old items yourself, or send truncation: auto to "
            "/v1/responses"
        ),
        "Responses",
        "Not served here, and why",
        status=400,
        answer="Error",
        any_base=True,
    ),
    Operation(
        "GET",
        "/v1/responses",
        _refused("responses come over POST here, not over a WebSocket: send POST /v1/responses with stream: true"),
        "Responses",
        "Not served here, and why",
        status=400,
        answer="Error",
        any_base=True,
    ),
    Operation(
        "GET",
        "/v1/responses/{id}",
        lambda on: on.one(StoredResponses).get,
        "Responses",
        "A stored response",
        about="a response that is stored, or under way, whole or as a stream of events",
        pool="store",
        answer="Response",
        also=(EVENTS,),
        errors=GONE,
        query=_RETRIEVAL,
        any_base=True,
    ),
    Operation(
        "DELETE",
        "/v1/responses/{id}",
        lambda on: on.one(StoredResponses).delete,
        "Responses",
        "Delete a stored response",
        about="deletes a stored response, and its text if no later one follows on it",
        pool="store",
        answer="DeletedResponse",
        errors=GONE,
        any_base=True,
    ),
    Operation(
        "POST",
        "/v1/responses/{id}/cancel",
        lambda on: on.one(StoredResponses).cancel,
        "Responses",
        "Cancel a response in the background",
        about="cancels a response [in the background](responses.md#in-the-background)",
        pool="store",
        answer="Response",
        errors=GONE,
        any_base=True,
    ),
    Operation(
        "GET",
        "/v1/responses/{id}/input_items",
        lambda on: on.one(StoredResponses).input_items,
        "Responses",
        "The items that a stored response's model read",
        about="the items that a stored response's model read, in pages",
        pool="store",
        answer="ItemPage",
        errors=GONE,
        query=_PAGE,
        any_base=True,
    ),
    Operation(
        "POST",
        "/v1/conversations",
        lambda on: on.one(Conversations).create,
        "Conversations",
        "A new conversation",
        about="a new [conversation](responses.md#conversations), with its first items if it has some",
        pool="store",
        answer="Conversation",
        errors=BODY | GONE | SPACE,
        body=RequestBody(ConversationBody, more={"items": _ADDED}, optional=True),
        any_base=True,
    ),
    Operation(
        "GET",
        _CONVERSATION,
        lambda on: on.one(Conversations).get,
        "Conversations",
        "A conversation",
        pool="store",
        answer="Conversation",
        errors=GONE,
        any_base=True,
    ),
    Operation(
        "POST",
        _CONVERSATION,
        lambda on: on.one(Conversations).update,
        "Conversations",
        "Give a conversation other metadata",
        about="gives a conversation other metadata",
        pool="store",
        answer="Conversation",
        errors=BODY | GONE | SPACE,
        body=RequestBody(DescriptionBody),
        any_base=True,
    ),
    Operation(
        "DELETE",
        _CONVERSATION,
        lambda on: on.one(Conversations).delete,
        "Conversations",
        "Delete a conversation",
        about="deletes a conversation with its text and its responses",
        pool="store",
        answer="DeletedConversation",
        errors=GONE,
        any_base=True,
    ),
    Operation(
        "GET",
        f"{_CONVERSATION}/items",
        lambda on: on.one(Conversations).items,
        "Conversations",
        "The items of a conversation",
        about="the items of a conversation, in pages",
        pool="store",
        answer="ItemPage",
        errors=GONE,
        query=_PAGE,
        any_base=True,
    ),
    Operation(
        "POST",
        f"{_CONVERSATION}/items",
        lambda on: on.one(Conversations).add,
        "Conversations",
        "Add items to a conversation",
        about=f"adds up to {MAX_ADDED} items to a conversation, and answers with them",
        pool="store",
        answer="ItemPage",
        errors=BODY | GONE | SPACE,
        body=RequestBody(AddedItemsBody, more={"items": _ADDED}),
        any_base=True,
    ),
    Operation(
        "GET",
        f"{_CONVERSATION}/items/{{item}}",
        lambda on: on.one(Conversations).item,
        "Conversations",
        "An item of a conversation",
        pool="store",
        answer="Item",
        errors=GONE,
        any_base=True,
    ),
    Operation(
        "DELETE",
        f"{_CONVERSATION}/items/{{item}}",
        lambda on: on.one(Conversations).remove,
        "Conversations",
        "Leave an item out of a conversation",
        about="leaves an item out of a conversation, and answers with the conversation",
        pool="store",
        answer="Conversation",
        errors=GONE | SPACE,
        any_base=True,
    ),
)
