"""/health reports whether this daemon answers and stores its answers; it needs no key. /ssmd/v1/stop ends the daemon,
as a signal does, for the commands of its own user alone.
"""

from __future__ import annotations

import logging

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse

from ssmd import __version__
from ssmd.api.operation import Endpoint, Service

# For any client, also without a key, so without a path.
_ADVICE = {
    "disk_full": "the disk is full: turns are stored without their states, or not at all; free some space, or remove "
    "sessions with `ssmd session rm`",
    "read_only": "the session store's file system is read-only, and turns are not stored: see the system's log, and "
    "remount it read-write",
    "locked": "another process writes to the session store and does not end: turns are not stored",
    "damaged": "the session store is damaged, and turns are not stored: stop the daemon, then `ssmd session check "
    "--repair`",
    "replaced": "the session store's file was removed or replaced while the daemon used it, and turns are not stored: "
    "put the old files back, or restart the daemon to use the present ones",
    "late": "the disk is too slow: turns are stored without their states, or not at all",
    "error": "turns are not stored: the daemon's log says why",
}
_REMOTE_ADVICE = {
    "unreachable": "the remote cannot be used: conversations are stored here, and are sent when it is back; the "
    "daemon's log says why",
    "over_quota": "this machine has as many bytes in the remote as it may: new turns wait here",
    "key_refused": "this machine's key cannot be used, so that nothing is sent: conversations are stored here; the "
    "daemon's log says what to do",
    "outbox_full": "the remote was away for too long: new conversations stay here until `ssmd session push` sends them",
}
log = logging.getLogger(__name__)


def health(on: Service) -> Endpoint:
    """Build the endpoint of /health."""
    host = on.host

    def look() -> JSONResponse:
        draining, starting, problem = host.draining or host.leaving, host.starting, host.problem
        model = host.foremost()
        manifest = None if model is None else model.found.manifest
        fields: dict[str, object] = {
            "status": "shutting_down" if draining else "starting" if starting else "degraded" if problem else "ok",
            "model": None if model is None else model.name,
            "runtime": None if manifest is None else manifest.runtime,
            "version": __version__,
            "loading": host.loading(),
            "healed": host.metrics.damages(),
        }
        if host.writer is not None and (remote := host.writer.remote) is not None:
            trouble = remote.problem
            state: dict[str, object] = {"status": trouble or "ok", "waiting": remote.waiting}
            fields["remote"] = state | ({"message": _REMOTE_ADVICE[trouble]} if trouble else {})
        if problem:
            fields |= {"reason": problem, "message": _ADVICE[problem]}
        return JSONResponse(fields, 503 if draining or starting else 200)

    async def answer(request: Request) -> JSONResponse:
        return await on.gate.health(look)

    return answer


def stop(on: Service) -> Endpoint:
    """Build the endpoint that ends the daemon once its response was sent."""

    async def begin() -> None:
        on.end()

    async def answer(request: Request) -> JSONResponse:
        log.info("`ssmd stop` was called: finishing running requests")
        drain = {"drain_s": on.settings.drain} if on.settings.drain else {}
        return JSONResponse({"status": "shutting_down", **drain}, 202, background=BackgroundTask(begin))

    return answer
