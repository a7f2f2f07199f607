"""The real openai client against the daemon."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon, idle, soon, text_of, whole_text
from openai_client import command, openai

from ssmd.engine.decode.generation import Generation
from ssmd.runtime.protocol import Handle, Logits


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["llama-f32"]


@pytest.fixture(scope="module")
def tiny(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifact, tmp_path_factory.mktemp("data")) as one:
        yield one


def test_whole(tiny: Daemon) -> None:
    result = openai("whole", tiny.url, tiny.body("from the SDK", extra_body={"top_k": 5}))
    assert result["completion"]["choices"][0]["message"]["role"] == "assistant"
    assert result["completion"]["usage"]["ssmd"]["session"] == result["headers"]["x-ssmd-session"]
    assert result["completion"]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_stream(tiny: Daemon) -> None:
    body = tiny.body("from the SDK", stream_options={"include_usage": True}, max_tokens=100, store=False)
    result = openai("stream", tiny.url, body)
    assert text_of(result["chunks"]) == whole_text(tiny.chat("from the SDK", max_tokens=100, store=False))
    assert result["chunks"][-1]["usage"]["completion_tokens"] == 100
    assert max(b - a for a, b in itertools.pairwise(result["times"])) < result["times"][-1] / 2  # it came bit by bit


def test_helper(tiny: Daemon) -> None:
    stop = whole_text(tiny.chat("helper", store=False))[6:9]
    asked = tiny.body("helper", n=2, logprobs=True, top_logprobs=2, store=False, stop=stop)
    result = openai("helper", tiny.url, asked)
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(result["kinds"])
    assert [c["finish_reason"] for c in result["completion"]["choices"]] == ["stop", "stop"]


def test_models(tiny: Daemon) -> None:
    result = openai("models", tiny.url, {})
    assert result["all"] == [result["one"]]
    assert result["one"]["id"] == tiny.model


def test_errors_are_typed(tiny: Daemon) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    cases = [
        (tiny.body(model="gpt-9"), "NotFoundError", "model_not_found", "model"),
        (tiny.body(messages=[]), "BadRequestError", "invalid_value", "messages"),
        (
            tiny.body(messages=[{"role": "user", "content": [image]}]),
            "BadRequestError",
            "unsupported_parameter",
            "messages[0].content[0]",
        ),
        (tiny.body(prediction={"type": "content"}), "BadRequestError", "unsupported_parameter", "prediction"),
        (tiny.body("x " * 3000), "BadRequestError", "context_length_exceeded", "messages"),
        (tiny.body("x " * 3000, stream=True), "BadRequestError", "context_length_exceeded", "messages"),
        (tiny.body(extra_body={"session": "unknown"}), "NotFoundError", "session_not_found", "session"),
        (tiny.body(extra_body={"mirostat": 2}), "BadRequestError", "unsupported_parameter", "mirostat"),
    ]
    raised = openai("failures", tiny.url, [body for body, *_ in cases])
    for (_, kind, code, param), found in zip(cases, raised, strict=True):
        assert (found["class"], found["code"], found["param"]) == (kind, code, param), found
        assert found["message"]
        assert found["request_id"].startswith("req_")


def test_two_clients_interleave(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, decode = tiny.engine.submit, tiny.engine.program.decode
    asked: list[Generation] = []
    both = threading.Event()
    steps: list[int] = []  # how many answers each of them went on with

    def submitted(*args: Any, **options: Any) -> Generation:
        asked.append(submit(*args, **options))
        if len(asked) == 2:
            both.set()
        return asked[-1]

    def decoded(handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        steps.append(len(handles))
        if len(steps) == 100:  # a busy client may not have asked the second yet when a tiny model's first is over
            assert both.wait(60)
        return decode(handles, tokens)

    monkeypatch.setattr(tiny.engine, "submit", submitted)
    monkeypatch.setattr(tiny.engine.program, "decode", decoded)
    first, second = openai("together", tiny.url, tiny.body(max_tokens=400, store=False))
    assert steps.count(2) > 250
    assert first[0] < second[0] < first[-1]
    shared = [t for t in first if second[0] < t < second[-1]]
    assert len(shared) > 10


def test_leaving_stops_its_generation(tiny: Daemon) -> None:
    def generated() -> int:
        return int(tiny.engine.metrics.snapshot()["generated_tokens"])

    assert len(openai("leave", tiny.url, tiny.body("I leave", max_tokens=450, n=4))) == 3
    soon(lambda: idle(tiny), within_s=2)
    before = generated()
    time.sleep(0.3)
    assert generated() == before


def test_it_hears_of_a_shutdown(artifact: Path) -> None:
    with daemon(artifact, None) as one:
        arguments = command("broken_stream", one.url, one.body(max_tokens=450, n=4))
        client = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert client.stderr is not None
        assert client.stderr.readline() == "chunk\n"
        one.engine.shutdown(0)
        said, _ = client.communicate(timeout=60)
    result = json.loads(said)
    assert (result["class"], result["code"]) == ("APIError", "shutting_down")
