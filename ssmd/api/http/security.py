"""The guard: Host and Origin lists, the API keys, the body limit, and a request id on every answer.

Pure ASGI, outside of everything else, so that nothing is routed, parsed or read before it was allowed.

- Host: a web page can make its own name point to 127.0.0.1 (DNS rebinding); its requests then carry that name. Only
  the names allowed are answered.
- Origin: a web page can post to 127.0.0.1 without being able to read the answer. Only the daemon's own origin and
  the allowed ones are served, and only the allowed ones may read (CORS). An image or a link of a page carries no
  Origin; browsers say then that the page is another one (Sec-Fetch-Site).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssmd.api.http import access
from ssmd.api.http.access import IN_KEY_HEADER, AccessLog, Caller, Keys, set_caller
from ssmd.api.http.body import brief
from ssmd.api.http.errors import HANDLERS, ErrorForm, error_response, set_form
from ssmd.config import Settings
from ssmd.engine.request import label
from ssmd.engine.terms import Rejection

log = logging.getLogger(__name__)
PREFLIGHT_MAX_AGE_S = 600
DRAIN_S = 2.0
FREE_BYTES = 64 << 10
RETRY_AFTER_S = 5
# On every answer: browsers keep to its content-type, and no other site's page may embed it.
_ALWAYS = [(b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin")]
_EXPOSED = b"x-request-id, request-id, x-ssmd-session, x-ssmd-ignored, idempotent-replayed, retry-after"
READING = ("GET", "HEAD")
_ENDING = Rejection("the server is shutting down", status=503, code="shutting_down", retry_after_s=RETRY_AFTER_S)
_WHOLE_URL = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}( *, *[A-Za-z0-9-]{1,64}){0,63}")


@dataclass(frozen=True)
class PathRules:
    """The paths, all without parameters, that have rules of their own. ssmd/api/operation.py builds them."""

    keyless: frozenset[str] = frozenset()  # need no key
    linked: frozenset[str] = frozenset()  # of `keyless`: a link of another site may lead there
    for_readers: frozenset[str] = frozenset()  # a read-only key may send any method there
    # The methods and paths that only the daemon's own key may use: the command that does.
    own: Mapping[tuple[str, str], str] = field(default_factory=dict)
    # Bytes, by path, in place of `max_body_bytes`; bodies of these paths are not held in memory.
    body_limits: Mapping[str, int] = field(default_factory=dict)
    any_base: frozenset[str] = frozenset()  # also found below a wrong base URL
    any_base_below: tuple[str, ...] = ()  # the same for all paths that begin with one of these
    # The form of errors, by path, in place of OpenAI's; for paths below it too.
    error_forms: Mapping[str, ErrorForm] = field(default_factory=dict)

    def form_of(self, path: str) -> ErrorForm | None:
        """Return the form of errors at a path; None for OpenAI's."""
        return next((form for at, form in self.error_forms.items() if path == at or path.startswith(f"{at}/")), None)

    def canonical(self, path: str) -> str:
        """Return the path that a client with a wrong base URL means; any other path as it is.

        Such are `//v1/models`, `/v1/v1/models`, `/v1/models/`, `/chat/completions`, `/api/v1/chat/completions`, and
        `/v1/api/tags`.
        """
        if path in self.any_base:
            return path
        means = re.sub("/{2,}", "/", path).rstrip("/")
        if (ollamas := re.sub("^(/v1|/api)*/api/", "/api/", means)) in self.any_base:
            return ollamas
        means = re.sub("^(/api|/openai|/anthropic)?(/v1)*/", "/v1/", means)
        return means if means in self.any_base or means.startswith(self.any_base_below) else path


@dataclass(frozen=True)
class Rules:
    """The rules by which requests are accepted. "*" in `hosts` or `origins` allows any."""

    hosts: frozenset[str]  # as in a Host header, lower case, without port
    origins: frozenset[str] = frozenset()
    keys: Keys = field(default_factory=Keys)
    max_body_bytes: int = 32 << 20
    bodies_bytes: int = 256 << 20  # limit of all bodies under way together that are longer than FREE_BYTES
    paths: PathRules = field(default_factory=PathRules)

    @staticmethod
    def of(settings: Settings, keys: Keys, paths: PathRules | None = None) -> Rules:
        return Rules(
            hosts=frozenset(settings.allowed_hosts),
            origins=frozenset(settings.allowed_origins),
            keys=keys,
            max_body_bytes=settings.max_body_bytes,
            bodies_bytes=max(256 << 20, 2 * settings.max_body_bytes),
            paths=paths or PathRules(),
        )


def guarded(routes: Sequence[Route], rules: Rules, log: AccessLog | None = None) -> ASGIApp:
    """Return the app of `routes`, behind the guard, with errors in their protocols' forms. log: a line a request."""
    app = Starlette(routes=routes, exception_handlers=dict(HANDLERS))
    app.router.redirect_slashes = False
    guard = Security(app, rules)
    return guard if log is None else _LoggedApp(log, guard, routes)


class _LoggedApp:
    def __init__(self, log: AccessLog, guard: Security, routes: Sequence[Route]) -> None:
        self._log, self._guard, self._routes = log, guard, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._log.answer(self._guard, self._routes, scope, receive, send)
        else:
            await self._guard(scope, receive, send)


class Security:
    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules, self._paths = rules, rules.paths
        self._bodies = _Bodies(rules.bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # nothing here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/"):
            _take_host(scope)
        scope["path"] = self._paths.canonical(scope["path"])  # before the checks, which depend on it
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        readable = origin != "" and not self._rules.origins.isdisjoint({origin, "*"})  # by a script of that origin
        request_id = f"req_{secrets.token_hex(12)}"
        identity: list[tuple[bytes, bytes]] = [(b"x-request-id", request_id.encode()), *_ALWAYS]
        if (form := self._paths.form_of(scope["path"])) is not None:
            set_form(scope, form, request_id)
            identity.append((b"request-id", request_id.encode()))
        if readable:
            identity += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]

        intake = _Intake(receive, headers, None if scope["path"] in self._paths.body_limits else self._bodies)

        begun = False

        async def send_identified(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                # Unread bytes of a body must not be taken for the next request, nor be waited for.
                end = [] if intake.whole else [(b"connection", b"close")]
                message["headers"] = [*message.get("headers", ()), *identity, *end]
            elif not intake.whole and not message.get("more_body", False):
                # A client that is still sending would see a reset, and not the answer, if the connection ended now.
                await send({**message, "more_body": True})
                await intake.drain()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        where = scope["path"]
        try:
            self._check_host(headers)
            self._check_origin(scope, headers, readable)
            if readable and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(headers)(scope, receive, send_identified)
                return
            keyless = where in self._paths.keyless
            look = Caller if keyless else partial(self._rules.keys.caller, _authorization(headers))
            caller = look()
            where = label(where, caller.name)
            set_caller(scope, caller, look)
            self._check_right(scope, caller)
            intake.limit = self._body_limit(scope["path"], headers)
            self._check_own(scope, caller)
        except Rejection as err:
            challenge = {"www-authenticate": "Bearer"} if err.status == 401 else {}
            access.note(scope, code=err.code)
            log.info("refused %s %s: %s", scope["method"], where, err.message)
            await error_response(err, scope, challenge)(scope, receive, send_identified)
            return
        try:
            await self._app(scope, intake.receive, send_identified)
        except ClientDisconnect:
            log.info("%s %s: the client went away before it had sent all", scope["method"], where)
        except asyncio.CancelledError:  # the server ends, and has waited
            log.info("%s %s: not done when the server ended", scope["method"], where)
            if not begun:
                intake.whole = True  # nothing more is waited for
                access.note(scope, code=_ENDING.code)
                await error_response(_ENDING, scope)(scope, receive, send_identified)
        finally:
            intake.forget()

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        name = _host_name(given[0]) if len(given) == 1 else None
        if name is not None and (name in self._rules.hosts or "*" in self._rules.hosts):
            return
        raise Rejection(
            f"Host {brief(', '.join(given))} is not allowed; add it to SSMD_ALLOWED_HOSTS if it is this machine's name",
            status=403,
            code="host_not_allowed",
        )

    def _check_origin(self, scope: Scope, headers: Headers, readable: bool) -> None:
        given = headers.getlist("origin")
        own = f"{scope['scheme']}://{headers.get('host', '')}".lower()
        if not given:
            self._check_site(scope["path"], headers)
            return
        if len(given) == 1 and (readable or given[0].lower() == own):
            return
        raise Rejection(
            f"Origin {brief(', '.join(given))} is not allowed; add it to SSMD_ALLOWED_ORIGINS if that page may ask",
            status=403,
            code="origin_not_allowed",
        )

    def _check_site(self, path: str, headers: Headers) -> None:
        """Refuse a request that a page of another origin makes a browser send. Links to open paths are allowed."""
        followed = path in self._paths.linked and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin") or followed:
            return
        raise Rejection(
            "the browser sent this for a page of another site; add its origin to SSMD_ALLOWED_ORIGINS to allow it",
            status=403,
            code="origin_not_allowed",
        )

    def _check_right(self, scope: Scope, caller: Caller) -> None:
        if caller.read_only and scope["method"] not in READING and scope["path"] not in self._paths.for_readers:
            raise Rejection(
                f"the key {caller.name} is read-only: it allows only {' and '.join(READING)}",
                status=403,
                code="read_only_key",
            )

    def _check_own(self, scope: Scope, caller: Caller) -> None:
        command = self._paths.own.get((scope["method"], scope["path"]))
        if command is not None and not caller.own:
            raise Rejection(
                f"only the user who started the daemon may do this; run `{command}` as that user",
                status=403,
                code="own_token_needed",
            )

    def _body_limit(self, path: str, headers: Headers) -> int:
        limit = self._paths.body_limits.get(path, self._rules.max_body_bytes)
        declared = headers.get("content-length", "0")
        if not re.fullmatch(r"[0-9]{1,18}", declared):
            raise Rejection(f"content-length {brief(declared)} is not a size", code="invalid_content_length")
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have used the other one
            raise Rejection("content-length and transfer-encoding exclude each other", code="invalid_content_length")
        if int(declared) > limit:
            raise _too_large(limit)
        return limit


@dataclass
class _Bodies:
    """Bytes of all requests under way. A client that declares much and sends little takes nothing from others."""

    most: int
    held: int = 0


class _Intake:
    """A request's body on its way in. Its bytes are counted: a chunked one has no declared length."""

    def __init__(self, receive: Receive, headers: Headers, bodies: _Bodies | None) -> None:
        self._receive = receive
        self._bodies = bodies
        self._held = 0
        self._seen = 0
        self._asks_first = "expect" in headers
        self.limit = 0
        self.whole = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self.limit:
                raise _too_large(self.limit)
            self._hold()
            self.whole = not message.get("more_body", False)
        return message

    def _hold(self) -> None:
        if self._bodies is None:
            return
        more = max(0, self._seen - FREE_BYTES) - self._held
        if self._bodies.held + more > self._bodies.most:
            raise Rejection(
                f"the bodies of the requests under way are {self._bodies.most} bytes together; try again later",
                status=503,
                code="bodies_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self._bodies.held += more
        self._held += more

    def forget(self) -> None:
        """Make room for other bodies, because the request has its answer."""
        if self._bodies is not None:
            self._bodies.held, self._held = self._bodies.held - self._held, 0

    async def drain(self) -> None:
        """Read and discard the bytes that still come, for a moment."""
        if self._asks_first:  # it sends nothing before it gets "100 Continue"
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while not self.whole:
                    message = await self._receive()
                    self.whole = message["type"] != "http.request" or not message.get("more_body", False)


def _take_host(scope: Scope) -> None:
    """Take the host out of a target that is a whole URL, as clients send it that take the daemon for a proxy.

    It counts in place of the Host header (RFC 9112, 3.2.2).
    """
    found = _WHOLE_URL.fullmatch(scope["raw_path"])
    if found is not None:
        scope["raw_path"] = found[2] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))
        scope["headers"] = [
            (b"host", found[1]),
            *((name, value) for name, value in scope["headers"] if name != b"host"),
        ]


def _authorization(headers: Headers) -> str:
    """Return the Authorization header; without a bearer's, the key that Anthropic's clients send in `x-api-key`."""
    given = headers.get("authorization", "")
    if "x-api-key" in headers and not given.lower().startswith("bearer "):
        return f"{IN_KEY_HEADER} {headers['x-api-key']}"
    return given


def _too_large(limit: int) -> Rejection:
    return Rejection(
        f"the request body is larger than the {limit} bytes allowed (SSMD_MAX_BODY_BYTES)",
        status=413,
        code="body_too_large",
    )


def _host_name(host: str) -> str | None:
    """Return the host without its port, in lower case; None if it is invalid."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253}))(?::[0-9]{1,5})?", host)
    return None if match is None else (f"[{match[1]}]" if match[1] else match[2].rstrip(".")).lower()


def _preflight(headers: Headers) -> Response:
    asked = headers.get("access-control-request-headers", "")
    allowed = {
        "access-control-allow-methods": "GET, POST, PATCH, DELETE",
        "access-control-max-age": str(PREFLIGHT_MAX_AGE_S),
    }
    if _HEADER_NAMES.fullmatch(asked):
        allowed["access-control-allow-headers"] = asked
    if headers.get("access-control-request-private-network") == "true":  # of a page on a public site, for loopback
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)
