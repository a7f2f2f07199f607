"""The daemon's own token: what it opens, and that nothing else stops a daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon import soon
from keyfile import bearer, written
from operating import app_of, service_of
from serving import Answer, Served, serving
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.api.http.access import Caller, Keys, caller_of
from ssmd.api.own.operations import OPERATIONS
from ssmd.config import Settings
from ssmd.sessions.turn import EVERYBODY

TOKEN, KEY, SCREEN = "t" * 43, "correct-horse-battery", "screens-look-at-this"


@contextmanager
def app(keys: Keys) -> Iterator[tuple[Served, list[str]]]:
    """A server that can be stopped, and how often it was."""
    stopped: list[str] = []

    async def whose(request: Request) -> JSONResponse:
        caller = caller_of(request.scope)
        return JSONResponse({"own": caller.own, "everybody": caller.domain == EVERYBODY})

    stop = [one for one in OPERATIONS if one.path == "/ssmd/v1/stop"]
    service = service_of(stop, Settings(), keys, end=lambda: stopped.append("now"))
    with serving(app_of(service, Route("/whose", whose, methods=["GET", "POST"]))) as served:
        yield served, stopped


def ask(served: Served, **headers: str) -> Answer:
    return served.ask("POST", "/ssmd/v1/stop", headers={name.replace("_", "-"): v for name, v in headers.items()})


@pytest.fixture(params=["no key", "a key", "keys"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Keys:
    """Return the keys of each of the three setups, with the daemon's own token beside them."""
    file = written(tmp_path / "keys", f"alice {KEY}\nscreen {SCREEN} read-only\n")
    settings = {"no key": Settings(), "a key": Settings(api_key=KEY), "keys": Settings(api_keys_file=file)}
    return Keys.of(settings[request.param], TOKEN)


def test_the_token_stops_it(keys: Keys) -> None:
    with app(keys) as (served, stopped):
        answer = ask(served, authorization=f"Bearer {TOKEN}")
        assert (answer.status, answer.json) == (202, {"status": "shutting_down"})
        soon(lambda: stopped == ["now"])


def test_nothing_else_does(keys: Keys) -> None:
    others: list[Mapping[str, str]] = [{}, bearer("t" * 42), bearer(TOKEN + "t"), bearer(KEY), bearer(SCREEN)]
    others += [{"authorization": TOKEN}, {"authorization": f"Basic {TOKEN}"}, {"x-api-key": TOKEN}]
    with app(keys) as (served, stopped):
        for headers in others:
            assert ask(served, **headers).status in (401, 403), headers
        assert served.ask("GET", "/ssmd/v1/stop", headers=bearer(TOKEN)).status == 405
        assert stopped == []


def test_no_page_does_though_it_had_the_token(keys: Keys) -> None:
    with app(keys) as (served, stopped):
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
            answer = served.ask("POST", "/ssmd/v1/stop", headers={**bearer(TOKEN), **headers})
            assert answer.status == 403, headers
        assert stopped == []


def test_who_has_a_key_is_told_why_not() -> None:
    with app(Keys.of(Settings(), TOKEN)) as (served, _):
        answer = ask(served)
        assert (answer.status, answer.error["code"]) == (403, "own_token_needed")
        assert "ssmd stop" in answer.error["message"]


def test_the_token_is_a_key_that_sees_all_sessions(keys: Keys) -> None:
    with app(keys) as (served, _):
        for method in ("GET", "POST"):
            assert served.ask(method, "/whose", headers=bearer(TOKEN)).json == {"own": True, "everybody": True}
    assert keys.caller(f"bearer  {TOKEN} ") == Caller(EVERYBODY, own=True)
    assert TOKEN not in repr(vars(keys))


def test_where_there_is_no_token_nobody_is_its_owner() -> None:
    for given in ("", "Bearer", "Bearer ", f"Bearer {KEY}"):
        assert Keys.of(Settings()).caller(given) == Caller(EVERYBODY)
    assert Keys.of(Settings(api_key=KEY)).caller(f"Bearer {KEY}") == Caller(EVERYBODY)
    assert Keys.of(Settings(), TOKEN).caller("Bearer wrong") == Caller(EVERYBODY), "no keys: everybody may ask"
