"""The app: the HTTP interface of a host of models."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp

from ssmd.api.generate.answer import InFlightAnswers
from ssmd.api.generate.fair_reading import Gate
from ssmd.api.http.access import AccessLog, Keys
from ssmd.api.http.security import Rules, guarded
from ssmd.api.operation import Service, path_rules, routes
from ssmd.api.operations import OPERATIONS
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
    service = Service(
        host=host,
        settings=settings,
        keys=Keys.of(settings) if keys is None else keys,
        pulls=Pulls(settings.models_dir, settings.data_dir, offline=settings.offline),
        gate=Gate(host.runs_others),
        under_way=InFlightAnswers(),
        stall_s=stall_s,
        end=end,
        operations=OPERATIONS,
    )
    return guarded(routes(service), Rules.of(settings, service.keys, path_rules(service)), access)
