"""The operations of OpenAI's API, and of llama.cpp's server that clients of OpenAI's use beside them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from ssmd import __version__
from ssmd.api.models import Models
from ssmd.api.openai import chat, completions, tokenize, unserved
from ssmd.api.openai.messages import MAX_CALLS, MAX_TOOLS
from ssmd.api.openai.tokenize import Texts
from ssmd.api.operation import BODY, EVENTS, GENERATION, GONE, Endpoint, Operation, RequestBody, Schema, Service

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
_STOP: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
LIMIT: Schema = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, {"type": "null"}]}
_LIMITS = dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), LIMIT)
KEEP: Schema = {"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}
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
    chat.ChatBody,
    chat.NOT_BUILT,
    {"messages": MESSAGES, "tools": TOOLS, "stop": _STOP, "keep_alive": KEEP, **_LIMITS},
    lenient=True,
)
_COMPLETION = RequestBody(
    completions.CompletionBody,
    completions.REFUSED,
    {"prompt": _PROMPT, "stop": _STOP, "keep_alive": KEEP, **_LIMITS},
    lenient=True,
)
_GENERATES = BODY | GENERATION
_MODELS = (
    "the served models: one for each name, and one for each of several runtimes. The context is `context_length`, "
    "`max_model_len` and `meta.n_ctx`, the names that clients look for. [Aliases](#aliases) that are a single name "
    "follow"
)


def root(on: Service) -> Endpoint:
    """Build the endpoint of /v1 and /v1/."""
    served = [one for one in on.operations if one.path.startswith("/v1/") and one.path != "/v1/" and one.status < 300]
    description = {
        "object": "ssmd",
        "name": "ssmd",
        "version": __version__,
        "description": "a daemon that answers OpenAI's clients with the models of this machine",
        "page": "/",
        "docs": "/docs",
        "openapi": "/openapi.json",
        "endpoints": [f"{one.method} {one.template}" for one in served],
    }

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(description)

    return answer


OPERATIONS = (
    Operation(
        "GET",
        "/v1",
        root,
        "OpenAI",
        "This daemon, and its endpoints",
        about="a description of the daemon: version, page, documents and endpoints, in JSON",
        answer="Root",
    ),
    Operation("GET", "/v1/", root, "OpenAI", "The same", about="the same", answer="Root"),
    Operation(
        "POST",
        "/v1/chat/completions",
        chat.endpoint,
        "OpenAI",
        "An answer to a conversation, whole or as a stream of chunks",
        about="an answer, whole or streamed",
        pool="chats",
        answer="ChatCompletion",
        also=(EVENTS,),
        errors=_GENERATES,
        body=_CHAT,
        any_base=True,
    ),
    Operation(
        "POST",
        "/v1/completions",
        completions.endpoint,
        "OpenAI",
        "The continuation of a prompt, whole or as a stream of chunks",
        about="the continuation of a [prompt](#completions), without a template and without a session",
        pool="chats",
        answer="Completion",
        also=(EVENTS,),
        errors=_GENERATES,
        body=_COMPLETION,
        any_base=True,
    ),
    Operation(
        "GET",
        "/v1/models",
        lambda on: on.one(Models).listing,
        "OpenAI",
        "The models that this daemon serves",
        about=_MODELS,
        pool="looks",
        answer="Models",
        any_base=True,
    ),
    Operation(
        "GET",
        "/v1/models/{model:path}",
        lambda on: on.one(Models).one,
        "OpenAI",
        "One of them",
        about="one of them",
        pool="looks",
        answer="Model",
        errors=GONE,
        any_base=True,
    ),
    Operation(
        "POST",
        "/tokenize",
        lambda on: on.one(Texts).tokenize,
        "llama.cpp",
        "Text to ids",
        about="[text to ids](#text-to-ids-and-back), as llama.cpp has it",
        pool="texts",
        answer="Tokens",
        errors=BODY | GONE,
        body=RequestBody(tokenize.TokenizeBody, lenient=True),
    ),
    Operation(
        "POST",
        "/detokenize",
        lambda on: on.one(Texts).detokenize,
        "llama.cpp",
        "Ids to text",
        about="[ids to text](#text-to-ids-and-back)",
        pool="texts",
        answer="Content",
        errors=BODY | GONE,
        body=RequestBody(tokenize.DetokenizeBody, lenient=True),
    ),
    Operation(
        "POST",
        "/apply-template",
        lambda on: on.one(Texts).apply_template,
        "llama.cpp",
        "Messages to the prompt that the model reads",
        about="[messages to the prompt](#text-to-ids-and-back) that the model reads",
        pool="texts",
        answer="Prompt",
        errors=BODY | GONE,
        body=_CHAT,
    ),
)
UNSERVED = tuple(
    Operation(
        "POST", path, lambda on: unserved.refuse, "OpenAI", "Not served here, and why", status=404, answer="Error"
    )
    for path in unserved.WHY
)
