"""`ssmd warm` against a real daemon: kills between, files to export and import, and input that is hostile."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from conftest import TinyArtifacts
from daemon import soon
from daemon_process import Reply
from forked import DaemonProcess
from hostile import join, seal, split
from several import models_folder

from ssmd.sessions.store import Store

SYSTEM = {"role": "system", "content": "You keep the lighthouse at the end of the pier, and you know every ship. " * 4}
LAMPS = {"name": "lamps", "description": "Lists the lamps.", "parameters": {"type": "object"}}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "logprobs": True, "top_logprobs": 5}


class Ssmd:
    """The command, with a data directory and a folder of models of its own."""

    def __init__(self, data: Path, models: Path) -> None:
        self.data = data
        self.environment = {**os.environ, "SSMD_DATA_DIR": str(data), "SSMD_MODELS_DIR": str(models)}

    def __call__(self, *args: str, code: int = 0, given: str = "") -> subprocess.CompletedProcess[str]:
        done = commands.ssmd("warm", *args, env=self.environment, given=given)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self("--list", "--json").stdout)
        return found

    def ready(self) -> bool:
        with closing(Store.open(self.data)) as store:
            return all(one.ready for one in store.warm())


@pytest.fixture
def models(artifacts: TinyArtifacts, tmp_path: Path) -> Path:
    return models_folder(artifacts, tmp_path / "models")


@pytest.fixture
def ssmd(models: Path, tmp_path: Path) -> Ssmd:
    return Ssmd(tmp_path / "data", models)


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    file = tmp_path / "agent.json"
    body = {"model": "gpt-5", "stream": True, "temperature": 0.1, "messages": [SYSTEM, say("Hello")]}
    file.write_text(json.dumps(body))
    return file


@pytest.fixture
def daemon(models: Path, ssmd: Ssmd) -> Iterator[DaemonProcess]:
    with DaemonProcess(next(models.glob("granite/*")), ssmd.data) as one:
        yield one


def say(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(daemon: DaemonProcess, text: str, **fields: Any) -> Reply:
    return daemon.chat([SYSTEM, say(text)], **SAMPLING | fields)


def cached(reply: Reply) -> int:
    return int(reply.usage["prompt_tokens_details"]["cached_tokens"])


def test_it_serves_after_a_kill_as_it_did_before(
    ssmd: Ssmd, agent: Path, daemon: DaemonProcess, tmp_path: Path
) -> None:
    done = json.loads(ssmd(str(agent), "--json").stdout)
    assert (done["name"], done["ready"], done["cached_tokens"]) == ("agent", True, 0)
    daemon.kill()
    daemon.start()
    found = [ask(daemon, "Who is there?", store=False), ask(daemon, "And who else?")]
    assert all(cached(reply) >= done["tokens"] for reply in found)
    assert {reply.usage["ssmd"]["resume"] for reply in found} == {"exact"}
    table = commands.ssmd("ps", env=ssmd.environment).stdout
    tokens = sum(map(cached, found))
    assert f"warm beginnings: {tokens} tokens of 2 requests were not read again since the start" in table
    control = next(Path(ssmd.environment["SSMD_MODELS_DIR"]).glob("granite/*"))
    with DaemonProcess(control, tmp_path / "control") as other:
        whole = [ask(other, "Who is there?", store=False), ask(other, "And who else?")]
    assert [(r.text, r.logprobs) for r in found] == [(r.text, r.logprobs) for r in whole]


def test_a_killed_daemon_reads_it_later(ssmd: Ssmd, agent: Path, daemon: DaemonProcess) -> None:
    """Killed as soon as the command is told that it will be read, at whatever point of the reading that is."""
    for n in range(3):
        ssmd(str(agent), "--idle", "--name", f"beginning {n}")
        daemon.kill()
        daemon.start()
        soon(ssmd.ready, 30)
    assert len(ssmd.listed()) == 3
    assert cached(ask(daemon, "Who is there?")) >= ssmd.listed()[0]["tokens"]


def test_a_name_is_replaced_and_removed(ssmd: Ssmd, agent: Path, daemon: DaemonProcess) -> None:
    first = json.loads(ssmd(str(agent), "--json").stdout)
    second = json.loads(ssmd(str(agent), "--json").stdout)
    assert second["replaced"] == [first["id"]]
    assert second["cached_tokens"] == second["tokens"], "its state was there"
    ssmd("-", "--name", "a prompt", given=str(SYSTEM["content"]) + "Be brief.")
    assert [one["name"] for one in ssmd.listed()] == ["a prompt", "agent"]
    ssmd("--rm", "agent")
    ssmd("--rm", ssmd.listed()[0]["id"][:12])
    assert ssmd.listed() == []
    assert "no beginning is kept warm" in ssmd("--list").stderr
    with closing(Store.open(ssmd.data)) as store:
        assert store.sessions() == []


def test_the_last_session_gives_its_beginning(ssmd: Ssmd, daemon: DaemonProcess) -> None:
    """Its tools too, which no message has. The conversation may go, the beginning stays."""
    tools = [{"type": "function", "function": LAMPS}]
    brief = [{"role": "system", "content": "Be brief."}]
    first = daemon.chat([*brief, say("Who?")], tools=tools, **SAMPLING)
    done = json.loads(ssmd("--from-last", "--json").stdout)
    assert done["name"] == "Who?"
    assert done["cached_tokens"] == done["tokens"] > 64
    assert json.loads(ssmd("--from-last", "--name", "again", "--json").stdout)["tokens"] == done["tokens"]
    with closing(Store.open(ssmd.data)) as store:
        store.delete(str(first.session))
        (turn,) = store.turns(done["id"])
        assert [m.content for m in turn.messages] == ["Be brief."]
        assert "Lists the lamps." in turn.text.own
    assert cached(daemon.chat([*brief, say("And now?")], tools=tools, **SAMPLING)) >= done["tokens"]
    refused = ssmd("--session", "ses_nope", code=1)
    assert "there is no session" in refused.stderr


def exported(ssmd: Ssmd, agent: Path, file: Path) -> dict[str, Any]:
    ssmd(str(agent))
    ssmd("agent", "--export", str(file))
    (one,) = ssmd.listed()
    return one


def test_an_imported_beginning_is_read_before_it_serves(
    ssmd: Ssmd, agent: Path, daemon: DaemonProcess, models: Path, tmp_path: Path
) -> None:
    """Its state is altered: what is computed here is that of a control."""
    file, there = tmp_path / "agent.ssmd", Ssmd(tmp_path / "there", models)
    tokens = exported(ssmd, agent, file)["tokens"]
    expected = ask(daemon, "Who is there?", store=False)
    file.write_bytes(lying(file.read_bytes()))
    assert "read when a daemon runs" in there(str(file)).stdout
    assert [(one["ready"], one["imported"]) for one in there.listed()] == [(False, True)]
    with DaemonProcess(next(models.glob("granite/*")), there.data) as other:
        soon(there.ready, 30)
        found = ask(other, "Who is there?", store=False)
        assert cached(found) >= tokens
        assert (found.text, found.logprobs) == (expected.text, expected.logprobs)
        there(str(file), "--name", "while it runs")
        soon(there.ready, 30)


def test_a_trusted_one_serves_at_once(
    ssmd: Ssmd, agent: Path, daemon: DaemonProcess, models: Path, tmp_path: Path
) -> None:
    file = tmp_path / "agent.ssmd"
    tokens = exported(ssmd, agent, file)["tokens"]
    expected = ask(daemon, "Who is there?", store=False)
    there = Ssmd(tmp_path / "there", models)
    assert there(str(file), "--trust").stdout == f"agent: {tokens} tokens, ready\n"
    with DaemonProcess(next(models.glob("granite/*")), there.data) as other:
        found = ask(other, "Who is there?", store=False)
        assert cached(found) >= tokens
        assert found.usage["ssmd"]["resume"] == "exact"
        assert (found.text, found.logprobs) == (expected.text, expected.logprobs)


def test_a_trusted_lie_shows_that_the_state_is_used(
    ssmd: Ssmd, agent: Path, daemon: DaemonProcess, models: Path, tmp_path: Path
) -> None:
    """Without this the two tests above could not tell a state of the file from one that is computed."""
    file, there = tmp_path / "agent.ssmd", Ssmd(tmp_path / "there", models)
    exported(ssmd, agent, file)
    expected = ask(daemon, "Who is there?", store=False)
    file.write_bytes(lying(file.read_bytes()))
    there(str(file), "--trust", "--key", "anna")
    assert [one["key"] for one in there.listed()] == ["anna"]
    there(str(file), "--trust")
    with DaemonProcess(next(models.glob("granite/*")), there.data) as other:
        assert ask(other, "Who is there?", store=False).logprobs != expected.logprobs


def lying(data: bytes) -> bytes:
    """The file with other numbers in its first recurrent state."""
    parts = split(data)
    name = next(n for n, one in parts.tensors.items() if n.startswith("checkpoint.0.") and one["dtype"] == "F32")
    first, last = parts.tensors[name]["data_offsets"]
    numbers = np.frombuffer(parts.body[first:last], "<f4") + np.float32(1)
    body = parts.body[:first] + numbers.tobytes() + parts.body[last:]
    return seal(join(replace(parts, body=body)))


def test_hostile_files_end_in_one_line(ssmd: Ssmd, agent: Path, daemon: DaemonProcess, tmp_path: Path) -> None:
    whole = tmp_path / "whole.ssmd"
    exported(ssmd, agent, whole)
    before = ssmd.listed()
    data = whole.read_bytes()
    parts = split(data)
    document = parts.document
    turn = document["turns"][0]
    huge = parts.tensors["turn.0.ids"]["data_offsets"]
    ids = np.frombuffer(parts.body[huge[0] : huge[1]], "<i4").copy()
    ids[3] = 10**6
    tampered = {
        "cut.ssmd": data[: len(data) // 2],
        "short.ssmd": data[:7],
        "empty.ssmd": b"",
        "flipped.ssmd": data[:-1] + bytes([data[-1] ^ 1]),
        "chat.ssmd": seal(join(replace(parts, document={**document, "turns": [{**turn, "finish": "stop"}]}))),
        "vocabulary.ssmd": seal(
            join(replace(parts, body=parts.body[: huge[0]] + ids.tobytes() + parts.body[huge[1] :]))
        ),
        "stranger.ssmd": seal(
            join(replace(parts, document={**document, "session": {**document["session"], "lineage": "0" * 64}}))
        ),
        "long.txt": b"a" * 10_000_000,
        "longer.txt": b"a" * (17 << 20),
        "zero.txt": b"a\0b",
        "bytes.txt": b"\xff\xfe\xfd",
        "blank.txt": b" \n",
        "nested.json": b'{"messages": ' + b"[" * 200_000,
        "number.json": b'{"messages": 5}',
        "content.json": b'{"messages": [{"role": "system", "content": {"a": []}}]}',
        "role.json": b'{"messages": [{"role": "king", "content": "a"}]}',
        "tools.json": b'{"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}}',
        "anthropic.json": b'{"system": "a", "messages": []}',
        "responses.json": b'{"instructions": "a", "input": "b"}',
        "nothing.json": b"{}",
        "user.json": b'{"messages": [{"role": "user", "content": "a"}]}',
    }
    for name, raw in tampered.items():
        (tmp_path / name).write_bytes(raw)
        for trust in ([], ["--trust"]) if name in ("flipped.ssmd", "vocabulary.ssmd") else ([],):
            refused = ssmd(str(tmp_path / name), *trust, code=1)
            said = [line for line in refused.stderr.splitlines() if not line.startswith("using the daemon")]
            assert len(said) == 1, (name, said)
            assert said[0].startswith("error: "), (name, said)
            assert len(said[0]) < 1000, (name, said)
    assert ssmd.listed() == before
    assert ask(daemon, "Who is there?").text
