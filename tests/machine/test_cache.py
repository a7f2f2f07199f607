"""The cache folder: weights are mapped from it, so no other user may have written there."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from ssmd.machine.cache import cache_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes protect nothing there")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SSMD_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "cache" / "litert").mkdir(parents=True)
    return tmp_path / "cache"


@pytest.mark.parametrize("which", [".", "litert"])
def test_a_folder_that_all_can_write_is_not_used(which: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One with the user's data takes its place, and the log says so once."""
    assert cache_folder() == folder
    (folder / which).chmod(0o777)
    with caplog.at_level(logging.WARNING):
        private = cache_folder()
        assert cache_folder() == private
    assert private == folder.with_name("data") / "cache"
    assert private.stat().st_mode & 0o777 == 0o700
    [said] = [record.getMessage() for record in caplog.records]
    assert f"the cache folder {folder} is not used: every user of this computer can write to {folder / which}" in said
    (folder / which).chmod(0o775)
    assert cache_folder() == folder, "a group's users are trusted, as for models"


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("which", [".", "litert"])
def test_a_folder_of_another_user_is_not_used(which: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(folder / which, 12345, 12345)
    with caplog.at_level(logging.WARNING):
        assert cache_folder() == folder.with_name("data") / "cache"
    assert f"{folder / which} belongs to user 12345" in caplog.text


def test_without_a_trusted_folder_there_is_no_cache(folder: Path) -> None:
    folder.chmod(0o777)
    (folder.with_name("data") / "cache").mkdir(parents=True, mode=0o700)
    (folder.with_name("data") / "cache").chmod(0o777)
    with pytest.raises(OSError, match="Not a directory"):
        cache_folder().mkdir(parents=True)
