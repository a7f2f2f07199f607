"""A daemon in this process: a real engine, store and socket, and how its answers are read."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import OwnEngine, hosting
from keeping import open_store
from serving import Answer, Served, serving

from ssmd.app import create_app
from ssmd.config import Settings
from ssmd.engine.host.host import Host
from ssmd.engine.persist.persistence import Persistence
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program, get_runtime
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Turn

CHAT = "/v1/chat/completions"
NO_END = {"0": -100, "2": -100}  # the tiny model's stop tokens never come


@dataclass(frozen=True)
class Daemon:
    served: Served
    engine: OwnEngine
    store: Store | None
    host: Host

    @property
    def url(self) -> str:
        return self.served.url

    @property
    def model(self) -> str:
        return self.engine.artifact.manifest.name

    def body(self, content: str = "Tell me a story", **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        return {**body, "max_tokens": 12, "logit_bias": NO_END, **fields}

    def chat(self, content: str = "Tell me a story", **fields: Any) -> Answer:
        return self.served.ask("POST", CHAT, self.body(content, **fields))

    def turns(self, session: str) -> list[Turn]:
        assert self.store is not None
        return self.store.turns(session)


@contextmanager
def daemon(
    path: Path,
    data_dir: Path | None,
    *,
    max_running: int = 4,
    max_queue: int = 64,
    stall_s: float = 30.0,
    busy_ms: int = 2000,
    settings: Settings | None = None,
    as_program: Callable[[Program], Any] = lambda program: program,
) -> Iterator[Daemon]:
    """Serve one artifact. `data_dir` None stores nothing. `as_program` wraps the real program."""
    artifact = Artifact.open(path)
    program = as_program(get_runtime(artifact.manifest.runtime).load(artifact, threads=1))
    store = None if data_dir is None else open_store(data_dir, busy_ms=busy_ms)
    engine = OwnEngine(artifact, program, store, max_running=max_running, max_queue=max_queue)
    engine.start()
    host = hosting(engine, max_waiting=max_queue, keep_alive_s=math.inf)
    try:
        with serving(create_app(host, settings or Settings(), stall_s=stall_s)) as served:
            yield Daemon(served, engine, store, host)
    finally:
        host.close()
        if store is not None:
            store.close()


def soon(condition: Callable[[], bool], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def idle(one: Daemon) -> bool:
    queue = one.engine.metrics.snapshot()["queue"]
    return bool(queue["running"] == queue["waiting"] == 0)


def quiet(one: Daemon) -> None:
    """Wait until the engine's background work is done and stored."""
    persistence = one.engine._persistence
    assert isinstance(persistence, Persistence)
    rerenderer = persistence._rerenderer

    def idles() -> bool:
        with rerenderer._lock:
            return not (one.engine._queue.unfinished or rerenderer._waiting or rerenderer._turn)

    soon(idles, within_s=60)
    persistence._writer.flush()


def events(raw: bytes) -> list[bytes]:
    assert raw.endswith(b"\n\n")
    found = raw[:-2].split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in found)
    return [event.removeprefix(b"data: ") for event in found]


def chunks(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    found = events(answer.body)
    assert found[-1] == b"[DONE]"
    return [json.loads(event) for event in found[:-1]]


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def whole_text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def request(body: dict[str, Any], path: str = CHAT) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    return head.encode() + b"\r\n\r\n" + raw
