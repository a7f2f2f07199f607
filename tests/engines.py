"""An engine for tests, with a store's writer of its own, and a host that has it."""

from __future__ import annotations

from typing import Any

from ssmd.engine.engine import Engine
from ssmd.engine.host.host import Host
from ssmd.engine.host.models import ModelIndex
from ssmd.engine.metrics import Metrics
from ssmd.engine.persist.writer import Writer
from ssmd.engine.request import Retention
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.store import Store


class OwnEngine(Engine):
    """An engine with its own counters in `metrics`. Its writer ends with it.

    retention: "none", so that a request with store=False is a control that reads what was not stored before.
    """

    def __init__(
        self, artifact: Artifact, program: Program, store: Store | None, retention: Retention = "none", **limits: Any
    ) -> None:
        self.metrics = Metrics()
        self.writer = None if store is None else Writer(store, self.metrics, retention)
        numbers = self.metrics.of(artifact.manifest.name)
        super().__init__(artifact, program, self.writer, metrics=numbers, **limits)

    def shutdown(self, grace_s: float = 10.0) -> None:
        super().shutdown(grace_s)
        if self.writer is not None:
            self.writer.close()


def hosting(engine: OwnEngine, **options: Any) -> Host:
    """A host that has this engine for its artifact, loaded."""
    place = engine.artifact.manifest.name, engine.artifact.path
    shelf = ModelIndex(lambda: [place])
    host = Host(shelf, lambda model, numbers, room: engine, engine.metrics, engine.writer, **options)
    host.ready()
    host.load(shelf.models()[0]).result(60).release()
    return host
