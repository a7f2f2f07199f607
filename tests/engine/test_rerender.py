"""Rerender: after an answer that was cut, the next turn reads no word of it again, killed or not."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from engine.test_engine import SAMPLING, Answer, Asked, answered, ask, program_of, user
from engines import OwnEngine
from forked import DaemonProcess
from keeping import open_store
from keeping import whole as whole_of
from sqlalchemy import delete, select

from ssmd.engine.engine import Engine
from ssmd.engine.persist import persistence
from ssmd.engine.persist.persistence import Persistence
from ssmd.engine.request import Request
from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.sampling.sampler import Sampler
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program
from ssmd.sessions.line import Passage
from ssmd.sessions.rows.schema import checkpoint, turn_checkpoint
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.text.messages import Message

MODELS = ("llama-f32", "granite-int8")
TEMPLATE_TOKENS = 12
THINKING = Path(__file__).parents[1] / "data" / "templates" / "qwen3.jinja"
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def engine_of(artifact: Artifact, program: Program, data: Path) -> Iterator[tuple[Engine, Store]]:
    store = open_store(data)
    engine = OwnEngine(artifact, program, store)
    engine.start()
    try:
        yield engine, store
    finally:
        engine.shutdown(0)
        store.close()


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, request.param) as loaded:
        yield loaded


def with_template(artifact: Artifact, folder: Path, source: str) -> Artifact:
    """The same artifact with another chat template."""
    shutil.copytree(artifact.path, folder)
    (folder / "chat_template.jinja").write_text(source)
    return replace(artifact, path=folder)


QUESTION = user("Tell me a story about a river, a bridge and the people who cross it.")
NEXT = user("And then?")


def endless(loaded: tuple[Artifact, Program], seed: int = 3) -> SamplingParams:
    return replace(SAMPLING, seed=seed, logit_bias={t: -100.0 for t in loaded[0].manifest.stop_tokens})


def cut_answer(engine: Engine, sampling: SamplingParams) -> Answer:
    """An answer that a stop string cut in its middle."""
    whole = ask(engine, QUESTION, max_tokens=40, sampling=sampling, store=False)
    stop = whole.text[len(whole.text) // 2 :][:2]
    cut = ask(engine, QUESTION, max_tokens=40, sampling=sampling, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)]
    return cut


def rerendered(store: Store, session: str) -> bool:
    turn = store.turns(session)[-1]
    return turn.id in store.resumable(session)


def done(engine: Engine) -> bool:
    assert isinstance(engine._persistence, Persistence)
    rerenderer = engine._persistence._rerenderer
    return rerenderer._turn is None and not rerenderer.ready()


def reference(program: Program, store: Store, sampling: SamplingParams, session: str) -> tuple[object, ...]:
    """The first token after the second prompt, by a program that makes the calls that each checkpoint records."""
    first, second = store.turns(session)[-2:]
    prompt, settled = first.prompt_tokens - 1, len(first.ids)
    whole = whole_of(store, second.id)[0][: second.prompt_tokens]
    assert whole[:settled] == whole_of(store, first.id)[0]
    handle = program.new_state()
    position = 0
    for end in (prompt, settled, len(whole) - 1):
        for n in buckets.pieces(position, end, program.buckets):
            program.prefill(handle, whole[position : position + n])
            position += n
    (logits,) = program.decode([handle], [whole[-1]])
    program.release(handle)
    sample = Sampler(sampling, index=0).sample(logits)
    return sample.logprob, tuple(p for _, p in sample.top)


def test_what_a_stop_string_cut_is_read_while_idle(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    sampling = endless(loaded)
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        cut = cut_answer(engine, sampling)
        session = str(cut.usage.session)
        soon(lambda: rerendered(store, session))
        turn = store.turns(session)[-1]
        assert cut.text in turn.text.own
        assert turn.answer.content == cut.text
        assert len(turn.ids) > cut.usage.prompt_tokens
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        after = ask(engine, QUESTION, answered(cut.text), NEXT, sampling=sampling)
        assert after.usage.session == session
        assert after.usage.resume == "exact"
        assert after.usage.cached_tokens == len(turn.ids)
        assert after.fed <= len(NEXT.content) + TEMPLATE_TOKENS
        token = after.logprobs[0]
        assert (token.logprob, tuple(p for _, _, p in token.top)) == reference(loaded[1], store, sampling, session)
        exact = ask(engine, QUESTION, answered(cut.text), NEXT, sampling=sampling, store=False)
        assert (exact.text, exact.logprobs) == (after.text, after.logprobs)


def test_trimmed_spaces(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    artifact = with_template(loaded[0], tmp_path / "artifact", TRIMMING)
    spaced = next(i for i in range(loaded[1].vocabulary) if _text(artifact, i) == " ")
    sampling = replace(endless(loaded), logit_bias={spaced: 100.0})
    with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
        first = ask(engine, QUESTION, max_tokens=6, sampling=sampling)
        assert first.text != first.text.strip()
        session = str(first.usage.session)
        soon(lambda: store.turns(session)[-1].text.own.endswith("<|im_end|>\n"))
        turn = store.turns(session)[-1]
        assert turn.answer.content == first.text
        after = ask(engine, QUESTION, answered(first.text.strip()), NEXT)
        assert after.usage.session == session
        assert after.usage.cached_tokens == len(turn.ids)


def _text(artifact: Artifact, token: int) -> str:
    from ssmd.text.tokenizer import Tokenizer

    return Tokenizer.open(artifact.file("tokenizer.json")).token_text(token)


def thinking(engine: Engine, loaded: tuple[Artifact, Program]) -> tuple[Answer, str]:
    """A conversation whose stored answer begins with reasoning: it is begun by the client and continued."""
    begun = Message("assistant", "<think>\nThey want a story.\n</think>\n\nOnce")
    answer = ask(engine, QUESTION, begun, max_tokens=12, sampling=endless(loaded))
    return answer, "Once" + answer.text


@pytest.mark.parametrize("echo", ["whole", "without"])
def test_reasoning_that_the_template_drops(loaded: tuple[Artifact, Program], tmp_path: Path, echo: str) -> None:
    artifact = with_template(loaded[0], tmp_path / "artifact", THINKING.read_text())
    with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
        first, said = thinking(engine, loaded)
        session = str(first.usage.session)
        soon(lambda: "They want" not in store.turns(session)[-1].text.own)
        turn = store.turns(session)[-1]
        assert turn.answer.content == "<think>\nThey want a story.\n</think>\n\n" + said
        assert turn.prompt_tokens <= len(turn.ids)
        sent = turn.answer if echo == "whole" else answered(said)
        after = ask(engine, QUESTION, sent, NEXT)
        assert after.usage.session == session
        assert after.usage.cached_tokens == len(turn.ids)
        child = store.turns(session)[-1]
        assert child.parent == child.stem == turn.id
        assert "They want" not in whole_of(store, child.id)[1]


def test_an_ordinary_turn_is_left_alone(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        first = ask(engine, QUESTION, max_tokens=6, sampling=endless(loaded))
        session = str(first.usage.session)
        turn = store.turns(session)[-1].id
        before = whole_of(store, turn)
        ask(engine, user("Forget this."), store=False, max_tokens=4, stop=("a", "e", "\n"))
        soon(lambda: done(engine))
        assert len(store.sessions()) == 1
        ask(engine, user("Next."), max_tokens=1)  # written after whatever the rerender gave the writer
        assert whole_of(store, turn) == before


def test_siblings_are_rerendered_each(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        answers = ask(engine, QUESTION, n=3, max_tokens=40, sampling=endless(loaded), stop=("a", "e", "o"))
        session = str(answers.usage.session)
        soon(lambda: store.resumable(session) == {t.id for t in store.turns(session)})
        after = ask(engine, QUESTION, answered(answers.texts[2]), NEXT)
        assert after.fed <= len(NEXT.content) + TEMPLATE_TOKENS


def test_a_turn_that_was_continued_is_not_rewritten(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    """A continuation of the turn is stored as an addition to it."""
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        cut = cut_answer(engine, endless(loaded))
        session = str(cut.usage.session)
        soon(lambda: rerendered(store, session))
        ask(engine, QUESTION, answered(cut.text), NEXT, max_tokens=4)
        parent, child = store.turns(session)
        assert isinstance(engine._persistence, Persistence)
        with store.snapshot() as stored:
            assert not stored.is_leaf(parent.id)
            assert stored.is_leaf(child.id)
        with sqlite3.connect(store.file) as raw:
            before = raw.execute("SELECT * FROM turn ORDER BY seq").fetchall()
        raw.close()
        from ssmd.sessions.checkpoint import NewCheckpoint
        from ssmd.sessions.rows.blobs import encode

        state = loaded[1].new_state()
        loaded[1].prefill(state, [5, 6, 7])
        saved = NewCheckpoint("turn", parent.ids.up_to(3), loaded[1].save(state))
        loaded[1].release(state)
        encoded = encode(saved, scope=engine._planner.scope, producer="p", spec=loaded[1].spec)
        assert store.rewrite(parent.id, parent.ids.up_to(3), Passage("other"), encoded) is None
        assert store.rewrite("turn_of_nobody", parent.ids.up_to(3), Passage("other"), encoded) is None
        with sqlite3.connect(store.file) as raw:
            assert raw.execute("SELECT * FROM turn ORDER BY seq").fetchall() == before
        raw.close()


def test_a_request_goes_first(
    loaded: tuple[Artifact, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the answer is fed: the piece at work ends, then it runs, then the rerender begins anew."""
    program = loaded[1]
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        sampling = endless(loaded)
        whole = ask(engine, QUESTION, max_tokens=120, sampling=sampling)  # from now on the question is not fed
        stop = whole.text[-20:-8]
        fed: list[list[int]] = []
        reached, go_on, prefill = threading.Event(), threading.Event(), program.prefill

        def held(handle: object, tokens: list[int]) -> object:
            fed.append(tokens)
            if len(fed) == 1:
                reached.set()
                assert go_on.wait(30)
            return prefill(handle, tokens)

        monkeypatch.setattr(program, "prefill", held)
        first = ask(engine, QUESTION, max_tokens=200, sampling=sampling, stop=(stop,))
        session = str(first.usage.session)
        assert reached.wait(30)
        quick = Asked(engine, user("Quick!"), max_tokens=2)
        go_on.set()
        ended = quick.answer()
        soon(lambda: rerendered(store, session))
        turn, other = store.turns(session)[-1], store.turns(str(ended.usage.session))[-1]
        read = whole_of(store, turn.id)[0]
        assert read[first.usage.prompt_tokens - 1 :][: len(fed[0])] == fed[0]
        assert fed[1] == whole_of(store, other.id)[0][: len(fed[1])]
        at = next(i for i, tokens in enumerate(fed[1:], 1) if tokens == fed[0])
        again, answer = [t for tokens in fed[at:] for t in tokens], read[first.usage.prompt_tokens - 1 :]
        assert again[: len(answer)] == answer, "begun anew, from the question on"
        assert max(map(len, fed)) <= 64


def test_a_turn_removed_meanwhile(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        for _ in range(3):
            cut = cut_answer(engine, endless(loaded))
            store.delete(str(cut.usage.session))
        assert ask(engine, user("Still there?"), max_tokens=3).usage.stored
        assert len(store.sessions()) == 1


@pytest.mark.parametrize("model", [pytest.param("llama-f32", marks=pytest.mark.full), "granite-int8"])
def test_killed_after_the_rerender(model: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    question = {"role": "user", "content": QUESTION.content}
    fields = {"max_tokens": 40, "temperature": 1, "seed": 7, "logit_bias": {"0": -100, "2": -100}}
    with DaemonProcess(artifacts[model], tmp_path / "data") as one:
        whole = one.chat([question], store=False, **fields)
        stop = whole.text[len(whole.text) // 2 :][:2]
        cut = one.chat([question], stop=[stop], **fields)
        session = str(cut.session)
        store = Store.open(tmp_path / "data")
        soon(lambda: rerendered(store, session))
        turn = store.turns(session)[-1]
        store.close()
        one.kill()
        one.start()
        messages = [question, {"role": "assistant", "content": cut.text}, {"role": "user", "content": NEXT.content}]
        after = one.chat(messages, logprobs=True, **fields)
        assert after.session == session
        assert after.usage["prompt_tokens_details"]["cached_tokens"] == len(turn.ids)
        assert after.usage["prompt_tokens"] - len(turn.ids) <= len(NEXT.content) + TEMPLATE_TOKENS
        assert after.usage["ssmd"]["resume"] == "exact"


OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    f"{'The keeper thinks of the lamp, of the fog and of every ship that came in. ' * 2}"
    "{% endif %}"
)


def give_up(store: Store, kind: str) -> None:
    """Remove the states of a kind, as retention thins them out."""
    with store.writing() as connection:
        numbers = list(connection.scalars(select(checkpoint.c.id).where(checkpoint.c.kind == kind)))
        connection.execute(delete(turn_checkpoint).where(turn_checkpoint.c.checkpoint.in_(numbers)))
    store.drop_loose(numbers)


def test_no_row_of_words_that_were_left_out_serves(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """A template opens each answer with words that it leaves out later. Then the client changes the answer's end."""
    with program_of(artifacts, "llama-f32") as loaded:
        artifact = with_template(loaded[0], tmp_path / "artifact", OPENING)
        system, sampling = Message("system", "You keep the lighthouse at the end of the pier. " * 2), endless(loaded)
        with engine_of(artifact, loaded[1], tmp_path / "data") as (engine, store):
            first = ask(engine, system, QUESTION, max_tokens=120, sampling=sampling)
            soon(lambda: "thinks" not in store.turns(str(first.usage.session))[0].text.own)
            give_up(store, "prefix")
            edited = answered(first.text[:-8] + " and so on"), NEXT
            second = ask(engine, system, QUESTION, *edited, sampling=sampling)
            control = OwnEngine(artifact, loaded[1], None)
            control.start()
            expected = ask(control, system, QUESTION, *edited, sampling=sampling)
            control.shutdown(0)
            assert second.usage.cached_tokens > 0
            assert (second.text, second.logprobs) == (expected.text, expected.logprobs)


def test_a_second_look_up_takes_no_fewer_rows(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier prompt shares more than any state that is left: the rows of a longer state serve all the same."""
    system = Message("system", "You keep the lighthouse at the end of the pier. " * 2)
    story = "The fog came in at nine and the keeper lit the lamp. " * 3
    with program_of(artifacts, "llama-f32") as loaded, engine_of(*loaded, tmp_path / "data") as (engine, store):
        ask(engine, system, user(story + "Who rang the bell?"), max_tokens=4)
        give_up(store, "prefix")
        said = system, user(story + "When did the fog come?")
        once = ask(engine, *said, store=False)
        monkeypatch.setattr(persistence, "ALIKE", 0)
        assert ask(engine, *said, store=False).usage.cached_tokens == once.usage.cached_tokens
        assert once.usage.cached_tokens > len(story) // 4


def test_a_second_look_up_keeps_a_deeper_state(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an imported session: planning finds its states, and a look-up without the session does not."""
    system = Message("system", "You keep the lighthouse at the end of the pier. " * 4)
    with program_of(artifacts, "mamba-f32") as loaded, engine_of(*loaded, tmp_path / "data") as (engine, store):
        first = ask(engine, system, QUESTION)
        said = system, QUESTION, answered(first.text), NEXT
        alone = ask(engine, *said, store=False)
        looks, resume = list[int](), Snapshot.resume

        def shallow(*given: Any, **named: Any) -> Any:
            """Find the state at the end of the system prompt alone, from the second time on."""
            found, ids, stem = resume(*given, **named)
            looks.append(1)
            return (found, ids, stem) if len(looks) == 1 else (None if found is None else prefix, ids, stem)

        with store.snapshot() as stored:
            prompt = engine._planner.plan(Request((system, QUESTION)))
            prefix, *_ = stored.resume(engine._planner.scope, prompt.ids.up_to(prompt.system + 1))
        assert prefix is not None
        monkeypatch.setattr(persistence, "ALIKE", -10_000)  # each prompt is looked up again
        monkeypatch.setattr(Snapshot, "resume", shallow)
        found = ask(engine, *said, store=False)
        assert len(looks) > 1
        assert found.usage.cached_tokens == alone.usage.cached_tokens > prefix.position
