"""Artifacts whose files were hashed and that nobody has written to since: a private list, in the data directory.

To hash 150 MB takes as long as a third of a load. A file that was written to, moved or copied is another one to the
system, which alone sets the time of its last change; what a disk lost by itself `ssmd verify` finds.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from ssmd.machine import privatelist
from ssmd.model.artifact import MANIFEST, Artifact, read_manifest

FILE = "checked.txt"


class Checked:
    """Opens artifacts, and does not hash again what it hashed and nobody has written to since."""

    def __init__(self, data_dir: Path | None = None) -> None:
        """data_dir: where it is remembered; None: nowhere."""
        self._file = None if data_dir is None else data_dir / FILE
        self._seen: set[str] = set()

    def open(self, path: Path) -> Artifact:
        """Open an artifact, whose files are what its manifest says. Raises ArtifactError."""
        manifest = read_manifest(path)
        digest = _digest(path, [path / name for name in sorted(manifest.files)])
        if digest is None:
            return Artifact.open(path)  # which says what is missing
        if digest in self._seen or (self._file is not None and privatelist.has(self._file, digest)):
            self._seen.add(digest)
            return Artifact(path, manifest)
        found = Artifact.open(path)
        self._seen.add(digest)
        if self._file is not None:
            with contextlib.suppress(OSError):  # it is hashed again at the next start
                privatelist.add(self._file, digest)
        return found


def _digest(path: Path, files: list[Path]) -> str | None:
    """Of a manifest and of what is another one when a file was written to; None if a file is missing."""
    found = [str(path.absolute())]
    try:
        manifest = (path / MANIFEST).read_bytes()
        for file in files:
            at = file.lstat()
            found.append(repr((at.st_mode, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)))
    except OSError:
        return None
    return hashlib.sha256(manifest + "\n".join(found).encode()).hexdigest()
