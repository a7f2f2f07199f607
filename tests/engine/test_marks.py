"""Marked blocks and the blocks of a system prompt: states at their ends, for a bounded number of them.

The control is an engine without a store, which reads every prompt whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from conftest import TinyArtifacts
from engine.test_engine import Answer, ask, program_of, user
from engines import OwnEngine
from sqlalchemy import select

from ssmd.engine.persist import writer as writer_module
from ssmd.engine.prompt.rendering import ENDS, MARKS
from ssmd.engine.request import Request
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.rows.schema import checkpoint
from ssmd.sessions.store import Store
from ssmd.text.messages import BlockEnd, Message
from ssmd.text.template import TemplateInput

CELL = 64
RULES = "You keep the lighthouse at the end of the pier, and you know every ship by its lamp. " * 3
DOCUMENT = "The fog came in at nine. The keeper lit the lamp, rang the bell and wrote it down in his book. " * 3


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 60)
    monkeypatch.setattr("ssmd.engine.metrics.Pace.pays", lambda *_: True)


@pytest.fixture(scope="module", params=["mamba-f32", "granite-f32", "bamba-last-f32", "llama-f32"])
def loaded(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    """Pure SSM, hybrid without and with RoPE, transformer."""
    with program_of(artifacts, request.param, threads=None) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def control(loaded: tuple[Artifact, Program]) -> Iterator[OwnEngine]:
    engine = OwnEngine(*loaded, None)
    engine.start()
    yield engine
    engine.shutdown(0)


def same(found: Answer, expected: Answer) -> bool:
    return (found.text, found.logprobs) == (expected.text, expected.logprobs)


def kept(engine: OwnEngine, store: Store) -> list[int]:
    """The positions of all states within prompts."""
    assert engine.writer is not None
    engine.writer.flush()
    with store.reading() as connection:
        return sorted(connection.scalars(select(checkpoint.c.position).where(checkpoint.c.kind == "prefix")))


def system(*blocks: str) -> tuple[Message, tuple[BlockEnd, ...]]:
    """A system prompt of several blocks, and their ends but the last."""
    ends = [len("\n\n".join(blocks[: i + 1])) for i in range(len(blocks) - 1)]
    return Message("system", "\n\n".join(blocks)), tuple(BlockEnd(0, end, marked=False) for end in ends)


def tokens(engine: OwnEngine, *messages: Message) -> int:
    """The tokens up to the end of the last message's text."""
    longer = Message(messages[-1].role, messages[-1].content + " and on")
    prompt, other = (engine._planner.plan(Request((*messages[:-1], last))) for last in (messages[-1], longer))
    pairs = zip(prompt.ids.own.tolist(), other.ids.own.tolist(), strict=False)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def test_a_system_block_is_kept_the_first_time(engine: OwnEngine, control: OwnEngine) -> None:
    """An agent's rules stand in the first block, the state of a project in the second."""
    talks = [system(RULES, f"The project is {name}.") for name in ("one", "two")]
    first, second = (ask(engine, message, user("Who?"), blocks=ends) for message, ends in talks)
    rules = tokens(engine, Message("system", RULES), user("Who?")) - CELL
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens % CELL == 0
    assert second.usage.cached_tokens > rules - CELL
    assert same(second, ask(control, talks[1][0], user("Who?")))


def test_a_marked_block_is_kept_the_first_time(engine: OwnEngine, control: OwnEngine) -> None:
    """A document stands before a question in one message."""
    ends = (BlockEnd(0, len(DOCUMENT), marked=True),)
    talks = [user(f"{DOCUMENT} {question}") for question in ("Who rang the bell?", "When did the fog come?")]
    ask(engine, talks[0], blocks=ends)
    document = tokens(engine, user(DOCUMENT))
    assert document - document % CELL in kept(engine, engine.writer.store)  # type: ignore[union-attr]
    second = ask(engine, talks[1], blocks=ends)
    assert document - CELL < second.usage.cached_tokens <= document
    assert same(second, ask(control, talks[1]))


@pytest.mark.parametrize("form", ["blocks", "messages"])
def test_reminders_before_first_words_are_kept(engine: OwnEngine, control: OwnEngine, form: str) -> None:
    """An agent puts a long reminder before the user's words in each new conversation, as a block or a message."""
    found = []
    for words in ("Who rang the bell?", "When did the fog come?"):
        talk = (user(f"{DOCUMENT}{words}"),) if form == "blocks" else (user(DOCUMENT), user(words))
        blocks = (BlockEnd(0, len(DOCUMENT), marked=False),) if form == "blocks" else ()
        found.append(ask(engine, *talk, blocks=blocks))
        assert same(found[-1], ask(control, *talk))
    document = tokens(engine, user(DOCUMENT))
    assert found[0].usage.cached_tokens == 0
    assert document - CELL < found[1].usage.cached_tokens <= document + CELL
    later = (*talk, Message("assistant", found[1].text), user(DOCUMENT), user("Why?"))
    assert engine._planner.plan(Request(later)).parts == (), "a later turn has other places"


def test_a_mark_in_a_later_turn_counts_too(engine: OwnEngine, control: OwnEngine, store: Store) -> None:
    """The conversation goes on from a stored turn: only its end is rendered."""
    begun = ask(engine, user("Who is there?"), max_tokens=4)
    said = [user("Who is there?"), Message("assistant", begun.text)]
    asked = [*said, user(f"{DOCUMENT} Who rang the bell?")]
    before = kept(engine, store)
    answer = ask(engine, *asked, blocks=(BlockEnd(2, len(DOCUMENT), marked=True),))
    assert answer.usage.cached_tokens > 0
    document = tokens(engine, *said, user(DOCUMENT))
    assert document - document % CELL in set(kept(engine, store)) - set(before)
    other = ask(engine, *said, user(f"{DOCUMENT} When did the fog come?"))
    assert other.usage.cached_tokens >= document - CELL


def test_a_mark_at_the_end_of_a_prompt_costs_nothing(
    engine: OwnEngine, store: Store, loaded: tuple[Artifact, Program]
) -> None:
    if not loaded[1].spec.recurrent:
        pytest.skip("rows are stored once in any case")
    asked = user(DOCUMENT)
    ask(engine, asked, blocks=(BlockEnd(0, None, marked=True),))
    assert kept(engine, store) == [], "the state before the last token serves the same prompts"


def test_marks_on_everything_leave_few_states(
    engine: OwnEngine, store: Store, loaded: tuple[Artifact, Program]
) -> None:
    """The last marks count. A client that marks each word, or each message, gets no more of them."""
    words = DOCUMENT.split(" ")
    ends = [len(" ".join(words[: i + 1])) for i in range(len(words))]
    talk = user(f"{DOCUMENT} Who rang the bell?")
    blocks = tuple(BlockEnd(0, end, marked=True) for end in ends)
    plan = engine._planner.plan(Request((talk,), blocks=blocks))
    assert len(plan.parts) == MARKS
    assert max(plan.parts) == tokens(engine, user(DOCUMENT))
    many = tuple(Message("system", f"{n}: Be short.") for n in range(ENDS + MARKS))
    blocks = tuple(BlockEnd(n, 5, marked=n < MARKS) for n in range(len(many)))
    plan = engine._planner.plan(Request((*many, user("Who?")), blocks=blocks))
    assert len(plan.parts) == ENDS + MARKS
    if loaded[1].spec.recurrent:
        ask(engine, talk, blocks=tuple(BlockEnd(0, end, marked=True) for end in ends), max_tokens=1)
        assert len(kept(engine, store)) <= MARKS


def test_a_marked_tool_ends_a_beginning(engine: OwnEngine, control: OwnEngine) -> None:
    """Tools behind the marked one may change."""
    find: dict[str, object] = {"type": "function", "function": {"name": "find"}}
    found = []
    for last in ("new", "newer"):
        given = TemplateInput((find, {"type": "function", "function": {"name": last}}))
        talk = Message("system", "Be short."), user("Who?")
        answer = ask(engine, *talk, given=given, marked_tools=1)
        assert same(answer, ask(control, *talk, given=given))
        found.append(answer.usage.cached_tokens)
    assert found[0] == 0
    assert found[1] >= CELL
    assert found[1] % CELL == 0


def test_edits_and_marks_anywhere_give_the_same_bits(engine: OwnEngine, control: OwnEngine, store: Store) -> None:
    """Words are inserted, removed and replaced at random, and blocks are marked at random."""
    draw = random.Random(11)
    words = ["lamp", "pier", "fog", "keeper", "ship", "night", "water", "stone", "rope", "bell"]
    texts = [draw.choices(words, k=40), draw.choices(words, k=70)]
    saved = 0
    for _ in range(8):
        said = draw.choice(texts)
        begin = draw.randrange(len(said) or 1)
        said[begin : begin + draw.randrange(3)] = draw.choices(words, k=draw.randrange(3))
        talk = Message("system", " ".join(texts[0]) or "lamp"), user(" ".join(texts[1]) or "lamp")
        places = sorted(draw.sample(range(2), 1) + draw.sample(range(2), 1))
        blocks = tuple(
            BlockEnd(at, draw.choice([None, draw.randrange(len(talk[at].content))]), marked=draw.random() < 0.7)
            for at in places
        )
        answer, expected = ask(engine, *talk, blocks=blocks, max_tokens=4), ask(control, *talk, max_tokens=4)
        assert same(answer, expected), (talk, blocks)
        assert not any(position % CELL for position in kept(engine, store))
        saved += answer.usage.cached_tokens
    assert saved > 0
