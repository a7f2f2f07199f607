"""Answers under way: they go on in the background, are followed by others than their clients, and ended by hand."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon, text_of
from keyfile import bearer, written
from several import LLAMA, NOBODY, Several, little_room, models_folder, several

from ssmd.engine.host.models import Model

ROOT = "/ssmd/v1/requests"
ALICE, BOB, SCREEN = "alice-has-this-one", "bob-has-this-one", "screens-look-at-this"
KEYS = f"alice {ALICE}\nbob {BOB}\nalice {SCREEN} read-only\n"
LASTING: Mapping[str, Any] = {"n": 4, "logprobs": True, "top_logprobs": 20}  # it takes a second or so


@pytest.fixture(scope="module")
def day(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """For tests that leave nothing under way."""
    with several(models_folder(artifacts, tmp_path_factory.mktemp("day") / "models"), max_running=4) as one:
        yield one


class Reader:
    """A stream of chunks as it comes. text: of choice 0."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._held = stream, b""
        self.status = int(self._line().split()[1])
        self.headers = {}
        while b":" in (line := self._line()):
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        self.found: list[dict[str, Any]] = []
        self.done = False

    def _line(self) -> bytes:
        while b"\n" not in self._held:
            more = self._stream.recv(65536)
            if not more:
                return b""
            self._held += more
        line, _, self._held = self._held.partition(b"\n")
        return line + b"\n"

    def next(self) -> bool:
        """Read an event; False at the end."""
        while line := self._line():
            if line == b"data: [DONE]\n":
                self.done = True
            if line == b"0\r\n" or self.done:
                return False
            if line.startswith(b"data: "):
                self.found.append(json.loads(line[6:]))
                return True
        return False

    def until_text(self) -> Reader:
        """Read up to the first word."""
        while not self.text:
            assert self.next(), self.found
        return self

    def rest(self) -> Reader:
        """Read to the end."""
        while self.next():
            pass
        return self

    @property
    def text(self) -> str:
        return text_of(self.found)

    @property
    def deltas(self) -> list[str]:
        choices = [choice for chunk in self.found for choice in chunk["choices"] if choice["index"] == 0]
        return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]

    @property
    def id(self) -> str:
        return str(self.found[0]["id"])

    @property
    def reasons(self) -> list[str]:
        return [c["finish_reason"] for chunk in self.found for c in chunk["choices"] if c["finish_reason"]]


def following(one: Several, id_: str, headers: Mapping[str, str] = NOBODY, **how: Any) -> socket.socket:
    extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return one.served.connect(f"GET {ROOT}/{id_}/stream HTTP/1.1\r\nhost: localhost\r\n{extra}\r\n".encode(), **how)


def running(one: Several, headers: Mapping[str, str] = NOBODY) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = one.metrics(headers)["running"]
    return found


def decoding(one: Several, least: int = 1) -> dict[str, Any]:
    """The row of the one request that is answered, once it has so many tokens."""
    rows: list[dict[str, Any]] = []

    def begun() -> bool:
        rows[:] = [row for row in running(one) if row["tokens"] >= least]
        return bool(rows)

    soon(begun)
    return rows[0]


def session(one: Several, id_: str, headers: Mapping[str, str] = NOBODY) -> Any:
    return one.ask("GET", f"/ssmd/v1/sessions/{id_}", headers=headers).json


# Following.


def test_who_follows_hears_all_of_it(day: Several) -> None:
    usage = {"include_usage": True}
    with day.asking("llama", "Follow me", stream_options=usage, **LASTING) as stream:
        first = Reader(stream).until_text()
        [row] = running(day)
        assert first.id == f"chatcmpl-{row['id']}"
        before = first.text
        with closing(following(day, row["id"])) as one, closing(following(day, first.id)) as other:
            followers = [Reader(one), Reader(other)]
            with ThreadPoolExecutor() as threads:
                list(threads.map(Reader.rest, [first, *followers]))
    day.quiet()
    for follower in followers:
        assert follower.status == 200
        assert follower.headers["content-type"] == first.headers["content-type"]
        assert follower.headers["x-ssmd-session"] == first.headers["x-ssmd-session"]
        assert [text_of(follower.found, i) for i in range(4)] == [text_of(first.found, i) for i in range(4)]
        roles = [chunk["choices"][0]["delta"].get("role") for chunk in follower.found[:4]]
        assert roles == ["assistant"] * 4
        assert follower.deltas[0].startswith(before), "what was said before comes at once"
        assert len(follower.deltas) > 2, "and then word by word"
        assert follower.reasons == first.reasons == ["length"] * 4
        for name in ("id", "object", "created", "model", "system_fingerprint"):
            assert {chunk[name] for chunk in follower.found} == {first.found[0][name]}, name
        assert follower.found[-1]["usage"] == first.found[-1]["usage"]
        assert follower.found[-1]["usage"]["ssmd"]["stopped"] is False
        assert follower.done
    answer = day.ask("GET", f"{ROOT}/{row['id']}/stream")
    assert (answer.status, answer.error["code"]) == (404, "request_not_found")


def test_what_is_not_under_way_is_not_found(day: Several) -> None:
    for id_ in ("gen_" + "0" * 24, "chatcmpl-gen_" + "0" * 24, "chatcmpl-", "%00", "x" * 2000):
        for method, what in (("GET", "stream"), ("POST", "stop")):
            answer = day.ask(method, f"{ROOT}/{id_}/{what}")
            assert (answer.status, answer.error["code"]) == (404, "request_not_found"), id_
            assert len(answer.error["message"]) < 300
    for method, path in (("POST", "stream"), ("GET", "stop"), ("GET", "")):
        assert day.ask(method, f"{ROOT}/gen_0/{path}").status in (404, 405)


def test_who_follows_and_leaves_or_does_not_read_harms_nobody(models: Path) -> None:
    with several(models, stall_s=0.5) as one, one.asking("llama", **LASTING) as stream:
        first = Reader(stream).until_text()
        with closing(following(one, first.id)) as leaves:
            Reader(leaves).until_text()
        with closing(following(one, first.id, receive_buffer=4096)) as idler, closing(following(one, first.id)) as good:
            follower = Reader(good)
            with ThreadPoolExecutor() as threads:
                list(threads.map(Reader.rest, [first, follower]))
            assert first.done
            assert follower.done
            assert follower.text == first.text
            assert first.reasons == ["length"] * 4
            assert idler.fileno() >= 0
        soon(lambda: one.metrics()["requests"] == {"ok": 1})


def test_what_waits_for_its_model_is_told_and_followed(three: Several) -> None:
    with three.held_back(LLAMA) as gate, three.asking("llama", max_tokens=20) as stream:
        assert gate.reached.wait(10)
        found = three.metrics()
        [row] = found["running"]
        assert (row["phase"], row["model"], row["session"]) == ("loading", LLAMA, None)
        assert (row["fed"], row["to_feed"], row["tokens"], row["ttft_ms"]) == (0, None, 0, None)
        assert found["queue"] == {"waiting": 1, "running": 0}
        assert found["state"] == "idle"
        with closing(following(three, row["id"])) as other, ThreadPoolExecutor() as threads:
            follower = threads.submit(lambda: Reader(other).rest())
            gate.opened.set()
            first = Reader(stream).rest()
            assert first.id == f"chatcmpl-{row['id']}"
            assert follower.result(30).text == first.text
            assert follower.result().headers["x-ssmd-session"] == first.headers["x-ssmd-session"]
    three.quiet()
    assert running(three) == []


def test_what_waits_for_its_model_is_stopped(three: Several) -> None:
    """The streams end as others do, whole answers too. The model is not loaded for them."""
    usage = {"include_usage": True}
    with three.held_back(LLAMA) as gate, three.asking("llama", n=2, stream_options=usage) as stream:
        assert gate.reached.wait(10)
        with ThreadPoolExecutor() as threads:
            whole = threads.submit(three.chat, "llama", "In one piece")
            soon(lambda: len(running(three)) == 2)
            ids = [row["id"] for row in running(three)]
            with closing(following(three, ids[0])) as other:
                follower = threads.submit(lambda: Reader(other).rest())
                for id_ in ids:
                    assert three.ask("POST", f"{ROOT}/{id_}/stop").json["id"] == id_
                first = Reader(stream).rest()
                assert follower.result(10).reasons == ["stop", "stop"]
            answer = whole.result(10)
        assert running(three) == []
        assert three.ask("POST", f"{ROOT}/{ids[0]}/stop").status == 404
    assert first.done
    assert first.reasons == ["stop", "stop"]
    told = first.found[-1]["usage"]
    assert (told["completion_tokens"], told["ssmd"]["stopped"], told["ssmd"]["stored"]) == (0, True, False)
    assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "")
    assert three.metrics()["requests"] == {"ok": 0, "stopped": 2}
    assert three.ask("GET", "/ssmd/v1/sessions").json["data"] == []
    three.quiet()


def test_a_background_request_awaits_its_model_without_a_client(three: Several) -> None:
    with three.held_back(LLAMA) as gate:
        for background in (True, False):
            with three.asking("llama", f"Later {background}", max_tokens=20, background=background):
                soon(lambda: len(running(three)) == 1 + (not background))  # noqa: B023
        soon(lambda: len(running(three)) == 1)
        [row] = running(three)
        with closing(following(three, row["id"])) as other, ThreadPoolExecutor() as threads:
            follower = threads.submit(lambda: Reader(other).rest())
            assert gate.reached.wait(10)
            gate.opened.set()
            assert follower.result(30).reasons == ["length"]
    three.quiet()
    soon(lambda: three.metrics()["requests"] == {"ok": 1, "cancelled": 1})


def test_a_model_that_cannot_be_loaded_is_told_to_who_follows(three: Several) -> None:
    graph = next((three.models / "granite").rglob("*.tflite"))
    good = graph.read_bytes()
    graph.unlink()  # it is a link
    graph.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    opened, trying = threading.Event(), three.host._loader._trial

    def slowly(model: Model) -> None:
        assert opened.wait(60)
        trying(model)

    three.host._loader._trial = slowly
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(three.chat, "granite")
        soon(lambda: bool(running(three)))
        with closing(following(three, running(three)[0]["id"])) as other:
            opened.set()
            follower = Reader(other)
        assert asked.result(30).error["code"] == "model_load_failed"
        assert follower.status == 503


def test_what_fails_is_told_to_who_follows(models: Path) -> None:
    with several(models) as one, one.asking("llama", **LASTING) as stream:
        first = Reader(stream).until_text()
        with closing(following(one, first.id)) as other:
            follower = Reader(other).until_text()
            one.host.shutdown(0)
            first.rest()
            follower.rest()
        assert follower.found[-1] == first.found[-1]
        assert follower.found[-1]["error"]["code"] == "shutting_down"
        assert not follower.done


def test_what_another_asked_is_neither_followed_nor_stopped(models: Path) -> None:
    with several(models, api_keys_file=written(models.parent / "keys", KEYS)) as one:
        with one.asking("llama", headers=bearer(ALICE), **LASTING) as stream:
            first = Reader(stream).until_text()
            unknown = one.ask("GET", f"{ROOT}/gen_{'0' * 24}/stream", headers=bearer(BOB)).error
            for method, what in (("GET", "stream"), ("POST", "stop")):
                answer = one.ask(method, f"{ROOT}/{first.id}/{what}", headers=bearer(BOB))
                assert (answer.status, answer.error["code"]) == (404, "request_not_found")
                assert answer.error["message"].replace(first.id, f"gen_{'0' * 24}") == unknown["message"]
                assert one.ask(method, f"{ROOT}/{first.id}/{what}").status == 401
            refused = one.ask("POST", f"{ROOT}/{first.id}/stop", headers=bearer(SCREEN))
            assert (refused.status, refused.error["code"]) == (403, "read_only_key")
            with closing(following(one, first.id, bearer(SCREEN))) as other:
                follower = Reader(other).until_text()
                assert one.ask("POST", f"{ROOT}/{first.id}/stop", headers=bearer(ALICE)).status == 202
                assert follower.rest().text == first.rest().text
        soon(lambda: one.metrics(bearer(BOB))["requests"] == {"ok": 0, "stopped": 1})


# In the background.


def test_in_the_background_it_goes_on_without_its_client(day: Several) -> None:
    with day.asking("llama", "Go on", background=True, **LASTING) as stream:
        first = Reader(stream).until_text()
    with closing(following(day, first.id)) as other:
        follower = Reader(other).rest()
    assert follower.done
    assert follower.reasons == ["length"] * 4
    assert follower.text.startswith(first.text)
    found = session(day, follower.headers["x-ssmd-session"])
    assert [turn["complete"] for turn in found["turns"]] == [True] * 4
    assert found["turns"][0]["messages"][-1]["content"] == follower.text
    day.quiet()


def test_without_it_the_answer_ends_and_who_follows_is_told(day: Several) -> None:
    with day.asking("llama", "Until I leave", **LASTING) as stream:
        first = Reader(stream).until_text()
        other = following(day, first.id)
        follower = Reader(other).until_text()
    with closing(other):
        follower.rest()
    assert follower.done
    assert follower.reasons == ["stop"] * 4
    assert follower.found[-1]["usage"]["ssmd"]["stopped"] is True
    day.quiet()


def test_a_whole_answer_goes_on_too(day: Several) -> None:
    with day.asking("llama", "All of it", stream=False, background=True, **LASTING):
        row = decoding(day)
    with closing(following(day, row["id"])) as other:
        follower = Reader(other).rest()
    assert follower.reasons == ["length"] * 4
    assert session(day, row["session"])["turns"][0]["complete"] is True
    day.quiet()


def test_in_the_background_it_is_named_while_it_waits(models: Path) -> None:
    with several(models, max_running=1, pin=("llama",)) as one, one.asking("llama", max_tokens=450) as stream:
        Reader(stream).until_text()
        with one.asking("llama", "I wait", background=True) as waits, one.asking("llama", "I am cut off") as other:
            named = Reader(waits)
            assert named.next()
            [row] = [row for row in running(one) if row["session"] == named.headers["x-ssmd-session"]]
            assert (row["phase"], f"chatcmpl-{row['id']}") == ("waiting", named.id)
            soon(lambda: len(running(one)) == 3)
            one.host.shutdown(0)
            assert named.rest().found[-1]["error"]["code"] == "shutting_down"
            assert not named.done
            assert Reader(other).rest().found[-1]["error"]["code"] == "shutting_down"


def test_in_the_background_it_goes_on_though_nobody_reads(models: Path) -> None:
    with several(models, stall_s=0.05, at=little_room()) as one:
        for background, outcome in ((True, "ok"), (False, "cancelled")):
            before = one.metrics()["requests"].get(outcome, 0)
            body = json.dumps(
                one.body("llama", max_tokens=150, stream=True, background=background, **{**LASTING, "n": 8})
            )
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            raw = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
            with closing(one.served.connect(raw, receive_buffer=4096)):
                soon(lambda: one.metrics()["requests"].get(outcome, 0) == before + 1, within_s=30)  # noqa: B023
        assert one.metrics()["requests"] == {"ok": 1, "cancelled": 1}


def test_a_model_stays_for_an_answer_in_the_background(three: Several) -> None:
    """Its client has left, and with it the client's hold on the model."""
    with three.asking("llama", background=True, keep_alive=0, **LASTING) as stream:
        first = Reader(stream).until_text()
    three.ask("POST", "/ssmd/v1/models/llama/unload")
    with closing(following(three, first.id)) as other:
        follower = Reader(other).until_text()
        assert three.row(LLAMA)["state"] == "unloading"
        assert follower.rest().reasons == ["length"] * 4
    soon(lambda: three.row(LLAMA)["state"] == "unloaded")
    assert three.leases() == 0


@pytest.mark.parametrize("value", [1, "true", [], {}])
def test_background_is_true_or_false(value: Any, day: Several) -> None:
    answer = day.chat("llama", background=value)
    assert (answer.status, answer.error["param"]) == (400, "background")


# Ended by hand.


def test_stopping_keeps_what_was_said(day: Several) -> None:
    with day.asking("llama", "Stop me", stream_options={"include_usage": True}) as stream:
        first = Reader(stream).until_text()
        stopped = day.ask("POST", f"{ROOT}/{first.id}/stop")
        first.rest()
        found = session(day, first.headers["x-ssmd-session"])  # before it is told the end it is written
    assert (stopped.status, stopped.json) == (
        202,
        {"id": first.id.removeprefix("chatcmpl-"), "object": "request.stopped"},
    )
    assert first.done
    assert first.reasons == ["stop"]
    usage = first.found[-1]["usage"]
    assert (usage["ssmd"]["stopped"], usage["ssmd"]["stored"]) == (True, True)
    assert 0 < usage["completion_tokens"] < 400
    [turn] = found["turns"]
    assert (turn["complete"], turn["messages"][-1]["content"]) == (False, first.text)
    assert day.ask("POST", f"{ROOT}/{first.id}/stop").error["code"] == "request_not_found"
    day.quiet()


def test_a_whole_answer_is_what_was_said_when_it_was_stopped(day: Several) -> None:
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(day.chat, "llama", "Whole", max_tokens=400, **LASTING)
        row = decoding(day, least=40)  # some have no text
        assert day.ask("POST", f"{ROOT}/{row['id']}/stop").status == 202
        answer = asked.result(30)
    assert answer.status == 200
    assert answer.json["usage"]["ssmd"]["stopped"] is True
    assert [choice["finish_reason"] for choice in answer.json["choices"]] == ["stop"] * 4
    assert answer.json["usage"]["completion_tokens"] < 1600
    assert answer.json["choices"][0]["message"]["content"]
    day.quiet()


def test_what_waits_for_a_lane_is_stopped_too(models: Path) -> None:
    with several(models, max_running=1, pin=("llama",)) as one:
        one.chat("llama")
        with one.asking("llama", "I have it", max_tokens=450) as stream:
            first = Reader(stream).until_text()
            with one.asking("llama", "I wait", n=1, stream_options={"include_usage": True}) as waits:
                soon(lambda: "waiting" in {row["phase"] for row in running(one)})
                [row] = [row for row in running(one) if row["phase"] == "waiting"]
                assert one.ask("POST", f"{ROOT}/{row['id']}/stop").status == 202
                second = Reader(waits).rest()
            assert first.rest().reasons == ["length"]
        assert second.done
        assert second.reasons == ["stop"]
        assert second.text == ""
        assert second.found[-1]["usage"]["ssmd"]["stopped"] is True
        assert one.metrics()["requests"] == {"ok": 2, "stopped": 1}


def test_what_had_ended_when_it_was_stopped_is_whole(day: Several) -> None:
    """A stop that comes too late changes nothing: an answer is over with its last token."""
    before = day.metrics()["requests"]
    with day.asking("llama", "Nearly over", max_tokens=1, stream_options={"include_usage": True}) as stream:
        first = Reader(stream).rest()
    assert first.found[-1]["usage"]["ssmd"]["stopped"] is False
    assert day.ask("POST", f"{ROOT}/{first.id}/stop").status == 404
    soon(lambda: day.metrics()["requests"]["ok"] == before["ok"] + 1)
