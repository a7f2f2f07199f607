"""Ollama's chat and generate: whole and as lines, calls, context, loading, and conversations that change protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from api.test_anthropic import LONG, message_of
from api.test_anthropic import TOOLS as ANTHROPIC_TOOLS
from api.test_calls import CALL, PARIS, SECOND, TOOLS, scripted
from conftest import TinyArtifacts
from daemon import NO_END, Daemon, daemon, quiet, request, soon
from saying import Saying
from serving import Answer

from ssmd.api.ollama.body import OllamaChatBody
from ssmd.api.ollama.conversation import MAX_CONTEXT_BYTES, pack, unpack
from ssmd.config import Settings

Fields = dict[str, Any]
CHAT, GENERATE = "/api/chat", "/api/generate"
COUNTS = ("prompt_eval_count", "eval_count")
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data"), as_program=Saying) as one:
        yield one


def user(content: str) -> Fields:
    return {"role": "user", "content": content}


def answered(content: str, **fields: Any) -> Fields:
    return {"role": "assistant", "content": content, **fields}


def options(**fields: Any) -> Fields:
    return {"temperature": 0, "num_predict": 300, **fields}


def ask(one: Daemon, *messages: Fields, said: str | None = None, **fields: Any) -> Answer:
    """Ask for an answer, whole unless the fields say otherwise; said: the model's answer."""
    if said is not None:
        scripted(one, said)
    body = {"model": one.model, "messages": list(messages), "options": options(), "stream": False, **fields}
    return one.served.ask("POST", CHAT, body)


def prompt(one: Daemon, text: str, said: str | None = None, **fields: Any) -> Answer:
    if said is not None:
        scripted(one, said)
    body = {"model": one.model, "prompt": text, "options": options(), "stream": False, **fields}
    return one.served.ask("POST", GENERATE, body)


def whole_of(answer: Answer) -> Fields:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("application/json")
    found: Fields = answer.json
    assert found["done"] is True
    return found


def lines_of(answer: Answer) -> list[Fields]:
    """The lines of a stream. Only the last one is done."""
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.body.endswith(b"\n")
    found = [json.loads(line) for line in answer.body.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def put_together(lines: list[Fields]) -> Fields:
    """The answer of a stream, put together as Ollama's clients do."""
    *_, last = lines
    message: Fields = {"role": "assistant", "content": ""}
    for line in lines:
        part = line["message"]
        assert part["role"] == "assistant"
        message["content"] += part["content"]
        if part.get("thinking"):
            message["thinking"] = message.get("thinking", "") + part["thinking"]
        if part.get("tool_calls"):
            message["tool_calls"] = [*message.get("tool_calls", []), *part["tool_calls"]]
    return {**last, "message": message}


def same(message: Fields) -> Fields:
    """A message without the ids of its calls."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [{**call, "id": None} for call in message["tool_calls"]]}


def test_a_whole_answer(tiny: Daemon) -> None:
    answer = ask(tiny, {"role": "system", "content": "Be short."}, user("What about Paris?"), said="It rains.")
    found = whole_of(answer)
    assert found["message"] == {"role": "assistant", "content": "It rains."}
    assert (found["model"], found["done_reason"]) == (tiny.model, "stop")
    assert datetime.fromisoformat(found["created_at"]).tzinfo is not None
    assert all(type(found[name]) is int and found[name] > 0 for name in (*COUNTS, *TIMES))
    assert found["ssmd"]["session"] == answer.headers["x-ssmd-session"]
    [turn] = tiny.turns(found["ssmd"]["session"])
    assert [(m.role, m.content) for m in turn.conversation] == [
        ("system", "Be short."),
        ("user", "What about Paris?"),
        ("assistant", "It rains."),
    ]


def test_counts_and_times_are_those_of_the_engine(tiny: Daemon) -> None:
    found = whole_of(ask(tiny, user(LONG), said="It rains."))
    row, usage = tiny.engine.metrics.snapshot()["recent"][-1], found["ssmd"]
    assert (found["prompt_eval_count"], found["eval_count"]) == (row["prompt_tokens"], row["generated_tokens"])
    ms = {name: found[name] / 1e6 for name in TIMES}
    assert ms["prompt_eval_duration"] == pytest.approx(usage["prefill_ms"] + usage["restore_ms"], abs=0.01)
    drawn = usage["tbt_ms"] * (found["eval_count"] - 1)
    assert ms["total_duration"] == pytest.approx(usage["ttft_ms"] + drawn, abs=0.05)
    rest = usage["plan_ms"] + usage["queue_ms"]
    assert ms["load_duration"] + ms["prompt_eval_duration"] + ms["eval_duration"] + rest == pytest.approx(
        ms["total_duration"], abs=0.1
    )


def test_a_stream_is_the_default_and_has_the_same_parts(tiny: Daemon) -> None:
    said = f"<think>\nParis, then.\n</think>\n\nI look.\n{CALL}\n{SECOND}"
    whole = whole_of(ask(tiny, user("a"), said=said, tools=TOOLS, store=False))
    lines = lines_of(ask(tiny, user("a"), said=said, tools=TOOLS, store=False, stream=None))
    streamed = put_together(lines)
    assert same(streamed["message"]) == same(whole["message"])
    assert whole["message"]["thinking"] == "Paris, then."
    assert whole["message"]["content"] == "I look."
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [
        {"index": 0, "name": "get_weather", "arguments": json.loads(PARIS)},
        {"index": 1, "name": "f", "arguments": {}},
    ]
    assert sum("tool_calls" in line["message"] for line in lines) == 2, "each call whole, in a line of its own"
    assert len(lines) > 6
    assert {name: streamed[name] for name in COUNTS} == {name: whole[name] for name in COUNTS}
    assert streamed["done_reason"] == whole["done_reason"] == "stop"


@pytest.mark.parametrize(
    ("said", "more", "reason"),
    [
        ("It rains.", {}, "stop"),
        ("It rains. END more", {"stop": ["no", "END"]}, "stop"),
        ("It rains. END more", {"stop": "END"}, "stop"),
        ("It rains again and again.", {"num_predict": 3}, "length"),
        ("It rains.", {"num_predict": -1}, "stop"),
        ("It rains.", {"num_predict": -2, "seed": -1}, "stop"),
    ],
)
def test_the_reason_for_the_end(tiny: Daemon, said: str, more: Fields, reason: str) -> None:
    whole = whole_of(ask(tiny, user("a"), said=said, store=False, options=options(**more)))
    streamed = put_together(
        lines_of(ask(tiny, user("a"), said=said, store=False, stream=True, options=options(**more)))
    )
    assert whole["done_reason"] == streamed["done_reason"] == reason
    assert whole["message"] == streamed["message"]
    assert "END" not in whole["message"]["content"]
    assert reason == "stop" or whole["eval_count"] == 3


def test_a_call_that_is_cut_off_has_its_arguments_so_far(tiny: Daemon) -> None:
    seen = set()
    for n in range(20, 70, 3):
        for stream in (False, True):
            answer = ask(
                tiny, user("a"), said=CALL, tools=TOOLS, store=False, stream=stream, options=options(num_predict=n)
            )
            found = put_together(lines_of(answer)) if stream else whole_of(answer)
            for call in found["message"].get("tool_calls", []):
                seen.add(json.dumps(call["function"]["arguments"]))
    assert len(seen) > 1, "some were cut off"
    assert all(json.loads(PARIS)["city"].startswith(json.loads(one).get("city", "")) for one in seen)


def test_logprobs_come_with_their_text(tiny: Daemon) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "store": False}
    whole = whole_of(ask(tiny, user("a"), said="It rains.", **fields))
    lines = lines_of(ask(tiny, user("a"), said="It rains.", stream=True, **fields))
    entries = [entry for line in lines for entry in line.get("logprobs", [])]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in whole["logprobs"]]
    assert "".join(entry["token"] for entry in entries).startswith("It rains.")
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert "logprobs" not in whole_of(ask(tiny, user("a"), said="x", store=False))


def test_silence_is_filled_with_spaces(artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients parse each line as JSON, which may begin with spaces."""
    with daemon(artifacts["mamba-f32"], None, settings=Settings(stream_comment=0.05)) as one:
        prefill = one.engine.program.prefill

        def slowly(*given: Any) -> Any:
            time.sleep(0.5)
            return prefill(*given)

        monkeypatch.setattr(one.engine.program, "prefill", slowly)
        body = {"model": one.model, "messages": [user(LONG)], "options": {"num_predict": 2}}
        answer = one.served.ask("POST", CHAT, body)
    assert answer.body.startswith(b" ")
    assert len(lines_of(answer)) >= 1


# Conversations


def test_a_conversation_goes_through_three_protocols(tiny: Daemon) -> None:
    """With reasoning, a call and its result: each turn is found, whichever protocol the last one came in."""
    said = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
    asked = [{"role": "system", "content": "Be short."}, user("Paris? " + LONG)]
    first = whole_of(ask(tiny, *asked, said=said, tools=TOOLS))
    quiet(tiny)
    call = first["message"]["tool_calls"][0]

    named = {"id": call["id"], "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    told = [
        *asked,
        answered("I look.", reasoning_content="hm", tool_calls=[named]),
        {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"},
    ]
    scripted(tiny, "It is cold.")
    chat = tiny.chat(messages=told, tools=TOOLS, max_tokens=300, logit_bias={}).json["usage"]
    assert chat["ssmd"]["resume"] == "exact"
    assert chat["prompt_tokens_details"]["cached_tokens"] >= first["prompt_eval_count"] - 1
    quiet(tiny)

    mine = [
        *asked,
        answered("I look.", thinking="hm", tool_calls=[{"function": call["function"]}]),
        {"role": "tool", "tool_name": "get_weather", "content": "12 degrees"},
        answered("It is cold."),
        user("And Rome?"),
    ]
    third = whole_of(ask(tiny, *mine, said="Warm.", tools=TOOLS))
    assert third["ssmd"]["resume"] == "exact"
    assert third["ssmd"]["cached_tokens"] >= chat["prompt_tokens"] - 1
    quiet(tiny)

    made = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    blocks: list[Fields] = [
        user("Paris? " + LONG),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                made,
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 degrees"}]},
        answered("It is cold."),
        user("And Rome?"),
        answered("Warm."),
        user("And Oslo?"),
    ]
    scripted(tiny, "Cold.")
    body = {"model": tiny.model, "max_tokens": 300, "temperature": 0, "system": "Be short.", "messages": blocks}
    fourth = message_of(tiny.served.ask("POST", "/v1/messages", {**body, "tools": ANTHROPIC_TOOLS}))["usage"]
    assert fourth["ssmd"]["resume"] == "exact"
    assert fourth["cache_read_input_tokens"] >= third["prompt_eval_count"] - 1
    quiet(tiny)

    fifth = whole_of(
        ask(
            tiny,
            *mine,
            answered("Warm."),
            user("And Oslo?"),
            answered("Cold."),
            user("And Bonn?"),
            said="Mild.",
            tools=TOOLS,
        )
    )
    assert fifth["ssmd"]["resume"] == "exact"
    sessions = {first["ssmd"]["session"], chat["ssmd"]["session"], third["ssmd"]["session"], fifth["ssmd"]["session"]}
    assert len(sessions | {fourth["ssmd"]["session"]}) == 1


RESULTS: dict[str, list[Fields]] = {  # of two calls, as clients send them
    "by position": [{"content": "12"}, {"content": "7"}],
    "by name": [{"content": "7", "tool_name": "f"}, {"content": "12", "tool_name": "get_weather"}],
    "by the older name": [{"content": "12", "name": "get_weather"}, {"content": "7", "name": "f"}],
    "by an id that its call lost": [{"content": "12", "tool_call_id": "x"}, {"content": "7", "tool_call_id": "y"}],
}


@pytest.mark.parametrize("way", RESULTS)
def test_results_find_their_calls(tiny: Daemon, way: str) -> None:
    calls = [
        {"function": {"name": "get_weather", "arguments": {"city": way}}},
        {"function": {"name": "f", "arguments": {}}},
    ]
    results = [{"role": "tool", **one} for one in RESULTS[way]]
    messages = [user("a"), answered("", tool_calls=calls), *results]
    found = whole_of(ask(tiny, *messages, said="ok", tools=TOOLS))
    [turn] = tiny.turns(found["ssmd"]["session"])
    names = {call.id: call.name for message in turn.conversation for call in message.tool_calls}
    of = {names[m.tool_call_id]: m.content for m in turn.conversation if m.tool_call_id is not None}
    assert of == {"get_weather": "12", "f": "7"}
    assert all(m.name is None for m in turn.conversation), "a name would part it from the same chat over OpenAI's API"


def test_a_name_called_twice_takes_its_results_in_order(tiny: Daemon) -> None:
    calls = [{"id": id_, "function": {"name": "f", "arguments": {"n": id_}}} for id_ in ("call_1", "call_0")]
    results = [{"role": "tool", "tool_name": "f", "content": text} for text in ("one", "two")]
    rounds = [answered("", tool_calls=calls), *results]
    found = whole_of(ask(tiny, user("a"), *rounds, answered("b"), user("c"), *rounds, said="ok", tools=TOOLS))
    told = [m for m in tiny.turns(found["ssmd"]["session"])[-1].conversation if m.role == "tool"]
    assert [(m.tool_call_id, m.content) for m in told] == [("call_1", "one"), ("call_0", "two")] * 2


# Generate


def test_a_prompt_goes_through_the_template(tiny: Daemon) -> None:
    found = whole_of(prompt(tiny, "What about Paris?", "<think>\nhm\n</think>\n\nIt rains.", system="Be short."))
    assert (found["response"], found["thinking"], found["done_reason"]) == ("It rains.", "hm", "stop")
    assert all(found[name] > 0 for name in (*COUNTS, *TIMES))
    [turn] = tiny.turns(found["ssmd"]["session"])
    assert [m.role for m in turn.conversation] == ["system", "user", "assistant"]
    lines = lines_of(prompt(tiny, "What about Paris?", "It rains.", stream=True, store=False))
    assert "".join(line["response"] for line in lines) == "It rains."
    assert "message" not in lines[0]


def test_a_raw_prompt_is_read_as_it_is(tiny: Daemon) -> None:
    found = whole_of(prompt(tiny, "<|im_start|>user\na", "b", raw=True))
    completed = tiny.served.ask(
        "POST", "/v1/completions", {"model": tiny.model, "prompt": "<|im_start|>user\na", "max_tokens": 1}
    ).json
    assert found["prompt_eval_count"] == completed["usage"]["prompt_tokens"]
    assert found["ssmd"]["session"] is None
    assert "context" not in found
    for fields in ({"system": "x"}, {"context": [1]}):
        refused = prompt(tiny, "a", raw=True, **fields)
        assert (refused.status, "raw: true" in refused.json["error"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_continues_the_conversation(tiny: Daemon, stream: bool) -> None:
    """Clients send its numbers back and do not look into them; they keep each in 32 bits."""
    fields = {"system": "Be short.", "stream": stream}
    last, total = None, 0
    for question, said in (("Paris? " + LONG, "It rains."), ("And Rome? é漢😀", "Warm."), ("And Oslo?", "Cold.")):
        answer = prompt(tiny, f"{question}{stream}", said, **fields, **({} if last is None else {"context": last}))
        found = lines_of(answer)[-1] if stream else whole_of(answer)
        if last is not None:
            assert found["ssmd"]["resume"] == "exact"
            assert found["ssmd"]["cached_tokens"] >= total - 1
        last, total = found["context"], found["prompt_eval_count"]
        assert all(type(one) is int and 0 <= one < 2**31 for one in last)
        quiet(tiny)
    turns = tiny.turns(found["ssmd"]["session"])
    roles = [str(m.role) for turn in turns for m in turn.conversation]
    assert roles == ["system", *("user", "assistant") * 3]
    other = whole_of(prompt(tiny, "And now?", "x", context=last, system="Be long."))
    told = tiny.turns(other["ssmd"]["session"])[-1].conversation
    assert [m.content for m in told if m.role == "system"] == ["Be long."]
    assert len(told) == 9


def test_a_context_has_bounds() -> None:
    said = [{"role": "user", "content": "x" * n} for n in (0, 1, 2, 3)]
    assert unpack(pack(said)) == said
    assert pack([{"role": "user", "content": "x" * MAX_CONTEXT_BYTES}]) is None
    assert unpack([]) == unpack(None) == []


# Loading


def test_a_model_is_loaded_and_unloaded_without_a_prompt(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["llama-f32"], tmp_path / "data") as one:
        for path, body in (
            (CHAT, {"messages": []}),
            (CHAT, {}),
            (GENERATE, {}),
            (GENERATE, {"prompt": "", "keep_alive": "5m"}),
            (CHAT, {"messages": [], "keep_alive": -1}),
        ):
            answer = one.served.ask("POST", path, {"model": one.model, **body})
            found = whole_of(answer)
            assert (found["done_reason"], found["model"]) == ("load", one.model)
            assert found["load_duration"] >= 1
            said = found["message"]["content"] if path == CHAT else found["response"]
            assert said == ""
        assert one.engine.metrics.snapshot()["recent"] == [], "the model computed nothing"
        assert [row["name"] for row in one.served.ask("GET", "/api/ps").json["models"]] == [f"{one.model}:latest"]
        gone = whole_of(one.served.ask("POST", CHAT, {"model": one.model, "messages": [], "keep_alive": 0}))
        assert gone["done_reason"] == "unload"
        soon(lambda: one.served.ask("GET", "/api/ps").json == {"models": []})


@pytest.mark.parametrize(
    ("given", "seconds"), [("5m", 300), (300, 300), ("1h30m", 5400), (-1, None), ("-1s", None), (0, 0), ("0", 0)]
)
def test_a_model_stays_as_long_as_it_is_kept_alive(tiny: Daemon, given: Any, seconds: float | None) -> None:
    whole_of(ask(tiny, user("a"), said="b", store=False, keep_alive=given if given not in (0, "0") else "1s"))
    assert OllamaChatBody(model="m", keep_alive=given).keep_alive == (float("inf") if seconds is None else seconds)


def test_a_follower_gets_events_as_of_chat(tiny: Daemon) -> None:
    """The page follows any answer under way."""
    body = {
        "model": tiny.model,
        "messages": [user("on " + LONG)],
        "options": options(num_predict=4000, logit_bias=NO_END),
    }
    scripted(tiny, "x", ends=False)
    with tiny.served.connect(request(body, CHAT)) as one:
        found = b""
        while b'"done":false' not in found:
            found += one.recv(1 << 16)
        [row] = tiny.served.ask("GET", "/ssmd/v1/metrics").json["running"]
        head = f"GET /ssmd/v1/requests/{row['id']}/stream HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        with tiny.served.connect(head) as follower:
            told = b""
            while b'"content":' not in told:
                told += follower.recv(1 << 16)
            assert tiny.served.ask("POST", f"/ssmd/v1/requests/{row['id']}/stop").status == 202
            while b"[DONE]" not in told:
                told += follower.recv(1 << 16)
        while not found.endswith(b"0\r\n\r\n"):
            found += one.recv(1 << 16)
    assert b"content-type: text/event-stream" in told
    assert b'"object":"chat.completion.chunk"' in told
    assert b'"done":true,"done_reason":"stop"' in found
    assert b'"stopped":true' in found
