"""Tests' artifacts come from elsewhere: noted as made here, they are opened and loaded as a user's own are."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ssmd.machine.folder import make_private
from ssmd.model.artifact import MANIFEST
from ssmd.model.made import note


def note_all(arguments: Iterable[str], data_dir: Path) -> None:
    """Note the artifacts that a command's arguments name, and those of the data directory."""
    named = [Path(argument) for argument in arguments if os.sep in argument]
    for folder in [*named, *(child for one in named for child in _folders(one)), *data_dir.glob("models/*/*")]:
        if (folder / MANIFEST).is_file():
            make_private(data_dir)
            note(folder, data_dir)


def _folders(path: Path) -> list[Path]:
    return [p for p in path.iterdir() if p.is_dir()] if path.is_dir() else []
