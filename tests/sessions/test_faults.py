"""A store whose disk, file, lock or rights fail: one clear error, nothing lost, nothing half done."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from keeping import ATTENTION, HYBRID, Chat, assert_same, find, new_store, state_of, user
from sqlalchemy import event, text

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.sessions.files.transfer import export_session
from ssmd.sessions.rows import database
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.faults import ReplacedFile, StoreLocked
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, conversation

WIDE = StateSpec((TensorSpec("ssm_0", "ssm", 0, (100, 1000)),))  # 400 kB for each checkpoint


@contextmanager
def raw(folder: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(folder / FILE, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def whole(folder: Path, *turns: str) -> None:
    with raw(folder) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert [t for (t,) in connection.execute("SELECT id FROM turn ORDER BY seq")] == list(turns)


def test_threads_wait_longer_than_for_processes(tmp_path: Path) -> None:
    """A removal that takes longer than SQLite's wait fails no other request of the daemon."""
    new_store(tmp_path / "data").close()
    store = Store.open(tmp_path / "data", busy_ms=20)
    Chat(store, "s").say("t1", None, "hi", "hello")
    with ThreadPoolExecutor(1) as pool:
        with store.writing():
            removal = pool.submit(store.delete, "s")
            with pytest.raises(TimeoutError):
                removal.result(0.3)
        removal.result(30)
    assert store.sessions() == []
    store.close()


def test_a_write_without_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_store(tmp_path / "data").close()
    monkeypatch.setattr(database, "WRITER_PATIENCE_S", 0.05)
    store = Store.open(tmp_path / "data")
    with ThreadPoolExecutor(1) as pool, store.writing():
        removal = pool.submit(store.delete, "s")
        with pytest.raises(StoreLocked, match="another request has been writing for"):
            removal.result(30)
    store.close()


def test_locked(tmp_path: Path) -> None:
    new_store(tmp_path / "data").close()
    store = Store.open(tmp_path / "data", busy_ms=100)
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    with raw(tmp_path / "data") as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by another process"):
            chat.say("t2", "t1", "more", "sure")
        with pytest.raises(StoreError, match="locked by another process"):
            store.delete("s")
        assert store.session("s").head == "t1", "reading goes on"
        assert find(store, chat.scope, [*chat.turns["t1"].ids.own.tolist(), 1], "s") is not None
        other.execute("ROLLBACK")
    chat.say("t2", "t1", "more", "sure")
    store.close()
    whole(tmp_path / "data", "t1", "t2")


def test_a_disk_that_fails_after_a_commit_takes_nothing_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tidying the log comes after it: the first look finds little room, the next one an error."""
    looks = iter([SimpleNamespace(free=0), OSError(errno.EIO, "Input/output error")])

    def disk_usage(_: Path) -> Any:
        look = next(looks)
        if isinstance(look, OSError):
            raise look
        return look

    chat = Chat(store, "s")
    turn, _ = chat.make("t1", None, [user("hi")], "hello")
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    store.commit([turn], session=chat.info)
    assert next(looks, None) is None
    monkeypatch.undo()
    assert store.session("s").turns == 1


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be removed there")
def test_a_folder_that_cannot_be_looked_into_is_a_store_error(tmp_path: Path) -> None:
    data, aside = tmp_path / "data", tmp_path / "aside"
    store = new_store(data)
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    data.rename(aside)
    data.write_bytes(b"")  # `stat` of what lies in it: "Not a directory"
    for work in (store.move_log, lambda: chat.say("t2", "t1", "more", "sure")):
        with pytest.raises(StoreError, match="check the disk"):
            work()
    data.unlink()
    aside.rename(data)
    chat.say("t2", "t1", "more", "sure")
    store.close()
    whole(data, "t1", "t2")


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be removed there")
@pytest.mark.parametrize(
    ("happened", "anew"),
    [
        ("folder removed", False),
        ("file replaced", False),
        ("log removed", False),
        ("log replaced", False),
        ("index removed", False),
        ("folder removed", True),
        ("file replaced", True),
    ],
)
def test_nothing_is_written_to_a_file_without_its_name(happened: str, anew: bool, tmp_path: Path) -> None:
    """It would be gone at the end. Put back, the same file is written again. anew: no connection is open."""
    data, aside = tmp_path / "data", tmp_path / "aside"
    store = new_store(data)
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    if happened == "folder removed":
        data.rename(aside)
    elif happened == "file replaced":
        shutil.copytree(data, aside)
        (data / FILE).unlink()
        shutil.copy(aside / FILE, data / FILE)
    elif happened == "index removed":
        (data / f"{FILE}-shm").unlink()
    else:
        (data / f"{FILE}-wal").unlink()
        if happened == "log replaced":
            (data / f"{FILE}-wal").touch(0o600)
    for _ in range(2):
        if anew:
            store._engine.dispose()
        with pytest.raises(ReplacedFile, match="while it was in use"):
            chat.say("t2", "t1", "more", "sure")
    if happened.startswith("f"):
        with pytest.raises(ReplacedFile):
            store.settle()
    if not anew:
        with pytest.raises(ReplacedFile):
            store.look()
    if happened == "folder removed":
        aside.rename(data)
        chat.say("t2", "t1", "more", "sure")
        store.close()
        whole(data, "t1", "t2")
    store.close()


@pytest.mark.skipif(sys.platform == "win32", reason="the log's index is locked there")
@pytest.mark.parametrize("settled", [True, False], ids=["log empty", "log full"])
def test_a_file_that_is_written_over_is_left_alone(settled: bool, tmp_path: Path) -> None:
    """So a backup is restored by `cp`. The log would be moved into it, and ruin it."""
    data, aside = tmp_path / "data", tmp_path / "aside"
    store = new_store(data)
    chat = Chat(store, "s", WIDE)
    chat.say("t1", None, "hi", "hello")
    store.settle()
    shutil.copy(data / FILE, aside)
    for i in range(2, 6):
        chat.say(f"t{i}", f"t{i - 1}", "more", "sure")
        if i == 4 or settled:
            store.settle()
    shutil.copyfile(aside, data / FILE)
    for work in (store.look, lambda: chat.say("t9", "t5", "more", "sure"), store.settle, store.move_log):
        with pytest.raises(ReplacedFile, match="written over"):
            work()
    store.close()
    assert (data / FILE).read_bytes() == aside.read_bytes()
    whole(data, "t1")


@pytest.mark.skipif(sys.platform == "win32", reason="locks belong to descriptors there")
def test_no_work_of_a_store_drops_its_locks(tmp_path: Path) -> None:
    """Another process that reads, and ends, would then take itself for the last one, and remove the log."""
    data = tmp_path / "data"
    store = new_store(data)
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    Chat(store, "gone").say("g1", None, "hi", "hello")
    works: list[Callable[[], object]] = [
        *(lambda: store.rename("s", "a title"), store.sessions, lambda: store.search("hi", 1)),
        *(lambda: export_session(store, "s", tmp_path / "s.ssmd"), store.collect, store.move_log, store.look),
        *(lambda: store.delete("gone"), store.settle),  # which erases
    ]
    reads = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); [*c.execute('SELECT * FROM turn')]; c.close()"
    for work in works:
        work()
        subprocess.run([sys.executable, "-c", reads, str(data / FILE)], check=True)
        assert (data / f"{FILE}-wal").exists()
    chat.say("t2", "t1", "more", "sure")
    store.close()
    assert not (data / f"{FILE}-wal").exists()
    whole(data, "t1", "t2")


def test_full(tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s", WIDE)
    chat.say("t1", None, "hi", "hello")

    def limit(connection: sqlite3.Connection, *_: object) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + room}")

    event.listen(store._engine, "checkout", limit)
    room = 0
    with pytest.raises(StoreError, match="disk is full"):
        chat.say("t2", "t1", "more", "sure" * 10_000)
    assert [t.id for t in store.turns("s")] == ["t1"]
    room = 10
    done = chat.say("t2", "t1", "more", "sure")
    assert "disk is full" in str(done.full)
    assert {p.why_not for p in done.checkpoints} == {"the disk is full"}, "the words alone"
    event.remove(store._engine, "checkout", limit)
    store._engine.dispose()
    assert chat.say("t3", "t2", "more", "sure").full is None
    store.close()
    whole(tmp_path / "data", "t1", "t2", "t3")


def _limited(folder: str) -> None:
    """Runs as a process: the file system takes no more than 2 MB in one file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = Store.open(Path(folder))
    chat = Chat(store, "s", WIDE)
    chat.say("t1", None, "hi", "hello")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
    n = 1
    try:
        while n < 20:
            chat.say(f"t{n + 1}", f"t{n}", f"more {n}", "sure")
            n += 1
    except StoreError as err:
        print(err)
    assert [t.id for t in store.turns("s")] == [f"t{i + 1}" for i in range(n)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    chat.say("last", f"t{n}", "more", "sure")
    store.close()
    print(n)


def test_file_system_refuses(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    message, count = done.stdout.splitlines()
    assert "full" in message
    whole(tmp_path / "data", *(f"t{i + 1}" for i in range(int(count))), "last")


@contextmanager
def _unprivileged(folder: Path) -> Iterator[None]:
    """Rights do not bind root: give the folder away, and act as another user."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that another user can reach, as pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_without_rights(reachable: Path) -> None:
    data = reachable / "data"
    store = new_store(data)
    Chat(store, "s").say("t1", None, "hi", "hello")
    store.close()
    data.chmod(0o500)
    (data / FILE).chmod(0o400)
    with _unprivileged(data), pytest.raises(StoreError, match=r"check .*write"):
        Store.open(data)
    data.chmod(0o700)
    (data / FILE).chmod(0o600)
    whole(data, "t1")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot use"):
        Store.open(tmp_path / "file" / "data")


def test_a_link_in_the_place_of_the_file(tmp_path: Path) -> None:
    """A file in the directory must not decide where conversations are written."""
    target = tmp_path / "elsewhere"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / FILE).symlink_to(target)
    with pytest.raises(StoreError, match="cannot use"):
        Store.open(tmp_path / "data")
    assert not target.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"not a database" * 100, "not a database"), (b"SQLite format 3\x00" + b"\xff" * 5000, "damaged")],
)
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(StoreError, match=reason):
        Store.open(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content


def test_a_database_of_another_program(tmp_path: Path) -> None:
    with raw(tmp_path) as connection:
        connection.execute("CREATE TABLE tune (name TEXT)")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store.open(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep objects of reference cycles alive, as they may stay for seconds in a daemon."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_result_left_half_read(tmp_path: Path) -> None:
    """The connection's next user does not read the moment in which that result began."""
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    with store.reading() as connection:
        half = connection.execute(text("SELECT id FROM checkpoint"))
        assert half.fetchone() is not None
    with raw(tmp_path / "data") as other:
        other.execute("UPDATE session SET title = 'new'")
    assert store.session("s").title == "new"
    assert half is not None, "it is held all the while"
    store.close()


@pytest.mark.parametrize("value", ["x'ff00'", "CAST(x'ff' AS TEXT)", "-7"])
def test_an_altered_session_hides_no_other(value: str, tmp_path: Path) -> None:
    """Whatever stands in its row: what cannot be read is told as nothing, and can be written as JSON."""
    store = new_store(tmp_path / "data")
    for name in ("s", "other"):
        Chat(store, name).say(f"{name}1", None, f"hi {name}", "hello")
    for column in (c.name for c in session_table.columns):
        with raw(tmp_path / "data") as connection:
            connection.execute("PRAGMA foreign_keys=OFF")
            (before,) = connection.execute(f"SELECT {column} FROM session WHERE id = 's'").fetchone()
            connection.execute(f"UPDATE session SET {column} = {value} WHERE id = 's'")
        told = {s.title: s for s in store.sessions()}
        assert told["hi other"].id == "other", column
        for one in told.values():
            json.dumps([one.id, one.info.model, one.info.lineage, one.info.owner, one.head, one.base]).encode()
        with raw(tmp_path / "data") as connection:
            connection.execute("PRAGMA foreign_keys=OFF")
            connection.execute(f"UPDATE session SET {column} = ? WHERE id <> 'other'", (before,))
    store.close()


@pytest.mark.parametrize(
    ("table", "column"), [("turn", "id"), ("turn", "session"), ("turn", "parent"), ("checkpoint", "kind")]
)
def test_one_flipped_bit_keeps_nobody_from_the_others(table: str, column: str, tmp_path: Path) -> None:
    """A text that is no UTF-8 any more, in a row that all conversations share a part of."""
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    Chat(store, "other").say("o1", None, "hi", "hello")
    with raw(tmp_path / "data") as connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        flipped = f"CAST(x'f1' || substr(CAST({column} AS BLOB), 2) AS TEXT)"
        connection.execute(f"UPDATE {table} SET {column} = {flipped} WHERE {column} IS NOT NULL AND rowid = 1")
        connection.execute("UPDATE session SET own_nbytes = NULL")
    assert {s.id for s in store.sessions()} == {"s", "other"}
    Chat(store, "new").say("n1", None, "hi", "hello")
    store.settle()
    store.delete("other")
    assert {s.id for s in store.sessions()} == {"s", "new"}
    store.close()


def test_a_fork_without_a_name_continues_nothing(tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    fork = store.fork("s")
    said = [*conversation(store.path("t1")), user("next")]
    with store.snapshot() as stored:
        assert getattr(stored.echoed(said), "session", None) == fork.id, "it was used last"
    with raw(tmp_path / "data") as connection:
        connection.execute("UPDATE session SET id = zeroblob(8) WHERE base IS NOT NULL")
    with store.snapshot() as stored:
        assert getattr(stored.echoed(said), "session", None) == "s"
    store.close()


class TestAltered:
    """Bytes that changed on disk are noticed, named, and never fed to a model."""

    @pytest.fixture
    def chat(self, tmp_path: Path) -> Iterator[Chat]:
        store = new_store(tmp_path / "data")
        chat = Chat(store, "s")
        chat.say("t1", None, "hi", "hello")
        chat.say("t2", "t1", "more", "sure")
        yield chat
        store.close()

    def broken(self, chat: Chat, *statements: str) -> str:
        folder = chat.store.file.parent
        with raw(folder) as connection:
            for s in statements:
                assert connection.execute(s).rowcount > 0, s
        number = chat.ends["t2"][0]
        assert number is not None
        with pytest.raises(StoreError) as caught:
            chat.store.load(number, HYBRID)
        return str(caught.value)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ("UPDATE piece SET data = CAST(data || x'00' AS BLOB) WHERE checkpoint = 4", r"\[0, 164\) were altered"),
            ("UPDATE piece SET data = 'text' WHERE checkpoint = 4", "not what was written"),
            ("UPDATE piece SET data = x'' WHERE checkpoint = 4", r"recurrent values \[0, 164\) were altered"),
            ("UPDATE piece SET checksum = x'00' WHERE checkpoint = 4", "were altered"),
            ("UPDATE piece SET dtype = 'int8' WHERE checkpoint = 4", "stored as 'int8', which this version"),
            ("UPDATE piece SET last = 99999999 WHERE checkpoint = 4", "not what was written"),
            ("DELETE FROM piece WHERE checkpoint = 4", "recurrent values from 0 on are missing"),
            ("UPDATE segment SET data = zeroblob(length(data)) WHERE id = 1", r"KV rows \[0, 12\) were altered"),
            ("UPDATE segment SET first = 5 WHERE id = 2", "not what was written"),
            ("UPDATE segment SET first = -1 WHERE id = 1", "not what was written"),
            ("DELETE FROM checkpoint_segment WHERE checkpoint = 4 AND segment = 4", "KV rows from 36 on are missing"),
            ("DELETE FROM checkpoint_segment WHERE checkpoint = 4 AND segment = 2", "not what was written"),
            ("UPDATE checkpoint SET position = 45 WHERE id = 4", "not what was written"),
            ("UPDATE checkpoint SET digest = x'00' WHERE id = 4", "does not consist of the parts"),
            ("UPDATE checkpoint SET key = zeroblob(32) WHERE id = 4", "does not consist of the parts"),
            ("UPDATE checkpoint SET origin = 'ses_other' WHERE id = 4", "does not consist of the parts"),
            ("UPDATE checkpoint SET build = 'other' WHERE id = 4", "does not consist of the parts"),
            ("DELETE FROM checkpoint WHERE id = 4", "not stored any more"),
        ],
    )
    def test_is_noticed(self, chat: Chat, change: str, reason: str) -> None:
        message = self.broken(chat, change)
        assert re.search(reason, message), message
        assert "checkpoint 4" in message

    def test_exchanged_rows_are_noticed(self, chat: Chat) -> None:
        """Every hash is right, but the rows are those of another conversation."""
        other = Chat(chat.store, "s2")
        other.say("u1", None, "something else", "indeed")
        other.say("u2", "u1", "more", "sure")
        chat.ends["t2"] = other.ends["u2"]
        exchange = "UPDATE checkpoint_segment SET segment = 1 WHERE checkpoint = 8 AND segment = 5"
        assert "checkpoint 8 does not consist of the parts" in self.broken(chat, exchange)

    def test_the_others_are_still_good(self, chat: Chat) -> None:
        self.broken(chat, "UPDATE piece SET data = x'' WHERE checkpoint = 4")
        number, ids = chat.ends["t1"]
        assert number is not None
        assert_same(chat.store.load(number, HYBRID), state_of(HYBRID, ids))

    def test_what_comes_later_is_seen(self, chat: Chat) -> None:
        """A connection that met damage goes back to the pool, and its next reader reads today's turns."""
        first, last = "SELECT min(id) FROM segment", "SELECT max(checkpoint) FROM piece"
        with uncollected():
            caught = self.broken(chat, f"UPDATE segment SET data = zeroblob(length(data)) WHERE id = ({first})")
            chat.say("t3", "t1", "and", "then")
            assert [t.id for t in chat.store.turns("s")] == ["t1", "t2", "t3"], caught
            with raw(chat.store.file.parent) as connection:
                connection.execute(f"UPDATE piece SET data = x'' WHERE checkpoint = ({last})")
            number = chat.ends["t3"][0]
            assert number is not None
            with pytest.raises(StoreError, match="altered"):
                chat.store.load(number, HYBRID)
            chat.say("t4", "t1", "and", "again")
            assert len(chat.store.turns("s")) == 4

    def test_another_layout(self, chat: Chat) -> None:
        with pytest.raises(StoreError, match="is of layout"):
            chat.store.load(4, ATTENTION)

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE turn SET ids_start = 999 WHERE id = 't2'",
            "UPDATE turn SET text_start = 999 WHERE id = 't2'",
            "UPDATE turn SET stem = NULL WHERE id = 't2'",
            "UPDATE turn SET ids = x'0102' WHERE id = 't2'",
            "UPDATE turn SET ids_before = zeroblob(32) WHERE id = 't2'",
            'UPDATE turn SET items = \'[{"role": "dog", "content": "x"}]\' WHERE id = \'t2\'',
            "UPDATE turn SET items = '[7]' WHERE id = 't2'",
            "UPDATE turn SET items = '7' WHERE id = 't2'",
            "UPDATE turn SET items = 'no json' WHERE id = 't2'",
            "UPDATE turn SET items = x'ff' WHERE id = 't2'",
            "UPDATE turn SET answer = '[]' WHERE id = 't2'",
            "UPDATE turn SET answer = NULL WHERE id = 't2'",
        ],
    )
    def test_a_broken_turn_is_named(self, chat: Chat, change: str, tmp_path: Path) -> None:
        """Nothing of it is believed but the words, nothing is added to it, and others are read all the same."""
        with raw(chat.store.file.parent) as connection:
            assert connection.execute(change).rowcount == 1
        for read in (chat.store.turns("s"), chat.store.path("t2")):
            assert [(t.id, t.sound) for t in read] == [("t1", True), ("t2", False)]
            assert (len(read[1].ids), len(read[1].text), read[1].prompt_tokens) == (0, 0, 0)
            assert len(read[0].ids) == 24
        with pytest.raises(StoreError, match="turn 't2' was altered; see `ssmd session check`"):
            chat.say("t3", "t2", "and", "then")
        with pytest.raises(StoreError, match="turn 't2' was altered"):
            export_session(chat.store, "s", tmp_path / "s.ssmd")
        assert [t.id for t in chat.store.path("t1")] == ["t1"]
        chat.say("t3", "t1", "and", "then")


if __name__ == "__main__":
    _limited(sys.argv[1])
