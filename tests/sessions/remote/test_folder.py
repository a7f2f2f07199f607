"""A remote in a folder keeps a turn once, removes for good, and takes nothing on the word of what lies in it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ssmd.sessions.domain import EVERYBODY, Domain
from ssmd.sessions.remote.folder import MARK, FolderRemote
from ssmd.sessions.remote.remote import InvalidTurn, RemoteError, RemoteTurn, TurnPlace

posix = pytest.mark.skipif(os.name != "posix", reason="modes and links are POSIX's")


def turn(name: str, session: str = "ses_1", *, chain: bytes | None = None, owner: str = "") -> RemoteTurn:
    chain = hashlib.sha256(name.encode()).digest() if chain is None else chain
    return RemoteTurn(TurnPlace(session, name), owner, chain, f"the body of {name}".encode())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "remote"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def remote(root: Path) -> FolderRemote:
    return FolderRemote.open(root, create=True)


def names(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def test_a_turn_is_found_by_the_last_chain(remote: FolderRemote) -> None:
    first, second = turn("t1"), turn("t2")
    remote.publish([first, second])
    assert remote.known([first.chain, second.chain], EVERYBODY) == [second.place]
    assert remote.known([first.chain, bytes(32)], EVERYBODY) == [first.place]
    assert remote.known([bytes(32)], EVERYBODY) == []
    assert remote.fetch(second.place) == second.body
    assert remote.fetch(TurnPlace("ses_1", "t3")) is remote.fetch(TurnPlace("ses_2", "t1")) is None
    assert sorted(remote.turns("ses_1")) == ["t1", "t2"]


def test_a_domain_sees_the_turns_of_its_owners(remote: FolderRemote) -> None:
    mine, other = turn("t1", owner="ann", chain=bytes(32)), turn("t2", owner="bob", chain=bytes(32))
    remote.publish([mine, other])
    assert remote.known([bytes(32)], Domain("ann", ("ann",))) == [mine.place]
    assert remote.known([bytes(32)], EVERYBODY) == [mine.place, other.place]


def test_a_turn_that_is_published_twice_is_kept_once(remote: FolderRemote, root: Path) -> None:
    """Two daemons send the same turn at once, many times."""
    turns = [turn(f"t{i}") for i in range(20)]
    failed: list[BaseException] = []

    def send() -> None:
        try:
            FolderRemote.open(root, create=False).publish(turns)
        except BaseException as err:
            failed.append(err)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed
    assert len(names(root)) == 1 + 2 * len(turns)  # no part of a file is left
    assert [remote.fetch(one.place) for one in turns] == [one.body for one in turns]


def test_what_was_published_first_stays(remote: FolderRemote) -> None:
    first = turn("t1")
    remote.publish([first])
    remote.publish([RemoteTurn(first.place, "", first.chain, b"other words")])
    assert remote.fetch(first.place) == first.body


def test_a_buried_session_never_returns(remote: FolderRemote, root: Path) -> None:
    remote.publish([turn("t1"), turn("t2"), turn("o1", "ses_2")])
    remote.bury("ses_1", None)
    remote.publish([turn("t1"), turn("t3")])  # of a machine that has not heard of it
    assert remote.fetch(TurnPlace("ses_1", "t1")) is None
    assert remote.known([turn("t1").chain], EVERYBODY) == []
    assert remote.turns("ses_1") == []
    assert remote.buried() == {"ses_1"}
    assert remote.turns("ses_2") == ["o1"]
    assert not any("ses_1" in name for name in names(root) - {"buried/ses_1"})


def test_a_buried_turn_leaves_the_others(remote: FolderRemote) -> None:
    remote.publish([turn("t1"), turn("t2")])
    remote.bury("ses_1", "t2")
    remote.publish([turn("t2")])
    assert remote.turns("ses_1") == ["t1"]
    assert remote.known([turn("t1").chain, turn("t2").chain], EVERYBODY) == [TurnPlace("ses_1", "t1")]


def test_a_session_buried_while_it_is_sent_is_gone(remote: FolderRemote, root: Path) -> None:
    """The tombstone may come between the look for it and the turn."""
    for round_ in range(25):
        session, both = f"ses_{round_}", threading.Barrier(2)

        def bury(session: str = session, both: threading.Barrier = both) -> None:
            both.wait()
            FolderRemote.open(root, create=False).bury(session, None)

        thread = threading.Thread(target=bury)
        thread.start()
        both.wait()
        remote.publish([turn(f"t{i}", session) for i in range(4)])
        thread.join()
        assert {name for name in names(root) if f"{session}/" in name or f"{session}~" in name} == set()


@pytest.mark.parametrize("at", [0, 20, -1], ids=["head", "digest", "body"])
def test_an_altered_turn_is_refused_and_written_again(at: int, remote: FolderRemote, root: Path) -> None:
    remote.publish([turn("t1")])
    [file] = root.glob("sessions/*/ses_1/t1")
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    with pytest.raises(InvalidTurn, match=r"of another version|is not what its digest says|is damaged"):
        remote.fetch(TurnPlace("ses_1", "t1"))
    remote.publish([turn("t1")])
    assert remote.fetch(TurnPlace("ses_1", "t1")) == turn("t1").body


def test_a_turn_of_a_newer_version_is_left_alone(remote: FolderRemote, root: Path) -> None:
    remote.publish([turn("t1")])
    [file] = root.glob("sessions/*/ses_1/t1")
    head, _, body = file.read_bytes().partition(b"\n")
    file.write_bytes(json.dumps(json.loads(head) | {"format": 2}).encode() + b"\n" + body)
    before = file.read_bytes()
    with pytest.raises(InvalidTurn, match="of another version"):
        remote.fetch(TurnPlace("ses_1", "t1"))
    remote.publish([turn("t1")])
    assert file.read_bytes() == before
    remote.bury("ses_1", None)
    assert names(root) == {MARK, "buried/ses_1"}


def test_names_that_are_no_ids_are_passed_over(remote: FolderRemote, root: Path) -> None:
    remote.publish([turn("t1")])
    [chain] = root.glob("chains/*/*")
    for name in ("..~t1~x", "ses_1~..~x", "ses_1", "~~~~", "ses_1~t 1~x", f"{'s' * 80}~t1~x"):
        (chain / name).touch()
    (root / "buried").mkdir(exist_ok=True)
    (root / "buried" / "no id").touch()
    assert remote.known([turn("t1").chain], EVERYBODY) == [TurnPlace("ses_1", "t1")]
    assert remote.buried() == set()


@posix
@pytest.mark.parametrize("place", ["sessions", "chains", "session", "turn"])
def test_a_link_leads_nowhere(place: str, remote: FolderRemote, root: Path, tmp_path: Path) -> None:
    """Through a planted link a removal would remove a user's files, and a read show them."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "t1").write_text("a letter")
    remote.publish([turn("t1")])
    [session], [file] = root.glob("sessions/*/ses_1"), root.glob("sessions/*/ses_1/t1")
    planted = {"sessions": root / "sessions", "chains": root / "chains", "session": session, "turn": file}[place]
    planted.rename(tmp_path / "moved")
    planted.symlink_to(outside / "t1" if place == "turn" else outside)
    steps: list[Callable[[], object]] = [
        lambda: remote.fetch(TurnPlace("ses_1", "t1")),
        lambda: remote.known([turn("t1").chain], EVERYBODY),
        lambda: remote.turns("ses_1"),
        lambda: remote.bury("ses_1", None),
    ]
    refused = []
    for step in steps:
        try:
            assert step() != b"a letter"
        except RemoteError as err:
            refused.append(str(err))
    assert refused
    assert all("link" in said or "cannot be used" in said for said in refused)
    assert (outside / "t1").read_text() == "a letter"
    assert sorted(p.name for p in outside.iterdir()) == ["t1"]


def test_what_is_no_remote_is_refused(tmp_path: Path, root: Path) -> None:
    (tmp_path / "file").touch()
    (root / "letter.txt").write_text("mine")
    for place, said in (
        (tmp_path / "file", "is a file: name a folder"),
        (tmp_path / "missing", "it is not there; is it mounted"),
        (root, "is not a remote, and not empty"),
    ):
        with pytest.raises(RemoteError, match=said):
            FolderRemote.open(place, create=True)
    assert names(root) == {"letter.txt"}
    (root / MARK).write_text('{"format": 2}')
    with pytest.raises(RemoteError, match="is of format 2, and this version of ssmd knows 1"):
        FolderRemote.open(root, create=True)


def test_an_empty_mount_point_is_no_new_remote(root: Path) -> None:
    with pytest.raises(RemoteError, match="holds no remote any more; is it mounted"):
        FolderRemote.open(root, create=False)
    assert not names(root)


def test_a_remote_that_goes_away_is_not_made_anew(remote: FolderRemote, root: Path) -> None:
    remote.publish([turn("t1")])
    root.rename(root.with_name("away"))
    root.mkdir(mode=0o700)  # what is left of a mount point
    for step in (lambda: remote.publish([turn("t2", "ses_9")]), remote.buried):
        with pytest.raises(RemoteError, match="is it mounted"):
            step()
    assert not names(root)


@posix
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_that_others_can_write_is_refused(mode: int, root: Path) -> None:
    root.chmod(mode)
    with pytest.raises(RemoteError, match=f"chmod 700 {root}"):
        FolderRemote.open(root, create=True)
    assert not names(root)


@posix
def test_what_is_made_is_closed_to_others(root: Path) -> None:
    root.chmod(0o755)
    FolderRemote.open(root, create=True).publish([turn("t1")])
    assert root.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o077 for p in root.rglob("*")} == {0}


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "its disk is full"), (errno.EROFS, "it is read-only")],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_nothing_is_named(
    number: int, said: str, remote: FolderRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuses)
        with pytest.raises(RemoteError, match=said):
            remote.publish([turn("t1")])
    assert names(remote.root) == {MARK}
    remote.publish([turn("t1")])
    assert remote.fetch(TurnPlace("ses_1", "t1")) == turn("t1").body
