"""Texts of errors, held against the patterns by which agents and libraries recognize them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from serving import Answer

from ssmd.engine.decode.sharing import Queue
from ssmd.engine.terms import Rejection

# From the packages or repositories named in it: each agent's patterns (all texts of one must be found), those that must
# not be found, and the part of an error that it looks at.
AGENTS = json.loads((Path(__file__).parents[1] / "data" / "agent-errors.json").read_text("utf-8"))
BY_CODE = {"codex"}


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], None) as one:
        yield one


def seen(what: str, status: int, error: dict[str, Any]) -> str:
    """Return the text that an agent matches, of an error."""
    message = str(error["message"])
    return {
        "message": message,
        "status and message": f"{status} {message}",
        "status and JSON": f"{status}: {json.dumps(error, separators=(',', ':'))}",
        "repr": f"Error code: {status} - { ({'error': error})!r}",
        "code": str(error["code"]),
    }[what]


def recognized(kind: str, status: int, error: dict[str, Any]) -> dict[str, bool]:
    """Return for each agent whether it recognizes an error."""

    def found(patterns: list[list[str]], text: str) -> bool:
        return any(all(re.search(one, text) for one in all_of) for all_of in patterns)

    texts = {name: seen(agent["sees"], status, error) for name, agent in AGENTS[kind].items()}
    return {
        name: found(agent["patterns"], texts[name]) and not found(agent["not"], texts[name])
        for name, agent in AGENTS[kind].items()
    }


def overflows(tiny: Daemon) -> Iterator[Answer]:
    yield tiny.chat("river " * 2000)
    yield tiny.chat("river " * 2000, stream=True)
    yield tiny.chat("river " * 2000, truncation="auto")
    yield tiny.served.ask("POST", "/v1/completions", {"model": tiny.model, "prompt": "river " * 2000})


def test_every_agent_recognizes_an_overflow(tiny: Daemon) -> None:
    assert len(AGENTS["overflow"]) == 14
    for answer in overflows(tiny):
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        missing = [name for name, one in recognized("overflow", 400, answer.error).items() if not one]
        assert missing == [], answer.error["message"]
        assert re.search(r"maximum context length is 512 tokens.* \d{4,} tokens", answer.error["message"])


def test_an_overflow_is_known_by_its_text_alone(tiny: Daemon) -> None:
    for answer in overflows(tiny):
        bare = {"message": answer.error["message"], "code": None}
        assert {name for name, one in recognized("overflow", 400, bare).items() if not one} == BY_CODE


def test_every_agent_that_reads_texts_retries_a_full_queue() -> None:
    full = Queue(1)._full()
    assert isinstance(full, Rejection)
    assert (full.status, full.retry_after_s) == (503, 5)
    error = {"message": full.message, "type": "server_error", "param": None, "code": full.code}
    assert [name for name, one in recognized("rate", 503, error).items() if not one] == []


def test_an_unknown_model_is_none_of_these(tiny: Daemon) -> None:
    answer = tiny.chat(model="another")
    assert answer.status == 404
    assert answer.error["message"].startswith("Model not found: ")
    for kind in AGENTS:
        assert not any(recognized(kind, 404, answer.error).values())
