"""The body of a chat completion: what is taken, and what is refused by which name."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from ssmd.api.http.body import parse_object
from ssmd.api.openai.chat import NOT_BUILT, read_chat, to_request
from ssmd.api.operations import OPERATIONS
from ssmd.engine.request import Request
from ssmd.engine.terms import Rejection
from ssmd.text.messages import Message

VOCABULARY = 1000
HELLO = [{"role": "user", "content": "hello"}]


def read(**fields: Any) -> Request:
    raw = json.dumps({"model": "tiny", "messages": HELLO, **fields}).encode()
    return to_request(read_chat(parse_object(raw)), VOCABULARY)


def refused(**fields: Any) -> Rejection:
    with pytest.raises(Rejection) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_openais() -> None:
    request = read()
    assert request.messages == (Message("user", "hello"),)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert (request.n, request.stop, request.max_tokens, request.store) == (1, (), 2048, True)
    assert read(**dict.fromkeys(["temperature", "top_p", "n", "stop", "max_tokens", "seed", "store"])) == request


def test_everything_given_reaches_the_engine() -> None:
    request = read(
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=-0.5,
        presence_penalty=1,
        repeat_last_n=-1,
        seed=-7,
        n=3,
        stop=["a", "b", "a"],
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=4,
        logit_bias={"0": -100, "999": 5.5},
        session="s_1-A",
        store=False,
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="k",
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 40, -7)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 1.0)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.repeat_last_n) == (0.05, 1.2, -1)
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 4)
    assert dict(sampling.logit_bias) == {0: -100.0, 999: 5.5}
    assert (request.n, request.stop, request.max_tokens) == (3, ("a", "b"), 5)
    assert (request.session, request.store) == ("s_1-A", False)


def test_the_retention_of_states_has_two_spellings() -> None:
    assert read().retention is None
    for value, meant in (("24h", "24h"), ("in_memory", "in_memory"), ("in-memory", "in_memory"), ("none", "none")):
        assert read(prompt_cache_retention=value, store=False).retention == meant
    assert refused(prompt_cache_retention="48h").param == "prompt_cache_retention"


def test_the_penalty_has_llama_cpps_name_too_and_its_window() -> None:
    sampling = read(repeat_penalty=1.2).sampling
    assert (sampling.repetition_penalty, sampling.repeat_last_n) == (1.2, 64)
    assert read(repeat_penalty=1.2, repetition_penalty=1.2).sampling == sampling
    nothing = dict.fromkeys(
        ["min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "repeat_penalty", "repeat_last_n"]
    )
    assert read(**nothing) == read()


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_unsupported_fields_are_refused_by_name_unless_neutral(name: str) -> None:
    for neutral in NOT_BUILT[name]:
        assert read(**{name: neutral}) == read()
    error = refused(**{name: {"something": 1}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert name in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"surprise": 1}, "surprise"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.01}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": 3, "max_tokens": 4}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.01}, "min_p"),
        ({"min_p": "0.1"}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"repeat_last_n": 1.5}, "repeat_last_n"),
        ({"repeat_last_n": 2**31}, "repeat_last_n"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1001]}, "stop[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"session": "../x"}, "session"),
        ({"session": "a" * 65}, "session"),
        ({"session": "a\n"}, "session"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"what": True}}, "stream_options.what"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [*HELLO, "x"]}, "messages[1]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [*HELLO, *HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[2].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "user", "content": "x", "name": "<|im_start|>"}]}, "messages[0].name"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    if fields.get("max_tokens") == 10**400:  # no JSON reader of ours takes such a number
        assert error.code in ("invalid_json", "invalid_value")
        return
    assert error.param == param
    assert error.param.split("[")[0].split(".")[0] in error.message
    assert len(error.message) < 400


def integer_fields() -> list[tuple[type[Any], str, int]]:
    """Every integer field of every body that the daemon reads, and the least value above 0 that it can have."""
    found = []
    for shape in {operation.body.shape for operation in OPERATIONS if operation.body is not None}:
        for name, schema in shape.model_json_schema()["properties"].items():
            options = [schema, *schema.get("anyOf", [])]
            options += [one["items"] for one in options if "items" in one]
            if any(one.get("type") == "integer" for one in options):
                found.append((shape, name, 1 if schema.get("type") != "array" else -1))
    return sorted(found, key=lambda row: (row[0].__name__, row[1]))


@pytest.mark.parametrize(
    ("shape", "name", "value"), integer_fields(), ids=lambda part: str(getattr(part, "__name__", part))
)
def test_an_integer_of_any_body_may_be_written_4_0(shape: type[Any], name: str, value: int) -> None:
    def wrong(given: Any) -> list[Any]:
        with pytest.raises(ValidationError) as caught:
            shape.model_validate({name: [given] if value < 0 else given, "surprise": 1})
        return [error["loc"] for error in caught.value.errors() if error["loc"][0] == name]

    assert wrong(abs(value)) == wrong(float(abs(value))) == []
    assert wrong(1.5)
    assert wrong(True)
    assert wrong("1")


def test_integers_written_4_0_reach_the_engine_as_4() -> None:
    sent = {"max_tokens": 4, "top_k": 40, "seed": 1, "n": 2, "top_logprobs": 3, "thinking_budget": 9}
    assert read(**{name: float(value) for name, value in sent.items()}, logprobs=True) == read(**sent, logprobs=True)
    assert read(top_k=-1.0, max_tokens=-1.0, repeat_last_n=-1.0) == read(top_k=-1, max_tokens=-1, repeat_last_n=-1)
    assert type(read(seed=1.0).sampling.seed) is int


def test_missing_parameters_are_named() -> None:
    for name in ("model", "messages"):
        fields = {"model": "tiny", "messages": HELLO}
        del fields[name]
        with pytest.raises(Rejection) as caught:
            read_chat(fields)
        assert (caught.value.param, caught.value.code) == (name, "missing_required_parameter")


def test_contents_are_brought_to_one_form() -> None:
    request = read(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ünal"},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "audio": None},
            {"role": "assistant"},
        ]
    )
    assert request.messages == (
        Message("developer", "be brief"),
        Message("user", "ab", "Ünal"),
        Message("assistant", ""),
        Message("assistant", ""),
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"user": "\\ud800"}',
        b'{"user": "\xff"}',
        b'{"a":' * 5000,
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Rejection) as caught:
        parse_object(raw)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"keep_alive": 1e400', "keep_alive"),
        (b'"keep_alive": -1e999', "keep_alive"),
        (b'"temperature": 1' + b"0" * 400 + b".5", "temperature"),
        (b'"metadata": {"a": [1, 2.5, {"b": 1E+400}]}', "metadata.a[2].b"),
        (b'"tools": [1, {"function": {"parameters": {"default": 1e400}}}]', "tools[1].function.parameters.default"),
    ],
)
def test_a_number_too_large_for_a_float_is_refused(fields: bytes, param: str) -> None:
    with pytest.raises(Rejection) as caught:
        parse_object(b'{"model": "m", "seed": 1e308, "user": "1e400", ' + fields + b"}")
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)
    assert caught.value.message == f"{param} is a number beyond 1.8e308, the range of floats"


@pytest.mark.parametrize(
    "wrong",
    [
        *("\\ud800", "\\udc00", "\\ud800y", "\\ud800\\n", "\\ud800\\u0041", "\\ud83d\\ud83d", "\\\\\\udfff"),
        *("\\ud83d\\ude00" * 3 + "\\ud83d", "\\ud83d\\ude00" * 99 + "\\ude00", "\udcff", "\udced\udca0\udc80"),
    ],
)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"messages": [{"role": "user", "content": "é \\" #"}], "b": ["1"]}', "messages[0].content"),
        ('{"a": "é",\n "tools": [1,\n {"x": {"description": "#"}}, 3]}', "tools[1].x.description"),
        ('{"a": [1, {"name#": 1}]}', "a[1]"),
    ],
)
def test_a_text_that_is_not_unicode_names_its_field(body: str, param: str, wrong: str) -> None:
    with pytest.raises(Rejection) as caught:
        parse_object(body.replace("#", wrong).encode(errors="surrogateescape"))
    assert (caught.value.code, caught.value.param) == ("invalid_json", param)
    assert caught.value.message.startswith(f"the request body is not valid JSON: the text in {param} is not Unicode: ")


def _many(entry: bytes, between: bytes = b",") -> bytes:
    return between.join(entry.replace(b"#", b"%d" % i) for i in range((1 << 20) // (len(entry) + 4)))


FLOODS: dict[str, Callable[[], bytes]] = {  # made by the test that needs one, not in every process of a run
    "wrong tools": lambda: b'"tools":[' + _many(b"1") + b"]",
    "many tools": lambda: b'"tools":[' + _many(b'{"name":"x"}') + b"]",
    "many variables": lambda: b'"chat_template_kwargs":{' + _many(b'"k#":1') + b"}",
    "unknown names of a message": lambda: b'"messages":[{"role":"user",' + _many(b'"k#":1') + b"}]",
    "calls by the thousand": lambda: (
        b'"messages":[{"role":"assistant","tool_calls":[' + _many(b'{"name":"x"}') + b"]}]"
    ),
    "unknown names": lambda: b'"x":1,' + _many(b'"k#":1'),
    "unknown names within": lambda: b'"stream_options":{' + _many(b'"k#":1') + b"}",
    "wrong biases": lambda: b'"logit_bias":{' + _many(b'"#":"x"') + b"}",
    "wrong metadata": lambda: b'"metadata":{' + _many(b'"k#":1') + b"}",
    "too much metadata": lambda: b'"metadata":{' + _many(b'"k#":"v"') + b"}",
    "wrong stops": lambda: b'"stop":[' + _many(b"1") + b"]",
    "a list for a text": lambda: b'"user":[' + _many(b'"a"') + b"]",
    "an object for a text": lambda: b'"user":{' + _many(b'"k#":"a"') + b"}",
    "a list for a message": lambda: b'"messages":[[' + _many(b"1") + b"]]",
    "a very long text for a number": lambda: b'"n":"' + b"1" * (1 << 20) + b'"',
}


@pytest.mark.parametrize("name", FLOODS)
def test_refusing_a_body_costs_no_more_than_reading_it(name: str) -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"hi"}],' + FLOODS[name]() + b"}"
    fields = parse_object(raw)
    tracemalloc.start()
    try:
        with pytest.raises(Rejection) as refused:
            to_request(read_chat(fields), 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(raw)
    assert len(refused.value.message) < 200


def test_empty_lists_by_the_million_are_not_made() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Rejection, match="more than 250000 values"):
            parse_object(b'{"messages":[' + b"[]," * 1_000_000 + b"[]]}")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
    text = '[{"' * 300_000 + "\\" * 2
    assert parse_object(json.dumps({"text": text}).encode()) == {"text": text}, "brackets in a text are none"
