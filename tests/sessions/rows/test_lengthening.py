"""Longer states whose first rows serve a prompt: which ones, and how many rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from keeping import ATTENTION, Chat, assert_same, new_store, state_of

from ssmd.model.state import Part, State
from ssmd.sessions.checkpoint import StoredCheckpoint
from ssmd.sessions.line import Ids, Line
from ssmd.sessions.rows.blobs import joined
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain, StoreError

CELL = 8
EVERY = Domain("", None)


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    """A turn of 24 ids, and one that adds 100 of input and 100 of an answer."""
    chat = Chat(new_store(tmp_path / "data"), "ses", ATTENTION)
    chat.say("t0", None, "Hello", "Hi.")
    chat.say("t1", "t0", "A long text", "A long answer", tokens=100)
    return chat


def ids_with_other_end(chat: Chat, length: int) -> Ids:
    """The ids of the second turn, of which the last 30 are others."""
    return np.concatenate([chat.turns["t1"].ids.own[:length], np.full(30, 499, np.int32)])


def longest(chat: Chat, ids: Ids, domain: Domain = EVERY) -> StoredCheckpoint | None:
    with chat.store.of(domain).snapshot() as stored:
        found, line, _ = stored.resume(chat.scope, Line.of(ids))
        return None if found is None else stored.lengthen(chat.scope, found, line, CELL)


def read(store: Store, number: int, end: int) -> State:
    parts: list[Part] = []
    with store.parts(number, ATTENTION, end=end) as (position, some):
        parts += some
    return joined(iter(parts), ATTENTION, position)


@pytest.mark.parametrize("length", [24, 31, 32, 33, 70, 123, 124])
def test_a_state_is_cut_where_its_ids_end_to_fit(chat: Chat, length: int) -> None:
    ids = ids_with_other_end(chat, length)
    found = longest(chat, ids)
    assert found is not None
    assert found.position in (23, 124)
    assert found.start == max(found.position, length // CELL * CELL)
    if found.longer is not None:
        assert_same(read(chat.store, *found.longer), state_of(ATTENTION, ids[: found.start]))


def test_rows_of_an_answer_are_not_cut(chat: Chat) -> None:
    """They were computed token by token, and so have other bits than those of a prompt."""
    found = longest(chat, ids_with_other_end(chat, 200))
    assert found is not None
    assert (found.position, found.longer) == (124, None)


def test_one_token_of_a_prompt_is_left(chat: Chat) -> None:
    """The last one gives the logits."""
    found = longest(chat, chat.turns["t1"].ids.own[: 8 * CELL])
    assert found is not None
    assert found.start == 7 * CELL


def test_rows_of_other_owners_are_not_seen(tmp_path: Path) -> None:
    chat = Chat(new_store(tmp_path / "data"), "ses", ATTENTION, owner="anna")
    chat.say("t0", None, "Hello", "Hi.")
    chat.say("t1", "t0", "A long text", "A long answer", tokens=100)
    ids = ids_with_other_end(chat, 90)
    found = longest(chat, ids, Domain("anna", ("anna",)))
    assert found is not None
    assert found.start == 88
    assert longest(chat, ids, Domain("ben", ("ben",))) is None


@pytest.mark.parametrize(
    "theirs", ["checkpoint SET owner = 'anna' WHERE position = 124", "turn SET owner = 'anna' WHERE id = 't1'"]
)
def test_what_others_grew_from_a_shared_state_is_not_seen(chat: Chat, theirs: str) -> None:
    ids, ben = ids_with_other_end(chat, 90), Domain("ben", ("ben", ""))
    before = longest(chat, ids, ben)
    assert before is not None
    assert before.start == 88
    with chat.store.writing() as connection:
        connection.exec_driver_sql(f"UPDATE {theirs}")
    after = longest(chat, ids, ben)
    assert after is not None
    assert (after.position, after.longer) == (23, None)


def test_an_altered_turn_tells_no_ids(chat: Chat) -> None:
    with chat.store.writing() as connection:
        connection.exec_driver_sql("UPDATE turn SET ids = x'00000000' WHERE id = 't1'")
    found = longest(chat, ids_with_other_end(chat, 90))
    assert found is not None
    assert (found.position, found.longer) == (23, None)


def test_a_cut_reads_and_verifies_what_it_needs(chat: Chat) -> None:
    ids = ids_with_other_end(chat, 90)
    found = longest(chat, ids)
    assert found is not None
    assert found.longer is not None
    number, end = found.longer
    with pytest.raises(StoreError, match="cannot be cut to 300"):
        read(chat.store, number, 300)
    with chat.store.writing() as connection:
        connection.exec_driver_sql("UPDATE segment SET checksum = zeroblob(16) WHERE first > 0")
    with pytest.raises(StoreError, match="altered"):
        read(chat.store, number, end)


@pytest.mark.parametrize(("origin", "start"), [("", 88), ("@" + "A" * 43, 88), ("ses", 23)])
def test_rows_of_a_trusted_machine_are_cut_alike(origin: str, start: int, chat: Chat) -> None:
    """Rows of an unknown one are not: its states serve as they came, and their session alone."""
    with chat.store.writing() as connection:
        connection.exec_driver_sql(f"UPDATE checkpoint SET origin = '{origin}'")
        connection.exec_driver_sql(f"INSERT INTO trusted_machine VALUES ('@{'A' * 43}', '', 0)")
    with chat.store.snapshot() as stored:
        found, line, _ = stored.resume(chat.scope, Line.of(ids_with_other_end(chat, 90)), None, "ses")
        assert found is not None
        assert stored.lengthen(chat.scope, found, line, CELL).start == start
