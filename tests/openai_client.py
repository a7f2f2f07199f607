"""Runs the scenarios of tests/client/openai_chat.py with the real openai client, in the environment made for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "client" / "openai_chat.py"


def client_python() -> str:
    given = os.environ.get("SSMD_CLIENT_PYTHON", str(ROOT / ".venv-client" / "bin" / "python"))
    assert Path(given).exists(), f"{given} is missing: scripts/test makes it, or SSMD_CLIENT_PYTHON names another"
    return given


def command(scenario: str, url: str, arguments: Any) -> list[str]:
    return [client_python(), str(SCRIPT), scenario, url, json.dumps(arguments)]


def openai(scenario: str, url: str, arguments: Any) -> Any:
    """What the scenario printed."""
    done = subprocess.run(command(scenario, url, arguments), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
