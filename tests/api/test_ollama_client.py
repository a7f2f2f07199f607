"""The real ollama client against the daemon, and a conversation that goes on after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from api.test_anthropic import LONG
from api.test_calls import CALL, SECOND, TOOLS, scripted
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from forked import DaemonProcess
from openai_client import client
from saying import Saying

from ssmd.config import Settings


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["mamba-f32"]


@pytest.fixture(scope="module")
def tiny(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    settings = Settings(offline=True)
    with daemon(artifact, tmp_path_factory.mktemp("data"), settings=settings, as_program=Saying) as one:
        yield one


ollama = partial(client, module="ollama_chat")


def test_it_holds_a_conversation_with_calls(tiny: Daemon) -> None:
    """Its calls have no ids when they come back."""
    scripted(tiny, f"<think>\nParis, then.\n</think>\n\nI look.\n{CALL}\n{SECOND}", "It is cold.")
    turns = ["Paris? " + LONG, ["12 degrees", "none"], "And Rome?"]
    asked = {"model": tiny.model, "tools": TOOLS, "think": True, "options": {"temperature": 0, "num_predict": 300}}
    found = ollama("conversation", tiny.url, {**asked, "turns": turns})
    first, second, third = (one["message"] for one in found)
    assert (first["thinking"], first["content"]) == ("Paris, then.", "I look.")
    assert [call["function"] for call in first["tool_calls"]] == [
        {"name": "get_weather", "arguments": {"city": "Paris"}},
        {"name": "f", "arguments": {}},
    ]
    assert second["content"] == third["content"] == "It is cold."
    lasts = [one["last"] for one in found]
    sessions = tiny.served.ask("GET", "/ssmd/v1/sessions").json["data"]
    assert [session["turn_count"] for session in sessions] == [3]
    cached = [row["cached_tokens"] for row in tiny.engine.metrics.snapshot()["recent"][-3:]]
    for (before, _), (_, now) in pairwise(zip(lasts, cached, strict=True)):
        assert now >= before["prompt_eval_count"] - 1
    assert all(last["done_reason"] == "stop" and last["total_duration"] > 0 for last in lasts)


def test_its_other_methods_are_answered(tiny: Daemon) -> None:
    found = ollama("surface", tiny.url, {"model": tiny.model})
    assert found["list"] == [f"{tiny.model}:latest"]
    assert found["show"]["capabilities"] == ["completion", "tools"]
    assert found["show"]["info"]["general.architecture"] == "mamba"
    assert "mamba.context_length" not in found["show"]["info"], "nothing bounds it"
    [[name, until, context]] = found["ps"]
    assert (name, context) == (f"{tiny.model}:latest", 0)
    assert until > "2026"
    assert found["whole"]["done_reason"] == "length"
    assert found["contexts"][1] > found["contexts"][0] > 5
    assert found["load"] == ["load", "unload"]


def test_its_errors_have_a_status_and_a_text(tiny: Daemon) -> None:
    messages = [{"role": "user", "content": "a"}]
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("chat", {"model": "gpt-2", "messages": messages}, 404, "no model 'gpt-2'"),
        ("chat", {"model": "gpt-2", "messages": messages, "stream": True}, 404, "no model 'gpt-2'"),
        ("generate", {"model": tiny.model, "prompt": "def f(", "suffix": "x"}, 400, "'suffix' is not supported"),
        ("generate", {"model": tiny.model, "prompt": "a", "images": ["aGk="]}, 400, "images are not supported"),
        ("embed", {"model": tiny.model, "input": "x"}, 400, "does not support embeddings"),
        ("embeddings", {"model": tiny.model, "prompt": "x"}, 400, "does not support embeddings"),
        ("show", {"model": "gpt-2"}, 404, "gpt-2"),
        ("delete", {"model": "gpt-2"}, 404, "gpt-2"),
        ("delete", {"model": tiny.model}, 400, "cannot be removed here"),
        ("pull", {"model": "gpt-2"}, 400, "cannot be pulled"),
        ("pull", {"model": "gpt-2", "stream": True}, 400, "cannot be pulled"),
        ("copy", {"source": tiny.model, "destination": "b"}, 501, "not possible here"),
        ("create", {"model": "b", "from_": tiny.model}, 501, "not possible here"),
        ("push", {"model": tiny.model}, 501, "ssmd has no registry"),
    ]
    found = ollama("failures", tiny.url, [[method, arguments] for method, arguments, *_ in cases])
    for (method, _, status, words), (its, text) in zip(cases, found, strict=True):
        assert its == status, (method, text)
        assert words in text


def test_a_killed_daemon_goes_on_with_the_conversation(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with DaemonProcess(artifacts["granite-int8"], tmp_path / "data") as one:
        model = one.get("/v1/models")[1]["data"][0]["id"]
        messages = [{"role": "user", "content": "Tell me a story about a river, a bridge and its people."}]
        total = None
        for question in ("And then?", "And after that?", "And now?"):
            body = {"model": model, "messages": messages, "stream": False, "options": {"num_predict": 16, "seed": 7}}
            found = one.post("/api/chat", body)
            if total is not None:  # after a kill
                assert found["ssmd"]["resume"] == "exact"
                assert found["ssmd"]["cached_tokens"] >= total - 1
            total = found["prompt_eval_count"]
            messages += [found["message"], {"role": "user", "content": question}]
            if question != "And now?":
                one.kill()
                one.start()
