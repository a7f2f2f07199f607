"""Trust domains: what one owner wrote is not there for another one, and costs the other nothing to pass over."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from keeping import HYBRID, LINEAGE, VOCABULARY, Chat, echo_of, find, new_store, user
from sqlalchemy import event, select

from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.fsck.repair import check, repair
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.schema import checkpoint
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.sessions import read_sessions
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.sessions.turn import EVERYBODY, NOBODY, Domain, StoreError, UnknownSession, conversation

ALICE, BOB = Domain("alice", ("alice", "")), Domain("bob", ("bob",))
SHARED = Domain("bob", None)
SYSTEM = "Be brief."


def talk(store: Store, session: str, owner: str) -> Chat:
    """Write two turns with the same words and the same ids for each owner."""
    chat = Chat(store, session, owner=owner)
    chat.say(f"{session}1", None, "hi", "hello", system=SYSTEM)
    chat.say(f"{session}2", f"{session}1", "more", "sure")
    return chat


@pytest.fixture
def talks(store: Store) -> dict[str, Chat]:
    return {owner: talk(store, f"of-{owner or 'nobody'}-", owner) for owner in ("", "alice", "bob")}


def listed(store: Store, domain: Domain) -> list[str]:
    return [one.info.owner for one in store.of(domain).sessions()]


def owners(store: Store) -> dict[str, list[str]]:
    """Of all rows, by table."""
    tables = (session_table, turn_table, checkpoint)
    with store.reading() as connection:
        return {t.name: list(connection.scalars(select(t.c.owner).order_by(t.c.owner))) for t in tables}


def test_each_sees_its_own_sessions(store: Store, talks: dict[str, Chat]) -> None:
    assert listed(store, BOB) == ["bob"]
    assert listed(store, ALICE) == ["alice", ""]
    assert listed(store, EVERYBODY) == listed(store, SHARED) == ["bob", "alice", ""]
    assert listed(store, NOBODY) == []
    assert [one.id for one in store.of(ALICE).sessions(1)] == [talks["alice"].info.id]
    assert [one.id for one in store.of(ALICE).sessions(5, talks["alice"].info.id)] == [talks[""].info.id]
    newest = [store.of(domain).newest() for domain in (ALICE, BOB, NOBODY)]
    assert [one and one.id for one in newest] == [talks["alice"].info.id, talks["bob"].info.id, None]


def test_each_goes_on_in_its_own(store: Store, talks: dict[str, Chat]) -> None:
    said = [*conversation(store.path("of-bob-2")), user("and?")]
    for domain, session in ((BOB, "of-bob-"), (ALICE, "of-alice-"), (Domain("", ("",)), "of-nobody-")):
        echoed = echo_of(store.of(domain), said)
        assert echoed is not None
        assert (echoed.session, echoed.turn) == (session, f"{session}2")
    assert echo_of(store.of(Domain("carol", ("carol",))), said) is None


def test_no_state_is_anothers(store: Store, talks: dict[str, Chat]) -> None:
    """Not of the same ids either; all three have their own."""
    bob = talks["bob"]
    ids, found = bob.turns["of-bob-2"].ids.own, {}
    for name, domain in (("alice", ALICE), ("bob", BOB), ("all", EVERYBODY), ("carol", Domain("carol", ("carol",)))):
        one = find(store.of(domain), bob.scope, [*ids, 1])
        found[name] = None if one is None else one.id
    assert found["bob"] == bob.ends["of-bob-2"][0]
    assert found["alice"] in (talks["alice"].ends["of-alice-2"][0], talks[""].ends["of-nobody-2"][0])
    assert found["all"] is not None
    assert found["carol"] is None
    skipped = find(store.of(BOB), bob.scope, [*ids, 1], skip=[found["bob"] or 0])
    assert skipped is not None
    assert skipped.position < len(ids) - 1
    assert owners(store)["checkpoint"] == [*[""] * 4, *["alice"] * 4, *["bob"] * 4]
    assert check(store.file.parent).damages == ()


ASKED: dict[str, Callable[[Store, str], Any]] = {
    "session": lambda store, one: store.session(one),
    "turns": lambda store, one: store.turns(one),
    "resumable": lambda store, one: store.resumable(one),
    "list": lambda store, one: store.sessions(5, one),
    "pin": lambda store, one: store.pin(one),
    "fork": lambda store, one: store.fork(one),
    "delete": lambda store, one: store.delete(one),
    "echo": lambda store, one: echo_of(store, [user("x")], one),
    "export": lambda store, one: export_session(store, one, store.file.parent / "out.ssmd"),
}


@pytest.mark.parametrize("asked", list(ASKED))
def test_anothers_session_is_as_one_that_never_was(asked: str, store: Store, talks: dict[str, Chat]) -> None:
    before, said = owners(store), []
    queries: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *given: queries.append(given[2]))
    for one in ("of-alice-", "of-nobody-", "of-carol-"):
        queries.clear()
        with pytest.raises(UnknownSession) as refused:
            ASKED[asked](store.of(BOB), one)
        said.append((str(refused.value).replace(one, "…"), *queries))
    assert said[0] == said[1] == said[2], "in words, and in what is looked up for them"
    assert len(said[0]) > 2
    assert owners(store) == before
    if asked != "delete":
        ASKED[asked](store.of(ALICE), "of-nobody-")
    with pytest.raises(UnknownSession):
        store.of(BOB).path("of-alice-2")


def test_what_is_nobodys_becomes_whose_who_goes_on_with_it(store: Store, talks: dict[str, Chat]) -> None:
    """Else the next first key would read what this one said."""
    chat = talks[""]
    chat.info = replace(store.of(ALICE).session(chat.info.id).info, owner="alice")
    chat.say("of-nobody-3", "of-nobody-2", "and?", "done")
    assert listed(store, ALICE) == ["alice", "alice"]
    first = Domain("bob", ("bob", ""))
    assert listed(store, first) == ["bob"]
    store.of(BOB).delete("of-bob-")
    assert echo_of(store.of(first), [*conversation(store.path("of-nobody-2")), user("x")]) is None, "turns of before"
    assert owners(store)["checkpoint"].count("alice") == 6


def test_a_fork_is_whose_who_makes_it(store: Store, talks: dict[str, Chat]) -> None:
    assert store.of(ALICE).fork("of-nobody-").info.owner == "alice"
    assert store.of(SHARED).fork("of-alice-").info.owner == "bob"
    assert store.fork("of-bob-").info.owner == "bob", "without a key it is whose the other is"


def test_a_fork_that_another_made_is_not_gone_on_with(store: Store, talks: dict[str, Chat]) -> None:
    """Its turns are one's own, and it was used last."""
    fork = store.of(Domain("alice", None)).fork("of-bob-")
    said = [*conversation(store.path("of-bob-2")), user("x")]
    for domain, session in ((BOB, "of-bob-"), (EVERYBODY, fork.id)):
        echoed = echo_of(store.of(domain), said)
        assert echoed is not None
        assert echoed.session == session


def test_turns_go_to_the_fork_that_stands_on_them(store: Store, talks: dict[str, Chat]) -> None:
    fork = store.of(SHARED).fork("of-alice-")
    store.of(ALICE).delete("of-alice-")
    with store.reading() as connection:
        rows = connection.execute(select(turn_table.c.owner).where(turn_table.c.session == fork.id)).scalars().all()
    assert rows == ["bob", "bob"]
    assert len(store.of(BOB).turns(fork.id)) == 2


def test_an_import_is_whose_who_imports_it(store: Store, talks: dict[str, Chat], tmp_path: Path) -> None:
    """And its id is another one where another owner has that."""
    file, local = tmp_path / "out.ssmd", {LINEAGE: LocalModel("made-up", HYBRID, VOCABULARY)}
    export_session(store.of(ALICE), "of-alice-", file)
    assert b"alice" not in file.read_bytes().replace(b"of-alice-", b"")
    done = import_session(store.of(BOB), file, local=local)
    assert (done.renamed, store.of(BOB).session(done.session).info.owner) == (True, "bob")
    with pytest.raises(UnknownSession):
        store.of(ALICE).session(done.session)
    ids = talks["bob"].turns["of-bob-2"].ids.own
    found = find(store.of(BOB), talks["bob"].scope, [*ids, 1], done.session)
    assert found is not None
    with store.reading() as connection:
        row = select(checkpoint.c.owner).where(checkpoint.c.origin == done.session)
        assert set(connection.scalars(row)) == {"bob"}


def without_row(data: Path, session: str) -> None:
    raw = sqlite3.connect(data / FILE)
    assert raw.execute("DELETE FROM session WHERE id = ?", [session]).rowcount == 1
    raw.commit()
    raw.close()


def test_a_session_made_anew_is_whose_it_was(tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    talk(store, "s", "bob")
    store.close()
    without_row(tmp_path / "data", "s")
    assert repair(tmp_path / "data").repaired
    store = Store.open(tmp_path / "data")
    assert (listed(store, BOB), listed(store, ALICE)) == (["bob"], [])
    store.close()


def test_that_a_session_is_damaged_is_told_to_its_owner_alone(tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    talk(store, "s", "bob")
    without_row(tmp_path / "data", "s")
    with pytest.raises(StoreError, match="was damaged") as told:
        store.of(BOB).session("s")
    assert not isinstance(told.value, UnknownSession)
    with pytest.raises(UnknownSession):
        store.of(ALICE).session("s")
    store.close()


def test_who_sees_a_part_finds_it_by_index(store: Store, talks: dict[str, Chat]) -> None:
    asked: list[tuple[str, Any]] = []
    bob = talks["bob"]
    with store.reading() as connection:
        event.listen(connection, "before_cursor_execute", lambda *given: asked.append((given[2], given[3])))
        for domain in (ALICE, BOB, EVERYBODY):
            read_sessions(connection, domain, 10)
            read_sessions(connection, domain, 10, "of-bob-" if domain is BOB else "of-alice-")
            assert Snapshot(connection, domain).resume(bob.scope, bob.turns["of-bob-2"].ids.then([1]))[0] is not None
        assert len(asked) > 10
        for statement, given in list(asked):
            plan = [row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given)]
            by_order = "ix_session_last_used_at" in " ".join(plan)  # all of them, in their order
            assert by_order or not [step for step in plan if re.match(r"SCAN (session|turn|checkpoint)\b", step)], (
                statement,
                plan,
            )
