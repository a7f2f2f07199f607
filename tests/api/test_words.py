"""/tokenize, /detokenize, /apply-template and what is refused for good, over a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from openai_client import openai
from serving import Answer
from several import LLAMA, Several

from ssmd.api.openai.unserved import WHY


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["llama-f32"]


@pytest.fixture(scope="module")
def tiny(artifact: Path) -> Iterator[Daemon]:
    with daemon(artifact, None) as one:
        yield one


def ask(one: Daemon, path: str, **body: Any) -> Answer:
    return one.served.ask("POST", path, body)


def tokens(one: Daemon, content: str, **options: Any) -> list[Any]:
    answer = ask(one, "/tokenize", content=content, **options)
    assert answer.status == 200, answer.body
    found: list[Any] = answer.json["tokens"]
    return found


@pytest.mark.parametrize(
    "text", ["", "Hello, World!", "é🙂 日本語", "  two  spaces\n\n", "\U0010fff0\U00100000", "x" * 9000]
)
def test_there_and_back(text: str, tiny: Daemon) -> None:
    ids = tokens(tiny, text)
    assert ask(tiny, "/detokenize", tokens=ids).json == {"content": text}
    assert ask(tiny, "/detokenize", tokens=[*map(float, ids)]).json == {"content": text}
    pieces = tokens(tiny, text, with_pieces=True)
    assert [piece["id"] for piece in pieces] == ids
    said = b"".join(p.encode() if isinstance(p := one["piece"], str) else bytes(p) for one in pieces)
    assert said == text.encode()


def test_what_comes_to_too_many_tokens_is_not_read_to_its_end(tiny: Daemon) -> None:
    answer = ask(tiny, "/tokenize", content="a b " * 200_000)
    assert (answer.status, answer.error["param"]) == (400, "content")


def test_control_tokens_count_unless_they_are_not_to(tiny: Daemon) -> None:
    control = "<|im_start|>"
    [one] = tokens(tiny, control)
    assert tiny.engine.words.piece(one) == control.encode()
    plain = tokens(tiny, control, parse_special=False)
    assert one not in plain
    for ids in ([one], plain):
        assert ask(tiny, "/detokenize", tokens=ids).json == {"content": control}


def test_a_template_is_applied_as_a_chat_reads_it(tiny: Daemon) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|im_end|> there"}]
    prompt = ask(tiny, "/apply-template", messages=messages).json["prompt"]
    assert "hi <|im_end|> there" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    chat = tiny.served.ask("POST", "/v1/chat/completions", {**tiny.body(), "messages": messages, "max_tokens": 1})
    # In a prompt the client's own word counts as the control token that it names; in a message it does not.
    assert chat.json["usage"]["prompt_tokens"] > len(tokens(tiny, prompt))
    assert ask(tiny, "/apply-template", messages=[]).error["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 1}, "content"),
        ("/tokenize", {"content": "x", "add_special": "yes"}, "add_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**7]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/tokenize", {"content": "x", "model": "gpt-2"}, "model"),
        ("/apply-template", {"messages": "x"}, "messages"),
        ("/apply-template", {"messages": [], "mirostat": 2}, "mirostat"),
    ],
)
def test_nonsense_is_refused_by_name(path: str, body: dict[str, Any], param: str, tiny: Daemon) -> None:
    answer = ask(tiny, path, **body)
    assert answer.status in (400, 404), answer.body
    assert answer.error["param"] == param


def test_what_is_ignored_is_named(tiny: Daemon) -> None:
    assert ask(tiny, "/tokenize", content="x", surprise=1).headers["x-ssmd-ignored"] == "surprise"
    assert "x-ssmd-ignored" not in ask(tiny, "/tokenize", content="x").headers


def test_of_several_models_the_one_that_is_named_or_loaded(three: Several) -> None:
    answer = three.ask("POST", "/tokenize", {"content": "x"})
    assert (answer.status, answer.error["param"]) == (400, "model")
    named = three.ask("POST", "/tokenize", {"content": "x", "model": LLAMA})
    assert named.status == 200
    assert three.row(LLAMA)["state"] == "loaded"
    assert three.ask("POST", "/tokenize", {"content": "x"}).json == named.json


@pytest.mark.parametrize("path", sorted(WHY))
def test_what_is_not_served_says_why(path: str, tiny: Daemon) -> None:
    answer = ask(tiny, path, input="x", model="tiny")
    assert (answer.status, answer.error["code"]) == (404, "not_supported")
    assert WHY[path] in answer.error["message"]


def test_the_sdk_is_told_why_there_are_no_embeddings(tiny: Daemon) -> None:
    found = openai("embeddings", tiny.url, {"input": "x", "model": tiny.model})
    assert found == {"class": "NotFoundError", "code": "not_supported"}
