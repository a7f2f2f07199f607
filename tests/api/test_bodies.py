"""Bodies that client libraries sent, word for word: a daemon serves all of them and names the fields it ignores.

tests/data/bodies was written by `benchmarks/client_libraries.py --record tests/data/bodies`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from api.test_calls import calls_of
from api.test_fields import ROWS
from conftest import ROOT, TinyArtifacts
from daemon import CHAT, Daemon, chunks, daemon, text_of

from ssmd.api.http.errors import IGNORED

Fields = dict[str, Any]
FILES = sorted((ROOT / "tests" / "data" / "bodies").glob("*.json"))
WHAT = {row.name: row.what for row in ROWS} | {"prompt": "honoured"}  # which is a completion's
MOST = 100  # tokens of an answer; a tiny model need not come to an end
VALID = jsonschema.Draft202012Validator


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], tmp_path_factory.mktemp("data")) as one:
        yield one


def test_they_are_there() -> None:
    assert len(FILES) > 6
    assert sum(file.stat().st_size for file in FILES) < 100_000


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_library_sent_is_done(tiny: Daemon, file: Any) -> None:
    requests = json.loads(file.read_text("utf-8"))["requests"]
    assert requests
    for request in requests:
        body: Fields = request["body"]
        limits = {name: MOST for name in ("max_tokens", "max_completion_tokens") if (body.get(name) or 0) > MOST}
        answer = tiny.served.ask("POST", request["path"], {**body, "model": tiny.model, **limits})
        assert answer.status == 200, (request, answer.body)
        assert named(answer.headers.get(IGNORED)) == {"messages." + name for name in odd(body)} | {
            name for name, value in body.items() if value is not None and WHAT.get(name, "ignored") == "ignored"
        }, request
        if request["path"] != CHAT:
            continue
        if body.get("stream"):
            found = chunks(answer)
            done = [choice["finish_reason"] for chunk in found for choice in chunk["choices"]][-1]
            check(body, text_of(found), calls_of(found), done)
            continue
        for choice in answer.json["choices"]:
            message = choice["message"]
            check(body, message["content"], message.get("tool_calls") or [], choice["finish_reason"])


def named(header: str | None) -> set[str]:
    return set(filter(None, (header or "").split(", ")))


def odd(body: Fields) -> set[str]:
    """Return the fields of messages that only the library itself uses."""
    known = {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "refusal",
        "function_call",
        "audio",
        "annotations",
    }
    return {n for m in body.get("messages", ()) for n, v in m.items() if n not in known and v is not None}


def check(body: Fields, text: str | None, calls: list[Fields], done: str) -> None:
    """Raises unless an answer is what a body asks for, as far as it came."""
    choice = body.get("tool_choice")
    by_name = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    if choice == "required" or isinstance(choice, dict):
        assert calls
        assert isinstance(choice, str) or [call["function"]["name"] for call in calls] == [choice["function"]["name"]]
        for call in calls[: None if done != "length" else -1]:
            VALID(by_name[call["function"]["name"]]["parameters"]).validate(json.loads(call["function"]["arguments"]))
    elif choice == "none" or not by_name:
        assert not calls
    form = body.get("response_format") or {}
    if form.get("type") in ("json_schema", "json_object") and not calls and done != "length":
        schema = form.get("schema") or form.get("json_schema", {}).get("schema") or {"type": "object"}
        VALID(schema).validate(json.loads(text or ""))
