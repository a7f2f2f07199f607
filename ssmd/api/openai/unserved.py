"""OpenAI's endpoints that ssmd leaves out on purpose: each answers 404 with the reason."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ssmd.engine.terms import Rejection

CODE = "not_supported"
WHY = {
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


async def refuse(request: Request) -> Response:
    path = request.scope["path"]
    raise Rejection(f"{path} is not served here: {WHY[path]}", status=404, code=CODE)
