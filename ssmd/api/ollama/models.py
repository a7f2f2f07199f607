"""/api/version, /api/tags, /api/show, /api/ps and /api/delete: the models, as Ollama's clients look for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ssmd import __version__
from ssmd.api.generate.fair_reading import client_of
from ssmd.api.http.body import StrictModel, brief
from ssmd.api.ollama.chat import rfc3339
from ssmd.api.operation import Service
from ssmd.api.own.pulls import BASE, without_paths
from ssmd.engine.host.models import LATEST, Model, untagged
from ssmd.engine.terms import Rejection
from ssmd.installed import ModelError, discard, removable
from ssmd.model.artifact import MANIFEST, Manifest
from ssmd.refit import catalog
from ssmd.text.messages import THINK_END
from ssmd.text.template import MAX_SOURCE

VERSION = "0.13.5"  # of Ollama, whose interface this is; some clients refuse older ones
_FOR_EVER = "9999-12-31T23:59:59Z"  # Ollama has a time for a model that stays, too
_PARAMETERS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)  # in a name: 350m, 0.6b
_THINKS = ("enable_thinking", THINK_END)  # in the template of a model that reasons
T = TypeVar("T")
Name = Annotated[str, Field(min_length=1, max_length=4096)]


class NameBody(StrictModel):
    """A model's name. `name` is its older field. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")
    model: Name | None = None
    name: Name | None = None

    @property
    def asked(self) -> str:
        """Return the model's name. Raises Rejection if the body has no name."""
        found = self.model or self.name
        if found is None:
            raise Rejection("model is required", code="missing_required_parameter", param="model")
        return found


class OllamaModels:
    """The handlers."""

    def __init__(self, on: Service) -> None:
        self._host, self._pool, self._models_dir = on.host, on.pool, on.settings.models_dir

    async def tags(self, request: Request) -> JSONResponse:
        """List a model for each name, which stands for the fastest usable runtime."""
        return JSONResponse({"models": await self._run(request, self._listed)})

    async def show(self, request: Request) -> JSONResponse:
        asked = (await self._pool.body(request, NameBody)).asked
        return JSONResponse(await self._run(request, lambda: _shown(self._host.shelf.find(asked))))

    async def ps(self, request: Request) -> JSONResponse:
        return JSONResponse({"models": await self._run(request, self._loaded)})

    async def delete(self, request: Request) -> Response:
        """Remove an installed model, all runtimes of it. Answers with no body. Raises Rejection."""
        asked = (await self._pool.body(request, NameBody)).asked
        await self._pool.run(partial(self._delete, asked), client_of(request), long=True)
        return Response(status_code=200)

    async def _run(self, request: Request, work: Callable[[], T]) -> T:
        return await self._pool.run(work, client_of(request))

    def _listed(self) -> list[dict[str, Any]]:
        shelf = self._host.shelf
        usable = [model for model in shelf.models() if model.found.manifest is not None]
        firsts = {model.name: model for model in reversed(usable)}
        return [_entry(shelf.preferred(name) or firsts[name]) for name in sorted(firsts)]

    def _loaded(self) -> list[dict[str, Any]]:
        shelf, there = self._host.shelf, {model.id: model for model in self._host.shelf.models()}
        entries = []
        for row in self._host.live().models:
            model = there.get(row["id"])
            if model is None or model.found.manifest is None or row["state"] != "loaded":
                continue
            first = shelf.preferred(model.name) is model
            size = row["resident_bytes"] or row["file_bytes"]
            until = row["idle_until"]
            named = _entry(model, model.name + LATEST if first else model.id)
            del named["modified_at"]
            entries.append(
                {
                    **named,
                    "size": size,
                    "expires_at": _FOR_EVER if until is None else rfc3339(datetime.fromtimestamp(until, UTC)),
                    "size_vram": 0 if row["device"] == "cpu" else size,
                    "context_length": row["context"] or 0,
                }
            )
        return entries

    def _delete(self, asked: str) -> None:
        model = self._host.shelf.installed(asked)
        if untagged(asked).partition("@")[0] != model.name:  # the name of a folder may be that of several models
            said = f"Model not found: {brief(asked)} is another name of {model.name}, which removes nothing; name that"
            raise Rejection(said, status=404, code="model_not_found", param="model")
        try:
            found = [
                one for one in removable(model.name, self._models_dir) if one.path == model.path or "@" not in asked
            ]
            if model.path not in [one.path for one in found]:
                raise ModelError("this daemon was started with its folder; only models in the models folder go")
        except ModelError as err:
            said = f"model {brief(asked)} cannot be removed here: {without_paths(str(err))}"
            raise Rejection(said, code="model_not_removable", param="model") from None
        paths = {one.path for one in found}
        for other in self._host.shelf.models():
            if other.path in paths:
                self._host.unload(other)
        try:
            discard(found)
        except OSError as err:
            said = f"model {brief(asked)} could not be removed: {err.strerror or err}"
            raise Rejection(said, status=503, code="model_not_removable", param="model") from None


async def version(request: Request) -> JSONResponse:
    """Answer with the version of Ollama whose interface this is, and ssmd's own."""
    return JSONResponse({"version": VERSION, "ssmd": __version__})


def _entry(model: Model, name: str = "") -> dict[str, Any]:
    name = name or model.name + LATEST
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(model),
        "size": model.found.nbytes,
        "digest": model.manifest.build,
        "details": _details(model.name, model.manifest),
    }


def _details(name: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": manifest.runtime,
        "family": manifest.family,
        "families": [manifest.family],
        "parameter_size": _parameters(name),
        "quantization_level": manifest.quantization,
    }


def _shown(model: Model) -> dict[str, Any]:
    manifest, template = model.manifest, _template(model)
    arch = manifest.family
    context = {} if manifest.context is None else {f"{arch}.context_length": manifest.context}
    parameters = "\n".join(f"{name:30} {one.text}" for name, one in model.defaults.items())
    return {
        "modelfile": f"# ssmd's models have no Modelfile\nFROM {model.name}{LATEST}\n",
        "parameters": parameters,
        "template": template,
        "details": _details(model.name, manifest),
        "model_info": {
            "general.architecture": arch,
            "general.basename": model.name,
            "general.size_label": _parameters(model.name),
            **context,
            f"{arch}.vocab_size": manifest.vocabulary,
        },
        "capabilities": _capabilities(model.name, template),
        "modified_at": _modified(model),
    }


def _capabilities(name: str, template: str) -> list[str]:
    """Return the abilities of a model. Any chat model gets tools; a template that knows none gets them as text."""
    if name in BASE:
        return ["completion"]
    thinks = any(word in template for word in _THINKS)
    return ["completion", "tools", *(["thinking"] if thinks else [])]


def _template(model: Model) -> str:
    """Return the source of a model's chat template; "" if it cannot be read."""
    try:
        with (model.path / "chat_template.jinja").open(encoding="utf-8-sig") as file:
            return file.read(MAX_SOURCE)
    except (OSError, UnicodeDecodeError):
        return ""


def _modified(model: Model) -> str:
    try:
        at = (model.path / MANIFEST).stat().st_mtime
    except OSError:  # removed just now
        at = 0.0
    return rfc3339(datetime.fromtimestamp(at, UTC))


def _parameters(name: str) -> str:
    """Return the number of a model's parameters as its names have it, such as 350M; "" if they do not."""
    origin = catalog.origin_of(name) if name in catalog.names() else ""
    found = _PARAMETERS.search(name) or _PARAMETERS.search(origin)
    return "" if found is None else found[0].upper()
