"""A request frees its objects at its end. Python's collector may come late: it does not see the memory of libraries."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, Daemon, daemon, soon

from ssmd.api.generate.front import _Exchange
from ssmd.engine.decode.generation import Generation
from ssmd.engine.request import Request
from ssmd.engine.sampling.trial import PendingTrial

HELD = (_Exchange, Generation, PendingTrial, Request)


@pytest.fixture(scope="module")
def one(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], tmp_path_factory.mktemp("data")) as it:
        yield it


def leave(one: Daemon, *, stream: bool) -> None:
    """Begin a long answer and go away."""
    connection = HTTPConnection("127.0.0.1", one.served.port)
    body = json.dumps(one.body(stream=stream, max_tokens=400))
    connection.request("POST", CHAT, body, {"content-type": "application/json"})
    soon(lambda: bool(one.host.live().running))
    connection.close()


KINDS: dict[str, Callable[[Daemon], int | None]] = {
    "an answer": lambda one: one.chat().status,
    "a stream": lambda one: one.chat(stream=True).status,
    "a new grammar": lambda one: one.chat(guided_regex="[ab]{3}").status,
    "a wrong grammar": lambda one: one.chat(guided_regex="((a").status,
    "a wrong field": lambda one: one.chat(temperature=9).status,
    "a prompt too long": lambda one: one.chat("river " * 2000).status,
    "a client that leaves": lambda one: leave(one, stream=False),
    "a stream that is left": lambda one: leave(one, stream=True),
}


def held() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, HELD))


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_leaves_nothing_for_the_collector(kind: str, one: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda: 0)  # the loader calls it when the daemon rests
    try:
        assert KINDS[kind](one) in (None, 200, 400)
        soon(lambda: not one.host.live().running and not held(), within_s=5)
    except AssertionError:
        raise AssertionError(f"it left {dict(held())}") from None
    finally:
        gc.enable()
