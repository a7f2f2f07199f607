"""Responses in the background: accepted, answered without their client, retrieved, followed, cancelled and deleted."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api.test_anthropic import LONG
from api.test_calls import CALL, scripted
from api.test_responses import RESPONSES, TOOLS, ask, events_of, response_of, text_of
from api.test_responses_client import openai
from api.test_responses_state import NOWHERE, get, gone, items, said_in
from conftest import TinyArtifacts
from daemon import NO_END, Daemon, daemon, quiet, request, soon
from keyfile import bearer, written
from saying import Saying
from serving import Answer
from several import LLAMA, Several

from ssmd.api.generate.answer import Delivery, InFlightAnswer, InFlightAnswers
from ssmd.api.http.sse import EventStream
from ssmd.api.openai.responses.answer import ResponseAnswer, ResponseForm, encoded
from ssmd.api.openai.responses.background import follow
from ssmd.config import Settings
from ssmd.engine.request import Delta, Finish, Request, Usage
from ssmd.engine.terms import Rejection
from ssmd.sessions.rows import replies
from ssmd.sessions.store import Store
from ssmd.sessions.turn import EVERYBODY

Fields = dict[str, Any]
LASTING: Fields = {"logit_bias": NO_END, "max_output_tokens": 4000}
ODD = (
    *("<think>\n\nhm\n\n</think>\n\n  x  \n", "<think>a</think>b<think>c</think>d", "hm</think>\n\nyes"),
    *("<think>\nhm", f"before {CALL} after"),
)
ENDED = ("completed", "incomplete", "failed", "cancelled")
KEYS = "alice alice-has-this-one\nbob bob-has-this-one\nalice alice-looks-only read-only\n"


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


def begin(one: Daemon, given: Any, said: str | None = None, **fields: Any) -> Fields:
    """Ask for a response in the background, and return it as it was accepted."""
    found = response_of(ask(one, given, said, background=True, **fields))
    assert found["status"] in ("queued", "in_progress"), found
    assert (found["background"], found["output"], found["usage"], found["store"]) == (True, [], None, True)
    return found


def lasting(one: Daemon, given: Any = "on", **fields: Any) -> Fields:
    """Begin a response that goes on until it is stopped, and wait until the model is at it."""
    scripted(one, "x", ends=False)
    found = begin(one, given, **{**LASTING, **fields})
    soon(lambda: get(one, found["id"]).json["status"] == "in_progress")
    return found


def ended(one: Daemon, id_: str, **headers: str) -> Fields:
    """The response, once it has ended."""
    found: list[Fields] = []

    def over() -> bool:
        found.append(response_of(get(one, id_, **headers)))
        return found[-1]["status"] in ENDED

    soon(over, within_s=60)
    return found[-1]


def send(one: Daemon, id_: str, what: str = "cancel", **headers: str) -> Answer:
    if what == "delete":
        return one.served.ask("DELETE", f"{RESPONSES}/{id_}", headers=headers)
    return one.served.ask("POST", f"{RESPONSES}/{id_}/{what}", {}, headers)


def told(one: Daemon, id_: str, after: int | None = None) -> list[Fields]:
    """The events of a response, without a gap."""
    query = "?stream=true" if after is None else f"?stream=true&starting_after={after}"
    answer = get(one, id_, query)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    first = 0 if after is None else after + 1
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def without(events: list[Fields]) -> list[Fields]:
    """The events but for what is measured in seconds, or named only to the first client."""
    found: list[Fields] = json.loads(json.dumps(events))
    for event in found:
        for name in ("completed_at", "usage", "tools"):
            event.get("response", {}).pop(name, None)
    return found


def test_it_is_accepted_and_completed(tiny: Daemon) -> None:
    first = begin(tiny, "Background: " + LONG, "It rains.", instructions="Be short.", metadata={"a": "b"})
    whole = ended(tiny, first["id"])
    assert (whole["status"], text_of(whole), whole["error"]) == ("completed", "It rains.", None)
    assert whole["usage"]["ssmd"]["stored"]
    for name in ("id", "created_at", "model", "instructions", "metadata", "background"):
        assert whole[name] == first[name], name
    assert [item["role"] for item in items(tiny, first["id"])] == ["user"]
    quiet(tiny)
    second = response_of(
        ask(tiny, "And then?", "It stops.", previous_response_id=first["id"], instructions="Be short.")
    )
    assert second["usage"]["ssmd"]["resume"] == "exact"
    assert said_in(tiny, whole["usage"]["ssmd"]["session"])[-1] == [("user", "And then?"), ("assistant", "It stops.")]


def test_it_is_cut_by_its_limit_of_tokens(tiny: Daemon) -> None:
    whole = ended(tiny, begin(tiny, "short", max_output_tokens=3, logit_bias=NO_END)["id"])
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_its_stream_goes_on_without_its_client(tiny: Daemon) -> None:
    scripted(tiny, "x", ends=False)
    body = {"model": tiny.model, "input": "leave", **LASTING, "max_output_tokens": 300, "stream": True}
    with closing(tiny.served.connect(request({**body, "background": True}, RESPONSES))) as one:
        found = _until(one, b"output_text.delta")
    kinds = [line[7:] for line in found.decode().split("\n") if line.startswith("event: ")]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    id_ = found[found.index(b'"id":"') + 6 :].split(b'"')[0].decode()
    whole = ended(tiny, id_)
    assert (whole["status"], whole["usage"]["output_tokens"]) == ("incomplete", 300)


def test_events_are_the_same_live_followed_and_stored(tiny: Daemon) -> None:
    said = f"<think>\nhm\n</think>\n\nI look, and look.\n{CALL}"
    stream = ask(tiny, "Paris?", said, tools=TOOLS, background=True, stream=True)
    live = events_of(stream)
    kinds = [event["type"] for event in live]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 2
    id_ = live[0]["response"]["id"]
    again = told(tiny, id_)
    assert without(again) == without(live)
    assert again[-1]["response"]["usage"]["output_tokens"] == live[-1]["response"]["usage"]["output_tokens"]
    for after in (0, 1, 5, len(live) - 2):
        assert told(tiny, id_, after) == again[after + 1 :]
    assert told(tiny, id_, len(live) - 1) == []


def test_a_synchronous_response_is_told_again_in_one_piece(tiny: Daemon) -> None:
    first = response_of(ask(tiny, "whole", "It rains and rains."))
    events = told(tiny, first["id"])
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == ["It rains and rains."]
    assert events[-1]["response"]["output"][0]["content"] == first["output"][0]["content"]


@pytest.mark.parametrize("background", [True, False])
def test_odd_answers_are_the_same_live_and_later(background: bool, tiny: Daemon) -> None:
    """Text between calls, and reasoning whose marks the stored text shows otherwise."""
    for said in ODD:
        live = events_of(ask(tiny, "Paris?", said, tools=TOOLS, background=background, stream=True))
        id_, output = live[0]["response"]["id"], live[-1]["response"]["output"]
        assert without(told(tiny, id_))[-1]["response"]["output"] == output, said
        assert response_of(get(tiny, id_))["output"] == output, said
        if background:
            assert without(told(tiny, id_)) == without(live), said
        whole = response_of(ask(tiny, "Paris?", said, tools=TOOLS))
        assert _bare(whole["output"]) == _bare(response_of(get(tiny, whole["id"]))["output"]) == _bare(output), said


def _bare(output: list[Fields]) -> list[Any]:
    """Items without the ids that each answer has of its own."""
    return [(item["type"], item["id"][-2:], item.get("arguments"), item.get("content")) for item in output]


def test_two_readers_follow_it_to_its_end(tiny: Daemon) -> None:
    first = lasting(tiny, "follow", max_output_tokens=400)
    with ThreadPoolExecutor() as threads:
        one, other = threads.submit(told, tiny, first["id"]), threads.submit(told, tiny, first["id"], 20)
    assert one.result()[-1]["type"] == "response.incomplete"
    assert other.result() == one.result()[21:]
    assert without(told(tiny, first["id"])) == without(one.result())


def test_a_reader_that_does_not_read_is_cut(
    artifacts: TinyArtifacts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with daemon(artifacts["mamba-f32"], tmp_path, stall_s=0.5, as_program=Saying) as one:
        first = lasting(one, top_logprobs=20, max_output_tokens=20_000)
        path = f"GET {RESPONSES}/{first['id']}?stream=true HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with closing(one.served.connect(path.encode(), receive_buffer=4096)):
            soon(lambda: "a follower of a response has not read" in caplog.text, within_s=120)
            assert response_of(get(one, first["id"]))["status"] == "in_progress"
        send(one, first["id"])


def test_a_cancelled_response_keeps_its_text(tiny: Daemon) -> None:
    first = lasting(tiny)
    with ThreadPoolExecutor() as threads:
        reader = threads.submit(told, tiny, first["id"])
        soon(lambda: bool(tiny.engine.metrics.snapshot()["queue"]["running"]))
        stopped = response_of(send(tiny, first["id"]))
    assert (stopped["status"], stopped["incomplete_details"]) == ("cancelled", None)
    assert response_of(send(tiny, first["id"])) == stopped == response_of(get(tiny, first["id"]))
    last = reader.result()[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert without(told(tiny, first["id"])) == without(reader.result())


def test_only_a_response_in_the_background_is_cancelled(tiny: Daemon) -> None:
    whole = response_of(ask(tiny, "sync", "It rains."))
    scripted(tiny, "x", ends=False)
    body = {"model": tiny.model, "input": "on", **LASTING, "stream": True}
    with closing(tiny.served.connect(request(body, RESPONSES))) as one:
        found = _until(one, b"output_text.delta")
        id_ = found[found.index(b'"id":"') + 6 :].split(b'"')[0].decode()
        for refused in (send(tiny, id_), send(tiny, whole["id"])):
            assert (refused.status, refused.error["message"]) == (400, "Cannot cancel a synchronous response.")
    completed = ended(tiny, begin(tiny, "done", "It rains.")["id"])
    assert response_of(send(tiny, completed["id"])) == completed
    assert gone(send(tiny, NOWHERE))


def test_a_deleted_response_is_stopped_and_removed(tiny: Daemon) -> None:
    first = lasting(tiny, "delete me")
    assert send(tiny, first["id"], "delete").status == 200
    assert gone(get(tiny, first["id"]))
    assert gone(send(tiny, first["id"], "delete"))
    assert tiny.store is not None
    assert "delete me" not in {turn.messages[0].content for s in tiny.store.sessions() for turn in tiny.turns(s.id)}


def test_it_needs_a_store(tiny: Daemon, artifacts: TinyArtifacts) -> None:
    refused = ask(tiny, "a", background=True, store=False)
    assert (refused.status, refused.error["param"]) == (400, "background")
    assert "store" in refused.error["message"]
    with daemon(artifacts["mamba-f32"], None) as one:
        refused = ask(one, "a", background=True)
        assert (refused.status, "--no-store" in refused.error["message"]) == (400, True)


@pytest.mark.parametrize("query", ["?stream=perhaps", "?stream=true&starting_after=-1", "?starting_after=x"])
def test_bad_queries_are_named(query: str, tiny: Daemon) -> None:
    answer = get(tiny, NOWHERE, query)
    assert answer.status == 400
    assert answer.error["param"] in query


def test_nothing_goes_on_from_a_response_under_way(tiny: Daemon) -> None:
    first = lasting(tiny)
    answer = ask(tiny, "b", previous_response_id=first["id"])
    assert (answer.status, answer.error["code"]) == (400, "response_not_completed")
    assert answer.error["param"] == "previous_response_id"
    assert get(tiny, first["id"], "/input_items").error["code"] == "response_not_completed"
    send(tiny, first["id"])
    assert response_of(ask(tiny, "b", "Yes.", previous_response_id=first["id"]))["status"] == "completed"


def test_its_conversation_is_locked_until_its_end(tiny: Daemon) -> None:
    conversation = tiny.served.ask("POST", "/v1/conversations", {}).json["id"]
    first = lasting(tiny, "a", conversation=conversation)
    assert ask(tiny, "b", conversation=conversation).error["code"] == "conversation_locked"
    assert ask(tiny, "b", conversation=conversation, background=True).error["code"] == "conversation_locked"
    send(tiny, first["id"])
    whole = ended(tiny, begin(tiny, "c", "It rains.", conversation=conversation)["id"])
    assert whole["conversation"] == {"id": conversation}
    found = tiny.served.ask("GET", f"/v1/conversations/{conversation}/items?order=asc").json["data"]
    assert [item["role"] for item in found] == ["user", "assistant"], "a cancelled response adds nothing"


def test_a_repeated_request_gets_the_same_response(tiny: Daemon) -> None:
    scripted(tiny, "x", ends=False)
    body = {"model": tiny.model, "input": "once", "background": True, **LASTING, "max_output_tokens": 600}
    key = {"idempotency-key": "background"}
    first, second = (tiny.served.ask("POST", RESPONSES, body, key) for _ in range(2))
    assert second.headers["idempotent-replayed"] == "true"
    assert second.json["id"] == first.json["id"]
    assert tiny.served.ask("POST", RESPONSES, {**body, "input": "other"}, key).status == 422
    whole = ended(tiny, first.json["id"])
    third = response_of(tiny.served.ask("POST", RESPONSES, body, key))
    assert (third["id"], third["status"], text_of(third)) == (whole["id"], "incomplete", text_of(whole))


def test_a_repeated_stream_has_the_same_events(tiny: Daemon) -> None:
    scripted(tiny, "x", ends=False)
    body = {"model": tiny.model, "input": "stream", "background": True, "stream": True, **LASTING}
    body, key = {**body, "max_output_tokens": 300}, {"idempotency-key": "stream in the background"}
    named = request(body, RESPONSES).replace(b"\r\n\r\n", b"\r\nidempotency-key: stream in the background\r\n\r\n", 1)
    with closing(tiny.served.connect(named)) as one:
        _until(one, b"output_text.delta")
    second, third = (tiny.served.ask("POST", RESPONSES, body, key) for _ in range(2))
    assert second.headers["idempotent-replayed"] == third.headers["idempotent-replayed"] == "true"
    id_ = events_of(second)[0]["response"]["id"]
    assert without(events_of(second)) == without(events_of(third)) == without(told(tiny, id_))
    assert tiny.served.ask("POST", RESPONSES, {**body, "input": "other"}, key).status == 422


def test_a_follower_misses_no_delta_that_comes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = _Raced(Delta(0, "a "))
    monkeypatch.setattr(InFlightAnswer, "deltas", property(lambda _: (deltas,)))
    form = ResponseForm("m", {"background": True, "tools": []}, store=True, origins={}, encrypts=False)
    sent: list[bytes] = []

    async def send_on(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def follows() -> None:
        delivery, stream = Delivery(), EventStream(send_on, 5, 5)
        found = InFlightAnswer(Request(()), delivery, partial(ResponseAnswer, form, encoded(form.echo)), lambda: None)
        await stream.open({})
        reader = asyncio.create_task(follow(found, -1, stream, asyncio.Event()))
        while b'"delta":"a "' not in b"".join(sent):
            await asyncio.sleep(0.01)
        delivery.put(Finish(("stop",), Usage.of_nothing(None, 0)))
        await reader

    asyncio.run(follows())
    assert b'"text":"a b "' in b"".join(sent)


class _Raced(list[Delta]):
    """Deltas to which the engine's thread adds one just after they were read first."""

    def __init__(self, *first: Delta) -> None:
        super().__init__(first)

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        if len(self) == 1:
            self.append(Delta(0, "b "))
        return found


def _schema() -> Fields:
    return {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}


def test_a_prompt_without_room_fails_it(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["llama-f32"], tmp_path) as one:
        first = begin(one, "word " * 3000)
        whole = ended(one, first["id"])
        assert (whole["status"], whole["error"]["code"]) == ("failed", "context_length_exceeded")
        assert [event["type"] for event in told(one, first["id"])] == [
            "response.created",
            "response.queued",
            "response.failed",
        ]
        assert [event["type"] for event in told(one, first["id"], 30)] == ["response.failed"]
        assert one.store is not None
        assert one.store.sessions() == []
        assert response_of(send(one, first["id"])) == whole
        assert one.engine.metrics.snapshot()["requests"] == {"ok": 0, "context_length_exceeded": 1}
        assert send(one, first["id"], "delete").status == 200
        assert gone(get(one, first["id"]))


def test_other_keys_do_not_see_it(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    alice, bob, looks = bearer("alice-has-this-one"), bearer("bob-has-this-one"), bearer("alice-looks-only")
    settings = Settings(api_keys_file=written(tmp_path / "keys", KEYS))
    with daemon(artifacts["mamba-f32"], tmp_path / "data", settings=settings, as_program=Saying) as one:
        scripted(one, "x", ends=False)
        body = {"model": one.model, "input": "a", "background": True, **LASTING}
        assert one.served.ask("POST", RESPONSES, body, looks).status == 403
        first = response_of(one.served.ask("POST", RESPONSES, body, alice))
        for _ in ("under way", "ended"):
            for more in ("", "?stream=true", "/input_items"):
                assert gone(get(one, first["id"], more, **bob)), more
            for what in ("cancel", "delete"):
                assert gone(send(one, first["id"], what, **bob)), what
            assert one.served.ask("POST", RESPONSES, {**body, "previous_response_id": first["id"]}, bob).status == 404
            assert get(one, first["id"], **looks).status == 200
            assert send(one, first["id"], **looks).status == 403
            send(one, first["id"], **alice)
        assert ended(one, first["id"], **looks)["status"] == "cancelled"


def test_a_full_daemon_accepts_no_more(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["mamba-f32"], tmp_path, settings=Settings(max_queue=2), as_program=Saying) as one:
        scripted(one, "x", ends=False)
        two = [begin(one, name, **LASTING)["id"] for name in ("a", "b")]
        refused = ask(one, "c", background=True, **LASTING)
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) > 0
        for id_ in two:
            send(one, id_)
        assert ended(one, begin(one, "c", "It rains.")["id"])["status"] == "completed"


def test_requests_at_once_are_bounded_too(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["mamba-f32"], tmp_path, settings=Settings(max_queue=2), as_program=Saying) as one:
        scripted(one, "x", ends=False)
        assert one.store is not None
        with ThreadPoolExecutor(12) as threads, one.store.writing():  # no receipt can be written meanwhile
            asked = [threads.submit(ask, one, f"{i}", background=True, **LASTING) for i in range(12)]
            soon(lambda: sum(answer.done() for answer in asked) == 10)
        accepted = [answer.result() for answer in asked if answer.result().status == 200]
        for answer in accepted:
            send(one, answer.json["id"])
        assert len(accepted) == 2
        assert {answer.result().error["code"] for answer in asked if answer.result().status != 200} == {"queue_full"}


def test_it_waits_for_its_model_and_is_cancelled(three: Several) -> None:
    with three.held_back(LLAMA) as gate:
        body = {"model": "llama", "input": "wait", "background": True, "max_output_tokens": 5, "temperature": 0}
        first, second = (response_of(three.ask("POST", RESPONSES, body)) for _ in range(2))
        assert gate.reached.wait(10)
        assert three.ask("GET", f"{RESPONSES}/{first['id']}").json["status"] == "queued"
        cancelled = response_of(three.ask("POST", f"{RESPONSES}/{first['id']}/cancel", {}))
        assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
        assert three.ask("GET", f"{RESPONSES}/{first['id']}").json == cancelled
        gate.opened.set()
        soon(lambda: three.ask("GET", f"{RESPONSES}/{second['id']}").json["status"] in ENDED, within_s=30)
        assert three.ask("GET", f"{RESPONSES}/{second['id']}").json["usage"]["output_tokens"] == 5


# A daemon that ends.


def test_a_copy_of_its_files_has_it_as_failed(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The receipt is on disk before the client has the id."""
    with daemon(artifacts["mamba-f32"], tmp_path / "data", as_program=Saying) as one:
        first = lasting(one, "killed", text=_schema(), metadata={"a": "x" * 500})
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        send(one, first["id"])
    with daemon(artifacts["mamba-f32"], tmp_path / "copy", as_program=Saying) as one:
        whole = response_of(get(one, first["id"]))
        assert (whole["status"], whole["error"]["code"], whole["output"]) == ("failed", "server_error", [])
        assert "Send the request again" in whole["error"]["message"]
        assert whole.keys() == first.keys()
        for name in ("id", "created_at", "model", "metadata", "background", "text"):
            assert whole[name] == first[name], name
        assert one.store is not None
        assert one.store.sessions() == []
        answer = ask(one, "b", previous_response_id=first["id"])
        assert (answer.status, answer.error["code"]) == (400, "response_not_completed")


def test_a_daemon_that_ends_says_how_far_it_came(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["mamba-f32"], tmp_path / "data", as_program=Saying, max_running=1) as one:
        first, second = lasting(one), begin(one, "waits", **LASTING)
        one.host.shutdown(0.0)
        found = [ended(one, id_) for id_ in (first["id"], second["id"])]
        assert [whole["status"] for whole in found] == ["incomplete", "failed"]
    with daemon(artifacts["mamba-f32"], tmp_path / "data", as_program=Saying) as one:
        assert [response_of(get(one, whole["id"])) for whole in found] == found
        assert found[0]["incomplete_details"] == {"reason": "stopped"}
        assert text_of(found[0])
        assert found[1]["error"]["code"] == "shutting_down"
        assert told(one, first["id"])[-1]["type"] == "response.incomplete"


def test_it_is_under_way_until_its_end_is_written() -> None:
    """Its last event comes before the callbacks of that event."""

    async def end() -> tuple[InFlightAnswer, InFlightAnswer | None]:
        under_way, delivery = InFlightAnswers(), Delivery()
        one = InFlightAnswer(Request(()), delivery, ResponseAnswer, lambda: None, accepted=True)  # type: ignore[arg-type] # builds nothing
        under_way.enter(one, lambda done: done())
        delivery.put(Finish(("stop",), Usage.of_nothing(None, 0.0)))
        found = under_way.find(one.request.id, EVERYBODY)
        later = await found.unless_ended()
        with pytest.raises(Rejection, match="is under way"):
            under_way.find(one.request.id, EVERYBODY)
        return found, later

    found, later = asyncio.run(end())
    assert found.end is not None
    assert later is None


def test_receipts_are_bounded_and_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MAX_RECEIPTS", 3)
    store = Store.open(tmp_path)
    for i in range(6):
        store.receive(f"turn_{i}", {"model": str(i)}, running=["turn_0"])
    with store.snapshot() as stored:
        there = [i for i in range(6) if stored.receipt(f"turn_{i}") is not None]
    assert there == [0, 2, 3, 4, 5]
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE receipt SET facts = replace(facts, '5', '6') WHERE turn = 'turn_5'")
        connection.exec_driver_sql("UPDATE receipt SET facts = 'x' WHERE turn = 'turn_4'")
    with store.snapshot() as stored:
        assert [stored.receipt(f"turn_{i}") for i in (3, 4, 5)] == [{"model": "3"}, None, None]
    store.close()


def test_the_openai_client_polls_follows_and_cancels(tiny: Daemon) -> None:
    scripted(tiny, "x", ends=False)
    asked = {"model": tiny.model, "input": "a", "max_output_tokens": 80, "temperature": 0}
    asked["extra_body"] = {"logit_bias": NO_END}
    found = openai("background", tiny.url, asked)
    assert found["polled"][0] in ("queued", "in_progress")
    assert found["polled"][1] == "incomplete"
    assert found["followed"] == found["again"]
    assert [number for _, number in found["again"]] == list(range(len(found["again"])))
    assert found["again"][-1][0] == "response.incomplete"
    assert found["texts"][0] == found["texts"][1] == found["text"]
    assert found["cancelled"] == ["cancelled"] * 3


def _until(one: socket.socket, what: bytes) -> bytes:
    found = b""
    while what not in found:
        found += one.recv(1 << 16)
    return found
