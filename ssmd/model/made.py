"""Artifacts that were made on this computer: a private list of their manifests' hashes, in the data directory.

A manifest has the hash of every file, so an artifact on the list is one that was made here, wherever it is now.
A list that cannot be read, or that others could write, counts as empty. An artifact that is not on it works too, but a
process of its own loads it first, as it may be untrusted.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ssmd.machine import privatelist
from ssmd.model.artifact import MANIFEST

FILE = "made-here.txt"


def note(artifact: Path, data_dir: Path) -> None:
    """Put an artifact's folder on the list. Raises OSError."""
    privatelist.add(data_dir / FILE, _digest(artifact))


def is_made_here(artifact: Path, data_dir: Path) -> bool:
    """Return True if an artifact's folder, whose files were checked, is on the list."""
    try:
        return privatelist.has(data_dir / FILE, _digest(artifact))
    except OSError:
        return False


def _digest(artifact: Path) -> str:
    return hashlib.sha256((artifact / MANIFEST).read_bytes()).hexdigest()
