"""/v1/models lists the models that this daemon serves. /ssmd/v1/models shows their state, loads and unloads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from ssmd.api.generate.fair_reading import client_of
from ssmd.api.http.body import StrictModel
from ssmd.api.operation import Service
from ssmd.engine.host.models import Model
from ssmd.model.artifact import MANIFEST

T = TypeVar("T")


class ModelChanges(StrictModel):
    """The settings of a model that a request can change."""

    pinned: bool


class Models:
    """The handlers."""

    def __init__(self, on: Service) -> None:
        self._host, self._pool = on.host, on.pool

    async def listing(self, request: Request) -> JSONResponse:
        """List a model for each name, which stands for the fastest usable runtime, and one for each of its runtimes.

        Aliases follow that are a single name: some clients look for their name in the list.
        """
        return JSONResponse({"object": "list", "data": await self._run(request, self._listed)})

    async def one(self, request: Request) -> JSONResponse:
        asked = request.path_params["model"]

        def entry() -> dict[str, Any]:
            model = self._host.shelf.find(asked)
            return _entry(model.named(asked), model)

        return JSONResponse(await self._run(request, entry))

    async def rows(self, request: Request) -> JSONResponse:
        live = await self._run(request, self._host.live)
        return JSONResponse({"object": "list", "data": list(live.models), "memory": live.memory})

    async def change(self, request: Request) -> JSONResponse:
        model = await self._find(request)
        changes = await self._pool.body(request, ModelChanges)
        self._host.pin(model, changes.pinned)
        return JSONResponse(self._host.row(model))

    async def load(self, request: Request) -> JSONResponse:
        """Load a model, and answer when it is loaded. Raises Rejection with the reason if it is not."""
        model = await self._find(request)
        future = self._host.load(model)
        try:
            lease = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._host.give_up(future)
            raise
        lease.release()
        return JSONResponse(self._host.row(model))

    async def unload(self, request: Request) -> JSONResponse:
        """Unload a model as soon as it is idle. Answers at once."""
        model = await self._find(request)
        self._host.unload(model)
        return JSONResponse(self._host.row(model))

    async def _find(self, request: Request) -> Model:
        return await self._run(request, lambda: self._host.shelf.installed(request.path_params["model"]))

    async def _run(self, request: Request, work: Callable[[], T]) -> T:
        """Run work that looks at the disk in a thread, when it is the client's turn."""
        return await self._pool.run(work, client_of(request))

    def _listed(self) -> list[dict[str, Any]]:
        shelf = self._host.shelf
        usable = [model for model in shelf.models() if model.found.manifest is not None]
        entries = []
        for name in sorted({model.name for model in usable}):
            mine = [model for model in usable if model.name == name]
            first = shelf.preferred(name)
            entries.append(_entry(name, first or mine[0]))
            if len(mine) > 1:
                entries += [_entry(model.id, model) for model in mine]
        return [*entries, *(_entry(alias, model) for alias, model in shelf.aliases())]


def _entry(id_: str, model: Model) -> dict[str, Any]:
    manifest = model.manifest
    try:
        created = int((model.path / MANIFEST).stat().st_mtime)
    except OSError:  # removed just now
        created = 0
    return {
        "id": id_,
        "object": "model",
        "created": created,
        "owned_by": "ssmd",
        **_context(manifest.context, manifest.vocabulary),
        "ssmd": {
            "model": model.id,
            "family": manifest.family,
            "runtime": manifest.runtime,
            "device_class": manifest.device_class,
            "quantization": manifest.quantization,
            "context": manifest.context,
            "buckets": list(manifest.buckets),
            "vocabulary": manifest.vocabulary,
            "lineage": manifest.lineage,
            "build": manifest.build,
            "defaults": {name: asdict(default) for name, default in model.defaults.items()},
        },
    }


def _context(tokens: int | None, vocabulary: int) -> dict[str, Any]:
    """Return a model's context under the names of OpenRouter, vLLM and llama.cpp; {} if it is unbounded."""
    if tokens is None:
        return {}
    return {"context_length": tokens, "max_model_len": tokens, "meta": {"n_ctx": tokens, "n_vocab": vocabulary}}
