"""A machine's key: made once, with its first sending, read by its user alone, and never made anew by itself."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import commands
import pytest
from keeping import Chat, new_store

from ssmd.sessions.remote.folder import FolderRemote
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.sending import send
from ssmd.sessions.remote.signing import FILE, KeyRefused, new_key, own_key, read_key
from ssmd.sessions.rows import outbox, trust
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store with one turn to be sent."""
    made = new_store(tmp_path / "data")
    made.shares = lambda: None
    Chat(made, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    return made


@pytest.fixture
def remote(tmp_path: Path) -> FolderRemote:
    (tmp_path / "remote").mkdir(mode=0o700)
    return FolderRemote.open(tmp_path / "remote", create=True)


def waiting(store: Store) -> int:
    with store.reading() as connection:
        return len(outbox.read(connection, 10))


def test_a_key_is_made_with_the_first_sending(store: Store, remote: FolderRemote) -> None:
    folder = store.file.parent
    Link(store, lambda: remote).connect()
    assert read_key(folder) is None
    send(store, remote)
    made = read_key(folder)
    assert made is not None
    assert os.name != "posix" or (folder / FILE).stat().st_mode & 0o777 == 0o600
    assert own_key(store).public == made.public
    [row] = (remote.root / "sessions").glob("*/*/t1")
    assert json.loads(row.read_bytes().partition(b"\n")[2])["key"] == made.public


def test_processes_that_begin_at_once_have_one_key(store: Store) -> None:
    found, barrier = list[str](), threading.Barrier(6)

    def begin() -> None:
        other = Store.open(store.file.parent, busy_ms=20_000)
        barrier.wait()
        found.append(own_key(other).public)
        other.close()

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 6
    assert set(found) == {own_key(store).public}


def _flip(file: Path) -> None:
    fields = json.loads(file.read_text())
    secret = bytearray.fromhex(fields["secret"])
    secret[5] ^= 1
    file.write_text(json.dumps(fields | {"secret": secret.hex()}))


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (_flip, "is damaged"),
    "empty": (lambda file: file.write_bytes(b""), "is damaged"),
    "a part": (lambda file: os.truncate(file, 100), "is damaged"),
    "no object": (lambda file: file.write_text("[1]"), "is damaged"),
    "a number": (lambda file: file.write_text('{"secret": 1, "key": 2}'), "is damaged"),
    "deep": (lambda file: file.write_text("[" * 4000), "is damaged"),
    "too long": (lambda file: file.write_text(file.read_text() + " " * 4096 + "x"), "is damaged"),
    "no text": (lambda file: file.write_bytes(b"\xff\xfe"), "is damaged"),
    "read by the group": (lambda file: file.chmod(0o640), "could be read or written by others"),
    "read by all": (lambda file: file.chmod(0o604), "could be read or written by others"),
    "a link": (_link, "is not used"),
}


@pytest.mark.skipif(os.name != "posix", reason="modes and links are POSIX's")
@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_key_is_not_made_anew(case: str, store: Store, remote: FolderRemote) -> None:
    """A daemon does not start with it. One that runs sends nothing, and says so in /health."""
    change, said = UNUSABLE[case]
    link, made = Link(store, lambda: remote), own_key(store)
    link.connect()
    file = store.file.parent / FILE
    good = file.read_bytes()
    change(file)
    with pytest.raises(KeyRefused, match=said) as refused:
        link.connect()
    assert (refused.value.lasting, "ssmd store key --new" in str(refused.value)) == (True, True)
    with pytest.raises(KeyRefused, match=said) as failed:
        send(store, remote)
    link.failed(failed.value)
    assert (link.problem, waiting(store)) == ("key_refused", 1)
    assert not list(remote.root.glob("sessions/*/*/*"))
    file.unlink()
    file.touch(0o600)
    file.write_bytes(good)
    assert send(store, remote) == 1
    assert own_key(store).public == made.public


def test_a_full_disk_leaves_no_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(KeyRefused, match=r"cannot be written to .*: No space left on device"):
            own_key(store)
    assert read_key(store.file.parent) is None
    assert own_key(store).public == own_key(store).public


@pytest.mark.parametrize("key", ["", "abc", "g" * 64, "0" * 63, "0" * 65, "é" * 64, "0" * 64 + "\n0", "../" * 20])
def test_a_text_that_is_no_key_is_not_trusted(key: str, store: Store) -> None:
    with store.writing() as connection, pytest.raises(StoreError, match="is not a machine's key"):
        trust.trust(connection, key)
    with store.writing() as connection, pytest.raises(StoreError, match="is not a machine's key"):
        trust.distrust(connection, key)


@pytest.mark.parametrize("name", ["x" * 65, "a\0b", "a\nb", "\x1b[31m", "\ud800"])
def test_a_name_that_is_no_word_is_refused(name: str, store: Store) -> None:
    with store.writing() as connection, pytest.raises(StoreError, match="at most 64 printable characters"):
        trust.trust(connection, own_key_of_another(), name)


def own_key_of_another() -> str:
    return "ab" * 32


def test_a_trusted_machine_gets_another_name(store: Store) -> None:
    for name in ("laptop", "desk"):
        with store.writing() as connection:
            trust.trust(connection, own_key_of_another().upper(), name)
    with store.reading() as connection:
        [one] = trust.trusted(connection)
    assert (one.key, one.name, one.states) == (own_key_of_another(), "desk", 0)
    with store.writing() as connection:
        assert trust.distrust(connection, one.key) == 0
    with store.writing() as connection, pytest.raises(StoreError, match="is not trusted here"):
        trust.distrust(connection, one.key)


def test_commands_show_and_change_the_trust(store: Store) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return commands.ssmd("store", *words, env={**os.environ, "SSMD_DATA_DIR": str(store.file.parent)})

    shown = run("key")
    assert shown.stdout == f"{own_key(store).public}\n"
    key = own_key_of_another()
    assert "no machine is trusted here" in run("machines").stderr
    assert run("trust", key, "--name", "laptop").stdout == f"{key} is trusted here\n"
    found = json.loads(run("machines", "--json").stdout)["machines"]
    assert [(one["key"], one["name"], one["states"]) for one in found] == [(key, "laptop", 0)]
    assert run("machines").stdout.startswith(f"{key}  2")
    assert run("distrust", key).stdout == f"{key} is not trusted any more, 0 states removed\n"
    again = run("distrust", key)
    assert (again.returncode, "is not trusted here" in again.stderr) == (1, True)
    made = run("key", "--new")
    assert made.stdout == f"{own_key(store).public}\n" != shown.stdout
    assert f"ssmd store distrust {shown.stdout}" in made.stderr
    assert f"ssmd store trust {made.stdout}" in made.stderr


def test_a_damaged_key_is_replaced_on_demand_alone(store: Store) -> None:
    before = own_key(store).public
    (store.file.parent / FILE).write_bytes(b"")
    with pytest.raises(KeyRefused):
        own_key(store)
    assert new_key(store).public == own_key(store).public != before
