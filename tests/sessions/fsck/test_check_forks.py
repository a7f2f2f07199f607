"""Damage to sessions that share turns: forks, their beginnings, owners of turns, and replies."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from keeping import HYBRID, Chat, find, new_store, state_of, user, whole
from sessions.fsck.test_check import alter
from sessions.rows.test_retention import check_sound
from sessions.test_forks import forked

from ssmd.sessions.fsck.repair import check, repair
from ssmd.sessions.line import Line, Passage
from ssmd.sessions.reply import NewReply, ReplyKey
from ssmd.sessions.rows.database import FILE, PAGE_BYTES
from ssmd.sessions.store import Store

KEY = ReplyKey(b"k" * 32, b"b" * 32, timedelta(hours=1), named=True)
# The fork `f` of s at t3 has a turn of its own below it, and an edit below t1; `g` begins at t3 and has none.
WHOLE = {"s": ["t1", "t2", "t3", "t4"], "f": ["t1", "t2", "t3", "f1", "f2"], "g": ["t1", "t2", "t3"]}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The database file."""
    folder = tmp_path_factory.mktemp("sound") / "data"
    store = new_store(folder)
    chat = Chat(store, "s")
    for n in range(1, 5):
        chat.say(f"t{n}", f"t{n - 1}" if n > 1 else None, f"question {n}", f"answer {n}")
    fork = forked(chat, "t3")
    fork.say("f1", "t3", "else?", "yes")
    fork.say("f2", "t1", "edited", "there")
    bare = store.fork("s", "t3").id
    new, checkpoints = chat.make("t5", "t4", [user("again")], "once")
    reply = NewReply(KEY, True, {"id": "chatcmpl-1"})
    store.commit([new], [chat.encode(c) for c in checkpoints], session=chat.info, reply=reply)
    store.settle()
    store.close()
    with closing(sqlite3.connect(folder / FILE)) as raw:
        for name, plain in ((fork.info.id, "f"), (bare, "g")):
            raw.execute("UPDATE session SET id = ? WHERE id = ?", (plain, name))
            raw.execute("UPDATE turn SET session = ? WHERE session = ?", (plain, name))
        raw.commit()
    return (folder / FILE).read_bytes()


@pytest.fixture
def data(tmp_path: Path, sound: bytes) -> Path:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / FILE).write_bytes(sound)
    return folder


ALL = {**WHOLE, "s": [*WHOLE["s"], "t5"]}


def told(data: Path) -> dict[str, list[str]]:
    """The turns of each session; each has its way to the root, and can be gone on with."""
    store = Store.open(data)
    try:
        found = {}
        for s in store.sessions():
            turns = store.turns(s.id)
            assert s.turns == len(turns)
            found[s.id] = [t.id for t in turns]
            assert s.head in found[s.id]
            assert {t.id for t in store.path(s.head)} <= set(found[s.id])
        return found
    finally:
        store.close()


def bases(data: Path) -> dict[str, tuple[str | None, str | None]]:
    with closing(sqlite3.connect(data / FILE)) as raw:
        return {name: (base, root) for name, base, root in raw.execute("SELECT id, base, root FROM session")}


def test_forks_are_sound(data: Path) -> None:
    before = (data / FILE).read_bytes()
    done = check(data)
    assert done.damages == ()
    assert (done.sessions, done.turns) == (3, 7)
    assert repair(data) == done
    assert (data / FILE).read_bytes() == before
    assert told(data) == ALL


ALTERED = "turn 't2' of session 's': it was altered; its messages are kept, and are read again"
BROKEN = "UPDATE turn SET items = '[7]' WHERE id = '{}'"
FORKS: list[tuple[str, str, Mapping[str, list[str] | None]]] = [
    # The turn that forks begin at goes, with what follows: they go on from what is above it.
    (BROKEN.format("t3"), "session 'g': .*it begins at 't2'",
     {"s": ["t1", "t2"], "f": ["t1", "t2", "f2"], "g": ["t1", "t2"]}),
    (BROKEN.format("t2"), "session 'f': .*it begins at 't1'", {"s": ["t1"], "f": ["t1", "f2"], "g": ["t1"]}),
    (BROKEN.format("t1"), "session 'g': none of its turns", {"s": None, "f": None, "g": None}),
    ("DELETE FROM turn WHERE id = 't3'", "session 'g': .*it begins at 't1'",
     {"s": ["t1", "t2"], "f": ["t1", "f2"], "g": ["t1"]}),
    (BROKEN.format("f1"), "session 'f': .*number", {"f": ["t1", "t2", "t3", "f2"]}),
    # Which turn it was is not known: of the fork's own turns one knows.
    ("UPDATE session SET base = 'nobody' WHERE id = 'f'", "session 'f': .*forked at.*begins at 't3'", {}),
    ("UPDATE session SET base = NULL, root = NULL WHERE id = 'f'", "session 'f': .*begins at 't3'", {}),
    ("UPDATE session SET base = NULL WHERE id = 'f'", "session 'f': .*begins at 't3'", {}),
    ("UPDATE session SET base = 't1' WHERE id = 'f'", "session 'f': .*begins at 't3'", {}),
    ("UPDATE session SET base = CAST(x'ff' AS TEXT) WHERE id = 'f'", "session 'f': .*begins at 't3'", {}),
    ("UPDATE session SET base = x'00', root = 7 WHERE id = 'f'", "session 'f': .*begins at 't3'", {}),
    ("UPDATE session SET root = 't2' WHERE id = 'f'", "session 'f': .*begins at 't3'", {}),
    ("UPDATE session SET root = NULL WHERE id = 'g'", "session 'g': .*begins at 't3'", {}),
    # Of a fork without a turn of its own only its beginning is known.
    ("UPDATE session SET base = 'nobody' WHERE id = 'g'", "session 'g': .*begins at 't1'", {"g": ["t1"]}),
    ("UPDATE session SET base = NULL WHERE id = 'g'", "session 'g': none of its turns", {"g": None}),
    ("UPDATE session SET head = 't4' WHERE id = 'g'", "session 'g': its current turn", {}),
    ("UPDATE session SET turns = 1 WHERE id = 'g'", "session 'g': its current turn", {}),
    ("UPDATE session SET clock = 'noon' WHERE id = 'g'", "session 'g': .*not readable", {}),
    ("UPDATE session SET own_nbytes = 'x' WHERE id = 'g'", "session 'g': .*not readable", {}),
    ("DELETE FROM session WHERE id = 'f'", "session 'f': it is missing", {}),
    ("DELETE FROM session WHERE id = 's'", "session 's': it is missing", {}),
    ("UPDATE session SET id = CAST(x'ff' AS TEXT) WHERE id = 'f'", "session 'f': it is missing", {}),
    # A turn of another session than the one that it continues.
    ("UPDATE turn SET session = 'x' WHERE id = 't4'", "session 'x': it is missing",
     {"x": ["t1", "t2", "t3", "t4"], "s": ["t1", "t2", "t3", "t4", "t5"]}),
    ("UPDATE turn SET session = 'g' WHERE id = 't4'", "session 'g': .*begins at 't3'|session 'g': its current",
     {"g": ["t1", "t2", "t3", "t4"]}),
    ("UPDATE turn SET session = 's' WHERE id = 'f1'", "session 's': its current",
     {"s": ["t1", "t2", "t3", "t4", "f1", "t5"], "f": ["t1", "t2", "t3", "f2"]}),
    ("UPDATE turn SET parent = 't4' WHERE id = 'f2'", "session 'f': .*begins at 't4'",
     {"f": ["t1", "t2", "t3", "t4", "f1", "f2"]}),
    ("UPDATE turn SET parent = 'f1' WHERE id = 't5'", "session 's': .*begins at 'f1'",
     {"s": ["t1", "t2", "t3", "t4", "f1", "t5"]}),
    # Of which model its tokens are.
    ("UPDATE turn SET lineage = CAST(x'ff' AS TEXT) WHERE id = 't2'", ALTERED, {}),
    ("UPDATE turn SET lineage = x'00' WHERE id = 't2'", ALTERED, {}),
    ("UPDATE turn SET finish = CAST(x'ff' AS TEXT) WHERE id = 't2'", ALTERED, {}),
    ("UPDATE turn SET complete = 7 WHERE id = 't2'", ALTERED, {}),
    (f"UPDATE turn SET created_at = {10**18} WHERE id = 't2'", ALTERED, {}),
    ("UPDATE turn SET id = CAST(x'ff' AS TEXT) WHERE id = 't4'", "id is not readable", {"s": ["t1", "t2", "t3"]}),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named", "left"), FORKS, ids=[f[0] for f in FORKS])
def test_forks(data: Path, change: str, named: str, left: Mapping[str, list[str] | None]) -> None:
    alter(data, change)
    found = check(data)
    assert any(re.search(named, str(d)) for d in found.damages), found.damages
    repair(data)
    assert check(data).damages == ()
    expected = {name: turns for name, turns in {**ALL, **left}.items() if turns is not None}
    assert told(data) == expected
    with closing(sqlite3.connect(data / FILE)) as raw:
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_turn_on_another_branch_than_the_fork(data: Path) -> None:
    """A fork begins at one turn: what does not follow from that goes to where it belongs."""
    alter(data, "UPDATE turn SET parent = 'f2', session = 'g' WHERE id = 't5'")
    assert any(re.search("turn 't5' of session 'g': .*a part of session 'f'", str(d)) for d in check(data).damages)
    repair(data)
    assert check(data).damages == ()
    assert told(data) == {"s": ["t1", "t2", "t3", "t4"], "f": [*WHOLE["f"], "t5"], "g": WHOLE["g"]}


def test_a_fork_whose_origin_is_gone(data: Path) -> None:
    store = Store.open(data)
    store.delete("s")
    store.close()
    assert check(data).damages == ()
    left = {"f": WHOLE["f"], "g": WHOLE["g"]}
    assert told(data) == left
    before = bases(data)
    alter(data, "UPDATE session SET base = NULL, root = NULL WHERE id = 'f'")
    repair(data)
    assert told(data) == left
    assert before["g"] == bases(data)["g"] == ("t3", "t1")


REPLIES = [
    "UPDATE reply SET turns = '[\"nobody\"]'",
    'UPDATE reply SET turns = \'["t5", "nobody"]\'',
    "UPDATE reply SET turns = '[]'",
    "UPDATE reply SET turns = '{'",
    "UPDATE reply SET turns = '{\"t5\": 1}'",
    "UPDATE reply SET turn = 'nobody'",
    "UPDATE reply SET turn = 't4'",
    "UPDATE reply SET key = 'text'",
    "UPDATE reply SET body = x'00'",
    "UPDATE reply SET complete = 5",
    "UPDATE reply SET expires_at = 'never'",
    "UPDATE reply SET answer = CAST(x'7bff7d' AS TEXT)",
    "UPDATE reply SET answer = '[]'",
    "UPDATE reply SET answer = '{'",
    "UPDATE reply SET answer = json_set(answer, '$.id', 'other')",
    "UPDATE reply SET body = zeroblob(32)",
]


STRAY = ("UPDATE reply SET turn = 'nobody'", "UPDATE reply SET turn = 't4'", "UPDATE reply SET expires_at = 'never'")


@pytest.mark.parametrize("change", REPLIES)
def test_replies(data: Path, change: str) -> None:
    alter(data, change)
    assert any(re.fullmatch("reply 1", d.what) for d in check(data).damages)
    if change not in STRAY:
        store = Store.open(data)
        assert store.reply(KEY) is None, "before it is repaired, too"
        store.close()
    repair(data)
    assert check(data).damages == ()
    store = Store.open(data)
    assert store.reply(KEY) is None
    store.close()
    assert told(data) == ALL


def test_a_torn_file_keeps_everything_else(data: Path) -> None:
    """Whatever can be read of any table is in the new file."""
    with closing(sqlite3.connect(data / FILE)) as raw:
        (root,) = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = 'piece'").fetchone()
        tables = ("session", "turn", "reply", "layout", "segment")
        before = {t: raw.execute(f"SELECT * FROM {t} ORDER BY 1").fetchall() for t in tables}
    with (data / FILE).open("r+b") as file:
        file.seek((root - 1) * PAGE_BYTES)
        file.write(bytes(PAGE_BYTES))
    done = repair(data)
    assert done.kept is not None
    with closing(sqlite3.connect(data / FILE)) as raw:
        after = {t: raw.execute(f"SELECT * FROM {t} ORDER BY 1").fetchall() for t in tables}
        (nbytes,) = raw.execute("SELECT nbytes FROM total").fetchone()
    for table in ("turn", "reply", "layout"):
        assert after[table] == before[table]
    assert [row[0] for row in after["session"]] == [row[0] for row in before["session"]]
    assert nbytes == 0, "no state was whole without its recurrent values"
    assert told(data) == ALL
    assert bases(data)["f"] == ("t3", "t1")


def test_text_that_went_is_erased(data: Path) -> None:
    """A reader delays the erasing; the daemon does it when it is idle."""
    secret = "question 3"
    alter(data, BROKEN.format("t2"))
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM turn").fetchone()
        repair(data)
    store = Store.open(data)
    with store.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA user_version").scalar_one() > 0
    store.settle()
    with store.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA user_version").scalar_one() == 0
    store.close()
    assert not any(secret.encode() in file.read_bytes() for file in data.iterdir())


def test_a_reply_goes_with_its_session(data: Path) -> None:
    """Though a fork keeps its turn: the reply may hold words of choices that are not kept."""
    store = Store.open(data)
    assert store.reply(KEY) is not None
    made = store.fork("s", "t5")
    store.delete("s")
    assert [t.id for t in store.turns(made.id)] == ["t1", "t2", "t3", "t4", "t5"]
    assert store.reply(KEY) is None
    with store.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM reply").scalar_one() == 0
    store.close()
    assert check(data).damages == ()


def test_a_repaired_turn_is_sound(data: Path) -> None:
    """Its ids are those of later prompts: the state of what was fed at first goes, that of its prompt stays."""
    store = Store.open(data)
    chat = Chat(store, "s")
    for stored in store.path("t5"):
        chat.remember(stored, None)
    turn = chat.turns["t5"]
    prompt, old = turn.ids.own[: turn.prompt_tokens], turn.ids.own
    chat.clock = datetime.now(UTC)
    new, checkpoints = chat.make("t6", "t4", [user("again")], "spelt differently")
    # The last token of the prompt is another one too, as where a template begins an answer with a tag.
    ids = new.ids.own.copy()
    ids[: len(prompt) - 1] = prompt[:-1]
    end = replace(checkpoints[1], ids=Line.of(ids[:-1]), state=state_of(HYBRID, ids[:-1]), parent=None, turn=None)
    placed = store.rewrite("t5", Line.of(ids), Passage("other text"), chat.encode(end))
    assert placed is not None
    assert placed.id is not None
    assert whole(store, "t5") == (ids.tolist(), "other text")
    assert ids.tolist() != old.tolist()
    found = [find(store, chat.scope, [*some.tolist(), 1], "s") for some in (prompt, old, ids)]
    assert [f.position for f in found if f is not None] == [len(prompt), len(prompt), len(ids) - 1]
    store.settle()
    check_sound(store, HYBRID)
    store.close()
    assert check(data).damages == ()
