"""/ssmd/v1/warm: beginnings over HTTP, each for its key, and the requests that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, daemon, soon
from keyfile import bearer, written

from ssmd.config import Settings

WARM = "/ssmd/v1/warm"
SYSTEM = {"role": "system", "content": "You keep the lighthouse at the end of the pier, and you know every ship. " * 4}
KEYS = "anna anna-has-this-one\nben ben-has-this-one\nscreen screens-look-at-this read-only\n"
ANNA, BEN, SCREEN = bearer("anna-has-this-one"), bearer("ben-has-this-one"), bearer("screens-look-at-this")


@pytest.fixture
def one(artifacts: TinyArtifacts, tmp_path: Path) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path / "data") as one:
        yield one


@pytest.fixture
def keyed(artifacts: TinyArtifacts, tmp_path: Path) -> Iterator[Daemon]:
    settings = Settings(api_keys_file=written(tmp_path / "keys", KEYS))
    with daemon(artifacts["mamba-f32"], tmp_path / "data", settings=settings) as one:
        yield one


def body(one: Daemon, **fields: Any) -> dict[str, Any]:
    return {"model": one.model, "messages": [SYSTEM], **fields}


def cached(one: Daemon, who: Mapping[str, str] | None = None, text: str = "Who?") -> int:
    said = one.body(messages=[SYSTEM, {"role": "user", "content": text}], store=False)
    answer = one.served.ask("POST", CHAT, said, who)
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_beginning_is_read_listed_and_removed(one: Daemon) -> None:
    made = one.served.ask("POST", WARM, body(one, name="pier", stream=True, temperature=0.5, unknown=1))
    assert made.status == 200, made.body
    row = made.json
    assert (row["object"], row["name"], row["ready"], row["cached_tokens"]) == ("warm", "pier", True, 0)
    (listed,) = one.served.ask("GET", WARM).json["data"]
    assert {name: listed[name] for name in ("id", "name", "tokens", "ready")} == {
        name: row[name] for name in ("id", "name", "tokens", "ready")
    }
    assert cached(one) >= row["tokens"]
    metrics = one.served.ask("GET", "/ssmd/v1/metrics").json
    assert metrics["warm"] == {"requests": 1, "tokens": row["tokens"]}
    assert one.served.ask("DELETE", f"/ssmd/v1/sessions/{row['id']}").status == 200
    assert one.served.ask("GET", WARM).json["data"] == []


def test_an_idle_one_is_told_at_once_and_read(one: Daemon) -> None:
    made = one.served.ask("POST", WARM, body(one, idle=True)).json
    assert made["ready"] is False
    soon(lambda: one.served.ask("GET", WARM).json["data"][0]["ready"])
    assert cached(one) >= made["tokens"]


def test_a_key_that_sees_all_names_no_other(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Also where sessions are shared: what it keeps warm is its own, and no quota takes it."""
    settings = Settings(api_keys_file=written(tmp_path / "keys", KEYS), share_sessions=True)
    with daemon(artifacts["mamba-f32"], tmp_path / "data", settings=settings) as one:
        other = one.served.ask("POST", WARM, body(one, key="anna"), BEN)
        assert (other.status, other.error["param"]) == (403, "key"), other.body


def test_it_is_of_the_key_that_it_came_with(keyed: Daemon) -> None:
    made = keyed.served.ask("POST", WARM, body(keyed), BEN)
    assert made.status == 200, made.body
    assert keyed.served.ask("GET", WARM, headers=ANNA).json["data"] == []
    (row,) = keyed.served.ask("GET", WARM, headers=BEN).json["data"]
    assert row["key"] == "ben"
    assert cached(keyed, ANNA) == 0
    assert cached(keyed, BEN) >= row["tokens"]
    assert keyed.served.ask("POST", WARM, body(keyed), SCREEN).status == 403
    other = keyed.served.ask("POST", WARM, body(keyed, key="anna"), BEN)
    assert (other.status, other.error["param"]) == (403, "key")
    taken = keyed.served.ask("POST", WARM, {"model": keyed.model, "session": row["id"]}, ANNA)
    assert (taken.status, taken.error["code"]) == (404, "session_not_found")


def test_a_session_gives_its_beginning(one: Daemon) -> None:
    first = one.served.ask("POST", CHAT, one.body(messages=[SYSTEM, {"role": "user", "content": "Who?"}]))
    session = first.json["usage"]["ssmd"]["session"]
    made = one.served.ask("POST", WARM, {"model": one.model, "session": session, "name": "taken"})
    assert made.status == 200, made.body
    assert made.json["cached_tokens"] == made.json["tokens"]
    brief = one.served.ask("POST", CHAT, one.body("Hello")).json["usage"]["ssmd"]["session"]
    refused = one.served.ask("POST", WARM, {"model": one.model, "session": brief})
    assert (refused.status, refused.error["code"]) == (409, "no_beginning")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": None}, 400, "messages"),
        ({"session": "ses_1"}, 400, "messages"),
        ({"messages": None, "session": "ses_1"}, 404, "session"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, 400, "messages"),
        ({"messages": [{"role": "system", "content": "Hi"}]}, 400, "messages"),
        ({"messages": 5}, 400, "messages"),
        ({"name": ""}, 400, "name"),
        ({"name": "a\nb"}, 400, "name"),
        ({"name": "a" * 201}, 400, "name"),
        ({"name": 5}, 400, "name"),
        ({"idle": "yes"}, 400, "idle"),
        ({"key": "a b"}, 400, "key"),
        ({"model": "nothing"}, 404, "model"),
        ({"tools": 5}, 400, "tools"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], status: int, param: str, one: Daemon) -> None:
    refused = one.served.ask("POST", WARM, body(one, **fields))
    assert (refused.status, refused.error["param"]) == (status, param), refused.body
    assert one.served.ask("GET", WARM).json["data"] == []


def test_a_daemon_without_a_store_says_so(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["mamba-f32"], None) as one:
        refused = one.served.ask("POST", WARM, body(one))
        assert (refused.status, refused.error["code"]) == (404, "no_store")
        assert one.served.ask("GET", WARM).json["data"] == []


def test_a_full_store_says_so(one: Daemon) -> None:
    assert one.store is not None
    one.store.quota = 1000
    refused = one.served.ask("POST", WARM, body(one))
    assert (refused.status, refused.error["code"]) == (507, "storage_error")
    for why in ("pinned sessions leave no room", "full or too slow", "Send the request again"):
        assert why in refused.error["message"]
