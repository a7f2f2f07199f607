"""/ssmd/v1/pulls, /ssmd/v1/catalog and /ssmd/v1/runtimes: models that ssmd knows by name, and their pulls.

The runtimes are those, with their devices, that can be used here, as `ssmd doctor` finds them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from ssmd.api.generate.fair_reading import FairPool, client_of, shared
from ssmd.api.http.body import StrictModel, brief
from ssmd.api.operation import Service
from ssmd.daemon.pulls import MOST, Pulls, TooManyPulls
from ssmd.engine.host.host import Host
from ssmd.engine.terms import Rejection
from ssmd.families.registry import family_of
from ssmd.machine.spelling import meant
from ssmd.refit import catalog
from ssmd.refit.graphfile import StrippedGraph
from ssmd.refit.install import serving
from ssmd.runtime.devices import RuntimeStatus, find
from ssmd.runtime.info import target_for, target_of, targets

RETRY_AFTER_S = 30
# Base models: they continue a text, were not made to answer, and have no chat template.
BASE = frozenset({"mamba-130m", "mamba2-130m"})
# The purpose of each model, from its own card.
_ABOUT = {
    "falcon-h1-0.5b-instruct": "chat, several languages",
    "granite-4.0-h-1b": "chat, tools, long texts; several languages",
    "granite-4.0-h-350m": "chat, tools, long texts; several languages",
    "granite-4.0-h-micro": "chat, tools, long texts; several languages",
    "lfm2-1.2b": "chat, facts from texts, agents; several languages",
    "lfm2-2.6b": "chat, facts from texts, agents; several languages",
    "lfm2-350m": "chat, facts from texts; several languages",
    "lfm2-700m": "chat, facts from texts; several languages",
    "lfm2-8b-a1b": "chat, facts from texts, agents; several languages",
    "lfm3-1.7b": "chat, agents, tools",
    "mamba-130m": "English",
    "mamba2-130m": "English",
    "qwen3-0.6b": "chat with reasoning, tools; many languages",
    "qwen3-1.7b": "chat with reasoning, tools; many languages",
    "qwen3.5-0.8b": "chat with reasoning on request, tools; many languages",
    "qwen3.5-2b": "chat with reasoning on request, tools; many languages",
    "qwen3.5-4b": "chat with reasoning on request, tools; many languages",
    "smollm2": "chat and short texts in English; quick on any machine",
}

PACKED = ("f16", "f32", "int4", "int8")  # of runtimes that pack weights without a graph

KEPT_S = 60.0
LIMIT_S = 20.0  # a client waits for 30
# Messages hide paths, which may name this computer's user. Paths of system devices stay: they show what is missing.
_ROOT = r"(?<![\w/:.])(?!/(?:dev|proc|sys)/)(?:/|~/|[A-Za-z]:[\\/])"
_PATH = re.compile(rf"(?<='){_ROOT}[^']+(?=')|(?<=\"){_ROOT}[^\"]+(?=\")|{_ROOT}[^\s'\"`,;:()]+")


class PullBody(StrictModel):
    model: Annotated[str, Field(min_length=1, max_length=200)]
    runtime: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    quantization: Annotated[str, Field(min_length=1, max_length=16)] | None = None


class Catalog:
    """The handlers. Those that look at runtimes share one look (`Runtimes`)."""

    def __init__(self, on: Service) -> None:
        self._host, self._pulls, self._pool = on.host, on.pulls, on.pool
        self._runtimes = Runtimes(on.pool)

    async def listing(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": rows(self._pulls)})

    async def begin(self, request: Request) -> JSONResponse:
        wanted = await self._pool.body(request, PullBody)
        return JSONResponse(await self._pool.run(partial(begin, self._pulls, wanted), client_of(request)), 202)

    async def cancel(self, request: Request) -> JSONResponse:
        id_ = request.path_params["id"]
        row = self._pulls.cancel(id_)
        if row is None:
            raise Rejection(f"there is no pull {brief(id_)}", status=404, code="pull_not_found")
        return JSONResponse(_told(row))

    async def known(self, request: Request) -> JSONResponse:
        found = await self._runtimes.found()
        entries = await self._pool.run(partial(_catalog, self._host, found), client_of(request))
        return JSONResponse({"object": "list", "data": entries})

    async def runtimes(self, request: Request) -> JSONResponse:
        found = await self._runtimes.found()
        return JSONResponse({"object": "list", "looked_at": self._runtimes.looked_at, "data": found})


def begin(pulls: Pulls, wanted: PullBody) -> dict[str, Any]:
    """Begin a pull, or find it under way, and return its row. Raises Rejection."""
    _check(wanted)
    try:
        return _told(pulls.begin(wanted.model, wanted.runtime, wanted.quantization))
    except TooManyPulls:
        raise Rejection(
            f"{MOST} models wait to be pulled already; try again later",
            status=503,
            code="pulls_full",
            retry_after_s=RETRY_AFTER_S,
        ) from None


def rows(pulls: Pulls) -> list[dict[str, Any]]:
    """Return a row for each pull, without the paths of this computer's user."""
    return [_told(row) for row in pulls.rows()]


def row(pulls: Pulls, id_: str) -> dict[str, Any] | None:
    """Return the row of a pull, as `rows`; None if no pull has that id."""
    found = pulls.row(id_)
    return None if found is None else _told(found)


def _told(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"error": None if row["error"] is None else without_paths(row["error"])}


def _check(wanted: PullBody) -> None:
    """Check that ssmd knows the model and can make it for the runtime. Raises Rejection."""
    names = catalog.names()
    if wanted.model not in names:
        hint = meant(wanted.model, names)
        raise Rejection(
            f"model {brief(wanted.model)} cannot be pulled here; {hint}those that can: {', '.join(names)}",
            code="invalid_value",
            param="model",
        )
    possible = _runtimes_of(wanted.model)
    if wanted.runtime is not None and wanted.runtime not in possible:
        raise Rejection(
            f"runtime {brief(wanted.runtime)}: {wanted.model} can be pulled for {', '.join(possible)}",
            code="invalid_value",
            param="runtime",
        )
    where = f" for {wanted.runtime}" if wanted.runtime is not None else ""
    forms = _quantizations_of(wanted.model, catalog.on_processor() if wanted.runtime is None else [wanted.runtime])
    if wanted.quantization is not None and wanted.quantization not in forms:
        raise Rejection(
            f"quantization {brief(wanted.quantization)}: {wanted.model} can be pulled{where} in {', '.join(forms)}",
            code="invalid_value",
            param="quantization",
        )


def _quantizations_of(name: str, runtimes: Sequence[str]) -> list[str]:
    """List the quantizations in which `ssmd pull` makes a model for one of the runtimes."""
    packed = PACKED if any(target_of(runtime)[0].packs for runtime in runtimes) else ()
    return sorted({catalog.quantization_of(f) for r in runtimes for f in catalog.files(r, name)}.union(packed))


def _runtimes_of(name: str) -> list[str]:
    """List the runtimes for which `ssmd pull` makes a model of this name."""
    return [target for target in targets() if name in catalog.names(target) or target in _packing(name)]


@cache
def _packing(name: str) -> frozenset[str]:
    """Return the runtimes that pack the weights of a model without a graph, and serve all its parts."""
    config = catalog.config_of_graph(name)
    family = family_of(config)
    return frozenset(t for t in serving(family.plan(family.parse(config))) if target_of(t)[0].packs)


def _catalog(host: Host, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each model, as this computer can use it. found: the rows of its runtimes."""
    from ssmd.hub.wheel import package_bytes  # here, as the hub's client reads the environment, and takes its time

    there = [(model.name, model.found.manifest) for model in host.shelf.models()]
    entries = []
    for name in catalog.names():
        family, origin = _about(name)
        mine = [manifest for other, manifest in there if other == name and manifest is not None]
        made = []
        for runtime in _runtimes_of(name):
            info, target = target_of(runtime)
            problem = _problem(info.name, target.device_class, found)
            here = any(target_for(m.runtime, m.device_class) == target for m in mine)
            row = {"runtime": runtime, "installed": here, "usable": problem is None, "problem": problem}
            row["quantizations"] = _quantizations_of(name, [runtime])
            nbytes, memory = catalog.sizes_of(name, runtime) or (None, None)
            made.append(row | {"bytes": nbytes, "memory_bytes": memory})
        fetched = package_bytes(name) or catalog.download_of(name)
        about = {"about": _ABOUT.get(name), "base": name in BASE, "download_bytes": fetched}
        entries.append({"name": name, "family": family, "origin": origin, **about, "runtimes": made})
    return entries


@cache
def _about(name: str) -> tuple[str, str]:
    """Return (family, name on the hub) of a model, from its graph."""
    header = StrippedGraph.open(catalog.files(name=name)[0]).header
    return header.family, header.origin


def _problem(runtime: str, device: str, found: list[dict[str, Any]]) -> str | None:
    """Return why a runtime cannot be used on a device here ("": on any); None if it can."""
    row = next((row for row in found if row["name"] == runtime), None)
    if row is None:
        return f"runtime {runtime} is not installed"
    if not device or row["problem"]:
        return str(row["problem"]) if row["problem"] else None
    one = next((one for one in row["devices"] if one["name"] == device), None)
    if one is None:
        return f"runtime {runtime} has no device {device}"
    return None if one["problem"] is None else str(one["problem"])


class Runtimes:
    """The runtimes found last. While one request looks for them, others wait for its result.

    pool: of looks. looked_at: seconds since 1970.
    """

    def __init__(self, pool: FairPool) -> None:
        self._pool = pool
        self._looking = asyncio.Lock()
        self._found: list[dict[str, Any]] = []
        self.looked_at = 0.0
        self._fresh_until = 0.0  # by the monotonic clock

    async def found(self) -> list[dict[str, Any]]:
        """Return the runtimes' rows, at most KEPT_S seconds old."""
        async with self._looking:
            if time.monotonic() >= self._fresh_until:
                found = await self._pool.run(partial(find, limit_s=LIMIT_S), shared("runtimes"), long=True)
                self._found, self.looked_at = [_fields(one) for one in found], time.time()
                self._fresh_until = time.monotonic() + KEPT_S
        return self._found


def _fields(found: RuntimeStatus) -> dict[str, Any]:
    devices = [
        {"name": d.name, "description": d.description, "usable": not d.why_not, "problem": without_paths(d.why_not)}
        for d in found.devices
    ]
    return {
        "name": found.name,
        "usable": bool(found.usable),
        "problem": without_paths(found.why_not),
        "devices": devices,
    }


def without_paths(problem: str) -> str | None:
    """Return a reason without the paths in it; None if it is empty."""
    return _PATH.sub("…", problem) or None
