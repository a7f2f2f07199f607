"""Echoes as clients really send them, templates that rewrite history: the right turn, and never a wrong state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon, soon
from engine.test_engine import SAMPLING, Answer, Asked, answered, ask, program_of, user
from engine.test_prompt import read_whole
from engine.test_rerender import TRIMMING, done, endless, engine_of, with_template
from keeping import whole as whole_of
from sqlalchemy import update

from ssmd.engine.sampling.sampler import Sampler
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program
from ssmd.sessions.rows import database
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.store import Store
from ssmd.text.messages import Message
from ssmd.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
QUESTION, NEXT = user("Tell me a story about a river and a bridge."), user("And then?")


@pytest.fixture(scope="module", params=["llama-f32", "granite-f32"])
def loaded(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, request.param) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], tmp_path_factory.mktemp("data") / "data") as one:
        yield one


def fed_again(tiny: Daemon, echo: dict[str, Any], first: Any) -> int:
    """Tokens that were fed when an answer was echoed so and a question added; the session must be the same."""
    soon(lambda: done(tiny.engine))
    messages = [
        {"role": "user", "content": "Tell me"},
        {"role": "assistant", **echo},
        {"role": "user", "content": "on"},
    ]
    usage = tiny.chat(messages=messages, max_tokens=2).json["usage"]
    assert usage["ssmd"]["session"] == first.json["usage"]["ssmd"]["session"], "another session"
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def test_ids_without_text_are_no_part_of_an_answer(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The model's logits are padded, as many are: beyond 384 no id has a text."""
    with daemon(artifacts["mamba2-groups-f32"], tmp_path) as one:
        first = one.chat("Tell me", temperature=0, max_tokens=12, logit_bias={"390": 100, "396": 100})
        choice = first.json["choices"][0]
        assert choice["message"]["content"]
        assert choice["finish_reason"] == "length"
        assert fed_again(one, {"content": choice["message"]["content"]}, first) < 20


@pytest.mark.parametrize("form", ["string", "spaces", "parts", "more parts", "as the SDK dumps it"])
def test_forms_of_an_echo(tiny: Daemon, form: str) -> None:
    first = tiny.chat("Tell me", seed=4, temperature=1)
    said = first.json["choices"][0]["message"]["content"]
    echo = {
        "string": {"content": said},
        "spaces": {"content": f"\n {said} "},
        "parts": {"content": [{"type": "text", "text": said}]},
        "more parts": {"content": [{"type": "text", "text": said[:3]}, {"type": "text", "text": said[3:]}]},
        "as the SDK dumps it": {
            "content": said,
            "refusal": None,
            "annotations": [],
            "tool_calls": None,
            "function_call": None,
            "audio": None,
            "reasoning_content": None,
        },
    }[form]
    assert fed_again(tiny, echo, first) < 20


@pytest.mark.parametrize("content", [None, "", " "])
def test_an_empty_answer(tiny: Daemon, content: str | None) -> None:
    first = tiny.chat("Tell me", logit_bias={"2": 100}, max_tokens=5)
    assert first.json["choices"][0]["message"]["content"] == ""
    assert fed_again(tiny, {"content": content}, first) < 20


def test_reasoning_apart_from_the_content(tiny: Daemon) -> None:
    begun = {"role": "assistant", "content": "<think>\nA story.\n</think>\n\nIt"}
    first = tiny.chat(messages=[{"role": "user", "content": "Tell me"}, begun], seed=4, temperature=1)
    said = "It" + first.json["choices"][0]["message"]["content"]
    fed_again(tiny, {"content": said, "reasoning_content": "A story."}, first)
    fed_again(tiny, {"content": said}, first)
    fed_again(tiny, {"content": f"<think>A story.</think>{said}", "reasoning_content": " A story.\n"}, first)
    with pytest.raises(AssertionError, match="session"):
        fed_again(tiny, {"content": said, "reasoning_content": "Another story."}, first)


@pytest.mark.parametrize(
    "echo",
    [
        {"content": "It", "reasoning_content": 7},
        {"content": "It", "reasoning_content": "a</think>b"},
        {"content": "<think>a</think>It", "reasoning_content": "b"},
    ],
)
def test_reasoning_that_cannot_be(tiny: Daemon, echo: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", **echo}, {"role": "user", "content": "b"}]
    refused = tiny.chat(messages=messages)
    assert (refused.status, refused.error["param"]) == (400, "messages[1].reasoning_content")


def thought(reasoning: str, said: str) -> Message:
    return answered(f"<think>\n{reasoning}\n</think>\n\n{said}")


@pytest.mark.parametrize(
    ("stored", "echo", "same"),
    [
        (thought("a", "x"), thought("a", "x"), True),
        (thought("a", "x"), answered("<think>a</think>x "), True),
        (thought("a", "x"), answered("x"), True),
        (thought("a", "x"), answered("a\n</think>\nx"), True),  # the template wrote <think> into the prompt
        (answered("a</think>x"), thought("a", "x"), True),
        (thought("a", "x"), thought("b", "x"), False),
        (thought("a", "x"), answered("<think></think>x"), False),
        (answered("x"), thought("a", "x"), False),
        (thought("a", "x"), answered("y"), False),
        (answered("<think>\ncut o"), answered("<think>\ncut o"), True),
        (answered("<think>\ncut o"), answered(""), False),
        (user("<think>a</think>x"), user("x"), False),
        (user("x "), user("x"), False),
    ],
)
def test_same_as(stored: Message, echo: Message, same: bool) -> None:
    assert stored.same_as(echo) is same


def test_answers_that_differ_in_reasoning_only(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    artifact = with_template(loaded[0], tmp_path / "artifact", (TEMPLATES / "qwen3.jinja").read_text())
    with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
        fields = {"max_tokens": 8, "sampling": replace(SAMPLING, logit_bias={2: 100.0})}
        begun = [thought(r, "Yes.") for r in ("one", "two")]
        first = ask(engine, QUESTION, begun[0], **fields)
        session = str(first.usage.session)
        ask(engine, QUESTION, begun[1], session=session, **fields)
        one, two = store.turns(session)
        assert [t.answer for t in (one, two)] == begun
        for sent, parent in ((begun[0], one), (begun[1], two), (answered("Yes."), two)):
            ask(engine, QUESTION, sent, NEXT, max_tokens=2)
            assert store.turns(session)[-1].parent == parent.id
            set_head(store, session, two.id)
        changed = ask(engine, QUESTION, thought("three", "Yes."), NEXT, max_tokens=2)
        assert changed.usage.session != session


def set_head(store: Store, session: str, turn: str) -> None:
    with database.writing(store._engine, store.file) as connection:
        connection.execute(update(session_table).where(session_table.c.id == session).values(head=turn))


def test_a_template_that_keeps_reasoning_gets_the_client_text(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    """It knows nothing of reasoning: what a client left out is not put back."""
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        first = ask(engine, QUESTION, thought("Hidden.", "It"), max_tokens=6, sampling=endless(loaded))
        session = str(first.usage.session)
        ask(engine, QUESTION, answered("It" + first.text), NEXT, max_tokens=2)
        parent, child = store.turns(session)
        assert child.parent == parent.id
        assert "Hidden." in whole_of(store, parent.id)[1]
        assert "Hidden." not in whole_of(store, child.id)[1]
        whole = ask(engine, QUESTION, parent.answer, NEXT, max_tokens=2)
        assert "Hidden." in whole_of(store, store.turns(session)[-1].id)[1]
        assert whole.fed < 24


def check(asked: Asked, loaded: tuple[Artifact, Program], tokenizer: Tokenizer, store: Store) -> Answer:
    """The answer, of which is true: the ids fed stand for the prompt's text, and the state was that of these ids."""
    ids, text = read_whole(store, asked.generation.asked.prompt)
    answer = asked.answer()
    meant = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
    assert meant == tokenizer.unescape(text)
    if not answer.logprobs:
        return answer
    program = loaded[1]
    handle = program.new_state()
    for n in buckets.pieces(0, len(ids), program.buckets):
        logits = program.prefill(handle, ids[:n])
        del ids[:n]
    program.release(handle)
    expected = Sampler(asked.generation.asked.request.sampling, index=0).sample(logits)
    top = answer.logprobs[0].top
    # Other calls, so not bit for bit; a state that misses one token differs by 0.1 to 10.
    assert [p for _, _, p in top] == pytest.approx([p for _, p in expected.top], abs=0.02)
    return answer


@pytest.fixture
def tokenizer(loaded: tuple[Artifact, Program]) -> Tokenizer:
    return Tokenizer.open(loaded[0].file("tokenizer.json"), stop_tokens=loaded[0].manifest.stop_tokens)


def test_a_changed_system_prompt(loaded: tuple[Artifact, Program], tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A branch of its own; what both prompts begin with may be shared, the rest is read."""
    long = "You are the keeper of a lighthouse. " * 8
    old, new = (Message("system", long + end) for end in ("Be brief.", "Be rude."))
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        first = ask(engine, old, QUESTION, max_tokens=6)
        soon(lambda: done(engine))
        session = str(first.usage.session)
        history = (QUESTION, answered(first.text), NEXT)
        other = check(Asked(engine, new, *history), loaded, tokenizer, store)
        assert other.usage.session != session
        named = check(Asked(engine, new, *history, session=session), loaded, tokenizer, store)
        assert named.usage.session == session
        assert [t.parent for t in store.turns(session)] == [None, None]
        assert other.usage.cached_tokens < first.usage.prompt_tokens
        back = check(Asked(engine, old, *history), loaded, tokenizer, store)
        assert back.usage.session == session
        assert back.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_two_clients_with_the_same_history(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        first, second = (ask(engine, QUESTION, max_tokens=8) for _ in range(2))
        assert first.text == second.text
        assert first.usage.session != second.usage.session
        history = (QUESTION, answered(first.text))
        a = ask(engine, *history, user("I am a."), session=first.usage.session, max_tokens=6)
        b = ask(engine, *history, user("I am b."), session=second.usage.session, max_tokens=6)
        assert [a.usage.session, b.usage.session] == [first.usage.session, second.usage.session]
        for who, answer in (("a", a), ("b", b)):
            more = ask(engine, *history, user(f"I am {who}."), answered(answer.text), NEXT)  # without naming it
            assert more.usage.session == answer.usage.session
            assert len(store.turns(str(answer.usage.session))) == 3


def test_the_clock_of_a_session_stands_still(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    artifact = with_template(loaded[0], tmp_path / "artifact", (TEMPLATES / "dated.jinja").read_text())
    with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
        first = ask(engine, QUESTION, max_tokens=6)
        session = str(first.usage.session)
        today = f"Today is {datetime.now(UTC).astimezone():%B %d, %Y}."
        assert today in whole_of(store, store.turns(session)[0].id)[1]
    with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
        old = datetime(2020, 2, 29, 12, tzinfo=UTC).isoformat()
        with database.writing(store._engine, store.file) as connection:
            connection.execute(update(session_table).values(clock=old))
        moved = ask(engine, QUESTION, answered(first.text), NEXT, max_tokens=6)  # a session of another day
        assert "Today is February 29, 2020." in whole_of(store, store.turns(session)[-1].id)[1]
        assert moved.usage.cached_tokens < 64
        history = (QUESTION, answered(first.text), NEXT, answered(moved.text), user("Go on."))
        again = ask(engine, *history, max_tokens=2)
        assert again.fed < 30
        fork = store.fork(session)
        assert fork.info.clock.isoformat() == old
        forked = ask(engine, *history[:3], answered(moved.text), user("Elsewhere."), session=fork.id, max_tokens=2)
        assert "Today is February 29, 2020." in whole_of(store, store.turns(fork.id)[-1].id)[1]
        assert forked.fed < 40
        fresh = ask(engine, QUESTION, max_tokens=2)
        assert today in whole_of(store, store.turns(str(fresh.usage.session))[0].id)[1]


TEMPLATE_NAMES = ["trimming", "qwen3", "dated", "forgetful", "smollm2"]


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_no_template_leads_to_a_wrong_state(
    loaded: tuple[Artifact, Program], tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    """Conversations that are continued, edited, regenerated, cut and echoed in every form."""
    source = TRIMMING if name == "trimming" else (TEMPLATES / f"{name}.jinja").read_text()
    artifact = with_template(loaded[0], tmp_path / "artifact", source)
    chance = random.Random(name)
    cached = 0
    with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
        history: list[Message] = []
        for n in range(20):
            history = changed(history, chance, n)
            stop = chance.choice([(), ("e",), (" ",), ("a", "o")])
            asked = Asked(
                engine, *history, sampling=endless(loaded, seed=n), stop=stop, max_tokens=chance.choice([1, 3, 12])
            )
            prompt = asked.generation.asked.prompt
            _, text = read_whole(store, prompt)
            answer = check(asked, loaded, tokenizer, store)
            assert prompt.info is not None
            sent = engine._planner._renderer.render(history, prompt.info.clock).text
            assert "".join(text.split()) == "".join(sent.split()), "what the client sent, but for spaces"
            cached += answer.usage.cached_tokens
            whole = (history.pop().content if history[-1].role == "assistant" else "") + answer.text
            history.append(answered(chance.choice([whole, whole, whole.strip(), answered(whole).said])))
            if chance.random() < 0.6:
                soon(lambda: done(engine))
        assert max(s.turns for s in store.sessions()) > 2
    assert cached > 200


def changed(history: list[Message], chance: random.Random, n: int) -> list[Message]:
    """Return the client's next messages: the conversation goes on, is edited, regenerated or begun anew."""
    move = chance.choice(["on", "on", "on", "edit", "again", "think", "new"])
    if not history or len(history) > 8 or move == "new":
        history = [Message("system", "Be  brief. ")] if chance.random() < 0.3 else []
    if move == "edit" and len(history) > 2:
        history = history[: chance.choice([i for i, m in enumerate(history) if m.role == "user"])]
    if move == "again" and history and history[-1].role == "assistant":
        history = history[:-1]
    if not history or history[-1].role != "user":
        history = [*history, user(chance.choice(["Go on.", f"Question {n}? ", "  Why?\n", "x" * 30]))]
    return [*history, answered(f"<think>\nNumber {n}.\n</think>\n\nWell,")] if move == "think" else history
