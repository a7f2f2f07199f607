"""Side requests of an agent, such as one for a title: the real request, which came first, is prefilled first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conftest import TinyArtifacts
from engine.test_engine import LONG_SYSTEM, Asked, program_of, user
from engines import OwnEngine

from ssmd.engine.decode.sharing import FairShare, Queue
from ssmd.sessions.store import Store


def request_of(client: str, started: float) -> Any:
    asked = SimpleNamespace(request=SimpleNamespace(client=client), started=started)
    return SimpleNamespace(asked=asked, progress=SimpleNamespace(admitted=-started, error=None))


def test_older_prompt_of_a_client_is_prefilled_first() -> None:
    """Also if it was planned later, and admitted later. Clients still alternate."""
    side, real, other = request_of("a", 2.0), request_of("a", 1.0), request_of("b", 1.5)
    shares = FairShare(8)
    read = []
    for _ in range(4):
        first, *_ = shares.in_turn([side, other, real])
        shares.spend(first, 0.5)
        read.append(first)
    assert read == [real, other, real, other]
    assert shares.in_turn([side, other]) == [side, other], "the side request follows, in its client's turn"


def test_older_request_of_a_client_leaves_the_queue_first() -> None:
    waiting = Queue(8)
    for one in (request_of("a", 2.0), request_of("b", 9.0), request_of("a", 1.0)):
        waiting.put(one)
    taken = [waiting.take() for _ in range(3)]
    assert [one.asked.started for one in taken if one is not None] == [1.0, 9.0, 2.0]


def test_full_queue_drops_the_request_that_came_last() -> None:
    waiting, late = Queue(2), request_of("a", 2.0)
    for one in (late, request_of("a", 1.0), request_of("b", 3.0)):
        waiting.put(one)
    assert waiting.departed() is late


def test_title_waits_for_the_prompt_that_came_before(artifacts: TinyArtifacts, store: Store) -> None:
    """The title's request was planned sooner, as it is short, and is in the queue first."""
    ended: list[str] = []
    with program_of(artifacts, "mamba-f32") as loaded:
        engine = OwnEngine(*loaded, store, max_running=4)
        fields: dict[str, Any] = {"client": "agent", "max_tokens": 2}
        title = Asked(engine, user("A title, please"), before=lambda: ended.append("title"), arrived=2.0, **fields)
        real = Asked(engine, LONG_SYSTEM, user("Go"), before=lambda: ended.append("real"), arrived=1.0, **fields)
        engine.start()
        real.answer()
        title.answer()
        engine.shutdown(0)
    assert ended[0] == "real"
