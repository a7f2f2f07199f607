"""Runs the scenarios of tests/client with the real clients, in the environment made for them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "client" / "scenarios.py"

_ONE_AT_A_TIME = threading.Lock()


def client_python() -> str:
    given = os.environ.get("SSMD_CLIENT_PYTHON", str(ROOT / ".venv-client" / "bin" / "python"))
    assert Path(given).exists(), f"{given} is missing: scripts/test makes it, or SSMD_CLIENT_PYTHON names another"
    return given


def command(scenario: str, url: str, arguments: Any, module: str = "openai_chat") -> list[str]:
    return [client_python(), str(SCRIPT), module, scenario, url, json.dumps(arguments)]


def client(scenario: str, url: str, arguments: Any, *, module: str) -> Any:
    """Return the JSON that a scenario of a module of tests/client printed. One at a time."""
    if not hasattr(os, "fork"):
        done = subprocess.run(command(scenario, url, arguments, module), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    with _ONE_AT_A_TIME:
        process = _serving(module)
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(120, process.kill)
        late.start()
        process.stdin.write(json.dumps([scenario, url, arguments]) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        late.cancel()
    assert "said" in answer, answer
    return answer["said"]


openai = functools.partial(client, module="openai_chat")


@functools.cache
def _serving(module: str) -> subprocess.Popen[str]:
    """A process that has imported the client, and forks for each scenario."""
    program = [client_python(), str(SCRIPT), module]
    process = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(_stop, process)
    return process


def _stop(process: subprocess.Popen[str]) -> None:
    with process:  # closes its standard input, which ends it, and waits
        pass
