"""Data for tests of the tray: a daemon's metrics, and a record of what a watch saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ssmd import __version__
from ssmd_tray.watching import Observation, Paces, Watch

QUICK = Paces(
    generating=0.05,
    idle=0.2,
    away=0.05,
    away_most=0.4,
    events=0.01,
    told=0.01,
    silent_generating=0.3,
    silent=0.6,
    answer=0.5,
    stream_again=0.5,
)
SERIES: dict[str, Any] = {
    "last": 12.0,
    "p50": 11.0,
    "p95": 20.0,
    "n": 3,
    "since_start": {"p50": 11.0, "p95": 20.0, "n": 3},
    "recent": [10.0, 11.0, 12.0],
}


def model(name: str, state: str = "loaded", **fields: Any) -> dict[str, Any]:
    what = {"id": f"{name}@litert", "name": name, "runtime": "litert", "device": "cpu", "quantization": "int8"}
    how = {"state": state, "problem": None, "pinned": False, "resident_bytes": 181_200_000, "idle_until": None}
    return {**what, **how, "queue": {"waiting": 0, "running": 0}, **fields}


def request(phase: str = "decode", **fields: Any) -> dict[str, Any]:
    row = {"id": "gen_1", "session": "ses_1", "model": "smollm2@litert", "phase": phase, "fed": 30, "to_feed": 90}
    return {**row, "tokens": 57, "ttft_ms": 139.2, "tokens_per_s": 41.26, **fields}


def metrics(state: str = "idle", **fields: Any) -> dict[str, Any]:
    """Return a daemon's metrics, as docs/metrics.md has them."""
    found: dict[str, Any] = {
        "version": __version__,
        "state": state,
        "reason": "",
        "models": [model("smollm2")],
        "running": [],
    }
    found |= {"ttft_ms": SERIES, "tbt_ms": SERIES, "tokens_per_s": SERIES, "cached_share": {"last": 0.9, "p50": 0.5}}
    found |= {"stored_bytes": 1_000_000_000, "quota_bytes": 8_000_000_000, "queue": {"waiting": 0, "running": 0}}
    return {**found, **fields}


class Seen:
    """The sights of a watch, in order."""

    def __init__(self, data_dir: Path, paces: Paces = QUICK) -> None:
        self.sights: list[Observation] = []
        self._lock = threading.Lock()
        self.watch = Watch(data_dir, self._saw, paces)

    def _saw(self, sight: Observation) -> None:
        with self._lock:
            self.sights.append(sight)

    def __enter__(self) -> Seen:
        self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.stop()

    def wait(self, condition: Callable[[Observation], bool], within_s: float = 20) -> Observation:
        """The next sight of that kind, of those that come from now on or was last."""
        begin = max(0, len(self.sights) - 1)
        deadline = time.monotonic() + within_s
        while True:
            for sight in self.sights[begin:]:
                if condition(sight):
                    return sight
            assert time.monotonic() < deadline, f"it was not seen: {[short(s) for s in self.sights[-5:]]}"
            time.sleep(0.01)


def short(sight: Observation) -> Mapping[str, Any]:
    state = None if sight.found is None else sight.found.get("state")
    return {"state": state, "problem": sight.problem, "how": sight.how}
