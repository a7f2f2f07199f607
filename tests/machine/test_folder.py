"""Folders that are this user's alone, by the system's own means: modes, or access control lists."""

from __future__ import annotations

import sys
from pathlib import Path

from ssmd.machine.folder import make_private, others_open, own


def test_what_is_made_is_closed_to_others(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert not others_open(tmp_path / "a")
    assert not others_open(tmp_path / "a" / "b")


def test_what_was_open_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    if sys.platform != "win32":  # there it is as its own folder is
        folder.chmod(0o755)
        assert others_open(folder)
    own(folder, "the folder", "choose another")
    assert not others_open(folder)
