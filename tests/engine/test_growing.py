"""Conversations of many turns: a request reads next to nothing of them, and feeds what it would have fed otherwise."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from engine.test_engine import SAMPLING, Answer, Asked, ask, program_of, user
from engine.test_prompt import read_whole
from engine.test_rerender import done, endless, engine_of, with_template
from keeping import grown
from keeping import whole as whole_of
from sqlalchemy import delete, event, select, update

from ssmd.engine.engine import Engine
from ssmd.engine.persist import writer
from ssmd.engine.persist.persistence import Persistence
from ssmd.engine.prompt.planner import Prompt
from ssmd.engine.request import Request
from ssmd.engine.sampling.sampler import Sampler
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Handle, Program
from ssmd.sessions.rows.checkpoints import sweep
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, piece, segment, turn_checkpoint
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.store import Store
from ssmd.sessions.turn import NewTurn
from ssmd.text.messages import Message

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
SYSTEM, DEVELOPER = Message("system", "You keep a lighthouse."), Message("developer", "Be kind.")
QUESTIONS = ("Who is there?", "And now?", "Tell me a story.", "Why?", "Grüße! 東京")
Talk = tuple[Message, ...]


@pytest.fixture(scope="module", params=[pytest.param("llama-f32", marks=pytest.mark.full), "granite-f32"])
def loaded(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, request.param) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, an answer says whether its turn was stored."""
    monkeypatch.setattr(writer, "COMMIT_PATIENCE_S", 60)


@pytest.fixture
def served(loaded: tuple[Artifact, Program], tmp_path: Path) -> Iterator[tuple[Engine, Store]]:
    with engine_of(*loaded, tmp_path / "data") as served:
        yield served


def answer_of(engine: Engine, talk: Talk, **fields: Any) -> Answer:
    """Return the answer once the engine's background work is done."""
    answer = ask(engine, *talk, **fields)
    soon(lambda: done(engine))
    assert isinstance(engine._persistence, Persistence)
    engine._persistence._writer.flush()
    return answer


def talked(engine: Engine, talk: Talk, *questions: str, **fields: Any) -> Talk:
    """Ask more questions and return the longer conversation."""
    for question in questions:
        answer = answer_of(engine, (*talk, user(question)), **{"max_tokens": 6, **fields})
        assert answer.usage.stored
        talk = (*talk, user(question), Message("assistant", answer.text))
    return talk


def plan(engine: Engine, talk: Talk, **fields: Any) -> Prompt:
    return engine._planner.plan(Request(talk, **fields))


def from_scratch(engine: Engine, store: Store, prompt: Prompt, talk: Talk) -> tuple[list[int], str]:
    """All ids and all text of a prompt, of the whole conversation rendered: stored ids for the deepest turn that it
    goes on from, the tokenizer's for the rest.
    """
    planner, tokenizer = engine._planner, engine._planner._tokenizer
    path = [] if prompt.parent is None else store.path(prompt.parent)
    stored = [m for turn in path for m in turn.conversation]
    shown = [s if s.content.strip() == m.content.strip() else m for s, m in zip(stored, talk, strict=False)]
    now = datetime.now(UTC) if prompt.info is None else prompt.info.clock
    text = planner._renderer.render([*shown, *talk[len(stored) :]], now).text
    for turn in reversed(path):
        ids, before = whole_of(store, turn.id)
        known = ids and turn.lineage == engine.artifact.manifest.lineage and text.startswith(before)
        if known and tokenizer.ends_at_control(text, len(before)):
            return ids + tokenizer.encode(text[len(before) :]), text
    return tokenizer.encode(text), text


@contextmanager
def read(store: Store) -> Iterator[dict[str, int]]:
    """Measure this thread's reads of the store: statements, rows, and bytes of all that is in them."""
    statements: list[tuple[str, Any]] = []
    here = threading.get_ident()

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if threading.get_ident() == here:
            statements.append((statement, parameters))

    event.listen(store._engine, "before_cursor_execute", note)
    found: dict[str, int] = {}
    try:
        yield found
    finally:
        event.remove(store._engine, "before_cursor_execute", note)
    with closing(sqlite3.connect(store.file)) as raw:
        rows = [row for statement, parameters in statements for row in raw.execute(statement, parameters)]
    found["statements"], found["rows"] = len(statements), len(rows)
    found["bytes"] = sum(len(value) for row in rows for value in row if isinstance(value, str | bytes))


def write_turns(engine: Engine, store: Store, talk: Talk, count: int) -> Talk:
    """Turns without states below a conversation that is stored, each as the engine would have written it."""
    for _ in range(count):
        asked, said = user(f"Q{len(talk)}"), Message("assistant", f"A{len(talk)}")
        prompt = plan(engine, (*talk, asked))
        assert prompt.info is not None
        new = NewTurn(
            id=f"turn_{len(talk)}",
            session=prompt.info.id,
            parent=prompt.parent,
            messages=prompt.new,
            answer=said,
            ids=prompt.ids.then(engine._planner._tokenizer.encode(said.content)),
            prompt_tokens=len(prompt.ids),
            text=prompt.text.then(said.content),
            finish="stop",
            complete=True,
            created_at=datetime.now(UTC),
            settled=prompt.settled,
        )
        store.commit([new], session=prompt.info)
        talk = (*talk, asked, said)
    return talk


def test_reads_of_a_request_do_not_grow_with_the_conversation(served: tuple[Engine, Store]) -> None:
    engine, store = served
    talk = talked(engine, (SYSTEM,), "Who is there?")
    costs = []
    for count in (8, 8):
        talk = talked(engine, write_turns(engine, store, talk, count), "Go on.")
        asked = (*talk, user("And then?"))
        with read(store) as cost:
            prompt = plan(engine, asked)
        assert prompt.found is not None
        assert len(prompt.ids.own) < 100 < len(prompt.ids)
        assert len(prompt.text.own) < 300 < len(prompt.text)
        assert read_whole(store, prompt) == from_scratch(engine, store, prompt, asked)
        costs.append(cost)
    short, long = costs
    assert (short["statements"], short["rows"]) == (long["statements"], long["rows"])
    assert long["statements"] < 10
    assert abs(long["bytes"] - short["bytes"]) < 1000, "of hashes there is more or less of a block that is not full"
    with read(store) as cost:
        plan(engine, asked, session=str(prompt.info and prompt.info.id))
    assert cost["rows"] <= long["rows"] + 10  # those that it may echo are looked up by themselves


def test_it_reads_as_little_after_answers_that_were_rerendered(
    served: tuple[Engine, Store], loaded: tuple[Artifact, Program]
) -> None:
    """Their texts end where the next message begins, so that what goes on from them is rendered from there."""
    engine, store = served
    talk = talked(engine, (SYSTEM,), "Who is there?")
    talk = talked(engine, write_turns(engine, store, talk, 6), "Go on.")
    for again in range(2):
        talk = talked(engine, talk, "Cut.", stop=("e", "a", "i", "o"), max_tokens=12, sampling=endless(loaded))
        for question in ("And then?", "Why?"):
            asked = (*talk, user(question))
            with read(store) as cost:
                prompt = plan(engine, asked)
            assert prompt.found is not None
            assert prompt.settled is not None
            assert len(prompt.text.own) < 300 < len(prompt.text), (again, question)
            assert cost["rows"] < 20, "a path is not read"
            assert read_whole(store, prompt) == from_scratch(engine, store, prompt, asked)
            talk = talked(engine, talk, question)


@pytest.mark.parametrize("name", ["tiny", "dated", "smollm2", "qwen3", "forgetful"])
def test_a_plan_is_that_of_the_whole_conversation(loaded: tuple[Artifact, Program], tmp_path: Path, name: str) -> None:
    """Named or not, kept or not, forked, begun, cut by a stop string, with reasoning that the echo leaves out."""
    artifact = loaded[0]
    if name != "tiny":
        artifact = with_template(artifact, tmp_path / "artifact", (TEMPLATES / f"{name}.jinja").read_text())
    thought = Message("assistant", "<think>\nHm.\n</think>\n\nWell,")
    endlessly = {"sampling": endless(loaded)}
    with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
        talk = talked(engine, (DEVELOPER,), *QUESTIONS[:2], **endlessly)
        session = store.sessions()[0].id
        talk = talked(engine, talk, "Cut.", stop=("e", "a", "i", "o"), max_tokens=12, **endlessly)
        begun = answer_of(engine, (*talk, user("Think."), thought), max_tokens=4, **endlessly)
        talk = (*talk, user("Think."), Message("assistant", thought.content + begun.text))
        talk = talked(engine, talk, *QUESTIONS[2:], **endlessly)
        turns = {t.length: t.id for t in store.turns(session)}
        assert len(turns) == 4 + len(QUESTIONS[2:]) == len(store.turns(session))
        for number, (length, turn) in enumerate(turns.items()):
            history = talk[:length]
            fork = store.fork(session, turn).id
            spaced = tuple(replace(m, content=f" {m.content}\n") if m.role == "assistant" else m for m in history)
            plain = tuple(replace(m, content=m.said) if m.role == "assistant" else m for m in history)
            tails = ((user("Next."),), (user("Next."), Message("assistant", "It is")), (SYSTEM, user("Next.")))
            named: tuple[dict[str, Any], ...] = ({}, {"session": session}, {"session": fork}, {"store": False})
            ways = list(product((history, spaced, plain), tails, named))
            for echo, tail, fields in ways[number % 3 :: 3]:  # each at two turns or three
                prompt = plan(engine, (*echo, *tail), **fields)
                assert prompt.parent == turn
                if "session" in fields:
                    assert prompt.info is not None
                    assert prompt.info.id == fields["session"]
                scratch = from_scratch(engine, store, prompt, (*echo, *tail))
                assert read_whole(store, prompt) == scratch


def lose(store: Store, count: int, how: str) -> None:
    """The deepest `count` checkpoints are gone, or damaged."""
    with store.writing() as connection:
        ids = list(connection.scalars(select(checkpoint.c.id).order_by(checkpoint.c.position.desc())))
        lost, kept = ids[:count], ids[count:]
        if how == "gone":
            connection.execute(delete(turn_checkpoint).where(turn_checkpoint.c.checkpoint.in_(lost)))
            sweep(connection, lost)
            return
        link = checkpoint_segment.c
        needed = select(link.segment).where(link.checkpoint.in_(kept))
        rows = select(link.segment).where(link.checkpoint.in_(lost), link.segment.not_in(needed))
        connection.execute(update(segment).where(segment.c.id.in_(rows)).values(data=b"\0" * 64))
        connection.execute(update(piece).where(piece.c.checkpoint.in_(lost)).values(data=b"\0" * 64))


def positions(store: Store) -> list[int]:
    """Of all checkpoints, the deepest first."""
    with store.reading() as connection:
        return sorted(connection.scalars(select(checkpoint.c.position)), reverse=True)


def first_token(program: Program, handle: Handle, ids: list[int]) -> tuple[float | None, tuple[float, ...]]:
    """Return the log probabilities of the next token after these ids, by the calls that a request makes."""
    position = program.position(handle)
    for n in buckets.pieces(position, len(ids) - 1, program.buckets):
        program.prefill(handle, ids[position : position + n])
        position += n
    (logits,) = program.decode([handle], [ids[-1]])
    program.release(handle)
    sample = Sampler(SAMPLING, index=0).sample(logits)
    return sample.logprob, tuple(p for _, p in sample.top)


def told(answer: Answer) -> tuple[float | None, tuple[float, ...]]:
    return answer.logprobs[0].logprob, tuple(p for _, _, p in answer.logprobs[0].top)


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_what_has_no_state_any_more_is_read_back(
    loaded: tuple[Artifact, Program], served: tuple[Engine, Store], how: str, count: int
) -> None:
    """The sampled ids, which the tokenizer would not choose, are read from the turns above down to the last."""
    (engine, store), program = served, loaded[1]
    talk = talked(engine, (SYSTEM,), *QUESTIONS, max_tokens=10, sampling=endless(loaded))
    asked = (*talk, user("Go on."))
    prompt = plan(engine, asked)
    assert prompt.found is not None
    ids, text = from_scratch(engine, store, prompt, asked)
    assert engine._planner._tokenizer.encode(text) != ids
    left = positions(store)[count:]
    lose(store, count, how)
    handle = program.new_state()
    if left:
        with store.reading() as connection:
            at = connection.scalars(select(checkpoint.c.id).where(checkpoint.c.position == left[0])).one()
        program.release(handle)
        handle = program.restore(store.load(at, program.spec))
    expected = first_token(program, handle, ids)
    answer = answer_of(engine, asked, max_tokens=4)
    assert answer.usage.cached_tokens == (left[0] if left else 0)
    assert answer.usage.prompt_tokens == len(ids)
    assert told(answer) == expected, "bit for bit"
    turns = store.turns(str(answer.usage.session))
    assert len(turns) == len(QUESTIONS) + 1
    assert (turns[-1].parent, turns[-1].stem) == (turns[-2].id, turns[-2].id)
    assert whole_of(store, turns[-1].id)[0][: len(ids)] == ids
    assert answer_of(engine, (*asked, Message("assistant", answer.text), user("So?"))).usage.resume == "exact"


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_ids_that_cannot_be_read_back_are_read_from_the_words(
    loaded: tuple[Artifact, Program], tmp_path: Path, how: str, name: str
) -> None:
    """No state is left below a turn that was altered: found so at once, or only when the last state cannot be read."""
    artifact, program = loaded
    if name != "tiny":
        artifact = with_template(artifact, tmp_path / "artifact", (TEMPLATES / f"{name}.jinja").read_text())
    with engine_of(artifact, program, tmp_path / "data") as (engine, store):
        talk = talked(engine, (SYSTEM,), *QUESTIONS, max_tokens=10, sampling=endless(loaded))
        (session,) = store.sessions()
        turns = store.turns(session.id)
        asked = (*talk, user("Go on."))
        prompt = plan(engine, asked)
        _, text = from_scratch(engine, store, prompt, asked)
        words = engine._planner._tokenizer.encode(text)
        lose(store, 100, how)
        with store.writing() as connection:
            altered = update(turn_table).where(turn_table.c.id == turns[-3].id)
            connection.execute(altered.values(ids=turns[-3].ids.own[::-1].tobytes()))
        generation = Asked(engine, *asked, max_tokens=4)
        answer = generation.answer()
        assert (answer.usage.cached_tokens, answer.usage.resume) == (0, "none")
        assert answer.usage.prompt_tokens == len(words)
        assert answer.usage.stored
        assert answer.usage.session == session.id
        assert told(answer) == first_token(program, program.new_state(), words), "bit for bit"
        soon(lambda: done(engine))
        last = store.turns(session.id)[-1]
        assert (last.parent, last.stem) == (turns[-1].id, None)
        assert whole_of(store, last.id)[0][: len(words)] == words
        again = answer_of(engine, (*asked, Message("assistant", answer.text), user("So?")), max_tokens=2)
        assert again.usage.session == session.id
        assert again.usage.cached_tokens >= len(words)


def test_states_that_cannot_be_looked_up(served: tuple[Engine, Store]) -> None:
    """Then all that is fed is at hand, as there is nothing to feed it to but a new state."""
    engine, store = served
    talk = talked(engine, (SYSTEM,), *QUESTIONS)
    (session,) = store.sessions()
    asked = (*talk, user("Go on."))
    assert plan(engine, asked).ids.start > 0
    with store.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE checkpoint RENAME TO elsewhere")
    prompt = plan(engine, asked)
    assert (prompt.found, prompt.ids.start, prompt.stem) == (None, 0, None)
    assert prompt.info is not None
    assert prompt.info.id == session.id
    answer = ask(engine, *asked, max_tokens=2)
    usage = answer.usage
    assert (usage.stored, usage.state_stored, usage.cached_tokens) == (True, False, 0), "its text is"
    with store.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO checkpoint")
    assert ask(engine, *asked, max_tokens=2).usage.resume == "exact"


def test_models_that_take_turns_go_on_each_from_its_own(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Another model's turns stand between: the next one of the first goes on from the last of the first."""
    with program_of(artifacts, "llama-f32") as first, program_of(artifacts, "granite-f32") as second:
        talk: Talk = (SYSTEM,)
        for i in range(8):
            with engine_of(*(first, second)[i // 2 % 2], tmp_path / "data") as (engine, store):
                talk = talked(engine, talk, f"Question {i}?")
                turns = store.turns(store.sessions()[0].id)
                prompt = plan(engine, (*talk, user("And?")))
                assert read_whole(store, prompt) == from_scratch(engine, store, prompt, (*talk, user("And?")))
        assert len(turns) == 8
        above = [None if t.stem is None else [u.id for u in turns].index(t.stem) for t in turns]
        assert above == [None, 0, None, 2, 1, 4, 3, 6]
        assert len({t.lineage for t in turns}) == 2
        for t in turns:
            assert len(grown(store, t.id)[0]) > t.prompt_tokens > 0
