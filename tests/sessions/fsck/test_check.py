"""Damage is found and named; a repair loses the damaged rows, and nothing else."""

from __future__ import annotations

import os
import random
import re
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from keeping import FED, HYBRID, Chat, assert_same, echo_of, new_store, state_of, user
from sqlalchemy import select

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.sessions.fsck.repair import CheckReport, check, repair
from ssmd.sessions.fsck.salvage import salvage
from ssmd.sessions.rows.database import FILE, PAGE_BYTES
from ssmd.sessions.rows.schema import checkpoint
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

FLIPS = [24, pytest.param(240, marks=pytest.mark.full)]
if "SSMD_FLIPS" in os.environ:
    FLIPS = [int(os.environ["SSMD_FLIPS"])]
WORDS = "the words of {}"


@cache
def sound() -> bytes:
    """The database file of two sessions of three turns, with a branch each; b's beginning is a's."""
    with tempfile.TemporaryDirectory() as place:
        store = new_store(Path(place) / "data")
        a, b = Chat(store, "a"), Chat(store, "b")
        for chat in (a, b):
            name = chat.info.id
            chat.say(f"{name}1", None, "hi", "hello")  # equal in both: one checkpoint serves both
            chat.say(f"{name}2", f"{name}1", WORDS.format(f"{name}2"), "sure")
            chat.say(f"{name}3", f"{name}2", WORDS.format(f"{name}3"), "yes")
            chat.say(f"{name}2b", f"{name}1", WORDS.format(f"{name}2b"), "no")
        store.settle()
        store.close()
        return store.file.read_bytes()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / FILE).write_bytes(sound())
    return folder


def alter(data: Path, *statements: str) -> None:
    with closing(sqlite3.connect(data / FILE)) as raw:
        for statement in statements:
            assert raw.execute(statement).rowcount > 0, statement
        raw.commit()


def turns(data: Path) -> dict[str, list[str]]:
    store = Store.open(data)
    try:
        return {s.id: [t.id for t in store.turns(s.id)] for s in store.sessions()}
    finally:
        store.close()


def checkpoints(data: Path) -> set[int]:
    """Each of them loads, and is what it was."""
    store = Store.open(data)
    try:
        with store.reading() as connection:
            rows = connection.execute(select(checkpoint.c.id, checkpoint.c.key)).all()
        for row in rows:
            assert_same(store.load(row.id, HYBRID), state_of(HYBRID, FED[row.key]))
        return {row.id for row in rows}
    finally:
        store.close()


ALL = {"a": ["a1", "a2", "a3", "a2b"], "b": ["b1", "b2", "b3", "b2b"]}


def test_a_sound_store(data: Path) -> None:
    before = (data / FILE).read_bytes()
    done = check(data)
    assert done == CheckReport((), 2, 8, 14)
    assert repair(data) == done
    assert (data / FILE).read_bytes() == before


def test_it_reads_every_byte_of_every_state(data: Path) -> None:
    read: list[int] = []
    check(data, read.append)
    store = Store.open(data)
    assert sum(read) == store.bytes_stored()
    store.close()


# What is done, what is named, which checkpoints go (of a's: 1 user, 2 turn, shared with b; 3..8), which turns.
STATES = [
    ("UPDATE piece SET data = zeroblob(length(data)) WHERE checkpoint = 4", "checkpoint 4: .*altered", {4}),
    ("UPDATE piece SET data = 'text' WHERE checkpoint = 4", "checkpoint 4: .*not what was written", {4}),
    ("UPDATE piece SET dtype = 'int8' WHERE checkpoint = 4", "checkpoint 4: ", {4}),
    ("UPDATE piece SET last = -1 WHERE checkpoint = 4", "checkpoint 4: ", {4}),
    ("DELETE FROM piece WHERE checkpoint = 4", "checkpoint 4: its recurrent values from 0 on are missing", {4}),
    ("UPDATE segment SET data = x'00' WHERE id = 4", "KV rows 4: .*altered", {4, 5, 6}),
    ("UPDATE segment SET checksum = x'00' WHERE id = 6", "KV rows 6", {6}),
    ("UPDATE segment SET nbytes = 1 WHERE id = 6", "KV rows 6: it has .* bytes, not 1", {6}),
    ("DELETE FROM segment WHERE id = 6", "checkpoint 6: its KV rows 6 are .*missing", {6}),
    ("DELETE FROM checkpoint_segment WHERE checkpoint = 6 AND segment = 2", "checkpoint 6: its KV rows from", {6}),
    ("DELETE FROM checkpoint_segment WHERE checkpoint = 6 AND segment = 6", "checkpoint 6: its KV rows from", {6}),
    ("UPDATE checkpoint SET digest = x'00' WHERE id = 6", "checkpoint 6: .*not consist", {6}),
    ("UPDATE checkpoint SET key = zeroblob(32) WHERE id = 6", "checkpoint 6: .*not consist", {6}),
    ("UPDATE checkpoint SET anchor = zeroblob(32) WHERE id = 6", "checkpoint 6: .*do not match its key", {6}),
    ("UPDATE checkpoint SET key = 'text' WHERE id = 6", "checkpoint 6: its key is not readable", {6}),
    ("UPDATE checkpoint SET anchor = x'00' WHERE id = 6", "checkpoint 6: its key is not readable", {6}),
    ("UPDATE checkpoint SET position = 'x' WHERE id = 6", "checkpoint 6: its key is not readable", {6}),
    ("UPDATE checkpoint SET lineage = 'x' WHERE id = 6", "checkpoint 6: .*do not match its key", {6}),
    ("UPDATE checkpoint SET layout = 'x' WHERE id = 6", "checkpoint 6: its layout 'x'", {6}),
    ("UPDATE checkpoint SET recurrent_nbytes = 5 WHERE id = 6", "checkpoint 6: its size", {6}),
    ("DELETE FROM checkpoint WHERE id = 6", "recurrent values: they belong to 1 missing checkpoints", {6}),
    ("DELETE FROM layout", "its layout .* is not known", set(range(1, 15))),
    ("UPDATE layout SET tensors = '[7]'", "its layout .* is not known", set(range(1, 15))),
    ("UPDATE total SET nbytes = 1 WHERE name = 'checkpoints'", "the total: 1 bytes are counted", set()),
    ("DELETE FROM total WHERE name = 'checkpoints'", "the total: 0 bytes are counted", set()),
    ("UPDATE total SET nbytes = 1 WHERE name = 'turns'", "the total: 1 bytes of text are counted, not", set()),
    ("DELETE FROM total", "the total: 0 bytes of text are counted", set()),
    ("INSERT INTO total VALUES ('@0123456789abcde', 5)", "the bytes of 1 owners are counted wrong", set()),
]


@pytest.mark.parametrize(("change", "named", "gone"), STATES, ids=[s[0] for s in STATES])
def test_states(data: Path, change: str, named: str, gone: set[int]) -> None:
    whole = checkpoints(data)
    alter(data, change)
    found = check(data)
    assert any(re.search(named, str(d)) for d in found.damages), found.damages
    assert not found.repaired
    done = repair(data)
    assert done.repaired
    assert [d for d in found.damages if d not in done.damages] == []
    assert check(data).damages == ()
    assert checkpoints(data) == whole - gone
    assert turns(data) == ALL, "no text is lost with a state"


ALTERED = "turn 'a2' of session 'a': it was altered; its messages are kept, and are read again"
TEXTS: list[tuple[str, str, dict[str, list[str]]]] = [
    ("UPDATE turn SET items = '[7]' WHERE id = 'a2'", "turn 'a2' .*not readable", {"a": ["a1", "a2b"]}),
    ("UPDATE turn SET items = 'no json' WHERE id = 'a3'", "turn 'a3' .*not readable", {"a": ["a1", "a2", "a2b"]}),
    ("UPDATE turn SET answer = CAST(x'ff22' AS TEXT) WHERE id = 'a3'", "turn 'a3'", {"a": ["a1", "a2", "a2b"]}),
    ("UPDATE turn SET answer = '[]' WHERE id = 'a1'", "turn 'a1'", {}),
    ("DELETE FROM turn WHERE id = 'a2'", "turn 'a3' .*before it are missing", {"a": ["a1", "a2b"]}),
    ("DELETE FROM turn WHERE session = 'a'", "session 'a': none of its turns", {}),
    ("UPDATE turn SET ids = x'0102' WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET ids = zeroblob(length(ids)) WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET ids = 'text' WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET ids_start = 999 WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET ids_before = zeroblob(32) WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET text_start = 99999 WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET text_start = 'x' WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET text = CAST(x'ff' AS TEXT) WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET text = x'ff' WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET stem = 'b1' WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET stem = NULL WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET root = 'b1' WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET prompt_tokens = 7 WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET settled_messages = 1 WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET nbytes = 1 WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET checksum = zeroblob(16) WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET owner = x'00' WHERE id = 'a2'", ALTERED, ALL),
    ("UPDATE turn SET whole = zeroblob(32) WHERE id = 'a2'", "turn 'a2' .*their hash", ALL),
    ("UPDATE turn SET length = 7 WHERE id = 'a2'", "turn 'a2' .*their hash", ALL),
    ("UPDATE turn SET chain = zeroblob(32) WHERE id = 'a2'", "turn 'a2' .*their hash", ALL),
    ("UPDATE turn SET depth = 7 WHERE id = 'a2'", "turn 'a2' .*their hash", ALL),
    ("UPDATE turn SET items = replace(items, 'words', 'swords') WHERE id = 'a2'", "turn 'a2' .*their hash", ALL),
    ("UPDATE turn SET created_at = 'x' WHERE id = 'a3'", "turn 'a3'", ALL),
    ("UPDATE session SET head = 'nobody' WHERE id = 'a'", "session 'a': its current turn", ALL),
    ("UPDATE session SET turns = 77 WHERE id = 'a'", "session 'a': its current turn", ALL),
    ("UPDATE session SET clock = 'noon' WHERE id = 'a'", "session 'a': .*not readable", ALL),
    ("UPDATE session SET clock = x'00' WHERE id = 'a'", "session 'a': .*not readable", ALL),
    ("UPDATE session SET pinned = 5 WHERE id = 'a'", "session 'a': .*not readable", ALL),
    ("UPDATE session SET title = CAST(x'ff' AS TEXT) WHERE id = 'a'", "session 'a': .*not readable", ALL),
    ("DELETE FROM session WHERE id = 'a'", "session 'a': it is missing", ALL),
]


@pytest.mark.parametrize(("change", "named", "left"), TEXTS, ids=[t[0] for t in TEXTS])
def test_texts(data: Path, change: str, named: str, left: dict[str, list[str]]) -> None:
    alter(data, change)
    found = check(data)
    assert any(re.search(named, str(d)) for d in found.damages), found.damages
    repair(data)
    assert check(data).damages == ()
    assert turns(data) == {"b": ALL["b"], **left}
    assert {1, 2, 9, 10, 11, 12, 13, 14} <= checkpoints(data), "b's, and what it shares with a"


def test_a_session_made_anew_goes_on(data: Path) -> None:
    alter(data, "DELETE FROM session WHERE id = 'a'")
    repair(data)
    store = Store.open(data)
    session = store.session("a")
    assert (session.head, session.turns) == ("a2b", 4)
    chat = Chat(store, "a")
    chat.info = session.info
    store.commit([chat.make("a9", None, [user("again")], "yes")[0]], session=chat.info)
    assert store.session("a").head == "a9"
    store.close()


def test_text_whose_tokens_are_lost_is_whole(data: Path) -> None:
    """It can be read, echoed and exported; only its tokens are counted anew."""
    alter(data, "UPDATE turn SET ids = x'0102' WHERE id = 'a2'")
    repair(data)
    store = Store.open(data)
    path = store.path("a3")
    assert all(t.sound for t in path)
    assert [m.content for t in path for m in t.conversation][2:4] == [WORDS.format("a2"), "sure"]
    assert [len(t.ids) for t in path] == [24, 0, 0]
    assert [t.text.own for t in path][1:] == ["", ""]
    echoed = [m for t in path for m in t.conversation] + [user("more")]
    found = echo_of(store, echoed)
    assert found is not None
    assert (found.session, found.turn, found.stored) == ("a", "a3", None)
    store.close()


def test_a_deep_conversation(tmp_path: Path) -> None:
    """SQLite's own cascades end after 1,000."""
    folder = tmp_path / "data"
    store = new_store(folder)
    chat = Chat(store, "s")
    for at in range(0, 1500, 300):
        made = [chat.make(f"t{i}", None, [user("q")], "a")[0] for i in range(at, at + 300)]
        linked = [replace(t, parent=f"t{at + i - 1}" if at + i else None) for i, t in enumerate(made)]
        store.commit(linked, session=chat.info)
    store.close()
    alter(folder, "UPDATE turn SET items = '7' WHERE id = 't0'")
    assert len(repair(folder).damages) == 1501
    assert turns(folder) == {}


class TestTheFile:
    """Bytes of the file itself."""

    def offset(self, data: Path, query: str) -> int:
        with closing(sqlite3.connect(data / FILE)) as raw:
            (value,) = raw.execute(query).fetchone()
        content = (data / FILE).read_bytes()
        at = content.find(value if isinstance(value, bytes) else value.encode())
        assert at > 0
        return at

    def flip(self, data: Path, at: int, mask: int = 0x01) -> None:
        with (data / FILE).open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ mask]))

    @pytest.mark.parametrize(
        ("query", "named"),
        [
            ("SELECT substr(data, 1, 64) FROM segment WHERE id = 6", "KV rows 6: .*altered"),
            ("SELECT substr(data, 100, 64) FROM piece WHERE checkpoint = 6", "checkpoint 6: .*altered"),
            ("SELECT checksum FROM segment WHERE id = 6", "KV rows 6: .*altered"),
            ("SELECT substr(ids, -40) FROM turn WHERE id = 'a3'", "turn 'a3' .*it was altered"),
            ("SELECT digest FROM checkpoint WHERE id = 6", "checkpoint 6: .*not consist"),
            ("SELECT 'the words of a3'", "turn 'a3' .*their hash"),
        ],
    )
    def test_a_flipped_bit(self, data: Path, query: str, named: str) -> None:
        self.flip(data, self.offset(data, query) + 2)
        found = check(data)
        assert any(re.search(named, str(d)) for d in found.damages), found.damages
        repair(data)
        assert check(data).damages == ()
        assert turns(data) == ALL
        assert len(checkpoints(data)) >= 13

    @pytest.mark.parametrize("times", FLIPS)
    def test_bits_flipped_anywhere(self, data: Path, times: int) -> None:
        """Whatever it hits: found or harmless, and repaired or refused with advice; what is left is sound."""
        whole = (data / FILE).read_bytes()
        rng = random.Random(20261121)
        outcomes = {"harmless": 0, "repaired": 0, "refused": 0}
        used = [at for at in range(len(whole)) if any(whole[at - 4 : at + 4])]

        def flip() -> None:
            at = rng.choice([rng.randrange(PAGE_BYTES), *rng.sample(used, 4)])
            self.flip(data, at, 1 << rng.randrange(8))

        for _ in range(times):
            outcomes[self.survive(data, whole, flip)] += 1
        assert outcomes["repaired"] > times // 8, outcomes
        assert outcomes["harmless"] > 0

    @pytest.mark.parametrize("times", FLIPS)
    def test_torn_pages(self, data: Path, times: int) -> None:
        """A sector that was never written, or one of other data."""
        whole = (data / FILE).read_bytes()
        rng = random.Random(20261122)
        used = [at for at in range(0, len(whole), 512) if any(whole[at : at + 512])]
        outcomes = {"harmless": 0, "repaired": 0, "refused": 0}

        def tear() -> None:
            with (data / FILE).open("r+b") as file:
                file.seek(rng.choice(used))
                file.write(rng.choice([b"\0" * 512, rng.randbytes(512)]))

        for _ in range(times):
            outcomes[self.survive(data, whole, tear)] += 1
        assert outcomes["repaired"] > times // 4, outcomes

    def survive(self, data: Path, whole: bytes, damage: Callable[[], None]) -> str:
        for file in data.iterdir():
            file.unlink()
        (data / FILE).write_bytes(whole)
        damage()
        refused = "move it away|another program|another version of ssmd|already exists|no such table"
        try:
            found = check(data).damages
            done = repair(data)
        except StoreError as err:
            if not re.search(refused, str(err)):
                raise
            return "refused"
        assert check(data).damages == ()
        if not found and not done.repaired:
            assert turns(data) == ALL
            assert checkpoints(data) == set(range(1, 15))
            return "harmless"
        assert all(len(names) <= 4 for names in turns(data).values())
        checkpoints(data)
        return "repaired"

    def test_a_torn_file_is_kept(self, data: Path) -> None:
        content = bytearray((data / FILE).read_bytes())
        with closing(sqlite3.connect(data / FILE)) as raw:
            (root,) = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = 'piece'").fetchone()
        content[(root - 1) * PAGE_BYTES : root * PAGE_BYTES] = bytes(PAGE_BYTES)
        (data / FILE).write_bytes(content)
        found = check(data)
        assert any(d.what == "the database file" for d in found.damages)
        done = repair(data)
        assert done.kept == data / f"{FILE}.damaged-1"
        assert done.kept.read_bytes()[: len(content)] == content
        assert done.kept.stat().st_mode & 0o777 == (data / FILE).stat().st_mode & 0o777 == 0o600
        assert turns(data) == ALL, "only states were in that table"
        assert check(data).damages == ()
        assert not (data / "salvage").exists()


WIDE = StateSpec((TensorSpec("ssm_0", "ssm", 0, (100, 300)),))  # 120 kB for each checkpoint


@pytest.mark.parametrize("share", [0.995, 0.5, 0.1])
def test_a_file_that_was_cut_off(tmp_path: Path, share: float) -> None:
    """Data before the cut is brought back: here all text, which the first pages hold."""
    folder = tmp_path / "data"
    store = new_store(folder)
    chats = [Chat(store, name, WIDE) for name in "abcd"]
    for chat in chats:
        for i in range(4):
            chat.say(f"{chat.info.id}{i}", f"{chat.info.id}{i - 1}" if i else None, f"{chat.info.id} {i}", "hello")
    store.settle()
    store.close()
    size = int((folder / FILE).stat().st_size * share)
    os.truncate(folder / FILE, size)
    with pytest.raises(StoreError, match="check --repair"):
        Store.open(folder)
    done = repair(folder)
    assert (done.sessions, done.turns) == (4, 16)
    assert done.kept is not None
    assert done.kept.stat().st_size == size, "it is kept as it was found"
    assert not check(folder).damages
    with closing(Store.open(folder)) as store:
        loaded = 0
        for chat in chats:
            assert [t.messages for t in store.turns(chat.info.id)] == [t.messages for t in chat.turns.values()]
            for number, ids in chat.ends.values():
                assert number is not None
                with suppress(StoreError):
                    assert_same(store.load(number, WIDE), state_of(WIDE, ids))
                    loaded += 1
        assert loaded == {0.995: 15, 0.5: 6, 0.1: 0}[share], "those whose rows could be read"


@pytest.mark.parametrize("size", [100, 3 * PAGE_BYTES])
def test_a_file_of_which_nothing_is_left(data: Path, size: int) -> None:
    os.truncate(data / FILE, size)
    with pytest.raises(StoreError, match=r"beyond repair .*move it away"):
        repair(data)
    assert (data / FILE).stat().st_size == size


def test_a_salvage_that_breaks_off_leaves_a_file(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next start would make an empty one, as if nothing had ever been said."""
    moves = {name: getattr(os, name) for name in ("rename", "replace")}

    def until_the_last(name: str, source: Any, target: Any) -> None:
        if Path(target) == data / FILE:
            raise OSError("the power goes")
        moves[name](source, target)

    for name in moves:
        monkeypatch.setattr(os, name, partial(until_the_last, name))
    with pytest.raises(OSError, match="power"):
        salvage(data, 100)
    monkeypatch.undo()
    assert turns(data) == ALL
    assert check(data).damages == ()


def test_a_repair_that_cannot_succeed_changes_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alter(data, "UPDATE turn SET items = '[7]' WHERE id = 'a2'")
    monkeypatch.setattr("ssmd.sessions.fsck.repair._PASSES", 0)
    before = (data / FILE).read_bytes()
    with pytest.raises(StoreError, match="left as it was"):
        repair(data)
    assert (data / FILE).read_bytes() == before


class TestForks:
    @pytest.fixture
    def fork(self, data: Path) -> str:
        """Of `a`, at a2: it owns no turn."""
        store = Store.open(data)
        made = store.fork("a", "a2").id
        store.close()
        return made

    def test_they_are_sound(self, data: Path, fork: str) -> None:
        """Without a turn of their own, and as the heirs of the session that they began in."""
        assert check(data).damages == ()
        store = Store.open(data)
        again = store.fork(fork).id
        store.delete("a")
        assert check(data).damages == ()
        assert repair(data).damages == ()
        store.delete(fork)
        assert check(data).damages == ()
        assert [t.id for t in store.turns(again)] == ["a1", "a2"]
        store.close()

    @pytest.mark.parametrize(
        ("change", "left"),
        [
            ("UPDATE turn SET items = '7' WHERE id = 'a3'", ["a1", "a2"]),
            ("UPDATE turn SET items = '7' WHERE id = 'a2'", ["a1"]),
            ("UPDATE session SET turns = 9 WHERE base IS NOT NULL", ["a1", "a2"]),
            ("UPDATE session SET root = 'x' WHERE base IS NOT NULL", ["a1", "a2"]),
            ("UPDATE session SET base = 'x' WHERE base IS NOT NULL", ["a1"]),
            ("UPDATE session SET clock = 'x' WHERE base IS NOT NULL", ["a1", "a2"]),
            ("DELETE FROM session WHERE id = 'a'", ["a1", "a2"]),
        ],
    )
    def test_what_they_begin_with(self, data: Path, fork: str, change: str, left: list[str]) -> None:
        alter(data, change)
        assert check(data).damages
        repair(data)
        assert check(data).damages == ()
        assert turns(data).get(fork, []) == left
        assert turns(data)["b"] == ALL["b"]
