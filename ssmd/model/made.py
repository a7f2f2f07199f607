"""Artifacts that were made on this computer: a private list of their manifests' hashes, in the data directory.

A manifest has the hash of every file, so an artifact on the list is the one that was made here, wherever it lies now.
What cannot be read of the list, or could be written by others, does not count: an artifact that is not known to be made
here works as well, but a process of its own reads first what may be a stranger's.
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
    """Whether an artifact's folder, whose files were checked, is on the list."""
    try:
        return privatelist.has(data_dir / FILE, _digest(artifact))
    except OSError:
        return False


def _digest(artifact: Path) -> str:
    return hashlib.sha256((artifact / MANIFEST).read_bytes()).hexdigest()
