"""Tickets: redeeming one once gives the rights of its key for a while, and no longer than that key has them."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from keyfile import bearer, written
from operating import app_of, service_of
from serving import Answer, Served, serving
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.api.http.access import KEY_S, MOST_KEYS, MOST_TICKETS, TICKET_S, Grant, Grants, Keys, caller_of, digest_of
from ssmd.api.own.operations import OPERATIONS
from ssmd.config import Settings

ALICE, BOB, SCREEN, TOKEN = "alice-has-this-one", "bob-has-this-one", "screens-look-at-this", "the-daemons-own-token"
TICKETS = "/ssmd/v1/tickets"
REDEEM = f"{TICKETS}/redeem"
KEYS = f"alice {ALICE}\nbob {BOB}\nbob {SCREEN} read-only\n"


@contextmanager
def guarding(keys: Keys) -> Iterator[Served]:
    """Serve the guard, with /whoami behind it, which returns the caller."""

    async def whoami(request: Request) -> JSONResponse:
        caller = caller_of(request.scope)
        sees = caller.domain.sees
        return JSONResponse(
            {"name": caller.name, "sees": sees and [*sees], "read_only": caller.read_only, "own": caller.own}
        )

    wanted = [one for one in OPERATIONS if one.tag == "tickets" or one.path == "/ssmd/v1/stop"]
    app = app_of(service_of(wanted, Settings(), keys), Route("/whoami", whoami, methods=["GET", "POST"]))
    with serving(app) as one:
        yield one


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys.of(Settings(api_keys_file=written(tmp_path / "keys", KEYS)), TOKEN)


@pytest.fixture
def one(keys: Keys) -> Iterator[Served]:
    with guarding(keys) as served:
        yield served


def made(one: Served, key: str | None) -> str:
    answer = one.ask("POST", TICKETS, headers={} if key is None else bearer(key))
    assert (answer.status, answer.json["expires_in"]) == (200, 60), answer.body
    assert answer.headers["cache-control"] == "no-store"
    return str(answer.json["ticket"])


def redeemed(one: Served, ticket: str, **headers: str) -> Answer:
    return one.ask("POST", REDEEM, {"ticket": ticket}, headers)


def key_of(one: Served, key: str | None) -> str:
    """Make a ticket with a key, redeem it, and return the key it gives."""
    answer = redeemed(one, made(one, key))
    assert answer.status == 200, answer.body
    assert 43_199 <= answer.json["expires_in"] <= 43_200
    assert answer.headers["cache-control"] == "no-store"
    return str(answer.json["key"])


def whoami(one: Served, key: str) -> dict[str, Any]:
    answer = one.ask("GET", "/whoami", headers=bearer(key))
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


@pytest.mark.parametrize("key", [ALICE, BOB, SCREEN])
def test_it_has_the_rights_of_the_key(key: str, one: Served) -> None:
    granted = key_of(one, key)
    assert granted not in (ALICE, BOB, SCREEN)
    assert whoami(one, granted) == whoami(one, key)
    assert one.ask("POST", "/whoami", {}, bearer(granted)).status == (403 if key == SCREEN else 200)
    assert whoami(one, key_of(one, granted)) == whoami(one, key), "a ticket may be made with it too"


def test_the_daemons_own_token_hands_on_all_but_its_end(one: Served) -> None:
    granted = key_of(one, TOKEN)
    assert whoami(one, granted) == {"name": "", "sees": None, "read_only": False, "own": False}
    assert one.ask("POST", "/ssmd/v1/stop", headers=bearer(granted)).error["code"] == "own_token_needed"
    assert one.ask("POST", "/ssmd/v1/stop", headers=bearer(TOKEN)).status == 202


def test_a_ticket_is_good_once(one: Served) -> None:
    ticket = made(one, ALICE)
    assert redeemed(one, ticket).status == 200
    for wrong in (ticket, ticket + "x", "zq", "\N{SNOWMAN}", ALICE):
        refused = redeemed(one, wrong)
        assert (refused.status, refused.error["code"], refused.error["param"]) == (403, "invalid_ticket", "ticket")
        assert wrong not in refused.error["message"]
    assert one.ask("GET", "/whoami", headers=bearer(ticket)).status == 401, "it is no key"
    bodies: tuple[Any, ...] = ({}, {"ticket": ""}, {"ticket": "x" * 201}, {"ticket": 5}, {"ticket": "x", "y": 1}, [])
    for body in bodies:
        assert one.ask("POST", REDEEM, body).status == 400
    assert one.ask("GET", REDEEM).status == 405


def test_who_has_no_key_makes_none_and_other_sites_redeem_none(one: Served) -> None:
    assert one.ask("POST", TICKETS).status == 401
    assert one.ask("POST", TICKETS, headers=bearer("wrong")).status == 401
    ticket = made(one, ALICE)
    assert redeemed(one, ticket, origin="http://evil.example").error["code"] == "origin_not_allowed"
    embedded = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert redeemed(one, ticket, **embedded).error["code"] == "origin_not_allowed"
    assert redeemed(one, ticket, host="evil.example").error["code"] == "host_not_allowed"
    assert redeemed(one, ticket, origin=one.url).status == 200


def test_without_keys_it_works_the_same(tmp_path: Path) -> None:
    with guarding(Keys.of(Settings(), TOKEN)) as one:
        assert whoami(one, key_of(one, None))["sees"] is None
        assert whoami(one, key_of(one, TOKEN))["own"] is False
    with guarding(Keys.of(Settings(api_key="one-key-for-all"))) as one:
        assert one.ask("POST", TICKETS).status == 401
        assert whoami(one, key_of(one, "one-key-for-all"))["name"] == ""


def test_a_key_that_goes_takes_along_what_was_made_with_it(keys: Keys, one: Served, tmp_path: Path) -> None:
    alice, bob, own = key_of(one, ALICE), key_of(one, BOB), key_of(one, TOKEN)
    again, waiting = key_of(one, bob), made(one, bob)
    written(tmp_path / "keys", f"carol carol-has-this-one\nalice {ALICE} read-only\n")
    keys.reread()
    for gone in (bob, again):
        assert one.ask("GET", "/whoami", headers=bearer(gone)).status == 401
    assert redeemed(one, waiting).status == 403
    assert (
        whoami(one, alice)
        == whoami(one, ALICE)
        == {"name": "alice", "sees": ["alice"], "read_only": True, "own": False}
    ), "it has what its key has now"
    assert whoami(one, own)["sees"] is None
    written(tmp_path / "keys", KEYS)
    keys.reread()
    assert whoami(one, bob) == whoami(one, BOB)


# Times and numbers.


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def good(_: Grant) -> bool:
    return True


def test_each_is_good_for_a_time() -> None:
    clock = Clock()
    grants = Grants(clock)
    ticket, late = grants.ticket(b"by"), grants.ticket(b"by")
    clock.now += 59.9
    key, lasts_s = grants.redeem(ticket, good) or ("", 0.0)
    assert lasts_s == KEY_S
    clock.now += 0.1
    assert grants.redeem(late, good) is None
    digest = digest_of(key)
    found = grants.find(digest)
    assert found is not None
    assert found.by == b"by"
    clock.now += KEY_S - 0.2
    another, rest_s = grants.redeem(grants.ticket(b"by", found.until), good) or ("", 0.0)
    assert rest_s == pytest.approx(0.1), "no longer than the one that it was made with"
    clock.now += 0.1
    assert grants.find(digest) is None
    assert grants.find(digest_of(another)) is None


def test_the_oldest_goes() -> None:
    grants = Grants()
    waiting = [grants.ticket(b"by") for _ in range(MOST_TICKETS + 1)]
    assert grants.redeem(waiting[0], good) is None
    assert grants.redeem(waiting[1], good) is not None
    made = [(grants.redeem(grants.ticket(b"by"), good) or ("", 0.0))[0] for _ in range(MOST_KEYS + 1)]
    assert grants.find(digest_of(made[0])) is None
    assert all(grants.find(digest_of(key)) is not None for key in made[1:])


def test_what_others_make_takes_nothing_away() -> None:
    grants = Grants()
    mine, ticket = (grants.redeem(grants.ticket(b"by"), good) or ("", 0.0))[0], grants.ticket(b"by")
    for _ in range(MOST_KEYS + 1):
        assert grants.redeem(grants.ticket(b"other"), good)
    for _ in range(MOST_TICKETS + 1):
        grants.ticket(b"other")
    assert grants.find(digest_of(mine)) is not None
    assert grants.redeem(ticket, good) is not None


def test_what_is_over_is_not_held() -> None:
    now = 0.0
    grants = Grants(lambda: now)
    for _ in range(5):
        grants.ticket(b"by")
    now = TICKET_S
    grants.ticket(b"by")
    assert len(grants._tickets) == 1


def test_all_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    grants, seen = Grants(), list[int]()
    keys = [(grants.redeem(grants.ticket(b"by"), good) or ("", 0.0))[0] for _ in range(5)]
    compare = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        seen.append(len(a))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for key in (*keys, "wrong", "x" * 10_000):
        seen.clear()
        grants.find(digest_of(key))
        assert seen == [32] * 5
