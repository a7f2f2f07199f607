"""Conversations with tools: what a turn adds is all that is read, with the same tools; with others it is all new."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import TinyArtifacts
from daemon import soon
from engine.test_engine import LONG_SYSTEM, SAMPLING, ask, program_of, user
from engine.test_growing import answer_of
from engine.test_prompt import read_whole
from engine.test_rerender import done, endless, engine_of, with_template
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import whole as whole_of

from ssmd.engine.engine import Engine
from ssmd.engine.prompt.planner import Prompt
from ssmd.engine.request import Request
from ssmd.engine.terms import Rejection
from ssmd.model.artifact import Artifact, SpecialTokens
from ssmd.runtime.protocol import Program
from ssmd.sessions.store import Store
from ssmd.sessions.turn import NewTurn
from ssmd.text.messages import Message, ToolCall
from ssmd.text.telling import MessageAdapter
from ssmd.text.template import NOTHING_MORE, ChatTemplate, RenderedText, TemplateError, TemplateInput

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
NOW = datetime(2026, 11, 21, 9, 5, tzinfo=UTC)
TOOLED = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{{ 'Think.\n' if enable_thinking }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_TOOLS = tiny.TEMPLATE
SOURCES = {"tooled": TOOLED, "in words": NO_TOOLS, "qwen3": (TEMPLATES / "qwen3.jinja").read_text()}


def tool(name: str, about: str = "Says what the weather is, in so many words. ") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


WEATHER, CLOCK = TemplateInput((tool("weather"),)), TemplateInput((tool("clock", "Tells the time. "),))
GIVEN = (NOTHING_MORE, WEATHER, CLOCK, TemplateInput((), {"enable_thinking": True}))
TALK = (
    LONG_SYSTEM,
    user("How is it in Bonn?"),
    Message("assistant", "", tool_calls=(ToolCall("own_1", "weather", '{"city":"Bonn"}'),)),
    Message("tool", "It rains.", tool_call_id="own_1"),
)


@pytest.fixture(scope="module")
def loaded(artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, "mamba-f32") as loaded:
        yield loaded


@contextmanager
def engine_with(source: str, loaded: tuple[Artifact, Program], folder: Path) -> Iterator[tuple[Engine, Store]]:
    artifact = loaded[0] if source == NO_TOOLS else with_template(loaded[0], folder / "artifact", source)
    with engine_of(artifact, loaded[1], folder / "data") as served:
        yield served


def plan(engine: Engine, *talk: Message, given: TemplateInput = WEATHER) -> Prompt:
    return engine._planner.plan(Request(talk, given=given))


def scratch(
    engine: Engine, store: Store, prompt: Prompt, talk: tuple[Message, ...], given: TemplateInput
) -> tuple[list[int], str]:
    """All ids and all text of a prompt, of the whole conversation rendered."""
    planner, tokenizer = engine._planner, engine._planner._tokenizer
    assert prompt.info is not None
    text = planner._renderer.render(talk, prompt.info.clock, given).text
    for turn in reversed([] if prompt.parent is None else store.path(prompt.parent)):
        ids, before = whole_of(store, turn.id)
        if ids and text.startswith(before) and tokenizer.ends_at_control(text, len(before)):
            return ids + tokenizer.encode(text[len(before) :]), text
    return tokenizer.encode(text), text


@pytest.mark.parametrize("name", SOURCES)
def test_a_turn_goes_on_with_the_same_tools(name: str, loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    with engine_with(SOURCES[name], loaded, tmp_path) as (engine, store):
        answer = answer_of(engine, TALK, given=WEATHER, sampling=endless(loaded))
        talk = (*TALK, Message("assistant", answer.text), user("And in Köln?"))
        for asked in GIVEN:
            prompt = plan(engine, *talk, given=asked)
            assert prompt.parent == store.sessions()[0].head, "it is the same conversation"
            assert read_whole(store, prompt) == scratch(engine, store, prompt, talk, asked)
        again = answer_of(engine, talk, given=WEATHER, sampling=endless(loaded))
        assert again.usage.session == answer.usage.session
        assert again.usage.cached_tokens >= answer.usage.prompt_tokens + 10
        assert again.fed < 40
        third = plan(engine, *talk, Message("assistant", again.text), user("Why?"))
        assert (third.settled is not None) == (name != "qwen3"), "and only what is new is rendered"
        other = answer_of(engine, talk, given=CLOCK, sampling=endless(loaded))
        assert other.usage.session == answer.usage.session
        assert other.usage.cached_tokens < answer.usage.prompt_tokens / 2, "what stands behind other tools is new"


def test_a_text_is_not_known_to_stay_with_other_tools(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    with engine_with(TOOLED, loaded, tmp_path) as (engine, store):
        answer = answer_of(engine, TALK, given=WEATHER, sampling=endless(loaded))
        (turn,) = store.turns(str(answer.usage.session))
        after = engine._planner._renderer.after
        assert turn.settled is not None
        assert after(turn, TALK[0], [user("x")], NOW, WEATHER) is not None
        for asked in (NOTHING_MORE, CLOCK, TemplateInput(WEATHER.tools, {"enable_thinking": True})):
            assert after(turn, TALK[0], [user("x")], NOW, asked) is None
        unasked = TemplateInput(WEATHER.tools, {"no_name_of_the_template": 1})
        assert after(turn, TALK[0], [user("x")], NOW, unasked) is not None


@pytest.mark.parametrize("name", ["tooled", "in words"])
def test_the_state_of_a_system_prompt_is_that_of_its_tools(
    name: str, loaded: tuple[Artifact, Program], tmp_path: Path
) -> None:
    with engine_with(SOURCES[name], loaded, tmp_path) as (engine, _):
        sizes = {}
        for asked in (WEATHER, CLOCK):
            first = answer_of(engine, TALK[:2], given=asked)
            assert first.usage.cached_tokens < 60 if name == "tooled" else first.usage.cached_tokens < 200
            second = answer_of(engine, (LONG_SYSTEM, user("Something else")), given=asked)
            assert second.usage.session != first.usage.session
            sizes[asked.text] = second.usage.cached_tokens
            assert second.fed < 30
        assert len(set(sizes.values())) == 2
        alone = answer_of(engine, (user("No system prompt"),), given=WEATHER)
        again = answer_of(engine, (user("None either"),), given=WEATHER)
        assert again.usage.cached_tokens >= 64
        assert alone.usage.session != again.usage.session


@pytest.mark.parametrize("name", ["tooled", "in words"])
def test_a_cut_answer_is_read_again_with_its_tools(name: str, loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    with engine_with(SOURCES[name], loaded, tmp_path) as (engine, _):
        cut = answer_of(engine, TALK, given=WEATHER, sampling=endless(loaded), stop=("e", "a"), max_tokens=30)
        soon(lambda: done(engine))
        next_ = ask(engine, *TALK, Message("assistant", cut.text), user("So?"), given=WEATHER, sampling=SAMPLING)
        assert next_.usage.session == cut.usage.session
        assert next_.usage.cached_tokens > cut.usage.prompt_tokens, "the answer, too"


def put(engine: Engine, store: Store, talk: tuple[Message, ...], answer: Message, given: TemplateInput) -> str:
    """A turn that is answered with calls, as its model's format gives them."""
    prompt = plan(engine, *talk, given=given)
    assert prompt.info is not None
    new = NewTurn(
        id=f"turn_{len(talk)}",
        session=prompt.info.id,
        parent=prompt.parent,
        messages=prompt.new,
        answer=answer,
        ids=prompt.ids,
        prompt_tokens=len(prompt.ids),
        text=prompt.text,
        finish="tool_calls",
        complete=True,
        created_at=datetime.now(UTC),
        settled=prompt.settled,
    )
    store.commit([new], session=prompt.info)
    return new.id


@pytest.mark.parametrize("name", SOURCES)
def test_results_continue_the_turn_that_made_the_calls(
    name: str, loaded: tuple[Artifact, Program], tmp_path: Path
) -> None:
    """Under whatever ids the client has for them; what is stored and shown has those of the turn."""
    made = Message(
        "assistant", "", tool_calls=(ToolCall("a", "weather", '{"city": "Bonn"}'), ToolCall("b", "clock", ""))
    )
    with engine_with(SOURCES[name], loaded, tmp_path) as (engine, store):
        turn = put(engine, store, TALK[:2], made, WEATHER)
        echoed = tuple(replace(c, id=f"client_{c.id}") for c in made.tool_calls)
        results = [Message("tool", f"r{i}", tool_call_id=c.id) for i, c in enumerate(reversed(echoed))]
        talk = (*TALK[:2], replace(made, tool_calls=echoed), *results)
        prompt = plan(engine, *talk)
        assert (prompt.parent, [m.tool_call_id for m in prompt.new]) == (turn, ["b", "a"])
        stored = (*TALK[:2], made, *prompt.new)
        assert read_whole(store, prompt) == scratch(engine, store, prompt, stored, WEATHER)
        answer = answer_of(engine, talk, given=WEATHER)
        after = plan(engine, *talk, Message("assistant", answer.text), user("And now?"))
        assert after.parent == store.sessions()[0].head != turn
        assert [len(store.sessions()), len(store.turns(str(answer.usage.session)))] == [1, 2]


def test_what_comes_after_calls_is_their_results(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    """The rendered end is a prefix of each request that goes on; a user message would drop the reasoning."""
    made = Message("assistant", "<think>\nHm.\n</think>\n\nI look.", tool_calls=(ToolCall("a", "weather", "{}"),))
    with engine_with(SOURCES["qwen3"], loaded, tmp_path) as (engine, _):
        text = engine._planner._renderer.end((*TALK[:2], made), NOW, WEATHER).text.own
        said = (*TALK[:2], made, Message("tool", "x", tool_call_id="a"))
        whole = engine._planner._renderer.render(said, NOW, WEATHER).text
        assert '"name": "weather"' in text[text.rindex("Hm.") :]
        assert whole.startswith(text)


def test_tools_fit_an_alternating_template_without_system_prompt(
    loaded: tuple[Artifact, Program], tmp_path: Path
) -> None:
    made = Message("assistant", "", tool_calls=(ToolCall("a", "weather", "{}"), ToolCall("b", "weather", "{}")))
    talk = (user("Hi."), made, Message("tool", "r1", tool_call_id="a"), Message("tool", "r2", tool_call_id="b"))
    with engine_with((TEMPLATES / "mistral.jinja").read_text(), loaded, tmp_path) as (engine, _):
        answer = answer_of(engine, talk, given=WEATHER, sampling=endless(loaded))
        more = (*talk, Message("assistant", answer.text), user("So?"))
        text = engine._planner._renderer.render(more, NOW, WEATHER).text
        assert text.startswith("<|im_start|>[INST] # Tools")
        results = "<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"
        assert f"[INST] {results} [/INST]" in text
        again = answer_of(engine, more, given=WEATHER)
        assert again.usage.cached_tokens >= answer.usage.prompt_tokens
        with pytest.raises(Rejection, match="must alternate"):
            plan(engine, user("a"), user("b"))


@pytest.mark.parametrize("name", ["mistral", "mistral-tools"])
def test_system_messages_fit_an_alternating_template(
    name: str, loaded: tuple[Artifact, Program], tmp_path: Path
) -> None:
    """Claude Code sends some within a conversation."""
    within = Message("system", "Skills: none.")
    first = (user("Hi."), within)
    last = (user("Hi."), Message("assistant", "Ho."), within)
    with engine_with((TEMPLATES / f"{name}.jinja").read_text(), loaded, tmp_path) as (engine, _):
        render = engine._planner._renderer.render
        assert re.search(r"\[INST\] ?Hi\.\nSkills: none\. ?\[/INST\]", render(first, NOW).text)
        for talk in (last, (*last, user("So?"))):
            text = render(talk, NOW).text
            assert text.index("Hi.") < text.index("Ho.") < text.rindex("[INST]") < text.index("Skills: none.")


# The text that only grows

words = st.sampled_from(["x", "", "<|im_end|>", " a ", "</think>", "<call>"])
call = st.builds(
    ToolCall, st.sampled_from(["1", "2"]), st.just("f"), st.sampled_from(["{}", "", '{"a": "<|im_end|>"}', "x"])
)
message = st.one_of(
    st.builds(Message, st.sampled_from(["user", "assistant", "system"]), words),
    st.builds(Message, st.just("assistant"), words, st.none(), st.lists(call, max_size=2).map(tuple)),
    st.builds(Message, st.just("tool"), words, st.none(), st.just(()), st.sampled_from(["1", "2"])),
)
talks = st.lists(message, min_size=2, max_size=5)
compiled = {name: ChatTemplate(source, SpecialTokens(eos="<|im_end|>")) for name, source in SOURCES.items()}
compiled |= {
    name: ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SpecialTokens(eos="</s>"))
    for name in ("granite4", "hermes", "lfm2", "llama31", "mistral-tools")
}


@pytest.mark.parametrize("name", compiled)
@settings(max_examples=150, deadline=None)
@given(
    first=talks, more=st.lists(st.lists(message, min_size=1, max_size=3), min_size=1, max_size=3), n=st.integers(0, 3)
)
def test_the_text_grows_as_it_is_rendered_whole(
    name: str, first: list[Message], more: list[list[Message]], n: int
) -> None:
    template, given = compiled[name], GIVEN[n]
    telling = MessageAdapter(template.source, lambda text: text)
    told = telling.told(given)

    def whole(said: list[Message]) -> str:
        return template.render(telling.conversation(said, told)[0], now=NOW, given=told.given)

    said = first
    shown, added = telling.conversation(said, told)
    try:
        rendered: RenderedText | None = template.render_settled(shown, now=NOW, given=told.given)
    except TemplateError:
        return
    kept = ""
    for new in more:
        if rendered is None or rendered.settled is None or (at := rendered.settled.messages - added) < 1:
            return
        kept += rendered.text[: rendered.settled.characters]
        said = [*said[:at], *new]
        begins, _ = telling.first(said[0], told)
        tail = [telling.message(m) for m in new]
        rendered = template.render_after(begins, at + added, tail, now=NOW, given=told.given)
        if rendered is not None:
            assert kept + rendered.text == whole(said)


def test_the_texts_above_do_grow() -> None:
    """Otherwise the test above would compare nothing."""
    for name, asked in itertools.product(("tooled", "in words"), GIVEN):
        telling = MessageAdapter(compiled[name].source, lambda text: text)
        told = telling.told(asked)
        shown, added = telling.conversation([*TALK[1:], Message("assistant", "y"), user("x")], told)
        rendered = compiled[name].render_settled(shown, now=NOW, given=told.given)
        assert rendered.settled is not None
        assert rendered.settled.messages == 4 + added, (name, asked)
