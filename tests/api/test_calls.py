"""Tool calls and reasoning in answers: whole and streamed, followed, given again and kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, chunks, daemon, quiet, text_of
from openai_client import openai
from saying import Saying
from serving import Answer

STOP = 2  # <|im_end|> of the tiny model
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMED = {"type": "function", "function": {"name": "f"}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "f"}},
]


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


def scripted(one: Daemon, *texts: str, ends: bool = True) -> None:
    """Have the model say these, one after each prompt."""
    program, tokenizer = one.engine.program, one.engine._texts.tokenizer
    assert isinstance(program, Saying)
    program.say(*([*tokenizer.encode(text), *([STOP] if ends else [])] for text in texts))


def ask(one: Daemon, said: str, content: str = "What about Paris?", *, ends: bool = True, **fields: Any) -> Answer:
    scripted(one, said, ends=ends)
    return one.chat(content, **{"tools": TOOLS, "max_tokens": 300, "logit_bias": {}, **fields})


def choice_of(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    return dict(answer.json["choices"][0])


def calls_of(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The tool calls of a stream, put together as OpenAI's clients do."""
    calls: list[dict[str, Any]] = []
    for chunk in found:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", []) if choice["index"] == index else ():
                if delta["index"] == len(calls):
                    assert delta["function"]["name"]
                    assert delta["function"]["arguments"] == ""
                    calls.append(json.loads(json.dumps(delta)))
                else:
                    assert set(delta) == {"index", "function"}
                    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def test_a_call_whole(tiny: Daemon) -> None:
    choice = choice_of(ask(tiny, CALL))
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert call["id"].startswith("call_")
    assert len(call["id"]) == 29
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": PARIS},
    }


def test_several_calls_and_text_before_them(tiny: Daemon) -> None:
    choice = choice_of(ask(tiny, f"Let me look.\n{CALL}\n{SECOND}"))
    assert choice["message"]["content"] == "Let me look."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "f"]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    one = choice_of(ask(tiny, f"Let me look.\n{CALL}\n{SECOND}", parallel_tool_calls=False))
    assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["get_weather"]
    assert one["finish_reason"] == "tool_calls"


def test_a_call_streamed(tiny: Daemon) -> None:
    scripted(tiny, f"<think>\nParis, then.\n</think>\n\nI look.\n{CALL}\n{SECOND}")
    body = tiny.body(stream=True, tools=TOOLS, max_tokens=300, logit_bias={})
    found = chunks(tiny.served.ask("POST", CHAT, body))
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Paris, then."
    assert text_of(found) == "I look."
    calls = calls_of(found)
    assert [(call["index"], call["type"], call["function"]) for call in calls] == [
        (0, "function", {"name": "get_weather", "arguments": PARIS}),
        (1, "function", {"name": "f", "arguments": "{}"}),
    ]
    assert sum("tool_calls" in delta for delta in deltas) > 6, "the arguments come bit by bit"
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_openai_client_puts_a_stream_together(tiny: Daemon) -> None:
    scripted(tiny, f"I look.\n{CALL}\n{SECOND}")
    result = openai("helper", tiny.url, tiny.body(tools=TOOLS, max_tokens=300, logit_bias={}))
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(result["kinds"])
    choice = result["completion"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in functions] == [("get_weather", PARIS), ("f", "{}")]


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        (CALL, {"tools": None}),
        (CALL, {"tools": []}),
        (CALL, {"tool_choice": "none"}),
    ],
)
def test_without_tools_a_call_is_content(tiny: Daemon, said: str, fields: dict[str, Any]) -> None:
    choice = choice_of(ask(tiny, said, **fields))
    assert choice["message"] == {"role": "assistant", "content": said, "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("Write <tool_call> first.", "Write  first."),
        ("<tool_call>", ""),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', '\n{"arguments": {}}'),
    ],
)
def test_no_marker_is_content(tiny: Daemon, said: str, content: str) -> None:
    choice = choice_of(ask(tiny, said))
    assert choice["message"] == {"role": "assistant", "content": content, "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('{"name": "f", "arguments": {"text": "a\nb\tc"}}', {"text": "a\nb\tc"}),
        ("{'name': 'f', 'arguments': {'a': None, 'b': [True,],}}", {"a": None, "b": [True]}),
        ('{"name": "f", "arguments": {"a": [1, 2}}', {"a": [1, 2]}),
        ('{"name": "f", "arguments": {"a": 1}}}}', {"a": 1}),
        ('{"name": "f", "arguments": {"a": "b', {"a": "b\n"}),
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_a_malformed_call_is_a_call(tiny: Daemon, said: str, arguments: dict[str, Any], closed: bool) -> None:
    said = f"I look.\n<tool_call>\n{said}\n" + ("</tool_call>" if closed else "")
    message = (choice := choice_of(ask(tiny, said)))["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I look.")
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", arguments)
    found = chunks(ask(tiny, said, stream=True))
    assert [one["function"]["arguments"] for one in calls_of(found)] == [call["function"]["arguments"]]
    assert (found[-1]["choices"][0]["finish_reason"], text_of(found)) == ("tool_calls", "I look.")


def test_a_call_that_max_tokens_cuts(tiny: Daemon) -> None:
    choice = choice_of(ask(tiny, CALL, max_tokens=54))
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    arguments = call["function"]["arguments"]
    assert arguments
    assert PARIS.startswith(arguments)
    assert arguments != PARIS


def test_a_stop_string_cuts_calls_too(tiny: Daemon) -> None:
    choice = choice_of(ask(tiny, CALL, stop=["Par"]))
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_is_told_apart(tiny: Daemon, opened: bool) -> None:
    """Where a text that is continued has begun it, too."""
    said = "Hm. Or not.\n</think>\n\nYes."
    asked = [{"role": "user", "content": "Is it?"}]
    if opened:
        asked.append({"role": "assistant", "content": "<think>\nWell."})
    else:
        said = f"<think>\n{said}"
    choice = choice_of(ask(tiny, said, messages=asked))
    assert choice["message"]["reasoning_content"] == "Hm. Or not."
    assert choice["message"]["content"] == "Yes."


def test_reasoning_without_end_is_no_content(tiny: Daemon) -> None:
    choice = choice_of(ask(tiny, "<think>\nOn and on", max_tokens=10, tools=None))
    assert choice["message"]["content"] == ""
    assert "<think>\nOn and on".startswith("<think>\n" + choice["message"]["reasoning_content"])
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget", "reasoning_budget_tokens"])
def test_reasoning_ends_with_its_budget(tiny: Daemon, name: str) -> None:
    said = "<think>\n" + "On and on. " * 12
    budget: dict[str, Any] = {name: 8}
    choice = choice_of(ask(tiny, said, **budget))
    thought = choice["message"]["reasoning_content"]
    assert said.startswith(f"<think>\n{thought}")
    assert 0 < len(thought) < 30
    assert choice["message"]["content"]
    unbound = choice_of(ask(tiny, said, max_tokens=20))
    assert thought in unbound["message"]["reasoning_content"]
    budget[name] = 100
    within = choice_of(ask(tiny, "<think>\nSo.\n</think>\n\nYes.", **budget))
    assert (within["message"]["reasoning_content"], within["message"]["content"]) == ("So.", "Yes.")


@pytest.mark.parametrize("opened", [False, True])
def test_without_a_budget_nothing_is_thought(tiny: Daemon, opened: bool) -> None:
    said = "On and on. " * 12
    begun = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "<think>"}]
    scripted(tiny, said if opened else f"<think>{said}")
    asked: dict[str, Any] = {"messages": begun} if opened else {}
    choice = choice_of(tiny.chat(max_tokens=30, logit_bias={}, thinking_budget=0, store=False, **asked))
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"]


def test_log_probabilities_are_of_what_is_said(tiny: Daemon) -> None:
    choice = choice_of(ask(tiny, f"<think>\nSo.\n</think>\n\nI look.\n{CALL}", logprobs=True))
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens).strip() == "I look."
    plain = choice_of(ask(tiny, "I look.", logprobs=True, tools=None))
    assert "".join(entry["token"] for entry in plain["logprobs"]["content"]) == "I look."


def test_each_of_several_answers_has_its_calls(tiny: Daemon) -> None:
    answer = ask(tiny, CALL, n=3)
    choices = answer.json["choices"]
    assert [choice["message"]["tool_calls"][0]["function"]["arguments"] for choice in choices] == [PARIS] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_the_turn_keeps_calls_and_reasoning(tiny: Daemon) -> None:
    answer = ask(tiny, f"<think>\nSo.\n</think>\n\nI look.\n{CALL}")
    turn = tiny.turns(answer.json["usage"]["ssmd"]["session"])[-1]
    (call,) = choice_of(answer)["message"]["tool_calls"]
    assert turn.answer.content == "<think>\nSo.\n</think>\n\nI look."
    assert [(one.id, one.name, one.arguments) for one in turn.answer.tool_calls] == [(call["id"], "get_weather", PARIS)]
    assert turn.finish == "tool_calls"
    assert turn.complete
    quiet(tiny)


def test_the_same_again(tiny: Daemon) -> None:
    said = f"<think>\nSo.\n</think>\n\nI look.\n{CALL}\n{SECOND}"
    scripted(tiny, said, "Something else.")
    body = tiny.body("again", tools=TOOLS, max_tokens=300, logit_bias={}, logprobs=True, n=2)
    key = {"Idempotency-Key": "calls"}
    first, again = (tiny.served.ask("POST", CHAT, body, key) for _ in range(2))
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json == first.json
    assert len(first.json["choices"][0]["message"]["tool_calls"]) == 2
    streamed = {"Idempotency-Key": "streamed"}
    scripted(tiny, said, "Something else.")
    live, given = (chunks(tiny.served.ask("POST", CHAT, {**body, "n": 1, "stream": True}, streamed)) for _ in range(2))
    assert calls_of(given) == calls_of(live)
    assert text_of(given) == text_of(live) == "I look."
    assert given[-1] == live[-1]


def test_who_follows_hears_of_calls_and_reasoning(tiny: Daemon) -> None:
    scripted(tiny, f"<think>\nSo.\n</think>\n\nI look.\n{CALL}\n{SECOND}", ends=False)
    body = tiny.body("slowly", tools=TOOLS, max_tokens=400, stream=True, background=True)
    told: list[list[dict[str, Any]]] = []
    begun = threading.Event()

    def follow() -> None:
        begun.wait(30)
        (id_,) = [row["id"] for row in tiny.engine.rows()] or [""]
        told.append(chunks(tiny.served.ask("GET", f"/ssmd/v1/requests/{id_}/stream")))

    one = threading.Thread(target=follow)
    one.start()
    line = tiny.served.connect(b"")
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    line.sendall(head.encode() + b"\r\n\r\n" + raw)
    while b"get_weather" not in line.recv(1 << 16):
        pass
    begun.set()
    one.join(60)
    line.close()
    (found,) = told
    assert [call["function"] for call in calls_of(found)][:2] == [
        {"name": "get_weather", "arguments": PARIS},
        {"name": "f", "arguments": "{}"},
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in found if chunk["choices"]]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["So."]
    assert text_of(found).startswith("I look.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_a_choice_that_is_none_is_refused(tiny: Daemon, fields: dict[str, Any], param: str) -> None:
    answer = tiny.chat(**{"tools": TOOLS, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("ends", [" so be it.</think>", " so be it.</think>\n\n"])
def test_the_answer_format_applies_after_the_reasoning(ends: str, tiny: Daemon) -> None:
    scripted(tiny, ends, ends=False)
    messages = [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": "<think>\nLet me see:"}]
    schema = {"name": "a", "schema": {"enum": ["a"]}}
    form = {"type": "json_schema", "json_schema": schema}
    answer = tiny.chat(messages=messages, response_format=form, max_tokens=100, logit_bias={}, store=False)
    choice = choice_of(answer)
    assert choice["message"]["reasoning_content"].strip() == "so be it."
    assert choice["message"]["content"].strip() == '"a"'
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_call_that_has_to_be_is_valid_whatever_is_drawn(tiny: Daemon, choice: Any, reason: str) -> None:
    """The model says nothing by itself: every token is drawn at a high temperature among those that may come."""
    tiny.engine.program.say()  # type: ignore[attr-defined]
    asked = {"tools": TOOLS, "tool_choice": choice, "temperature": 2, "max_tokens": 400, "logit_bias": {}}
    for seed in range(4):
        found = choice_of(tiny.chat("Call", **asked, seed=seed, parallel_tool_calls=False))
        [call] = found["message"]["tool_calls"]
        arguments = call["function"]["arguments"]
        if found["finish_reason"] == "length":
            continue
        assert found["finish_reason"] == reason
        if call["function"]["name"] == "get_weather":
            assert set(json.loads(arguments)) >= {"city"}
        else:
            assert isinstance(json.loads(arguments), dict)
        assert choice != NAMED or call["function"]["name"] == "f"


@pytest.mark.parametrize(
    "cut", [{"max_tokens": 1}, {"max_tokens": 6}, {"max_tokens": 12}, {"stop": ["name"], "max_tokens": 40}]
)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_never_content_however_early_it_is_cut(tiny: Daemon, choice: Any, cut: dict[str, Any]) -> None:
    tiny.engine.program.say()  # type: ignore[attr-defined]
    asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 12, "logit_bias": {}, **cut}
    answer = tiny.chat("Call, but briefly", **asked)
    found = choice_of(answer)
    assert found["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert found["finish_reason"] == ("stop" if "stop" in cut else "length")
    assert text_of(chunks(tiny.chat("Call, but briefly", **asked, stream=True, store=False))) == ""
    assert tiny.turns(answer.json["usage"]["ssmd"]["session"])[-1].answer.content == ""
    messages = [{"role": "user", "content": "Call, but briefly"}, found["message"], {"role": "user", "content": "So?"}]
    assert tiny.chat(messages=messages, max_tokens=2).status == 200
    quiet(tiny)


def test_nor_is_one_of_a_strict_tool(tiny: Daemon) -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}  # type: ignore[dict-item]
    found = choice_of(ask(tiny, f"I look.\n{CALL}", tools=[strict], max_tokens=25))
    assert (found["message"]["content"], found["finish_reason"]) == ("I look.", "length")
    assert "tool_calls" not in found["message"]


@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        ({"type": "array", "items": {"type": "integer"}}, ".type"),
        ({"type": ["string", "null"]}, ".type"),
        ({"properties": {"a": {"not": {"const": 1}}}}, ".properties.a.not"),
        ({"properties": {"a": {"minimum": 2**63}}}, ".properties.a.minimum"),
    ],
)
def test_arguments_that_cannot_be_are_refused_and_say_where(
    tiny: Daemon, parameters: dict[str, Any], where: str
) -> None:
    wrong = {"type": "function", "function": {"name": "g", "parameters": parameters, "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}
    for fields in ({"tool_choice": "required"}, {"response_format": form}):
        answer = tiny.chat(tools=[*TOOLS, wrong], **fields)
        assert (answer.status, answer.error["code"]) == (400, "unsupported_schema")
        assert answer.error["param"] == f"tools[2].function.parameters{where}"
        assert answer.error["message"].startswith(answer.error["param"])
    assert tiny.chat(tools=[*TOOLS, wrong], tool_choice=NAMED).status == 200


def test_arguments_are_an_object_where_they_might_be_null(tiny: Daemon) -> None:
    tiny.engine.program.say()  # type: ignore[attr-defined]
    parameters = {"type": ["object", "null"], "properties": {"a": {"const": 1}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "g", "parameters": {**parameters, "additionalProperties": False}}}
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": {}}
    for seed in range(4):
        [call] = choice_of(tiny.chat("Call", seed=seed, temperature=2, max_tokens=99, **asked))["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1}


def test_strict_tools_get_valid_calls_where_the_model_may_choose(tiny: Daemon) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
    asked: dict[str, Any] = {"logprobs": True, "temperature": 1}  # then the script stays in step
    assert choice_of(ask(tiny, "No.", tools=strict, **asked))["message"]["content"] == "No."
    whole = choice_of(ask(tiny, f"First:\n{CALL}\n{CALL}", tools=strict, **asked))["message"]
    assert (whole["content"], [call["function"]["arguments"] for call in whole["tool_calls"]]) == (
        "First:",
        [PARIS] * 2,
    )
    wrong = '<tool_call>\n{"name": "get_weather", "arguments": {"city": 5, "x": 1}}\n</tool_call>'
    for tools, given in ((TOOLS, {"city": 5, "x": 1}), (strict, None)):
        for seed in range(3):
            choice = choice_of(ask(tiny, wrong, ends=False, tools=tools, seed=seed, parallel_tool_calls=False, **asked))
            if choice["finish_reason"] == "length":
                continue
            [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "get_weather"
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments["city"], str) if given is None else arguments == given


@pytest.mark.parametrize("form", ["schema", "regex"])
def test_with_tools_an_answer_is_a_call_or_fits_its_format(tiny: Daemon, form: str) -> None:
    schema = {"name": "a", "schema": {"enum": ["a", "b"]}}
    asked: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": schema}}
    if form == "regex":
        asked = {"guided_regex": '"[ab]"'}
    asked["logprobs"] = True  # then nothing is fed that is not drawn, and the script stays in step
    called = choice_of(ask(tiny, CALL, **asked))
    assert (called["finish_reason"], called["message"]["content"]) == ("tool_calls", None)
    assert called["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": PARIS}
    free = choice_of(ask(tiny, "Sure! It is raining.", **asked))
    assert (free["finish_reason"], free["message"]["content"][:1]) == ("stop", '"')
    assert json.loads(free["message"]["content"]) in ("a", "b")
    other = choice_of(ask(tiny, CALL, tool_choice="none", **asked))
    assert json.loads(other["message"]["content"]) in ("a", "b")


def test_what_is_left_of_messages_is_named(tiny: Daemon) -> None:
    scripted(tiny, "Yes.")
    message = {"role": "user", "content": "Hm?", "annotations": ["x"], "cache_control": {"type": "ephemeral"}}
    answer = tiny.chat(messages=[message], logit_bias={}, max_tokens=5)
    assert answer.json["usage"]["ssmd"]["ignored"] == ["messages.annotations"]
    assert answer.headers["x-ssmd-ignored"] == "messages.annotations"


def test_respelled_call_is_found_without_a_store(tiny: Daemon) -> None:
    """A client in JavaScript sends `{"city":"Paris"}` for `{"city": "Paris"}`; with `store: false` no text is kept."""
    kept: dict[str, Any] = {"store": False, "prompt_cache_retention": "24h"}
    first = ask(tiny, f"I look.\n{CALL}", "Paris by a call written again?", **kept).json
    message = first["choices"][0]["message"]
    message["tool_calls"][0]["function"]["arguments"] = PARIS.replace(" ", "")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12 degrees"}
    user = {"role": "user", "content": "Paris by a call written again?"}
    scripted(tiny, "It is cold.")
    fields = {"tools": TOOLS, "max_tokens": 300, "logit_bias": {}, **kept}
    usage = tiny.chat(messages=[user, message, result], **fields).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] + 20, "the answer is read"
