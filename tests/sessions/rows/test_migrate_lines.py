"""From one store format to the next: all that was said, all ids, all text and all states are what they were."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alembic import command
from alembic.config import Config
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import FED, HYBRID, LINEAGE, START, Chat, assert_same, echo_of, find, new_store, state_of, user, whole

from ssmd.sessions.fsck.repair import check, repair
from ssmd.sessions.line import as_ids
from ssmd.sessions.rows import database, opening
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.turns import to_micros
from ssmd.sessions.store import Store
from ssmd.sessions.turn import conversation
from ssmd.text.messages import Message, ToolCall

NOW = to_micros(START)
Old = tuple[str, str, str | None, int, list[int], int, str]  # id, session, parent, ids shared, ids, text shared, text


def old_database(folder: Path) -> sqlite3.Connection:
    """An empty one of the last revision before."""
    folder.mkdir(mode=0o700)
    engine = database.open_database(folder, busy_ms=1000)
    with database.migrating(engine, folder / FILE) as connection:
        config = Config()
        config.set_main_option("script_location", str(opening.migrations_dir()))
        config.attributes["connection"] = connection
        command.upgrade(config, "0007")
    engine.dispose()
    return sqlite3.connect(folder / FILE)


def insert(raw: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    raw.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(f':{n}' for n in row)})", row)


def insert_session(raw: sqlite3.Connection, name: str, head: str, **more: Any) -> None:
    row: dict[str, Any] = {"id": name, "created_at": NOW, "last_used_at": NOW, "model": "made-up", "lineage": LINEAGE}
    row |= {"clock": START.isoformat(), "head": head, "turns": 1, "title": "hi", "pinned": False, "imported": ""}
    insert(raw, "session", row | more)


def insert_turn(raw: sqlite3.Connection, turn: Old, depth: int, **more: Any) -> None:
    name, session, parent, ids_shared, ids, text_shared, text = turn
    row: dict[str, Any] = {"id": name, "session": session, "parent": parent, "depth": depth, "length": 2 * depth + 2}
    row |= {"chain": bytes(32), "messages": json.dumps([user(f"ask {name}").to_json()])}
    row |= {"answer": json.dumps({"role": "assistant", "content": f"say {name}"}), "ids_shared": ids_shared}
    row |= {"ids": as_ids(ids).tobytes(), "text_shared": text_shared, "text": text, "prompt_tokens": 1}
    row |= {"lineage": LINEAGE, "finish": "stop", "complete": True, "created_at": NOW}
    insert(raw, "turn", row | more)


def old_key(layout: str, lineage: str, ids: bytes) -> bytes:
    scope = json.dumps([layout, lineage]).encode()
    return hashlib.blake2b(scope + ids, digest_size=32, person=b"ssmd.prefix.1").digest()


def old_digest(new: sqlite3.Connection, row: sqlite3.Row) -> bytes:
    """Of what the checkpoint is made of, and nothing else."""
    running = hashlib.sha256(f"ssmd checkpoint 1 {row['position']}\n".encode())
    listed = "segment JOIN checkpoint_segment l ON l.segment = segment.id WHERE l.checkpoint"
    for kind, of in (("rows", listed), ("recurrent", "piece WHERE checkpoint")):
        for first, last, checksum in new.execute(
            f"SELECT first, last, checksum FROM {of} = ? ORDER BY first", (row["id"],)
        ):
            running.update(f"{kind} {first} {last} {checksum.hex()}\n".encode())
    return running.digest()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_turns_that_share_any_part_of_their_parents(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("old") / "data"
    expected: dict[str, tuple[list[int], str]] = {}
    depths: dict[str, int] = {}
    lineages: dict[str, str | None] = {}
    with closing(old_database(folder)) as raw, raw:
        insert_session(raw, "s", "t0")
        for n in range(data.draw(st.integers(1, 7))):
            name = f"t{n}"
            parent = data.draw(st.sampled_from([None, *expected]))
            above = expected[parent] if parent else ([], "")
            shared = data.draw(st.one_of(st.just(len(above[0])), st.integers(0, len(above[0]))))
            characters = data.draw(st.one_of(st.just(len(above[1])), st.integers(0, len(above[1]))))
            ids = data.draw(st.lists(st.integers(0, 9), max_size=40))
            text = data.draw(st.text("aé東", max_size=9))
            if not shared and not ids:  # only the words of it are known
                characters, text = 0, ""
            depths[name] = depths[parent] + 1 if parent else 0
            lineages[name] = data.draw(st.sampled_from([LINEAGE, LINEAGE, "c" * 64, None]))
            old = (name, "s", parent, shared, ids, characters, text)
            insert_turn(raw, old, depths[name], lineage=lineages[name])
            expected[name] = (above[0][:shared] + ids, above[1][:characters] + text)
        raw.execute("UPDATE session SET turns = ?", (len(expected),))
    store = Store.open(folder)
    for turn in store.turns("s"):
        ids, text = whole(store, turn.id)
        assert (ids, text) == (expected[turn.id][0], expected[turn.id][1]), turn.id
        assert turn.sound
        assert turn.depth == depths[turn.id]
        assert turn.lineage == (lineages[turn.id] or "")
        path = store.path(turn.id)
        assert [m.content for m in conversation(path)] == [w for t in path for w in (f"ask {t.id}", f"say {t.id}")]
        assert turn.root == path[0].id
        assert turn.length == 2 * len(path)
        echoed = echo_of(store, [*conversation(path), user("next")])
        assert echoed is not None
        assert (echoed.session, echoed.turn, echoed.stored) == ("s", turn.id, None)
        if turn.stem is not None:
            assert lineages[turn.stem] == lineages[turn.id], "ids of another model mean other text"
    store.close()
    assert check(folder).damages == ()


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Chat, dict[int, int]]:
    """A conversation with branches and a fork, written as the old format had it; the fork's id is `f`."""
    made = new_store(tmp_path / "new")
    chat = Chat(made, "s")
    for name, parent, asked, said in (
        ("t1", None, "hi", "hello"),
        ("t2", "t1", "more", "sure"),
        ("t3", "t2", "and?", "done"),
        ("t2b", "t1", "less", "<think>well</think>fine"),
    ):
        chat.say(name, parent, asked, said)
    made.fork("s", "t2")
    chat.say("t4", "t3", "bye", "bye")
    made.settle()
    made.close()
    numbers: dict[int, int] = {}
    with (
        closing(old_database(tmp_path / "old")) as raw,
        closing(sqlite3.connect(tmp_path / "new" / FILE)) as new,
        raw,
    ):
        new.row_factory = sqlite3.Row
        for row in new.execute("SELECT * FROM session"):
            fields = {k: row[k] for k in row.keys() if k != "owner"}  # noqa: SIM118 - a Row iterates values
            insert(raw, "session", fields | ({"id": "f"} if row["base"] else {}))
        for row in new.execute("SELECT * FROM turn ORDER BY seq"):
            turn = chat.turns[row["id"]]
            above = chat.turns[turn.parent] if turn.parent else None
            # One id fewer than the parent has, as where it was sampled and not yet fed: written twice.
            shared = len(above.ids) - 1 if above else 0
            characters = len(above.text) if above else 0
            words = [m.to_json() for m in turn.conversation]
            old = (
                turn.id,
                "s",
                turn.parent,
                shared,
                turn.ids.own[shared:].tolist(),
                characters,
                turn.text.own[characters:],
            )
            insert_turn(raw, old, row["depth"], messages=json.dumps(words[:-1]), answer=json.dumps(words[-1]))
        for table in ("layout", "segment", "checkpoint_segment", "piece", "turn_checkpoint", "total"):
            if table == "turn_checkpoint":
                for row in new.execute("SELECT * FROM checkpoint"):
                    fields = {k: row[k] for k in row.keys() if k != "owner"}  # noqa: SIM118 - a Row iterates values
                    ids = FED[row["key"]].tobytes()
                    named = {"key": old_key(row["layout"], row["lineage"], ids), "digest": old_digest(new, row)}
                    insert(raw, "checkpoint", fields | named | {"ids": ids})
                    numbers[row["id"]] = row["position"]
            if table == "total":
                raw.execute("DELETE FROM total")
            for row in new.execute(f"SELECT * FROM {table}"):
                if table != "total" or row["name"] == "checkpoints":
                    insert(raw, table, dict(row))
    chat.store = Store.open(tmp_path / "old")
    return chat, numbers


def test_states_and_forks(moved: tuple[Chat, dict[int, int]]) -> None:
    chat, numbers = moved
    store = chat.store
    assert [t.id for t in store.turns("s")] == ["t1", "t2", "t3", "t2b", "t4"]
    assert [t.id for t in store.turns("f")] == ["t1", "t2"]
    assert store.session("f").base == "t2"
    for name, turn in chat.turns.items():
        assert whole(store, name) == (turn.ids.own.tolist(), turn.text.own)
        assert conversation(store.path(name))[-1] == turn.answer
        for position in (len(turn.ids) - 1, len(turn.ids) - 12):
            found = find(store, chat.scope, turn.ids.own[: position + 1], "s")
            assert found is not None
            assert found.position == position == numbers[found.id], "numbers of states stay where they are"
            assert_same(store.load(found.id, HYBRID), state_of(HYBRID, turn.ids.own[:position]))
        echoed = echo_of(store, [*conversation(store.path(name)), user("next")], "s")
        assert echoed is not None
        assert echoed.turn == name
    in_fork = echo_of(store, [*conversation(store.path("t3")), user("next")], "f")
    assert in_fork is not None
    assert in_fork.turn == "t2"
    assert check(store.file.parent).damages == ()
    chat.info = store.session("s").info
    chat.say("t5", "t4", "again", "yes")
    assert store.path("t5")[-1].stem == "t4"
    with store.reading() as connection:
        (seq,) = connection.exec_driver_sql("SELECT seq FROM turn WHERE id = 't5'").one()
        (last,) = connection.exec_driver_sql("SELECT max(id) FROM checkpoint").one()
    assert seq == 6
    assert last == max(numbers) + 2
    store.close()


DAMAGE = [
    "UPDATE turn SET ids = x'0102' WHERE id = 't2'",
    "UPDATE turn SET ids = x'ffffffff' WHERE id = 't2'",
    "UPDATE turn SET ids_shared = 999 WHERE id = 't2'",
    "UPDATE turn SET ids_shared = 'x' WHERE id = 't2'",
    "UPDATE turn SET text = CAST(x'ff' AS TEXT) WHERE id = 't2'",
    "UPDATE turn SET prompt_tokens = 'x' WHERE id = 't2'",
    "UPDATE turn SET messages = 'no json' WHERE id = 't2'",
    "UPDATE turn SET messages = CAST(x'ff' AS TEXT) WHERE id = 't2'",
    "UPDATE turn SET answer = '[]' WHERE id = 't2'",
    "UPDATE turn SET finish = CAST(x'ff' AS TEXT) WHERE id = 't2'",
    "UPDATE turn SET lineage = CAST(x'ff' AS TEXT) WHERE id = 't2'",
    "UPDATE turn SET id = CAST(x'ff' AS TEXT) WHERE id = 't3'",
    "UPDATE turn SET created_at = 'x' WHERE id = 't2'",
    "UPDATE turn SET depth = CAST(x'ff' AS TEXT) WHERE id = 't2'",
]


@pytest.mark.parametrize("change", DAMAGE)
def test_a_damaged_store_is_moved_too(tmp_path: Path, change: str) -> None:
    """Its damage is found after the move as before, and readable rows are kept."""
    with closing(old_database(tmp_path / "data")) as raw, raw:
        insert_session(raw, "s", "t1", turns=3)
        ids = np.arange(1, 9).tolist()
        for n, parent in enumerate((None, "t1", "t2")):
            insert_turn(raw, (f"t{n + 1}", "s", parent, 8 * n, ids, n, "x"), n)
        assert raw.execute(change).rowcount == 1
    store = Store.open(tmp_path / "data")
    assert whole(store, "t1") == (ids, "x")
    store.close()
    unreadable = "messages" in change or "answer" in change
    found = check(tmp_path / "data").damages
    assert bool(found) or "SET ids" in change or "prompt" in change or "text" in change, found
    if unreadable:
        assert any(d.what.startswith("turn 't2'") and "not readable" in d.problem for d in found), found
    repair(tmp_path / "data")
    assert check(tmp_path / "data").damages == ()
    store = Store.open(tmp_path / "data")
    left = [t.id for t in store.turns("s")]
    assert left == (["t1"] if unreadable else ["t1", "t2"] if "SET id " in change else ["t1", "t2", "t3"])
    for turn in store.turns("s"):
        assert [m.content for m in turn.conversation] == [f"ask {turn.id}", f"say {turn.id}"]
    store.close()


DAMAGED_STATES = [
    "ids = x'616263'",
    "ids = x''",
    "ids = (SELECT ids FROM checkpoint WHERE id = 5)",  # those of another one, whose state it then seems to be
    "key = zeroblob(32)",
    "layout = x'00'",
    "lineage = x''",
    "lineage = CAST(x'ff' AS TEXT)",
    "digest = 'text'",
    "digest = 7",
]


@pytest.mark.parametrize("change", DAMAGED_STATES)
def test_a_damaged_state_is_left_behind(tmp_path: Path, change: str) -> None:
    with closing(old_database(tmp_path / "data")) as raw, raw:
        insert_session(raw, "s", "t1", turns=2)
        insert(raw, "layout", {"digest": HYBRID.digest(), "tensors": json.dumps(HYBRID.to_json())})
        for number, parent in ((5, None), (6, "t5")):
            insert_turn(raw, (f"t{number}", "s", parent, 0, [1, 2, number], 0, "x"), number - 5)
            ids = as_ids([1, number]).tobytes()
            row = {"id": number, "key": old_key(HYBRID.digest(), LINEAGE, ids), "layout": HYBRID.digest()}
            row |= {"lineage": LINEAGE, "anchor": bytes(32), "build": "b" * 64, "producer": "p", "origin": ""}
            row |= {"position": 2, "parent": None, "kind": "turn", "digest": bytes(32), "recurrent_nbytes": 0}
            row |= {"rows_nbytes": 0, "created_at": NOW, "last_used_at": NOW, "ids": ids}
            insert(raw, "checkpoint", row)
            insert(raw, "turn_checkpoint", {"turn": f"t{number}", "checkpoint": number})
        raw.execute(f"UPDATE checkpoint SET {change} WHERE id = 6")
    store = Store.open(tmp_path / "data")
    assert store.resumable("s") == {"t5"}
    store.close()
    with closing(sqlite3.connect(tmp_path / "data" / FILE)) as raw:
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []


ARGUMENTS = '{"temperature": 1.0, "id": 9007199254740993, "x": 1e6}'


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Calls as they were hashed while `1.0` was not `1`, two turns below the first; the last one with doubles."""
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s")

    def say(name: str, parent: str | None, asked: Message, arguments: str | None = None) -> None:
        calls = () if arguments is None else (ToolCall("c", "f", arguments),)
        new, _ = chat.make(name, parent, [asked], f"say {name}")
        new = replace(new, answer=replace(new.answer, tool_calls=calls))
        store.commit([new], session=chat.info)
        chat.remember(new, None)

    with monkeypatch.context() as before:
        form = "ssmd.text.messages.canonical"
        before.setattr(form, lambda text: json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")))
        say("t1", None, user("hi"), ARGUMENTS)
        say("t2", "t1", Message("tool", "ok", tool_call_id="c"))
        say("plain", None, user("hi"), '{"n": 3}')
    say("t3", "t2", user("more"), '{"y": 2.0}')
    store.close()
    with closing(sqlite3.connect(tmp_path / "data" / FILE)) as raw, raw:
        raw.execute("UPDATE alembic_version SET version_num = '0010'")
    return tmp_path / "data"


@pytest.mark.parametrize("arguments", [ARGUMENTS, '{"temperature":1,"id":9007199254740992,"x":1000000}'])
def test_calls_with_whole_floats_are_found_again(called: Path, arguments: str) -> None:
    """Echoed as they were written, and as JavaScript writes them."""
    store = Store.open(called)
    path = store.path("t3")
    said = list(conversation(path))
    said[1] = replace(said[1], tool_calls=(replace(said[1].tool_calls[0], arguments=arguments),))
    for length, turn in ((2, "t1"), (4, "t2"), (6, "t3")):
        echoed = echo_of(store, [*said[:length], user("next")])
        assert echoed is not None
        assert (echoed.turn, echoed.stored) == (turn, None)
    echoed = echo_of(store, [*conversation(store.path("plain")), user("next")])
    assert echoed is not None
    assert echoed.turn == "plain"
    store.close()
    assert check(called).damages == ()


@pytest.mark.parametrize("change", ["items = replace(items, 'hi', 'ho')", "chain = zeroblob(32)"])
def test_a_damaged_turn_with_calls_stays_as_it_is(called: Path, change: str) -> None:
    query = "SELECT chain, whole, checksum FROM turn WHERE id IN ('t1', 't2', 't3') ORDER BY seq"
    with closing(sqlite3.connect(called / FILE)) as raw, raw:
        raw.execute(f"UPDATE turn SET {change} WHERE id = 't1'")
        before = raw.execute(query).fetchall()
    Store.open(called).close()
    with closing(sqlite3.connect(called / FILE)) as raw:
        assert raw.execute(query).fetchall() == before
    assert any(d.what.startswith("turn 't1'") and "altered" in d.problem for d in check(called).damages)
