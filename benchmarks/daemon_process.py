"""A real `ssmd serve` in its own process, and a client that measures its latency."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ssmd.config import Settings
from ssmd.machine.folder import make_private
from ssmd.model.artifact import MANIFEST
from ssmd.model.made import note

START_TIMEOUT_S = 300.0
SSMD = (sys.executable, "-m", "ssmd")


@dataclass
class Reply:
    """One streamed answer, by the client's clock: seconds since the request was sent."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # as an assistant's message has them
    delta_s: list[float] = field(default_factory=list)
    finish_s: float = 0.0
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    session: str | None = None

    def add_call(self, part: dict[str, Any]) -> None:
        """Add a delta of a call: its beginning, or more of its arguments."""
        if part["index"] == len(self.calls):
            self.calls.append({name: part[name] for name in ("id", "type", "function")})
        else:
            self.calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]

    @property
    def ttft_ms(self) -> float:
        """The time to first token, ms, by the client's clock; by the daemon's if random weights gave no text.

        Without text from another server it is the time to the end.
        """
        if self.delta_s or "ssmd" not in self.usage:
            return (self.delta_s[0] if self.delta_s else self.finish_s) * 1e3
        return float(self.usage["ssmd"]["ttft_ms"])

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.delta_s, self.delta_s[1:], strict=False)]


def free_port() -> int:
    """Return a free port below the range of clients' ports: polling a dead port there can connect to itself."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class ServerProcess:
    """`command` serves chat completions on `port` of this machine; `kill` is SIGKILL."""

    def __init__(self, command: Sequence[str], port: int, log: Path, environment: dict[str, str]) -> None:
        self.port = port
        self._command, self._log, self._environment = command, log, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.healthy_ms = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def spawn(self) -> None:
        """Start the process and wait for nothing."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)

    def start(self) -> None:
        """Start the server, and return when /health answers. Raises, with its last output, if it does not."""
        started = time.perf_counter()
        self.spawn()
        assert self.process is not None
        while time.perf_counter() - started < START_TIMEOUT_S:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/health")[0] == 200:
                    self.healthy_ms = (time.perf_counter() - started) * 1e3
                    return
            time.sleep(0.01)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, patience_s: float = 30.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience_s)

    def get(self, path: str) -> tuple[int, Any]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        return response.status, json.loads(body) if body[:1] in (b"{", b"[") else body.decode()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{response.status}: {answer.decode()}")
        return json.loads(answer)

    def chat(self, messages: Sequence[dict[str, Any]], **fields: Any) -> Reply:
        """One streamed chat completion, read to its end."""
        reply = Reply()
        for _ in self.stream(reply, messages, **fields):
            pass
        return reply

    def stream(self, reply: Reply, messages: Sequence[dict[str, Any]], **fields: Any) -> Iterator[str]:
        """The same, yielding each delta's text as it arrives; closing the iterator hangs up."""
        body = {
            "model": fields.pop("model", None) or self.get("/v1/models")[1]["data"][0]["id"],
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            **fields,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        started = time.perf_counter()
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read().decode()}")
            reply.session = response.getheader("x-ssmd-session")
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                now = time.perf_counter() - started
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                if chunk.get("usage"):
                    reply.usage = chunk["usage"]
                for choice in chunk["choices"]:
                    if choice.get("logprobs"):
                        reply.logprobs += [t["logprob"] for t in choice["logprobs"]["content"]]
                    for part in choice["delta"].get("tool_calls") or ():
                        reply.add_call(part)
                        reply.delta_s.append(now)
                    if text := choice["delta"].get("content"):
                        reply.text += text
                        reply.delta_s.append(now)
                        yield text
                    if choice["finish_reason"]:
                        reply.finish_reason, reply.finish_s = choice["finish_reason"], now
        finally:
            connection.close()

    def resident_mb(self) -> tuple[float, float]:
        """(anonymous, file-backed) resident memory in MB, from /proc."""
        assert self.process is not None
        fields = {
            line.split(":")[0]: float(line.split()[1]) / 1e3
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            if line.startswith("Rss")
        }
        return fields["RssAnon"] + fields["RssShmem"], fields["RssFile"]


class DaemonProcess(ServerProcess):
    """A daemon: `with DaemonProcess(model, data_dir) as d:` serves on a free port.

    program: the command that is run as `ssmd`. foreign: serve the model as one that was made elsewhere.
    """

    def __init__(
        self, model: str | Path, data_dir: Path, *args: str, program: Sequence[str] = SSMD, foreign: bool = False
    ) -> None:
        if not foreign:
            for folder in (Path(model), *(Settings().models_dir / model).glob("*")):
                if (folder / MANIFEST).is_file():
                    make_private(data_dir)
                    note(folder, data_dir)
        port = free_port()
        command = [*program, "serve", str(model), "--port", str(port), *args]
        models_dir = str(Settings().models_dir)  # before it moves with the data dir
        environment = {**os.environ, "SSMD_DATA_DIR": str(data_dir), "SSMD_MODELS_DIR": models_dir}
        super().__init__(command, port, data_dir.parent / f"{data_dir.name}.log", environment)


class HostProcess(ServerProcess):
    """`ssmd serve` of all that is installed in `models_dir`, by default the user's; as made here."""

    def __init__(self, data_dir: Path, *args: str, models_dir: Path | None = None) -> None:
        models_dir = Settings().models_dir if models_dir is None else models_dir
        make_private(data_dir)
        for manifest in models_dir.glob(f"*/*/{MANIFEST}"):
            note(manifest.parent, data_dir)
        port = free_port()
        environment = {**os.environ, "SSMD_DATA_DIR": str(data_dir), "SSMD_MODELS_DIR": str(models_dir)}
        log = data_dir.parent / f"{data_dir.name}.log"
        super().__init__([*SSMD, "serve", "--port", str(port), *args], port, log, environment)

    def model(self, name: str, what: str) -> dict[str, Any]:
        """Have a model loaded, or let go; its row."""
        found: dict[str, Any] = self.post(f"/ssmd/v1/models/{name}/{what}", {})
        return found

    def unloaded(self, name: str) -> None:
        """Have a model let go, and wait until it is."""
        while self.model(name, "unload")["state"] != "unloaded":
            time.sleep(0.02)


def conditions() -> str:
    """Return the conditions that a reader needs to repeat a run."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}, load {load}"
