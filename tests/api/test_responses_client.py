"""The real openai client's responses against the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from api.test_anthropic import LONG
from api.test_calls import CALL, SECOND, scripted
from api.test_responses import TOOLS, cached
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from openai_client import client
from saying import Saying


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


openai = partial(client, module="openai_responses")


def test_its_helper_holds_a_conversation_with_calls(tiny: Daemon) -> None:
    """The client puts each stream together, and sends its own items back."""
    scripted(tiny, f"<think>\nParis, then.\n</think>\n\nI look.\n{CALL}\n{SECOND}", "It is cold.")
    fields = {"model": tiny.model, "max_output_tokens": 300, "tools": TOOLS}
    turns = [{**fields, "said": said} for said in ("Paris? " + LONG, ["12 degrees", ""], "And Rome?")]
    first, second, third = openai("conversation", tiny.url, turns)
    assert {
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.function_call_arguments.delta",
        "response.completed",
    } <= set(first["kinds"])
    assert [item["type"] for item in first["response"]["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [one["text"] for one in (first, second, third)] == ["I look.", "It is cold.", "It is cold."]
    usages = [one["response"]["usage"] for one in (first, second, third)]
    assert len({usage["ssmd"]["session"] for usage in usages}) == 1
    for before, usage in pairwise(usages):
        assert usage["ssmd"]["resume"] == "exact"
        assert cached(usage) >= before["input_tokens"] - 1


def test_whole_parsed_counted_and_raw(tiny: Daemon) -> None:
    scripted(tiny, '{"city":"Bonn"}')
    asked = {"model": tiny.model, "max_output_tokens": 30, "input": "a", "instructions": "Be short."}
    result = openai("whole", tiny.url, asked)
    assert result["text"] == '{"city":"Bonn"}'
    assert result["parsed"] == "Bonn"
    assert result["counted"] == result["response"]["usage"]["input_tokens"]
    assert (result["events"][0], result["events"][-1]) == ("response.created", "response.completed")


def test_errors_are_typed(tiny: Daemon) -> None:
    image = {"type": "input_image", "image_url": "https://example.org/x.png", "detail": "auto"}
    requests: list[dict[str, Any]] = [
        {"model": "gpt-9", "input": "a"},
        {"model": tiny.model, "input": [{"role": "user", "content": [image]}]},
        {"model": tiny.model, "input": "a", "background": True, "store": False},
    ]
    assert openai("failures", tiny.url, requests) == [
        {"class": "NotFoundError", "param": "model", "code": "model_not_found"},
        {"class": "BadRequestError", "param": "input[0].content[0]", "code": "unsupported_parameter"},
        {"class": "BadRequestError", "param": "background", "code": "invalid_value"},
    ]
