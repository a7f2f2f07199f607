"""Pulls while a daemon runs: each model by `ssmd pull` in a process of its own, one after the other.

That process ends with the daemon, however that ends: the daemon holds its stdin open (ssmd/cli/pull.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import subprocess
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from ssmd.machine.child import command, kill_with_children

log = logging.getLogger(__name__)
MOST = 8  # pulls that wait or run
KEPT = 20
PATIENCE_S = 10.0  # time that a cancelled pull has to clean up
_TAIL_BYTES = 4000  # end of a failed pull's stderr in which its message is looked for
_LINE_BYTES = 4096
State = Literal["waiting", "running", "done", "failed", "cancelled"]


class TooManyPulls(RuntimeError):
    """More models than MOST wait to be pulled."""


@dataclass(eq=False)
class Pull:
    """A model that is pulled, or was. Times: seconds since 1970."""

    id: str
    model: str
    runtime: str | None  # to pull it for; None: the fastest here
    quantization: str | None  # None: the usual one, or the one that fits into memory
    state: State = "waiting"
    stage: str = ""  # the present step
    done: int | None = None  # of the step, if known
    total: int | None = None
    unit: str | None = None
    error: str = ""  # why it failed
    started_at: float | None = None
    ended_at: float | None = None
    process: subprocess.Popen[bytes] | None = None
    cancelled: bool = False

    @property
    def is_over(self) -> bool:
        return self.state not in ("waiting", "running")

    def row(self) -> dict[str, Any]:
        """Return the pull's fields, ready for JSON."""
        return {
            "id": self.id,
            "object": "pull",
            "model": self.model,
            "runtime": self.runtime,
            "quantization": self.quantization,
            "state": self.state,
            "stage": self.stage or None,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "error": self.error or None,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
        }


class Pulls:
    """The last pulls of a daemon. From any thread. changes: grows with each change."""

    def __init__(self, models_dir: Path, data_dir: Path, *, offline: bool = False) -> None:
        """offline: fetch nothing, even if files are missing."""
        self._where = ("--models-dir", str(models_dir), "--data-dir", str(data_dir), *["--offline"] * offline)
        self._lock = threading.Lock()
        self._pulls: deque[Pull] = deque(maxlen=KEPT)
        self._thread: threading.Thread | None = None
        self.changes = 0

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each pull, the last one last."""
        with self._lock:
            return [pull.row() for pull in self._pulls]

    def row(self, id_: str) -> dict[str, Any] | None:
        """Return a pull's row; None if no pull has that id."""
        with self._lock:
            pull = next((pull for pull in self._pulls if pull.id == id_), None)
            return None if pull is None else pull.row()

    def begin(self, model: str, runtime: str | None, quantization: str | None = None) -> dict[str, Any]:
        """Pull a model after the earlier pulls. Returns its row. A pull that waits or runs is not begun twice.

        The caller has checked the names. Raises TooManyPulls.
        """
        with self._lock:
            under_way = [pull for pull in self._pulls if not pull.is_over]
            for pull in under_way:
                same = (pull.model, pull.runtime, pull.quantization) == (model, runtime, quantization)
                if same and not pull.cancelled:
                    return pull.row()
            if len(under_way) >= MOST:
                raise TooManyPulls
            pull = Pull(f"pull_{secrets.token_hex(12)}", model, runtime, quantization)
            self._pulls.append(pull)
            self.changes += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ssmd-pulls", daemon=True)
                self._thread.start()
            return pull.row()

    def cancel(self, id_: str) -> dict[str, Any] | None:
        """Cancel a pull that is not over. Returns its row as it is now; None if no pull has that id."""
        with self._lock:
            pull = next((pull for pull in self._pulls if pull.id == id_), None)
            if pull is None:
                return None
            if not pull.is_over and not pull.cancelled:
                pull.cancelled = True
                self.changes += 1
                if pull.process is None:
                    self._end(pull, "cancelled")
                else:
                    _let_go(pull.process)
            return pull.row()

    def _run(self) -> None:
        while True:
            with self._lock:
                pull = next((pull for pull in self._pulls if pull.state == "waiting"), None)
                if pull is None:
                    self._thread = None
                    return
                pull.state, pull.started_at = "running", _now()
                self.changes += 1
            try:
                with tempfile.TemporaryFile() as errors:
                    code = self._pull(pull, errors)
                    said = _last_words(errors)
            except OSError as err:
                code, said = 1, str(err)
            with self._lock:
                if code == 0:
                    self._end(pull, "done")
                elif pull.cancelled:
                    self._end(pull, "cancelled")
                else:
                    pull.error = said or f"the process that pulled it ended with code {code}"
                    self._end(pull, "failed")
                    log.warning("%s could not be pulled: %s", pull.model, pull.error)

    def _pull(self, pull: Pull, errors: IO[bytes]) -> int:
        """Run a pull to its end. Returns its exit code. Raises OSError."""
        wanted = [] if pull.runtime is None else ["--runtime", pull.runtime]
        if pull.quantization is not None:
            wanted += ["--quant", pull.quantization]
        environment = {name: value for name, value in os.environ.items() if name != "SSMD_API_KEY"}
        process = subprocess.Popen(
            command("ssmd", "pull", pull.model, *wanted, "--report", *self._where),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is the daemon's alone
        )
        with self._lock:
            pull.process = process
            if pull.cancelled:
                _let_go(process)
        with process:
            assert process.stdout is not None
            while line := process.stdout.readline(_LINE_BYTES):
                self._hear(pull, line)
        return process.returncode

    def _hear(self, pull: Pull, line: bytes) -> None:
        try:
            news = json.loads(line)
            stage, unit = str(news["stage"]), news["unit"]
            done, total = (None if news[name] is None else int(news[name]) for name in ("done", "total"))
        except (ValueError, KeyError, TypeError):  # the command's own last lines
            return
        with self._lock:
            pull.stage, pull.done, pull.total, pull.unit = stage, done, total, unit
            self.changes += 1

    def _end(self, pull: Pull, state: State) -> None:
        """Note that a pull is over. The caller holds the lock."""
        pull.state, pull.ended_at, pull.process = state, _now(), None
        pull.done = pull.total = pull.unit = None
        self.changes += 1


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """End a process, and kill it if it does not end within PATIENCE_S."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    killer = threading.Timer(PATIENCE_S, _kill, (process,))
    killer.daemon = True
    killer.start()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that did not end, with its children."""
    if process.poll() is not None:
        return
    log.warning("a cancelled pull did not end within %.0f s: killing it", PATIENCE_S)
    kill_with_children(process)


def _last_words(errors: IO[bytes]) -> str:
    """Return the last line with text, without the prefix "error: "."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _TAIL_BYTES))
    lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "").removeprefix("error: ")


def _now() -> float:
    return round(time.time(), 3)
