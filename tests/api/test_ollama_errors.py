"""Ollama's interface: bodies that cannot be, endpoints that are left out, keys, origins, and errors in its form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api.test_calls import TOOLS
from api.test_ollama import CHAT, GENERATE, answered, ask, lines_of, prompt, user
from conftest import TinyArtifacts
from daemon import NO_END, Daemon, daemon, request
from keyfile import bearer, written

from ssmd.api.ollama.body import OllamaChatBody, chat_request, read_chat
from ssmd.api.ollama.conversation import pack
from ssmd.api.ollama.unserved import WHY
from ssmd.config import Settings
from ssmd.engine.request import Request
from ssmd.engine.terms import Rejection

Fields = dict[str, Any]
CALL: Fields = {"function": {"name": "f", "arguments": {"a": 1}}}
RESULT: Fields = {"role": "tool", "content": "x"}


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], None, settings=Settings(offline=True)) as one:
        yield one


def read(unread: set[str] | None = None, **fields: Any) -> Request:
    body = read_chat({"model": "tiny", "messages": [user("a")], **fields})
    return chat_request(body, 1000, {}, set() if unread is None else unread, truncate=False, dropped=None)


def refused(**fields: Any) -> Rejection:
    with pytest.raises(Rejection) as caught:
        read(**fields)
    assert caught.value.status == 400
    assert len(caught.value.message) < 500
    return caught.value


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "bot", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([user("a") | {"content": 7}], "messages[0].content"),
        ([user("a") | {"images": ["aGk="]}], "messages[0].images"),
        ([user("a"), answered("b", thinking=7)], "messages[1].thinking"),
        ([user("a"), answered("b", thinking="x</think>y")], "messages[1].thinking"),
        ([user("a"), answered("", tool_calls={"f": 1}), user("b")], "messages[1].tool_calls"),
        ([user("a"), answered("", tool_calls=[7]), user("b")], "messages[1].tool_calls[0]"),
        ([user("a"), answered("", tool_calls=[{}]), user("b")], "messages[1].tool_calls[0].function"),
        ([user("a"), answered("", tool_calls=[{"id": 7, **CALL}]), user("b")], "messages[1].tool_calls[0].id"),
        (
            [user("a"), answered("", tool_calls=[{"function": {"name": "f", "arguments": 7}}]), user("b")],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([user("a"), answered("", tool_calls=[{"id": "x", **CALL}] * 2), user("b")], "messages[1].tool_calls"),
        ([user("a"), answered("", tool_calls=[CALL])], "messages[1].tool_calls"),
        ([user("a"), answered("", tool_calls=[CALL] * 65), user("b")], "messages[1].tool_calls"),
        ([user("a"), RESULT], "messages[1]"),
        ([user("a"), {**RESULT, "tool_name": "f"}], "messages[1].tool_name"),
        ([user("a"), {**RESULT, "tool_call_id": "x"}], "messages[1].tool_call_id"),
        ([user("a"), answered("", tool_calls=[CALL]), RESULT, RESULT], "messages[3]"),
        ([user("a"), answered("", tool_calls=[CALL]), {**RESULT, "tool_name": "g"}], "messages[2].tool_name"),
        ([user("a"), answered("", tool_calls=[CALL]), {**RESULT, "tool_name": ["f"]}], "messages[2].tool_name"),
        ([user("a"), answered("", tool_calls=[CALL]), {**RESULT, "tool_call_id": ["f"]}], "messages[2].tool_call_id"),
        (
            [user("a"), answered("", tool_calls=[{"id": "x", **CALL}]), {**RESULT, "tool_call_id": "y"}],
            "messages[2].tool_call_id",
        ),
        ([user("a"), user("b") | {"tool_calls": [CALL]}], "messages[1].tool_calls"),
    ],
)
def test_messages_that_cannot_be(messages: Any, param: str) -> None:
    found = refused(messages=messages)
    assert found.param == param
    assert param in found.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": True}, "keep_alive"),
        ({"keep_alive": []}, "keep_alive"),
        ({"think": "deeply"}, "think"),
        ({"think": 1}, "think"),
        ({"format": "yaml"}, "format"),
        ({"format": 7}, "format"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS[:1] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"options": []}, "options"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"num_predict": "x"}}, "options.num_predict"),
        ({"options": {"num_predict": 1.5}}, "options.num_predict"),
        ({"options": {"top_k": -2}}, "options.top_k"),
        ({"options": {"seed": 1 << 64}}, "options.seed"),
        ({"options": {"stop": [7]}}, "options.stop[0]"),
        ({"options": {"stop": ["x"] * 17}}, "options.stop"),
        ({"options": {"logit_bias": {"1000": 1}}}, "options.logit_bias"),
        ({"options": {"repeat_penalty": 1.1, "repetition_penalty": 1.2}}, "options.repetition_penalty"),
    ],
)
def test_fields_that_cannot_be(fields: Fields, param: str) -> None:
    found = refused(**fields)
    assert (found.param or "").startswith(param)
    assert param.rpartition(".")[2] in found.message


def test_each_endpoint_answers_in_ollamas_form(tiny: Daemon) -> None:
    cases: list[tuple[str, str, Any, int, str]] = [
        ("POST", CHAT, {"model": "gpt-2", "messages": [user("a")]}, 404, "no model 'gpt-2'"),
        ("POST", GENERATE, {"model": "gpt-2:latest", "prompt": "a"}, 404, "no model 'gpt-2:latest'"),
        ("POST", "/api/show", {"name": "gpt-2"}, 404, "gpt-2"),
        ("POST", "/api/show", {}, 400, "model is required"),
        ("DELETE", "/api/delete", {"model": "gpt-2"}, 404, "gpt-2"),
        ("POST", "/api/pull", {"model": "gpt-2"}, 400, "cannot be pulled"),
        ("POST", CHAT, b"{", 400, "not valid JSON"),
        ("POST", GENERATE, {"model": tiny.model, "prompt": "a", "suffix": "b"}, 400, "'suffix' is not supported"),
        ("POST", GENERATE, {"model": tiny.model, "prompt": "a", "template": "b"}, 400, "'template' is not supported"),
        ("POST", GENERATE, {"model": tiny.model, "prompt": "a", "images": ["aGk="]}, 400, "images are not supported"),
        ("POST", GENERATE, {"model": tiny.model, "prompt": ["a"]}, 400, "prompt"),
        ("GET", CHAT, None, 405, "allowed: OPTIONS, POST"),
        ("GET", "/api/nothing", None, 404, "there is nothing at"),
        ("POST", "/api/tags", {}, 405, "allowed: GET, HEAD, OPTIONS"),
    ]
    for method, path, body, status, words in cases:
        answer = tiny.served.ask(method, path, body)
        assert (answer.status, set(answer.json)) == (status, {"error"}), path
        assert words in answer.json["error"], answer.json


@pytest.mark.parametrize("path", WHY)
def test_endpoints_that_are_left_out_say_why(tiny: Daemon, path: str) -> None:
    body = {"model": tiny.model, "input": ["x"]}
    answer = tiny.served.ask("POST", path.replace("{digest}", "sha256:29fdb92e57cf0827ded04ae6461b5931"), body)
    status, why = WHY[path]
    assert answer.status == status
    assert set(answer.json) == {"error"}
    assert why in answer.json["error"]
    assert status == (400 if "embed" in path else 501)


CONTEXTS: list[Any] = [
    "abc",
    [1, 2, 3],
    [7566189],
    [7566189, 5],
    [7566189, -1, 0],
    [7566189, 2, 1.5],
    [7566189, 2, True],
    [7566189, 2, 1 << 70],
    [7566189, 2, -5],
    [7566189, 1 << 40, 1],
    [7566189, 6, 0x5B5B5B, 0x5B5B5B],
    [7566189, 2, 0x5B5D, 0],
    pack([{"role": "tool", "content": "x"}]),
    pack([{"role": "user", "content": "x", "images": "y"}]),
    pack([{"role": "user"}]),
]


@pytest.mark.parametrize("context", CONTEXTS, ids=range(len(CONTEXTS)))
def test_a_context_from_elsewhere_is_refused(tiny: Daemon, context: Any) -> None:
    answer = prompt(tiny, "a", context=context)
    assert answer.status == 400
    assert answer.json["error"].startswith("context is not one that this daemon returned")


def test_strict_refuses_options_by_name(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None, settings=Settings(strict=True)) as one:
        answer = ask(one, user("a"), options={"num_ctx": 8192})
        assert (answer.status, "'options.num_ctx'" in answer.json["error"]) == (400, True)


def test_a_stream_that_breaks_off_ends_with_an_error_line(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None) as one:
        body = {"model": one.model, "messages": [user("a")], "options": {"num_predict": 2000, "logit_bias": NO_END}}
        with one.served.connect(request(body, CHAT)) as stream:
            found = stream.recv(1 << 16)
            while b'"done":false' not in found:
                found += stream.recv(1 << 16)
            one.engine.shutdown(0)
            while not found.endswith(b"0\r\n\r\n"):
                found += stream.recv(1 << 16)
    last = [line for line in found.splitlines() if line.startswith(b"{")][-1]
    assert set(json.loads(last)) == {"error"}
    assert "shut down" in json.loads(last)["error"]


# Rights

CHANGES = [
    ("POST", CHAT, {"messages": [user("a")]}),
    ("POST", GENERATE, {"prompt": "a"}),
    ("POST", "/api/pull", {}),
    ("DELETE", "/api/delete", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES, ids=[one[1] for one in CHANGES])
def test_changes_need_a_right_and_an_origin(
    artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory, method: str, path: str, body: Fields
) -> None:
    file = written(
        tmp_path_factory.mktemp("keys") / "keys", "alice alice-has-this-one\nscreen screens-look-here read-only\n"
    )
    with daemon(artifacts["llama-f32"], None, settings=Settings(api_keys_file=file, offline=True)) as one:
        raw = {"model": "gpt-2", **body}
        alice = dict(bearer("alice-has-this-one"))
        cases: list[tuple[Fields, int]] = [
            ({}, 401),
            (dict(bearer("screens-look-here")), 403),
            ({**alice, "host": "elsewhere.example"}, 403),
            ({**alice, "origin": "https://elsewhere.example"}, 403),
            ({**alice, "sec-fetch-site": "cross-site"}, 403),
            ({**alice, "sec-fetch-site": "cross-site", "content-type": "application/x-www-form-urlencoded"}, 403),
            ({**alice, "origin": one.url, "content-type": "application/x-www-form-urlencoded"}, 415),
            ({**alice, "content-type": "text/plain"}, 415),
        ]
        for headers, status in cases:
            answer = one.served.ask(method, path, raw, headers)
            assert (answer.status, set(answer.json)) == (status, {"error"}), headers
        reached = one.served.ask(method, path, raw, alice)
        assert reached.status in (400, 404), "the key is good, and the model is none"
        for read_path in ("/api/tags", "/api/ps", "/api/version"):
            assert one.served.ask("GET", read_path).status == 401
            assert one.served.ask("GET", read_path, headers=bearer("screens-look-here")).status == 200


def test_curl_needs_no_content_type(tiny: Daemon) -> None:
    """Ollama's documentation has `curl … -d '{…}'`, for which curl names a form."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    raw = json.dumps({"model": tiny.model, "messages": [user("a")], "options": {"num_predict": 1}}).encode()
    assert lines_of(tiny.served.ask("POST", CHAT, raw, form))[-1]["eval_count"] == 1
    assert tiny.served.ask("POST", "/v1/chat/completions", raw, form).status == 415


def test_other_clients_answers_stay_apart(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two keys' conversations with the same words have sessions of their own."""
    folder = tmp_path_factory.mktemp("keys")
    file = written(folder / "keys", "alice alice-has-this-one\nbert bert-has-another\n")
    with daemon(artifacts["llama-f32"], folder / "data", settings=Settings(api_keys_file=file)) as one:
        sessions = []
        for key in ("alice-has-this-one", "bert-has-another"):
            body = {
                "model": one.model,
                "messages": [user("Hello " * 40)],
                "stream": False,
                "options": {"num_predict": 4},
            }
            found = one.served.ask("POST", CHAT, body, bearer(key)).json["ssmd"]
            assert found["cached_tokens"] == 0
            sessions.append(found["session"])
        assert len(set(sessions)) == 2
        body["session"] = sessions[0]
        stranger = one.served.ask("POST", CHAT, body, bearer("bert-has-another"))
        assert (stranger.status, set(stranger.json)) == (404, {"error"})


def test_the_name_of_a_field_is_hostile(tiny: Daemon) -> None:
    unread: set[str] = set()
    read(unread, options={"\r\nx-evil: 1": 1, "a" * 5000: 2, "": 3})
    assert all(len(name) < 200 for name in unread)
    answer = ask(tiny, user("a"), options={"num_predict": 1, "\r\nx-evil: 1": 1, "é,": 1})
    assert answer.status == 200
    assert "x-evil" not in answer.headers
    assert OllamaChatBody.model_config["extra"] == "forbid"
