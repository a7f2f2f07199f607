"""Claude Code's and Codex' recorded requests to a daemon that is killed between the agent's steps.

A tiny model cannot do a task, so a file has its answers (tests/data/scripted).
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TinyArtifacts
from daemon_process import DaemonProcess
from strangers import forged

SCRIPTED = ROOT / "tests" / "data" / "scripted"
RECORDED, CODEX = (
    json.loads((ROOT / "tests" / "data" / "messages" / f"{name}.json").read_text("utf-8"))
    for name in ("claude-code", "codex")
)


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


def ask(daemon: DaemonProcess, recorded: Any, **fields: Any) -> list[dict[str, Any]]:
    """Send a recorded request with these messages or items; the events of its answer."""
    body = {**recorded["body"], "model": daemon.get("/v1/models")[1]["data"][0]["id"], **fields}
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=120)
    headers = {"content-type": "application/json", **recorded["headers"]}
    connection.request("POST", recorded["path"], json.dumps(body), headers)
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
        *_, ending, last = ask(scripted, RECORDED, messages=messages)
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


def test_codex_steps_cost_what_is_new_after_kills(scripted: DaemonProcess, tmp_path: Path) -> None:
    """It sends `store: false`, all items with ids, and tools that a server runs."""
    commands = ["ls", "cat calc.py", "sed -i 's/a - b/a + b/' calc.py", "python3 calc.py"]
    said = [call("exec_command", cmd=command) for command in commands]
    said[0] = f"I look at the files.\n{said[0]}"
    (tmp_path / "answers.json").write_text(json.dumps([*said, "Done: it prints 5."]))
    given: list[Any] = []
    usages: list[dict[str, Any]] = []
    for new in CODEX["turns"]:
        if len(usages) in (1, 4):
            scripted.kill()
            scripted.start()
        given += new
        events = ask(scripted, CODEX, input=given)
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        last = events[-1]
        assert last["type"] == "response.completed"
        usages.append(last["response"]["usage"])
        calls = [item["name"] for item in last["response"]["output"] if item["type"] == "function_call"]
        assert calls == (["exec_command"] if len(usages) < len(CODEX["turns"]) else [])
    assert len(usages) == 5
    assert usages[0]["input_tokens"] > 5000
    for before, usage in pairwise(usages):
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert (usage["ssmd"]["resume"], usage["ssmd"]["stored"]) == ("exact", False)
        assert cached >= before["input_tokens"] - 1
        assert usage["input_tokens"] - cached < 400
    assert {"tools.web_search", "prompt_cache_key", "client_metadata"} <= set(usages[0]["ssmd"]["ignored"])
    assert scripted.get("/ssmd/v1/sessions")[1]["data"] == []
