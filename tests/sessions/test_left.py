"""Files that a killed process left: a later run removes them, and none that a running process still writes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import commands
import pytest
from keeping import Chat, new_store

from ssmd.cli import making
from ssmd.hub import pull
from ssmd.machine.lockfile import lock
from ssmd.refit.install import ABANDONED_S
from ssmd.sessions.files.backup import UNFINISHED, back_up
from ssmd.sessions.fsck.repair import repair
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(new_store(tmp_path / "data")) as store:
        Chat(store, "s").say("t", None, "hi", "hello")
        yield store


def test_an_export_removes_what_a_killed_one_left(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("left", "written"):
        (out / f".{name}.ssmd.0123456789ab.ssmd-part").write_bytes(b"text of a conversation")
    descriptor = os.open(out / ".written.ssmd.0123456789ab.ssmd-part", os.O_RDWR)
    try:
        assert lock(descriptor)
        words = ("session", "export", "s", str(out / "s.ssmd"), "--data-dir", str(store.file.parent))
        done = commands.ssmd(*words, env=os.environ)
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(p.name for p in out.iterdir()) == [".written.ssmd.0123456789ab.ssmd-part", "s.ssmd"]
    finally:
        os.close(descriptor)


def test_a_backup_begins_again_in_its_folder(store: Store, tmp_path: Path) -> None:
    left = tmp_path / "backup" / UNFINISHED
    left.mkdir(mode=0o700, parents=True)
    (left / FILE).write_bytes(b"the half of a database")
    descriptor = os.open(left / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        assert lock(descriptor)
        with pytest.raises(StoreError, match="another `ssmd backup` writes to"):
            back_up(store.file.parent, tmp_path / "backup")
    finally:
        os.close(descriptor)
    assert back_up(store.file.parent, tmp_path / "backup").sessions == 1
    assert [p.name for p in (tmp_path / "backup").iterdir()] == [FILE]


def test_a_reserve_and_a_salvage_are_removed(store: Store) -> None:
    data = store.file.parent
    (data / ".reserve-1").write_bytes(b"random")
    (data / "salvage").mkdir()
    (data / "salvage" / FILE).write_bytes(b"text of conversations")
    assert store.room.reserve()
    store.close()
    assert not repair(data).damages
    assert {p.name for p in data.iterdir()} == {FILE, "reserve"}


def test_a_list_of_revisions_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".{pull.REVISIONS}-1").write_text("{}")
    pull._remember(tmp_path, "main", "0" * 40)
    assert [p.name for p in tmp_path.iterdir()] == [pull.REVISIONS]


def test_unpacked_weights_of_yesterday_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("ssmd-smollm2-old", "ssmd-smollm2-new", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
        age_s = 0 if name == "ssmd-smollm2-new" else 2 * ABANDONED_S
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    making.remove_abandoned()
    assert {p.name for p in tmp_path.iterdir()} == {"ssmd-smollm2-new", "other"}


@pytest.mark.parametrize("log", [b"", b"frames of the log"])
def test_a_store_that_was_emptied_is_called_that(log: bytes, tmp_path: Path) -> None:
    """SQLite would remove the log beside it, and make a new store."""
    new_store(tmp_path / "data").close()
    file = tmp_path / "data" / FILE
    os.truncate(file, 0)
    side = file.with_name(f"{FILE}-wal")
    side.write_bytes(log)
    with pytest.raises(StoreError, match=r"has 0 bytes.* another program emptied it; put a backup in its place"):
        Store.open(tmp_path / "data")
    assert (file.stat().st_size, side.read_bytes()) == (0, log)
