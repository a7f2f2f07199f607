"""The engine over a real program and a real store: what it feeds, keeps and refuses, and when things break."""

from __future__ import annotations

import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from engines import OwnEngine
from keeping import open_store
from sqlalchemy import func, select, update

from ssmd.engine import metrics
from ssmd.engine.decode import sharing
from ssmd.engine.decode.generation import Generation
from ssmd.engine.engine import Engine
from ssmd.engine.metrics import StoreHealth
from ssmd.engine.persist import persistence
from ssmd.engine.persist import writer as writer_module
from ssmd.engine.persist.rerender import Rerenderer
from ssmd.engine.persist.restore import Restorer
from ssmd.engine.request import Delta, Event, Failure, Finish, Recall, Request, TokenLogprob, Usage
from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.terms import Rejection
from ssmd.model.artifact import Artifact
from ssmd.model.state import Part
from ssmd.runtime.protocol import Handle, Program, StateLost, get_runtime
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows import commits
from ssmd.sessions.rows.checkpoints import CheckpointResult
from ssmd.sessions.rows.schema import checkpoint, turn_checkpoint
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError
from ssmd.text.apart import opened
from ssmd.text.messages import Message

SAMPLING = SamplingParams(temperature=1.0, seed=3, logprobs=True, top_logprobs=3)
LONG_SYSTEM = Message("system", "You are the keeper of a lighthouse. " * 12)


def user(text: str) -> Message:
    return Message("user", text)


def answered(text: str) -> Message:
    return Message("assistant", text)


@dataclass
class Answer:
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finish | Failure | None = None

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def usage(self) -> Usage:
        assert isinstance(self.end, Finish), self.end
        return self.end.usage

    @property
    def fed(self) -> int:
        return self.usage.prompt_tokens - self.usage.cached_tokens


class Asked:
    """A request in the engine and the events that it delivers."""

    def __init__(self, engine: Engine, *messages: Message, before: Callable[[], None] = lambda: None, **fields: object):
        """before: what the worker does before each event is there."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = Request(**{"messages": messages, "sampling": SAMPLING, "max_tokens": 16, **fields})  # type: ignore[arg-type]  # fields are of many types

        def deliver(event: Event) -> None:
            before()
            self._events.put(event)

        self.generation: Generation = engine.submit(request, deliver)

    def next(self) -> Event:
        return self._events.get(timeout=60)

    def answer(self) -> Answer:
        answer = Answer()
        while True:
            event = self.next()
            if not isinstance(event, Delta):
                assert not isinstance(event, Recall)
                answer.end = event
                return answer
            answer.texts[event.index] = answer.texts.get(event.index, "") + event.text
            if event.index == 0:
                answer.logprobs += event.logprobs


def ask(engine: Engine, *messages: Message, **fields: object) -> Answer:
    return Asked(engine, *messages, **fields).answer()  # type: ignore[arg-type]  # as above


@contextmanager
def program_of(artifacts: TinyArtifacts, name: str, threads: int | None = 1) -> Iterator[tuple[Artifact, Program]]:
    """A tiny artifact and its program."""
    artifact = Artifact.open(artifacts[name])
    program = get_runtime("litert").load(artifact, threads=threads)
    yield artifact, program
    program.close()


@pytest.fixture(scope="module", params=["granite-int8", "llama-f32"])
def loaded(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, request.param, threads=None) as loaded:
        yield loaded


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "data", busy_ms=200)
    yield store
    store.close()


@pytest.fixture
def endless(loaded: tuple[Artifact, Program]) -> SamplingParams:
    """Never ends by itself."""
    bias = {t: -100.0 for t in loaded[0].manifest.stop_tokens}
    return SamplingParams(temperature=1.0, seed=5, logit_bias=bias)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a state is written, where a test does not say otherwise."""
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 60)


@pytest.fixture
def engine(loaded: tuple[Artifact, Program], store: Store) -> Iterator[Engine]:
    engine = OwnEngine(*loaded, store, max_running=2, max_queue=3)
    engine.start()
    yield engine
    engine.shutdown(0)


def test_a_conversation_continues_and_a_system_prompt_is_shared(engine: Engine, store: Store) -> None:
    first = ask(engine, LONG_SYSTEM, user("Who is there?"))
    assert (first.usage.cached_tokens, first.usage.resume) == (0, "none")
    second = ask(engine, LONG_SYSTEM, user("Who is there?"), answered(first.text), user("And now?"))
    assert second.usage.resume == "exact"
    assert second.usage.session == first.usage.session
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 1
    other = ask(engine, LONG_SYSTEM, user("Something else"))
    assert other.usage.session != first.usage.session
    assert other.usage.cached_tokens >= 64
    assert [s.turns for s in store.sessions()] == [1, 2]


def counting(call: Callable[..., object], fed: list[int]) -> Callable[..., object]:
    def counted(where: object, tokens: list[int]) -> object:
        fed.append(len(tokens))
        return call(where, tokens)

    return counted


def test_cached_tokens_are_those_not_fed(
    engine: Engine, loaded: tuple[Artifact, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the program itself: what usage calls cached never went into it."""
    program = loaded[1]
    fed: list[int] = []
    for name in ("prefill", "decode"):
        monkeypatch.setattr(program, name, counting(getattr(program, name), fed))
    first = ask(engine, LONG_SYSTEM, user("Count."), max_tokens=1)
    assert sum(fed) == first.usage.prompt_tokens
    fed.clear()
    again = ask(engine, LONG_SYSTEM, user("Count."), answered(first.text), user("More."), max_tokens=1)
    assert sum(fed) == again.fed < again.usage.prompt_tokens


def test_three_states_are_kept_of_a_request(engine: Engine, store: Store) -> None:
    """After the system prompt, before the prompt's last token and at the end; what comes later grows from those."""
    asked = Asked(engine, LONG_SYSTEM, user("Who is there?"))
    prompt, answer = asked.generation.asked.prompt, asked.answer()
    end = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
    with store.reading() as connection:
        columns = select(checkpoint.c.kind, checkpoint.c.position).order_by(checkpoint.c.position)
        kept = [tuple(row) for row in connection.execute(columns) if row.kind != "prefix"]
    assert kept == [("system", prompt.system), ("user", len(prompt.ids) - 1), ("turn", end)]
    ask(engine, LONG_SYSTEM, user("Who is there?"), answered(answer.text), user("And now?"))
    with store.reading() as connection:
        first = connection.execute(select(checkpoint.c.kind).order_by(checkpoint.c.position)).first()
        alone = connection.execute(select(checkpoint.c.kind).where(checkpoint.c.parent.is_(None))).all()
        assert alone == [first]


def test_a_cut_answer_ends_with_its_prompt_until_rerendered(
    engine: Engine, store: Store, endless: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(engine, user("Go on"), sampling=endless, max_tokens=30, store=False)
    monkeypatch.setattr(Rerenderer, "add", lambda *_: None)
    stop = whole.text[len(whole.text) // 2 :][:2]
    cut = ask(engine, user("Go on"), sampling=endless, max_tokens=30, stop=(stop,))
    (turn,) = store.turns(str(cut.usage.session))
    assert (len(turn.ids), turn.answer.content) == (cut.usage.prompt_tokens, cut.text)


def test_choices_are_siblings(engine: Engine, store: Store) -> None:
    answer = ask(engine, user("Three, please."), n=3)  # more than may run at once
    assert sorted(answer.texts) == [0, 1, 2]
    assert len(set(answer.texts.values())) > 1
    session = store.sessions()[0]
    turns = store.turns(session.id)
    assert [t.parent for t in turns] == [None] * 3
    assert [t.answer.content for t in turns] == [answer.texts[i] for i in range(3)]
    assert session.head == turns[0].id
    alone = ask(engine, user("Three, please."), store=False)
    assert (alone.text, alone.logprobs) == (answer.text, answer.logprobs)
    again = ask(engine, user("Three, please."), answered(answer.texts[2]), user("The third."))
    assert again.usage.session == session.id
    assert store.turns(session.id)[-1].parent == turns[2].id


def test_store_false_keeps_nothing(engine: Engine, store: Store) -> None:
    answer = ask(engine, LONG_SYSTEM, user("Forget this."), store=False)
    assert (answer.usage.session, answer.usage.stored) == (None, False)
    assert store.sessions() == []
    assert store.bytes_stored() == 0


def test_an_engine_without_a_store_answers_the_same(loaded: tuple[Artifact, Program], engine: Engine) -> None:
    bare = OwnEngine(*loaded, None)
    bare.start(warm_up=True)
    talk = LONG_SYSTEM, user("Who is there?")
    for _ in range(2):
        answer = ask(bare, *talk, n=2)
        assert (answer.usage.session, answer.usage.stored, answer.usage.resume) == (None, False, "none")
        assert answer.usage.cached_tokens == 0
        assert answer.texts == ask(engine, *talk, n=2, store=False).texts
    with pytest.raises(Rejection, match="no session"):
        ask(bare, *talk, session="ses_of_nobody")
    bare.shutdown(0)


def test_a_developer_is_the_system_to_a_template_that_knows_none(engine: Engine) -> None:
    told = [ask(engine, Message(role, "Be brief."), user("Hello."), store=False) for role in ("system", "developer")]
    assert told[0].logprobs == told[1].logprobs


def test_an_unknown_session_is_refused(engine: Engine) -> None:
    with pytest.raises(Rejection, match="there is no session 'ses_none'") as refused:
        ask(engine, user("Hello?"), session="ses_none")
    assert refused.value.status == 404


def test_a_prompt_longer_than_the_context_is_refused(engine: Engine) -> None:
    with pytest.raises(Rejection, match="context length is 512 tokens") as refused:
        ask(engine, user("word " * 600))
    assert refused.value.code == "context_length_exceeded"


def test_the_context_ends_an_answer_with_length(
    engine: Engine, loaded: tuple[Artifact, Program], endless: SamplingParams
) -> None:
    answer = ask(engine, user("a" * 440), max_tokens=10_000, sampling=endless)
    assert isinstance(answer.end, Finish)
    assert answer.end.finish_reasons == ("length",)
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == loaded[1].context


def test_a_cancelled_answer_is_kept_as_far_as_it_was_sent(
    engine: Engine, store: Store, endless: SamplingParams
) -> None:
    asked = Asked(engine, user("Tell me everything."), max_tokens=400, sampling=endless)
    event = asked.next()
    assert isinstance(event, Delta)
    asked.generation.cancel()
    rest = asked.answer()
    turn = store.turns(str(asked.generation.asked.session))[0]
    assert not turn.complete
    assert turn.answer.content == event.text + rest.text
    assert rest.usage.completion_tokens < 400
    follow = ask(engine, user("Tell me everything."), turn.answer, user("Go on."))
    assert follow.usage.session == asked.generation.asked.session
    assert follow.usage.resume == "exact"


def test_the_prompt_is_written_while_the_answer_is_generated(
    engine: Engine, store: Store, endless: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "AHEAD_BYTES", 1)
    deadline = time.monotonic() + 20

    def until_it_is_written() -> None:  # a tiny model's whole answer may be out before a busy disk has done anything
        while not store.bytes_stored() and time.monotonic() < deadline:
            time.sleep(0.01)

    asked = Asked(engine, user("Go on and on"), before=until_it_is_written, sampling=endless, max_tokens=200)
    assert isinstance(asked.next(), Delta), "before the end of the answer"
    assert store.bytes_stored()
    assert store.sessions() == [], "a session comes with its turn"
    answer = asked.answer()
    assert answer.usage.stored
    assert store.sweep() == 0
    again = ask(engine, user("Go on and on"), answered(answer.text), user("More"))
    assert again.usage.resume == "exact"


def test_a_state_whose_turn_does_not_come_is_for_who_asks_again(
    loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes after a while, though the daemon is never started again."""
    for name, value in (("AHEAD_BYTES", 1), ("LOOK_S", 0.1), ("LOOSE_S", 2.0)):
        monkeypatch.setattr(writer_module, name, value)
    engine = OwnEngine(*loaded, store)
    prefilled = persistence._TurnStore.prefilled
    written: list[int] = []

    def hang_up(self: persistence._TurnStore, handle: Handle, position: int, read_ms: float) -> None:
        prefilled(self, handle, position, read_ms)
        if position == self._prompt.system:
            written.append(position)
            engine._worker.running[0].cancel()

    monkeypatch.setattr(persistence._TurnStore, "prefilled", hang_up)
    engine.start()
    assert not ask(engine, LONG_SYSTEM, user("Are you there?")).usage.stored
    monkeypatch.setattr(persistence._TurnStore, "prefilled", prefilled)
    engine._persistence._writer.flush()  # type: ignore[union-attr]  # it has a store
    assert store.bytes_stored() > 0
    assert store.sessions() == []
    time.sleep(0.3)
    again = ask(engine, LONG_SYSTEM, user("Are you there?"), store=False)
    assert written == [again.usage.cached_tokens]
    deadline = time.monotonic() + 20
    while store.bytes_stored():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine.shutdown(0)


def test_a_long_answer_keeps_states_written_ahead_of_it(
    loaded: tuple[Artifact, Program], store: Store, endless: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("AHEAD_BYTES", 1), ("IDLE_S", 0.01), ("LOOK_S", 0.01), ("LOOSE_S", 0.01)):
        monkeypatch.setattr(writer_module, name, value)
    engine = OwnEngine(*loaded, store)
    engine.start()
    first = ask(engine, user("Go on and on"), sampling=endless, max_tokens=200)
    again = ask(engine, user("Go on and on"))
    assert again.usage.cached_tokens == first.usage.prompt_tokens - 1
    engine.shutdown(0)


def test_what_could_not_be_written_ahead_comes_with_its_turn(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "AHEAD_BYTES", 1)
    monkeypatch.setattr(store, "keep", lambda encoded: CheckpointResult(None, why_not="no room for it yet"))
    first = ask(engine, user("Go on"))
    again = ask(engine, user("Go on"))
    assert (again.usage.resume, again.usage.cached_tokens) == ("exact", first.usage.prompt_tokens - 1)


def test_all_sizes_are_counted_when_nobody_comes(engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade, where none is known."""
    monkeypatch.setattr(commits, "_COUNTED_WHEN_IDLE", 2)
    monkeypatch.setattr(writer_module, "IDLE_S", 0.05)
    for i in range(5):
        ask(engine, user(f"Hello {i}"))
    with store.writing() as connection:
        connection.execute(update(session_table).values(own_nbytes=None))
    ask(engine, user("One more"))
    deadline = time.monotonic() + 20

    def unknown() -> int:
        with store.reading() as connection:
            query = select(func.count()).where(session_table.c.own_nbytes.is_(None))
            return int(connection.execute(query).scalar_one())

    while unknown():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_program_is_warmed_up_when_nobody_comes(
    loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = loaded[1]
    fed: list[int] = []
    monkeypatch.setattr(program, "prefill", counting(program.prefill, fed))
    idle = OwnEngine(*loaded, store)
    idle.start(warm_up=True)
    deadline = time.monotonic() + 20
    while fed != [17]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert ask(idle, user("Hello")).usage.cached_tokens == 0
    idle.shutdown(0)
    fed.clear()
    asked_at_once = OwnEngine(*loaded, store)
    asked_at_once.start(warm_up=True)
    usage = ask(asked_at_once, user("Something else")).usage
    assert sum(fed) + 1 == usage.prompt_tokens - usage.cached_tokens, "it does not wait for a warm-up"
    asked_at_once.shutdown(0)


def test_warm_up_makes_the_table_of_the_first_grammar(loaded: tuple[Artifact, Program], store: Store) -> None:
    idle = OwnEngine(*loaded, store)
    idle.start(warm_up=True)
    soon(lambda: "_known" in vars(idle._grammars))
    idle.shutdown(0)


def test_an_end_does_not_fail_a_first_answer(loaded: tuple[Artifact, Program], store: Store) -> None:
    """The process that tokenises for the model ends at once, and the requests that wait are still answered."""
    ending = OwnEngine(*loaded, store, texts=opened(loaded[0], apart=True))
    asked = Asked(ending, user("Hello"))
    ending.drain()
    ending.start()
    assert asked.answer().text
    ending.shutdown(0)


def yesterday(loaded: tuple[Artifact, Program], store: Store) -> Answer:
    """Two conversations with another engine. What the last of them was answered."""
    before = OwnEngine(*loaded, store)
    before.start()
    ask(before, LONG_SYSTEM, user("Who is there?"))
    answer = ask(before, user("Hello"))
    before.shutdown(0)
    return answer


def test_an_idle_engine_takes_up_the_conversation_used_last(
    loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = loaded[1]
    first = yesterday(loaded, store)
    reserved: list[int] = []
    reserve = program.reserve

    def noted(position: int) -> object:
        reserved.append(position)
        return reserve(position)

    monkeypatch.setattr(program, "reserve", noted)
    fed: list[tuple[int, int]] = []
    prefill = program.prefill

    def watched(handle: Handle, tokens: list[int]) -> object:
        fed.append((program.position(handle), len(tokens)))
        return prefill(handle, tokens)

    monkeypatch.setattr(program, "prefill", watched)
    idle = OwnEngine(*loaded, store)
    idle.start(warm_up=True)
    soon(lambda: bool(fed))
    assert fed == [(reserved[0], 17)], "in the state of that conversation"
    after = ask(idle, user("Hello"), answered(first.text), user("And now?"))
    assert after.usage.resume == "exact"
    assert reserved == [after.usage.cached_tokens] * 2
    assert [s.turns for s in store.sessions()] == [2, 1], "nothing of it is stored"
    idle.shutdown(0)


def test_a_request_need_not_wait_for_the_whole_warm_up(
    loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = loaded[1]
    yesterday(loaded, store)
    held: set[int] = set()
    reserve, fill, release = program.reserve, program.fill, program.release
    at_it, asked = threading.Event(), threading.Event()

    def reserved(position: int) -> Handle:
        handle = reserve(position)
        held.add(id(handle))
        return handle

    def filled(handle: Handle, part: Part) -> None:
        if not at_it.is_set():
            at_it.set()
            assert asked.wait(20)
        fill(handle, part)

    def released(handle: Handle) -> None:
        held.discard(id(handle))
        release(handle)

    monkeypatch.setattr(program, "reserve", reserved)
    monkeypatch.setattr(program, "fill", filled)
    monkeypatch.setattr(program, "release", released)
    fed: list[int] = []
    monkeypatch.setattr(program, "prefill", counting(program.prefill, fed))
    idle = OwnEngine(*loaded, store)
    idle.start(warm_up=True)
    assert at_it.wait(20)
    came = Asked(idle, user("Something else"))
    asked.set()
    usage = came.answer().usage
    assert sum(fed) + 1 == usage.prompt_tokens - usage.cached_tokens, "the state is not even whole"
    idle.shutdown(0)
    assert not held


def test_two_requests_interleave(engine: Engine, endless: SamplingParams) -> None:
    over = threading.Event()  # a tiny model's 300 tokens would be out before a busy disk has the other answer

    def lingers() -> None:
        over.wait(0.05)

    slow = Asked(engine, user("A long one."), before=lingers, max_tokens=300, sampling=endless)
    assert isinstance(slow.next(), Delta)
    quick = ask(engine, user("A short one."), max_tokens=3)
    assert isinstance(quick.end, Finish)
    slow.generation.cancel()
    over.set()
    assert 0 < slow.answer().usage.completion_tokens < 300


def test_who_leaves_gives_up_a_place_at_once(engine: Engine, endless: SamplingParams) -> None:
    """While the worker is at its work."""
    at_work, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        at_work.set()
        go_on.wait(60)

    running = Asked(engine, user("Long."), max_tokens=400, sampling=endless, before=hold)
    assert at_work.wait(60)
    left: list[Asked] = []
    for n in range(4):
        waiting = [Asked(engine, user(f"Wait {n} {i}.")) for i in range(3)]
        with pytest.raises(Rejection, match="3 requests are waiting"):
            ask(engine, user("One too many."))
        for one in waiting:
            one.generation.cancel()
            one.generation.cancel()
        left += waiting
    running.generation.cancel()
    go_on.set()
    for one in left:
        end = one.answer().end
        assert isinstance(end, Finish)
        assert (end.usage.completion_tokens, end.usage.stored) == (0, False)
    assert isinstance(running.answer().end, Finish)
    soon(lambda: engine._queue.unfinished == 0)


def test_clients_take_turns(engine: Engine, endless: SamplingParams) -> None:
    """A client with all lanes and most places does not block another, which gets the next lane and one spare."""

    def endlessly(text: str, client: str) -> Asked:
        slowly = partial(time.sleep, 0.01)
        one = Asked(engine, user(text), max_tokens=400, sampling=endless, client=client, before=slowly)
        assert isinstance(one.next(), Delta)
        return one

    order: list[str] = []

    def waits(name: str) -> Asked:
        return Asked(engine, user(name), client=name[0], max_tokens=1, before=lambda: order.append(name))

    greedy = [endlessly(f"Mine {i}.", "a") for i in range(2)]
    more = [waits("a1"), waits("a2")]
    assert isinstance(ask(engine, user("Just one."), client="b").end, Finish), "it had a lane while the others went on"
    beside = endlessly("And one for long.", "b")
    more.append(waits("c1"))
    assert order == []
    greedy[0].generation.cancel()  # two lanes are in use still: a and b have one each
    assert isinstance(more[2].answer().end, Finish)
    assert set(order) == {"c1"}
    for one in (greedy[1], beside):
        one.generation.cancel()
    for one in more[:2]:
        assert isinstance(one.answer().end, Finish)
    assert list(dict.fromkeys(order)) == ["c1", "a1", "a2"]


def steps(program: Program, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the program's calls from now on: (name, number of handles or tokens)."""
    made: list[tuple[str, int]] = []
    for name in ("prefill", "decode"):
        call = getattr(program, name)

        def counted(what: Any, tokens: list[int], name: str = name, call: Any = call) -> Any:
            made.append((name, len(tokens)))
            return call(what, tokens)

        monkeypatch.setattr(program, name, counted)
    return made


class Alone:
    """Steps of several streams, where there is no graph for that."""

    def parts(self, streams: int) -> tuple[tuple[int, int], ...]:
        return ((1, 1),) * streams

    def step_cost(self, streams: int) -> float:
        return float(streams)

    def forget(self, memory: Any) -> None: ...

    leave = forget


def test_one_of_each_client_s_answers_gets_a_token_in_a_step(
    engine: Engine, endless: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.program, "batches", Alone())
    made = steps(engine.program, monkeypatch)
    slowly = partial(time.sleep, 0.002)
    greedy = [
        Asked(engine, user(f"Mine {i}."), max_tokens=120, sampling=endless, client="a", before=slowly) for i in range(2)
    ]
    for one in greedy:
        assert isinstance(one.next(), Delta)
    made.clear()
    honest = Asked(engine, user("Just one."), max_tokens=40, sampling=endless, client="b", before=slowly)
    assert honest.answer().usage.completion_tokens == 40
    both = [count for name, count in made if name == "decode" and count > 1]
    assert both.count(3) <= 1, "of three answers two are computed in a step, but where the prompt's last token joins it"
    assert set(both) <= {2, 3}
    assert both.count(2) >= 39
    assert [one.answer().usage.completion_tokens for one in greedy] == [120, 120]


@pytest.mark.parametrize("credit", [0.001, 1.0])
def test_prompts_without_end_are_read_in_a_part_of_the_time(
    engine: Engine, endless: SamplingParams, monkeypatch: pytest.MonkeyPatch, credit: float
) -> None:
    """Also before the credit is spent, by a client with more prompts waiting. The clock advances by calls alone."""
    monkeypatch.setattr(sharing, "CREDIT_S", credit)
    made = steps(engine.program, monkeypatch)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(0.02 if name == "prefill" else 0.01 for name, _ in made))
    began, flooded = threading.Event(), threading.Event()

    def waits() -> None:
        assert not began.is_set() or flooded.wait(60)
        began.set()

    honest = Asked(engine, user("A long one."), max_tokens=200, sampling=endless, client="b", before=waits)
    assert isinstance(honest.next(), Delta)
    begun = len(made)
    long = user("x" * 300)
    flood = [Asked(engine, long, max_tokens=1, client="a", store=False) for _ in range(3)]
    flooded.set()
    honest.answer()
    for one in flood:
        assert one.answer().usage.prompt_tokens > 64
    beside = made[begun:]
    decodes = [i for i, (name, _) in enumerate(beside) if name == "decode"]
    pieces = [i for i, (name, _) in enumerate(beside) if name == "prefill" and i < decodes[190]]
    assert len(pieces) > 1
    assert min(b - a for a, b in pairwise(pieces)) > 60, "of two steps' time, in 0.03 of the time"


def test_when_to_come_back_follows_from_how_fast_the_queue_is(engine: Engine) -> None:
    asked: list[Asked] = []
    told: list[int | None] = []
    while 1 not in told and len(asked) < 50:
        try:
            asked.append(Asked(engine, user("Short."), max_tokens=1, before=partial(time.sleep, 0.02)))
        except Rejection as err:
            told.append(err.retry_after_s)
            time.sleep(0.01)
    assert told[0] == 5, "nothing is known yet"
    assert told[-1] == 1
    for one in asked:
        assert isinstance(one.answer().end, Finish)


def test_a_full_queue_is_refused(engine: Engine, endless: SamplingParams) -> None:
    running = [Asked(engine, user(f"Long {i}."), max_tokens=400, sampling=endless) for i in range(2)]
    for one in running:
        assert isinstance(one.next(), Delta)
    waiting = [Asked(engine, user(f"Wait {i}.")) for i in range(3)]
    with pytest.raises(Rejection, match="3 requests are waiting") as refused:
        ask(engine, user("One too many."))
    assert (refused.value.status, refused.value.code) == (503, "queue_full")
    assert refused.value.retry_after_s
    for one in running:
        one.generation.cancel()
    assert all(isinstance(one.answer().end, Finish) for one in [*running, *waiting])


def test_who_waits_most_gives_way_in_a_full_queue(engine: Engine, endless: SamplingParams) -> None:
    slowly = partial(time.sleep, 0.01)
    running = []
    for client in ("a", "a", "b"):
        slow = {"max_tokens": 400, "sampling": endless, "before": slowly}
        running.append(Asked(engine, user("On."), client=client, **slow))  # type: ignore[arg-type]  # of many types
        assert isinstance(running[-1].next(), Delta)
    waiting = [Asked(engine, user(f"Wait {i}."), max_tokens=1, client="a") for i in range(3)]
    with pytest.raises(Rejection, match="3 requests are waiting"):
        engine.check("a")
    engine.check("b")
    mine = Asked(engine, user("Mine."), max_tokens=1, client="b")
    lost = waiting.pop().answer().end
    assert isinstance(lost, Failure)
    assert (lost.error.status, lost.error.code) == (503, "queue_full")
    assert lost.error.retry_after_s
    for client in ("a", "b"):  # two and one: no client is ahead by more than one
        with pytest.raises(Rejection, match="3 requests are waiting"):
            Asked(engine, user("And one."), client=client)
    for one in running:
        one.generation.cancel()
    assert all(isinstance(one.answer().end, Finish) for one in [*running, *waiting, mine])
    soon(lambda: engine._queue.unfinished == 0)


def test_every_client_has_a_lane_as_far_as_memory_goes(
    loaded: tuple[Artifact, Program], endless: SamplingParams
) -> None:
    engine = OwnEngine(*loaded, None, max_running=2, spare_choices=3)
    engine.start()

    def endlessly(client: str) -> Asked:
        slowly = partial(time.sleep, 0.01)
        return Asked(engine, user("On."), max_tokens=400, sampling=endless, client=client, before=slowly)

    greedy: list[Asked] = []
    others: list[Asked] = []
    for mine, client in ((greedy, "a"), (greedy, "a"), (others, "b"), (others, "c")):
        mine.append(endlessly(client))
        assert isinstance(mine[-1].next(), Delta)
    greedy += [endlessly("a"), endlessly("a")]
    assert isinstance(ask(engine, user("Just one."), client="d", max_tokens=1).end, Finish)
    second = Asked(engine, user("Two."), max_tokens=1, client="b")
    time.sleep(0.1)
    assert [len(engine._queue), len(engine._worker.running)] == [3, 4], "a spare lane is for who has none"
    for one in [*greedy, *others]:
        one.generation.cancel()
    assert isinstance(second.answer().end, Finish)
    engine.shutdown(grace_s=0)


def test_shutdown_cuts_what_runs_and_stores_it(
    loaded: tuple[Artifact, Program], store: Store, endless: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, program = OwnEngine(*loaded, store), loaded[1]
    engine.start()
    decode = program.decode

    def slowly(*asked: Any) -> Any:
        time.sleep(0.005)  # 400 tokens outlast the shutdown's patience by far
        return decode(*asked)

    monkeypatch.setattr(program, "decode", slowly)
    asked = Asked(engine, user("On and on."), max_tokens=400, sampling=endless)
    assert isinstance(asked.next(), Delta)
    ended = threading.Thread(target=engine.shutdown, args=(0.05,))
    ended.start()
    answer = asked.answer()
    ended.join()
    assert isinstance(answer.end, Failure)
    assert answer.end.error.status == 503
    assert not store.turns(str(asked.generation.asked.session))[0].complete
    with pytest.raises(Rejection, match="shutting down"):
        ask(engine, user("Too late."))


def test_a_locked_database_costs_the_memory_not_the_answer(engine: Engine, store: Store) -> None:
    first = ask(engine, user("Before."))
    other = sqlite3.connect(store.file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answer = ask(engine, user("Before."), answered(first.text), user("During."))
    assert answer.usage.completion_tokens > 0
    assert told(answer) == (False, False)
    assert answer.usage.resume == "exact"  # reading goes on
    other.execute("ROLLBACK")
    other.close()
    after = ask(engine, user("Before."), answered(first.text), user("After."))
    assert after.usage.stored is True


@pytest.mark.parametrize("worth", [0, 1e9])
def test_a_prompts_state_is_kept_where_it_pays(
    worth: float, engine: Engine, loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a cache cost nothing, as the turn's end needs them. Without it the same is read, and said, again."""
    monkeypatch.setattr(metrics, "SMALL_BYTES", 0)
    monkeypatch.setattr(metrics, "WORTH", worth)
    first = ask(engine, LONG_SYSTEM, user("Who is there?"))
    again = ask(engine, LONG_SYSTEM, user("Who is there?"))
    with store.reading() as connection:
        kinds = set(connection.scalars(select(checkpoint.c.kind))) - {"prefix"}
    keeps = worth == 0 or not loaded[1].spec.recurrent
    assert kinds == ({"system", "user", "turn"} if keeps else {"system", "turn"})
    assert (again.text, again.usage.resume) == (first.text, "exact")
    assert again.fed == 1 if keeps else 1 < again.fed < 64


def each_state(store: Store, does: str) -> None:
    """Have the database do this before it takes in any part of a state."""
    with closing(sqlite3.connect(store.file)) as other:
        for table in ("piece", "segment"):
            other.execute(f"CREATE TRIGGER odd_{table} BEFORE INSERT ON {table} BEGIN {does}; END")
        other.commit()


def as_ever(store: Store) -> None:
    with closing(sqlite3.connect(store.file)) as other:
        other.executescript("DROP TRIGGER odd_piece; DROP TRIGGER odd_segment")


ENDLESS = "SELECT count(*) FROM (WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c)"


def told(answer: Answer) -> tuple[bool, bool]:
    return answer.usage.stored, answer.usage.state_stored


def test_a_text_is_stored_where_its_state_takes_long(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 0.5)
    first = ask(engine, user("Before."))
    talk: tuple[Message, ...] = (user("Before."), answered(first.text), user("Slowly."))
    each_state(store, ENDLESS)
    slow = ask(engine, *talk)
    talk = (*talk, answered(slow.text), user("Again."))
    known = ask(engine, *talk)  # the text first, as the last state took long
    as_ever(store)
    monkeypatch.setattr(writer_module, "LOOK_S", 0.01)
    after = ask(engine, *talk, answered(known.text), user("After."))
    assert [told(a) for a in (first, slow, known, after)] == [(True, True), (True, False), (True, False), (True, True)]
    assert [turn.answer.content for turn in store.turns(str(first.usage.session))] == [
        a.text for a in (first, slow, known, after)
    ]
    assert after.usage.cached_tokens == known.usage.cached_tokens, "both go on from the last state that is there"


def test_a_text_is_stored_where_its_state_fails(engine: Engine, store: Store) -> None:
    each_state(store, "SELECT RAISE(ABORT, 'no more numbers')")
    answer = ask(engine, user("Before."))
    assert told(answer) == (True, False)
    as_ever(store)
    after = ask(engine, user("Before."), answered(answer.text), user("After."))
    assert told(after) == (True, True)
    assert (after.usage.session, after.usage.cached_tokens) == (answer.usage.session, 0)


@pytest.mark.parametrize("takes_ms", [0.0, 60_000.0], ids=["with its text", "after its text"])
def test_the_store_is_well_when_a_client_learns_of_a_stored_turn(
    takes_ms: float, engine: OwnEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the operating system runs the client's thread first."""
    assert engine.writer is not None
    well = StoreHealth.well

    def slowly(self: StoreHealth) -> None:
        time.sleep(0.5)
        well(self)

    each_state(store, "SELECT RAISE(ABORT, 'no more numbers')")
    ask(engine, user("Before."))
    assert engine.writer.condition.reason == "error"
    as_ever(store)
    engine.writer.pace.note(8 << 20, takes_ms)
    monkeypatch.setattr(StoreHealth, "well", slowly)
    assert told(ask(engine, user("After."))) == (True, True)
    assert engine.writer.condition.reason == ""


def test_a_turn_told_as_lost_does_not_come_later(
    loaded: tuple[Artifact, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 0.1)
    monkeypatch.setattr(writer_module, "TEXT_PATIENCE_S", 0.3)
    store = open_store(tmp_path / "data", busy_ms=60_000)
    engine = OwnEngine(*loaded, store)
    engine.start()
    with closing(sqlite3.connect(store.file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = ask(engine, user("Is it there?"))
        other.execute("ROLLBACK")
    engine.shutdown()
    assert told(answer) == (False, False)
    assert store.sessions() == []
    store.close()


@pytest.mark.parametrize("hangs", [False, True], ids=["at once", "after a hang"])
def test_an_attempt_after_a_failed_commit_has_its_bound(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 0.1)
    monkeypatch.setattr(writer_module, "TEXT_PATIENCE_S", 0.3)
    told: queue.SimpleQueue[tuple[bool, bool]] = queue.SimpleQueue()
    lost: list[bool] = []
    standing = writer_module._CommitStatus(
        lambda *said: told.put(said), lambda: None, lambda _, text: lost.append(text)
    )
    standing.begin()
    standing.sure()  # and the COMMIT that follows fails
    if hangs:
        soon(lambda: standing._overdue)
        assert told.empty(), "only the disk knows how it ends"
        with pytest.raises(StoreError):
            standing.begin()
    else:
        standing.begin()
    assert told.get(timeout=60) == (False, False)
    assert lost == [True]
    with pytest.raises(StoreError):
        standing.sure()


def test_a_state_is_written_after_its_text_where_it_may_be_slow(engine: OwnEngine, store: Store) -> None:
    assert engine.writer is not None
    engine.writer.pace.note(8 << 20, 600.0)
    assert told(ask(engine, user("Before."))) == (True, True)
    assert engine.writer.condition.reason == ""


def test_only_a_large_write_tells_how_long_more_bytes_take() -> None:
    found = metrics.Pace()
    found.note(23_040, 0.02)  # almost all of that is one fsync
    assert found.wait_s(22_600_000) == 0.02
    found.note(4 << 20, 0.1)
    assert found.wait_s(40 << 20) == pytest.approx(1.0)


def test_a_text_alone_keeps_the_states_written_ahead(
    engine: OwnEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "AHEAD_BYTES", 0)
    with closing(sqlite3.connect(store.file)) as other:
        when = "WHEN new.kind = 'turn' BEGIN SELECT RAISE(ABORT, 'no more numbers'); END"
        other.execute(f"CREATE TRIGGER odd BEFORE INSERT ON checkpoint {when}")
        other.commit()
    assert told(ask(engine, LONG_SYSTEM, user("Before."))) == (True, False)
    with store.reading() as connection:
        linked = set(connection.scalars(select(turn_checkpoint.c.checkpoint)))
        assert linked == set(connection.scalars(select(checkpoint.c.id)))
    assert linked


def test_a_state_is_exact_to_a_program_with_other_threads(
    engine: Engine, loaded: tuple[Artifact, Program], store: Store
) -> None:
    """Threads change no bit; another runtime's version may."""
    first = ask(engine, user("Before."))
    artifact, program = loaded
    talk = (user("Before."), answered(first.text), user("After."))
    expected = ask(engine, *talk, store=False)
    other = get_runtime("litert").load(artifact, threads=3)
    assert other.producer != program.producer
    for version, resume in (("litert", "exact"), ("litert 0", "portable")):
        other.producer = other.producer.replace("litert", version, 1)
        second = OwnEngine(artifact, other, store)
        second.start()
        after = ask(second, *talk, store=False)
        second.shutdown(0)
        assert (after.usage.resume, after.usage.cached_tokens) == (resume, expected.usage.cached_tokens)
        assert after.logprobs == expected.logprobs
    other.close()


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be moved there")
def test_the_writer_outlives_a_folder_that_cannot_be_read(engine: OwnEngine, store: Store) -> None:
    first = ask(engine, user("Before."))
    assert engine.writer is not None
    data, aside = store.file.parent, store.file.parent.with_name("aside")
    engine.writer.flush()
    data.rename(aside)
    data.write_bytes(b"")
    engine.writer._logged = writer_module.LOG_BYTES
    talk: tuple[Message, ...] = (user("Before."), answered(first.text), user("Is it there?"))
    assert told(ask(engine, *talk)) == (False, False)
    engine.writer.flush()
    data.unlink()
    aside.rename(data)
    assert told(ask(engine, *talk)) == (True, True)


@pytest.mark.parametrize("change", ["data = zeroblob(length(data))", "dtype = replace(dtype, 'raw/', '')"])
def test_a_damaged_checkpoint_is_read_again(
    change: str, engine: OwnEngine, store: Store, held: list[Handle], caplog: pytest.LogCaptureFixture
) -> None:
    """The second one is in the encoding of early databases, byte planes, which is not read any more."""
    first = ask(engine, LONG_SYSTEM, user("Before."))
    right = ask(engine, LONG_SYSTEM, user("Before."), answered(first.text), user("After."), store=False)
    with sqlite3.connect(store.file) as other:
        ((kept,),) = other.execute("SELECT count(*) FROM checkpoint").fetchall()
        for table in ("piece", "segment"):
            other.execute(f"UPDATE {table} SET {change}")
    other.close()
    answer = ask(engine, LONG_SYSTEM, user("Before."), answered(first.text), user("After."))
    assert (answer.usage.cached_tokens, answer.usage.resume) == (0, "none")
    assert "cannot be used" in caplog.text
    assert answer.text == right.text
    soon(lambda: not held)
    caplog.clear()
    assert engine.metrics.damages() == {"checkpoints": kept, "turns": 0}, "all that there were"
    again = ask(engine, LONG_SYSTEM, user("Before."), answered(first.text), user("After."))
    assert again.usage.resume == "exact"
    assert again.text == right.text
    assert "cannot be used" not in caplog.text, "what was damaged is not met again"
    assert not check(store.file.parent).damages


def test_the_next_best_checkpoint_stands_in_for_damaged_ones(engine: Engine, store: Store) -> None:
    first = ask(engine, LONG_SYSTEM, user("Before."))
    right = ask(engine, LONG_SYSTEM, user("Before."), answered(first.text), user("After."), store=False)
    with sqlite3.connect(store.file) as other:
        other.execute("UPDATE checkpoint SET digest = zeroblob(32) WHERE kind != 'system'")
        ((left,),) = other.execute("SELECT position FROM checkpoint WHERE kind = 'system'").fetchall()
    other.close()
    answer = ask(engine, LONG_SYSTEM, user("Before."), answered(first.text), user("After."))
    assert (answer.usage.cached_tokens, answer.usage.resume) == (left, "exact")
    assert answer.text == right.text


def test_a_checkpoint_removed_meanwhile_is_no_error(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention may remove a state between a request's look-up and its restore."""
    first = ask(engine, LONG_SYSTEM, user("Before."))
    right = ask(engine, LONG_SYSTEM, user("Before."), answered(first.text), user("After."), store=False)
    removed: list[int] = []
    parts = Store.parts

    def parts_of_removed(self: Store, number: int, *args: Any, **options: Any) -> Any:
        if not removed:
            removed.append(number)
            with closing(sqlite3.connect(store.file)) as other, other:
                other.execute("PRAGMA foreign_keys = ON")
                other.execute("DELETE FROM checkpoint WHERE id = ?", [number])
        return parts(self, number, *args, **options)

    monkeypatch.setattr(Store, "parts", parts_of_removed)
    answer = ask(engine, LONG_SYSTEM, user("Before."), answered(first.text), user("After."))
    assert removed
    assert answer.usage.cached_tokens > 0
    assert answer.text == right.text
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.fixture
def held(loaded: tuple[Artifact, Program], monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The handles that were reserved for stored states and not released yet."""
    program = loaded[1]
    found: list[Handle] = []
    reserve, release = program.reserve, program.release

    def reserved(position: int) -> Handle:
        found.append(reserve(position))
        return found[-1]

    def released(handle: Handle) -> None:
        found[:] = [one for one in found if one is not handle]
        release(handle)

    monkeypatch.setattr(program, "reserve", reserved)
    monkeypatch.setattr(program, "release", released)
    return found


def test_cancelling_during_a_restore_leaves_nothing_behind(
    engine: Engine, loaded: tuple[Artifact, Program], held: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(engine, user("Remember me."))
    entered, go_on = threading.Event(), threading.Event()
    fill = loaded[1].fill

    def filled(handle: Handle, part: Part) -> None:
        entered.set()
        assert go_on.wait(60)
        fill(handle, part)

    monkeypatch.setattr(loaded[1], "fill", filled)
    gone = Asked(engine, user("Remember me."), answered(first.text), user("Do you?"))
    assert entered.wait(60)
    gone.generation.cancel()
    assert isinstance(gone.answer().end, Finish), "the worker did not wait for the state"
    assert held, "the state is restored while nobody wants it any more"
    go_on.set()
    soon(lambda: not held)


def test_a_failed_restore_ends_its_request_and_leaves_nothing(
    engine: Engine, loaded: tuple[Artifact, Program], held: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(engine, user("Remember me."))
    talk = user("Remember me."), answered(first.text), user("Do you?")

    def broken(*_: object) -> None:
        raise StateLost("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(loaded[1], "fill", broken)
        failed = ask(engine, *talk)
    assert isinstance(failed.end, Failure)
    assert (failed.end.error.status, failed.end.error.code) == (503, "device_lost")
    soon(lambda: not held)
    assert ask(engine, *talk).usage.resume == "exact"


def test_what_cannot_be_saved_gives_its_memory_back(
    engine: Engine, loaded: tuple[Artifact, Program], monkeypatch: pytest.MonkeyPatch, endless: SamplingParams
) -> None:
    """As a step that failed half way leaves states that can only be released."""
    program, used, left = loaded[1], list[int](), list[int]()
    decode, release = program.decode, program.release

    def fails(handles: list[Handle], tokens: list[int]) -> Any:
        used.append(id(handles[0]))
        if len(used) == 4:
            patched.setattr(program, "save", lost)
            lost()
        return decode(handles, tokens)

    def lost(*_: object, **__: object) -> None:
        raise StateLost("a step failed")

    def released(handle: Handle) -> None:
        left.append(id(handle))
        release(handle)

    with monkeypatch.context() as patched:
        patched.setattr(program, "release", released)
        patched.setattr(program, "decode", fails)
        failed = ask(engine, user("I am lost."), max_tokens=50, sampling=endless)
        assert isinstance(failed.end, Failure)
        assert (failed.end.error.status, failed.end.error.code) == (503, "device_lost")
        soon(lambda: used[-1] in left)
    assert isinstance(ask(engine, user("I am not.")).end, Finish)


def test_a_failing_step_ends_its_request_alone(
    engine: Engine, loaded: tuple[Artifact, Program], monkeypatch: pytest.MonkeyPatch, endless: SamplingParams
) -> None:
    slow = Asked(engine, user("I go on."), max_tokens=200, sampling=endless)
    assert isinstance(slow.next(), Delta)

    def broken(*_: object) -> None:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(loaded[1], "prefill", broken)
        answer = ask(engine, user("I fail."))
    assert isinstance(answer.end, Failure)
    assert "on fire" in answer.end.error.message
    assert isinstance(slow.answer().end, Finish)


@pytest.mark.parametrize("what", ["save", "clone"])
def test_who_finds_no_memory_ends_alone(
    engine: Engine,
    loaded: tuple[Artifact, Program],
    monkeypatch: pytest.MonkeyPatch,
    endless: SamplingParams,
    what: str,
) -> None:
    """Requests that decode in the same step do not end with it."""
    slow = Asked(engine, user("I go on."), max_tokens=200, sampling=endless, before=partial(time.sleep, 0.003))
    assert isinstance(slow.next(), Delta)

    def none(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(loaded[1], what, none)
        failed = ask(engine, user("I am long. " * 20), n=2)
        assert isinstance(failed.end, Failure)
        assert "no room" in failed.end.error.message
    assert isinstance(slow.answer().end, Finish)


def test_a_stream_without_memory_ends_alone(
    engine: Engine, loaded: tuple[Artifact, Program], monkeypatch: pytest.MonkeyPatch, endless: SamplingParams
) -> None:
    """The other stream of its steps says what it says alone."""
    program, together = loaded[1], list[int]()
    decode = program.decode

    def full(handles: list[Handle], tokens: list[int]) -> Any:
        together.append(len(handles))
        if any(program.position(h) > 200 for h in handles):
            raise MemoryError("a conversation of 256 tokens takes 64 MB more memory")
        return decode(handles, tokens)

    question = {"max_tokens": 60, "sampling": endless, "store": False}
    alone = ask(engine, user("I go on."), **question)
    with monkeypatch.context() as patched:
        patched.setattr(program, "decode", full)
        other = Asked(engine, user("I go on."), before=partial(time.sleep, 0.01), **question)
        first = other.next()
        assert isinstance(first, Delta)
        failed = ask(engine, user("I am long. " * 40))
        assert isinstance(failed.end, Failure)
        assert "64 MB more" in failed.end.error.message
        answer = other.answer()
    assert 2 in together
    assert (first.text + answer.text, isinstance(answer.end, Finish)) == (alone.text, True)


@pytest.mark.parametrize("what", ["begin", "release"])
def test_the_worker_outlives_what_fails_beside_its_steps(
    engine: Engine, loaded: tuple[Artifact, Program], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As where there is no memory, or no thread to be had, for a moment: of others, each hears how it ended."""
    first = ask(engine, user("Remember me."))
    talk = user("Remember me."), answered(first.text), user("Do you?")

    def broken(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(*((Restorer, "begin", broken) if what == "begin" else (loaded[1], "release", broken)))
        failed = ask(engine, *talk)
        assert isinstance(failed.end, Failure if what == "begin" else Finish)
        assert isinstance(ask(engine, user("I am new.")).end, Finish)
    assert ask(engine, *talk).usage.resume == "exact"
