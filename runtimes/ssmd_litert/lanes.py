"""Graphs of decode steps of several streams: their opening, and the notes of earlier trials."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from math import inf
from pathlib import Path

from ssmd.machine.cache import cache_folder
from ssmd.machine.privatefile import read_own
from ssmd.runtime.hoststate.costs import Cost
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.hoststate.signatures import LANES, lanes_name
from ssmd_litert.library import LibraryGraph
from ssmd_litert.weight_cache import WeightCache, check_room

log = logging.getLogger(__name__)
_MOST_BYTES = 4096
_LEAST = 1e-3  # ms


def of_one_stream(signature: str) -> bool:
    return signature not in map(lanes_name, LANES)


def sizes(graph: LibraryGraph) -> list[int]:
    """Return the numbers of lanes that a graph's file has signatures for."""
    return [lanes for lanes in LANES if lanes_name(lanes) in graph.names]


class LanesFile:
    """The signatures of several lanes in the file that a graph of one stream was opened from."""

    def __init__(self, path: Path, one: LibraryGraph, threads: int, cache: WeightCache) -> None:
        self._path, self._identity, self._threads, self._cache = path, one.file_identity, threads, cache

    def open(self, lanes: int) -> LibraryGraph:
        """Open the graph of a number of lanes. Raises GraphError, also if the file has changed.

        Another build may have replaced it, and without a trial this check alone shows it.
        """
        check_room(self._path)
        graph = LibraryGraph(
            self._path,
            threads=self._threads,
            weight_cache=self._cache.kept(),
            wanted=lambda name: name == lanes_name(lanes),
        )
        if graph.file_identity != self._identity:
            graph.close()
            raise GraphError(f"{self._path} was replaced since it was loaded")
        graph.drop_file()
        return graph


class LanesNotes:
    """The results of trials for one build, version of LiteRT, processor and number of threads."""

    def __init__(self, name: str, threads: int) -> None:
        self._file = cache_folder() / "litert" / f"{name}-{threads}.lanes.json"

    def read(self, lanes: int) -> tuple[Cost, Cost] | None:
        match self._read().get(str(lanes)):
            case [float(alone), float(one), float(full)] if alone > _LEAST and 0 < one <= full < lanes * alone < inf:
                return Cost(alone, alone), Cost(one, full)
        return None

    def write(self, lanes: int, alone: Cost, together: Cost) -> None:
        text = json.dumps({**self._read(), str(lanes): [alone.one, together.one, together.full]})
        fresh = self._file.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh.unlink(missing_ok=True)
            fresh.touch(mode=0o600)
            fresh.write_text(text)
            os.replace(fresh, self._file)
        except OSError as err:
            log.warning("the trial of %d lanes could not be noted: %s", lanes, err)
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    def _read(self) -> dict[str, object]:
        """Return the notes, if only this user can have written them; else {}."""
        try:
            found = json.loads(read_own(self._file, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}
