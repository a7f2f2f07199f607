"""The file in which XNNPACK keeps a model's packed weights, so that the next load maps it instead of packing again.

It saves time and memory, and nothing depends on it: a file that is damaged, half written or of another processor is
dropped, and a folder that cannot be written to means a load without a cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path

import platformdirs

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """SSMD_CACHE_DIR, else the user's own cache folder."""
    return Path(os.environ.get("SSMD_CACHE_DIR") or platformdirs.user_cache_dir("ssmd"))


class WeightCache:
    """One model's file. Written under another name and put in place by `keep`, when the load has succeeded."""

    def __init__(self, build: str, version: str, cpu: str) -> None:
        machine = hashlib.sha256(cpu.encode()).hexdigest()[:12]
        name = f"{build[:24]}-{re.sub(r'[^0-9A-Za-z.]', '_', version)}-{machine}"
        self._folder = cache_folder() / "litert"
        self._file = self._folder / f"{name}.xnnpack"
        self._seal = self._folder / f"{name}.json"
        self._fresh: Path | None = None

    def path(self) -> Path | None:
        """The file to hand to XNNPACK: a good one to read, or a new name to write to. None: go without."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._good():
                return self._file
            self._file.unlink(missing_ok=True)
            self._fresh = self._folder / f"{self._file.stem}.{os.getpid()}.tmp"
            self._fresh.unlink(missing_ok=True)
            self._fresh.touch(mode=0o600)  # fails here, not inside XNNPACK, if it cannot be written
            self._fresh.unlink()
        except OSError as err:
            self._fresh = None
            log.warning("no weight cache in %s (%s): loading takes longer and more memory", self._folder, err)
            return None
        return self._fresh

    def keep(self) -> None:
        """The model loaded and passed its test: what was written is good."""
        if self._fresh is None:
            return
        try:
            if self._fresh.is_file():
                seal = {"size": self._fresh.stat().st_size, "sha256": _sha256(self._fresh)}
                os.replace(self._fresh, self._file)
                self._seal.write_text(json.dumps(seal))
        except OSError as err:
            log.warning("the weight cache %s could not be kept (%s)", self._file, err)
            self._fresh.unlink(missing_ok=True)
        self._fresh = None

    def drop(self) -> None:
        """The model did not load: the file may be why."""
        for path in (self._file, self._seal, *([self._fresh] if self._fresh else [])):
            try:
                path.unlink(missing_ok=True)
            except OSError as err:
                log.warning("the weight cache %s could not be removed (%s)", path, err)
        self._fresh = None

    def _good(self) -> bool:
        try:
            seal = json.loads(self._seal.read_text())
            if not isinstance(seal, dict) or self._file.stat().st_size != seal.get("size"):
                return False
            return _sha256(self._file) == seal.get("sha256")
        except (OSError, ValueError):
            return False


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
