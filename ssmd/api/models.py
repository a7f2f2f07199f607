"""/v1/models: what this daemon serves."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.api.body import shown
from ssmd.engine.engine import Engine
from ssmd.engine.request import Rejected
from ssmd.model.artifact import MANIFEST


def served_names(engine: Engine) -> list[str]:
    """The artifact's own name, its folder's, and that of the model's folder around it: <name>/<runtime>-…/."""
    path = engine.artifact.path.resolve()
    return [engine.artifact.manifest.name, path.name, path.parent.name]


def check_served(engine: Engine, model: str) -> None:
    """Check that `model` is served here. Raises Rejected (404, with the names there are)."""
    if model not in served_names(engine):
        raise Rejected(
            f"there is no model {shown(model)} here; this daemon serves: {engine.artifact.manifest.name}",
            status=404,
            code="model_not_found",
            param="model",
        )


def routes(engine: Engine) -> list[Route]:
    manifest = engine.artifact.manifest
    entry: dict[str, Any] = {
        "id": manifest.name,
        "object": "model",
        "created": int((engine.artifact.path / MANIFEST).stat().st_mtime),
        "owned_by": "ssmd",
        "ssmd": {
            "family": manifest.family,
            "runtime": manifest.runtime,
            "device_class": manifest.device_class,
            "quantization": manifest.quantization,
            "context": engine.program.context,
            "buckets": list(engine.program.buckets),
            "vocabulary": manifest.vocabulary,
            "lineage": manifest.lineage,
            "build": manifest.build,
        },
    }

    async def listing(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [entry]})

    async def one(request: Request) -> JSONResponse:
        check_served(engine, request.path_params["model"])
        return JSONResponse(entry)

    return [Route("/v1/models", listing), Route("/v1/models/{model:path}", one)]
