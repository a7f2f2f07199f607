"""Several tiny models in one directory, two of which are one for two runtimes, and a daemon that serves them all."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import TinyArtifacts
from daemon import CHAT, NO_END, soon
from keeping import lay_store
from noted import note_all
from serving import Answer, Served, serving

from ssmd.app import create_app
from ssmd.config import Settings
from ssmd.engine.engine import Engine
from ssmd.engine.host.host import Host
from ssmd.engine.host.models import Model
from ssmd.engine.host.opening import close_host, open_host

LLAMA, OTHER, GRANITE = "llama@litert", "llama@openvino", "granite@litert"
NAMES = {LLAMA: "llama-f32", OTHER: "openvino-llama-f32", GRANITE: "granite-int8"}
METRICS = "/ssmd/v1/metrics"
STREAM = "/ssmd/v1/metrics/stream"
NOBODY: Mapping[str, str] = {}
LONG: Mapping[str, Any] = {"n": 8, "logprobs": True, "top_logprobs": 20}  # what makes an answer take a second or two


def models_folder(artifacts: TinyArtifacts, folder: Path) -> Path:
    """A models directory of three artifacts that were made here, for the data beside it; their files are links."""
    for id_, artifact in NAMES.items():
        path = artifacts[artifact]
        shutil.copytree(path, folder / id_.partition("@")[0] / path.name, copy_function=os.link)
    note_all(map(str, folder.iterdir()), folder.parent / "data")
    return folder


@dataclass(frozen=True)
class Gate:
    """Holds a model's load back until it is opened."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Several:
    """A daemon in this process, with all that is installed in `models`."""

    served: Served
    host: Host
    models: Path

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = NOBODY) -> Answer:
        return self.served.ask(method, path, body, headers)

    def body(self, model: str, content: str = "Tell me a story", **fields: Any) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        return {**body, "max_tokens": 8, "logit_bias": NO_END, **fields}

    def chat(
        self, model: str, content: str = "Tell me a story", headers: Mapping[str, str] = NOBODY, **fields: Any
    ) -> Answer:
        return self.ask("POST", CHAT, self.body(model, content, **fields), headers)

    def metrics(self, headers: Mapping[str, str] = NOBODY) -> dict[str, Any]:
        answer = self.ask("GET", METRICS, headers=headers)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found

    def row(self, id_: str) -> dict[str, Any]:
        """Return the metrics of a model."""
        return next(row for row in self.metrics()["models"] if row["id"] == id_)

    def leases(self) -> int:
        """Count the requests that have a model."""
        return sum(hosted.leases for hosted in self.host._loader.hosted.values())

    @contextmanager
    def asking(
        self, model: str, content: str = "On and on", headers: Mapping[str, str] = NOBODY, **fields: Any
    ) -> Iterator[socket.socket]:
        """Send a request for a stream and yield its socket, with the answer unread. Leaving closes it."""
        body = json.dumps(self.body(model, content, **{"stream": True, "max_tokens": 400, **fields})).encode()
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{extra}content-type: application/json\r\n"
        with self.served.connect(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body) as one:
            yield one

    @contextmanager
    def held_back(self, name: str) -> Iterator[Gate]:
        """Loads of the model begin, and do not go on before the gate is opened, or this is left."""
        gate, opening = Gate(), self.host._loader._open

        def slowly(model: Model, *more: Any) -> Engine:
            if model.id == name:
                gate.reached.set()
                assert gate.opened.wait(60)
            return opening(model, *more)

        self.host._loader._open = slowly
        try:
            yield gate
        finally:
            gate.opened.set()
            self.host._loader._open = opening

    def quiet(self) -> None:
        """Wait until nothing is answered."""
        soon(lambda: self.leases() == 0 and self.host.live().queue == {"waiting": 0, "running": 0})


@contextmanager
def several(
    models: Path, *, stall_s: float = 30.0, at: socket.socket | None = None, **settings: Any
) -> Iterator[Several]:
    """A daemon over a models directory; its data lies beside that. at: a socket that listens."""
    chosen = Settings(**{"models_dir": models, "data_dir": models.parent / "data", "threads": 1, **settings})
    lay_store(chosen.data_dir)
    host = open_host(chosen, None, keep=True)
    host.ready()
    try:
        with serving(create_app(host, chosen, stall_s=stall_s), at=at) as served:
            yield Several(served, host, models)
    finally:
        close_host(host)


def little_room() -> socket.socket:
    """Return a listening socket whose connections buffer kilobytes, not megabytes, for a client that does not read."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listening


class Events:
    """The metrics as they come from the stream. times: seconds, of each event. Ends by itself when the daemon does."""

    def __init__(self, served: Served, headers: Mapping[str, str] = NOBODY, query: str = "") -> None:
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.found: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.times: list[float] = []
        self.ended = threading.Event()
        self._socket = served.connect(f"GET {STREAM}{query} HTTP/1.1\r\nhost: localhost\r\n{extra}\r\n".encode())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    if line.startswith(b"data: "):
                        self.times.append(time.monotonic())
                        self.raw.append(line[6:])
                        self.found.append(json.loads(line[6:]))
                    elif line == b"0\r\n":
                        self.ended.set()
                        break
            except (OSError, ValueError):  # closed by this end
                pass

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()
