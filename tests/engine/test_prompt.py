"""A plan is made of one moment of the store: right while others delete, and no dearer than it must be."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from engine.test_engine import LONG_SYSTEM, SAMPLING, Asked, answered, ask, program_of, user
from engine.test_rerender import engine_of
from engines import OwnEngine
from keeping import grown
from sqlalchemy import event, text, update

from ssmd.engine.engine import Engine
from ssmd.engine.prompt.planner import Prompt
from ssmd.engine.prompt.rendering import ENDS
from ssmd.engine.request import Request
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.line import Passage
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.text.messages import Message
from ssmd.text.telling import MAX_KEPT_CHARS
from ssmd.text.template import TemplateInput


@pytest.fixture(scope="module")
def loaded(artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, "llama-f32") as loaded:
        yield loaded


@pytest.fixture
def served(loaded: tuple[Artifact, Program], tmp_path: Path) -> Iterator[tuple[Engine, Store]]:
    with engine_of(*loaded, tmp_path / "data") as served:
        yield served


def begun(engine: Engine) -> tuple[str, tuple[Message, ...]]:
    """A stored session, and a request that continues it."""
    first = ask(engine, LONG_SYSTEM, user("Who is there?"))
    return str(first.usage.session), (LONG_SYSTEM, user("Who is there?"), answered(first.text), user("And now?"))


def plan(engine: Engine, messages: tuple[Message, ...]) -> Prompt:
    return engine._planner.plan(Request(messages))


def same(a: Prompt, b: Prompt) -> bool:
    assert a.info is not None
    assert b.info is not None
    hashes = [(len(p.ids), p.ids.hash(len(p.ids)), len(p.text), p.text.hash(len(p.text))) for p in (a, b)]
    belongs = [(p.info.id, p.parent, p.new, p.found) for p in (a, b) if p.info is not None]
    return hashes[0] == hashes[1] and belongs[0] == belongs[1]


def read_whole(store: Store, prompt: Prompt) -> tuple[list[int], str]:
    """All ids and all text of a prompt that was just planned; what is not at hand is what the store holds above it."""
    ids, text = prompt.ids, prompt.text
    for turn in () if prompt.parent is None else store.path(prompt.parent)[::-1]:
        line, passage = grown(store, turn.id)
        if ids.start and len(line) >= ids.start and line.hash(ids.start) == ids.before:
            ids = ids.after([line.up_to(ids.start)])
        if text.start and len(passage) >= text.start and passage.hash(text.start) == text.before:
            text = Passage(passage.own[: text.start] + text.own)
    assert (ids.start, text.start) == (0, 0)
    return ids.own.tolist(), text.own


@pytest.mark.parametrize("before", ["echoed", "info", "turn", "resume"])
def test_a_session_deleted_while_a_request_is_planned(
    served: tuple[Engine, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """By another process, which has a connection of its own. The plan is of before or of after, never of both."""
    engine, store = served
    session, messages = begun(engine)
    undisturbed = plan(engine, messages)
    assert undisturbed.info is not None
    assert (undisturbed.info.id, undisturbed.parent is None, undisturbed.found is None) == (session, False, False)
    with closing(Store.open(tmp_path / "data", busy_ms=100)) as other:
        read, here = getattr(Snapshot, before), threading.get_ident()

        def meanwhile(self: Snapshot, *args: Any, **fields: Any) -> Any:
            if threading.get_ident() == here and other.sessions():  # and not while a turn is read once more
                other.delete(session)
            return read(self, *args, **fields)

        monkeypatch.setattr(Snapshot, before, meanwhile)
        asked = Asked(engine, *messages)
        prompt = asked.generation.asked.prompt
        if before == "echoed":  # nothing was read yet
            assert prompt.info is not None
            assert (prompt.info.known, prompt.parent, prompt.new) == (False, None, messages)
            assert prompt.found is None
        else:
            assert same(prompt, undisturbed)
        usage = asked.answer().usage
        assert (usage.resume, usage.cached_tokens) == ("none", 0), "no state is left to start from"
        assert usage.stored == (before == "echoed"), "a session that was removed does not come back"
        assert [s.id for s in store.sessions()] == ([usage.session] if usage.stored else [])
        assert ask(engine, *messages).usage.stored


def test_large_tools_and_variables_are_not_cached(served: tuple[Engine, Store]) -> None:
    planner = served[0]._planner
    caches = planner._beginnings._kept, planner._renderer._telling._kept
    for i in range(3):
        large = TemplateInput((), {"documents": f"{i}" + "x" * MAX_KEPT_CHARS})
        planner.plan(Request((LONG_SYSTEM, user("Who?")), given=large))
    assert [cache.cache_info().currsize for cache in caches] == [0, 0]
    planner.plan(Request((LONG_SYSTEM, user("Who?")), given=TemplateInput((), {"documents": "x"})))
    assert [cache.cache_info().currsize for cache in caches] == [1, 1]


def test_a_plan_tokenises_each_part_once(served: tuple[Engine, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    planner = served[0]._planner
    monkeypatch.setattr(planner, "_context", None)
    monkeypatch.setattr(planner._renderer, "_context", None)
    read: list[str] = []
    ids = planner._tokenizer.ids

    def reading(text: str, *args: Any) -> Any:
        read.append(text)
        return ids(text, *args)

    def plan(*messages: Message) -> int:
        """Return the characters that were tokenised."""
        read.clear()
        prompt = planner.plan(Request(messages, given=given))
        assert prompt.ids.own.tolist() == ids(prompt.text.own).tolist()
        return sum(map(len, read))

    system = Message("system", "You keep the light. " * 60)
    tool = {"type": "function", "function": {"name": "look", "description": "Looks. "}}
    given = TemplateInput((tool,), {})
    planner.plan(Request((system, user("Who?")), given=given))
    monkeypatch.setattr(planner._tokenizer, "ids", reading)
    length = len(system.content)
    assert plan(system, user("Another one?")) < length, "its system prompt was read before"
    clock = Message("system", system.content + "It is 12:05.")
    assert length < plan(clock, user("Who?")) < 1.5 * length, "its tools were read before"
    assert plan(user(" <|im_end|> \n<|im_start|>"), user("  ")) < length


def test_many_system_messages_are_planned_at_once(
    served: tuple[Engine, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each beginning is rendered apart, so only that of the first few is."""
    planner = served[0]._planner
    rendered: list[int] = []
    beginning = planner._renderer.beginning

    def counted(messages: Sequence[Message], *args: Any) -> str:
        rendered.append(len(messages))
        return beginning(messages, *args)

    monkeypatch.setattr(planner._renderer, "beginning", counted)
    many = [Message("system", f"Rule {n}.") for n in range(12)]
    planner.plan(Request((*many, user("Who?"))))
    assert len(rendered) <= ENDS + 1


def test_a_plan_reads_once_and_counts_no_sizes(served: tuple[Engine, Store]) -> None:
    engine, store = served
    session, messages = begun(engine)
    with store.writing() as connection:  # as after a fork: the sizes are counted when the daemon is idle
        connection.execute(update(session_table).values(own_nbytes=None, shared_nbytes=None))
    begins: list[object] = []
    statements: list[str] = []
    here = threading.get_ident()  # the engine's own threads read, too

    def note(what: list[Any], entry: object) -> None:
        if threading.get_ident() == here:
            what.append(entry)

    event.listen(store._engine, "begin", lambda connection: note(begins, connection))
    event.listen(store._engine, "before_cursor_execute", lambda *args: note(statements, args[2]))
    prompt = plan(engine, messages)
    planned = len(begins), list(statements)
    assert prompt.found is not None
    assert planned[0] == 1
    assert not [s for s in planned[1] if "turn_checkpoint" in s]
    store.session(session)
    assert [s for s in statements if "turn_checkpoint" in s], "which is how sizes are counted"


def test_unreadable_turns_do_not_keep_a_request_from_its_answer(served: tuple[OwnEngine, Store]) -> None:
    engine, store = served
    session, messages = begun(engine)
    (turn,) = store.turns(session)
    with store.writing() as connection:
        connection.execute(update(turn_table).values(ids_start=10**6))
    prompt = plan(engine, messages)
    assert prompt.info is not None
    assert (prompt.info.id, prompt.parent, prompt.new) == (session, turn.id, messages[-1:])
    assert prompt.heard == {turn.id: messages[:-1]}
    answer = ask(engine, *messages, sampling=SAMPLING)
    assert answer.usage.stored
    assert answer.usage.session == session
    healed, below = store.turns(session)
    assert (healed.sound, healed.conversation, len(healed.ids)) == (True, turn.conversation, 0)
    assert (below.parent, below.stem, below.sound) == (turn.id, None, True)
    soon(lambda: engine.metrics.damages() == {"checkpoints": 0, "turns": 1})


def test_a_session_goes_on_though_its_states_cannot_be_looked_up(served: tuple[Engine, Store]) -> None:
    engine, store = served
    session, messages = begun(engine)
    with store.writing() as connection:
        connection.execute(text("ALTER TABLE checkpoint RENAME TO elsewhere"))
    prompt = plan(engine, messages)
    assert prompt.info is not None
    assert (prompt.info.id, prompt.found) == (session, None)
    assert prompt.parent is not None
    with store.writing() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO checkpoint"))
    assert plan(engine, messages).found is not None
