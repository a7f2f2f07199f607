"""A remote in a folder takes nothing on the word of what lies in it, and knows a folder that is none."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remotes import turn

from ssmd.sessions.remote.folder import MARK, FolderRemote
from ssmd.sessions.remote.remote import RemoteError, TurnPlace
from ssmd.sessions.turn import EVERYBODY

posix = pytest.mark.skipif(os.name != "posix", reason="modes and links are POSIX's")


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


def test_names_that_are_no_ids_are_passed_over(remote: FolderRemote, root: Path) -> None:
    remote.publish([turn("t1")])
    [chain] = root.glob("chains/*/*")
    for name in ("..~t1~x", "ses_1~..~x", "ses_1", "~~~~", "ses_1~t 1~x", f"{'s' * 80}~t1~x"):
        (chain / name).touch()
    (root / "buried").mkdir(exist_ok=True)
    (root / "buried" / "no id").touch()
    assert remote.known([turn("t1").chain], EVERYBODY) == [TurnPlace("ses_1", "t1")]
    assert remote.buried() == set()


def test_a_folder_that_another_machine_removes_meanwhile(
    remote: FolderRemote, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines bury one session: the second finds its folder, and then it is gone."""
    remote.publish([turn("t1")])
    [folder] = root.glob("sessions/*/ses_1")
    scan = os.scandir

    def late(path: Path) -> object:
        if path == folder and folder.exists():
            shutil.rmtree(folder)
        return scan(path)

    monkeypatch.setattr(os, "scandir", late)
    remote.bury("ses_1", None)
    assert remote.buried() == {"ses_1"}
    assert not folder.exists()


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


def test_another_machine_makes_the_remote_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has sent a turn too, between two looks of this one at the folder."""
    listed = Path.iterdir

    def later(folder: Path) -> Iterator[Path]:
        monkeypatch.undo()
        FolderRemote.open(root, create=True).publish([turn("t1")])
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", later)
    assert sorted(FolderRemote.open(root, create=True).turns("ses_1")) == ["t1"]


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


def test_a_sweep_spares_what_is_put_again(remote: FolderRemote) -> None:
    """Another machine sends the same pack between the list and the removal, and its row comes next."""
    name, other = remote.packs.put([b"a state"]), remote.packs.put([b"another"])
    for one in (name, other):
        os.utime(remote.root / "packs" / one[:2] / one, (1.0, 1.0))

    def rows() -> list[str | None]:
        remote.packs.put([b"a state"])
        return []

    assert remote.packs.sweep(rows) == (1, 7)
    assert (remote.packs.there(name), remote.packs.there(other)) == (True, False)
