"""The checks before a request is answered: Host, Origin, key and body limit, over a real socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from daemon import soon
from serving import Served, serving
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from ssmd.api.http import security
from ssmd.api.http.access import Keys
from ssmd.api.http.body import parse_object, read_body
from ssmd.api.http.security import PathRules, Rules, guarded
from ssmd.config import Settings

KEY = "correct-horse-battery"
LIMIT = 10_000
WIDE = 1 << 20
APP = "vscode-webview://1abcD"


async def _echo(request: Request) -> JSONResponse:
    return JSONResponse({"fields": len(parse_object(await read_body(request)))})


async def _ok(request: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


async def _crash(request: Request) -> JSONResponse:
    raise ZeroDivisionError


def _app(*, api_key: str | None = None, hosts: str | None = None) -> ASGIApp:
    routes = [
        Route("/echo", _echo, methods=["POST"]),
        Route("/large", _echo, methods=["POST"]),
        Route("/health", _ok),
        Route("/list", _ok),
        Route("/crash", _crash),
        Route("/two", _ok),
        Route("/two", _ok, methods=["POST", "DELETE"]),
    ]
    rules = Rules(
        hosts=frozenset({hosts} if hosts else {"localhost", "127.0.0.1", "[::1]", "box.lan"}),
        origins=frozenset({"https://chat.example", APP}),
        keys=Keys.of(Settings(api_key=api_key)),
        max_body_bytes=LIMIT,
        paths=PathRules(frozenset({"/health"}), frozenset({"/health"}), body_limits={"/large": 10 * LIMIT}),
    )
    return guarded(routes, rules)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(_app()) as one:
        yield one


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(_app(api_key=KEY)) as one:
        yield one


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:7763", "[::1]:1", "box.lan.", "Box.LAN:80"])
def test_allowed_hosts_are_answered(served: Served, host: str) -> None:
    assert served.ask("GET", "/health", headers={"host": host}).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "a b", "[::2]"])
def test_other_hosts_are_refused(served: Served, host: str) -> None:
    answer = served.ask("GET", "/health", headers={"host": host})
    assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    assert "SSMD_ALLOWED_HOSTS" in answer.error["message"]


def test_the_host_of_a_whole_url_counts(served: Served) -> None:
    for url, status in (
        ("http://evil.example/health", 403),
        ("HTTP://box.lan:80/he%61lth", 200),
        ("https://localhost/health?a", 200),
    ):
        for host in ("localhost", "evil.example"):
            assert served.ask("GET", url, headers={"host": host}).status == status, (url, host)
    for odd in ("http://localhost@evil.example/health", "http://localhost%2f@evil.example/health", "http:///health"):
        assert served.ask("GET", odd, headers={"host": "localhost"}).status == 403, odd
    for other in ("http://localhost", "http:/localhost/health", "ftp://localhost/health", "*"):
        assert served.ask("GET", other, headers={"host": "localhost"}).status == 404, other


def test_any_host_is_answered_where_all_are_allowed() -> None:
    with serving(_app(hosts="*")) as one:
        assert one.ask("GET", "/health", headers={"host": "what.ever:1"}).status == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "https://chat.example.evil", APP.lower()]
)
def test_other_origins_are_refused(served: Served, origin: str) -> None:
    answer = served.ask("POST", "/echo", {}, {"origin": origin})
    assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers


def test_own_and_allowed_origins_are_answered(served: Served) -> None:
    assert served.ask("POST", "/echo", {}, {"origin": f"http://127.0.0.1:{served.port}"}).status == 200
    answer = served.ask("POST", "/echo", {}, {"origin": "https://chat.example"})
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert answer.headers["vary"] == "origin"
    assert served.ask("POST", "/echo", {}, {"origin": APP}).headers["access-control-allow-origin"] == APP


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_sites_page_embeds_is_refused(served: Served, site: str) -> None:
    """Of an image, a frame and a link there is no Origin. A link to what is open may be followed."""
    for path, mode in [("/list", "no-cors"), ("/list", "navigate"), ("/health", "no-cors")]:
        answer = served.ask("GET", path, headers={"sec-fetch-site": site, "sec-fetch-mode": mode})
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
    assert served.ask("GET", "/health", headers={"sec-fetch-site": site, "sec-fetch-mode": "navigate"}).status == 200
    assert served.ask("GET", "/list", headers={"sec-fetch-site": site, "origin": "https://chat.example"}).status == 200


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_own_pages_and_typed_addresses_are_answered(served: Served, site: str) -> None:
    assert served.ask("GET", "/list", headers={"sec-fetch-site": site}).status == 200


def test_no_answer_is_sniffed_or_embedded(served: Served) -> None:
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    for answer in [
        served.ask("GET", "/health"),
        served.ask("GET", "/nothing"),
        served.ask("GET", "/crash"),
        served.ask("OPTIONS", "/echo", headers=asked),
        served.ask("GET", "/health", headers={"host": "evil.example"}),
    ]:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_preflight_answers_allowed_origins_only(locked: Served) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    allowed = locked.ask("OPTIONS", "/echo", headers={"origin": "https://chat.example", **asked})
    assert allowed.status == 204
    assert allowed.headers["access-control-allow-headers"] == "authorization, content-type"
    assert allowed.headers["access-control-allow-methods"] == "GET, POST, PATCH, DELETE"  # all that any route has
    assert locked.ask("OPTIONS", "/echo", headers={"origin": "https://evil.example", **asked}).status == 403


def test_a_preflight_may_ask_for_the_private_network(locked: Served) -> None:
    allow = "access-control-allow-private-network"
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    wanted = {"access-control-request-private-network": "true"}
    assert allow not in locked.ask("OPTIONS", "/echo", headers=asked).headers
    assert locked.ask("OPTIONS", "/echo", headers=asked | wanted).headers[allow] == "true"
    refused = locked.ask("OPTIONS", "/echo", headers=asked | wanted | {"origin": "https://evil.example"})
    assert refused.status == 403
    assert allow not in refused.headers


@pytest.mark.parametrize(
    "given", [None, "", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xff"]
)
def test_without_the_key_nothing_is_answered_but_health(locked: Served, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    answer = locked.ask("POST", "/echo", {}, headers)
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert KEY not in answer.body.decode()
    assert locked.ask("GET", "//v1/models/", None, headers).status == 401
    assert locked.ask("GET", "/health", headers=headers).status == 200


def test_with_the_key(locked: Served) -> None:
    assert locked.ask("POST", "/echo", {}, {"authorization": f"Bearer {KEY}"}).status == 200


def test_every_answer_has_an_id_of_its_own(served: Served) -> None:
    ids = {
        served.ask(method, path, body, headers).headers["x-request-id"]
        for method, path, body, headers in [
            ("GET", "/health", None, {}),
            ("GET", "/nothing", None, {}),
            ("PUT", "/health", None, {}),
            ("POST", "/echo", b"{", {}),
            ("GET", "/health", None, {"host": "evil.example"}),
            ("GET", "/crash", None, {}),
        ]
    }
    assert len(ids) == 6


def test_a_crash_is_one_permanent_error_without_details(served: Served) -> None:
    answer = served.ask("GET", "/crash")
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert answer.headers["x-should-retry"] == "false"
    assert b"ZeroDivision" not in answer.body


def test_unknown_paths_and_methods(served: Served) -> None:
    assert served.ask("GET", "/nothing").error["code"] == "not_found"
    assert served.ask("GET", "/health/").status == 404
    answer = served.ask("DELETE", "/health")
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS"


def test_a_405_names_the_methods_of_all_routes_of_a_path(served: Served) -> None:
    answer = served.ask("PUT", "/two")
    assert answer.status == 405
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, POST"
    assert answer.headers["allow"] in answer.error["message"]
    asked = served.ask("OPTIONS", "/two")
    assert (asked.status, asked.headers["allow"]) == (204, answer.headers["allow"])
    assert served.ask("OPTIONS", "/nothing").status == 404


def test_a_declared_size_over_the_limit_is_refused_unread(served: Served) -> None:
    head = f"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: {LIMIT + 1}\r\n\r\n"
    with served.connect(head.encode()) as one:
        assert _status(one) == 413


def test_a_chunked_body_is_counted_while_it_comes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "DRAIN_S", 0.5)
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with served.connect(head) as one:
        for _ in range(LIMIT // 1000 + 1):  # never ended
            one.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        head = one.recv(4096)
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close\r\n" in head
        assert _closed(one)


def test_a_path_may_have_a_limit_of_its_own(served: Served) -> None:
    body = b"{" + b" " * (5 * LIMIT) + b"}"
    assert served.ask("POST", "/large", body).status == 200
    assert served.ask("POST", "/echo", body).status == 413
    assert served.ask("POST", "/echo", b"{" + b" " * (LIMIT - 2) + b"}").status == 200


def test_what_was_not_read_is_not_taken_for_the_next_request(served: Served) -> None:
    smuggled = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = f"POST /echo HTTP/1.1\r\nhost: evil.example\r\ncontent-length: {len(smuggled)}\r\n\r\n".encode()
    with served.connect(head + smuggled) as one:
        assert _status(one) == 403
        assert _closed(one)


def test_a_body_of_two_lengths_is_refused(served: Served) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    with served.connect(head + b"2\r\n{}\r\n0\r\n\r\n") as one:
        assert _status(one) == 400
        assert _closed(one)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-type": "text/plain"}, "unsupported_media_type"),
        ({"content-encoding": "gzip"}, "unsupported_media_type"),
    ],
)
def test_other_media_types_are_refused(served: Served, headers: dict[str, str], code: str) -> None:
    answer = served.ask("POST", "/echo", b"{}", headers)
    assert (answer.status, answer.error["code"]) == (415, code)


def _status(one: socket.socket) -> int:
    return int(one.recv(4096).split()[1])


def _closed(one: socket.socket) -> bool:
    """Report if the server ends the connection; anything it still sends before is dropped."""
    try:
        while one.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


def test_bodies_in_flight_share_a_bound_and_short_ones_are_free() -> None:
    arrived: list[int] = []

    async def count(request: Request) -> JSONResponse:
        async for part in request.stream():
            arrived.append(len(part))
        return JSONResponse({})

    routes = [Route("/echo", _echo, methods=["POST"]), Route("/count", count, methods=["POST"])]
    body = b"{" + b" " * (WIDE - 2) + b"}"
    head = f"POST /count HTTP/1.1\r\nhost: localhost\r\ncontent-length: {WIDE}\r\n\r\n".encode()
    rules = Rules(frozenset({"localhost", "127.0.0.1"}), bodies_bytes=WIDE)
    with serving(guarded(routes, rules)) as one, one.connect(head), one.connect(head):  # to declare is not to send
        assert one.ask("POST", "/echo", body).status == 200
        with one.connect(head + body[:-1]) as slow:
            soon(lambda: sum(arrived) == WIDE - 1)
            refused = one.ask("POST", "/echo", body)
            assert (refused.status, refused.error["code"]) == (503, "bodies_full")
            assert int(refused.headers["retry-after"]) > 0
            assert one.ask("POST", "/echo", b"{" + b" " * 60_000 + b"}").status == 200
            slow.sendall(body[-1:])
            assert _status(slow) == 200
        assert one.ask("POST", "/echo", body).status == 200
        with one.connect(head + body[:-1]):
            soon(lambda: sum(arrived) == 2 * WIDE - 1)
        soon(lambda: one.ask("POST", "/echo", body).status == 200)  # a client that left frees its share
