"""The app: the HTTP interface of a host of models."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp

from ssmd.api import openapi
from ssmd.api.anthropic import messages
from ssmd.api.anthropic.errors import error_form
from ssmd.api.generate import in_flight
from ssmd.api.generate.fair_reading import Gate
from ssmd.api.generate.in_flight import InFlightAnswers
from ssmd.api.http.access import AccessLog
from ssmd.api.http.keys import Keys
from ssmd.api.http.security import Rules, guarded
from ssmd.api.openai import chat, completions, tokenize, unserved
from ssmd.api.own import metrics, models, pulls, sessions, status, tickets
from ssmd.api.own.page import Page
from ssmd.api.own.pulls import Runtimes
from ssmd.config import Settings
from ssmd.daemon.pulls import Pulls
from ssmd.engine.host.host import Host

STALL_S = 30.0


def create_app(
    host: Host,
    settings: Settings,
    keys: Keys | None = None,
    *,
    access: AccessLog | None = None,
    stall_s: float = STALL_S,
    end: Callable[[], None] = lambda: None,
) -> ASGIApp:
    """Build the ASGI app. Raises SettingsError.

    keys: by default those of the settings. access: gets a line for each request. stall_s: seconds that a client may
    leave its answer unread before it is disconnected. end: called to stop the daemon.
    """
    keys = Keys.of(settings) if keys is None else keys
    gate, under_way = Gate(host.runs_others), InFlightAnswers()
    store, usable = None if host.writer is None else host.writer.store, Runtimes(gate.looks)
    pulling, page = Pulls(settings.models_dir, settings.data_dir, offline=settings.offline), Page.read()
    routes = [
        *page.routes(),
        *chat.routes(
            host,
            gate,
            under_way,
            stall_s,
            settings.stream_comment,
            truncate=settings.truncation == "auto",
            strict=settings.strict,
        ),
        *messages.routes(
            host,
            gate,
            under_way,
            stall_s,
            settings.stream_comment,
            truncate=settings.truncation == "auto",
            strict=settings.strict,
        ),
        *completions.routes(host, gate, under_way, stall_s, settings.stream_comment, strict=settings.strict),
        *tokenize.routes(host, gate.texts, strict=settings.strict),
        *unserved.routes(),
        *in_flight.routes(under_way, stall_s),
        *models.routes(host, gate.looks),
        *status.routes(host, gate),
        *metrics.routes(host, store, pulling, stall_s, gate.looks),
        *pulls.runtime_routes(usable),
        *pulls.routes(host, pulling, usable, gate.looks),
        *sessions.routes(host, store, gate.store),
        *openapi.routes(gate.looks),
        *status.stop_routes(end),
        *tickets.routes(keys, gate.looks),
    ]
    rules = Rules.of(settings, keys, sessions.BODY_LIMITS, page.paths | openapi.PATHS, {messages.PATH: error_form})
    return guarded(routes, rules, access)
