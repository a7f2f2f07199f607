"""A model that a host has loaded, loads or has let go, and how much memory it is reckoned with."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from ssmd.engine.engine import Engine
from ssmd.engine.shelf import Model
from ssmd.engine.terms import Rejected

TIMES_FILES = 2.0  # its files' bytes a model takes, lanes and workspaces with it: 1.8 to 2.0 were measured
LEAST_BYTES = 32 << 20
Status = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class Lease:
    """A loaded model, which stays so until it is released."""

    def __init__(self, engine: Engine, model: Model, give_back: Callable[[], None]) -> None:
        self.engine, self.model = engine, model
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give it back. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass(frozen=True)
class Asker:
    """The request that waits for a model. session: the one that it names. owner: the name of its key."""

    id: str
    session: str | None = None
    owner: str = ""


class Waiting(Future[Lease]):
    """A lease that is waited for. asker: by whom, if it is for a request."""

    def __init__(self, asker: Asker | None = None) -> None:
        super().__init__()
        self.asker = asker

    def row(self, asker: Asker) -> dict[str, Any]:
        """How far its request is, ready for JSON: as of one that an engine has."""
        nothing = {"fed": 0, "to_feed": None, "tokens": 0, "ttft_ms": None, "tokens_per_s": None}
        return {"id": asker.id, "session": asker.session, "phase": "loading", **nothing, "owner": asker.owner}


@dataclass(eq=False)
class Hosted:
    """A model in a host, which locks. Times: seconds since 1970, but for `wanted_at`, monotonic.

    leases: requests that have it. waiting: those that wait for it. leaving: who comes now waits until it was let go.
    tried: whether it may be loaded in this process; None while that is found out. keep_alive_s: after the last request,
    infinite for ever. resident: bytes by which the process grew, its runtime's library with it if that was not there
    yet. weight: bytes that are the model's alone, as far as was seen; it is no more than what the process has back when
    it goes. problem: why it could not be loaded.
    """

    model: Model
    keep_alive_s: float
    pinned: bool = False
    status: Status = "unloaded"
    engine: Engine | None = None
    leases: int = 0
    waiting: deque[Waiting] = field(default_factory=deque)
    wanted_at: float = 0.0
    tried: bool | None = False
    leaving: bool = False
    problem: str = ""
    failed_at: float = 0.0
    loaded_at: float | None = None
    load_ms: float | None = None
    last_used: float | None = None
    idle_until: float | None = None
    resident: int | None = None
    weight: int = 0

    @property
    def is_loaded(self) -> bool:
        return self.engine is not None

    @property
    def unloads(self) -> bool:
        """Whether it is to go because somebody said so, and answers others still."""
        return self.engine is not None and self.status == "unloading"

    @property
    def least(self) -> int:
        """Bytes of memory that it takes by its files."""
        return max(LEAST_BYTES, int(TIMES_FILES * self.model.found.nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it is reckoned with, by what was seen of it too."""
        return max(self.least, self.weight)

    @property
    def busy_bytes(self) -> int:
        """Bytes of memory that its answers take now beside that."""
        engine = self.engine
        return 0 if engine is None else engine.busy_bytes

    def expire(self) -> None:
        """Say until when it stays, if nobody has it."""
        free = self.is_loaded and not (self.leases or self.pinned or self.keep_alive_s == math.inf)
        self.idle_until = time.time() + self.keep_alive_s if free else None

    def fail(self, why: Rejected) -> None:
        """Tell all who wait for it why they do not get it."""
        while self.waiting:
            future = self.waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(why)

    def requests(self) -> list[dict[str, Any]]:
        """How far each request is that its engine has, or that waits for it to be loaded, ready for JSON."""
        engine = self.engine
        rows = [] if engine is None else engine.rows()
        rows += [one.row(one.asker) for one in tuple(self.waiting) if one.asker is not None and not one.done()]
        return [{"model": self.model.id, **row} for row in rows]

    def row(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What is known of it, ready for JSON. rows: its `requests`."""
        found, engine = self.model.found, self.engine
        m = found.manifest
        waiting = len(self.waiting) + sum(row["phase"] == "waiting" for row in rows)
        return {
            "id": self.model.id,
            "name": self.model.name,
            "runtime": "" if m is None else m.runtime,
            "device": "" if m is None else m.device_class if engine is None else engine.device,
            "build": "" if m is None else m.build,
            "lineage": "" if m is None else m.lineage,
            "quantization": "" if m is None else m.quantization,
            "context": None if m is None else m.context,
            "state": self.status,
            "problem": self.problem or found.problem or None,
            "pinned": self.pinned,
            "resident_bytes": self.resident if self.is_loaded else None,
            "file_bytes": found.nbytes,
            "loaded_at": self.loaded_at,
            "load_ms": self.load_ms,
            "last_used": self.last_used,
            "idle_until": self.idle_until,
            "queue": {"waiting": waiting, "running": sum(row["phase"] not in ("waiting", "loading") for row in rows)},
        }


def refused(asked: str, why: str, *, code: str, retry_after_s: int | None = None) -> Rejected:
    """What who waits for a model is told that is not loaded."""
    return Rejected(f"model {asked} {why}", status=503, code=code, param="model", retry_after_s=retry_after_s)
