"""Artifacts whose files were hashed and not changed since: a private list in the data directory.

Hashing 150 MB takes as long as a third of a load. A file that was written, moved or copied has another change time,
which only the system sets. `ssmd verify` finds damage by the disk itself.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from ssmd.machine import privatelist
from ssmd.machine.progress import announce
from ssmd.model.artifact import MANIFEST, Artifact, read_manifest

FILE = "checked.txt"


class CheckedArtifacts:
    """An opener of artifacts that hashes a file again only if it was changed since."""

    def __init__(self, data_dir: Path | None = None) -> None:
        """data_dir: the folder of the list; None keeps it only in memory."""
        self._file = None if data_dir is None else data_dir / FILE
        self._seen: set[str] = set()

    def open(self, path: Path) -> Artifact:
        """Open an artifact whose files match its manifest. Raises ArtifactError."""
        manifest = read_manifest(path)
        digest = _digest(path, [path / name for name in sorted(manifest.files)])
        if digest is None:
            return Artifact.open(path)  # which says what is missing
        if digest in self._seen or (self._file is not None and privatelist.has(self._file, digest)):
            self._seen.add(digest)
            return Artifact(path, manifest)
        announce("checking the hashes of its files")
        found = Artifact.open(path)
        self._seen.add(digest)
        if self._file is not None:
            with contextlib.suppress(OSError):  # it is hashed again at the next start
                privatelist.add(self._file, digest)
        return found


def _digest(path: Path, files: list[Path]) -> str | None:
    """Return a hash of the manifest and of all metadata that changes with a file; None if a file is missing."""
    found = [str(path.absolute())]
    try:
        manifest = (path / MANIFEST).read_bytes()
        for file in files:
            at = file.lstat()
            found.append(repr((at.st_mode, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)))
    except OSError:
        return None
    return hashlib.sha256(manifest + "\n".join(found).encode()).hexdigest()
