"""An operation of the HTTP API: an entry of a front's table. Routes, rights, /openapi.json and docs come from it.

A front is a folder of ssmd/api with a file operations.py. ssmd/api/operations.py puts the fronts' tables together.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ssmd.api.generate.answer import InFlightAnswers, Read
from ssmd.api.generate.fair_reading import FairPool, Gate
from ssmd.api.generate.front import Front
from ssmd.api.http.access import Keys
from ssmd.api.http.errors import ErrorForm
from ssmd.api.http.security import READING, PathRules
from ssmd.api.http.sse import EVENTS as SERVER_SENT
from ssmd.api.http.sse import StreamFormat
from ssmd.config import Settings
from ssmd.daemon.pulls import Pulls
from ssmd.engine.host.host import Host
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain

T = TypeVar("T")
Schema = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]] | ASGIApp
Pool = Literal["chats", "texts", "store", "looks", "health"]
EVENTS = "text/event-stream"

# The statuses of every operation: bad header fields, key, Host, Origin, rights or body length, a daemon that ends.
ALWAYS = {
    400: "The request, or a field of it, is invalid; `param` names it.",
    401: "A key is set, and the request has no key or a wrong one.",
    403: "This Host, Origin or key is not allowed.",
    413: "The body is larger than `SSMD_MAX_BODY_BYTES`.",
    503: "It is not possible now; `retry-after` says when to try again, if that may help.",
}
# The statuses of an operation that reads a JSON body.
BODY = {
    408: "The body did not arrive in time.",
    415: "The body is not `application/json`, or compressed.",
}
GONE = {404: "It does not exist here."}
# The further statuses of an operation that generates.
GENERATION = {
    **GONE,
    422: "The `Idempotency-Key` came before with another body, or at another endpoint.",
    500: "The model failed.",
}
SPACE = {507: "The disk has no room for it."}


class Right(StrEnum):
    """The key that an operation needs, if keys are set. The value is the cell of the table in docs/http.md."""

    NONE = "none"  # if it is a GET too, a link of another site may lead there
    READ = "any"
    CHANGE = "not read-only"
    OWN = "the daemon's own"


@dataclass(frozen=True, eq=False)
class RequestBody:
    """A JSON body."""

    shape: type[BaseModel]  # the model that reads it
    # Known fields that are not supported, each with the values that ask for nothing.
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    more: Mapping[str, Schema] = field(default_factory=dict)  # schemas in place of the model's
    lenient: bool = False  # unknown fields are ignored and named
    optional: bool = False  # it may be left out


@dataclass(frozen=True, eq=False)
class Operation:
    """A method of a path. Raises ValueError if the guard, which reads whole paths, could not enforce the entry."""

    method: str
    path: str  # as Starlette writes it: /v1/models/{model:path}
    endpoint: Callable[[Service], Endpoint]  # builds the handler, once for each daemon
    tag: str
    summary: str
    about: str = ""  # its row in docs/http.md, in markdown, if that is more than the summary
    pool: Pool | None = None  # where its work takes turns; None: it only looks at memory, in the event loop
    key: Right | None = None  # by default READ for a GET, CHANGE for all else
    command: str = ""  # the command that sends it, if `key` is OWN
    status: int = 200  # of a success
    answer: str | tuple[str, ...] = "Rows"  # the name of a success's shape in ssmd/api/shapes.py, or its media types
    also: tuple[str, ...] = ()  # media types of a success beside JSON
    errors: Mapping[int, str] = field(default_factory=dict)  # statuses beside those of every operation
    error: str = "Error"  # the name of an error's shape in ssmd/api/shapes.py
    error_form: ErrorForm | None = None  # of errors at its path and below, in place of OpenAI's
    error_root: str = ""  # the path at which, and below which, errors have that form, in place of its own
    instead: Mapping[int, int] = field(default_factory=dict)  # statuses in place of others, as its form has them
    body: RequestBody | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)  # schemas of parameters, by name
    max_body_bytes: int | None = None  # in place of the setting; such a body is not held in memory
    any_base: bool = False  # also answered below a wrong base URL (ssmd/api/http/security.py)
    files: Callable[[Service], Iterable[str]] | None = None  # every path that `path` stands for, for the guard
    effect: str = ""  # the reason why it cannot be sent just to see what it answers
    endless: bool = False  # its answer does not end by itself

    def __post_init__(self) -> None:
        exceptional = self.right is not _usual(self.method) or self.max_body_bytes is not None
        if exceptional and "{" in self.path and self.files is None:
            raise ValueError(f"{self.method} {self.path}: a path with parameters has the usual key and body limit")
        if (self.right is Right.OWN) != bool(self.command):
            raise ValueError(f"{self.method} {self.path}: `command` belongs to the daemon's own key")

    @property
    def right(self) -> Right:
        return self.key or _usual(self.method)

    @property
    def template(self) -> str:
        """Return the path as OpenAPI writes it."""
        return re.sub(":[a-z]+}", "}", self.path)

    @property
    def bad(self) -> dict[int, str]:
        """Return every status that is not a success, and the reason for it."""
        always = {status: why for status, why in ALWAYS.items() if status != 401 or self.right is not Right.NONE}
        return {self.instead.get(status, status): why for status, why in (always | dict(self.errors)).items()}


def _usual(method: str) -> Right:
    return Right.READ if method in READING else Right.CHANGE


@dataclass(frozen=True, eq=False)
class Service:
    """The objects that the endpoints of one daemon share."""

    host: Host
    settings: Settings
    keys: Keys
    pulls: Pulls
    gate: Gate
    under_way: InFlightAnswers
    stall_s: float  # seconds that a client may leave its answer unread before it is disconnected
    end: Callable[[], None]  # stops the daemon
    operations: tuple[Operation, ...]
    operation: Operation | None = None  # the one whose endpoint is built
    _made: dict[Any, tuple[Any, Pool | None]] = field(default_factory=dict)

    @property
    def store(self) -> Store | None:
        """Return the store of sessions; None if the daemon has none."""
        return None if self.host.writer is None else self.host.writer.store

    @property
    def pool(self) -> FairPool:
        """Return the pool in which the operation's work takes turns. Raises ValueError if its entry names none."""
        pool = None if self.operation is None else self.operation.pool
        if pool is None or pool == "health":
            raise ValueError(f"the entry of {self.operation and self.operation.path} names no pool of turns")
        found: FairPool = getattr(self.gate, pool)
        return found

    def one(self, make: Callable[[Service], T]) -> T:
        """Return what `make` makes of this service: one object for all operations of a pool that ask for it.

        Raises ValueError if operations of two pools ask.
        """
        pool = None if self.operation is None else self.operation.pool
        if make not in self._made:
            self._made[make] = make(self), pool
        made, its = self._made[make]
        if its != pool:
            raise ValueError(f"{make.__name__} is used in two pools, {its} and {pool}")
        found: T = made
        return found

    def front(self, read: Read, form: StreamFormat = SERVER_SENT) -> Front:
        """Return an endpoint that generates. Its entry names the pool.

        read: makes a request of a body's fields. form: of its streams.
        """
        return self.front_for(lambda domain: read, form)

    def front_for(self, read_for: Callable[[Domain], Read], form: StreamFormat = SERVER_SENT) -> Front:
        """Return an endpoint that generates, and whose bodies are read for the caller's domain, as `front`."""
        if self.operation is None or self.operation.pool != "chats":
            raise ValueError("an operation that generates takes turns in the pool of chats")
        return Front(self.host, self.gate, read_for, self.under_way, self.stall_s, self.settings.stream_comment, form)

    def of(self, operation: Operation) -> Service:
        """Return the service as an operation's endpoint gets it."""
        return replace(self, operation=operation)


def routes(service: Service) -> list[Route]:
    """Return the routes of a service's operations. Raises what building an endpoint raises."""
    return [Route(one.path, one.endpoint(service.of(one)), methods=[one.method]) for one in service.operations]


def path_rules(service: Service) -> PathRules:
    """Return what the guard has to know of a service's operations."""
    by_path: dict[str, list[Operation]] = {}
    for one in service.operations:
        for path in [one.path] if one.files is None else one.files(service.of(one)):
            by_path.setdefault(path, []).append(one)

    def where(holds: Callable[[Operation], bool]) -> frozenset[str]:
        return frozenset(path for path, ones in by_path.items() if all(map(holds, ones)))

    return PathRules(
        keyless=where(lambda one: one.right is Right.NONE),
        linked=where(lambda one: one.right is Right.NONE and one.method in READING),
        for_readers=where(lambda one: one.right is Right.READ and one.method not in READING),
        own={(one.method, one.path): one.command for one in service.operations if one.command},
        body_limits={one.path: one.max_body_bytes for one in service.operations if one.max_body_bytes is not None},
        any_base=where(lambda one: one.any_base and "{" not in one.path),
        any_base_below=tuple(path.partition("{")[0] for path in where(lambda one: one.any_base and "{" in one.path)),
        error_forms={
            one.error_root or one.path: one.error_form for one in service.operations if one.error_form is not None
        },
    )
