"""Warm beginnings: read once, pinned, found by the first request that begins so, in their trust domain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon import soon
from engine.test_engine import Answer, Asked, ask, counting, user
from engines import OwnEngine

from ssmd.engine.persist import writer as writer_module
from ssmd.engine.prompt import planner
from ssmd.engine.request import Beginning
from ssmd.engine.terms import Rejection
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain
from ssmd.text.messages import Message
from ssmd.text.template import TemplateInput

SYSTEM = Message("system", "You keep the lighthouse at the end of the pier, and you know every ship by its lamp. " * 4)
BRIEF = Message("system", "Be brief.")
LAMPS = {"name": "lamps", "description": "Lists the lamps of a ship.", "parameters": {"type": "object"}}
TOOLS = TemplateInput(tools=({"type": "function", "function": LAMPS},))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 60)
    monkeypatch.setattr("ssmd.engine.metrics.Pace.pays", lambda *_: True)


@pytest.fixture(scope="module")
def control(loaded: tuple[Artifact, Program]) -> Iterator[OwnEngine]:
    engine = OwnEngine(*loaded, None)
    engine.start()
    yield engine
    engine.shutdown(0)


def warmed(engine: OwnEngine, *messages: Message, name: str = "pier", idle: bool = False, **fields: Any) -> Answer:
    return ask(engine, *messages, warm=Beginning(name, idle), max_tokens=1, **fields)


def ready(store: Store) -> bool:
    return all(one.ready for one in store.warm())


def same(found: Answer, expected: Answer) -> bool:
    return (found.text, found.logprobs) == (expected.text, expected.logprobs)


@pytest.mark.parametrize("idle", [False, True], ids=["now", "when idle"])
@pytest.mark.parametrize(("system", "given"), [(SYSTEM, TemplateInput()), (BRIEF, TOOLS)], ids=["system", "tools"])
def test_the_first_request_reads_only_its_own_words(
    idle: bool, system: Message, given: TemplateInput, engine: OwnEngine, control: OwnEngine, store: Store
) -> None:
    done = warmed(engine, system, given=given, idle=idle)
    assert done.usage.stored
    soon(lambda: ready(store))
    (one,) = store.warm()
    assert one.session.id == done.usage.session
    assert (one.session.title, one.session.info.pinned, one.session.turns) == ("pier", True, 1)
    several: list[dict[str, Any]] = [{}, {"store": False}, {"store": False, "retention": "24h"}]
    for n, fields in enumerate(several):
        talk = system, user(f"{n} ships are here. Who is there?")
        answer = ask(engine, *talk, given=given, **fields)
        assert answer.usage.cached_tokens >= one.tokens
        assert answer.usage.resume == "exact"
        assert same(answer, ask(control, *talk, given=given))
    assert engine.metrics.snapshot()["warm"] == {"requests": 3, "tokens": 3 * one.tokens}


def test_tools_alone_are_a_beginning(engine: OwnEngine, store: Store) -> None:
    warmed(engine, given=TOOLS)
    (one,) = store.warm()
    answer = ask(engine, user("Who is there?"), given=TOOLS)
    assert answer.usage.cached_tokens >= one.tokens > 0


def test_it_serves_after_a_restart_and_no_other_key(loaded: tuple[Artifact, Program], store: Store) -> None:
    anna, ben = Domain("anna", ("anna",)), Domain("ben", ("ben",))
    engine = OwnEngine(*loaded, store)
    engine.start()
    warmed(engine, SYSTEM, domain=anna)
    assert [one.session.info.owner for one in store.warm()] == ["anna"]
    assert store.of(ben).warm() == []
    engine.shutdown(0)
    engine = OwnEngine(*loaded, store)
    engine.start()
    assert ask(engine, SYSTEM, user("Who?"), domain=ben).usage.cached_tokens == 0
    assert ask(engine, SYSTEM, user("Who?"), domain=anna).usage.cached_tokens >= store.warm()[0].tokens
    assert engine.metrics.snapshot()["warm"]["requests"] == 1
    engine.shutdown(0)


def test_a_state_that_is_there_is_pinned_not_read(
    engine: OwnEngine, loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = ask(engine, SYSTEM, user("Who is there?"))
    fed: list[int] = []
    monkeypatch.setattr(loaded[1], "prefill", counting(loaded[1].prefill, fed))
    before = store.bytes_stored()
    assert warmed(engine, SYSTEM).usage.state_stored
    assert fed == []
    assert store.bytes_stored() == before
    assert talk.usage.session is not None
    store.delete(talk.usage.session)
    assert ask(engine, SYSTEM, user("And now?")).usage.cached_tokens >= store.warm()[0].tokens


def test_no_quota_takes_it(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    """Conversations give their states up, the beginning stays."""
    store = Store.open(tmp_path / "small")
    engine = OwnEngine(*loaded, store)
    engine.start()
    warmed(engine, SYSTEM)
    store.quota = 2 * store.bytes_stored()
    for n in range(6):
        ask(engine, user(f"{n} ships came in. " * 12))
    answer = ask(engine, SYSTEM, user("Who?"))
    assert answer.usage.cached_tokens >= store.warm()[0].tokens
    store.collect(0)
    assert ready(store)
    engine.shutdown(0)
    assert not check(tmp_path / "small").damages
    store.close()


def test_no_room_is_reported(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    store = Store.open(tmp_path / "small", quota=1000)
    engine = OwnEngine(*loaded, store)
    engine.start()
    done = warmed(engine, SYSTEM)
    assert (done.usage.stored, done.usage.state_stored) == (True, False)
    assert [one.ready for one in store.warm()] == [False]
    assert ask(engine, SYSTEM, user("Who?")).text
    soon(lambda: engine.idle)
    engine.shutdown(0)
    store.close()


def test_a_lost_state_is_read_again_when_idle(loaded: tuple[Artifact, Program], store: Store) -> None:
    engine = OwnEngine(*loaded, store)
    engine.start()
    warmed(engine, SYSTEM)
    engine.shutdown(0)
    with store.writing() as connection:
        connection.exec_driver_sql("DELETE FROM checkpoint")
    assert not ready(store)
    engine = OwnEngine(*loaded, store)
    engine.start()
    soon(lambda: ready(store))
    assert ask(engine, SYSTEM, user("Who?")).usage.cached_tokens >= store.warm()[0].tokens
    engine.shutdown(0)


def test_requests_interrupt_its_reading_and_lose_nothing(
    loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece is read once, though a request comes before each of them."""
    engine, fed, later = OwnEngine(*loaded, store), list[tuple[object, int]](), list[Asked]()
    prefill = loaded[1].prefill

    def watched(handle: object, tokens: list[int]) -> object:
        fed.append((handle, len(tokens)))
        if len(tokens) == 64 and len(later) < 4:
            later.append(Asked(engine, user(f"Ship {len(later)}?"), max_tokens=2))
        return prefill(handle, tokens)

    warmed_up = Asked(engine, SYSTEM, warm=Beginning("pier", idle=True), max_tokens=1)
    warmed_up.answer()
    monkeypatch.setattr(loaded[1], "prefill", watched)
    engine.start()
    soon(lambda: ready(store))
    assert all(one.answer().text is not None for one in later)
    tokens = store.warm()[0].tokens
    handle = next(handle for handle, n in fed if n == 64)
    assert sum(n for its, n in fed if its is handle) == tokens
    engine.shutdown(0)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ((user("Who is there?"),), "nothing to keep warm"),
        ((Message("system", "Be brief."), user("Who?")), "is read faster than kept"),
        ((Message("system", "ships and lamps " * 4000),), "context"),
    ],
)
def test_what_is_no_beginning_is_refused(messages: tuple[Message, ...], said: str, engine: OwnEngine) -> None:
    if said == "context" and engine.program.context is None:
        pytest.skip("its context is unbounded")
    with pytest.raises(Rejection, match=said):
        warmed(engine, *messages)


def test_a_client_cannot_pin_without_end(engine: OwnEngine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MOST_WARM", 2)
    anna = Domain("anna", ("anna",))
    for n in range(2):
        warmed(engine, Message("system", f"{n}. {SYSTEM.content}"), domain=anna)
    with pytest.raises(Rejection, match="2 beginnings are kept warm already"):
        warmed(engine, SYSTEM, domain=anna)
    warmed(engine, SYSTEM)
    assert len(store.warm()) == 3


def test_no_conversation_goes_on_from_its_turn(engine: OwnEngine, store: Store) -> None:
    done = warmed(engine, SYSTEM)
    answer = ask(engine, SYSTEM, Message("assistant", ""), user("Who is there?"))
    assert answer.usage.session != done.usage.session
    assert store.warm()[0].session.turns == 1


def test_a_state_of_another_build_is_read_anew(
    loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits may be others. It is not kept as one of this build, also if it is found by the second look-up."""
    artifact, program = loaded
    long = Message("system", SYSTEM.content * 2)
    other = replace(artifact, manifest=artifact.manifest.model_copy(update={"build": "older"}))
    older = OwnEngine(other, program, store)
    older.start()
    warmed(older, long)
    older.shutdown(0)
    engine, fed = OwnEngine(*loaded, store), list[int]()
    engine.start()
    monkeypatch.setattr(program, "prefill", counting(program.prefill, fed))
    done = warmed(engine, long, name="anew")
    assert sum(fed) == done.usage.prompt_tokens - 1
    assert done.usage.resume == "none"
    assert ask(engine, long, user("Who?")).usage.resume == "exact"
    engine.shutdown(0)
