"""The list of artifacts that were made here: what is on it, and what of it does not count."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ssmd.machine import privatelist
from ssmd.model import made
from ssmd.model.artifact import MANIFEST


def folder(path: Path, manifest: str) -> Path:
    path.mkdir()
    (path / MANIFEST).write_text(manifest)
    return path


def test_an_artifact_is_known_wherever_it_lies_if_unchanged(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one", "1"), folder(tmp_path / "other", "2")
    assert not made.is_made_here(one, tmp_path)
    for _ in range(2):
        made.note(one, tmp_path)
    assert (tmp_path / made.FILE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / made.FILE).read_text().count("\n") == 2, "once is enough"
    assert made.is_made_here(Path(shutil.copytree(one, tmp_path / "copy")), tmp_path)
    assert not made.is_made_here(other, tmp_path)
    (one / MANIFEST).write_text("1 ")
    assert not made.is_made_here(one, tmp_path)
    assert not made.is_made_here(tmp_path / "none", tmp_path)


@pytest.mark.parametrize("damage", ["cut", "torn", "junk", "writable", "link", "folder", "pipe"])
def test_what_is_damaged_or_could_be_anybodys_does_not_count(tmp_path: Path, damage: str) -> None:
    one, other = folder(tmp_path / "one", "1"), folder(tmp_path / "other", "2")
    made.note(one, tmp_path)
    file = tmp_path / made.FILE
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[:40])
    elif damage == "torn":
        file.write_bytes(whole[:40] + whole[1:20])
    elif damage == "junk":
        file.write_bytes(os.urandom(2 * privatelist.MOST_BYTES))
    elif damage == "writable":
        file.chmod(0o660)
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        file.unlink()
        file.mkdir()
    assert not made.is_made_here(one, tmp_path)
    if damage == "folder":
        return
    for artifact in (other, one):
        made.note(artifact, tmp_path)
        assert made.is_made_here(artifact, tmp_path)


def test_the_list_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privatelist, "MOST_BYTES", 66 * 10)
    for i in range(25):
        one = folder(tmp_path / str(i), str(i))
        made.note(one, tmp_path)
        assert made.is_made_here(one, tmp_path)
        assert (tmp_path / made.FILE).stat().st_size <= 660
