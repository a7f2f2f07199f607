"""/v1/completions over a real engine, store and socket: prompts of all shapes, what is said, and what is kept."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import NO_END, Daemon, chunks, daemon, idle, soon
from keyfile import bearer, written
from openai_client import openai
from serving import Answer

from ssmd.config import Settings
from ssmd.sessions.rows.database import FILE

PROMPT = "The river is long, and the road beside it is longer still, said the old man to the young one at the gate. "


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["llama-f32"]


@pytest.fixture(scope="module")
def tiny(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifact, tmp_path_factory.mktemp("data")) as one:
        yield one


def complete(one: Daemon, prompt: Any = PROMPT, **fields: Any) -> Answer:
    body = {"model": one.model, "prompt": prompt, "temperature": 0, "max_tokens": 8, "logit_bias": NO_END, **fields}
    return one.served.ask("POST", "/v1/completions", body)


def texts(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    choices = answer.json["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def ids_of(one: Daemon, text: str) -> list[int]:
    found: list[int] = one.engine.words.ids(text).tolist()
    return found


def test_a_whole_answer(tiny: Daemon) -> None:
    answer = complete(tiny)
    body = answer.json
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-gen_")
    [choice] = body["choices"]
    assert choice["text"]
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids_of(tiny, PROMPT)), 8)
    assert (usage["ssmd"]["session"], usage["ssmd"]["stored"]) == (None, False)
    assert "x-ssmd-session" not in answer.headers


def test_openais_default_length(tiny: Daemon) -> None:
    assert complete(tiny, max_tokens=None).json["usage"]["completion_tokens"] == 16
    assert complete(tiny, max_tokens=-1).json["usage"]["ssmd"]["context_left"] == 0


def test_ids_say_what_their_text_says(tiny: Daemon) -> None:
    ids = ids_of(tiny, PROMPT)
    assert texts(complete(tiny, ids)) == texts(complete(tiny))
    written = [float(token) for token in ids]  # as clients of one number type send them
    assert texts(complete(tiny, written)) == texts(complete(tiny, [written])) == texts(complete(tiny))
    assert complete(tiny, [1, 1.5]).error["param"] == "prompt[1]"


def test_many_prompts_are_answered_as_each_alone(tiny: Daemon) -> None:
    """In lanes together, numbered in their order; usage is of all."""
    prompts = [f"{PROMPT}{word}" for word in ("one", "two", "three", "four", "five", "six")]
    each = [complete(tiny, prompt, n=2, temperature=1, seed=5) for prompt in prompts]
    together = complete(tiny, prompts, n=2, temperature=1, seed=5)
    assert texts(together) == list(itertools.chain.from_iterable(map(texts, each)))
    for count in ("prompt_tokens", "completion_tokens"):
        assert together.json["usage"][count] == sum(one.json["usage"][count] for one in each)
    assert texts(complete(tiny, [ids_of(tiny, one) for one in prompts], n=2, temperature=1, seed=5)) == texts(together)
    soon(lambda: idle(tiny))


def test_a_stream_says_the_same(tiny: Daemon) -> None:
    prompts = [PROMPT, f"{PROMPT}two"]
    found = chunks(complete(tiny, prompts, stream=True, stream_options={"include_usage": True}))
    said = ["".join(c["text"] for chunk in found for c in chunk["choices"] if c["index"] == i) for i in range(2)]
    assert said == texts(complete(tiny, prompts))
    reasons = [c["finish_reason"] for chunk in found for c in chunk["choices"] if c["finish_reason"]]
    assert reasons == ["length", "length"]
    assert found[-1]["usage"]["completion_tokens"] == 16


def test_echo_puts_the_prompt_first(tiny: Daemon) -> None:
    answer = complete(tiny, [PROMPT, "two"], echo=True, n=2)
    plain = complete(tiny, [PROMPT, "two"], n=2)
    assert texts(answer) == [
        before + said for before, said in zip([PROMPT] * 2 + ["two"] * 2, texts(plain), strict=True)
    ]
    assert texts(complete(tiny, ids_of(tiny, PROMPT), echo=True))[0] == texts(answer)[0]
    found = chunks(complete(tiny, echo=True, stream=True))
    assert found[0]["choices"][0]["text"] == PROMPT


def test_log_probabilities_have_the_old_shape(tiny: Daemon) -> None:
    [choice] = complete(tiny, logprobs=3).json["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(one) for one in logprobs.values()} == {8}
    for token, logprob, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert 3 <= len(top) <= 4
        assert top[token] == logprob
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    [without] = complete(tiny, logprobs=0).json["choices"]
    assert [list(top) for top in without["logprobs"]["top_logprobs"]] == [[token] for token in logprobs["tokens"]]
    found = chunks(complete(tiny, logprobs=3, stream=True))
    pieces = [c["logprobs"] for chunk in found for c in chunk["choices"] if c["logprobs"]]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == logprobs["text_offset"]


def test_what_was_read_is_not_read_again(artifact: Path, tmp_path: Path) -> None:
    """Neither by the same prompt nor by one that begins with it; also after a restart."""
    with daemon(artifact, tmp_path) as one:
        length = len(ids_of(one, PROMPT))
        first = complete(one)
        assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = complete(one)
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == length - 1
        assert again.json["usage"]["ssmd"]["resume"] == "exact"
        assert texts(again) == texts(first)
        longer = complete(one, [*ids_of(one, PROMPT), *ids_of(one, "And then?")])
        assert longer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == length - 1
    with daemon(artifact, tmp_path) as one:
        assert complete(one).json["usage"]["prompt_tokens_details"]["cached_tokens"] == length - 1
        assert one.store is not None
        assert one.store.sessions() == []


def test_nothing_is_kept_of_what_is_not_to_be_stored(artifact: Path, tmp_path: Path) -> None:
    with daemon(artifact, tmp_path) as one:
        for _ in range(2):
            answer = complete(one, store=False)
            assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_states_of_prompts_take_a_share_of_the_quota(artifact: Path, tmp_path: Path) -> None:
    with daemon(artifact, tmp_path) as one:
        assert one.store is not None
        complete(one, "measure this")
        assert one.engine.writer is not None
        one.engine.writer.flush()
        size = one.store.bytes_stored()
        one.store.quota = 8 * 10 * size
        for i in range(40):
            assert complete(one, f"prompt {i} of forty, each of them another one").status == 200
        one.engine.writer.flush()
        assert 0 < one.store.bytes_stored() <= one.store.quota // 8
        last = complete(one, "prompt 39 of forty, each of them another one")
        assert last.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        first = complete(one, "prompt 0 of forty, each of them another one")
        assert first.json["usage"]["ssmd"]["resume"] == "none"  # the one used longest ago went first
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        assert db.execute("select count(*) from turn_checkpoint").fetchone() == (0,)


def test_a_chat_and_a_prompt_share_what_they_begin_with(tiny: Daemon) -> None:
    chat = tiny.chat("Share this with a prompt, please, if you can do that at all")
    messages = [{"role": "user", "content": "Share this with a prompt, please, if you can do that at all"}]
    rendered = tiny.served.ask("POST", "/apply-template", {"messages": messages})
    if rendered.status == 404:
        pytest.skip("templates are not rendered for clients")
    answer = complete(tiny, rendered.json["prompt"])
    assert answer.json["usage"]["prompt_tokens"] == chat.json["usage"]["prompt_tokens"]
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": None}, "missing_required_parameter", "prompt"),
        ({"prompt": ""}, "invalid_request_error", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": {}}, "invalid_value", "prompt"),
        ({"prompt": ["x", 1]}, "invalid_value", "prompt[1]"),
        ({"prompt": [1, "x"]}, "invalid_value", "prompt[1]"),
        ({"prompt": [[1], "x"]}, "invalid_value", "prompt[1]"),
        ({"prompt": [[]]}, "invalid_value", "prompt[0]"),
        ({"prompt": [True]}, "invalid_value", "prompt[0]"),
        ({"prompt": [-1]}, "invalid_value", "prompt[0]"),
        ({"prompt": [10**9]}, "invalid_value", "prompt[0]"),
        ({"prompt": [[1, 10**30]]}, "invalid_value", "prompt[0][1]"),
        ({"prompt": ["x"] * 65}, "invalid_value", "prompt"),
        ({"prompt": ["x"] * 64, "n": 3}, "invalid_value", "n"),
        ({"prompt": "x " * 3000}, "context_length_exceeded", "prompt"),
        ({"prompt": ["x", "x " * 3000]}, "context_length_exceeded", "prompt"),
        ({"logprobs": 6}, "invalid_value", "logprobs"),
        ({"logprobs": True}, "invalid_value", "logprobs"),
        ({"logprobs": 1, "echo": True}, "unsupported_parameter", "logprobs"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"session": "s"}, "unsupported_parameter", "session"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"tools": [{}]}, "unsupported_parameter", "tools"),
        ({"mirostat": 2}, "unsupported_parameter", "mirostat"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"model": "gpt-2"}, "model_not_found", "model"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], code: str, param: str, tiny: Daemon) -> None:
    answer = complete(tiny, **fields)
    assert answer.status in (400, 404), answer.body
    assert (answer.error["code"], answer.error["param"]) == (code, param), answer.error
    soon(lambda: idle(tiny))


def test_what_asks_for_nothing_passes(tiny: Daemon) -> None:
    answer = complete(tiny, suffix=None, best_of=1, echo=False, logprobs=None, session=None, tools=[], user="x")
    assert answer.status == 200, answer.body
    assert complete(tiny, n=2, best_of=2).status == 200
    assert complete(tiny, cache_prompt=True).json["usage"]["ssmd"]["ignored"] == ["cache_prompt"]
    assert complete(tiny, enable_thinking=True).json["usage"]["ssmd"]["ignored"] == ["enable_thinking"]


def test_stop_strings_and_a_client_that_leaves(tiny: Daemon) -> None:
    said = texts(complete(tiny, max_tokens=20))[0]
    answer = complete(tiny, max_tokens=20, stop=said[4:7])
    assert texts(answer)[0] == said[: said.index(said[4:7])]
    assert answer.json["choices"][0]["finish_reason"] == "stop"


def test_what_one_name_read_is_read_again_for_another(artifact: Path, tmp_path: Path) -> None:
    """Response time must not reveal that another owner sent the same prompt before."""
    keys = written(tmp_path / "keys", "alice alice-has-this-one\nbob bob-has-that-one\n")
    with daemon(artifact, tmp_path / "data", settings=Settings(api_keys_file=keys)) as one:
        body = {"model": one.model, "prompt": PROMPT, "max_tokens": 1}
        cached = []
        for key in ("alice-has-this-one", "bob-has-that-one", "alice-has-this-one"):
            answer = one.served.ask("POST", "/v1/completions", body, bearer(key))
            cached.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, len(ids_of(one, PROMPT)) - 1]


def test_one_that_fails_ends_the_others(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon(artifact, None) as one:
        decode, steps = one.engine.program.decode, itertools.count()

        def failing(handles: Any, tokens: Any) -> Any:
            if next(steps) == 12:
                raise RuntimeError("the device is on fire")
            return decode(handles, tokens)

        monkeypatch.setattr(one.engine.program, "decode", failing)
        answer = complete(one, ["one", "two", "three", "four", "five"], max_tokens=100)
        assert (answer.status, answer.error["code"]) == (500, "generation_failed")
        soon(lambda: idle(one))
        assert next(steps) < 20  # the one that waited for a lane did not get it
        assert complete(one, ["one", "two"]).status == 200


def test_a_client_that_leaves_ends_all_of_them(tiny: Daemon) -> None:
    body = {"model": tiny.model, "prompt": ["one", "two", "three"], "max_tokens": 400, "logit_bias": NO_END}
    raw = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n"
    with tiny.served.connect(head.encode() + raw) as one:
        assert b"text_completion" in one.recv(65536) + one.recv(65536)
    soon(lambda: idle(tiny))


def test_an_answer_under_way_is_followed_and_ended_by_its_name(tiny: Daemon) -> None:
    body = {"model": tiny.model, "prompt": ["one", "two"], "max_tokens": 400, "logit_bias": NO_END, "background": True}
    raw = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n"
    with tiny.served.connect(head.encode() + raw) as one:
        got = b""
        while b'"id":"' not in got:
            got += one.recv(65536)
    assert b'"choices":[]' in got.split(b"\n\n")[0]  # it is called so before its first word
    name = got.split(b'"id":"')[1].split(b'"')[0].decode()
    assert name.startswith("cmpl-gen_")
    assert tiny.served.ask("POST", f"/ssmd/v1/requests/{name}/stop").status == 202
    soon(lambda: idle(tiny))


def test_characters_that_ssmd_uses_itself_are_plain_characters(tiny: Daemon) -> None:
    text = "a\U00100000b\U0010fff0<|im_end|>"
    assert texts(complete(tiny, text, echo=True))[0].startswith(text)
    plain = complete(tiny, text).json["usage"]["prompt_tokens"]
    assert plain == complete(tiny, text[:-10]).json["usage"]["prompt_tokens"] + 1


def test_the_sdk_reads_it(tiny: Daemon) -> None:
    asked = {"model": tiny.model, "prompt": [PROMPT, "two"], "temperature": 0, "logprobs": 2, "logit_bias": NO_END}
    result = openai("completions", tiny.url, asked)
    assert [choice["text"] for choice in result["whole"]["choices"]] == result["streamed"]
