"""Tools of responses: functions, custom tools and their grammars, namespaces, and tools that are left out."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from api.test_anthropic import LONG
from api.test_calls import CALL, SECOND
from api.test_responses import (
    HOSTED,
    TOOLS,
    ask,
    cached,
    events_of,
    output,
    put_together,
    response_of,
    same,
    text_of,
    user,
)
from conftest import TinyArtifacts
from daemon import Daemon, daemon, quiet
from saying import Saying

from ssmd.api.generate.answer import ResponseInfo, WholeChoice
from ssmd.api.http.errors import IGNORED
from ssmd.api.openai.responses import tools as response_tools
from ssmd.api.openai.responses.answer import ResponseAnswer, ResponseForm, encoded
from ssmd.api.openai.responses.lark import NoRegex, _Expansion, regex_of
from ssmd.engine.request import Usage
from ssmd.engine.terms import Rejection

Fields = dict[str, Any]
LARK = """start: begin hunk hunk? "*** End"
begin: "*** Begin" LF
hunk: ("+" | "-" | " ") /[a-z]{2}/ LF
%import common.LF
"""
PATCH = r"\*\*\* Begin\n([-+ ][a-z]{2}\n)+\*\*\* End"


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


def test_a_namespace_is_flattened_and_given_back(tiny: Daemon) -> None:
    """Its calls have the name within it, and the namespace beside that, as Codex expects."""
    inner = {"type": "function", "name": "close_agent", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "namespace", "name": "agents_v1", "description": "x", "tools": [inner]}, *TOOLS]
    said = '<tool_call>\n{"name": "agents_v1__close_agent", "arguments": {}}\n</tool_call>'
    first = response_of(ask(tiny, LONG, said, tools=tools))
    [call] = first["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents_v1", "close_agent")
    streamed = put_together(events_of(ask(tiny, LONG, said, tools=tools, stream=True)))
    assert same(streamed)["output"] == same(first)["output"]
    quiet(tiny)
    again = response_of(ask(tiny, [user(LONG), call, output(call, "closed")], "ok", tools=tools))
    assert again["usage"]["ssmd"]["resume"] == "exact"
    assert cached(again["usage"]) >= first["usage"]["input_tokens"]
    chosen = {"type": "function", "name": "close_agent", "namespace": "agents_v1"}
    [forced] = response_of(ask(tiny, "a", "", tools=tools, tool_choice=chosen, store=False))["output"]
    assert (forced["namespace"], forced["name"]) == ("agents_v1", "close_agent")


def test_a_custom_tool_takes_a_text(tiny: Daemon) -> None:
    tools = [{"type": "custom", "name": "shell", "description": "Run it"}]
    said = f"""<tool_call>\n{json.dumps({"name": "shell", "arguments": {"input": 'ls "a"'}})}\n</tool_call>"""
    first = response_of(ask(tiny, LONG, said, tools=tools))
    [call] = first["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "shell", 'ls "a"')
    assert call["id"].startswith("ctc_")
    streamed = put_together(events_of(ask(tiny, LONG, said, tools=tools, stream=True)))
    assert same(streamed)["output"] == same(first)["output"]
    quiet(tiny)
    again = response_of(ask(tiny, [user(LONG), call, output(call, "calc.py")], "ok", tools=tools))
    assert again["usage"]["ssmd"]["resume"] == "exact"
    assert cached(again["usage"]) >= first["usage"]["input_tokens"]
    for n in range(20, 160, 5):
        cut = response_of(ask(tiny, "a", said, tools=tools, max_output_tokens=n, store=False))
        for call in (item for item in cut["output"] if item["type"] == "custom_tool_call"):
            assert 'ls "a"'.startswith(call["input"]), "as far as it came"
        if cut["status"] == "completed":
            break
    assert n > 40, "some were cut off"


def test_a_custom_tool_keeps_its_pattern(tiny: Daemon) -> None:
    regex, lark = {"syntax": "regex", "definition": r"ls -[al]{2}"}, {"syntax": "lark", "definition": LARK}
    for form, kept in ((regex, r"ls -[al]{2}"), (lark, PATCH)):
        tools = [{"type": "custom", "name": "shell", "format": {"type": "grammar", **form}}]
        chosen = {"type": "custom", "name": "shell"}
        fields: Fields = {"tools": tools, "tool_choice": chosen, "store": False, "seed": 1}
        response = response_of(ask(tiny, "a", "", **fields))
        [call] = response["output"]
        assert re.fullmatch(kept, call["input"]), call
        assert "ignored" not in response["usage"]["ssmd"]
    recursive = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "a"'}
    answer = ask(tiny, "a", "x", tools=[{**tools[0], "format": recursive}], store=False)
    assert response_of(answer)["usage"]["ssmd"]["ignored"] == ["tools.format"]


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('start: "a" "b"i+', ["aB", "abb"], ["a", "AB"]),
        ('start: one | two\none: "1"\n   | "eins"\ntwo: /2{2}/ -> two', ["1", "eins", "22"], ["2"]),
        ('start: "(" [X] ")" // a comment\n?x.2: "."\nX: x*', ["()", "(..)"], ["(a)"]),
        ('start: "\\"\\n/" INT\n%import common.INT', ['"\n/12'], ["/12"]),
    ],
)
def test_a_grammar_is_one_regular_expression(grammar: str, texts: list[str], others: list[str]) -> None:
    for text in texts:
        assert re.fullmatch(regex_of(grammar), text), text
    for text in others:
        assert not re.fullmatch(regex_of(grammar), text), text


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        'begin: "a"',
        "start: x",
        'start: "a" start?',
        'start: a\na: b\nb: a "x"',
        'start: "a"~3',
        '%ignore " "\nstart: "a"',
        "%import other.X\nstart: X",
        'start: "a',
        'start: ("a"',
        'start: "a")',
        '"a" start: "b"',
        "start: /a/x",
        "start: " + "(" * 500 + '"a"' + ")" * 500,
        'start: "\\ud800"',
        'start: "a" "' + "b" * 40_000 + '"',
        'start: "a" // ' + "x" * 70_000,
        "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a"',
    ],
)
def test_a_grammar_without_a_regular_expression(grammar: str) -> None:
    with pytest.raises(NoRegex):
        regex_of(grammar)


def test_a_grammar_is_read_in_bounded_memory() -> None:
    """Each alternative is short enough; together they are a million times longer than the grammar."""
    grammar = "x: /" + "x" * 30_000 + "/\nstart: " + "|".join(["x"] * 5_000)
    tracemalloc.start()
    with pytest.raises(NoRegex):
        regex_of(grammar)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 << 20


def test_empty_parts_of_a_grammar_are_counted_once() -> None:
    """So a grammar of many costs no more than its length: each part was compared with all before it."""
    counted = 0

    class Part(str):
        __slots__ = ()

        def __len__(self) -> int:
            nonlocal counted
            counted += 1
            return 0

    tokens: list[tuple[str, str]] = [("atom", Part())] * 1_000
    assert _Expansion({"start": tokens}).rule("start") == ""
    assert counted < 10_000


def test_tools_beyond_the_most_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body has room for a hundred thousand grammars."""
    read: list[str] = []
    monkeypatch.setattr(response_tools, "_pattern", read.append)
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    many = [{"type": "custom", "name": f"f{i}", "format": form} for i in range(1_000)]
    for given in (many, [{"type": "namespace", "name": "n", "tools": many}]):
        with pytest.raises(Rejection, match="at most 128 tools"):
            response_tools.read_tools(given, set())
    assert len(read) == 2 * 128


def test_the_tools_of_a_request_are_encoded_once() -> None:
    """In parts and by a thread of the gate: half a million of them would hold the event loop for a second."""
    tools = [{"type": "web_search", "n": i} for i in range(200)]
    form = ResponseForm(model="m", echo={"tools": object()}, store=False, origins={}, encrypts=False)
    answer = ResponseAnswer(form, encoded({"top_p": 1.0, "tools": tools}), ResponseInfo("gen_1", 0, None))
    whole = answer.whole([WholeChoice.of([], "stop")], Usage.of_nothing(None, 0.0))
    assert isinstance(whole, bytes)
    found = json.loads(whole)
    assert (found["id"], found["tools"], found["top_p"]) == ("resp_gen_1", tools, 1.0)


def test_a_choice_among_too_many_tools_is_refused() -> None:
    given = response_tools.read_tools([{"type": "function", "name": "f"}], set())
    listed = [{"type": "function", "name": "g"}] * 5_000
    with pytest.raises(Rejection, match="at most 1024 tools"):
        response_tools.read_choice({"type": "allowed_tools", "mode": "required", "tools": listed}, None, given, set())


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "web_search"}, "none"])
def test_a_tool_that_a_server_runs_is_left_out(tiny: Daemon, choice: Any) -> None:
    answer = ask(tiny, "a", "It rains.", tools=HOSTED, tool_choice=choice, store=False)
    response = response_of(answer)
    names = [f"tools.{tool['type']}" for tool in HOSTED]
    named = [*names, *(["tool_choice"] if choice not in ("auto", "none") else [])]
    assert sorted(response["usage"]["ssmd"]["ignored"]) == sorted(named)
    assert sorted(answer.headers[IGNORED].split(", ")) == sorted(named)
    assert text_of(response) == "It rains."
    assert response["tools"] == HOSTED


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("required", ["get_weather", "f"]),
        ({"type": "function", "name": "f"}, ["f"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, ["f"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, []),
        ("none", []),
    ],
)
def test_a_choice_of_tools(tiny: Daemon, choice: Any, called: list[str]) -> None:
    response = response_of(ask(tiny, "a", "It rains.", tools=TOOLS, tool_choice=choice, store=False))
    calls = [item["name"] for item in response["output"] if item["type"] == "function_call"]
    assert bool(calls) == bool(called)
    assert set(calls) <= set(called)
    assert response["tool_choice"] == choice


def test_calls_come_one_at_a_time_if_asked(tiny: Daemon) -> None:
    response = response_of(ask(tiny, "a", f"{CALL}\n{SECOND}", tools=TOOLS, parallel_tool_calls=False, store=False))
    assert [item["name"] for item in response["output"]] == ["get_weather"]


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        (
            {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "(a"}},
            "format.definition",
        ),
        ({"type": "function", "name": "g", "parameters": {"type": "string"}}, "parameters.type"),
    ],
)
def test_places_in_tools_are_those_of_the_request(tiny: Daemon, tool: Fields, place: str) -> None:
    """Also of errors that the engine finds: tools that are left out count there, and namespaces."""
    for tools, where in (
        ([*HOSTED, tool], f"tools[{len(HOSTED)}]"),
        ([*HOSTED[:1], {"type": "namespace", "name": "n", "tools": [HOSTED[1], tool]}], "tools[1].tools[1]"),
    ):
        answer = ask(tiny, "a", tools=tools, tool_choice="required")
        assert (answer.status, answer.error["param"]) == (400, f"{where}.{place}")
        assert f"{where}.{place}" in answer.error["message"]
