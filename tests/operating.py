"""An app of some operations without a host, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from starlette.routing import Route
from starlette.types import ASGIApp

from ssmd.api.generate.answer import InFlightAnswers
from ssmd.api.generate.fair_reading import Gate
from ssmd.api.http.access import Keys
from ssmd.api.http.security import Rules, guarded
from ssmd.api.operation import Operation, Service, path_rules, routes
from ssmd.config import Settings
from ssmd.daemon.pulls import Pulls
from ssmd.engine.host.host import Host


def service_of(
    operations: Iterable[Operation],
    settings: Settings,
    keys: Keys | None = None,
    *,
    end: Callable[[], None] = lambda: None,
) -> Service:
    """Return a service without a host."""
    return Service(
        host=cast(Host, None),
        settings=settings,
        keys=Keys.of(settings) if keys is None else keys,
        pulls=Pulls(Path(), Path(), offline=True),
        gate=Gate(lambda client: False),
        under_way=InFlightAnswers(),
        stall_s=30.0,
        end=end,
        operations=tuple(operations),
    )


def app_of(service: Service, *more: Route) -> ASGIApp:
    """Return the app of a service and of more routes, behind the guard."""
    rules = Rules.of(service.settings, service.keys, path_rules(service))
    return guarded([*routes(service), *more], rules)
