"""The real anthropic client against the daemon."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from api.test_anthropic import LONG, TOOLS, total
from api.test_calls import CALL, SECOND, scripted
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from openai_client import client, command
from saying import Saying

from ssmd.config import Settings

MODULE = "anthropic_messages"
KEY = "a-key-of-anthropics"


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["mamba-f32"]


@pytest.fixture(scope="module")
def tiny(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifact, tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


anthropic = partial(client, module=MODULE)


def test_its_helper_holds_a_conversation_with_calls(tiny: Daemon) -> None:
    """The client puts each stream together, and sends its own blocks back, those of reasoning signed."""
    scripted(tiny, f"<think>\nParis, then.\n</think>\n\nI look.\n{CALL}\n{SECOND}", "It is cold.", "Warm.")
    fields = {"model": tiny.model, "max_tokens": 300, "tools": TOOLS}
    results = [
        {"type": "tool_result", "content": "12 degrees"},
        {"type": "tool_result", "content": [], "is_error": True},
    ]
    turns = [{**fields, "content": content} for content in ("Paris? " + LONG, results, "And Rome?")]
    first, second, third = anthropic("conversation", tiny.url, turns)
    assert {"text", "thinking", "signature", "input_json", "message_stop"} <= set(first["kinds"])
    thinking, text, call, other = first["message"]["content"]
    assert (thinking["thinking"], text["text"]) == ("Paris, then.", "I look.")
    assert (call["name"], call["input"], other["input"]) == ("get_weather", {"city": "Paris"}, {})
    assert [one["message"]["stop_reason"] for one in (first, second, third)] == ["tool_use", "end_turn", "end_turn"]
    usages = [one["usage"] for one in (first, second, third)]
    assert [total(one["message"]["usage"]) for one in (first, second, third)] == [total(usage) for usage in usages]
    assert len({usage["ssmd"]["session"] for usage in usages}) == 1
    for before, usage in pairwise(usages):
        assert usage["ssmd"]["resume"] == "exact"
        assert usage["cache_read_input_tokens"] >= total(before) - 1


def test_its_tool_runner_sends_all_messages(tiny: Daemon) -> None:
    """It asks for a thread that the daemon keeps, and goes on without one at the error that says so."""
    scripted(tiny, f"I look.\n{CALL}", "It is cold.")
    asked = {"model": tiny.model, "max_tokens": 300, "messages": [{"role": "user", "content": "Paris by your loop?"}]}
    message = anthropic("runner", tiny.url, asked)["message"]
    assert [block["text"] for block in message["content"]] == ["It is cold."]
    last = tiny.served.ask("GET", "/ssmd/v1/metrics").json["recent"][-1]
    assert last["cached_tokens"] > 0.7 * last["prompt_tokens"]


def test_whole_beta_and_counted(tiny: Daemon) -> None:
    scripted(tiny, "It rains.")
    asked = {"model": tiny.model, "max_tokens": 30, "messages": [{"role": "user", "content": "a"}]}
    result = anthropic("whole", tiny.url, {**asked, "system": [{"type": "text", "text": "Be short."}], "tools": TOOLS})
    for name in ("message", "beta"):
        assert [block["text"] for block in result[name]["content"]] == ["It rains."]
    assert result["counted"] == total(result["message"]["usage"])
    assert result["request_id"].startswith("req_")


def test_errors_are_typed(artifact: Path, tmp_path: Path) -> None:
    with daemon(artifact, None, settings=Settings(api_key=KEY, offline=True)) as one:
        asked = {"model": one.model, "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}
        mine, bearer = {"api_key": KEY}, {"api_key": None, "auth_token": KEY}
        image = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
        cases: list[tuple[dict[str, Any], str | None, str | None]] = [
            ({"options": {"api_key": "another-key"}}, "AuthenticationError", "authentication_error"),
            ({"options": mine, "model": "claude-9"}, "NotFoundError", "not_found_error"),
            ({"options": bearer, "model": "claude-9", "stream": True}, "NotFoundError", "not_found_error"),
            ({"options": bearer, "messages": []}, "BadRequestError", "invalid_request_error"),
            (
                {"options": mine, "messages": [{"role": "user", "content": [image]}]},
                "BadRequestError",
                "invalid_request_error",
            ),
            ({"options": mine}, None, None),
            ({"options": bearer}, None, None),
        ]
        found = anthropic("failures", one.url, [{**asked, **fields} for fields, *_ in cases])
    for (_, class_, kind), raised in zip(cases, found, strict=True):
        assert raised["class"] == class_, raised
        if class_ is not None:
            assert raised["body"]["type"] == "error"
            assert raised["body"]["error"]["type"] == kind
            assert raised["body"]["error"]["message"]
            assert raised["body"]["request_id"] == raised["request_id"]


def test_it_hears_of_a_shutdown(artifact: Path) -> None:
    with daemon(artifact, None) as one:
        asked = {"model": one.model, "max_tokens": 4000, "messages": [{"role": "user", "content": "a"}]}
        asked["extra_body"] = {"logit_bias": {"0": -100, "2": -100}}
        process = subprocess.Popen(
            command("broken_stream", one.url, asked, MODULE), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        assert process.stderr.readline() == "message_start\n"
        one.engine.shutdown(0)
        said, _ = process.communicate(timeout=60)
    result = json.loads(said)
    assert result["body"]["error"]["type"] == "overloaded_error"
