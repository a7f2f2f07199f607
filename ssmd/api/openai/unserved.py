"""OpenAI's endpoints that ssmd leaves out on purpose: each answers 404 with the reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ssmd.engine.terms import Rejection

CODE = "not_supported"
_CHAT = "ask /v1/chat/completions with the whole conversation in messages; it keeps the session and its state by itself"
WHY = {
    "/v1/responses": f"{_CHAT}. In the AI SDK that is createOpenAI(…).chat(model)",
    "/v1/conversations": _CHAT,
    "/v1/embeddings": "ssmd's models are made to generate text, and their states are no embeddings; use a model that "
    "is made for them, with another server",
    "/v1/audio/speech": "ssmd's models read and write text only",
    "/v1/audio/transcriptions": "ssmd's models read and write text only",
    "/v1/audio/translations": "ssmd's models read and write text only",
    "/v1/images/generations": "ssmd's models read and write text only",
    "/v1/images/edits": "ssmd's models read and write text only",
    "/v1/moderations": "ssmd judges no text; ask one of its models with a prompt of your own",
    "/v1/edits": "it was withdrawn by OpenAI; send the text and the instruction to /v1/chat/completions",
}


def routes() -> list[Route]:
    return [Route(path, _refusal(path, why), methods=["POST"]) for path, why in WHY.items()]


def _refusal(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise Rejection(f"{path} is not served here: {why}", status=404, code=CODE)

    return refuse
