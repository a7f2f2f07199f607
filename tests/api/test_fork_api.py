"""Forks over HTTP: made while the daemon runs, continued by naming them, resumed without reading anything again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon, quiet
from serving import Answer

ROOT = "/ssmd/v1/sessions"


@pytest.fixture(scope="module", params=["llama-f32", "granite-int8"])
def tiny(
    request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    with daemon(artifacts[request.param], tmp_path_factory.mktemp("data") / "data") as one:
        yield one


def say(tiny: Daemon, history: list[dict[str, Any]], text: str, **fields: Any) -> tuple[list[dict[str, Any]], Answer]:
    """Ask; the history with question and answer."""
    messages = [*history, {"role": "user", "content": text}]
    answer = tiny.chat(messages=messages, seed=11, temperature=1, **fields)
    assert answer.status == 200, answer.body
    return [*messages, answer.json["choices"][0]["message"]], answer


def fork(tiny: Daemon, session: str, body: Any = None) -> Answer:
    return tiny.served.ask("POST", f"{ROOT}/{session}/fork", body)


def usage(answer: Answer) -> tuple[str, int, int]:
    """Session, tokens fed, tokens cached."""
    told = answer.json["usage"]
    cached = told["prompt_tokens_details"]["cached_tokens"]
    return told["ssmd"]["session"], told["prompt_tokens"] - cached, cached


def test_a_fork_goes_on_at_once(tiny: Daemon) -> None:
    history, first = say(tiny, [], "Tell me about rivers and bridges.")
    longer, _ = say(tiny, history, "And then?")
    session, _, _ = usage(first)
    turns = tiny.served.ask("GET", f"{ROOT}/{session}").json["turns"]
    made = fork(tiny, session, {"turn": turns[0]["id"]})
    assert made.status == 201
    entry = made.json
    assert (entry["base"], entry["head"], entry["turn_count"], entry["bytes"]) == (turns[0]["id"], turns[0]["id"], 1, 0)
    _, other = say(tiny, history, "And elsewhere?", session=entry["id"])
    name, fed, cached = usage(other)
    assert name == entry["id"]
    assert cached >= first.json["usage"]["total_tokens"] - 1
    assert fed < 40
    _, straight = say(tiny, longer, "Go on.", session=session)
    assert usage(straight)[0] == session
    told = tiny.served.ask("GET", f"{ROOT}/{entry['id']}").json
    assert [t["parent"] for t in told["turns"]] == [None, turns[0]["id"]]
    assert tiny.served.ask("GET", f"{ROOT}/{session}").json["turn_count"] == 3
    assert tiny.served.ask("GET", f"{ROOT}/{session}").json["base"] is None


def test_the_origin_may_go(tiny: Daemon) -> None:
    history, first = say(tiny, [], "Is this the origin?")
    session = usage(first)[0]
    made = fork(tiny, session).json
    again = fork(tiny, made["id"], {}).json
    for gone in (session, made["id"]):
        assert tiny.served.ask("DELETE", f"{ROOT}/{gone}").status == 200
        _, other = say(tiny, history, f"Without {gone}?", session=again["id"])
        assert usage(other)[0] == again["id"]
        assert usage(other)[2] >= first.json["usage"]["total_tokens"] - 1
    assert fork(tiny, session).error["code"] == "session_not_found"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"turn": "turn_of_nobody"}, 404, "turn_not_found"),
        ({"turn": "../turn"}, 400, "invalid_value"),
        ({"turn": ""}, 400, "invalid_value"),
        ({"turn": 7}, 400, "invalid_value"),
        ({"turns": "t"}, 400, "unknown_parameter"),
        ([], 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b'{"turn": "\\ud800"}', 400, "invalid_json"),
    ],
)
def test_bad_bodies(tiny: Daemon, body: Any, status: int, code: str) -> None:
    session = usage(say(tiny, [], "Fork me.")[1])[0]
    before = len(tiny.served.ask("GET", ROOT).json["data"])
    refused = fork(tiny, session, body)
    assert (refused.status, refused.error["code"]) == (status, code), refused.body
    assert len(tiny.served.ask("GET", ROOT).json["data"]) == before


def test_sessions_and_turns_of_others(tiny: Daemon) -> None:
    one, two = (usage(say(tiny, [], f"I am {name}.")[1])[0] for name in ("one", "two"))
    turn = tiny.served.ask("GET", f"{ROOT}/{two}").json["head"]
    refused = fork(tiny, one, {"turn": turn})
    assert (refused.status, refused.error["code"], refused.error["param"]) == (404, "turn_not_found", "turn")
    assert fork(tiny, "nobody").error["code"] == "session_not_found"
    assert fork(tiny, "a%20b").error["code"] == "invalid_value"
    assert tiny.served.ask("GET", f"{ROOT}/{one}/fork").status == 405


def test_a_turn_tells_where_its_prompt_parts(tiny: Daemon) -> None:
    """With the words of both, at the head or at any turn. Nothing is compared with other sessions' turns by name."""
    same = "The miller of the three bays keeps " * 3
    one, two = (tiny.chat(f"{same}{what}") for what in ("nine boats", "ten boats, of which six are red"))
    path = f"/ssmd/v1/sessions/{two.headers['x-ssmd-session']}/parting"
    told = tiny.served.ask("GET", path).json
    parting = told["parting"]
    assert (told["object"], parting["session"]) == ("parting", one.headers["x-ssmd-session"])
    assert (parting["here"][:3], parting["there"][:4]) == ("ten", "nine")
    assert parting["before"].endswith("bays keeps ")
    assert parting["position"] - parting["position"] % 64 == two.json["usage"]["ssmd"]["parted_at"]
    assert tiny.served.ask("GET", f"{path}?turn={told['turn']}").json == told
    for query, status, code in (
        (f"?turn={parting['turn']}", 404, "turn_not_found"),
        ("?turn=../x", 400, "invalid_value"),
        ("?turns=x", 400, "unknown_parameter"),
    ):
        refused = tiny.served.ask("GET", f"{path}{query}")
        assert (refused.status, refused.error["code"]) == (status, code), query
    other = tiny.served.ask("GET", "/ssmd/v1/sessions/unknown/parting")
    assert (other.status, other.error["code"]) == (404, "session_not_found")


def test_the_list_comes_in_parts(tiny: Daemon) -> None:
    for name in ("five", "six", "seven"):
        say(tiny, [], f"I am {name}.")
    quiet(tiny)  # reading an answer once more adds a state, and so to a size
    whole = tiny.served.ask("GET", ROOT).json
    assert whole["has_more"] is False
    first = tiny.served.ask("GET", f"{ROOT}?limit=2").json
    assert (first["data"], first["has_more"]) == (whole["data"][:2], True)
    rest = tiny.served.ask("GET", f"{ROOT}?limit={len(whole['data'])}&after={first['data'][1]['id']}").json
    assert (rest["data"], rest["has_more"]) == (whole["data"][2:], False)


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("limit=0", 400, "invalid_value"),
        ("limit=1001", 400, "invalid_value"),
        ("limit=many", 400, "invalid_value"),
        ("after=../x", 400, "invalid_value"),
        ("after=nobody", 404, "session_not_found"),
        ("page=2", 400, "unknown_parameter"),
    ],
)
def test_parts_that_cannot_be(tiny: Daemon, query: str, status: int, code: str) -> None:
    refused = tiny.served.ask("GET", f"{ROOT}?{query}")
    assert (refused.status, refused.error["code"]) == (status, code), refused.body
