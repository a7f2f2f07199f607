"""Fields and options of Ollama's chat and generate: what each asks for, what is named, and the docs' table of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from api.test_anthropic import LONG
from api.test_ollama import answered, ask, options, prompt, user, whole_of
from conftest import ROOT, TinyArtifacts
from daemon import NO_END, Daemon, daemon
from saying import Saying

from ssmd.api.http.errors import IGNORED
from ssmd.api.ollama.body import OllamaChatBody, OllamaGenerateBody, chat_request
from ssmd.model.artifact import SpecialTokens
from ssmd.text.template import ChatTemplate

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], None, as_program=Saying) as one:
        yield one


def test_options_that_do_nothing_are_named(tiny: Daemon) -> None:
    """As Home Assistant and Open WebUI send them. None is refused, whatever its value."""
    more = {"num_ctx": 8192, "mirostat": 2, "num_gpu": 99, "use_mmap": True, "of_tomorrow": {"a": [1]}, "tfs_z": None}
    answer = ask(tiny, user("a"), said="b", store=False, options=options(**more), shift=True)
    named = [
        "options.mirostat",
        "options.num_ctx",
        "options.num_gpu",
        "options.of_tomorrow",
        "options.use_mmap",
        "shift",
    ]
    assert sorted(whole_of(answer)["ssmd"]["ignored"]) == named
    assert sorted(answer.headers[IGNORED].split(", ")) == named


def test_a_negative_seed_is_any() -> None:
    def seed(given: Any) -> int | None:
        body = OllamaChatBody(model="tiny", messages=[user("a")], options={"seed": given})
        return chat_request(body, 1000, {}, set(), truncate=False, dropped=None).sampling.seed

    assert [seed(given) for given in (-1, -7, 0, 7, None)] == [None, None, 0, 7, None]


def test_options_are_those_of_chat(tiny: Daemon) -> None:
    """A seed draws what the same seed draws in chat, with the same options."""
    assert isinstance(tiny.engine.program, Saying)
    tiny.engine.program.say()  # the model's own words
    mine = {"temperature": 1.5, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "num_predict": 12}
    more = {"repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": NO_END}
    ollama = whole_of(ask(tiny, user("Tell me"), store=False, options={**mine, **more}))
    theirs = {name: value for name, value in mine.items() if name != "num_predict"}
    chat = tiny.chat("Tell me", store=False, max_tokens=12, **theirs, **more).json
    assert ollama["message"]["content"] == chat["choices"][0]["message"]["content"]
    assert ollama["eval_count"] == chat["usage"]["completion_tokens"] == 12
    other = whole_of(ask(tiny, user("Tell me"), store=False, options={**mine, **more, "seed": 8}))
    assert other["message"]["content"] != ollama["message"]["content"]


def test_a_format_is_a_grammar(tiny: Daemon) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
    found = whole_of(ask(tiny, user("a"), said="", store=False, format=schema))
    assert json.loads(found["message"]["content"]) == {"city": "Bonn"}
    found = whole_of(ask(tiny, user("a"), said='{"a": 1}', store=False, format="json", options=options(num_predict=40)))
    assert found["message"]["content"].startswith("{")
    generated = whole_of(prompt(tiny, "a", "", store=False, format=schema))
    assert json.loads(generated["response"]) == {"city": "Bonn"}
    for free in ("", None):
        assert whole_of(ask(tiny, user("a"), said="b", store=False, format=free))["message"]["content"] == "b"


@pytest.mark.parametrize(
    ("think", "variables", "budget"),
    [
        (None, {}, None),
        ("", {}, None),
        (True, {"enable_thinking": True}, None),
        (False, {"enable_thinking": False}, 0),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}, None),
    ],
)
def test_thinking_is_asked_for_or_not(think: Any, variables: Fields, budget: int | None) -> None:
    body = OllamaChatBody(model="tiny", messages=[user("a")], think=think)
    asked = chat_request(body, 1000, {}, set(), truncate=False, dropped=None)
    assert (asked.given.variables, asked.thinking_budget) == (variables, budget)


def test_thinking_that_a_template_lacks_is_named(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def ignored(think: Any) -> Any:
        return whole_of(ask(tiny, user("a"), said="b", store=False, think=think))["ssmd"].get("ignored")

    assert [ignored(think) for think in (True, False, "low", None)] == [["think"], None, ["think.level"], None]
    source = tiny.engine._texts.template.source
    knows = ChatTemplate(source + "{% if enable_thinking %}{% endif %}", SpecialTokens())
    monkeypatch.setattr(type(tiny.engine), "knows", lambda _, name: name in knows.variables)
    assert [ignored(think) for think in (True, "low")] == [None, ["think.level"]]


def test_a_prompt_too_long_is_cut_or_refused(tiny: Daemon, artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None) as one:
        history = [message for i in range(40) for message in (user(f"{i} " + LONG), answered("ok"))]
        refused = ask(one, *history, user("end"), truncate=False)
        assert (refused.status, set(refused.json)) == (400, {"error"})
        assert "with truncate: true" in refused.json["error"]
        found = whole_of(ask(one, *history, user("end"), truncate=True, options=options(num_predict=1)))
        assert found["ssmd"]["cut_messages"] > 0
        assert found["prompt_eval_count"] < 3000


# docs/ollama.md

_ROW = re.compile(r"^\| `(\w+)` \| (both|chat|generate) \| `(.+?)` \| (honoured|ignored|refused) \|", re.MULTILINE)
ROWS = _ROW.findall((ROOT / "docs" / "ollama.md").read_text("utf-8"))
ENDPOINTS = {"both": ("chat", "generate"), "chat": ("chat",), "generate": ("generate",)}
ASKED = [(name, at, example, what) for name, of, example, what in ROWS for at in ENDPOINTS[of]]


@pytest.mark.parametrize(("name", "at", "example", "what"), ASKED, ids=[f"{row[0]} of {row[1]}" for row in ASKED])
def test_a_row_of_the_fields_holds(tiny: Daemon, name: str, at: str, example: str, what: str) -> None:
    needed: Fields = {"messages": [user("a")]} if at == "chat" else {"prompt": "a"}
    body = {"model": tiny.model, "store": False, "options": {"num_predict": 2}, "stream": False, "logprobs": True}
    given = {name: tiny.model if name == "model" else json.loads(example)}
    answer = tiny.served.ask("POST", f"/api/{at}", {**body, **needed, **given})
    if what == "refused":
        assert (answer.status, name in answer.json["error"], "not supported" in answer.json["error"]) == (
            400,
            True,
            True,
        )
        return
    assert answer.status == 200, answer.body
    assert answer.headers.get(IGNORED) == (name if what == "ignored" else None)


def test_the_fields_are_all_in_the_table() -> None:
    for at, shape in (("chat", OllamaChatBody), ("generate", OllamaGenerateBody)):
        assert set(shape.model_fields) <= {name for name, where, *_ in ASKED if where == at}
    assert len(ROWS) > 20
