"""The table of clients: a client's steps, kills and tokens are counted, and what it did not do is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import clients_table
import pytest
from agent_setups import CLIENTS, ENVIRONMENTS, OLLAMA, Client, Place, Run
from clients_table import ROOT, SCRIPTED, Outcome, Request, answered, judge, row, tried
from conftest import TinyArtifacts
from daemon_process import DaemonProcess
from strangers import forged

from ssmd.cli.launch.agents import CHAT

# A client without packages: it sends its messages, and runs the calls by a shell.
OWN = """
import json, subprocess, sys, urllib.request
url, model = sys.argv[1:3]
function = {"name": "shell", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": "Do the steps."}]
while True:
    body = {"model": model, "messages": messages, "tools": [{"type": "function", "function": function}]}
    asked = urllib.request.Request(url + sys.argv[3], json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=100) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
"""


def own(protocol: str = CHAT, path: str = CHAT) -> Client:
    def run(place: Place) -> Run:
        return Run([[sys.executable, "-c", OWN, place.url, place.model, path]])

    return Client("own", protocol, "none", "own==1.0", run)


@pytest.fixture
def model(artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = (SCRIPTED, ROOT / "tests", ROOT, ROOT / "runtimes", ROOT / "clients")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
    monkeypatch.setattr(clients_table, "DaemonProcess", DaemonProcess)  # which sees the variable
    return forged(artifacts["mamba-f32"], tmp_path / "model", {}, runtime="scripted")


def test_a_client_does_its_steps_over_kills(model: Path, tmp_path: Path) -> None:
    outcome = tried(own(), tmp_path, model)
    assert (outcome.failures, outcome.kills, len(outcome.steps), outcome.others) == ([], 2, 5, [])
    for before, step in pairwise(outcome.steps):
        assert before.prompt < step.cached < step.prompt
    cells = row(own(), "1.0", outcome).split(" | ")
    assert cells[1:3] == ["1.0", f"`{CHAT}`"]
    assert cells[4].count(" of ") == 4
    assert cells[5:] == ["2", "passed |"]


def test_a_client_that_fails_is_a_row_that_says_why(model: Path, tmp_path: Path) -> None:
    outcome = tried(own(path="/v1/nothing"), tmp_path, model)
    said = row(own(), "1.0", outcome)
    assert "**failed**: exit code 1; 5 of 5 answers were not asked for; the file was not edited; last line:" in said
    assert said.endswith("; 1 × `?` 404 |")


JUDGED: list[tuple[Callable[[Outcome], object], str]] = [
    (lambda one: setattr(one, "kills", 1), "1 kills instead of 2"),
    (lambda one: one.steps.append(Request(OLLAMA, 200, 10, 5)), f"asked {OLLAMA}"),
]


@pytest.mark.parametrize(("change", "said"), JUDGED)
def test_a_step_that_went_wrong_fails_the_row(change: Callable[[Outcome], object], said: str) -> None:
    outcome = Outcome([Request(CHAT, 200, 10, 5)], kills=2)
    change(outcome)
    judge(outcome, own(), prompts=5, left=0, right=True, said="The end")
    assert outcome.failures == [said, "last line: `The end`"]


def test_requests_are_read_from_the_log() -> None:
    log = (
        "the daemon serves\n"
        '{"time": "x", "method": "POST", "path": "/api/chat", "status": 200, "prompt_tokens": 7, "cached_tokens": 3}\n'
        '{"time": "x", "method": "POST", "path": "/ssmd/v1/stop", "status": 200}\n'
        '{"time": "x", "method": "GET", "path": "/v1/models", "status": 200}\n'
        '{"time": "x", "method": "POST", "path": "/v1/messages", "status": 400}\n'
    )
    assert answered(log) == [Request(OLLAMA, 200, 7, 3), Request("/v1/messages", 400, 0, 0)]


def test_each_client_has_a_pinned_package() -> None:
    for client in CLIENTS:
        assert client.package in ENVIRONMENTS[client.environment]
        assert clients_table.version_of(client.package)[0].isdigit()
    assert clients_table.version_of("@anthropic-ai/sdk@1.14.0") == "1.14.0"
