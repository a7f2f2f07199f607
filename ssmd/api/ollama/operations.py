"""The operations of Ollama's API."""

from __future__ import annotations

from functools import partial

from ssmd.api.ollama import body as bodies
from ssmd.api.ollama import chat, models, pulls, unserved
from ssmd.api.ollama.errors import LINES, error_form
from ssmd.api.ollama.models import OllamaModels
from ssmd.api.openai.operations import KEEP, TOOLS
from ssmd.api.operation import BODY, GENERATION, GONE, Operation, RequestBody, Schema

_MESSAGES: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": {"type": ["string", "null"]},
            "thinking": {"type": ["string", "null"]},
            "tool_name": {"type": "string"},
            "tool_call_id": {"type": "string"},
            "tool_calls": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["function"],
                    "properties": {
                        "id": {"type": "string"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
                        },
                    },
                },
            },
        },
    },
}
_FORM: Schema = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]}
_ASKED = {"keep_alive": KEEP, "format": _FORM}
_CONTEXT: Schema = {"type": ["array", "null"], "items": {"type": "integer"}}
_CHAT = RequestBody(
    bodies.OllamaChatBody, bodies.CHAT_REFUSED, {**_ASKED, "messages": _MESSAGES, "tools": TOOLS}, lenient=True
)
_GENERATE = RequestBody(
    bodies.OllamaGenerateBody, bodies.GENERATE_REFUSED, {**_ASKED, "context": _CONTEXT}, lenient=True
)
_operation = partial(
    Operation, tag="Ollama", error="OllamaError", error_form=error_form, error_root="/api", any_base=True
)

OPERATIONS = (
    _operation(
        "POST",
        "/api/chat",
        chat.chat,
        summary="An answer to a conversation, as lines or whole",
        about="[Ollama's chat](ollama.md), for Home Assistant, Zed and others",
        pool="chats",
        answer="OllamaChat",
        also=(LINES.media_type,),
        errors=BODY | GENERATION,
        body=_CHAT,
    ),
    _operation(
        "POST",
        "/api/generate",
        chat.generate,
        summary="An answer to a prompt, as lines or whole",
        about="an answer to a prompt; without one a model is [loaded or unloaded](ollama.md#loading-and-unloading)",
        pool="chats",
        answer="OllamaGenerated",
        also=(LINES.media_type,),
        errors=BODY | GENERATION,
        body=_GENERATE,
    ),
    _operation(
        "GET",
        "/api/version",
        lambda on: models.version,
        summary="The version of Ollama whose interface this is",
        answer="OllamaVersion",
    ),
    _operation(
        "GET",
        "/api/tags",
        lambda on: on.one(OllamaModels).tags,
        summary="The installed models, as Ollama lists them",
        pool="looks",
        answer="OllamaModelList",
    ),
    _operation(
        "GET",
        "/api/ps",
        lambda on: on.one(OllamaModels).ps,
        summary="The loaded models, as Ollama lists them",
        pool="looks",
        answer="OllamaModelList",
    ),
    _operation(
        "POST",
        "/api/show",
        lambda on: on.one(OllamaModels).show,
        summary="The context, the abilities and the template of a model",
        pool="looks",
        answer="OllamaModelInfo",
        errors=BODY | GONE,
        body=RequestBody(models.NameBody, lenient=True),
    ),
    _operation(
        "POST",
        "/api/pull",
        pulls.Pull,
        summary="Pull a model; its progress comes as lines",
        about="pull a model; its progress comes as lines",
        pool="looks",
        answer="OllamaStatus",
        also=(LINES.media_type,),
        errors=BODY | {500: "It could not be pulled."},
        body=RequestBody(pulls.OllamaPullBody, lenient=True),
        effect="it fetches a model from the network",
    ),
    _operation(
        "DELETE",
        "/api/delete",
        lambda on: on.one(OllamaModels).delete,
        summary="Remove an installed model",
        about="remove an installed model, as `ssmd rm` does",
        pool="looks",
        answer=("text/plain",),
        errors=BODY | GONE,
        body=RequestBody(models.NameBody, lenient=True),
        effect="it removes a model",
    ),
)
UNSERVED = tuple(
    _operation(
        "POST",
        path,
        lambda on: unserved.refuse,
        summary="Not served here, and why",
        status=status,
        answer="OllamaError",
    )
    for path, (status, _) in unserved.WHY.items()
)
