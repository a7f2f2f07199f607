"""Several keys, each a trust domain of its own: nothing of one can be seen, continued or guessed with another."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, NO_END, Daemon, daemon, quiet, soon
from keyfile import bearer, written
from openai_client import openai
from serving import Answer, Served
from starlette.applications import Starlette
from starlette.routing import Route
from test_server import running

from ssmd.api.http.security import Security
from ssmd.app import create_app
from ssmd.config import Settings

ROOT = "/ssmd/v1/sessions"
KEYS = {name: f"the-key-of-{name}" for name in ("alice", "bob", "carol")}
FILE = "".join(f"{name} {key}\n" for name, key in KEYS.items())
SYSTEM = "You are a patient guide who knows every river and every bridge of this country by name. " * 4
Messages = list[dict[str, Any]]


def told(answer: Answer | dict[str, Any]) -> tuple[str, int, int]:
    """Session, prompt tokens, cached tokens."""
    body = answer if isinstance(answer, dict) else answer.json
    assert "usage" in body, body
    usage = body["usage"]
    return usage["ssmd"]["session"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Talk:
    """A conversation, said with one name's key."""

    def __init__(self, served: Served, model: str, name: str, system: str = SYSTEM) -> None:
        self.served, self.model, self.name = served, model, name
        self.messages: Messages = [{"role": "system", "content": system}]

    def body(self, text: str, **fields: Any) -> dict[str, Any]:
        messages = [*self.messages, {"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 8, **fields}

    def ask(self, text: str, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        given = {**bearer(KEYS[self.name]), **(headers or {})}
        return self.served.ask("POST", CHAT, self.body(text, **fields), given)

    def say(self, text: str, **fields: Any) -> Answer:
        """Ask, and go on from the answer."""
        answer = self.ask(text, **fields)
        assert answer.status == 200, answer.body
        self.messages = [*self.body(text)["messages"], answer.json["choices"][0]["message"]]
        return answer

    def of(self, name: str) -> Talk:
        """The same conversation, as another one would echo it."""
        other = Talk(self.served, self.model, name)
        other.messages = self.messages
        return other


def listed(served: Served, name: str) -> list[str]:
    return [one["id"] for one in served.ask("GET", ROOT, headers=bearer(KEYS[name])).json["data"]]


@pytest.fixture(scope="module", params=["granite-int8"])
def one(
    request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("data")
    settings = Settings(api_keys_file=written(folder / "keys", FILE))
    with daemon(artifacts[request.param], folder / "data", settings=settings) as made:
        yield made


def test_the_same_words_with_another_key_are_read_again(one: Daemon) -> None:
    """Not even a system prompt is shared; what a key said itself is."""
    talks = {name: Talk(one.served, one.model, name) for name in ("alice", "bob")}
    for turn, text in enumerate(["Which river is the longest?", "And which bridge?"]):
        answers = {name: talk.say(text) for name, talk in talks.items()}
        (first, prompt, cached), other = (told(answers[name]) for name in talks)
        assert other[1:] == (prompt, cached)
        assert other[0] != first
        assert (cached > 0) == (turn > 0)
    quiet(one)
    for name in talks:
        assert told(Talk(one.served, one.model, name).say("Another thing: why?"))[2] >= 64, "its own system prompt"
    assert told(Talk(one.served, one.model, "carol").say("Another thing: why?"))[2] == 0


def test_an_echo_joins_nothing_of_anothers(one: Daemon) -> None:
    alice = Talk(one.served, one.model, "alice", SYSTEM[:40])
    session = told(alice.say("Tell me of the mill."))[0]
    stolen = alice.of("bob")
    answer = stolen.say("And then?")
    assert told(answer)[0] != session
    assert told(answer)[2] == 0
    assert told(alice.say("And then?"))[0] == session
    assert len(one.turns(session)) == 2


def test_a_session_of_another_is_unknown(one: Daemon) -> None:
    alice = Talk(one.served, one.model, "alice")
    session = told(alice.say("Tell me of the ferry."))[0]
    refused = alice.of("bob").ask("And then?", session=session)
    assert (refused.status, refused.error["code"]) == (404, "session_not_found")
    unknown = alice.of("bob").ask("And then?", session="ses_" + "0" * 24)
    assert refused.error["message"].replace(session, "…") == unknown.error["message"].replace("ses_" + "0" * 24, "…")
    assert len(one.turns(session)) == 1


def test_a_named_request_of_another_is_another_request(one: Daemon) -> None:
    name = {"idempotency-key": "the same name"}
    alice, bob = (Talk(one.served, one.model, who).ask("Once.", name, temperature=1) for who in ("alice", "bob"))
    again = Talk(one.served, one.model, "alice").ask("Once.", name, temperature=1)
    assert again.json == alice.json
    assert bob.json["id"] != alice.json["id"]
    assert "idempotent-replayed" not in bob.headers
    assert Talk(one.served, one.model, "carol").ask("Something else.", name).status == 200, "the name is free there"
    retry = {"x-stainless-retry-count": "1"}
    body = Talk(one.served, one.model, "alice").say("Only once.").json
    assert Talk(one.served, one.model, "bob").ask("Only once.", retry).json["id"] != body["id"]
    assert Talk(one.served, one.model, "alice").ask("Only once.", retry).json["id"] == body["id"]


def test_who_asks_is_named_in_metrics_and_log(one: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ssmd")
    before = one.engine.metrics.snapshot()["keys"]
    bob = Talk(one.served, one.model, "bob")
    assert bob.ask("Hello", model="none").status == 404
    whole = bob.say("Hello", store=False)
    prompt, cached = told(whole)[1:]
    asked = bob.body(
        "Hello", stream=True, store=False, max_tokens=400, logit_bias=NO_END, n=8, logprobs=True, top_logprobs=20
    )
    body = json.dumps(asked).encode()  # so much that it takes a while
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: {bearer(KEYS['bob'])['authorization']}\r\n"
    with one.served.connect(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body) as line:
        received = b""
        while b"data: " not in received:  # the headers alone leave before it begins
            received += line.recv(65536)
    soon(lambda: one.engine.metrics.snapshot()["keys"]["bob"]["requests"].get("cancelled", 0) == 1)
    assert one.served.ask("POST", CHAT, {}, {**bearer(KEYS["bob"]), "content-length": "9" * 12}).status == 413
    now = one.served.ask("GET", "/ssmd/v1/metrics", headers=bearer(KEYS["alice"])).json["keys"]
    requests, known = now["bob"]["requests"], before.get("bob", {"requests": {"ok": 0}, "cached_tokens": 0})
    assert (requests["model_not_found"], requests["cancelled"]) == (1, 1)
    assert requests["ok"] == known["requests"]["ok"] + 1
    assert now["bob"]["cached_tokens"] == known["cached_tokens"] + 2 * cached
    before_it = known.get("generated_tokens", 0) + whole.json["usage"]["completion_tokens"]
    assert now["bob"]["generated_tokens"] > before_it, "the cancelled answer counts"
    assert now.get("alice") == before.get("alice")
    text = one.served.ask("GET", "/metrics", headers=bearer(KEYS["alice"])).body.decode()
    assert f'ssmd_key_requests_total{{key="bob",outcome="ok"}} {float(requests["ok"])}' in text
    said = [record.getMessage() for record in caplog.records]
    assert any(re.fullmatch(r"request gen_\w+ of bob: the client went away", line) for line in said), said
    assert any(line.startswith(f"refused POST {CHAT} of bob: ") for line in said), said
    assert prompt > 0


def test_a_state_that_is_damaged_is_replaced_by_none_of_anothers(one: Daemon) -> None:
    """The next best one is looked for, and what others have of the same words is none."""
    assert one.store is not None
    system = "Damaged. " + SYSTEM
    alice, bob = (Talk(one.served, one.model, name, system) for name in ("alice", "bob"))
    session = told(bob.say("Tell me of the dam."))[0]
    alice.say("Tell me of the dam.")
    quiet(one)
    of_bob = "(SELECT checkpoint FROM turn_checkpoint JOIN turn ON turn.id = turn WHERE session = ?)"
    with one.store.writing() as connection:
        altered = f"UPDATE piece SET data = zeroblob(length(data)) WHERE checkpoint IN {of_bob}"
        assert connection.exec_driver_sql(altered, (session,)).rowcount > 0
    name, prompt, cached = told(bob.say("And then?"))
    assert (name, cached) == (session, 0)
    assert told(alice.say("And then?"))[2] > prompt // 2


def test_a_system_prompt_is_rendered_for_each(one: Daemon) -> None:
    """Else the time it takes would tell that another one had it before."""
    cache = one.engine._planner._beginnings._kept
    for name, new in (("alice", 1), ("alice", 0), ("bob", 1), ("alice", 0)):
        before = cache.cache_info().misses
        Talk(one.served, one.model, name, "Rendered. " + SYSTEM).say("Why?")
        assert cache.cache_info().misses - before == new, name


def test_what_is_rendered_anew_stays_its_owners(one: Daemon) -> None:
    """An answer that a stop string cut is read once more, from no state of another one."""
    answers = {}
    for name in ("alice", "bob"):
        talk = Talk(one.served, one.model, name, "Cut. " + SYSTEM)
        whole = talk.ask("Tell me.", max_tokens=24, store=False).json["choices"][0]["message"]["content"]
        answers[name] = talk.say("Tell me.", max_tokens=24, stop=[whole[4:7]])
        quiet(one)
    assert answers["alice"].json["choices"] == answers["bob"].json["choices"]


LEAKS = {
    "grown from another's": "SELECT 1 FROM checkpoint c JOIN checkpoint p ON p.id = c.parent WHERE p.owner <> c.owner",
    "linked to by another's": "SELECT 1 FROM turn_checkpoint l JOIN turn t ON t.id = l.turn JOIN checkpoint c "
    "ON c.id = l.checkpoint WHERE t.owner <> c.owner",
    "rows of another's": "SELECT 1 FROM checkpoint_segment a JOIN checkpoint_segment b ON a.segment = b.segment "
    "JOIN checkpoint x ON x.id = a.checkpoint JOIN checkpoint y ON y.id = b.checkpoint WHERE x.owner <> y.owner",
    "in another's session": "SELECT 1 FROM turn t JOIN session s ON s.id = t.session WHERE t.owner <> s.owner",
    "below another's": "SELECT 1 FROM turn t JOIN turn p ON p.id = t.parent WHERE t.owner <> p.owner",
    "nobody's": "SELECT 1 FROM session WHERE owner = '' UNION SELECT 1 FROM turn WHERE owner = '' "
    "UNION SELECT 1 FROM checkpoint WHERE owner = ''",
}


def routes_of(app: Any) -> list[tuple[str, str]]:
    """(method, path) of everything that the app answers."""
    assert isinstance(app, Security)
    inner = app._app
    assert isinstance(inner, Starlette)
    found = []
    for route in inner.routes:
        assert isinstance(route, Route), route
        found += [(method, route.path) for method in sorted(route.methods or ())]
    return found


BODIES: dict[str, Any] = {"PATCH": {"pinned": True}, "POST": {"pinned": True}}


def test_every_route_answers_of_another_as_of_none(one: Daemon) -> None:
    """All that take a session's id, whatever they are: by nothing is another owner's told from an unknown one."""
    assert one.store is not None
    alice = Talk(one.served, one.model, "alice")
    session = told(alice.say("Tell me of the weir."))[0]
    turn = one.turns(session)[0].id
    before = json.dumps(one.served.ask("GET", f"{ROOT}/{session}", headers=bearer(KEYS["alice"])).json)
    unknown, no_turn = session[:-6] + "abcdef", turn[:-6] + "abcdef"

    def seen(method: str, path: str, body: Any, key: str) -> tuple[int, dict[str, str], str]:
        answer = one.served.ask(method, path, body, bearer(KEYS[key]))
        own = {k: v for k, v in answer.headers.items() if k not in ("x-request-id", "date")}
        return answer.status, own, answer.body.decode(errors="replace").replace(session, "…").replace(unknown, "…")

    taking = [r for r in routes_of(create_app(one.host, Settings())) if "{" in r[1]]
    asked = [(m, p, BODIES.get(m)) for m, p in taking if "{session}" in p]
    asked = [(m, p, {"turn": turn} if p.endswith("/fork") else body) for m, p, body in asked]
    asked += [
        ("GET", f"{ROOT}?after={{session}}", None),
        ("GET", f"{ROOT}?search=weir&after={{session}}", None),
        ("POST", CHAT, alice.of("bob").body("x", session="{session}")),
    ]
    assert len(asked) >= 9
    assert {p for _, p in taking if "{session}" not in p} == {
        "/page/{file:path}",
        "/v1/models/{model:path}",
        "/api/blobs/{digest}",  # 501
        *(f"/v1/responses/{{id}}{what}" for what in ("", "/cancel", "/input_items")),  # test_responses_state.py
        *(f"/v1/conversations/{{id}}{what}" for what in ("", "/items", "/items/{item}")),  # test_conversations.py
        *(f"/ssmd/v1/models/{{model}}{what}" for what in ("", "/load", "/unload")),
        *(f"/ssmd/v1/requests/{{id}}/{what}" for what in ("stream", "stop")),  # tests/api/test_requests.py
        "/ssmd/v1/pulls/{id}",
    }
    found = one.served.ask("GET", f"{ROOT}?search=weir", headers=bearer(KEYS["bob"])).json
    assert (found["data"], found["has_more"]) == ([], False)
    for method, path, body in asked:
        texts = [json.dumps(body).replace("{session}", one_id) for one_id in (session, unknown)]
        given = [None if body is None else text.encode() for text in texts]
        other = seen(method, path.replace("{session}", session), given[0], "bob")
        none = seen(method, path.replace("{session}", unknown), given[1], "bob")
        assert other == none, (method, path)
        assert other[0] == 404, (method, path, other)
    assert json.dumps(one.served.ask("GET", f"{ROOT}/{session}", headers=bearer(KEYS["alice"])).json) == before
    for method, path, body in asked:  # and its owner's is there, last of all to be deleted
        if method not in ("DELETE", "HEAD") and path != CHAT:
            text = None if body is None else json.dumps(body).encode()
            assert seen(method, path.replace("{session}", session), text, "alice")[0] < 300, (method, path)
    bobs = told(Talk(one.served, one.model, "bob").say("Mine."))[0]
    crossed = one.served.ask("POST", f"{ROOT}/{bobs}/fork", {"turn": turn}, bearer(KEYS["bob"]))
    never = one.served.ask("POST", f"{ROOT}/{bobs}/fork", {"turn": no_turn}, bearer(KEYS["bob"]))
    assert crossed.error["message"].replace(turn, "…") == never.error["message"].replace(no_turn, "…")
    assert one.served.ask("DELETE", f"{ROOT}/{session}", headers=bearer(KEYS["alice"])).status == 200


def test_a_list_has_only_its_own(one: Daemon) -> None:
    mine = {name: told(Talk(one.served, one.model, name).say("Mine."))[0] for name in KEYS}
    for name, session in mine.items():
        assert session in listed(one.served, name)
        assert not set(listed(one.served, name)) & {s for other, s in mine.items() if other != name}


def test_a_file_goes_to_whom_it_is_given(one: Daemon) -> None:
    """An export names no owner. The importing key owns the session, under another id while the first one exists."""
    alice = Talk(one.served, one.model, "alice", "Locks. " + SYSTEM)
    session = told(alice.say("Tell me of the lock."))[0]
    quiet(one)
    file = one.served.ask("GET", f"{ROOT}/{session}/export", headers=bearer(KEYS["alice"])).body
    assert b"alice" not in file
    done = one.served.ask("POST", f"{ROOT}/import", file, bearer(KEYS["bob"]))
    assert (done.status, done.json["renamed"]) == (201, True)
    assert done.json["id"] in listed(one.served, "bob")
    assert done.json["id"] not in listed(one.served, "alice")
    answer = alice.of("bob").say("And then?", session=done.json["id"])
    assert told(answer)[2] > 0, "the states came with it"
    assert told(alice.of("carol").say("And then?"))[2] == 0


@pytest.mark.parametrize("what", list(LEAKS))
def test_nothing_that_was_written_is_between_two_owners(one: Daemon, what: str) -> None:
    """After all of the above; where another process took them, after a word of each."""
    assert one.store is not None
    for name in KEYS:
        told(Talk(one.served, one.model, name).say("Mine."))
    quiet(one)
    with one.store.reading() as connection:
        assert connection.exec_driver_sql(LEAKS[what]).first() is None
        assert connection.exec_driver_sql("SELECT count(DISTINCT owner) FROM checkpoint").scalar_one() == len(KEYS)


def test_after_a_kill_all_is_as_before(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """A session without an owner is the first key's. The openai client runs before and after."""
    model = artifacts["llama-f32"]
    name = json.loads((model / "artifact.json").read_text("utf-8"))["name"]
    with running(tmp_path, str(model)) as (process, served):
        old = Talk(served, name, "alice")
        raw = served.ask("POST", CHAT, old.body("Before there were keys."))
        old.messages = [*old.body("Before there were keys.")["messages"], raw.json["choices"][0]["message"]]
        process.kill()
    extra = {"SSMD_API_KEYS_FILE": str(written(tmp_path / "keys", FILE))}
    bodies = Talk(served, name, "alice").body("Which river is the longest?")
    with running(tmp_path, str(model), extra=extra) as (process, served):
        asked = [{"key": KEYS[who], "body": bodies} for who in ("bob", "carol", "bob")]
        first, other, again = openai("said", served.url, asked)
        assert [told(one)[2] > 0 for one in (first, other, again)] == [False, False, True]
        process.kill()
    with running(tmp_path, str(model), extra=extra) as (process, served):
        assert told(raw)[0] in listed(served, "alice")
        assert listed(served, "bob") == [told(again)[0], told(first)[0]]
        assert listed(served, "carol") == [told(other)[0]]
        first_again, stranger = openai(
            "said", served.url, [{"key": KEYS[who], "body": bodies} for who in ("bob", "alice")]
        )
        assert told(first_again)[2] > 0
        assert told(stranger)[2] < told(first_again)[2], "of nobody's rows there is the system prompt"
        for who, found in (("bob", False), ("alice", True)):
            talk = old.of(who)
            talk.served = served
            answer = talk.say("And now?")
            assert (told(answer)[0] == told(raw)[0]) == found
        assert listed(served, "bob")[0] != told(raw)[0]
        process.kill()
    # What follows depends on settings alone: daemons of this process.
    mine = Settings(api_keys_file=tmp_path / "keys")
    shared = mine.model_copy(update={"share_sessions": True})
    with daemon(model, tmp_path / "data", settings=shared) as one:
        served = one.served
        everybody = set(listed(served, "carol"))
        assert everybody == set(listed(served, "alice"))
        assert len(everybody) >= 6
        talk = old.of("carol")
        talk.served = served
        assert told(talk.say("And whose is it?"))[0] == told(raw)[0]
    with daemon(model, tmp_path / "data", settings=mine) as one:
        served = one.served
        assert listed(served, "alice")[0] == told(raw)[0], "it is hers still"
        assert told(raw)[0] not in listed(served, "carol")
        assert re.fullmatch(r"ses_[0-9a-f]{24}", told(raw)[0])
    backwards = "".join(f"{name} {key}\n" for name, key in reversed(KEYS.items()))
    written(tmp_path / "keys", backwards)
    with daemon(model, tmp_path / "data", settings=mine) as one:
        served = one.served
        assert told(raw)[0] not in listed(served, "carol"), "she is the first now, and it was gone on with by another"
        assert told(raw)[0] in listed(served, "alice")
