"""Claude Code against a daemon that is killed between the agent's steps: its recorded requests, and the agent itself.

Its models cannot do a task, so a file has their answers. TESTED_CLAUDE names the program `claude`.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TinyArtifacts
from daemon import soon
from daemon_process import DaemonProcess
from strangers import forged

SCRIPTED = ROOT / "tests" / "data" / "scripted"
RECORDED = json.loads((ROOT / "tests" / "data" / "messages" / "claude-code.json").read_text("utf-8"))
CLAUDE = os.environ.get("TESTED_CLAUDE", "")
WRONG = "def add(a, b):\n    return a - b\n\n\nprint(add(2, 3))\n"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(folder: str) -> list[str]:
    """Five steps of a task: to look, to read, to edit, to run, and to say so."""
    file = f"{folder}/calc.py"
    return [
        "I look at the files.\n" + call("Bash", command="ls", description="List files"),
        call("Read", file_path=file),
        call("Edit", file_path=file, old_string="a - b", new_string="a + b"),
        call("Bash", command="python3 calc.py; echo ran", description="Run it"),
        "Done: it prints 5.",
    ]


@pytest.fixture
def scripted(artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonProcess]:
    """A daemon of its own process whose model says what tmp_path/answers.json has."""
    model = forged(artifacts["mamba-f32"], tmp_path / "model", {}, runtime="scripted")
    path = os.pathsep.join(map(str, (SCRIPTED, ROOT / "tests", ROOT, ROOT / "runtimes", ROOT / "clients")))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("SCRIPTED_ANSWERS", str(tmp_path / "answers.json"))
    (tmp_path / "answers.json").write_text(json.dumps(answers("/project")))
    with DaemonProcess(model, tmp_path / "data") as daemon:
        yield daemon


def ask(daemon: DaemonProcess, messages: Any) -> list[dict[str, Any]]:
    """Send a recorded request with these messages; the events of its answer."""
    body = {**RECORDED["body"], "model": daemon.get("/v1/models")[1]["data"][0]["id"], "messages": messages}
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=120)
    headers = {"content-type": "application/json", **RECORDED["headers"]}
    connection.request("POST", RECORDED["path"], json.dumps(body), headers)
    response = connection.getresponse()
    raw = response.read().decode()
    connection.close()
    assert response.status == 200, raw
    return [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line.startswith("data: ")]


def prompt(usage: dict[str, Any]) -> int:
    return int(usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"])


def test_recorded_steps_cost_what_is_new_after_kills(scripted: DaemonProcess) -> None:
    usages: list[dict[str, Any]] = []
    for messages in RECORDED["turns"]:
        if len(usages) in (1, 4):  # a daemon takes a second to start
            scripted.kill()
            scripted.start()
        *_, ending, last = ask(scripted, messages)
        assert last["type"] == "message_stop"
        usages.append(ending["usage"])
        calls = len(usages) < len(RECORDED["turns"])
        assert ending["delta"]["stop_reason"] == ("tool_use" if calls else "end_turn")
    assert len(usages) == 5
    assert prompt(usages[0]) > 5000
    for step, (before, usage) in enumerate(pairwise(usages), 1):
        assert usage["ssmd"]["session"] == before["ssmd"]["session"]
        assert usage["ssmd"]["resume"] == "exact"
        # The third call comes back with an argument that the agent added: the answer is read again, the prompt is not.
        read_before = prompt(before) - 1 if step == 3 else prompt(before)
        assert usage["cache_read_input_tokens"] >= read_before
        assert prompt(usage) - usage["cache_read_input_tokens"] < 400


@pytest.mark.full
@pytest.mark.skipif(not CLAUDE, reason="TESTED_CLAUDE names no program")
def test_claude_code_does_its_task_while_daemons_die(scripted: DaemonProcess, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "calc.py").write_text(WRONG)
    (tmp_path / "answers.json").write_text(json.dumps(answers(str(project))))
    model = scripted.get("/v1/models")[1]["data"][0]["id"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC", "CLAUDE"))},
        "HOME": str(tmp_path),
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{scripted.port}",
        "ANTHROPIC_AUTH_TOKEN": "none",
    }
    tools = "Bash,Read,Edit"
    task = [CLAUDE, "--bare", "-p", "Fix add in calc.py and run it", "--tools", tools, "--allowedTools", tools]
    agent = subprocess.Popen(
        [*task, "--model", model], cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        for left in (4, 2):
            soon(lambda left=left: len(json.loads((tmp_path / "answers.json").read_text())) <= left, within_s=120)  # type: ignore[misc]
            soon(lambda: scripted.get("/ssmd/v1/metrics")[1]["running"] == [], within_s=30)
            scripted.kill()
            scripted.start()
        said, _ = agent.communicate(timeout=120)
    finally:
        agent.kill()
    assert b"it prints 5" in said
    assert "a + b" in (project / "calc.py").read_text()
    recent = scripted.get("/ssmd/v1/metrics")[1]["recent"]
    assert recent[-1]["cached_tokens"] > 0.9 * recent[-1]["prompt_tokens"]
