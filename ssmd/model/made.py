"""Artifacts that were made on this computer: a private list of their manifests' hashes, in the data directory.

A manifest has the hash of every file, so an artifact on the list is the one that was made here, wherever it lies now.
What cannot be read of the list, or could be written by others, does not count: an artifact that is not known to be made
here works as well, but a process of its own reads first what may be a stranger's.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from ssmd.machine.privatefile import NOFOLLOW, read_own
from ssmd.model.artifact import MANIFEST

FILE = "made-here.txt"
MOST_BYTES = 1 << 20  # 15,000 artifacts
_LINE = re.compile(rb"[0-9a-f]{64}")


def note(artifact: Path, data_dir: Path) -> None:
    """Put an artifact's folder on the list. Raises OSError."""
    line, file = _line(artifact), data_dir / FILE
    kept = _lines(data_dir)
    if line in kept:
        return
    if not kept or file.stat().st_size + len(line) + 2 > MOST_BYTES:
        file.unlink(missing_ok=True)  # it does not count, or is of thousands of builds
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NOFOLLOW, 0o600)
    try:
        os.write(descriptor, b"\n" + line + b"\n")  # whole, beside others who write, and after a torn line
    finally:
        os.close(descriptor)


def is_made_here(artifact: Path, data_dir: Path) -> bool:
    """Whether an artifact's folder, whose files were checked, is on the list."""
    try:
        return _line(artifact) in _lines(data_dir)
    except OSError:
        return False


def _line(artifact: Path) -> bytes:
    return hashlib.sha256((artifact / MANIFEST).read_bytes()).hexdigest().encode()


def _lines(data_dir: Path) -> set[bytes]:
    """What is on the list; nothing if somebody else could have written it."""
    try:
        found = read_own(data_dir / FILE, MOST_BYTES)
    except OSError:
        return set()
    return {line for line in found.split(b"\n") if _LINE.fullmatch(line)}
