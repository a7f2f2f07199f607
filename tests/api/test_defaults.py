"""Sampling defaults over HTTP: a request that says nothing has the model's, on every protocol; what it says wins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, daemon
from saying import Saying
from serving import Served, serving

from ssmd.api.openai.chat import read_chat, to_request
from ssmd.app import create_app
from ssmd.config import Settings
from ssmd.engine.host.opening import close_host, open_host
from ssmd.engine.sampling.params import Dry
from ssmd.engine.sampling.sampler import DryPenalty
from ssmd.model.defaults import BREAKERS, FILE, Default, write

COMPLETIONS = "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story"}]},
    COMPLETIONS: {"prompt": "Tell me a story"},
}
SEEDED = {"seed": 11, "max_tokens": 12, "logit_bias": {"0": -100, "2": -100}, "store": False}
SOURCE = "generation_config.json of acme/tiny"
STOP = 2  # <|im_end|> of the tiny model
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
LONG = {"type": "array", "items": {"enum": [12, 34]}, "minItems": 20, "maxItems": 20}
FLIES = {"properties": {"a": {"type": "string", "pattern": "^(x|y){20}$"}}, "required": ["a"]}
FLY = [{"type": "function", "function": {"name": "fly", "parameters": FLIES}}]
ARGUMENTS = '{"city": "Paris Paris Paris Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
STRONGEST = {"dry_multiplier": 100, "dry_base": 100, "dry_allowed_length": 1}


def with_defaults(artifact: Path, folder: Path, **values: float) -> Path:
    """A copy of an artifact that has these defaults."""
    shutil.copytree(artifact, folder)
    write(folder, {name: Default(value, SOURCE) for name, value in values.items()})
    return folder


@contextmanager
def served(path: Path, **settings: Any) -> Iterator[Served]:
    """A daemon of one artifact with settings of its own."""
    given = Settings(**settings)
    host = open_host(given, str(path), keep=False)
    host.ready()
    try:
        with serving(create_app(host, given)) as one:
            yield one
    finally:
        close_host(host)


def said(one: Served, path: str, **fields: Any) -> str:
    """The answer to the question of an endpoint, in as few fields as can be."""
    name = one.ask("GET", "/v1/models").json["data"][0]["id"]
    answer = one.ask("POST", path, {"model": name, **ASKED[path], **SEEDED, **fields})
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


@pytest.fixture(scope="module")
def plain(artifacts: TinyArtifacts) -> Iterator[Served]:
    """An artifact of before: no file of defaults lies in it."""
    assert not (artifacts["llama-f32"] / FILE).exists()
    with served(artifacts["llama-f32"]) as one:
        yield one


@pytest.fixture(scope="module")
def greedy(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its model says top_k 1: the likeliest token, always."""
    with served(with_defaults(artifacts["llama-f32"], tmp_path_factory.mktemp("greedy") / "tiny", top_k=1)) as one:
        yield one


@pytest.mark.parametrize("path", ASKED)
def test_a_request_that_says_nothing_has_the_models(path: str, plain: Served, greedy: Served) -> None:
    likeliest = said(plain, path, temperature=0)
    assert said(greedy, path) == likeliest
    assert said(plain, path) != likeliest


@pytest.mark.parametrize("path", ASKED)
def test_what_a_request_says_wins(path: str, plain: Served, greedy: Served) -> None:
    drawn = said(plain, path)
    assert said(greedy, path, top_k=0) == said(greedy, path, top_k=-1) == drawn
    assert said(greedy, path, top_k=0, temperature=1) == drawn
    assert said(greedy, path, top_k=None) != drawn  # which says nothing


def test_texts_are_a_default_too() -> None:
    """Sequences that go over lines count for one model; a request can have them broken all the same."""
    values: dict[str, Any] = {"dry_multiplier": 0.8, BREAKERS: ()}
    defaults = {name: Default(value, SOURCE) for name, value in values.items()}
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    for fields, breakers in (({}, ()), ({BREAKERS: ["."]}, (".",)), ({BREAKERS: None}, ())):
        dry = to_request(read_chat({**asked, **fields}), 300, defaults).sampling.dry
        assert dry == Dry(0.8, breakers=breakers, prompt=False)


def test_a_models_dry_penalty_spares_copies_of_the_prompt() -> None:
    """It counts the answer alone. One that a request asks for counts the prompt too, as in llama.cpp."""
    prompt = np.arange(20, dtype=np.int32)
    defaults = {"dry_multiplier": Default(0.8, SOURCE), BREAKERS: Default((), SOURCE)}
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    for fields, penalized in (({}, False), ({"dry_multiplier": 0.8}, True)):
        dry = to_request(read_chat({**asked, **fields}), 300, defaults).sampling.dry
        assert dry is not None
        penalty, logits = DryPenalty(dry, (), prompt), np.zeros(300, np.float32)
        for token in range(10):
            penalty.add(token)
        penalty.penalize(logits)
        assert (logits[10] < 0) == penalized
        for token in (*range(10), 0):  # the answer goes round
            penalty.add(token)
        logits[:] = 0
        penalty.penalize(logits)
        assert logits[1] < 0


@pytest.mark.parametrize("path", ASKED)
def test_the_models_longest_answer_is_a_default(path: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with served(with_defaults(artifacts["llama-f32"], tmp_path / "tiny", max_tokens=5)) as one:
        body = {"model": "llama", **ASKED[path], "logit_bias": SEEDED["logit_bias"]}
        counted = [
            one.ask("POST", path, {**body, **more}).json["usage"]["completion_tokens"]
            for more in ({}, {"max_tokens": 7})
        ]
    assert counted == [5, 7]


def test_a_setting_wins_over_the_model(artifacts: TinyArtifacts, tmp_path: Path, plain: Served) -> None:
    tiny = with_defaults(artifacts["llama-f32"], tmp_path / "tiny", top_k=1, top_p=0.9)
    with served(tiny, default=["top_k=0", "temperature=0.5"]) as one:
        assert said(one, CHAT) == said(plain, CHAT, temperature=0.5, top_p=0.9)
        defaults = one.ask("GET", "/v1/models/llama").json["ssmd"]["defaults"]
    assert defaults == {
        "top_k": {"value": 0, "source": "the setting `default`"},
        "top_p": {"value": 0.9, "source": SOURCE},
        "temperature": {"value": 0.5, "source": "the setting `default`"},
    }


def test_a_model_tells_its_defaults_and_their_source(plain: Served, greedy: Served) -> None:
    for path in ("/v1/models", "/v1/models/llama"):
        entry = greedy.ask("GET", path).json
        entry = entry["data"][0] if "data" in entry else entry
        assert entry["ssmd"]["defaults"] == {"top_k": {"value": 1, "source": SOURCE}}
    assert plain.ask("GET", "/v1/models").json["data"][0]["ssmd"]["defaults"] == {}


def test_defaults_that_change_count_at_once(artifacts: TinyArtifacts, tmp_path: Path, plain: Served) -> None:
    tiny = with_defaults(artifacts["llama-f32"], tmp_path / "tiny")
    with served(tiny) as one:
        assert said(one, CHAT) == said(plain, CHAT)
        write(tiny, {"top_k": Default(1, SOURCE)})
        assert said(one, CHAT) == said(plain, CHAT, temperature=0)


@pytest.fixture(scope="module")
def penalized(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("penalized")
    with served(with_defaults(artifacts["llama-f32"], folder / "tiny", **STRONGEST)) as one:
        yield one


@pytest.fixture(scope="module")
def saying(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The same defaults, of a model that says what it is to."""
    folder = tmp_path_factory.mktemp("saying")
    tiny = with_defaults(artifacts["mamba-f32"], folder / "tiny", **STRONGEST)
    with daemon(tiny, folder / "data", as_program=Saying) as one:
        yield one


def scripted(one: Daemon, text: str, **fields: Any) -> dict[str, Any]:
    """The choice of an answer whose likeliest tokens are those of a text."""
    program = one.engine.program
    assert isinstance(program, Saying)
    program.say([*one.engine._texts.tokenizer.encode(text), STOP])
    answer = one.chat("What about Paris?", **{"logit_bias": {}, "max_tokens": 300, "store": False, **fields})
    assert answer.status == 200, answer.body
    return dict(answer.json["choices"][0])


def test_penalties_do_not_reach_into_a_call(saying: Daemon) -> None:
    choice = scripted(saying, CALL, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LONG}}},
        {"guided_regex": "(ab|cd){30}"},
        {"tools": FLY, "tool_choice": "required"},
        {"tools": FLY, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
    ],
    ids=["schema", "regex", "required", "named"],
)
def test_penalties_do_not_reach_into_a_grammar(fields: dict[str, Any], plain: Served, penalized: Served) -> None:
    asked = {**fields, "temperature": 0, "max_tokens": 200}
    free = answered(plain, **asked)
    assert answered(penalized, **asked) == free
    assert answered(plain, **asked, **STRONGEST) == free


def answered(one: Served, **fields: Any) -> dict[str, Any]:
    """The message of an answer, its calls without their ids."""
    answer = one.ask("POST", CHAT, {"model": "llama", **ASKED[CHAT], "store": False, **fields})
    assert answer.status == 200, answer.body
    message = dict(answer.json["choices"][0]["message"])
    return message | {"tool_calls": [call["function"] for call in message.get("tool_calls", [])]}


def test_penalties_do_reach_what_is_said(saying: Daemon, plain: Served, penalized: Served) -> None:
    text = "Paris Paris Paris Paris Paris Paris Paris Paris"
    off = {"dry_multiplier": 0}
    assert scripted(saying, text, **off)["message"]["content"] == text
    assert scripted(saying, text)["message"]["content"] != text
    assert answered(plain, temperature=0, max_tokens=50) != answered(penalized, temperature=0, max_tokens=50)
