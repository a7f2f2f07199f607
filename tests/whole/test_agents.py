"""The trace of agents' conversations: its lengths and changes are those recorded, and its counts are a daemon's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import agents
import pytest
from agents import Agent, Client, Conversation, Row, Words
from conftest import TinyArtifacts
from daemon_process import DaemonProcess, Reply

HERE = {"session": "A", "edit": 0, "directory": 0, "day": 0}
HEADER = re.compile(
    r"x-anthropic-billing-header: cc_version=2\.1\.197\.[0-9a-f]{3}; cc_entrypoint=(\S+);(?: cch=\S+;)?"
)


@pytest.fixture(scope="module")
def words(artifacts: TinyArtifacts) -> Words:
    return Words(artifacts["mamba-f32"] / "tokenizer.json")


def before_the_user(agent: Agent, **changes: object) -> str:
    opening, joined = agent.opening(agent.shape["opening"], {**HERE, "request": 0, **changes})
    texts = [part["text"] for message in opening for part in message["content"]]
    return "".join([*texts, *joined])


@pytest.mark.parametrize(
    ("name", "tools", "text", "changes", "at"),
    [
        ("claude", 16_944, 3_090, "edit", 1_487),
        ("claude", 16_944, 3_090, "directory", 1_027),
        ("opencode", 5_389, 2_281, "directory", 1_971),
        ("opencode", 5_389, 2_281, "day", 2_013),
        ("pi", 759, 679, "day", 628),
        ("codex", 1_950, 4_535, "directory", 4_409),
    ],
)
def test_shape_has_recorded_lengths(words: Words, name: str, tools: int, text: str, changes: str, at: int) -> None:
    agent = Agent(name, words, 1.0)
    whole = before_the_user(agent)
    header = HEADER.match(whole)
    headed = 0 if header is None else words.count(header[0]) - 35  # 35 were recorded, by another tokenizer
    made = [words.count(json.dumps(tool)) for tool in agent.tools]
    assert sum(agent.shape["tools"]) == tools
    assert made == [pytest.approx(max(wanted, min(made)), abs=3) for wanted in agent.shape["tools"]]
    assert words.count(whole) - headed == pytest.approx(text, rel=0.02)
    other = before_the_user(agent, **{changes: 1})
    common = next(i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
    assert words.count(whole[:common]) - headed == pytest.approx(at, abs=25)


def test_billing_header_changes_by_request(words: Words) -> None:
    headers = {}
    for name in ("claude", "claude-interactive"):
        agent = Agent(name, words, 0.01)
        texts = [before_the_user(agent, request=i, session=s) for i, s in ((0, "A"), (1, "A"), (1, "B"))]
        headers[name] = [found[0] for text in texts if (found := HEADER.match(text))]
    first, second, third = headers["claude"]
    assert first == second != third
    assert len(set(headers["claude-interactive"])) == 3


def test_request_repeats_what_it_said_before(words: Words) -> None:
    talk = Conversation(Agent("claude", words, 0.01), HERE)
    talk.say(10, "0")
    call = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
    before = talk.body(0)
    talk.hear(Reply(calls=[call]))
    after = talk.body(1)
    assert after["tools"] == before["tools"]
    assert after["messages"][: len(before["messages"])] == before["messages"]
    assert [m["role"] for m in after["messages"]] == ["system", "user", "assistant", "tool"]


def test_new_tokens_are_those_behind_what_was_fed() -> None:
    """The last token of an answer is not fed, and the last one of a prompt is read in any case."""
    assert agents._common([1, 2, 3, 9], [1, 2, 4], 5) == 2
    assert agents._common([1, 2, 3, 4, 5, 9], [1, 2, 3], 3) == 5
    assert agents._common([1, 2, 3], [1, 2, 3], 0) == 2


def test_agents_trace(
    artifacts: TinyArtifacts,
    words: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A pure SSM, some hundreds of tokens a prompt: a kill, an unload, sub-agents, compaction, two agents in turn."""
    monkeypatch.setattr(agents, "STEPS", 1)
    monkeypatch.setattr(agents, "IN_TURN", 2)
    opencode, pi = (Agent(name, words, 0.01) for name in ("opencode", "pi"))
    with DaemonProcess(artifacts["mamba-f32"], tmp_path / "data") as daemon:
        client = Client(daemon, daemon.get("/v1/models")[1]["data"][0]["id"], tmp_path / "data", None, pause_s=0.05)
        agents.trace(client, opencode)
        told, sessions = client.with_new(words), len(daemon.get("/ssmd/v1/sessions")[1]["data"])
        agents.in_turn(client, [opencode, pi])
        with_pi = len(daemon.get("/ssmd/v1/sessions")[1]["data"])
        agents.in_turn(replace(client, store=False, rows=[]), [opencode])
        unlisted = len(daemon.get("/ssmd/v1/sessions")[1]["data"])
    assert (with_pi, unlisted) == (sessions + 1, sessions + 1), "pi sends `store: false`, and so do all if told to"
    by_kind: dict[str, list[Row]] = {}
    for row in told:
        by_kind.setdefault(row.kind, []).append(row)
    session = [row for row in told if row.kind in ("first", "next turn", "after kill -9", "after an unload")]
    for earlier, later in pairwise(session):
        assert later.cached > earlier.prompt, "the text of an earlier request of the session was read again"
        assert later.resume == "exact"
    [first], [beside] = by_kind["first"], by_kind["title, beside the first"]
    assert (first.cached, beside.cached) == (0, 0)
    assert (first.new, by_kind["new session"][0].new < first.prompt / 4) == (first.prompt, True)
    read, new = sum(row.prompt - row.cached for row in told), sum(row.new for row in told)
    assert new * 0.95 < read < new * 1.5, "what is read is little more than what no earlier prompt had"
    assert by_kind["new session"][0].cached > 0.9 * first.prompt
    assert by_kind["after compaction"][0].prompt < by_kind["summary of all"][0].prompt / 1.5
    assert len(by_kind["sub-agent"]) == 1
    assert len(by_kind["new session, elsewhere"]) == 2
    assert all(0 <= row.cached < row.prompt and row.ttft_ms > 0 for row in client.rows)
    assert sum(row.cpu_ms for row in told) > 0
    assert sum(row.on_disk for row in told) > 0
    turns = [row.kind for row in client.rows[len(told) :] if row.kind != "step"]
    assert turns == ["in turn, first"] * 2 + ["in turn"] * 2
    agents.show(client.rows, told)
    printed = capsys.readouterr().out
    assert printed.count("**all") == 2
    assert f"| opencode | first | 1 | {first.prompt:,} | 0 | {first.prompt:,} |" in printed
