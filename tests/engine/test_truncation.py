"""The end of the context: told early, and gone past without the oldest turns where the request allows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from engine.test_engine import SAMPLING, Answer, ask, program_of, user
from engine.test_rerender import engine_of

from ssmd.engine.engine import Engine
from ssmd.engine.prompt.planner import LEAST_ROOM, TRUNCATED
from ssmd.engine.terms import Rejection
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.files.transfer import export_session, import_session
from ssmd.sessions.store import Store
from ssmd.text.messages import Message

SYSTEM = Message("system", "You keep a lighthouse on a rock in the sea, and you speak of it to whoever asks. " * 2)
TURNS = 20  # past the first cut


@pytest.fixture(scope="module", params=["llama-f32", "granite-f32"])
def loaded(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, request.param) as loaded:
        yield loaded


@pytest.fixture
def served(loaded: tuple[Artifact, Program], tmp_path: Path) -> Iterator[tuple[Engine, Store]]:
    with engine_of(*loaded, tmp_path / "data") as served:
        yield served


def talked(
    engine: Engine, turns: int, talk: tuple[Message, ...] = (SYSTEM,), at: int = 0
) -> Iterator[tuple[tuple[Message, ...], Answer]]:
    """(the conversation with the question, the answer) of each turn."""
    for i in range(at, at + turns):
        talk = (*talk, user(f"{i}: what of the light?"))
        answer = ask(engine, *talk, max_tokens=16, truncate=True)
        yield talk, answer
        talk = (*talk, Message("assistant", answer.text))


def test_turns_past_the_edge_resume(served: tuple[Engine, Store]) -> None:
    engine, store = served
    context = engine.program.context
    assert context is not None
    cuts: list[int] = []
    past = 0
    for talk, answer in talked(engine, 60):
        usage, before = answer.usage, cuts[-1] if cuts else 0
        assert usage.stored
        assert usage.context_left == context - usage.prompt_tokens - usage.completion_tokens >= 0
        if usage.cut_messages != before:  # read once, but for the system prompt
            assert usage.cut_messages > before
            assert talk[1 + usage.cut_messages].role == "user"
            assert usage.prompt_tokens <= TRUNCATED * context
            assert answer.fed < TRUNCATED * context
            assert usage.cached_tokens > 0
        elif len(talk) > 2:
            assert usage.resume == "exact"
            assert answer.fed < 64, "what is new, and nothing else"
        cuts.append(usage.cut_messages)
        past += bool(usage.cut_messages)
        if past == TURNS:
            break
    assert past == TURNS
    assert len(set(cuts)) >= 3, "it was cut more than once"
    (session,) = store.sessions()
    assert session.turns == len(cuts)
    assert [m for t in store.path(session.head) for m in t.conversation][: len(talk)] == list(talk), "all was kept"


def test_the_model_reads_what_is_left(
    served: tuple[Engine, Store], loaded: tuple[Artifact, Program], tmp_path: Path
) -> None:
    """The answer after a cut is that to the same conversation without what was cut."""
    engine, _ = served
    talk, answer = next((t, a) for t, a in talked(engine, 60) if a.usage.cut_messages)
    left = (SYSTEM, *talk[1 + answer.usage.cut_messages :])
    with engine_of(*loaded, tmp_path / "other") as (other, _):
        alone = ask(other, *left, max_tokens=16)
    assert alone.usage.prompt_tokens == answer.usage.prompt_tokens
    assert alone.logprobs[0].token == answer.logprobs[0].token
    for a, b in zip(alone.logprobs, answer.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_cut_is_kept_over_a_restart(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    with engine_of(*loaded, tmp_path / "data") as (engine, _):
        talk, answer = next((t, a) for t, a in talked(engine, 60) if a.usage.cut_messages)
    talk = (*talk, Message("assistant", answer.text))
    with engine_of(*loaded, tmp_path / "data") as (engine, _):
        for _, later in talked(engine, 2, talk, at=100):
            assert later.usage.cut_messages == answer.usage.cut_messages
            assert later.usage.resume == "exact"
            assert later.fed < 64
        again = ask(engine, *talk[:-1], max_tokens=16, truncate=True)
        assert (again.usage.cut_messages, again.fed) == (answer.usage.cut_messages, 1), "the same question once more"
        assert again.text == answer.text


def test_a_cut_moves_along(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    """To another machine: in a file, with the state of what is left."""
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        talk, answer = next((t, a) for t, a in talked(engine, 60) if a.usage.cut_messages)
        assert answer.usage.session is not None
        export_session(store, answer.usage.session, tmp_path / "chat.ssmd")
    talk = (*talk, Message("assistant", answer.text))
    with engine_of(*loaded, tmp_path / "other") as (engine, store):
        import_session(store, tmp_path / "chat.ssmd")
        for _, later in talked(engine, 2, talk, at=100):
            assert later.usage.cut_messages == answer.usage.cut_messages
            assert later.usage.resume == "exact"
            assert later.fed < 64


def test_who_does_not_ask_for_it_is_refused(served: tuple[Engine, Store]) -> None:
    engine, _ = served
    talk, answer = next((t, a) for t, a in talked(engine, 60) if a.usage.cut_messages)
    room = LEAST_ROOM * (engine.program.context or 0)
    long = (*talk, Message("assistant", answer.text), user("And? " * int(room * 20)))
    with pytest.raises(Rejection, match="truncation") as refused:
        ask(engine, *long)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(Rejection, match="reduce the length of the system or last message") as refused:
        ask(engine, *long, truncate=True)
    assert refused.value.code == "context_length_exceeded", "the last message alone is too long"
    assert ask(engine, *talk, sampling=SAMPLING, max_tokens=4, truncate=True).usage.stored


def test_where_nothing_bounds_it(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with program_of(artifacts, "mamba-f32") as loaded, engine_of(*loaded, tmp_path / "data") as (engine, _):
        usage = ask(engine, SYSTEM, user("Hello?"), truncate=True).usage
    assert (usage.context_left, usage.cut_messages) == (None, 0)
