"""A backup holds all that was stored when it began, nothing that was removed, and a daemon goes on from it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import commands
import pytest
from conftest import TinyArtifacts
from forked import DaemonProcess
from keeping import ATTENTION, HYBRID, RECURRENT, Chat, assert_same, find, ids_of, new_store, state_of, user

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.sessions.checkpoint import NewCheckpoint
from ssmd.sessions.files.backup import UNFINISHED, back_up
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.line import Line
from ssmd.sessions.remote.sharing import keep_local, shareable
from ssmd.sessions.rows.database import FILE, PAGE_BYTES
from ssmd.sessions.rows.schema import remote_mark
from ssmd.sessions.rows.trust import origin_of, trust
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

Messages = list[dict[str, str]]
WIDE = StateSpec((TensorSpec("ssm_0", "ssm", 0, (100, 2500)),))  # 1 MB for each checkpoint


def ssmd(data: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return commands.ssmd(*args, env={**os.environ, "SSMD_DATA_DIR": str(data)})


def rows(store: Store, table: str) -> list[tuple[object, ...]]:
    with store.reading() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(f"SELECT * FROM {table} ORDER BY 1")]


def test_a_daemon_goes_on_from_a_backup_under_load(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    data, target, path = tmp_path / "data", tmp_path / "backup", artifacts["llama-f32"]
    before: dict[int, tuple[str, Messages]] = {}
    ready, done, after = threading.Barrier(4), threading.Event(), list[int]()

    def talk(client: int) -> None:
        said: Messages = []
        for turn in range(2000):
            said.append({"role": "user", "content": f"client {client} says {turn}"})
            reply = daemon.chat(said, max_tokens=4, truncation="auto")  # a backup may outlast the context
            said.append({"role": "assistant", "content": reply.text})
            assert reply.usage["ssmd"]["stored"]
            if turn == 2:
                assert reply.session is not None
                before[client] = reply.session, list(said)
                ready.wait()
            elif done.is_set():
                after.append(client)
                return

    with DaemonProcess(path, data) as daemon:
        clients = [threading.Thread(target=talk, args=(n,)) for n in range(3)]
        for one in clients:
            one.start()
        ready.wait(120)
        made = ssmd(data, "backup", str(target), "--json")
        done.set()
        for one in clients:
            one.join(120)
        assert made.returncode == 0, made.stderr
        assert sorted(after) == [0, 1, 2], "they went on during the backup, and after it"
        assert daemon.get("/health")[1]["status"] == "ok"
    told = json.loads(made.stdout)
    assert (told["sessions"], told["sound"], told["states"]) == (3, True, True)
    assert told["turns"] >= 9
    assert told["bytes"] == (target / FILE).stat().st_size
    assert [p.name for p in target.iterdir()] == [FILE]
    with DaemonProcess(path, target) as restored:
        for session, said in before.values():
            reply = restored.chat([*said, {"role": "user", "content": "go on"}], max_tokens=4)
            usage = reply.usage["ssmd"]
            assert (usage["session"], usage["resume"], usage["stored"]) == (session, "exact", True)
    assert not check(target).damages


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Chat]:
    store = new_store(tmp_path / "data")
    one = Chat(store, "kept")
    one.say("k1", None, "hello", "good day")
    one.say("k2", "k1", "more", "certainly")
    yield one
    store.close()


@pytest.mark.parametrize("spec", [HYBRID, ATTENTION, RECURRENT], ids=["hybrid", "attention", "recurrent"])
def test_states_are_the_same_to_the_bit(spec: StateSpec, tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s", spec)
    for turn in range(1, 5):
        chat.say(f"t{turn}", f"t{turn - 1}" if turn > 1 else None, f"text {turn}", "said")
    store.fork("s", "t2")
    store.pin("s")
    with store.reading() as connection:
        sessions = [store.session_in(connection, s.id) for s in store.sessions()]
    done = back_up(tmp_path / "data", tmp_path / "backup")
    assert (done.sessions, done.turns, done.damages) == (2, 4, ())
    copy = Store.open(tmp_path / "backup")
    assert copy.sessions() == sessions
    assert rows(copy, "turn") == rows(store, "turn")
    assert rows(copy, "checkpoint") == rows(store, "checkpoint")
    for store_ in (store, copy):
        found = find(store_, chat.scope, [*chat.turns["t4"].ids.own.tolist(), 1])
        assert found is not None
        ids = chat.turns["t4"].ids.own[: found.position]
        assert_same(store_.load(found.id, spec), state_of(spec, ids))
    assert copy.bytes_stored() == store.bytes_stored()
    copy.close()
    store.close()


def test_without_states_the_text_is_kept_alone(chat: Chat, tmp_path: Path) -> None:
    done = back_up(tmp_path / "data", tmp_path / "backup", states=False)
    assert (done.turns, done.checkpoints, done.damages) == (2, 0, ())
    copy = Store.open(tmp_path / "backup")
    assert rows(copy, "turn") == rows(chat.store, "turn")
    assert (copy.bytes_stored(), copy.session("kept").nbytes) == (0, 0)
    again = Chat(copy, "kept")
    again.turns, again.ends = chat.turns, {turn: (None, ids) for turn, (_, ids) in chat.ends.items()}
    again.say("k3", "k2", "and on", "it goes")
    copy.close()
    assert not check(tmp_path / "backup").damages


@pytest.mark.parametrize("states", [True, False])
def test_removed_text_is_in_no_byte_of_it(states: bool, chat: Chat, tmp_path: Path) -> None:
    """Another process that reads keeps it from being erased in the store, and it is not in the backup all the same."""
    gone = Chat(chat.store, "gone", owner="")
    for turn in range(12):
        gone.say(f"g{turn}", f"g{turn - 1}" if turn else None, f"SECRET-{turn} " * 60, "FORGET-ME " * 60)
    with chat.store.reading() as reader:
        reader.exec_driver_sql("SELECT count(*) FROM turn").fetchall()
        chat.store.delete("gone")
        here = b"".join(p.read_bytes() for p in (tmp_path / "data").iterdir())
        assert b"SECRET-3" in here, "else this test shows nothing"
        back_up(tmp_path / "data", tmp_path / "backup", states=states)
    there = b"".join(p.read_bytes() for p in (tmp_path / "backup").iterdir())
    assert b"good day" in there
    assert b"SECRET" not in there
    assert b"FORGET-ME" not in there
    assert Store.open(tmp_path / "backup").session("kept").turns == 2


def test_what_lies_in_the_free_part_of_a_page_stays_there(tmp_path: Path) -> None:
    """SQLite's own backup takes it along: there copies of removed rows can lie."""
    store = new_store(tmp_path / "data")
    Chat(store, "kept").say("k1", None, "hello", "good day")
    store.close()
    with closing(sqlite3.connect(tmp_path / "data" / FILE)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'turn'").fetchone()
    with (tmp_path / "data" / FILE).open("r+b") as file:
        file.seek((root - 1) * PAGE_BYTES)
        assert file.read(1) == b"\r", "a leaf, whose cells begin at its end"
        file.seek((root - 1) * PAGE_BYTES + 1000)
        file.write(b"LEFT-BEHIND")
    back_up(tmp_path / "data", tmp_path / "backup")
    with (
        closing(sqlite3.connect(tmp_path / "data" / FILE)) as live,
        closing(sqlite3.connect(tmp_path / "theirs")) as copy,
    ):
        live.backup(copy)
    assert b"LEFT-BEHIND" in (tmp_path / "theirs").read_bytes(), "else this test shows nothing"
    assert b"LEFT-BEHIND" not in (tmp_path / "backup" / FILE).read_bytes()


def test_states_of_a_trusted_machine_go_with_the_trust(tmp_path: Path) -> None:
    chat = Chat(new_store(tmp_path / "data"), "ses_1")
    with chat.store.writing() as connection:
        trust(connection, "ab" * 32, "laptop")
    turn, states = chat.make("t1", None, [user("Hello")], "Hi.")
    origin = origin_of("ab" * 32)
    chat.store.commit([turn], [replace(chat.encode(one), origin=origin) for one in states], session=chat.info)
    back_up(tmp_path / "data", tmp_path / "backup")
    with closing(Store.open(tmp_path / "backup")) as restored:
        found = find(restored, chat.scope, turn.ids.own)
    assert found is not None
    assert (found.position, found.origin) == (len(turn.ids) - 1, origin)


def test_what_is_shared_and_what_stays_is_in_the_backup(tmp_path: Path) -> None:
    """A daemon on the backup removes sessions from the remote too, and sends nothing of a local one."""
    store = new_store(tmp_path / "data")
    store.shares = lambda: None
    chats = [Chat(store, f"ses_{n}") for n in range(4)]
    for n, chat in enumerate(chats):
        chat.say(f"t{n}", None, "Hello", "Hi.")
    with store.writing() as connection:
        connection.execute(remote_mark.insert().values(remote="/mnt/nas", machine="ab" * 16, confirmed=7))
    keep_local(store, "ses_1")
    store.delete("ses_2")
    chats[3].say("t4", "t3", "More?", "No.")
    store.remove_turn("t4", {})
    tables = ("outbox", "remote_session", "remote_mark", "buried_turn")
    here = [rows(store, table) for table in tables]
    assert all(here)
    back_up(tmp_path / "data", tmp_path / "backup")
    with closing(Store.open(tmp_path / "backup")) as restored:
        assert [rows(restored, table) for table in tables] == here
        assert [one.session for one in shareable(restored, None)] == ["ses_3", "ses_0"]


def test_states_of_no_turn_stay_behind(chat: Chat, tmp_path: Path) -> None:
    """States of `store: false`, and of answers that are still generated."""
    ids = ids_of([user("not to be kept")], "", 30)
    loose = chat.encode(NewCheckpoint("user", Line.of(ids), state_of(HYBRID, ids)))
    assert chat.store.keep(loose).id is not None
    done = back_up(tmp_path / "data", tmp_path / "backup")
    copy = Store.open(tmp_path / "backup")
    with chat.store.reading() as here, copy.reading() as there:
        counts = [one.exec_driver_sql("SELECT count(*) FROM checkpoint").scalar() for one in (here, there)]
    assert counts == [done.checkpoints + 1, done.checkpoints]
    assert find(copy, chat.scope, [*ids.tolist(), 1]) is None
    copy.close()
    assert not check(tmp_path / "backup").damages


def test_a_damaged_store_is_copied_and_told(chat: Chat, tmp_path: Path) -> None:
    with chat.store.writing() as connection:
        connection.exec_driver_sql("UPDATE piece SET data = zeroblob(length(data)) WHERE rowid = 1")
    done = ssmd(tmp_path / "data", "backup", str(tmp_path / "backup"))
    assert done.returncode == 1
    assert "its recurrent values were altered" in done.stdout
    assert [t.id for t in Store.open(tmp_path / "backup").turns("kept")] == ["k1", "k2"]


@pytest.mark.skipif(sys.platform == "win32", reason="modes are those of Unix")
def test_nobody_else_can_read_it(chat: Chat, tmp_path: Path) -> None:
    target = tmp_path / "above" / "backup"
    target.mkdir(parents=True, mode=0o755)
    done = ssmd(tmp_path / "data", "backup", str(target))
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert stat.S_IMODE((target / FILE).stat().st_mode) == 0o600


def test_a_folder_that_is_not_empty_is_left_alone(chat: Chat, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    done = ssmd(tmp_path / "data", "backup", str(target))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {target} is not empty (notes.txt is there); a backup takes a folder of its own\n"
    assert [p.name for p in target.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("place", ["data", "data/backup", "link/backup"])
def test_the_data_directory_is_no_place_for_it(place: str, chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with pytest.raises(StoreError, match="is in the data directory"):
        back_up(tmp_path / "data", tmp_path / place)
    assert not (tmp_path / "data" / "backup").exists()


def test_a_directory_without_sessions_is_refused(tmp_path: Path) -> None:
    done = ssmd(tmp_path / "none", "backup", str(tmp_path / "backup"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "nothing to back up" in done.stderr
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "backup").exists()


@contextmanager
def mounted(folder: Path, *how: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", *how, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system of memory")
def test_a_full_disk_has_nothing_left_on_it(tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s", WIDE)
    for turn in range(4):
        chat.say(f"t{turn}", f"t{turn - 1}" if turn else None, "text", "said")
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=6m", "tmpfs") as disk:
        done = ssmd(tmp_path / "data", "backup", str(disk / "backup"))
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: no room for a backup in {disk / 'backup'}: ")
        assert not any((disk / "backup").iterdir())
        with store.writing() as connection:  # what is counted is less than what is there
            connection.exec_driver_sql("UPDATE total SET nbytes = 0")
        with pytest.raises(StoreError, match=r"no room for a backup .* that was not enough"):
            back_up(tmp_path / "data", disk / "backup")
        assert not any((disk / "backup").iterdir())
        assert back_up(tmp_path / "data", disk / "backup", states=False).turns == 4
    store.close()


@pytest.mark.skipif(shutil.which("mkfs.vfat") is None, reason="needs mkfs.vfat")
def test_a_disk_without_permissions_is_refused(chat: Chat, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(8 << 20))
    subprocess.run(["mkfs.vfat", image], check=True, capture_output=True)
    with mounted(tmp_path / "disk", "-o", "loop,umask=022", str(image)) as disk:
        with pytest.raises(StoreError, match=r"does not keep permissions|cannot be made"):
            back_up(tmp_path / "data", disk / "backup")
        assert not (disk / "backup" / UNFINISHED).exists()
