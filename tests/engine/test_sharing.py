"""Shared reading: requests that begin alike read their common beginning once, and nothing else of them changes.

The tokens that are read are counted at the program itself. The control is an engine without a store, one request at a
time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from engine.test_engine import Answer, Asked, ask, counting, program_of, user
from engines import OwnEngine
from sqlalchemy import func, select

from ssmd.engine.decode import sharing
from ssmd.engine.persist import writer as writer_module
from ssmd.engine.persist.persistence import Persistence
from ssmd.engine.persist.restore import Restoring
from ssmd.engine.request import Beginning, Request
from ssmd.engine.terms import Rejection
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.rows.schema import segment
from ssmd.sessions.store import Store
from ssmd.sessions.turn import EVERYBODY, Domain
from ssmd.text.messages import Message

CELL = 64
SYSTEM = Message("system", "You keep the lighthouse at the end of the pier, and you know every ship by its lamp. " * 6)


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


@pytest.fixture
def fed(loaded: tuple[Artifact, Program], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each prefill."""
    fed: list[int] = []
    monkeypatch.setattr(loaded[1], "prefill", counting(loaded[1].prefill, fed))
    return fed


@pytest.fixture(params=[True, False], ids=["stored", "without a store"])
def stopped(request: pytest.FixtureRequest, loaded: tuple[Artifact, Program], store: Store) -> Iterator[OwnEngine]:
    """An engine that is not started yet: all requests of a test are there when it begins."""
    engine = OwnEngine(*loaded, store if request.param else None)
    yield engine
    engine.shutdown(0)


def answers_of(engine: OwnEngine, asked: list[Asked]) -> list[Answer]:
    engine.start()
    return [one.answer() for one in asked]


def row_bytes(store: Store) -> int:
    with store.reading() as connection:
        return int(connection.scalar(select(func.coalesce(func.sum(segment.c.nbytes), 0))) or 0)


def same(found: Answer, expected: Answer) -> bool:
    return (found.text, found.logprobs) == (expected.text, expected.logprobs)


def test_eight_equal_prompts_are_read_once(stopped: OwnEngine, control: OwnEngine, fed: list[int]) -> None:
    talk = SYSTEM, user("Who is there?")
    answers = answers_of(stopped, [Asked(stopped, *talk) for _ in range(8)])
    tokens = answers[0].usage.prompt_tokens
    assert tokens - 1 <= sum(fed) < tokens + 8 * CELL
    shared = (tokens - 1) // CELL * CELL
    assert [a.usage.cached_tokens for a in answers] == [0] + [shared] * 7
    assert {a.usage.resume for a in answers[1:]} == {"exact"}
    expected = ask(control, *talk)
    assert all(same(answer, expected) for answer in answers)
    numbers = stopped.metrics.total
    assert numbers.cached_tokens == 7 * shared
    assert numbers.fed_tokens == sum(a.fed for a in answers)


def test_prompts_that_part_share_up_to_there(stopped: OwnEngine, control: OwnEngine, fed: list[int]) -> None:
    """A chain: the third parts from the second behind the point at which that parts from the first."""
    more = "Name all the ships that came in since the new moon, and the lamps that they carry. "
    talks = [
        (SYSTEM, user("Who is there?")),
        (SYSTEM, user(f"{more} Begin with the oldest.")),
        (SYSTEM, user(f"{more} Begin with the youngest one, and leave out the boats.")),
    ]
    answers = answers_of(stopped, [Asked(stopped, *talk) for talk in talks])
    first, second, third = (a.usage.cached_tokens for a in answers)
    assert first == 0
    assert sharing.SHARED <= second < third
    assert second % CELL == third % CELL == 0
    expected = [ask(control, *talk) for talk in talks]
    assert all(map(same, answers, expected))
    assert sum(fed[: len(fed) // 2]) < sum(a.usage.prompt_tokens for a in answers)


def test_states_of_a_follower_are_stored(loaded: tuple[Artifact, Program], store: Store, tmp_path: Path) -> None:
    """Later turns go on from them as from those of requests that came one after the other."""
    alone = Store.open(tmp_path / "alone")
    engine, control = OwnEngine(*loaded, store), OwnEngine(*loaded, alone)
    talks = [(SYSTEM, user("Who is there?")), (SYSTEM, user("And who else?"))]
    answers = answers_of(engine, [Asked(engine, *talk) for talk in talks])
    control.start()
    for talk, answer in zip(talks, answers, strict=True):
        assert answer.usage.state_stored
        assert same(answer, ask(control, *talk))
        going_on = *talk, Message("assistant", answer.text), user("And now?")
        later = ask(engine, *going_on)
        assert later.usage.cached_tokens >= answer.usage.prompt_tokens - 1
        assert later.usage.resume == "exact"
        assert same(later, ask(control, *going_on))
    engine.shutdown(0)
    control.shutdown(0)
    assert row_bytes(store) == row_bytes(alone), "no row is stored twice"
    alone.close()


def test_keys_share_no_reading(stopped: OwnEngine, fed: list[int]) -> None:
    talk = SYSTEM, user("Who is there?")
    anna, ben = Domain("anna", ("anna",)), Domain("ben", ("ben",))
    asked = [Asked(stopped, *talk, domain=domain, client=domain.owner) for domain in (anna, ben, ben)]
    cached = [a.usage.cached_tokens for a in answers_of(stopped, asked)]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def held_at(program: Program, monkeypatch: pytest.MonkeyPatch, call: int, then: Callable[[], None]) -> None:
    """Call `then` before the program's `call`-th prefill, once."""
    prefill, calls = program.prefill, [0]

    def watched(handle: object, tokens: list[int]) -> object:
        calls[0] += 1
        if calls[0] == call:
            then()
        return prefill(handle, tokens)

    monkeypatch.setattr(program, "prefill", watched)


def test_a_request_joins_a_reading_under_way(
    stopped: OwnEngine, loaded: tuple[Artifact, Program], control: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, later = (SYSTEM, user("Who is there?")), list[Asked]()
    expected = ask(control, *talk)
    held_at(loaded[1], monkeypatch, 2, lambda: later.append(Asked(stopped, *talk)))
    first = Asked(stopped, *talk)
    (answer,) = answers_of(stopped, [first])
    second = later[0].answer()
    assert same(answer, expected)
    assert same(second, expected)
    assert second.usage.cached_tokens >= (answer.usage.prompt_tokens - 1) // CELL * CELL


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_request_behind_another_ones_answer_reads_little(
    lanes: int, loaded: tuple[Artifact, Program], store: Store, control: OwnEngine
) -> None:
    """It is planned before the first one has left a state, and admitted while that is answered, or after."""
    engine, later = OwnEngine(*loaded, store, max_running=lanes), list[Asked]()
    talk = SYSTEM, user("Who is there?")

    def ask_again() -> None:
        if not later:
            later.append(Asked(engine, *talk))

    (answer,) = answers_of(engine, [Asked(engine, *talk, before=ask_again, max_tokens=40)])
    second = later[0].answer()
    assert answer.usage.cached_tokens == 0
    assert second.usage.cached_tokens == second.usage.prompt_tokens - 1
    assert same(second, ask(control, *talk))
    engine.shutdown(0)


def test_a_cancelled_reading_is_handed_on(
    stopped: OwnEngine,
    loaded: tuple[Artifact, Program],
    control: OwnEngine,
    fed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talk = SYSTEM, user("Who is there?")
    expected = ask(control, *talk)
    asked = [Asked(stopped, *talk) for _ in range(4)]
    fed.clear()
    held_at(loaded[1], monkeypatch, 4, asked[0].generation.cancel)
    stopped.start()
    answers = [one.answer() for one in asked[1:]]
    assert all(same(answer, expected) for answer in answers)
    tokens = answers[0].usage.prompt_tokens
    assert sum(fed) < tokens + 4 * CELL, "three pieces of the first were not read again"
    assert answers[0].usage.cached_tokens > 0


def test_states_of_a_follower_outlive_a_cancelled_reading(
    loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They grow from states that no turn links to. Those are swept only when the follower has ended."""
    engine, talk = OwnEngine(*loaded, store), (SYSTEM, user("Who is there?"))
    writer = engine.writer
    assert writer is not None
    first, second = Asked(engine, *talk), Asked(engine, *talk, max_tokens=4)

    def sweep() -> None:
        writer.flush()
        store.sweep(keep=writer._ahead)

    held_at(loaded[1], monkeypatch, 6, first.generation.cancel)
    held_at(loaded[1], monkeypatch, 7, sweep)
    engine.start()
    answer = second.answer()
    assert answer.usage.cached_tokens > 0
    assert answer.usage.state_stored
    writer.flush()
    assert not writer._ahead
    engine.shutdown(0)


def test_a_published_system_prompt_is_held_too(
    loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that read it was cancelled, so that no turn links to it."""
    monkeypatch.setattr(sharing, "SHARED", CELL)
    engine, later = OwnEngine(*loaded, store), list[Asked]()
    system = Message("system", SYSTEM.content[: len(SYSTEM.content) // 2])
    writer = engine.writer
    assert writer is not None

    def sweep() -> None:
        writer.flush()
        store.sweep(keep=writer._ahead)

    def follow() -> None:
        later.append(Asked(engine, system, user("Who else is there? " * 4), max_tokens=4))

    first = Asked(engine, system, user("Who is there, and who was there before? " * 6))
    held_at(loaded[1], monkeypatch, 5, follow)
    held_at(loaded[1], monkeypatch, 6, first.generation.cancel)
    held_at(loaded[1], monkeypatch, 8, sweep)
    engine.start()
    first.answer()
    answer = later[0].answer()
    assert answer.usage.cached_tokens > 2 * CELL
    assert answer.usage.state_stored
    writer.flush()
    assert not writer._ahead
    engine.shutdown(0)


def test_a_failed_reading_leaves_the_others(
    stopped: OwnEngine, loaded: tuple[Artifact, Program], control: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = SYSTEM, user("Who is there?")
    expected = ask(control, *talk)

    def fail() -> None:
        raise RuntimeError("a piece of the device broke")

    held_at(loaded[1], monkeypatch, 3, fail)
    failed, *answers = answers_of(stopped, [Asked(stopped, *talk) for _ in range(4)])
    assert getattr(failed.end, "error", None) is not None
    assert isinstance(failed.end.error, Rejection)  # type: ignore[union-attr]  # a Failure, by the line above
    assert all(same(answer, expected) for answer in answers)
    assert sorted(a.usage.cached_tokens > 0 for a in answers) == [False, True, True], "one of them reads"


def test_all_of_a_crowd_may_leave(stopped: OwnEngine, loaded: tuple[Artifact, Program]) -> None:
    asked = [Asked(stopped, SYSTEM, user("Who is there?")) for _ in range(6)]

    def leave() -> None:
        for one in asked:
            one.generation.cancel()

    leaving = threading.Thread(target=leave)
    leaving.start()
    stopped.start()
    leaving.join()
    assert all(one.answer().end is not None for one in asked)
    assert ask(stopped, user("Still there?")).text


def test_no_request_waits_for_few_tokens(stopped: OwnEngine) -> None:
    """Prompts that share less than the bound are read beside one another."""
    system = Message("system", "You keep the lighthouse at the end of the pier. " * 2)
    asked = [Asked(stopped, system, user(f"{n}, who is there? " * 9)) for n in ("Anna", "Ben")]
    assert [a.usage.cached_tokens for a in answers_of(stopped, asked)] == [0, 0]


def test_no_restore_waits_for_states_being_written(engine: OwnEngine) -> None:
    """Only those that look for a deeper state among them wait, and no longer than they are to."""
    ask(engine, SYSTEM, user("Who is there?"))
    persistence = engine._persistence
    assert isinstance(persistence, Persistence)
    restorer, writer = persistence._restorer, persistence._writer
    writer.flush()
    prompt = engine._planner.plan(Request((SYSTEM, user("Who is there?"))))
    assert prompt.found is not None
    go_on = threading.Event()

    def busy() -> None:
        go_on.wait()

    writer.after(busy)
    late = [restorer.begin(prompt, None, EVERYBODY, lambda: None, client="a", again=True) for _ in range(8)]
    soon = restorer.begin(prompt, None, EVERYBODY, lambda: None, client="a")
    states = [soon.result()[1]]
    assert not any(one.done() for one in late)
    bounded = threading.Event()
    writer.after(bounded.set, within_s=0.01)
    bounded.wait()
    go_on.set()
    states += [one.result()[1] for one in late]
    for state in states:
        assert state.found is not None
        assert state.found.position == prompt.found.position
        assert state.handle is not None
        engine.program.release(state.handle)


def test_clients_alternate_where_states_are_restored(engine: OwnEngine) -> None:
    ask(engine, SYSTEM, user("Who is there?"))
    persistence = engine._persistence
    assert isinstance(persistence, Persistence)
    persistence._writer.flush()
    prompt = engine._planner.plan(Request((SYSTEM, user("Who is there?"))))
    restored, first, go_on = list[str](), threading.Event(), threading.Event()

    def begin(client: str, name: str) -> Restoring:
        def then() -> None:
            restored.append(name)
            first.set()
            go_on.wait()

        return persistence._restorer.begin(prompt, None, EVERYBODY, then, client=client)

    begun = [begin("a", "a0")]
    first.wait()
    begun += [*(begin("a", f"a{i}") for i in range(1, 6)), begin("b", "b0"), begin("b", "b1"), begin("c", "c0")]
    go_on.set()
    states = [one.result()[1] for one in begun]
    persistence._restorer.close()
    assert restored == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4", "a5"]
    for state in states:
        assert state.handle is not None
        engine.program.release(state.handle)


def test_a_hybrid_with_rotated_keys_shares_too(artifacts: TinyArtifacts, store: Store) -> None:
    """And starts from a warm beginning, with the bits of a request alone."""
    with program_of(artifacts, "falcon-h1-norm-f32", threads=None) as (artifact, program):
        control, engine = OwnEngine(artifact, program, None), OwnEngine(artifact, program, store)
        control.start()
        talks = [(SYSTEM, user(text)) for text in ("Who is there?", "Who else?", "And who?")]
        expected = [ask(control, *talk) for talk in talks]
        answers = answers_of(engine, [Asked(engine, *talk) for talk in talks[:2]])
        assert answers[1].usage.cached_tokens >= sharing.SHARED
        ask(engine, SYSTEM, warm=Beginning("pier"), max_tokens=1)
        answers.append(ask(engine, *talks[2], store=False))
        assert answers[2].usage.cached_tokens >= store.warm()[0].tokens
        assert all(map(same, answers, expected))
        control.shutdown(0)
        engine.shutdown(0)
