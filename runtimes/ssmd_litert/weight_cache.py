"""The file in which XNNPACK keeps a model's packed weights, so that the next load maps it instead of packing again.

It saves time and memory, but results do not depend on it. A file that is damaged, half written or of another processor
is dropped. If its folder cannot be written or has no room, the load has no cache. XNNPACK itself ends the process if
the disk is full, or addresses are short.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ssmd.machine.cache import BUILD, CachedFile, cache_folder
from ssmd.machine.memory import address_space
from ssmd.machine.size import show_size
from ssmd.runtime.hoststate.graph import GraphError

_LEAST = 16 << 20  # bytes of room beside the packed weights
_WEIGHTS_AND_FILE = 2  # times the file's bytes that are mapped
_GRAPH_BYTES = 128 << 20  # for its objects and workspaces; a real one takes 40 to 100 MB


def check_room(model: Path) -> None:
    """Check that there are addresses for a graph of a model. Raises GraphError.

    Without them XNNPACK ends the process, or rewrites the file of packed weights under all processes that map it.
    """
    try:
        size = model.stat().st_size
    except OSError as err:
        raise GraphError(f"{model} cannot be read: {err}") from err
    free, wanted = address_space(), _WEIGHTS_AND_FILE * size + _GRAPH_BYTES
    if free is not None and free < wanted:
        raise GraphError(
            f"a graph takes about {show_size(wanted)} of addresses, and {show_size(free)} are left (ulimit -v)"
        )


class WeightCache:
    """One model's file. Written under another name and put in place by `keep`, when the load has succeeded."""

    def __init__(self, build: str, version: str, cpu: str) -> None:
        machine = hashlib.sha256(cpu.encode()).hexdigest()[:12]
        self.name = f"{build[:BUILD]}-{re.sub(r'[^0-9A-Za-z.]', '_', version)}-{machine}"
        self._file = CachedFile(
            cache_folder() / "litert" / f"{self.name}.xnnpack", "loading takes longer and more memory"
        )
        self._fresh: Path | None = None

    def path(self, model_bytes: int) -> Path | None:
        """Return XNNPACK's cache file: a good one to read, or a new path to write to; None for no cache.

        model_bytes: size of the model's file. Its packed weights take about as many bytes.
        """
        if self._file.good():
            return self._file.path
        self._file.drop()
        self._fresh = self._file.fresh(model_bytes + model_bytes // 4 + _LEAST)
        return self._fresh

    def keep(self) -> None:
        """Keep the written file: the model loaded and passed its test."""
        if self._fresh is not None:
            self._file.keep(self._fresh)
            self._fresh = None

    def kept(self) -> Path | None:
        """Return the kept file, for another graph of the same model; None before a file was kept."""
        return self._file.path if self._file.path.is_file() and self._fresh is None else None

    def drop(self) -> None:
        """Drop the file after a model did not load: it may be why."""
        self._file.drop()
        self.drop_fresh()

    def drop_fresh(self) -> None:
        """Remove a file that is only partly written."""
        if self._fresh is not None:
            self._fresh.unlink(missing_ok=True)
            self._fresh = None
