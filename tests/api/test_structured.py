"""Constrained answers over HTTP: every spelling of a format, together with all other request fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from conftest import TinyArtifacts
from daemon import Daemon, chunks, daemon, events, quiet, text_of, whole_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from schemas import schemas
from serving import Answer

from ssmd.engine.sampling import grammar
from ssmd.runtime.protocol import Handle, Logits

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "the_name_of_the_city": {"type": "string", "maxLength": 8},
        "how_many_people_live_there": {"enum": ["few", "many"]},
    },
    "required": ["the_name_of_the_city", "how_many_people_live_there"],
    "additionalProperties": False,
}
OPEN = {name: value for name, value in CITY.items() if name != "additionalProperties"}  # which means the same
GBNF = 'root ::= greeting " " name\ngreeting ::= "hello" | "good day"\nname ::= [A-Z] [a-z]{1,5}\n'
AMBIGUOUS = 'start: s\ns: s s | "a" | "b"\n'  # the longer, the more ways there are to read it
LARK = 'start: "hello" | "good day" " " /[A-Z]/\n'


def format_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, **more}}


@pytest.fixture(scope="module", params=["llama-f32", "granite-int8"])
def tiny(request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: Any) -> Iterator[Daemon]:
    with daemon(artifacts[request.param], tmp_path_factory.mktemp("data")) as one:
        yield one


def ask(tiny: Daemon, content: str = "Where?", **fields: Any) -> tuple[list[str], dict[str, Any]]:
    """The texts of all choices, each of which came to its end, and the whole answer."""
    answer = tiny.chat(content, **{"logit_bias": None, "max_tokens": 300, **fields})
    assert answer.status == 200, answer.body
    choices = answer.json["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices], answer.json


VALID = jsonschema.Draft202012Validator
SPELLINGS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": format_of(CITY)}, "city"),
    ({"response_format": format_of(CITY, strict=True, description="a city")}, "city"),
    ({"response_format": format_of(CITY, strict=False)}, "city"),
    ({"response_format": {"type": "json_object", "schema": OPEN}}, "city"),
    ({"response_format": {"type": "json_schema", "schema": CITY}}, "city"),
    ({"guided_json": CITY}, "city"),
    ({"guided_json": json.dumps(CITY)}, "city"),
    ({"structured_outputs": {"json": CITY}}, "city"),
    ({"json_schema": CITY}, "city"),
    ({"guided_regex": r"[ab]{2,9}\d"}, r"[ab]{2,9}\d"),
    ({"structured_outputs": {"regex": r"[ab]{2,9}\d"}}, r"[ab]{2,9}\d"),
    ({"guided_choice": ["yes", "no", 'per"haps']}, 'yes|no|per"haps'),
    ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
    ({"guided_grammar": GBNF}, "(hello|good day) [A-Z][a-z]{1,5}"),
    ({"grammar": GBNF}, "(hello|good day) [A-Z][a-z]{1,5}"),
    ({"grammar": LARK}, "hello|good day [A-Z]"),
    ({"structured_outputs": {"grammar": LARK}}, "hello|good day [A-Z]"),
]


@pytest.mark.parametrize(("fields", "what"), SPELLINGS)
def test_each_spelling_is_enforced(tiny: Daemon, fields: dict[str, Any], what: str) -> None:
    texts, _ = ask(tiny, temperature=2, n=3, seed=1, **fields)
    for text in texts:
        if what == "city":
            VALID(CITY).validate(json.loads(text))
        else:
            assert re.fullmatch(what, text)


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_json_object(tiny: Daemon, fields: dict[str, Any]) -> None:
    found = []
    for seed in range(6):  # a tiny model need not come to an end
        answer = tiny.chat(**fields, temperature=1, seed=seed, max_tokens=200, logit_bias=None).json["choices"][0]
        if answer["finish_reason"] == "stop":
            found.append(json.loads(answer["message"]["content"]))
        else:
            assert answer["message"]["content"].startswith("{")
    assert all(isinstance(one, dict) for one in found)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None, "guided_choice": None, "structured_outputs": None},
        {"structured_outputs": {}, "grammar": "", "json_schema": None},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_what_asks_for_nothing_changes_nothing(tiny: Daemon, fields: dict[str, Any]) -> None:
    assert whole_text(tiny.chat("nothing", store=False, **fields)) == whole_text(tiny.chat("nothing", store=False))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schema=schemas(),
    sampling=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0, 0.5, 1, 2]), "n": st.sampled_from([1, 1, 3]), "seed": st.integers(0, 9)},
        optional={
            "top_k": st.sampled_from([1, 5, 300]),
            "top_p": st.sampled_from([0, 0.3, 0.95]),
            "min_p": st.sampled_from([0.02, 0.5]),
            "repetition_penalty": st.sampled_from([0.7, 1.3]),
            "repeat_last_n": st.just(-1),
            "frequency_penalty": st.sampled_from([-2, 2]),
            "presence_penalty": st.sampled_from([-1, 2]),
            "logprobs": st.just(True),
            "typical_p": st.sampled_from([0, 0.4]),
            "xtc_probability": st.just(1),
            "xtc_threshold": st.sampled_from([0, 0.05]),
            "dry_multiplier": st.just(2),
            "dry_allowed_length": st.just(1),
            "dry_sequence_breakers": st.just([":"]),
            "logit_bias": st.sampled_from([{"5": 100}, {"90": -100, "3": 100}]),
        },
    ),
)
def test_whatever_the_sampling_a_whole_answer_is_valid(
    tiny: Daemon, schema: dict[str, Any], sampling: dict[str, Any]
) -> None:
    fields = {"response_format": format_of(schema), "max_tokens": 120, "logit_bias": None, "store": False, **sampling}
    answer = tiny.chat(**fields)
    assert answer.status == 200, answer.body
    for choice in answer.json["choices"]:
        if choice["finish_reason"] == "stop":
            VALID(schema).validate(json.loads(choice["message"]["content"]))


def test_the_grammar_ends_an_answer_and_the_next_turn_resumes_it(tiny: Daemon) -> None:
    [text], first = ask(tiny, "Where is it?", response_format=format_of(CITY), temperature=1, seed=3)
    session = first["usage"]["ssmd"]["session"]
    [turn] = tiny.turns(session)
    assert (turn.finish, turn.complete) == ("stop", True)
    quiet(tiny)
    said = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": text}]
    second = tiny.chat(messages=[*said, {"role": "user", "content": "And?"}]).json["usage"]
    assert second["ssmd"]["session"] == session
    assert second["ssmd"]["resume"] == "exact"
    # All but the last token of the answer, which nothing had to be fed to know that it is the last.
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1 - 16
    again = ask(tiny, "Where is it?", response_format=format_of(CITY), temperature=1, seed=3, session=session)
    assert again[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
    assert len(tiny.turns(session)) == 3


def test_forced_tokens_are_fed_at_once_and_equal_the_drawn_ones(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    decode = tiny.engine.program.decode

    def decoded(handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        steps.append(len(handles))
        return decode(handles, tokens)

    monkeypatch.setattr(tiny.engine.program, "decode", decoded)
    [text], answer = ask(tiny, store=False, response_format=format_of(CITY))
    assert len(steps) < answer["usage"]["completion_tokens"] / 2
    steps.clear()
    [drawn], other = ask(tiny, store=False, response_format=format_of(CITY), logprobs=True)
    assert other["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == len(steps)
    assert drawn[:27] == text[:27]
    entries = other["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == drawn
    assert all(entry["logprob"] < 0 for entry in entries)  # of what the model thinks, whatever it may say


def test_forced_tokens_do_not_change_draws_or_penalties(tiny: Daemon) -> None:
    if tiny.engine.artifact.manifest.quantization != "f32":
        pytest.skip("tokens in one piece have other bits than one by one, so a close draw falls otherwise")
    asked: dict[str, Any] = {
        "temperature": 1,
        "seed": 7,
        "frequency_penalty": 2,
        "response_format": format_of(CITY),
        "store": False,
    }
    assert ask(tiny, **asked)[0] == ask(tiny, logprobs=True, **asked)[0]


def test_what_is_fed_is_the_answer_in_its_order(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of forced tokens that are too short for a piece of their own, and longer ones."""
    program, fed = tiny.engine.program, dict[int, list[int]]()
    decode, prefill = program.decode, program.prefill
    kept: list[Handle] = []  # so that no other has its number

    def note(handle: Handle, tokens: Sequence[int]) -> None:
        kept.append(handle)
        fed.setdefault(id(handle), []).extend(tokens)

    def decoded(handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        for handle, token in zip(handles, tokens, strict=True):
            note(handle, [token])
        return decode(handles, tokens)

    def prefilled(handle: Handle, tokens: Sequence[int]) -> Logits:
        note(handle, tokens)
        return prefill(handle, tokens)

    quiet(tiny)
    monkeypatch.setattr(program, "decode", decoded)
    monkeypatch.setattr(program, "prefill", prefilled)
    short = {"type": "object", "properties": {name: {"type": "boolean"} for name in ("qxvzkwj", "jwkzvxq", "zzqqjjx")}}
    schema = {**short, "required": [*short["properties"]], "additionalProperties": False}
    asked: dict[str, Any] = {"max_tokens": 300, "logit_bias": None, "temperature": 1}
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(tiny.chat, f"Fed? {i}", response_format=format_of(CITY if i == 3 else schema), seed=i, **asked)
            for i in range(4)
        ]
    for one in answers:
        usage = one.result().json["usage"]
        [turn] = tiny.turns(usage["ssmd"]["session"])
        ids = turn.ids.own.tolist()
        new = ids[usage["prompt_tokens_details"]["cached_tokens"] :]
        assert [tokens for tokens in fed.values() if len(tokens) > 20 and new[: len(tokens)] == tokens], (new, fed)


def test_streams_of_several_choices_beside_free_answers(tiny: Daemon) -> None:
    alone = whole_text(tiny.chat("free", store=False, max_tokens=60))
    with ThreadPoolExecutor(6) as pool:
        asked: dict[str, Any] = {
            "temperature": 1,
            "seed": 5,
            "stream": True,
            "store": False,
            "max_tokens": 300,
            "logit_bias": None,
        }
        bound = [pool.submit(tiny.chat, response_format=format_of(CITY), n=2, **asked) for _ in range(3)]
        free = [pool.submit(tiny.chat, "free", store=False, max_tokens=60) for _ in range(2)]
        for one in bound:
            found = chunks(one.result())
            for index in (0, 1):
                VALID(CITY).validate(json.loads(text_of(found, index)))
        assert [whole_text(one.result()) for one in free] == [alone, alone]


def test_max_tokens_and_stop_strings_cut_structured_answers(tiny: Daemon) -> None:
    [text], _ = ask(tiny, store=False, response_format=format_of(CITY))
    for most in (1, 4, 13):
        cut = tiny.chat(store=False, response_format=format_of(CITY), max_tokens=most, logit_bias=None).json
        choice = cut["choices"][0]
        assert (choice["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", most)
        assert text.startswith(choice["message"]["content"])
    [cut_off], whole = ask(tiny, "stopped", response_format=format_of(CITY), stop="_name_of")
    assert cut_off == '{"the'
    [turn] = tiny.turns(whole["usage"]["ssmd"]["session"])
    assert turn.complete


def test_an_answer_that_was_begun_goes_on_with_what_is_new(tiny: Daemon) -> None:
    said = [{"role": "user", "content": "yes or no?"}, {"role": "assistant", "content": "I say"}]
    [text], _ = ask(tiny, messages=said, guided_choice=[" yes", " no"])
    assert text in (" yes", " no")


def test_the_same_again_is_the_same_answer(tiny: Daemon) -> None:
    body = tiny.body("again", response_format=format_of(CITY), temperature=1, logit_bias=None, max_tokens=300)
    headers = {"idempotency-key": f"structured-{tiny.model}"}
    first, second = (tiny.served.ask("POST", "/v1/chat/completions", body, headers) for _ in range(2))
    assert second.headers["idempotent-replayed"] == "true"
    assert first.json == second.json


def test_a_grammar_that_fails_on_the_way_fails_the_answer(tiny: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def tight() -> LLParserLimits:
        return LLParserLimits(step_max_items=60, verbose_errors=False)

    monkeypatch.setattr(grammar, "limits", tight)
    found = chunks_until_error(tiny.chat(grammar=AMBIGUOUS, max_tokens=300, temperature=1, seed=1, stream=True))
    assert found[-1]["error"]["code"] == "grammar_failed"
    assert "cannot be followed any further" in found[-1]["error"]["message"]
    assert re.fullmatch("[ab]+", text_of(found[:-1]))
    whole = tiny.chat(grammar=AMBIGUOUS, max_tokens=300, temperature=1, seed=1)
    assert (whole.status, whole.error["code"], whole.error["param"]) == (400, "grammar_failed", "grammar")
    assert whole_text(tiny.chat("after it", store=False))


def chunks_until_error(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    return [json.loads(event) for event in events(answer.body)]


CENTS = {"type": "object", "properties": {"n": {"multipleOf": 300_001.5}}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": "json"}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    ({"response_format": {"type": "text", "schema": CITY}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more", "unknown_parameter"),
    ({"response_format": format_of(["a"])}, "response_format.json_schema.schema", "invalid_value"),
    (
        {"response_format": format_of({"properties": {"a": {"not": {"type": "null"}}}})},
        "response_format.json_schema.schema.properties.a.not",
        "unsupported_schema",
    ),
    ({"guided_json": "{"}, "guided_json", "invalid_value"),
    ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json.$ref", "unsupported_schema"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "unsupported_schema"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "invalid_value"),
    ({"guided_regex": "("}, "guided_regex", "invalid_value"),
    ({"guided_regex": ""}, "guided_regex", "invalid_value"),
    ({"guided_choice": []}, "guided_choice", "invalid_value"),
    ({"guided_choice": ["a"] * 1001}, "guided_choice", "invalid_value"),
    ({"guided_choice": [1]}, "guided_choice[0]", "invalid_value"),
    ({"grammar": "hello"}, "grammar", "invalid_value"),
    ({"grammar": 'root ::= "a" nowhere'}, "grammar", "invalid_value"),
    ({"grammar": 'root ::= "a" root'}, "grammar", "invalid_value"),
    ({"grammar": "root ::= " + "(" * 5000}, "grammar", "invalid_value"),
    ({"grammar": 'root ::= "' + "a" * 40_000 + '"'}, "grammar", "invalid_value"),
    ({"grammar": "start: nowhere"}, "grammar", "invalid_value"),
    ({"grammar": "  "}, "grammar", "invalid_value"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown_parameter"),
    ({"guided_json": CITY, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    ({"structured_outputs": {"json": CITY, "choice": ["a"]}}, "structured_outputs.choice", "invalid_value"),
    ({"response_format": {"type": "json_object"}, "grammar": LARK}, "grammar", "invalid_value"),
    ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "invalid_value"),
    ({"json_schema": {"items": {"multipleOf": 3_000_017}}}, "json_schema.items.multipleOf", "unsupported_schema"),
    ({"guided_json": {"allOf": [{"pattern": f"{i}"} for i in range(20)]}}, "guided_json.allOf", "unsupported_schema"),
    ({"grammar": "start: A\nA: " + " & ".join(["/a*/"] * 20)}, "grammar", "invalid_value"),
    (
        {
            "response_format": format_of({"items": {"multipleOf": 3_000_017}}),
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "response_format.json_schema.schema.items.multipleOf",
        "unsupported_schema",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": CENTS}}]},
        "tools[0].function.parameters.properties.n.multipleOf",
        "unsupported_schema",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_is_refused_by_name(tiny: Daemon, fields: dict[str, Any], param: str, code: str) -> None:
    answer = tiny.chat(**fields)
    assert answer.status == 400, answer.body
    assert (answer.error["param"], answer.error["code"]) == (param, code), answer.error
