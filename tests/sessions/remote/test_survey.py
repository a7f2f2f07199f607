"""`ssmd store`: a remote is checked, copied into one of either kind, and counted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from buckets import BucketServer
from keeping import SPECS, Chat, new_store
from remotes import BucketPlace, DatabasePlace, FolderPlace, Place

from ssmd.sessions.remote.ends import send_end
from ssmd.sessions.remote.remote import Remote, RemoteError, RemoteTurn, TurnPlace
from ssmd.sessions.remote.sending import send
from ssmd.sessions.remote.survey import check, copy
from ssmd.sessions.store import Store
from ssmd.sessions.turn import EVERYBODY

DOCS = Path(__file__).parents[3] / "docs" / "remote.md"
PLACE = TurnPlace("ses_1", "t2")


@pytest.fixture
def store(tmp_path: Path, remote: Remote) -> Iterator[Store]:
    """Return a store with a conversation of two turns and a single one, in the remote with a state each."""
    made = new_store(tmp_path / "data")
    made.shares = lambda: None
    chat = Chat(made, "ses_1", SPECS["hybrid"])
    chat.say("t1", None, "Tell me of a river.", "It flows.")
    chat.say("t2", "t1", "Where to?", "To the sea.")
    Chat(made, "ses_2", SPECS["hybrid"]).say("o1", None, "And a lake?", "It is still.")
    send(made, remote)
    assert send_end(made, remote, "ses_1")
    assert send_end(made, remote, "ses_2")
    yield made
    made.close()


def pack_of(remote: Remote) -> str:
    raw = remote.end(PLACE)
    assert raw is not None
    return str(json.loads(raw)["pack"])


def kinds(remote: Remote) -> list[tuple[str, str]]:
    return [(one.kind, one.turn) for one in check(remote).faults]


def command(store: Store, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.ssmd("store", *words, env={**os.environ, "SSMD_DATA_DIR": str(store.file.parent)})


def test_a_sound_remote_is_read_whole(store: Store, remote: Remote) -> None:
    found = check(remote)
    assert (found.turns, found.states, found.faults, found.sound) == (3, 2, [], True)


def test_damages_are_found_and_named(store: Store, remote: Remote, place: Place) -> None:
    place.alter_pack(pack_of(remote))
    assert kinds(remote) == [("pack_damaged", "t2")]
    place.lose_pack(pack_of(remote))
    assert kinds(remote) == [("pack_missing", "t2")]
    place.alter(TurnPlace("ses_1", "t1"), "body")
    assert sorted(kinds(remote)) == [("pack_missing", "t2"), ("turn_damaged", "t1")]
    place.make_newer(TurnPlace("ses_2", "o1"))
    found = check(remote)
    assert (found.newer, found.sound) == (1, False)


def test_a_push_writes_what_was_altered_again(store: Store, remote: Remote, place: Place) -> None:
    """As `check` advises: also a turn whose digest was altered with it, so that its signature alone is wrong."""
    said = {name: remote.fetch(TurnPlace("ses_1", name)) for name in ("t1", "t2")}
    forged = (said["t2"] or b"").replace(b"To the sea.", b"To a pond..")
    remote.discard(PLACE)
    remote.publish([RemoteTurn(PLACE, "", bytes(32), forged)])
    place.alter(TurnPlace("ses_1", "t1"), "body")
    assert sorted(kinds(remote)) == [("turn_damaged", "t1"), ("turn_damaged", "t2")]
    environment = {**os.environ, "SSMD_DATA_DIR": str(store.file.parent)}
    done = commands.ssmd("session", "push", "ses_1", "--remote", place.setting, env=environment)
    assert done.returncode == 0, done.stderr
    assert kinds(remote) == []
    assert {name: remote.fetch(TurnPlace("ses_1", name)) for name in said} == said
    assert remote.buried() == set()
    [turn] = [one for one in store.turns("ses_1") if one.id == "t2"]
    assert remote.known([turn.chain.said], EVERYBODY) == [PLACE]


def test_a_pack_without_a_state_does_no_harm(store: Store, remote: Remote) -> None:
    assert remote.packs is not None
    name = remote.packs.put([b"of a machine that was killed before the row"])
    found = check(remote)
    assert [(one.kind, one.pack) for one in found.faults] == [("pack_unnamed", name)]
    assert found.sound


def test_a_turn_without_its_beginning_is_found(store: Store, remote: Remote) -> None:
    remote.bury("ses_1", "t1")
    assert kinds(remote) == [("turn_without_parent", "t2")]


@pytest.fixture(params=["folder", "postgres", "bucket"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Make an empty place of each kind for a copy."""
    if request.param == "folder":
        return FolderPlace(tmp_path / "copy")
    if request.param == "postgres":
        return DatabasePlace(request.getfixturevalue("server"), tmp_path / "copy")
    bucket: BucketServer = request.getfixturevalue("opened_bucket")
    return BucketPlace(request.getfixturevalue("server"), bucket, tmp_path / "copy")


def test_a_remote_is_copied_into_either_kind(store: Store, remote: Remote, other: Place) -> None:
    """Once more copies what is new. What was removed in either one is in neither of the two."""
    target = other.open(create=True)
    target.bury("ses_2", None)
    first = copy(remote, target)
    assert (first.turns, first.states, first.there, first.refused) == (2, 1, 0, [])
    assert sorted(target.turns("ses_1")) == ["t1", "t2"]
    assert target.turns("ses_2") == []
    assert target.fetch(PLACE) == remote.fetch(PLACE)
    assert check(target).states == 1
    assert check(target).faults == []
    again = copy(remote, target)
    assert (again.turns, again.states, again.there) == (0, 0, 3)
    remote.bury("ses_1", "t2")
    last = copy(remote, target)
    assert (last.tombstones, last.turns) == (1, 0)
    assert target.turns("ses_1") == ["t1"]
    assert not [name for name in other.rows() if "t2" in name]
    with pytest.raises(RemoteError, match="the remote itself"):
        copy(remote, remote)
    target.close()


def test_a_killed_copy_goes_on(store: Store, remote: Remote, place: Place, tmp_path: Path) -> None:
    """The process is killed after each of the things that it copies, in turn."""
    target, code = FolderPlace(tmp_path / "copy"), -int(signal.SIGKILL)
    killed = (
        "import os, signal, sys\nfrom ssmd.sessions.remote.sharing import open_at\n"
        "from ssmd.sessions.remote.survey import copy\n"
        "copy(open_at(sys.argv[1], create=False), open_at(sys.argv[2], create=True),"
        " lambda done: os.kill(os.getpid(), signal.SIGKILL))"
    )
    rounds = 0
    while code == -signal.SIGKILL:
        code = subprocess.run([sys.executable, "-c", killed, place.setting, target.setting], check=False).returncode
        rounds += 1
    assert (code, rounds) == (0, 6)
    done = target.open()
    assert (check(done).turns, check(done).states, check(done).faults) == (3, 2, [])


def test_the_commands_say_what_there_is(store: Store, remote: Remote, place: Place, tmp_path: Path) -> None:
    sound = command(store, "check", "--remote", place.setting)
    assert sound.returncode == 0, sound.stderr
    assert "3 turns, 2 states" in sound.stdout
    assert "all sound" in sound.stdout
    Chat(store, "ses_3").say("w1", None, "This waits.", "Yes.")
    told = command(store, "stats", "--remote", place.setting, "--json")
    assert told.returncode == 0, told.stderr
    stats: dict[str, Any] = json.loads(told.stdout)
    counts = {name: stats[name] for name in ("sessions", "turns", "states", "packs", "machines", "waiting")}
    assert counts == {"sessions": 2, "turns": 3, "states": 2, "packs": 2, "machines": 1, "waiting": 1}
    assert stats["oldest_waiting"]
    assert stats["pack_bytes"] > stats["turn_bytes"] > 0
    assert "waiting here  1, the oldest turn" in command(store, "stats", "--remote", place.setting).stdout
    place.lose_pack(pack_of(remote))
    bad = command(store, "check", "--remote", place.setting, "--json")
    assert bad.returncode == 1
    [fault] = json.loads(bad.stdout)["faults"]
    assert (fault["kind"], fault["session"], fault["loses_text"]) == ("pack_missing", "ses_1", False)
    target = FolderPlace(tmp_path / "copy")
    copied = command(store, "copy", place.setting, target.setting)
    assert copied.returncode == 1
    assert "is not there" in copied.stderr
    assert "3 turns, 1 state" in copied.stdout


def test_init_makes_an_empty_place_a_remote(place: Place, tmp_path: Path) -> None:
    env = {**os.environ, "SSMD_DATA_DIR": str(tmp_path / "data")}
    for _ in range(2):
        done = commands.ssmd("store", "init", "--remote", place.setting, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        assert "is a remote" in done.stdout
    place.open(create=False).close()


def test_init_says_that_the_place_for_bytes_is_lost(database: DatabasePlace, tmp_path: Path) -> None:
    """An empty one is not taken in its place by itself, as it may be not mounted, but by docs/remote.md."""
    remote, store = database.open(create=True), new_store(tmp_path / "data")
    assert remote.packs is not None
    remote.packs.put([b"a state"])
    shutil.rmtree(database.packs)
    database.packs.mkdir(mode=0o700)
    told = command(store, "init", "--remote", database.setting)
    assert (told.returncode, "holds no remote any more; is it mounted?" in told.stderr) == (1, True)
    [forget] = re.findall(r"`(UPDATE ssmd.role .*?)`", DOCS.read_text("utf-8"))
    database.sql(forget.replace("ann", "ssmd"))
    assert command(store, "init", "--remote", database.setting).returncode == 0
    assert (database.packs / "ssmd-packs.json").exists()
    remote.close()


@pytest.mark.parametrize("words", [("check",), ("stats",)], ids=["check", "stats"])
def test_a_place_that_is_no_remote_is_left_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.mkdir(mode=0o700)
    file.write_text("x")
    env = {**os.environ, "SSMD_DATA_DIR": str(tmp_path / "data")}
    for at, said in ((empty, "holds no remote"), (file, "is a file"), (tmp_path / "none", "is not there")):
        done = commands.ssmd("store", *words, "--remote", str(at), env=env)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert list(empty.iterdir()) == []
