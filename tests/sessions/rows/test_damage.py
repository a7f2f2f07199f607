"""Damaged checkpoints are taken out where they lie, with what stands on the same rows, and with nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from keeping import HYBRID, Chat, assert_same, echo_of, find, new_store, state_of, user

from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows.blobs import DamagedState
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Chat]:
    """Two answers to one turn: t1 - t2 - t3, and t1 - u2."""
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    chat.say("t2", "t1", "more", "sure")
    chat.say("t3", "t2", "and more", "sure, sure")
    chat.say("u2", "t1", "another", "well")
    yield chat
    store.close()


def alter(store: Store, statement: str, *values: int | None) -> None:
    with closing(sqlite3.connect(store.file.parent / FILE, isolation_level=None)) as connection:
        assert connection.execute(statement, values).rowcount > 0


def left(chat: Chat) -> set[str]:
    """The turns whose end can still be restored; what is left is as it was written, and all sizes are right."""
    found = set()
    for turn, (number, ids) in chat.ends.items():
        assert number is not None
        with suppress(StoreError):
            assert_same(chat.store.load(number, HYBRID), state_of(HYBRID, ids))
            found.add(turn)
    assert not check(chat.store.file.parent).damages
    assert [t.id for t in chat.store.turns("s")] == ["t1", "t2", "t3", "u2"], "no text goes"
    return found


def test_rows_that_others_stand_on(chat: Chat) -> None:
    """The turn's own KV rows, which the turn below lists too; not those of the sibling."""
    number, _ = chat.ends["t2"]
    chat.store.fork("s", "t2")
    mine = "id = (SELECT max(segment) FROM checkpoint_segment WHERE checkpoint = ?)"
    alter(chat.store, f"UPDATE segment SET data = zeroblob(length(data)) WHERE {mine}", number)
    before = chat.store.bytes_stored()
    assert number is not None
    assert chat.store.drop_damaged(number, HYBRID) == 3, "the end of t2, and both states of t3"
    assert 0 < chat.store.bytes_stored() < before
    assert left(chat) == {"t1", "u2"}


def test_a_note_that_it_is_a_part_of_nothing(chat: Chat) -> None:
    number, _ = chat.ends["t2"]
    assert number is not None
    listed = "segment IN (SELECT segment FROM checkpoint_segment WHERE checkpoint = ?)"
    alter(chat.store, f"UPDATE checkpoint_segment SET checkpoint = 'text' WHERE checkpoint = 1 AND {listed}", number)
    alter(chat.store, "UPDATE piece SET data = x'' WHERE checkpoint = ?", number)
    assert chat.store.drop_damaged(number, HYBRID) == 1


@pytest.mark.parametrize(
    "change",
    [
        "checkpoint_segment SET segment = CAST(segment AS BLOB)",
        "turn SET depth = 'text'",
        "checkpoint SET position = x'ff'",
        "checkpoint SET recurrent_nbytes = 'text'",
        "segment SET nbytes = x''",
        "total SET nbytes = 'text'",
    ],
)
def test_numbers_that_are_none(chat: Chat, change: str) -> None:
    """Sessions are listed, their sizes counted, and states collected all the same; a check finds it."""
    alter(chat.store, f"UPDATE {change} WHERE rowid = 2" if "_segment" not in change else f"UPDATE {change}")
    alter(chat.store, "UPDATE session SET own_nbytes = NULL")
    assert [s.id for s in chat.store.sessions()] == ["s"]
    chat.store.settle()
    assert check(chat.store.file.parent).damages
    chat.store.collect(1000)
    assert [t.id for t in chat.store.turns("s")] == ["t1", "t2", "t3", "u2"]


@pytest.mark.parametrize("change", ["build = CAST(x'ff' AS TEXT)", "build = x'00'", "layout = 'other'"])
def test_a_row_that_names_nothing(chat: Chat, change: str) -> None:
    number, ids = chat.ends["t3"]
    assert number is not None
    alter(chat.store, f"UPDATE checkpoint SET {change} WHERE id = ?", number)
    found = find(chat.store, chat.scope, [*ids, 1], "s")
    assert found is not None
    assert found.id == number, "nobody is kept from reading by what it says"
    with pytest.raises(DamagedState):
        chat.store.load(number, HYBRID)
    assert chat.store.drop_damaged(number, HYBRID) == 1
    assert left(chat) == {"t1", "t2", "u2"}


def test_a_hash_that_the_index_alone_has(chat: Chat) -> None:
    """The block with the row was written over, that with the index was not; a fork inherits the turn."""
    chat.store.fork("s", "t3")
    chat.store.close()
    name = "tbl_name = 'turn' AND sql LIKE '%(chain%'"
    with closing(sqlite3.connect(chat.store.file)) as raw:
        [index] = raw.execute(f"SELECT * FROM sqlite_master WHERE {name}")
        raw.execute("PRAGMA writable_schema = ON")
        raw.execute(f"DELETE FROM sqlite_master WHERE {name}")
        raw.commit()
    alter(chat.store, "UPDATE turn SET chain = zeroblob(32) WHERE id = 't3'")
    with closing(sqlite3.connect(chat.store.file)) as raw:
        raw.execute("PRAGMA writable_schema = ON")
        raw.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", index)
        raw.commit()
    said = [m for turn in chat.store.path("t3") for m in turn.conversation]
    found = echo_of(chat.store, [*said, user("go on")])
    assert found is not None
    assert found.session == "s"


def test_a_producer_that_cannot_be_read(chat: Chat) -> None:
    """Then it is not the one at hand; the state is good."""
    number, ids = chat.ends["t3"]
    alter(chat.store, "UPDATE checkpoint SET producer = CAST(x'70ff' AS TEXT) WHERE id = ?", number)
    found = find(chat.store, chat.scope, [*ids, 1], "s")
    assert found is not None
    assert (found.id, found.producer) == (number, "p\udcff")


def test_values_that_are_its_own(chat: Chat) -> None:
    number, _ = chat.ends["t2"]
    assert number is not None
    alter(chat.store, "UPDATE piece SET data = CAST('x' || substr(data, 2) AS BLOB) WHERE checkpoint = ?", number)
    assert chat.store.drop_damaged(number, HYBRID) == 1
    assert left(chat) == {"t1", "t3", "u2"}


def test_what_can_be_read_stays(chat: Chat) -> None:
    """It may have been the memory, not the disk."""
    number, _ = chat.ends["t2"]
    assert number is not None
    assert chat.store.drop_damaged(number, HYBRID) == 0
    assert left(chat) == {"t1", "t2", "t3", "u2"}
    with pytest.raises(StoreError, match="not stored any more"):
        chat.store.drop_damaged(10_000, HYBRID)
