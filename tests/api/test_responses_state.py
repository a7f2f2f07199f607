"""Stored responses: continued from any of them, retrieved, listed and deleted; ids that are unknown or of others."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from api.test_anthropic import LONG
from api.test_calls import CALL, PARIS, scripted
from api.test_responses import (
    RESPONSES,
    TOOLS,
    ask,
    cached,
    events_of,
    output,
    put_together,
    response_of,
    text_of,
    user,
)
from api.test_responses_client import openai
from conftest import TinyArtifacts
from daemon import NO_END, Daemon, daemon, quiet, request, soon
from keyfile import bearer, written
from saying import Saying
from serving import Answer

from ssmd.api.openai.responses import state
from ssmd.config import Settings
from ssmd.sessions.rows import database
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.text.messages import Message

Fields = dict[str, Any]
NOWHERE = "resp_gen_" + "0" * 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, folder: Path) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], folder, as_program=Saying) as one:
        yield one


def get(one: Daemon, id_: str, more: str = "", **headers: str) -> Answer:
    return one.served.ask("GET", f"{RESPONSES}/{id_}{more}", headers=headers)


def items(one: Daemon, id_: str, query: str = "?order=asc&limit=100") -> list[Fields]:
    answer = get(one, id_, f"/input_items{query}")
    assert answer.status == 200, answer.body
    found: list[Fields] = answer.json["data"]
    return found


def said_in(one: Daemon, session: str) -> list[list[tuple[str, str]]]:
    return [[(m.role, m.content) for m in turn.conversation] for turn in one.turns(session)]


def gone(answer: Answer) -> bool:
    return answer.status == 404 and "not found" in answer.error["message"]


def test_a_response_goes_on_from_another(tiny: Daemon) -> None:
    first = response_of(ask(tiny, LONG, "It rains."))
    quiet(tiny)
    second = response_of(ask(tiny, "And then?", "It stops.", previous_response_id=first["id"]))
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["ssmd"]["session"] == first["usage"]["ssmd"]["session"]
    assert second["usage"]["ssmd"]["resume"] == "exact"
    assert cached(second["usage"]) >= first["usage"]["input_tokens"]
    quiet(tiny)
    body = {"model": tiny.model, "input": "And now?", "previous_response_id": second["id"]}
    counted = tiny.served.ask("POST", f"{RESPONSES}/input_tokens", body)
    third = put_together(events_of(ask(tiny, "And now?", "Sun.", previous_response_id=second["id"], stream=True)))
    assert cached(third["usage"]) >= second["usage"]["input_tokens"]
    assert counted.json["input_tokens"] == third["usage"]["input_tokens"]
    assert said_in(tiny, third["usage"]["ssmd"]["session"]) == [
        [("user", LONG), ("assistant", "It rains.")],
        [("user", "And then?"), ("assistant", "It stops.")],
        [("user", "And now?"), ("assistant", "Sun.")],
    ]


def test_an_older_response_is_a_fork_that_is_restored(tiny: Daemon) -> None:
    first = response_of(ask(tiny, "Fork: " + LONG, "It rains."))
    quiet(tiny)
    for word in ("left", "right", "back"):
        quiet(tiny)
        branch = response_of(ask(tiny, word, f"It goes {word}.", previous_response_id=first["id"]))
        assert branch["usage"]["ssmd"]["resume"] == "exact"
        assert cached(branch["usage"]) >= first["usage"]["input_tokens"]
        [said] = [item["content"][0]["text"] for item in items(tiny, branch["id"])[-1:]]
        assert said == word
        assert len(items(tiny, branch["id"])) == 3
    turns = tiny.turns(first["usage"]["ssmd"]["session"])
    assert [turn.parent for turn in turns[1:]] == [turns[0].id] * 3


def test_instructions_are_not_carried_over(tiny: Daemon) -> None:
    def tokens(**fields: Any) -> int:
        answer = tiny.served.ask("POST", f"{RESPONSES}/input_tokens", {"model": tiny.model, **fields})
        return int(answer.json["input_tokens"])

    first = response_of(ask(tiny, "Told: " + LONG, "It rains.", instructions="Be short."))
    told = [user("Told: " + LONG), {"role": "assistant", "content": "It rains."}, user("b")]
    more = {"input": "b", "previous_response_id": first["id"]}
    assert tokens(**more) == tokens(input=told)
    assert tokens(**more, instructions="Sing.") == tokens(input=told, instructions="Sing.")
    quiet(tiny)
    kept = response_of(ask(tiny, "b", "Yes.", previous_response_id=first["id"], instructions="Be short."))
    assert (kept["instructions"], kept["usage"]["ssmd"]["resume"]) == ("Be short.", "exact")
    changed = response_of(ask(tiny, "c", "La.", previous_response_id=kept["id"], instructions="Sing."))
    last = response_of(ask(tiny, "d", "x", previous_response_id=changed["id"]))
    assert [item["role"] for item in items(tiny, last["id"])] == ["user", "assistant"] * 3 + ["user"]
    assert get(tiny, changed["id"]).json["instructions"] == "Sing."
    assert get(tiny, last["id"]).json["instructions"] is None


def test_a_system_message_of_the_input_is_carried_over(tiny: Daemon) -> None:
    first = response_of(ask(tiny, [{"role": "system", "content": "Be kind."}, user("a")], "It rains."))
    second = response_of(ask(tiny, "b", "x", previous_response_id=first["id"]))
    assert [item["role"] for item in items(tiny, second["id"])] == ["system", "user", "assistant", "user"]


def test_a_call_is_answered_by_the_id_of_its_response(tiny: Daemon) -> None:
    said = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
    first = response_of(ask(tiny, "Paris? " + LONG, said, tools=TOOLS))
    *_, call = first["output"]
    quiet(tiny)
    second = response_of(
        ask(tiny, [output(call, "12 degrees")], "Cold.", tools=TOOLS, previous_response_id=first["id"])
    )
    assert second["usage"]["ssmd"]["resume"] == "exact"
    assert cached(second["usage"]) >= first["usage"]["input_tokens"]
    unknown = ask(tiny, [output({**call, "call_id": "call_x"}, "a")], previous_response_id=first["id"])
    assert (unknown.status, unknown.error["param"]) == (400, "input[0].call_id")
    unanswered = ask(tiny, [], previous_response_id=first["id"])
    assert unanswered.status == 400
    assert [item["type"] for item in items(tiny, second["id"])] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]


def test_a_stored_response_is_retrieved_as_it_was(tiny: Daemon) -> None:
    tools = [
        *TOOLS,
        {"type": "custom", "name": "shell"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
    ]
    custom = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls"}}\n</tool_call>'
    inner = '<tool_call>\n{"name": "ns__g", "arguments": {}}\n</tool_call>'
    said = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{custom}\n{inner}"
    fields: Fields = {"tools": tools, "instructions": "Be short.", "metadata": {"a": "b"}, "top_p": 0.5}
    for stream in (False, True):
        answer = ask(tiny, "a", said, stream=stream, **fields)
        first = put_together(events_of(answer)) if stream else response_of(answer)
        again = get(tiny, first["id"])
        assert again.status == 200, again.body
        changed: Fields = {"tools": [], "completed_at": None, "usage": None}
        assert {**again.json, **changed} == {**first, **changed}
        for name in ("input_tokens", "output_tokens", "input_tokens_details", "output_tokens_details"):
            assert again.json["usage"][name] == first["usage"][name]
    made = [item for item in first["output"] if item["type"] in ("function_call", "custom_tool_call")]
    given = [*(output(call, "ok") for call in made)]
    quiet(tiny)
    second = response_of(ask(tiny, given, "x", previous_response_id=first["id"], **fields))
    assert second["usage"]["ssmd"]["resume"] == "exact"
    listed = items(tiny, second["id"])
    assert listed[1:5] == first["output"][:4]
    assert [item["type"] for item in listed[-3:]] == [one["type"] for one in given]
    cut = response_of(ask(tiny, "a", "It rains again.", max_output_tokens=2))
    assert get(tiny, cut["id"]).json["incomplete_details"] == {"reason": "max_output_tokens"}


def test_items_come_in_pages(tiny: Daemon) -> None:
    told = [user(f"question {i}") for i in range(5)]
    id_ = response_of(ask(tiny, told, "x"))["id"]
    asc = items(tiny, id_)
    assert [item["content"][0]["text"] for item in asc] == [one["content"] for one in told]
    assert len({item["id"] for item in asc}) == 5
    assert items(tiny, id_, "") == asc[::-1], "the newest first, by default"
    first = get(tiny, id_, "/input_items?limit=2&order=asc").json
    assert (first["data"], first["has_more"]) == (asc[:2], True)
    assert (first["first_id"], first["last_id"]) == (asc[0]["id"], asc[1]["id"])
    last = get(tiny, id_, f"/input_items?limit=3&order=asc&after={asc[1]['id']}").json
    assert (last["data"], last["has_more"]) == (asc[2:], False)
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=msg_x", "after")):
        answer = get(tiny, id_, f"/input_items?{query}")
        assert (answer.status, answer.error["param"]) == (400, param)


def test_an_item_is_given_by_its_id(tiny: Daemon) -> None:
    """As the AI SDK sends back what it believes to be stored."""
    first = response_of(ask(tiny, LONG, f"I look.\n{CALL}", tools=TOOLS))
    spoken, call = first["output"]
    quiet(tiny)
    references = [{"type": "item_reference", "id": item["id"]} for item in (spoken, call)]
    second = response_of(ask(tiny, [user(LONG), *references, output(call, "x")], "ok", tools=TOOLS))
    assert second["usage"]["ssmd"]["resume"] == "exact"
    assert cached(second["usage"]) >= first["usage"]["input_tokens"]
    asked = items(tiny, first["id"])[0]["id"]
    assert response_of(ask(tiny, [{"type": "item_reference", "id": asked}], "ok"))["usage"]["ssmd"]["stored"]
    for id_ in ("msg_mine", f"msg_{'0' * 24}_0", spoken["id"].replace("_0", "_9")):
        answer = ask(tiny, [user("a"), {"type": "item_reference", "id": id_}])
        assert gone(answer), answer.body
        assert answer.error["param"] == "input[1].id"


def test_items_given_by_id_are_bounded_together(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty characters may name megabytes, a hundred thousand times in a body."""
    first = response_of(ask(tiny, [user("w " * 500), user("b")], "x"))
    quiet(tiny)
    *_, long = items(tiny, first["id"], "?order=desc")
    monkeypatch.setattr(state, "MAX_REFERRED_CHARS", 20_000, raising=False)
    looks: list[str] = []
    found = state._found

    def look(stored: Snapshot, turn: str) -> Any:
        looks.append(turn)
        return found(stored, turn)

    monkeypatch.setattr(state, "_found", look)
    reference = {"type": "item_reference", "id": long["id"]}
    assert ask(tiny, [reference] * 5, "ok", store=False).status == 200
    assert len(looks) == 1
    answer = ask(tiny, [reference] * 30, store=False)
    assert (answer.status, answer.error["param"]) == (400, "input[16].id"), answer.body
    assert "too long together" in answer.error["message"]


def test_a_stored_response_keeps_a_bounded_echo(tiny: Daemon) -> None:
    """A client that sent megabytes once could else have them written by the event loop for each short request."""
    form = {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}, "description": "x" * (1 << 20)}
    for fields in ({"text": {"format": form}}, {"tool_choice": {"type": "web_search", "more": "x" * (1 << 20)}}):
        answer = ask(tiny, "a", "x", **fields)
        assert (answer.status, answer.error["param"]) == (400, "text")
        assert ask(tiny, "a", "x", store=False, **fields).status == 200
    assert ask(tiny, "a", "x", tools=[{"type": "web_search", "more": "x" * (1 << 20)}]).status == 200


def test_a_response_without_store_is_not_there(tiny: Daemon) -> None:
    response = response_of(ask(tiny, "secret", "It rains.", store=False))
    assert response["store"] is False
    assert gone(get(tiny, response["id"]))
    answer = ask(tiny, "b", previous_response_id=response["id"])
    assert gone(answer)
    assert answer.error["code"] == "previous_response_not_found"


@pytest.mark.parametrize("id_", [NOWHERE, "resp_123", "nonsense", "resp_gen_" + "Z" * 24, "turn_" + "0" * 24])
def test_an_unknown_id_is_not_found(tiny: Daemon, id_: str) -> None:
    for method, more in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = tiny.served.ask(method, f"{RESPONSES}/{id_}{more}", {} if method == "POST" else None)
        assert gone(answer), answer.body
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        body = {"model": tiny.model, "input": "a", "previous_response_id": id_}
        answer = tiny.served.ask("POST", path, body)
        assert gone(answer)
        assert answer.error["param"] == "previous_response_id"


def test_a_chat_is_no_response(tiny: Daemon) -> None:
    scripted(tiny, "x")
    id_ = tiny.chat("a").json["id"].replace("chatcmpl-", "resp_")
    assert gone(get(tiny, id_))


def test_a_deleted_response_is_gone(tiny: Daemon, folder: Path) -> None:
    """Its text too, if none follows on it; else it goes with the last one that does."""

    def text_of_database() -> str:
        with sqlite3.connect(folder / "sessions.sqlite3") as connection:
            rows = connection.execute("select items || answer from turn").fetchall()
        return "".join(str(row[0]) for row in rows)

    def delete(id_: str) -> None:
        answer = tiny.served.ask("DELETE", f"{RESPONSES}/{id_}")
        assert answer.json == {"id": id_, "object": "response.deleted", "deleted": True}
        assert gone(get(tiny, id_))
        assert gone(tiny.served.ask("DELETE", f"{RESPONSES}/{id_}"))
        assert gone(ask(tiny, "b", previous_response_id=id_))

    first = response_of(ask(tiny, "the-first-secret", "x"))
    session = first["usage"]["ssmd"]["session"]
    second = response_of(ask(tiny, "the-second-secret", "y", previous_response_id=first["id"]))
    branch = response_of(ask(tiny, "the-third-secret", "z", previous_response_id=first["id"]))
    quiet(tiny)
    delete(branch["id"])
    assert "the-third-secret" not in text_of_database()
    assert tiny.store is not None
    assert tiny.store.session(session).turns == 2
    assert tiny.store.session(session).head == tiny.turns(session)[0].id
    delete(first["id"])
    assert [item["content"][0]["text"] for item in items(tiny, second["id"])][:1] == ["the-first-secret"]
    delete(second["id"])
    assert "the-second-secret" not in text_of_database()
    id_ = response_of(ask(tiny, "the-last-secret", "x"))["id"]
    delete(id_)
    assert "the-last-secret" not in text_of_database()


def test_a_response_outlives_the_session_of_its_fork(tiny: Daemon) -> None:
    """A session is removed; the turns that a fork of it needs stay, and so do their responses."""
    first = response_of(ask(tiny, "Forked " + LONG, "x", instructions="Be short."))
    session = first["usage"]["ssmd"]["session"]
    assert tiny.served.ask("POST", f"/ssmd/v1/sessions/{session}/fork", {}).status == 201
    assert tiny.served.ask("DELETE", f"/ssmd/v1/sessions/{session}").status == 200
    assert get(tiny, first["id"]).json["instructions"] == "Be short."
    quiet(tiny)
    again = response_of(ask(tiny, "b", "y", previous_response_id=first["id"], instructions="Be short."))
    assert again["usage"]["ssmd"]["resume"] == "exact"


def test_a_deleted_response_with_a_fork_is_gone_as_well(tiny: Daemon) -> None:
    """Its id goes; the text stays with both sessions, as the fork needs it."""
    first = response_of(ask(tiny, "Kept " + LONG, "x"))
    session = first["usage"]["ssmd"]["session"]
    fork = tiny.served.ask("POST", f"/ssmd/v1/sessions/{session}/fork", {}).json["id"]
    assert tiny.served.ask("DELETE", f"{RESPONSES}/{first['id']}").status == 200
    assert gone(get(tiny, first["id"]))
    assert gone(tiny.served.ask("DELETE", f"{RESPONSES}/{first['id']}"))
    assert gone(ask(tiny, "b", previous_response_id=first["id"]))
    assert said_in(tiny, session) == said_in(tiny, fork) == [[("user", "Kept " + LONG), ("assistant", "x")]]


def test_a_response_that_comes_meanwhile_is_not_deleted(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    first = response_of(ask(tiny, "a", "x"))
    quiet(tiny)
    later: list[Fields] = []
    writing = database.writing

    def late(*given: Any, **more: Any) -> Any:
        monkeypatch.undo()
        later.append(response_of(ask(tiny, "b", "y", previous_response_id=first["id"])))
        quiet(tiny)
        return writing(*given, **more)

    monkeypatch.setattr(database, "writing", late)
    assert tiny.served.ask("DELETE", f"{RESPONSES}/{first['id']}").status == 200
    assert gone(get(tiny, first["id"]))
    assert text_of(get(tiny, later[0]["id"]).json) == "y"


def test_a_retry_of_a_deleted_response_is_another_one(tiny: Daemon) -> None:
    body, key = {"model": tiny.model, "input": "once more", "temperature": 0}, {"idempotency-key": "deleted"}
    first = response_of(tiny.served.ask("POST", RESPONSES, body, key))
    response_of(ask(tiny, "b", "y", previous_response_id=first["id"]))
    assert tiny.served.ask("DELETE", f"{RESPONSES}/{first['id']}").status == 200
    again = response_of(tiny.served.ask("POST", RESPONSES, body, key))
    assert again["id"] != first["id"]
    assert get(tiny, again["id"]).status == 200


def test_a_response_under_way_is_there_and_is_stopped(tiny: Daemon) -> None:
    scripted(tiny, "x", ends=False)
    body = {"model": tiny.model, "input": "on", "logit_bias": NO_END, "stream": True, "max_output_tokens": 4000}
    with tiny.served.connect(request(body, RESPONSES)) as one:
        found = b""
        while b"output_text.delta" not in found:
            found += one.recv(1 << 16)
        id_ = found[found.index(b'"id":"') + 6 :].split(b'"')[0].decode()
        begun = get(tiny, id_).json
        assert (begun["id"], begun["status"], begun["model"]) == (id_, "in_progress", tiny.model)
        assert tiny.served.ask("POST", f"/ssmd/v1/requests/{id_}/stop", {}).status == 202
        while not found.endswith(b"0\r\n\r\n"):
            found += one.recv(1 << 16)
    soon(lambda: get(tiny, id_).json.get("status") == "incomplete")
    late = tiny.served.ask("POST", f"{RESPONSES}/{id_}/cancel", {})
    assert (late.status, "Cannot cancel" in late.error["message"]) == (400, True)


def test_a_retry_gets_the_same_response(tiny: Daemon) -> None:
    scripted(tiny, "It rains.")
    body = {"model": tiny.model, "input": "again", "temperature": 0}
    key = {"idempotency-key": "once"}
    first, second = (tiny.served.ask("POST", RESPONSES, body, key) for _ in range(2))
    assert second.headers["idempotent-replayed"] == "true"
    assert second.json["id"] == first.json["id"]
    assert text_of(second.json) == text_of(first.json)
    assert response_of(ask(tiny, "b", "x", previous_response_id=second.json["id"]))


def test_responses_of_another_key_are_not_found(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    keys = written(tmp_path / "keys", "alice alice-has-this-one\nbob bob-has-another-one\n")
    alice, bob = bearer("alice-has-this-one"), bearer("bob-has-another-one")
    with daemon(artifacts["mamba-f32"], tmp_path / "data", settings=Settings(api_keys_file=keys)) as one:
        body = {"model": one.model, "input": "a", "max_output_tokens": 4}
        mine = one.served.ask("POST", RESPONSES, body, alice).json
        assert get(one, mine["id"], **alice).status == 200
        for method, more in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            path = f"{RESPONSES}/{mine['id']}{more}"
            assert gone(one.served.ask(method, path, {} if method == "POST" else None, bob))
        for fields in (
            {"previous_response_id": mine["id"]},
            {"input": [{"type": "item_reference", "id": mine["output"][0]["id"]}]},
        ):
            assert gone(one.served.ask("POST", RESPONSES, {**body, **fields}, bob))
            assert one.served.ask("POST", RESPONSES, {**body, **fields}, alice).status in (200, 400)
        assert one.served.ask("DELETE", f"{RESPONSES}/{mine['id']}", headers=alice).status == 200


def test_without_a_store_no_response_is_found(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None) as one:
        response = response_of(ask(one, "a", max_output_tokens=2))
        assert response["store"] is False
        answer = ask(one, "b", previous_response_id=response["id"])
        assert gone(answer)
        assert "--no-store" in answer.error["message"]
        assert "--no-store" in get(one, response["id"]).error["message"]


def test_the_openai_client_goes_on_lists_and_deletes(tiny: Daemon) -> None:
    scripted(tiny, "It rains.")
    result = openai("state", tiny.url, {"model": tiny.model, "input": LONG, "max_output_tokens": 30})
    assert result["second"]["usage"]["ssmd"]["resume"] == "exact"
    assert result["again"]["output"] == result["second"]["output"]
    assert [item["content"][0]["text"] for item in result["items"]] == [LONG, "It rains.", "And then?"]
    assert "not found" in result["gone"]


def test_arguments_of_a_stored_call_are_the_models(tiny: Daemon) -> None:
    id_ = response_of(ask(tiny, "a", CALL, tools=TOOLS))["id"]
    assert [item["arguments"] for item in get(tiny, id_).json["output"]] == [PARIS]


def test_a_page_reads_the_turns_that_it_has(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a long conversation costs as much as one of a short one."""
    last = response_of(ask(tiny, "0", "x"))
    for i in range(1, 8):
        last = response_of(ask(tiny, str(i), "x", previous_response_id=last["id"]))
    every = items(tiny, last["id"])
    assert [item["content"][0]["text"] for item in every[::2]] == [str(i) for i in range(8)]
    read: list[str] = []
    some = Snapshot.said

    def noted(stored: Snapshot, ids: Sequence[str]) -> Mapping[str, Sequence[Message]]:
        read.extend(ids)
        return some(stored, ids)

    monkeypatch.setattr(Snapshot, "said", noted)
    for order, listed in (("asc", every), ("desc", every[::-1])):
        for start in (0, 5, 12):
            read.clear()
            query = f"?order={order}&limit=3" + (f"&after={listed[start - 1]['id']}" if start else "")
            page = get(tiny, last["id"], f"/input_items{query}").json
            assert (page["data"], page["has_more"]) == (listed[start : start + 3], start + 3 < len(every))
            assert len(read) <= 4
