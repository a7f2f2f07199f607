"""Tools in words stand before the client's system prompt; a session that has them behind it goes on as it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from engine.test_engine import LONG_SYSTEM, program_of, user
from engine.test_growing import answer_of
from engine.test_prompt import read_whole
from engine.test_rerender import endless, engine_of, with_template
from engine.test_tools import NO_TOOLS, WEATHER, engine_with, plan
from keeping import whole as whole_of

from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.store import Store
from ssmd.text.messages import Message
from ssmd.text.telling import AdaptedInput, MessageAdapter

UNPROVEN = "{{ '' if messages | length > 999 }}" + NO_TOOLS  # nothing is known of what it keeps
SOURCES = {"proven": NO_TOOLS, "unproven": UNPROVEN}
FIRST = MessageAdapter.first
TALK = (LONG_SYSTEM, user("How is it in Bonn?"))


@pytest.fixture(scope="module")
def loaded(artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, "mamba-f32") as loaded:
        yield loaded


def tools_last(self: MessageAdapter, message: Message, told: AdaptedInput, **_: Any) -> tuple[Message, int]:
    """As versions before had it."""
    return FIRST(self, message, told, tools_last=True)


def begun(store: Store, session: str) -> str:
    """Return the beginning of the text of a session's first turn."""
    return store.turns(session)[0].text.own


def test_tools_before_a_changed_system_prompt_are_shared(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    """All ids of the tools, and those of the system prompt up to its change."""
    with engine_with(NO_TOOLS, loaded, tmp_path) as (engine, store):
        rules = LONG_SYSTEM.content
        prompts = [
            plan(engine, Message("system", f"{rules}\nM {name}"), *TALK[1:]) for name in ("calc.py", "README.md")
        ]
        texts = [prompt.text.own for prompt in prompts]
        ids = [read_whole(store, prompt)[0] for prompt in prompts]
        tools = len(engine._planner._renderer.encode(texts[0][: texts[0].index(rules)]))
        unchanged = len(engine._planner._renderer.encode(texts[0][: texts[0].index("calc.py")]))
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ids, strict=False)))
    assert tools > 100
    assert common >= unchanged - 2  # a token may hold characters of both sides


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("stop", [(), ("e", "a")], ids=["whole", "cut"])
def test_session_with_tools_behind_resumes_exactly(
    name: str, stop: tuple[str, ...], loaded: tuple[Artifact, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a restart, turn after turn; an answer that was cut is read again in the text of its session, when idle."""
    artifact = with_template(loaded[0], tmp_path / "artifact", SOURCES[name])
    said: dict[str, Any] = {"given": WEATHER, "sampling": endless(loaded), "stop": stop, "max_tokens": 30}
    with monkeypatch.context() as before, engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
        before.setattr(MessageAdapter, "first", tools_last)
        answer = answer_of(engine, TALK, **said)
        session = str(answer.usage.session)
        assert begun(store, session).index(LONG_SYSTEM.content) < begun(store, session).index("# Tools")
    talk: tuple[Message, ...] = TALK
    for question in ("And in Köln?", "Why?"):
        with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
            talk = (*talk, Message("assistant", answer.text), user(question))
            earlier, answer = answer, answer_of(engine, talk, **said)
            assert answer.usage.session == session
            assert answer.usage.resume == "exact"
            assert answer.usage.cached_tokens >= earlier.usage.prompt_tokens - 1
            assert answer.fed < 60
            text = whole_of(store, store.turns(session)[-1].id)[1]
            assert text.startswith(begun(store, session))
            assert text.count("# Tools") == 1
            other = answer_of(engine, (LONG_SYSTEM, user(f"Else: {question}")), **said)
            text = begun(store, str(other.usage.session))
            assert text.index("# Tools") < text.index(LONG_SYSTEM.content), "a new session has the new order"
