"""A real `llama-server` of llama.cpp in its own process: the peer that sessions are compared with.

It keeps a slot's state on disk only where the client asks for it: `save`, and `restore` after a restart.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from daemon_process import ServerProcess, free_port

WHEEL = Path(__file__).with_name("llama_wheel.py")


class LlamaServer(ServerProcess):
    """`with LlamaServer(binary, gguf, folder, …) as s:` serves `parallel` slots of `context` tokens; its files in
    `folder`.

    binary: llama-server, or a Python that has the wheel xllamacpp.
    """

    def __init__(
        self, binary: Path, gguf: Path, folder: Path, *, context: int, threads: int, parallel: int = 1
    ) -> None:
        self._slots, self._threads, port = folder / "slots", threads, free_port()
        self._slots.mkdir(parents=True)
        options = {
            "--model": gguf,
            "--host": "127.0.0.1",
            "--port": port,
            "--ctx-size": context * parallel,
            "--parallel": parallel,
            "--threads": threads,
            "--slot-save-path": self._slots,
        }
        program = [str(binary), str(WHEEL)] if binary.name.startswith("python") else [str(binary)]
        command = [*program, *(str(part) for option in options.items() for part in option)]
        super().__init__(command, port, folder / "llama-server.log", dict(os.environ))

    def producer(self) -> str:
        """Return the server's build, file, context and threads, as it reports them."""
        said = self.get("/props")[1]
        context = said["default_generation_settings"]["n_ctx"]
        return f"{said['build_info']}, {Path(said['model_path']).name}, context {context}, {self._threads} threads"

    def save(self, name: str) -> tuple[float, int]:
        """Save a state. Returns (ms by the client's clock, bytes of the file)."""
        return self._slot("save", name), (self._slots / name).stat().st_size

    def restore(self, name: str) -> float:
        """Restore a state. Returns the ms by the client's clock."""
        return self._slot("restore", name)

    def _slot(self, action: str, name: str) -> float:
        started = time.perf_counter()
        self.post(f"/slots/0?action={action}", {"filename": name})
        return (time.perf_counter() - started) * 1e3
