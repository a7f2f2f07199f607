"""Aliases over HTTP: clients that ask for a fixed name of another server's model get an installed one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import TinyArtifacts
from several import GRANITE, LLAMA, OTHER, Several, models_folder, several

ALIASES = "claude-3*=gone,claude-*=granite,gpt-5=llama,near=llama@openvino,llama=granite,to=near,gpt-*=llama"
MODELS = "/ssmd/v1/models"


@pytest.fixture(scope="module")
def aliased(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    with several(models_folder(artifacts, tmp_path_factory.mktemp("aliased") / "models"), aliases=ALIASES) as one:
        yield one


def ask(one: Several, path: str, asked: str, **fields: Any) -> Any:
    body = {"model": asked, "max_tokens": 2, **fields}
    answer = one.ask("POST", path, body)
    assert answer.status == 200, answer.body
    return answer


def messages(text: str = "Hello") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ("claude-opus-4[1m]", GRANITE),
        ("claude-sonnet-4@20250514", GRANITE),
        ("gpt-5", LLAMA),
        ("gpt-5-mini", LLAMA),
        ("near", OTHER),
        ("llama", LLAMA),  # an installed name wins
        ("llama@openvino", OTHER),
    ],
)
def test_asked_name_is_in_the_answer(asked: str, answers: str, aliased: Several) -> None:
    chat = ask(aliased, "/v1/chat/completions", asked, messages=messages()).json
    assert (chat["model"], chat["usage"]["ssmd"]["model"]) == (asked, answers)
    raw = ask(aliased, "/v1/completions", asked, prompt="Hello").json
    assert (raw["model"], raw["usage"]["ssmd"]["model"]) == (asked, answers)
    message = ask(aliased, "/v1/messages", asked, messages=messages()).json
    assert (message["model"], message["usage"]["ssmd"]["model"]) == (asked, answers)
    response = ask(aliased, "/v1/responses", asked, input="Hello", max_tokens=None, max_output_tokens=2).json
    assert (response["model"], response["usage"]["ssmd"]["model"]) == (asked, answers)
    assert aliased.ask("GET", f"/v1/models/{asked}").json["id"] == asked


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_stream_names_the_asked_model(path: str, aliased: Several) -> None:
    more = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    raw = ask(aliased, path, "claude-haiku-9", messages=messages(), stream=True, **more).body
    lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    named = {event["model"] for event in events if "model" in event}
    named |= {event["message"]["model"] for event in events if "message" in event}
    assert named == {"claude-haiku-9"}
    used = [event["usage"]["ssmd"]["model"] for event in events if "ssmd" in (event.get("usage") or {})]
    assert used == [GRANITE]


def test_tokens_are_counted_by_an_alias(aliased: Several) -> None:
    counted = [
        ask(aliased, "/v1/messages/count_tokens", name, messages=messages(), max_tokens=None).json["input_tokens"]
        for name in ("claude-x", "granite")
    ]
    assert counted[0] == counted[1] > 0


def test_conversation_goes_on_by_another_name(aliased: Several) -> None:
    """The state belongs to the model, and the name to the request."""
    first = ask(aliased, "/v1/chat/completions", "gpt-5", messages=messages("On and on")).json
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    again = [*messages("On and on"), said, *messages("More")]
    second = ask(aliased, "/v1/chat/completions", "llama", messages=again).json
    assert second["usage"]["ssmd"]["resume"] == "exact"
    assert second["usage"]["ssmd"]["session"] == first["usage"]["ssmd"]["session"]


def test_single_names_are_listed_with_their_models(aliased: Several) -> None:
    """Patterns cannot be listed. An alias in vain, and one that a model's own name hides, is not."""
    listed = aliased.ask("GET", "/v1/models").json["data"]
    assert [entry["id"] for entry in listed] == ["granite", "llama", LLAMA, OTHER, "gpt-5", "near"]
    assert [entry["ssmd"]["model"] for entry in listed[-2:]] == [LLAMA, OTHER]
    assert listed[0]["ssmd"]["model"] == GRANITE


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [("claude-3-haiku", "gone"), ("to", "near")],  # not installed; another alias, so that none can go in a circle
)
def test_alias_in_vain_is_told(asked: str, wanted: str, aliased: Several) -> None:
    error = aliased.chat(asked).error
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert f"'{asked}' is an alias for {wanted}, which is not installed here" in error["message"]
    assert "name an installed model in the setting aliases: granite, llama" in error["message"]


def test_unknown_name_is_told_how_to_alias_it(aliased: Several) -> None:
    error = aliased.chat("lama").error
    assert "did you mean llama? " in error["message"]
    assert error["message"].endswith("; to serve one by this name, add lama=llama to SSMD_ALIASES")
    hostile = aliased.chat("a=b,c").error
    assert (hostile["code"], "SSMD_ALIASES" in hostile["message"]) == ("model_not_found", False)
    assert aliased.chat("llama@wgpu").error["message"].count("SSMD_ALIASES") == 0


def test_management_needs_the_own_name(aliased: Several) -> None:
    """A wide pattern must not let a misspelt name unload another model."""
    asked = [("POST", f"{MODELS}/gpt-x/load", None), ("POST", f"{MODELS}/gpt-x/unload", None)]
    for method, path, body in [*asked, ("PATCH", f"{MODELS}/gpt-x", {"pinned": True})]:
        answer = aliased.ask(method, path, body)
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    removed = aliased.ask("DELETE", "/api/delete", {"model": "gpt-x"})
    assert removed.status == 404
    assert "gpt-x" in removed.json["error"]


@pytest.mark.parametrize(
    ("asked", "answers"), [("gpt-oss:20b", LLAMA), ("gpt-5:latest", LLAMA), ("granite:latest", GRANITE)]
)
def test_alias_and_tag(asked: str, answers: str, aliased: Several) -> None:
    """An installed name wins with a tag too, and Ollama's answers have the asked name."""
    found = ask(aliased, "/api/chat", asked, messages=messages(), max_tokens=None, stream=False).json
    assert (found["model"], found["ssmd"]["model"]) == (asked, answers)


def test_aliased_names_take_no_memory(aliased: Several) -> None:
    """Clients choose the names, so none of them is remembered."""
    shelf = aliased.host.shelf
    shelf.find("gpt-0")
    before = len(shelf._chosen)
    for i in range(50):
        assert shelf.find(f"gpt-{i}").id == LLAMA
    assert len(shelf._chosen) == before
