"""Ollama's endpoints that ssmd leaves out on purpose: each answers with the reason."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ssmd.engine.terms import Rejection

_EMBEDDINGS = "does not support embeddings: ssmd's models are made to generate text; use a model that is made for them"
_MODELS = "is not possible here: ssmd makes its models with `ssmd pull` and `ssmd build`"
_REGISTRY = "is not possible here: ssmd has no registry"
WHY = {  # (status, reason) by path
    "/api/embed": (400, _EMBEDDINGS),
    "/api/embeddings": (400, _EMBEDDINGS),
    "/api/create": (501, _MODELS),
    "/api/copy": (501, f"{_MODELS}; give a model a second name in its clients"),
    "/api/push": (501, _REGISTRY),
    "/api/blobs/{digest}": (501, _MODELS),
}


async def refuse(request: Request) -> Response:
    path = request.scope["path"]
    status, why = WHY[path if path in WHY else "/api/blobs/{digest}"]
    raise Rejection(f"{path} {why}", status=status, code="not_supported")
