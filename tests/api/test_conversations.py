"""Conversations: created, continued by responses, listed in pages, changed and deleted; one request at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api.test_anthropic import LONG
from api.test_calls import CALL, scripted
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
from conftest import TinyArtifacts
from daemon import NO_END, Daemon, daemon, quiet, request, soon
from keyfile import bearer, written
from saying import Saying
from serving import Answer

from ssmd.api.generate.answer import InFlightAnswers
from ssmd.api.openai.responses.state import History
from ssmd.config import Settings
from ssmd.engine.terms import Rejection
from ssmd.sessions.fsck.check import examine
from ssmd.sessions.rows import turns

Fields = dict[str, Any]
CONVERSATIONS = "/v1/conversations"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, folder: Path) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], folder, as_program=Saying) as one:
        yield one


def send(one: Daemon, method: str, path: str = "", body: Any = None, **headers: str) -> Answer:
    return one.served.ask(method, f"{CONVERSATIONS}{path}", body, headers)


def begun(one: Daemon, *items: Fields, **fields: Any) -> str:
    answer = send(one, "POST", "", {"items": list(items), **fields})
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


def add(one: Daemon, id_: str, *items: Fields, **headers: str) -> list[Fields]:
    answer = send(one, "POST", f"/{id_}/items", {"items": list(items)}, **headers)
    assert answer.status == 200, answer.body
    found: list[Fields] = answer.json["data"]
    return found


def listed(one: Daemon, id_: str, query: str = "?order=asc&limit=100") -> list[Fields]:
    answer = send(one, "GET", f"/{id_}/items{query}")
    assert answer.status == 200, answer.body
    found: list[Fields] = answer.json["data"]
    return found


def texts(items: list[Fields]) -> list[str]:
    return [item["content"][0]["text"] if "content" in item else item.get("output", "call") for item in items]


def said(one: Daemon, id_: str) -> list[str]:
    return texts(listed(one, id_))


def gone(answer: Answer) -> bool:
    return answer.status == 404 and "not found" in answer.error["message"]


def test_an_empty_conversation_is_there(tiny: Daemon) -> None:
    answer = send(tiny, "POST", "", {"metadata": {"topic": "demo"}})
    one = answer.json
    assert (answer.status, one["object"], one["metadata"]) == (200, "conversation", {"topic": "demo"})
    assert one["id"].startswith("conv_")
    assert isinstance(one["created_at"], int)
    assert send(tiny, "GET", f"/{one['id']}").json == one
    page = send(tiny, "GET", f"/{one['id']}/items").json
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    changed = send(tiny, "POST", f"/{one['id']}", {"metadata": {"a": "b"}}).json
    assert changed == {**one, "metadata": {"a": "b"}}
    assert send(tiny, "GET", f"/{one['id']}").json == changed
    assert send(tiny, "POST", f"/{one['id']}", {"metadata": None}).json["metadata"] == {}
    deleted = send(tiny, "DELETE", f"/{one['id']}")
    assert deleted.json == {"id": one["id"], "object": "conversation.deleted", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/items")):
        assert gone(send(tiny, method, f"/{one['id']}{path}"))


def test_a_conversation_may_be_created_without_a_body(tiny: Daemon) -> None:
    assert tiny.served.ask("POST", CONVERSATIONS, b"").status == 200
    assert send(tiny, "POST", "", {"items": None, "metadata": None}).json["metadata"] == {}


def test_responses_go_on_from_a_conversation(tiny: Daemon) -> None:
    id_ = begun(tiny)
    first = response_of(ask(tiny, LONG, "It rains.", conversation=id_))
    assert first["conversation"] == {"id": id_}
    assert first["usage"]["ssmd"]["session"] == id_
    quiet(tiny)
    body = {"model": tiny.model, "input": "And then?", "conversation": id_}
    counted = tiny.served.ask("POST", f"{RESPONSES}/input_tokens", body).json["input_tokens"]
    second = put_together(events_of(ask(tiny, "And then?", "It stops.", conversation={"id": id_}, stream=True)))
    assert second["usage"]["input_tokens"] == counted
    assert second["usage"]["ssmd"]["resume"] == "exact"
    assert cached(second["usage"]) >= first["usage"]["input_tokens"]
    assert said(tiny, id_) == [LONG, "It rains.", "And then?", "It stops."]
    items = listed(tiny, id_)
    assert [item["id"] for item in items[1::2]] == [one["output"][0]["id"] for one in (first, second)]
    assert len({item["id"] for item in items}) == 4
    again = tiny.served.ask("GET", f"{RESPONSES}/{second['id']}").json
    assert again["conversation"] == {"id": id_}


def test_an_answer_that_was_cut_is_listed_as_incomplete(tiny: Daemon) -> None:
    id_ = begun(tiny)
    cut = ask(tiny, "a", "x y z and on", conversation=id_, max_output_tokens=2).json
    assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")
    after = response_of(ask(tiny, "b", "y", conversation=id_))
    quiet(tiny)
    pages = [listed(tiny, id_), listed(tiny, id_, "?order=desc&limit=100")[::-1]]
    for page in pages:
        assert [item["status"] for item in page] == ["completed", "incomplete", "completed", "completed"]
        assert [page[1], page[3]] == [*cut["output"], *after["output"]]
    read = tiny.served.ask("GET", f"{RESPONSES}/{after['id']}/input_items?order=asc").json["data"]
    assert read == pages[0][:3]


def test_instructions_are_no_items_of_a_conversation(tiny: Daemon) -> None:
    id_ = begun(tiny)
    response_of(ask(tiny, "a", "x", conversation=id_, instructions="Be short."))
    response_of(ask(tiny, "b", "y", conversation=id_, instructions="Sing."))
    response_of(ask(tiny, "c", "z", conversation=id_))
    assert said(tiny, id_) == ["a", "x", "b", "y", "c", "z"]


@pytest.mark.parametrize("system", ["", "cch=abc;"])
def test_a_system_item_is_not_taken_for_instructions(tiny: Daemon, system: str) -> None:
    """Neither without instructions, nor beside some that end with its words and are left out."""
    header = f"x-anthropic-billing-header: cc_version=2.1.197.e0d; cc_entrypoint=cli; {system}"
    id_ = begun(tiny, {"role": "system", "content": system})
    fields = {"instructions": header} if system else {}
    response_of(ask(tiny, "a", "x", conversation=id_, **fields))
    assert said(tiny, id_) == [system, "a", "x"]


def test_an_input_that_no_model_reads_repeats_no_answer(tiny: Daemon) -> None:
    id_ = begun(tiny)
    first = response_of(ask(tiny, "a", "x", conversation=id_))
    for place in ({"conversation": id_}, {"previous_response_id": first["id"]}):
        answer = ask(tiny, [{"type": "web_search_call"}], "y", **place)
        assert answer.status == 400, answer.body
        assert "no item that a model reads" in answer.error["message"]
    assert said(tiny, id_) == ["a", "x"]
    add(tiny, id_, user("b"))
    response_of(ask(tiny, [{"type": "web_search_call"}], "y", conversation=id_))
    assert said(tiny, id_) == ["a", "x", "b", "y"]


def test_items_of_a_client_are_read_with_the_next_response(tiny: Daemon) -> None:
    id_ = begun(tiny, {"role": "system", "content": "Be kind."}, user("a"))
    [second] = add(tiny, id_, {"role": "assistant", "content": "x"})
    assert send(tiny, "GET", f"/{id_}/items/{second['id']}").json == second
    add(tiny, id_, user("b"))
    whole = [{"role": "system", "content": "Be kind."}, user("a"), {"role": "assistant", "content": "x"}, user("b")]
    tokens = [
        tiny.served.ask("POST", f"{RESPONSES}/input_tokens", {"model": tiny.model, **fields}).json["input_tokens"]
        for fields in ({"input": "c", "conversation": id_}, {"input": [*whole, user("c")]})
    ]
    assert tokens[0] == tokens[1]
    before = listed(tiny, id_)
    answer = response_of(ask(tiny, "c", "y", conversation=id_))
    add(tiny, id_, user("d"), {"role": "assistant", "content": "z"})
    assert listed(tiny, id_)[:4] == before, "their ids stay"
    assert said(tiny, id_) == ["Be kind.", "a", "x", "b", "c", "y", "d", "z"]
    assert answer["usage"]["input_tokens"] == tokens[0]
    response_of(ask(tiny, "e", "w", conversation=id_))
    assert said(tiny, id_)[-4:] == ["d", "z", "e", "w"]


def test_calls_and_their_results_stand_in_a_conversation(tiny: Daemon) -> None:
    tools = [*TOOLS, {"type": "custom", "name": "shell"}]
    custom = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls"}}\n</tool_call>'
    id_ = begun(tiny)
    first = response_of(
        ask(tiny, "Paris?", f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{custom}", tools=tools, conversation=id_)
    )
    made = [item for item in first["output"] if item["type"].endswith("_call")]
    response_of(ask(tiny, [output(call, "ok") for call in made], "Cold.", tools=tools, conversation=id_))
    items = listed(tiny, id_)
    assert items[1:5] == first["output"]
    kinds = [item["type"] for item in items]
    assert kinds[1:] == [
        *("reasoning", "message", "function_call", "custom_tool_call"),
        *("function_call_output", "custom_tool_call_output", "message"),
    ]
    copied = begun(tiny, *items)
    assert [item["type"] for item in listed(tiny, copied)] == kinds
    assert [item.get("call_id") for item in listed(tiny, copied)] == [item.get("call_id") for item in items]


def test_a_result_may_come_after_its_call(tiny: Daemon) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    id_ = begun(tiny, user("a"), call)
    unknown = send(tiny, "POST", f"/{id_}/items", {"items": [output({**call, "call_id": "c2"}, "x")]})
    assert (unknown.status, unknown.error["param"]) == (400, "items[0].call_id")
    add(tiny, id_, output(call, "ok"))
    assert [item["type"] for item in listed(tiny, id_)] == ["message", "function_call", "function_call_output"]


def test_pages_of_a_conversation_have_no_gap(tiny: Daemon) -> None:
    id_ = begun(tiny, *(user(f"u{i}") for i in range(7)))
    for i in range(5):
        response_of(ask(tiny, [user(f"q{i}"), user(f"r{i}")], f"a{i}", conversation=id_))
        add(tiny, id_, user(f"v{i}"), {"role": "assistant", "content": f"w{i}"})
    every = listed(tiny, id_)
    assert texts(every) == [*(f"u{i}" for i in range(7)), *(f"{x}{i}" for i in range(5) for x in "qravw")]
    assert listed(tiny, id_, "?limit=100") == every[::-1], "the newest first, by default"
    for order, whole in (("asc", every), ("desc", every[::-1])):
        for start in range(len(whole)):
            after = f"&after={whole[start - 1]['id']}" if start else ""
            page = send(tiny, "GET", f"/{id_}/items?order={order}&limit=3{after}").json
            assert (page["data"], page["has_more"]) == (whole[start : start + 3], start + 3 < len(whole))
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=msg_x", "after")):
        answer = send(tiny, "GET", f"/{id_}/items?{query}")
        assert (answer.status, answer.error["param"]) == (400, param)
    other = listed(tiny, begun(tiny, user("a")))[0]["id"]
    assert send(tiny, "GET", f"/{id_}/items?after={other}").status == 400
    assert gone(send(tiny, "GET", f"/{id_}/items/{other}"))
    for item in every:
        assert send(tiny, "GET", f"/{id_}/items/{item['id']}").json == item


def test_a_deleted_item_is_read_no_more(tiny: Daemon) -> None:
    id_ = begun(tiny, user("a"), user("b"))
    response_of(ask(tiny, "c", "x", conversation=id_))
    add(tiny, id_, user("d"))
    items = listed(tiny, id_)
    for index in (4, 1, 3):
        answer = send(tiny, "DELETE", f"/{id_}/items/{items[index]['id']}")
        assert (answer.status, answer.json["id"]) == (200, id_)
        assert gone(send(tiny, "DELETE", f"/{id_}/items/{items[index]['id']}"))
    assert listed(tiny, id_) == [items[0], items[2]]
    told = [user("a"), user("c"), user("e")]
    counted = tiny.served.ask("POST", f"{RESPONSES}/input_tokens", {"model": tiny.model, "input": told}).json
    last = response_of(ask(tiny, "e", "y", conversation=id_))
    assert last["usage"]["input_tokens"] == counted["input_tokens"]
    assert said(tiny, id_) == ["a", "c", "e", "y"]
    response_of(ask(tiny, "f", "z", conversation=id_))
    assert said(tiny, id_) == ["a", "c", "e", "y", "f", "z"]


def test_a_deleted_item_is_not_given_by_its_id(tiny: Daemon) -> None:
    id_ = begun(tiny, user("a"))
    made = response_of(ask(tiny, "b", "x", conversation=id_))
    quiet(tiny)
    items = listed(tiny, id_)
    assert items[2] == made["output"][0]
    references = [{"type": "item_reference", "id": item["id"]} for item in items]
    assert ask(tiny, [references[1], references[2], user("c")], "y").status == 200
    for index in (1, 2):
        assert send(tiny, "DELETE", f"/{id_}/items/{items[index]['id']}").status == 200
        answer = ask(tiny, [references[index], user("c")])
        assert gone(answer), answer.body
        assert answer.error["param"] == "input[0].id"
    assert ask(tiny, [references[0], user("c")], "y").status == 200


def test_a_second_request_at_a_conversation_is_refused(tiny: Daemon) -> None:
    id_ = begun(tiny)
    scripted(tiny, "x", ends=False)
    body = {"model": tiny.model, "input": "on", "logit_bias": NO_END, "stream": True, "max_output_tokens": 4000}
    with tiny.served.connect(request({**body, "conversation": id_}, RESPONSES)) as one:
        found = b""
        while b"output_text.delta" not in found:
            found += one.recv(1 << 16)
        refused = [
            ask(tiny, "b", conversation=id_),
            send(tiny, "POST", f"/{id_}/items", {"items": [user("b")]}),
            send(tiny, "POST", f"/{id_}", {"metadata": {}}),
            send(tiny, "DELETE", f"/{id_}"),
        ]
        for answer in refused:
            assert (answer.status, answer.error["code"]) == (400, "conversation_locked"), answer.body
            assert answer.error["param"] == "conversation"
        assert said(tiny, id_) == []
        begun_id = found[found.index(b'"id":"') + 6 :].split(b'"')[0].decode()
        assert tiny.served.ask("POST", f"/ssmd/v1/requests/{begun_id}/stop", {}).status == 202
        while not found.endswith(b"0\r\n\r\n"):
            found += one.recv(1 << 16)
    assert response_of(ask(tiny, "b", "y", conversation=id_))["status"] == "completed"
    assert said(tiny, id_) == ["b", "y"], "a response that was stopped adds nothing"


def test_a_conversation_that_changes_meanwhile_is_refused(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items come after a response has read the list, and before it holds the conversation."""
    id_ = begun(tiny)
    read = History.conversation

    def late(history: History, name: str) -> Any:
        found = read(history, name)
        monkeypatch.undo()
        add(tiny, id_, user("between"))
        return found

    monkeypatch.setattr(History, "conversation", late)
    answer = ask(tiny, "b", "x", conversation=id_)
    assert (answer.status, answer.error["code"]) == (400, "conversation_locked"), answer.body
    assert said(tiny, id_) == ["between"]
    response_of(ask(tiny, "b", "x", conversation=id_))
    assert said(tiny, id_) == ["between", "b", "x"]


def test_an_item_that_goes_meanwhile_does_not_come_back(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item is deleted after a response has read the list, and before it holds the conversation."""
    id_ = begun(tiny, user("secret"), user("a"))
    secret = listed(tiny, id_)[0]["id"]
    read = History.conversation

    def late(history: History, name: str) -> Any:
        found = read(history, name)
        monkeypatch.undo()
        assert send(tiny, "DELETE", f"/{id_}/items/{secret}").status == 200
        return found

    monkeypatch.setattr(History, "conversation", late)
    answer = ask(tiny, "b", "x", conversation=id_)
    assert (answer.status, answer.error["code"]) == (400, "conversation_locked"), answer.body
    response = response_of(ask(tiny, "b", "x", conversation=id_))
    items = tiny.served.ask("GET", f"{RESPONSES}/{response['id']}/input_items?order=asc").json["data"]
    assert texts(items) == ["a", "b"]


def test_refusals_of_a_locked_conversation_share_nothing() -> None:
    """One error that is raised again and again would hold the frames, and so the bodies, of all its requests."""
    under_way = InFlightAnswers()
    with under_way.alone("conv_1"):
        refusals = []
        for _ in range(2):
            with pytest.raises(Rejection) as refused, under_way.alone("conv_1"):
                pass
            refusals.append(refused.value)
    assert refusals[0] is not refusals[1]


def test_an_added_item_is_given_by_its_id(tiny: Daemon) -> None:
    id_ = begun(tiny, user("a"), user("b"))
    first, second = listed(tiny, id_)
    references = [{"type": "item_reference", "id": item["id"]} for item in (first, second)]
    response = response_of(ask(tiny, references, "x"))
    answer = tiny.served.ask("GET", f"{RESPONSES}/{response['id']}/input_items?order=asc")
    assert texts(answer.json["data"]) == ["a", "b"]
    assert send(tiny, "DELETE", f"/{id_}/items/{first['id']}").status == 200
    answer = ask(tiny, references)
    assert gone(answer), answer.body
    assert answer.error["param"] == "input[0].id"


def test_a_check_finds_conversations_sound(tiny: Daemon) -> None:
    id_ = begun(tiny, user("a"))
    response_of(ask(tiny, "b", "x", conversation=id_))
    send(tiny, "DELETE", f"/{id_}/items/{listed(tiny, id_)[0]['id']}")
    quiet(tiny)
    assert tiny.store is not None
    with tiny.store.reading() as connection:
        assert not examine(connection).damages


def test_a_client_that_leaves_adds_nothing(tiny: Daemon) -> None:
    """Its retry has the conversation before it as it was."""
    id_ = begun(tiny)
    scripted(tiny, "x", ends=False)
    body = {"model": tiny.model, "input": "on", "logit_bias": NO_END, "stream": True, "max_output_tokens": 4000}
    with tiny.served.connect(request({**body, "conversation": id_}, RESPONSES)) as one:
        found = b""
        while b"output_text.delta" not in found:
            found += one.recv(1 << 16)
    quiet(tiny)
    assert said(tiny, id_) == []
    response_of(ask(tiny, "on", "y", conversation=id_))
    assert said(tiny, id_) == ["on", "y"]


def test_a_retry_adds_no_items_twice(tiny: Daemon) -> None:
    id_ = begun(tiny)
    scripted(tiny, "It rains.")
    body = {"model": tiny.model, "input": "again", "temperature": 0, "conversation": id_}
    key = {"idempotency-key": "conversation"}
    first, second = (tiny.served.ask("POST", RESPONSES, body, key) for _ in range(2))
    assert (second.headers["idempotent-replayed"], second.json["id"]) == ("true", first.json["id"])
    assert said(tiny, id_) == ["again", "It rains."]
    added = add(tiny, id_, user("b"))
    assert add(tiny, id_, user("b"), **{"x-stainless-retry-count": "1"}) == added
    assert said(tiny, id_) == ["again", "It rains.", "b"]
    assert add(tiny, id_, user("b"), **{"x-stainless-retry-count": "0"}) != added
    assert said(tiny, id_)[2:] == ["b", "b"]


def test_a_deleted_response_leaves_its_items(tiny: Daemon) -> None:
    id_ = begun(tiny)
    first = response_of(ask(tiny, "a", "x", conversation=id_))
    quiet(tiny)
    assert tiny.served.ask("DELETE", f"{RESPONSES}/{first['id']}").status == 200
    assert gone(tiny.served.ask("GET", f"{RESPONSES}/{first['id']}"))
    assert gone(tiny.served.ask("DELETE", f"{RESPONSES}/{first['id']}"))
    assert said(tiny, id_) == ["a", "x"]
    response_of(ask(tiny, "b", "y", conversation=id_))
    assert said(tiny, id_) == ["a", "x", "b", "y"]


def test_a_conversation_is_a_session(tiny: Daemon) -> None:
    """It is listed, found, exported, and gone with it."""
    id_ = begun(tiny, user("An uncommon-word."))
    assert [one.id for one in tiny.store.search("uncommon-word", 5).sessions] == [id_]  # type: ignore[union-attr]
    exported = tiny.served.ask("GET", f"/ssmd/v1/sessions/{id_}/export")
    assert exported.status == 200, exported.body
    made = tiny.served.ask("POST", "/ssmd/v1/sessions/import", exported.body)
    assert made.status == 201, made.body
    assert gone(send(tiny, "GET", f"/{made.json['id']}")), "a file has no list of items"
    assert "uncommon-word" in json.dumps(tiny.served.ask("GET", f"/ssmd/v1/sessions/{made.json['id']}").json)
    response_of(ask(tiny, "a", "x", conversation=id_))
    quiet(tiny)
    assert tiny.served.ask("DELETE", f"/ssmd/v1/sessions/{id_}").status == 200
    assert gone(send(tiny, "GET", f"/{id_}"))
    plain = tiny.chat("a").headers["x-ssmd-session"]
    assert gone(send(tiny, "GET", f"/{plain}"))
    assert gone(ask(tiny, "a", conversation=plain))


def test_a_deleted_conversation_takes_its_text_along(tiny: Daemon, folder: Path) -> None:
    id_ = begun(tiny, user("zq-first-secret"), metadata={"note": "zq-second-secret"})
    first = response_of(ask(tiny, "zq-third-secret", "x", conversation=id_))
    quiet(tiny)
    assert send(tiny, "DELETE", f"/{id_}").status == 200
    assert gone(tiny.served.ask("GET", f"{RESPONSES}/{first['id']}"))
    soon(lambda: not any(b"zq-" in file.read_bytes() for file in folder.iterdir() if file.is_file()))


def test_what_cannot_be_is_refused_by_name(tiny: Daemon) -> None:
    id_ = begun(tiny, user("a"))
    first = response_of(ask(tiny, "b", "x", conversation=id_))
    answer = ask(tiny, "c", conversation=id_, previous_response_id=first["id"])
    assert (answer.status, answer.error["param"]) == (400, "conversation")
    for fields, param in (
        ({"conversation": 5}, "conversation"),
        ({"conversation": {}}, "conversation.id"),
        ({"conversation": id_, "store": False}, "store"),
        ({"conversation": id_, "session": "ses_1"}, "session"),
    ):
        answer = ask(tiny, "c", **fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
    for unknown in ("conv_" + "0" * 24, "conv_x", "x", "ses_" + "0" * 24):
        answer = ask(tiny, "c", conversation=unknown)
        assert gone(answer), answer.body
        assert answer.error["param"] == "conversation"
        for method, path, body in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [user("a")]}),
            ("GET", "/items/msg_1", None),
            ("DELETE", "/items/msg_1", None),
        ):
            assert gone(send(tiny, method, f"/{unknown}{path}", body)), (method, path)
    for items, param in (
        ([{"type": "web_search_call"}], "items[0]"),
        ([user("a"), {"role": "user"}], "items[1].content"),
        ([5], "items[0]"),
        ([user("a")] * 21, "items"),
        ("a", "items"),
    ):
        for path in ("", f"/{id_}/items"):
            answer = send(tiny, "POST", path, {"items": items})
            assert (answer.status, answer.error["param"]) == (400, param), answer.body
    for metadata in ({"a": 1}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(i): "" for i in range(17)}):
        assert send(tiny, "POST", "", {"metadata": metadata}).status == 400
    assert said(tiny, id_) == ["a", "b", "x"]


def test_empty_conversations_count_as_text(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = begun(tiny)
    monkeypatch.setattr(turns, "_LEAST_TEXT_BYTES", 0)
    assert tiny.store is not None
    monkeypatch.setattr(tiny.store, "quota", 1)
    for answer in (send(tiny, "POST"), send(tiny, "POST", f"/{id_}/items", {"items": [user("a")]})):
        assert (answer.status, answer.error["code"]) == (503, "store_error"), answer.body
        assert "remove sessions" in answer.error["message"]


def test_conversations_of_another_key_are_not_found(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    keys = written(tmp_path / "keys", "alice alice-has-this-one\nbob bob-has-another-one\n")
    alice, bob = bearer("alice-has-this-one"), bearer("bob-has-another-one")
    with daemon(artifacts["mamba-f32"], tmp_path / "data", settings=Settings(api_keys_file=keys)) as one:
        made = send(one, "POST", "", {"items": [user("a")]}, **alice).json
        [item] = send(one, "GET", f"/{made['id']}/items", **alice).json["data"]
        body = {"model": one.model, "input": "b", "max_output_tokens": 4}
        for method, path, given in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [user("a")]}),
            ("GET", f"/items/{item['id']}", None),
            ("DELETE", f"/items/{item['id']}", None),
        ):
            answer = send(one, method, f"/{made['id']}{path}", given, **bob)
            stranger = send(one, method, f"/conv_{'0' * 24}{path}", given, **bob)
            assert gone(answer), (method, path)
            assert answer.body.replace(made["id"].encode(), b"") == stranger.body.replace(b"conv_" + b"0" * 24, b"")
        for fields in ({"conversation": made["id"]}, {"input": [{"type": "item_reference", "id": item["id"]}]}):
            assert gone(one.served.ask("POST", RESPONSES, {**body, **fields}, bob))
        mine = one.served.ask("POST", RESPONSES, {**body, "conversation": made["id"]}, alice)
        assert mine.status == 200, mine.body
        assert len(send(one, "GET", f"/{made['id']}/items", **alice).json["data"]) == 3


def test_without_a_store_there_are_no_conversations(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None) as one:
        answer = send(one, "POST", "", {})
        assert (answer.status, "--no-store" in answer.error["message"]) == (400, True)
        for path in ("/conv_x", "/conv_x/items"):
            assert "--no-store" in send(one, "GET", path).error["message"]
        assert gone(ask(one, "b", conversation="conv_x"))


def test_an_echo_goes_on_from_the_response_itself(tiny: Daemon) -> None:
    """As the Agents SDK does: it adds the items of each response, and sends the whole list with the next request."""
    id_ = begun(tiny)
    given = [user(LONG)]
    first = response_of(ask(tiny, given, "It rains."))
    add(tiny, id_, *given, *first["output"])
    quiet(tiny)
    second = response_of(ask(tiny, [*listed(tiny, id_), user("b")], "ok"))
    assert second["usage"]["ssmd"]["resume"] == "exact"
    assert second["usage"]["ssmd"]["session"] == first["usage"]["ssmd"]["session"]
    assert cached(second["usage"]) >= first["usage"]["input_tokens"]
    assert said(tiny, id_) == [LONG, "It rains."]
    assert text_of(second) == "ok"
