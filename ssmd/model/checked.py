"""Checks of artifacts before they are used: bounds of the manifest's numbers, and hashes of files changed since.

The hashes of checked files are in a private list in the data directory.

Hashing 150 MB takes as long as a third of a load. A file that was written, moved or copied has another change time,
which only the system sets. `ssmd verify` finds damage by the disk itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from ssmd.machine import privatelist
from ssmd.machine.progress import announce
from ssmd.machine.spelling import printable
from ssmd.model.artifact import MANIFEST, MAX_MANIFEST_BYTES, Artifact, ArtifactError, Manifest, read_manifest

FILE = "checked.txt"
MAX_TENSORS = 4096  # tensors of a state: a layer has up to four
MAX_COUNT = (1 << 31) - 1  # tokens of a context or bucket, ids of a vocabulary, values of a tensor: graphs use int32
MAX_NUMBER = 1 << 53  # any other integer: as a float it is exact
_LONGEST = 200  # characters of a manifest's value or error that are shown


def read_bounded(path: Path) -> Manifest:
    """Read a manifest whose numbers, counts and texts are those of a model. Raises ArtifactError.

    `read_manifest` checks types and hashes. It takes hours for very many tensors, and fails on a number that is not
    finite. Numbers without bounds overflow later, in code that works on all models.
    """
    file = path / MANIFEST
    try:
        if file.is_file() and file.stat().st_size <= MAX_MANIFEST_BYTES:
            _check_bounds(json.loads(file.read_bytes()))
    except (ValueError, RecursionError) as err:
        if isinstance(err, ArtifactError):
            raise ArtifactError(f"{file}: {err}; build the artifact again") from err
    try:
        manifest = read_manifest(path)
    except ArtifactError as err:
        raise ArtifactError(printable(str(err), _LONGEST + len(str(path)))) from err
    for tensor in manifest.spec.tensors:
        if math.prod(tensor.shape) > MAX_COUNT or abs(tensor.layer) > MAX_COUNT:
            raise ArtifactError(
                f"{file}: state tensor {tensor.name[:_LONGEST]!r} has more than {MAX_COUNT} values or layers; "
                "build the artifact again"
            )
    return manifest


def _check_bounds(fields: Any) -> None:
    """Check all values of a manifest's JSON. Raises ArtifactError."""
    if not isinstance(fields, dict):
        return
    state = fields.get("state")
    if isinstance(state, list) and len(state) > MAX_TENSORS:
        raise ArtifactError(f"state has {len(state)} tensors, at most {MAX_TENSORS} are read")
    counts = [fields.get("context"), fields.get("vocabulary")]
    for name in ("buckets", "tiers"):
        counts += fields[name] if isinstance(fields.get(name), list) else []
    if any(isinstance(count, int) and count > MAX_COUNT for count in counts):
        raise ArtifactError(f"context, vocabulary, buckets or tiers are more than {MAX_COUNT}")
    waiting: list[tuple[str, Any]] = list(fields.items())  # (the field of the manifest, a value in it)
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(name, key) for key in value] + [(name, one) for one in value.values()]
        elif isinstance(value, list):
            waiting += [(name, one) for one in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise ArtifactError(f"{name[:_LONGEST]!r} has the number {value}, which is not finite")
        elif isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise ArtifactError(f"{name[:_LONGEST]!r} has an integer beyond {MAX_NUMBER}")
        elif isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ArtifactError(f"{name[:_LONGEST]!r} has half a character, which is no Unicode text")


class CheckedArtifacts:
    """An opener of artifacts that hashes a file again only if it was changed since."""

    def __init__(self, data_dir: Path | None = None) -> None:
        """data_dir: the folder of the list; None keeps it only in memory."""
        self._file = None if data_dir is None else data_dir / FILE
        self._seen: set[str] = set()

    def open(self, path: Path) -> Artifact:
        """Open an artifact whose files match its manifest. Raises ArtifactError."""
        manifest = read_bounded(path)
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
