"""Turns at reading requests: clients that send much, beside others' answers, or leave."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import daemon, request, soon
from starlette.requests import Request

from ssmd.api.generate import answer, fair_reading, front
from ssmd.api.generate.answer import ClientGone, Delivery
from ssmd.api.generate.fair_reading import AT_ONCE, LONG_BYTES, FairPool, SharedResult, client_of
from ssmd.api.http.access import Caller, set_caller
from ssmd.api.openai import tokenize
from ssmd.engine.engine import Engine
from ssmd.engine.prompt.planner import Planner
from ssmd.engine.prompt.raw import RawPlanner
from ssmd.engine.request import Delta
from ssmd.sessions.store import Store
from ssmd.text.tokenizer import Tokenizer


class Held:
    """Work that is begun and not done before it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def by(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            assert self.go.wait(30)
            return name

        return work


async def begun(held: Held, count: int) -> None:
    while len(held.begun) < count:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("127.0.0.2", "127.0.0.2"),
        ("::ffff:127.0.0.2", "127.0.0.2"),
        ("::1", "::/64"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2", "2001:db8::/64"),
        ("2001:db8:0:0:1:2:3:4", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64%eth0"),
        ("fe80::2%eth0", "fe80::/64%eth0"),
        ("process.12", "process.12"),
    ],
)
def test_a_client_is_an_address_a_network_or_a_process(host: str, place: str) -> None:
    scope = {"type": "http", "client": (host, 1)}
    set_caller(scope, Caller(), Caller)
    assert client_of(Request(scope)) == place


def test_a_client_has_few_read_at_once_and_holds_up_no_other() -> None:
    async def run() -> tuple[list[str], list[str]]:
        all_, held = FairPool(lambda client: True), Held()
        asked = [asyncio.create_task(all_.run(held.by(f"a{i}"), "a", 9, Delivery())) for i in range(5)]
        await begun(held, AT_ONCE)
        asked.append(asyncio.create_task(all_.run(held.by("b"), "b", 9, Delivery())))
        await begun(held, AT_ONCE + 1)
        first = list(held.begun)
        held.go.set()
        return first, await asyncio.gather(*asked)

    first, done = asyncio.run(run())
    assert first == [*(f"a{i}" for i in range(AT_ONCE)), "b"]
    assert done == ["a0", "a1", "a2", "a3", "a4", "b"]


def test_a_short_body_does_not_wait_for_its_clients_long_ones() -> None:
    async def run() -> list[str]:
        pool, held = FairPool(lambda client: False), Held()
        long = [asyncio.create_task(pool.run(held.by("long"), "a", LONG_BYTES + 1)) for _ in range(5)]
        await begun(held, AT_ONCE)
        assert await asyncio.wait_for(pool.run(lambda: "short", "a", LONG_BYTES), 30) == "short"
        assert held.begun == ["long"] * AT_ONCE
        held.go.set()
        return await asyncio.gather(*long)

    assert asyncio.run(run()) == ["long"] * 5


def test_a_shared_result_is_made_once_for_all_that_wait() -> None:
    made: list[str] = []

    def make() -> str:
        made.append("once")
        if len(made) == 1:
            raise ValueError("not the first time")
        return "made"

    async def run() -> list[object]:
        pool, one = FairPool(lambda client: False), SharedResult(make, "test")
        first = await asyncio.gather(*(one.get(pool) for _ in range(8)), return_exceptions=True)
        return [*first, await one.get(pool)]

    found = asyncio.run(run())
    assert [type(one) for one in found[:1]] == [ValueError], "an error is not kept"
    assert found[1:] == ["made"] * 8
    assert len(made) == 2


def test_who_leaves_while_waiting_is_not_read() -> None:
    async def left() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def run() -> tuple[list[str], list[object]]:
        all_, held = FairPool(lambda client: True), Held()
        gone = Delivery()
        asked = [
            asyncio.create_task(all_.run(held.by(f"a{i}"), "a", 9, gone if i == AT_ONCE else Delivery()))
            for i in range(AT_ONCE + 2)
        ]
        await begun(held, AT_ONCE)
        await gone.watch(left)
        with pytest.raises(ClientGone):
            await asked[AT_ONCE]
        held.go.set()
        return held.begun, await asyncio.gather(*asked, return_exceptions=True)

    begun_, done = asyncio.run(run())
    assert f"a{AT_ONCE}" not in begun_
    assert isinstance(done.pop(AT_ONCE), ClientGone)
    assert done == ["a0", "a1", f"a{AT_ONCE + 1}"]


def test_one_that_fails_passes_its_turn_on() -> None:
    def fail() -> str:
        raise ValueError("no")

    async def run() -> list[object]:
        all_ = FairPool(lambda client: True)
        asked: list[Awaitable[str]] = [all_.run(fail, "a", 9, Delivery()) for _ in range(5)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        return [*map(type, failed), await all_.run(lambda: "read", "a", 9, Delivery())]

    assert asyncio.run(run()) == [ValueError] * 5 + ["read"]


def test_beside_others_answers_reading_has_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_reading, "CREDIT_S", 0.02)
    monkeypatch.setattr(fair_reading, "REFILL", 0.0)
    beside = True

    def long() -> str:
        total = 0
        for i in range(2_000_000):
            total += i
        return "read"

    async def run() -> None:
        nonlocal beside
        all_ = FairPool(lambda client: beside and client == "a")
        assert await all_.run(long, "a", 9, Delivery()) == "read"
        assert await all_.run(long, "b", 9, Delivery()) == "read"
        assert await all_.run(long, "b", 9, Delivery()) == "read", "nobody's answer is held up by it"
        waits = asyncio.create_task(all_.run(long, "a", 9, Delivery()))
        _, pending = await asyncio.wait([waits], timeout=1)
        assert pending == {waits}
        beside = False
        assert await waits == "read"

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_long_bodies_are_read_where_a_processor_is_free() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def run() -> list[int]:
        all_ = FairPool(lambda client: False)
        return [await all_.run(priority, "a", n, Delivery()) for n in (LONG_BYTES, LONG_BYTES + 1)]

    assert asyncio.run(run()) == [priority(), 19]


def test_session_reads_are_few_per_client_and_do_not_delay_chat(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, sessions = Held(), Store.sessions

    def listed(*args: Any) -> object:
        held.by("one")()
        return sessions(*args)

    monkeypatch.setattr(Store, "sessions", listed)
    raw = b"GET /ssmd/v1/sessions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with daemon(artifacts["mamba-f32"], tmp_path) as one:

        def asking(address: str) -> socket.socket:
            made = socket.create_connection(("127.0.0.1", one.served.port), 30, source_address=(address, 0))
            made.sendall(raw)
            return made

        many = [asking("127.0.0.2") for _ in range(10)]
        soon(lambda: len(held.begun) == AT_ONCE)
        other = asking("127.0.0.3")
        soon(lambda: len(held.begun) == AT_ONCE + 1)
        assert one.chat("Anybody there?").status == 200
        assert len(held.begun) == AT_ONCE + 1
        held.go.set()
        for each in (*many, other):
            assert each.recv(64).startswith(b"HTTP/1.1 200")
            each.close()


TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/tokenize": ("ids", {"content": "a few words"}),
    "/detokenize": ("written", {"tokens": [5, 6, 7]}),
    "/apply-template": ("rendered", {"messages": [{"role": "user", "content": "a few words"}]}),
}


@pytest.mark.parametrize("path", TEXTS)
def test_sixty_texts_hold_up_no_health_no_metrics_and_no_chat(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    held, (name, fields) = Held(), TEXTS[path]
    owner: type[Any] = Engine if name == "rendered" else RawPlanner
    works = getattr(owner, name)

    def slowly(*args: Any, **options: Any) -> object:
        held.by("text")()
        return works(*args, **options)

    with daemon(artifacts["llama-f32"], tmp_path) as one:
        monkeypatch.setattr(owner, name, slowly)
        raw = request({"model": one.model, **fields}, path)
        many = [one.served.connect(raw, at="127.0.0.2") for _ in range(60)]
        soon(lambda: len(held.begun) == AT_ONCE)
        for asked in ("/health", "/metrics", "/ssmd/v1/metrics", "/v1/models"):
            assert one.served.ask("GET", asked).status == 200
        for at in ("127.0.0.2", "127.0.0.3"):  # the client of the texts, and another one
            with one.served.connect(request(one.body(max_tokens=1)), at=at) as chat:
                assert chat.recv(64).startswith(b"HTTP/1.1 200")
        assert len(held.begun) == AT_ONCE
        held.go.set()
        for each in many:
            assert each.recv(64).startswith(b"HTTP/1.1 200")
            each.close()


def test_a_text_is_not_read_on_for_a_client_that_left(
    artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, pieces, left = Tokenizer.read, list[int](), threading.Event()

    def watched(self: Tokenizer, text: str) -> object:
        pieces.append(len(text))
        if len(pieces) == 2:
            client.close()
            assert left.wait(30)
        return read(self, text)

    gone = Delivery.leave

    def leave(self: Delivery) -> None:
        gone(self)
        left.set()

    with daemon(artifacts["llama-f32"], None) as one:
        monkeypatch.setattr(Tokenizer, "read", watched)
        monkeypatch.setattr(Delivery, "leave", leave)
        text = {"model": one.model, "content": "word " * (1 << 17), "parse_special": False}
        client = one.served.connect(request(text, "/tokenize"))
        assert left.wait(30)
        soon(lambda: not any(hosted.leases for hosted in one.host._loader.hosted.values()), within_s=60)
        assert len(pieces) == 2, "of some twenty"


def test_a_text_of_too_many_tokens_is_refused_unread(artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Tokenizer, text: str) -> object:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(tokenize, "MAX_TOKENS", 1000)
    with daemon(artifacts["llama-f32"], None) as one:
        monkeypatch.setattr(Tokenizer, "read", read)
        refused = one.served.ask("POST", "/tokenize", {"model": one.model, "content": "a b " * 600})
        assert (refused.status, refused.error["param"]) == (400, "content")


def test_who_reads_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MOST_WAITING", 3)

    async def run() -> None:
        one = Delivery()
        for _ in range(3):
            one(Delta(0, "x"))
            await asyncio.sleep(0)
        with pytest.raises(ClientGone):
            one(Delta(0, "x"))
        await asyncio.sleep(0)
        with pytest.raises(ClientGone):
            await one.next()

    asyncio.run(run())


def test_what_nobody_waits_for_any_more_is_tokenised_no_further(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, plan = Tokenizer.read, Planner.plan
    encoded: list[int] = []
    over = threading.Event()

    def watched(self: Tokenizer, text: str) -> object:
        encoded.append(len(text))
        if len(encoded) == 2:
            client.close()
        return encode(self, text)

    def planned(*args: Any) -> object:
        try:
            return plan(*args)
        finally:
            over.set()

    with daemon(artifacts["mamba-f32"], tmp_path) as one:  # which has no context that bounds it
        monkeypatch.setattr(Tokenizer, "read", watched)
        monkeypatch.setattr(Planner, "plan", planned)
        client = one.served.connect(request(one.body("word " * (4 << 20), store=False)))
        assert over.wait(300)
    assert len(encoded) >= 2
    assert sum(encoded) < 10 << 20, "half of it"


@pytest.mark.parametrize("ends", ["client", "server"])
def test_metering_of_a_body_ends_once_its_request_is_gone(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    begun, ended, over = threading.Event(), threading.Event(), threading.Event()

    def endless(raw: bytes, go_on: Callable[[], None]) -> object:
        try:
            while not over.wait(0.01):
                begun.set()
                go_on()
            raise AssertionError("it went on")
        except ClientGone:
            ended.set()
            raise

    monkeypatch.setattr(front, "parse_object", endless)
    with daemon(artifacts["mamba-f32"], tmp_path) as one, one.served.connect(request(one.body())) as client:
        assert begun.wait(30)
        late = threading.Timer(20, over.set)
        late.start()
        if ends == "client":
            client.close()
            assert ended.wait(20)
    late.cancel()
    assert ended.is_set()
