"""A disk that is really full: words are kept, sessions can be removed, and states come back with room. Or read-only."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import commands
import pytest
from conftest import TinyArtifacts
from forked import DaemonProcess
from keeping import Chat, assert_same, new_store, state_of

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.remote.ends import send_end
from ssmd.sessions.remote.folder import FolderRemote
from ssmd.sessions.remote.remote import RemoteError
from ssmd.sessions.remote.sending import send
from ssmd.sessions.rows import disk_space
from ssmd.sessions.rows.faults import DiskFull
from ssmd.sessions.store import Store

WIDE = StateSpec((TensorSpec("ssm_0", "ssm", 0, (100, 2500)),))  # 1 MB for each checkpoint


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> None:
    """Another program takes all that is left."""
    with (disk / "filler").open("ab", buffering=0) as f:
        for size in (1 << 20, 4096):
            try:
                while True:
                    f.write(bytes(size))
            except OSError as err:
                if err.errno != errno.ENOSPC:
                    raise


def ssmd(data: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return commands.ssmd("session", *args, "--data-dir", str(data), env=os.environ)


@pytest.mark.parametrize("words", [("list",), ("check", "--repair"), ("export", "s", "x.ssmd")])
def test_a_command_names_a_read_only_disk(words: tuple[str, ...], disk: Path) -> None:
    new_store(disk / "data").close()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    done = ssmd(disk / "data", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "cannot be written (its file system is read-only; see the system's log, and remount it)" in done.stderr


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def talk(store: Store, session: str, turns: int) -> Chat:
    chat = Chat(store, session, WIDE)
    for i in range(turns):
        done = chat.say(f"{session}-{i}", f"{session}-{i - 1}" if i else None, f"{session} {i}", "hello")
        assert done.full is None
    return chat


@pytest.mark.parametrize("low", [disk_space.LOW_BYTES, 0], ids=["the log is short", "all is in the log"])
def test_words_are_kept_and_removing_gives_room(disk: Path, low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "LOW_BYTES", low)
    data = disk / "data"
    store = new_store(data)
    assert store.room.reserve()
    chats = [talk(store, f"s{n}", 4) for n in range(4)]  # 32 MB
    fill(disk)
    assert free(disk) == 0
    chat, last = chats[-1], "s3-3"
    for i in range(20):
        done = chat.say(f"more{i}", last, f"more {i}", "of it" * 500)
        assert done.full is not None
        assert [p.id for p in done.checkpoints] == [None, None]
        last = f"more{i}"
        with suppress(DiskFull):
            store.settle()
    assert [t.id for t in store.path(last)][-20:] == [f"more{i}" for i in range(20)]
    assert not store.room.restock()

    removed = ssmd(data, "rm", "s0", "s1")
    assert (removed.returncode, removed.stderr) == (0, "")
    assert [s.id for s in store.sessions()] == ["s3", "s2"]
    collected = ssmd(data, "gc", "--quota", "1MB", "--json")
    assert collected.returncode == 0, collected.stderr
    assert json.loads(collected.stdout)["left"] <= 1_000_000
    if low:  # else the log, which cannot be moved, holds on to it
        assert free(disk) > 20_000_000, "what was removed is the disk's again"
    assert not check(data).damages

    (disk / "filler").unlink()
    assert store.room.restock()
    assert (data / disk_space.FILE).stat().st_size == disk_space.RESERVE_BYTES
    done = chat.say("after", last, "and now", "all is well")
    assert done.full is None
    number, ids = chat.ends["after"]
    assert number is not None
    assert_same(store.load(number, WIDE), state_of(WIDE, ids))
    store.close()


def test_words_leave_what_removing_needs(disk: Path) -> None:
    """Once even words no longer fit, sessions can still be removed."""
    data = disk / "data"
    store = new_store(data)
    store.room.reserve()
    chat = talk(store, "s0", 4)
    talk(store, "s1", 4)
    fill(disk)
    last, kept = "s0-3", 0
    while kept < 1000:
        try:
            chat.say(f"more{kept}", last, f"more {kept}", os.urandom(20_000).hex())
        except DiskFull:
            break
        last, kept = f"more{kept}", kept + 1
    fill(disk)
    assert kept > 20
    assert (data / disk_space.FILE).stat().st_size == disk_space.FOR_REMOVAL
    assert [t.id for t in store.path(last)][-1] == last, "what was said to be kept is"
    assert ssmd(data, "rm", "s1").returncode == 0
    assert free(disk) > 4_000_000
    assert chat.say("after", last, "and now", "there is room").full is None
    assert not check(data).damages
    store.close()


def test_a_daemon_goes_on_and_is_killed(disk: Path, artifacts: TinyArtifacts) -> None:
    data = disk / "data"
    said: list[dict[str, str]] = []

    def say(text: str) -> dict[str, Any]:
        said.append({"role": "user", "content": text})
        reply = daemon.chat(said, max_tokens=8)
        said.append({"role": "assistant", "content": reply.text})
        return dict(reply.usage["ssmd"])

    with DaemonProcess(artifacts["llama-f32"], data) as daemon:
        first = say("Who crosses the bridge?")
        fill(disk)
        for i in range(3):
            lean = say(f"And then {i}?")
            assert (lean["stored"], lean["session"], lean["resume"]) == (True, first["session"], "exact")
        health = daemon.get("/health")[1]
        assert (health["status"], health["reason"]) == ("degraded", "disk_full")
        daemon.kill()
        daemon.start()
        again = say("And in the end?")
        assert (again["stored"], again["session"], again["resume"]) == (True, first["session"], "exact")
        assert ssmd(data, "fork", first["session"]).returncode == 0, "what is small finds room"
        (disk / "filler").unlink()
        assert say("Is there room?")["resume"] == "exact"
        assert daemon.get("/health")[1]["status"] == "ok"
        assert daemon.chat(said[:-1], max_tokens=8).usage["prompt_tokens_details"]["cached_tokens"] > 100
    assert (data / disk_space.FILE).stat().st_size == disk_space.RESERVE_BYTES
    assert not check(data).damages


def test_commands_begin_where_nothing_is_left(disk: Path) -> None:
    """Opening the store and locking the directory write too."""
    data = disk / "data"
    store = new_store(data)
    store.room.reserve()
    talk(store, "s0", 4)
    store.close()
    fill(disk)
    checked = ssmd(data, "check", "--repair")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "1 session, 4 turns, 8 checkpoints: all sound" in checked.stdout
    fill(disk)
    assert ssmd(data, "rm", "s0").returncode == 0
    assert free(disk) > 8_000_000


def test_what_does_not_fit_is_not_begun(disk: Path) -> None:
    """A log that takes the last bytes could not be moved any more."""
    data = disk / "data"
    store = new_store(data)
    chat = talk(store, "s0", 1)
    with (disk / "filler").open("wb") as f:
        f.write(bytes(free(disk) - 1_500_000))
    before = free(disk)
    assert chat.say("t", "s0-0", "more", "of it").full is not None
    assert free(disk) > before - 100_000
    assert ssmd(data, "rm", "s0").returncode == 0
    store.close()


def test_a_full_remote_has_no_half_of_a_state(disk: Path, tmp_path: Path) -> None:
    store, root = new_store(tmp_path / "data"), disk / "remote"
    root.mkdir(mode=0o700)
    remote = FolderRemote.open(root, create=True)
    store.shares = lambda: None
    talk(store, "s0", 1)
    send(store, remote)
    fill(disk)
    with pytest.raises(RemoteError, match="its disk is full"):
        send_end(store, remote, "s0")
    assert remote.ends("s0") == []
    assert not list(root.glob("packs/*/*"))
    (disk / "filler").unlink()
    assert send_end(store, remote, "s0") > 1_000_000
    assert remote.ends("s0") == ["s0-0"]
