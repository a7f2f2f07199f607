"""States inside a prompt: where prompts part, on the widening grid, and while a long prompt is read.

The control is an engine without a store, which reads every prompt whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine.test_engine import SAMPLING, Answer, Asked, ask, user
from engines import OwnEngine
from sqlalchemy import select, update

from ssmd.engine.persist import persistence, restore
from ssmd.engine.persist import writer as writer_module
from ssmd.engine.persist.restore import SeenPrompts, inside
from ssmd.engine.request import Request
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.line import Line, anchor
from ssmd.sessions.rows.loose import SHARE
from ssmd.sessions.rows.schema import checkpoint, segment
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain
from ssmd.text.messages import Message
from ssmd.text.template import TemplateInput
from ssmd.text.tokenizer import Tokenizer

CELL = 64


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


def with_clock(minute: int) -> Message:
    beginning = "You keep the lighthouse at the end of the pier, and you know every ship by its lamp. " * 6
    return Message("system", f"{beginning}\nIt is 12:{minute:02}. Be brief.")


def same(found: Answer, expected: Answer) -> bool:
    return (found.text, found.logprobs) == (expected.text, expected.logprobs)


def test_a_clock_near_the_end_costs_little(engine: OwnEngine, control: OwnEngine) -> None:
    talks = [(with_clock(minute), user("Who is there?")) for minute in range(5)]
    answers = [ask(engine, *talk) for talk in talks]
    for talk, answer in zip(talks, answers, strict=True):
        assert same(answer, ask(control, *talk))
    assert answers[0].usage.parted_at is None
    shared = {answer.usage.parted_at for answer in answers[1:]}
    (at,) = shared
    assert at is not None
    assert at % CELL == 0
    assert answers[2].usage.prompt_tokens - at < 3 * CELL, "the clock stands near the end"
    assert [answer.usage.cached_tokens for answer in answers[2:]] == [at] * 3
    assert {answer.usage.resume for answer in answers[2:]} == {"exact"}


def test_a_clock_is_known_after_a_restart(loaded: tuple[Artifact, Program], store: Store) -> None:
    """The first prompt of a new process leaves a state where it parts from those of the one before."""
    for minute, seen in enumerate([False, True, True]):
        engine = OwnEngine(*loaded, store)
        engine.start()
        answer = ask(engine, with_clock(minute), user("Who is there?"))
        assert (answer.usage.parted_at is not None) == seen
        engine.shutdown(0)
    assert answer.usage.cached_tokens == answer.usage.parted_at


def test_tools_are_read_once_for_all_system_prompts(engine: OwnEngine, control: OwnEngine) -> None:
    """The state at their end is kept the first time: text on tools stands before a client's."""
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    given = TemplateInput(({"type": "function", "function": {"name": "find", "parameters": schema}},))
    talks = [(Message("system", f"{name} asks."), user("Who?")) for name in ("Anna", "Ben")]
    prompt = engine._planner.plan(Request(talks[0], given=given))
    (at,) = prompt.parts
    answers = [ask(engine, *talk, given=given) for talk in talks]
    assert at > CELL
    assert answers[1].usage.cached_tokens == at - at % CELL
    assert same(answers[1], ask(control, *talks[1], given=given))


def test_a_first_system_message_is_kept_the_first_time(engine: OwnEngine, control: OwnEngine) -> None:
    """A client's own text often comes second, and changes."""
    first = with_clock(0)
    talks = [(first, Message("system", f"{name} asks."), user("Who?")) for name in ("Anna", "Ben")]
    answers = [ask(engine, *talk) for talk in talks]
    alone = ask(control, first, user("Who?")).usage.prompt_tokens
    cached = answers[1].usage.cached_tokens
    assert cached % CELL == 0
    assert alone - 2 * CELL < cached < alone
    assert same(answers[1], ask(control, *talks[1]))


def test_rows_alone_are_kept_at_the_first_time(engine: OwnEngine, loaded: tuple[Artifact, Program]) -> None:
    if loaded[1].spec.recurrent:
        pytest.skip("a recurrent state is kept the second time")
    first, second = (ask(engine, with_clock(minute), user("Who is there?")) for minute in range(2))
    assert second.usage.cached_tokens == second.usage.parted_at
    assert first.usage.cached_tokens == 0


@pytest.fixture
def sparse(loaded: tuple[Artifact, Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """States of a prompt's first cell and of its end alone, as far apart as in a long one."""
    if loaded[1].spec.recurrent:
        pytest.skip("a recurrent state cannot be cut")
    monkeypatch.setattr(restore, "inside", lambda first, *_, **__: [CELL] if first < CELL else [])


NUMBERS = " ".join(str(n) for n in range(100))


def test_rows_are_cut_to_what_a_prompt_shares(engine: OwnEngine, control: OwnEngine, sparse: None) -> None:
    """The first time, from the rows of a longer state, with the same bits."""
    first = ask(engine, user(NUMBERS))
    assert first.usage.prompt_tokens > 4 * CELL
    for share in (0.9, 0.7, 0.5, 0.3):
        asked = user(NUMBERS[: int(share * len(NUMBERS))] + " and then I stopped, as it was late.")
        answer = ask(engine, asked)
        assert answer.usage.resume == "exact"
        assert answer.usage.cached_tokens % CELL == 0
        assert answer.usage.cached_tokens >= share * first.usage.prompt_tokens - 2 * CELL
        assert same(answer, ask(control, asked))
    again = ask(engine, asked)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1, "what grew from cut rows is whole"
    assert same(again, ask(control, asked))


def test_an_edit_below_an_answer_gives_the_bits_of_today(
    engine: OwnEngine, sparse: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that fits ends an answer, off the grid. The control reads from there on."""
    begun = ask(engine, user("Who is there?"), max_tokens=5)
    said = [user("Who is there?"), Message("assistant", begun.text)]
    ask(engine, *said, user(NUMBERS))
    draw = random.Random(5)
    for _ in range(6):
        end = draw.randrange(len(NUMBERS) // 3, len(NUMBERS))
        asked = [*said, user(f"{NUMBERS[:end]} {draw.choice('xyz')} and then {draw.random()}")]
        cut = ask(engine, *asked, store=False)
        with monkeypatch.context() as patched:
            patched.setattr(Snapshot, "lengthen", lambda self, scope, found, ids, cell: found)
            control = ask(engine, *asked, store=False)
        assert cut.usage.cached_tokens >= control.usage.cached_tokens + CELL // 2
        assert cut.usage.cached_tokens % CELL == 0
        assert same(cut, control)


def test_a_longer_state_that_is_damaged_serves_no_prompt(
    engine: OwnEngine, control: OwnEngine, sparse: None, store: Store
) -> None:
    """The state before it does."""
    ask(engine, user(NUMBERS))
    assert engine.writer is not None
    engine.writer.flush()
    with store.writing() as connection:
        last = connection.scalars(select(segment.c.id).where(segment.c.first == CELL)).first()
        connection.execute(update(segment).where(segment.c.id == last).values(data=b"x" * 64))
    asked = user(NUMBERS[: len(NUMBERS) // 2] + " and then I stopped.")
    answer = ask(engine, asked)
    assert answer.usage.cached_tokens == CELL
    assert same(answer, ask(control, asked))


def test_rows_of_other_owners_are_not_cut(engine: OwnEngine, sparse: None) -> None:
    anna, ben = Domain("anna", ("anna",)), Domain("ben", ("ben",))
    ask(engine, user(NUMBERS), domain=anna)
    asked = user(NUMBERS[: len(NUMBERS) * 3 // 4] + " and then I stopped.")
    assert ask(engine, asked, domain=ben).usage.cached_tokens == 0
    assert ask(engine, asked, domain=anna).usage.cached_tokens > 2 * CELL


def test_a_long_prompt_leaves_a_widening_grid(
    engine: OwnEngine, control: OwnEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "FIRST", 128)
    monkeypatch.setattr(restore, "NEAR", CELL)
    long = " ".join(str(n) for n in range(110))
    first = ask(engine, user(long), max_tokens=1)
    assert first.usage.prompt_tokens > 2 * 128 + CELL
    with store.reading() as connection:
        kept = list(connection.scalars(select(checkpoint.c.position).where(checkpoint.c.kind == "prefix")))
    assert {128, 256} <= set(kept)
    assert not any(position % CELL for position in kept)
    other = long[: len(long) * 3 // 4] + " and then I stopped."
    second = ask(engine, user(other))
    assert second.usage.cached_tokens in kept
    assert same(second, ask(control, user(other)))


def test_any_edit_of_any_prompt_gives_the_same_bits(engine: OwnEngine, control: OwnEngine) -> None:
    """Words are inserted, removed and replaced anywhere in new conversations."""
    draw = random.Random(7)
    words = ["lamp", "pier", "fog", "keeper", "ship", "night", "water", "stone", "rope", "bell"]
    talk = [Message("system", " ".join(draw.choices(words, k=40))), user(" ".join(draw.choices(words, k=60)))]
    saved = 0
    for _ in range(12):
        at = draw.randrange(len(talk))
        said = talk[at].content.split(" ")
        begin = draw.randrange(len(said) or 1)
        said[begin : begin + draw.randrange(3)] = draw.choices(words, k=draw.randrange(3))
        talk[at] = Message(talk[at].role, " ".join(said) or "lamp")
        answer, expected = ask(engine, *talk, max_tokens=4), ask(control, *talk, max_tokens=4)
        assert same(answer, expected), talk
        assert answer.usage.cached_tokens % CELL == 0 or answer.usage.resume == "exact"
        saved += answer.usage.cached_tokens
    assert saved > 0


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "unstored"])
@pytest.mark.parametrize("loss", ["collected", "damaged"])
def test_a_lost_conversation_is_read_as_any_prompt(
    loss: str, stored: bool, engine: OwnEngine, control: OwnEngine, store: Store, loaded: tuple[Artifact, Program]
) -> None:
    """Prefill stops at the end of the system prompt, also if the conversation's turns give the prompt's ids."""
    (letter,) = Tokenizer.open(loaded[0].file("tokenizer.json")).ids("e")
    one = {"max_tokens": 1, "sampling": replace(SAMPLING, temperature=0.0, logit_bias={int(letter): 100.0})}
    talk = [with_clock(0)]
    for n in range(3):
        answer = ask(engine, *talk, user(f"Number {n}?"), **one)
        talk += [user(f"Number {n}?"), Message("assistant", answer.text)]
    assert engine.writer is not None
    engine.writer.flush()
    if loss == "collected":
        store.collect(0)
    else:
        with store.writing() as connection:
            for table in ("piece", "segment"):
                connection.exec_driver_sql(f"UPDATE {table} SET data = zeroblob(length(data))")
    found = ask(engine, *talk, user("And now?"), store=stored, **one)
    expected = ask(control, *talk, user("And now?"), **one)
    assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (expected.usage.prompt_tokens, 0)
    assert same(found, expected)


@pytest.mark.parametrize("kept_inside", [True, False])
def test_a_killed_reader_loses_little(
    kept_inside: bool, engine: OwnEngine, store: Store, control: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest state of a prompt under way is written when it is due, with all that it grows from.

    kept_inside: there are states before it, which are too small to be written ahead. Otherwise it replaces the one
    before.
    """
    monkeypatch.setattr(persistence, "PROGRESS_S", 1e9 if kept_inside else 0.0)
    if not kept_inside:
        monkeypatch.setattr(restore, "inside", lambda *_, **__: [])
    prefilled, seen = persistence._TurnStore.prefilled, list[int]()

    def hang_up(self: persistence._TurnStore, handle: object, position: int, read_ms: float) -> None:
        if position >= 4 * CELL:
            monkeypatch.setattr(persistence, "PROGRESS_S", 0.0)
        prefilled(self, handle, position, read_ms)
        seen.append(position)
        if position >= 4 * CELL:
            engine._worker.running[0].cancel()

    monkeypatch.setattr(persistence._TurnStore, "prefilled", hang_up)
    talk = user(" ".join(str(n) for n in range(120)))
    left = Asked(engine, talk).answer()
    assert not left.text
    assert engine.writer is not None
    engine.writer.flush()
    with store.reading() as connection:
        kept = sorted(connection.scalars(select(checkpoint.c.position)))
    assert kept[-1] == seen[-1] // CELL * CELL
    assert len(kept) == 1 or kept_inside
    monkeypatch.setattr(persistence._TurnStore, "prefilled", prefilled)
    monkeypatch.setattr(persistence, "PROGRESS_S", 60.0)
    again = ask(engine, talk)
    assert again.usage.cached_tokens == kept[-1]
    assert same(again, ask(control, talk))


def test_owners_learn_nothing_of_one_another() -> None:
    seen, ids = SeenPrompts(CELL), Line.of(range(300))
    assert seen.parted("anna", ids) == (0, False)
    assert seen.parted("ben", ids) == (0, False)
    assert seen.parted("anna", Line.of([*range(200), *range(100)])) == (192, True)
    assert seen.parted("anna", Line.of(range(200))) == (192, False), "the earlier one may go on as this one does"


def test_the_last_tokens_of_a_prompt_part_it_too() -> None:
    """Also if it ends within a cell. A prompt that goes on from another one, or repeats it, does not part from it."""
    seen, ids = SeenPrompts(CELL), list(range(100))
    assert seen.parted("", Line.of(ids)) == (0, False)
    assert seen.parted("", Line.of(ids)) == (64, False)
    assert seen.parted("", Line.of([*ids, *range(300, 420)])) == (64, False)
    assert seen.parted("", Line.of([*ids[:99], 7, *range(300, 420)])) == (64, True)
    fresh = SeenPrompts(CELL)
    fresh.parted("", Line.of(ids))
    assert fresh.parted("", Line.of([*ids[:98], 7, 8])) == (64, True)
    assert fresh.parted("", Line.of([*ids[:98], 7, 8]).cut(70)) == (0, False), "no cell is at hand"


def test_only_so_many_cells_are_remembered() -> None:
    seen, ids = SeenPrompts(CELL, most=8), Line.of(range(512))
    seen.parted("", ids)
    for n in range(1, 40):
        seen.parted("", Line.of(range(n, n + 300)))
    assert len(seen._seen) <= 8
    assert seen.parted("", ids)[0] == 0


def test_the_positions_follow_from_the_length() -> None:
    assert inside(0, 20_000, (), CELL, recurrent=True) == [1024, 2048, 4096, 8192, 16384]
    assert inside(2048, 20_000, (9_030,), CELL, recurrent=True) == [4096, 8192, 9024, 16384]
    assert inside(0, 1100, (0,), CELL, recurrent=True, ends=(1100,)) == [], "the prompt's end is near"
    rows = inside(0, 20_000, (), CELL, recurrent=False)
    assert not any(p % CELL for p in rows)
    assert all(b - a <= max(CELL, anchor(b) // 8) for a, b in zip([0, *rows], rows, strict=False))
    assert len(rows) < 64


def test_a_client_of_many_prompts_pushes_out_its_own(
    engine: OwnEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States without a session are bounded, and the client that has most of them gives up first."""
    kept = {"retention": "24h", "store": False, "max_tokens": 1}
    quiet, loud = Domain("quiet", ("quiet",)), Domain("loud", ("loud",))
    talk = with_clock(0), user("Who is there?")
    ask(engine, *talk, domain=quiet, **kept)
    assert engine.writer is not None
    engine.writer.flush()
    share = 3 * store.bytes_stored()
    monkeypatch.setattr(store, "quota", SHARE * share)
    for n in range(6):
        ask(engine, Message("system", f"{n} {with_clock(n).content}"), user("Who?"), domain=loud, **kept)
        engine.writer.flush()
        assert store.bytes_stored() <= share
    assert ask(engine, *talk, domain=quiet, **kept).usage.cached_tokens > 0
