"""Known volatile text in requests: neither read by the model nor stored, and named in the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, chunks, daemon, quiet

from ssmd.api.openai.messages import read_messages
from ssmd.config import Settings
from ssmd.text.messages import Message

NAME = "x-anthropic-billing-header"
RULES = "You help with a project. Read a file before you edit it, and never write more than was asked for. " * 4
Fields = dict[str, Any]


def header(nonce: int) -> str:
    return f"{NAME}: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={nonce:05x};"


def as_blocks(nonce: int) -> list[Fields]:
    blocks = [{"type": "text", "text": header(nonce)}, {"type": "text", "text": RULES, "cache_control": {}}]
    return [{"role": "system", "content": blocks}]


def as_text(nonce: int) -> list[Fields]:
    return [{"role": "system", "content": f"{header(nonce)}\n{RULES}"}]


def as_messages(nonce: int) -> list[Fields]:
    return [{"role": "system", "content": header(nonce)}, {"role": "developer", "content": RULES}]


FORMS = {"blocks": as_blocks, "text": as_text, "messages": as_messages}


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["granite-f32"], tmp_path_factory.mktemp("data") / "data") as one:
        yield one


def user(content: Any) -> Fields:
    return {"role": "user", "content": content}


def read(messages: list[Fields]) -> tuple[list[Message], set[str]]:
    dropped: set[str] = set()
    return list(read_messages(messages, dropped=dropped)), dropped


@pytest.mark.parametrize("form", FORMS)
def test_header_is_dropped_from_a_system_prompt(form: str) -> None:
    found, dropped = read([*FORMS[form](1), user("Hello")])
    assert [message.content for message in found] == [RULES, "Hello"]
    assert dropped == {NAME}


@pytest.mark.parametrize(
    "messages",
    [
        [user(header(1))],
        [user([{"type": "text", "text": header(1)}, {"type": "text", "text": "What is this line?"}])],
        [{"role": "system", "content": RULES}, user(f"{header(1)}\nWhat is this line?")],
        [user("Hello"), {"role": "system", "content": header(1)}],
        [user("Hello"), {"role": "assistant", "content": header(1)}, user("Again")],
        [{"role": "system", "content": header(1)}],
    ],
)
def test_header_stays_elsewhere(messages: list[Fields]) -> None:
    found, dropped = read(messages)
    assert found == list(read_messages(messages))
    assert any(header(1) in message.content for message in found)
    assert dropped == set()


def test_error_names_the_place_that_the_client_sent() -> None:
    with pytest.raises(Exception, match=r"messages\[1\]\.content\[0\]"):
        read([{"role": "system", "content": header(1)}, user([{"type": "text", "text": 7}])])


@pytest.mark.parametrize("form", FORMS)
def test_changed_header_goes_on_with_its_session(tiny: Daemon, form: str) -> None:
    """Three turns, streamed, another header in each: one session, and only what is new is read."""
    talk: list[Fields] = [user(f"A question as {form}")]
    before, session = 0, None
    for turn in range(3):
        messages = [*FORMS[form](turn), *talk]
        body = tiny.body(messages=messages, stream=True, stream_options={"include_usage": True}, max_tokens=8)
        found = chunks(tiny.served.ask("POST", CHAT, body))
        usage = found[-1]["usage"]
        said = "".join(c["delta"].get("content") or "" for chunk in found for c in chunk["choices"])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["ssmd"]["dropped"] == [NAME]
        assert cached >= before
        assert session in (None, usage["ssmd"]["session"])
        before, session = usage["prompt_tokens"], usage["ssmd"]["session"]
        assert turn == 0 or usage["ssmd"]["resume"] == "exact"
        talk += [{"role": "assistant", "content": said}, user("And then?")]
        quiet(tiny)
    stored = [message.content for turn in tiny.turns(session or "") for message in turn.messages]
    assert not any(NAME in text for text in stored)


def test_answer_names_only_what_was_dropped(tiny: Daemon) -> None:
    plain = tiny.chat(messages=[{"role": "system", "content": RULES}, user("Hello")])
    told = tiny.chat(messages=[*as_text(1), user("Hello")])
    assert "dropped" not in plain.json["usage"]["ssmd"]
    assert told.json["usage"]["ssmd"]["dropped"] == [NAME]
    assert told.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]


def test_applied_template_has_no_header(tiny: Daemon) -> None:
    shown = tiny.served.ask("POST", "/apply-template", {"messages": [*as_text(1), user("Hello")]}).json["prompt"]
    assert RULES.strip() in shown
    assert NAME not in shown


def test_strict_daemon_answers_a_client_with_a_header(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["granite-f32"], None, settings=Settings(strict=True)) as one:
        found = one.chat(messages=[*as_text(1), user("Hello")])
    assert found.status == 200
    assert found.json["usage"]["ssmd"]["dropped"] == [NAME]


def test_setting_keeps_the_header(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["granite-f32"], tmp_path / "data", settings=Settings(keep_volatile=True)) as one:
        messages = [*as_text(1), user("Hello")]
        found = one.chat(messages=messages).json["usage"]
        shown = one.served.ask("POST", "/apply-template", {"messages": messages}).json["prompt"]
        stored = one.turns(found["ssmd"]["session"])
    assert "dropped" not in found["ssmd"]
    assert header(1) in shown
    assert header(1) in stored[0].messages[0].content
