"""With `ack: remote` an answer ends when the database has its turn, and never waits for long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import pytest
from conftest import TinyArtifacts
from keeping import BUILD, LINEAGE, PRODUCER, SPECS, VOCABULARY, Chat, new_store, user
from remotes import DatabasePlace
from sessions.remote.test_roaming import Machine, until

from ssmd.sessions.checkpoint import Maker, Scope
from ssmd.sessions.remote import link as link_module
from ssmd.sessions.remote.ends import RemoteReader
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.sending import send
from ssmd.sessions.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "data")


@pytest.fixture
def linked(store: Store, database: DatabasePlace) -> Iterator[Callable[[], Link]]:
    """Return a function that links the store to the database."""
    links: list[Link] = []

    def link() -> Link:
        made = Link(store, lambda: database.open(create=True), acknowledges=True)
        made.connect()
        links.append(made)
        return made

    yield link
    for one in links:
        one.close()


def say(store: Store, turn: str, session: str = "ses_1") -> None:
    Chat(store, session).say(turn, None, f"Question {turn}.", "An answer.")


def test_an_answer_waits_until_the_remote_has_its_turn(
    store: Store, database: DatabasePlace, linked: Callable[[], Link]
) -> None:
    link, there, acknowledged = linked(), list[bool](), threading.Event()
    say(store, "t1")

    def then() -> None:
        there.append("turn/ses_1/t1" in database.rows())
        acknowledged.set()

    link.when_sent(["t1"], then)
    assert not there
    link.start()
    assert acknowledged.wait(60)
    assert there == [True]
    assert link.state(["t1"]) == "sent"
    link.when_sent(["t1"], then)  # it was sent already
    assert there == [True, True]


def test_an_answer_does_not_wait_for_long(
    store: Store, linked: Callable[[], Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its server hangs, or its thread sends a large state; here the thread begins later."""
    monkeypatch.setattr(link_module, "ACK_S", 0.2)
    link, ends = linked(), list[float]()
    say(store, "t1")
    began, ended = time.monotonic(), threading.Event()

    def then() -> None:
        ends.append(time.monotonic() - began)
        ended.set()

    link.when_sent(["t1"], then)
    assert ended.wait(30)
    assert ends[0] >= 0.2
    assert link.state(["t1"]) == "waiting"
    say(store, "t2", "ses_2")
    at_once, waited = threading.Event(), threading.Event()
    link.when_sent(["t2"], at_once.set)  # else each answer would be late, as long as the server hangs
    assert at_once.is_set()
    monkeypatch.setattr(link_module, "ACK_S", 30.0)
    link.start()
    until(lambda: link.state(["t2"]) == "sent")
    say(store, "t3", "ses_3")  # the next answers wait again
    link.when_sent(["t3"], waited.set)
    assert waited.wait(30)
    assert link.state(["t3"]) == "sent"


def test_a_turn_is_sent_after_its_answer_or_when_it_waits(
    store: Store, linked: Callable[[], Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending it at once costs the next turn some milliseconds."""
    monkeypatch.setattr(link_module, "SETTLE_S", 60.0)
    monkeypatch.setattr(link_module, "ACK_S", 60.0)
    link, acknowledged = linked(), threading.Event()
    say(store, "t1")
    link.start()
    until(lambda: link.state(["t1"]) == "sent")
    say(store, "t2", "ses_2")
    time.sleep(0.5)
    assert link.state(["t2"]) == "waiting"
    link.when_sent(["t2"], acknowledged.set)
    assert acknowledged.wait(30)
    assert link.state(["t2"]) == "sent"


def test_a_failure_lets_answers_go(store: Store, linked: Callable[[], Link], database: DatabasePlace) -> None:
    link, ended = linked(), threading.Event()
    say(store, "t1")
    link.when_sent(["t1"], ended.set)
    database.go_away()
    link.start()
    assert ended.wait(link_module.ACK_S * 0.9)
    assert link.problem == "unreachable"
    at_once = threading.Event()
    link.when_sent(["t1"], at_once.set)  # for the next 30 s no answer waits
    assert at_once.is_set()


def test_a_read_only_database_is_still_asked(
    store: Store, linked: Callable[[], Link], database: DatabasePlace, tmp_path: Path
) -> None:
    """Here a turn waits, so that the thread fails each time. No answer waits for it."""
    other, spec, link = new_store(tmp_path / "other"), SPECS["hybrid"], linked()
    other.shares = lambda: None
    Chat(other, "ses_2", spec).say("o1", None, "Tell me of a river.", "It flows.")
    remote = database.open()
    send(other, remote)
    remote.close()
    database.server.admin(f"ALTER DATABASE {database.database} SET default_transaction_read_only = on")
    database.server.cut_off(database.database)
    try:
        say(store, "t1")
        link.start()
        until(lambda: link.problem == "unreachable")
        reader = RemoteReader(Maker(Scope(spec.digest(), LINEAGE, BUILD), PRODUCER, spec), VOCABULARY)
        said = [m for t in other.turns("ses_2") for m in t.conversation] + [user("And then?")]
        link.bring(said, store.domain, None, reader)
        assert [t.id for t in store.turns("ses_2")] == ["o1"]
        at_once = threading.Event()
        link.when_sent(["t1"], at_once.set)
        assert at_once.is_set()
    finally:
        database.server.admin(f"ALTER DATABASE {database.database} RESET default_transaction_read_only")


@pytest.mark.parametrize("remote", [(), ("--remote", "/mnt/nas/ssmd")], ids=["none", "folder"])
def test_a_folder_acknowledges_nothing(remote: tuple[str, ...], artifacts: TinyArtifacts, tmp_path: Path) -> None:
    environment = {**os.environ, "SSMD_DATA_DIR": str(tmp_path / "data"), "SSMD_ACK": "remote"}
    done = commands.ssmd("serve", str(artifacts["llama-f32"]), "--port", "0", *remote, env=environment)
    assert done.returncode != 0
    assert "this needs a database as `remote`; a folder acknowledges nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_says_what_the_database_has(
    artifacts: TinyArtifacts, tmp_path: Path, database: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSMD_ACK", "remote")
    machine, said = Machine(tmp_path / "a", artifacts["llama-f32"], database.setting), list[dict[str, str]]()
    with machine.daemon:
        own = machine.say(said, "Tell me of a river.")
        assert (own["stored"], own["remote"]) == (True, "sent")
        assert len(database.rows()) == 1
        asked = {"model": machine.daemon.get("/v1/models")[1]["data"][0]["id"], "input": "And a lake?"}
        made = machine.daemon.post("/v1/responses", asked | {"max_output_tokens": 4})
        assert made["usage"]["ssmd"]["remote"] == "sent"
        read = machine.daemon.get(f"/v1/responses/{made['id']}")[1]
        assert "remote" not in read["usage"]["ssmd"]  # what is stored with the turn is older than that
        database.go_away()
        own = machine.say(said, "And then?")
        assert (own["stored"], own["remote"]) == (True, "waiting")
