"""An answer's bits depend on its text alone: neither on other answers under way nor on which states are kept.

Log-probabilities and states are compared, each to the last bit; texts would agree in spite of much.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from engine.test_engine import LONG_SYSTEM, Answer, Asked, ask, user
from engines import OwnEngine
from flat_programs import altered
from keeping import open_store
from schemas import grammar_of
from sqlalchemy import select

from ssmd.engine.decode import sharing
from ssmd.engine.engine import Engine
from ssmd.engine.request import Delta
from ssmd.engine.sampling.params import SamplingParams
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program, get_runtime
from ssmd.sessions.rows.schema import checkpoint
from ssmd.sessions.store import Store

LENGTHS = (63, 64, 65, 127, 129, 200, 321)  # around the grid, and several of its cells
FEW = (65, 200, 321)
NAMES = ("llama-int8", "llama-f32", "granite-f32", "openvino-granite-int8")
MORE = (
    *("granite-int8", "mamba-f32", "openvino-llama-int8", "openvino-mamba-f32"),
    *("wgpu-granite-f32", "wgpu-llama-f32", "wgpu-mamba-f32"),  # on a GPU of software a minute each
)
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"the_name_of_the_city": {"type": "string", "maxLength": 8}, "people": {"enum": ["few", "many"]}},
    "required": ["the_name_of_the_city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[*NAMES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def loaded(
    request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Artifact, Program]]:
    """A program; that of a GPU with a bucket of four cells of the grid."""
    artifact = Artifact.open(artifacts[request.param])
    if artifact.manifest.runtime == "wgpu":
        artifact = with_long_calls(artifact, tmp_path_factory.mktemp("wide"))
    program = get_runtime(artifact.manifest.runtime).load(artifact, threads=1)
    yield artifact, program
    program.close()


def with_long_calls(artifact: Artifact, folder: Path) -> Artifact:
    return altered(artifact, folder / "artifact", buckets=[16, 64, 256])


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client has to wait with its prompts because it read much."""
    monkeypatch.setattr(sharing, "CREDIT_S", 1e6)


@contextmanager
def serving(loaded: tuple[Artifact, Program], folder: Path) -> Iterator[tuple[Engine, Store]]:
    store = open_store(folder)
    engine = OwnEngine(*loaded, store, max_running=4)
    engine.start()
    yield engine, store
    engine.shutdown(0)
    store.close()


def endless(loaded: tuple[Artifact, Program], seed: int) -> SamplingParams:
    bias = {t: -100.0 for t in loaded[0].manifest.stop_tokens}
    return SamplingParams(temperature=1.0, seed=seed, logit_bias=bias)


@contextmanager
def company(engine: Engine, loaded: tuple[Artifact, Program]) -> Iterator[None]:
    """Another client's answers are under way, two at a time, so that there is one whenever one of them ends."""
    over = threading.Event()

    def talk(seed: int) -> None:
        while not over.is_set():
            fields: dict[str, Any] = {"sampling": endless(loaded, seed), "max_tokens": 200 + 90 * seed, "store": False}
            other = Asked(engine, user("Go on."), client="other", **fields)
            while isinstance(other.next(), Delta):
                if over.is_set():
                    other.generation.cancel()

    threads = [threading.Thread(target=talk, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    soon(lambda: engine.runs_others("one"))
    try:
        yield
        soon(lambda: engine.runs_others("one"))
    finally:
        over.set()
        for thread in threads:
            thread.join()


def raw_of(length: int, program: Program) -> tuple[int, ...]:
    """Ids that no other length's begin with."""
    return tuple(3 + (length * length + 7 * i * i) % (program.vocabulary - 3) for i in range(length))


def said(answer: Answer) -> list[tuple[float | None, tuple[float, ...]]]:
    return [(token.logprob, tuple(p for _, _, p in token.top)) for token in answer.logprobs]


def states(store: Store, program: Program) -> list[tuple[int, dict[str, bytes]]]:
    """All states that are stored, by position and name of tensor."""
    with store.reading() as connection:
        rows = connection.execute(select(checkpoint.c.id, checkpoint.c.position).order_by(checkpoint.c.position)).all()
    return [
        (row.position, {name: a.tobytes() for name, a in store.load(row.id, program.spec).tensors.items()})
        for row in rows
    ]


def lengths_of(program: Program) -> tuple[int, ...]:
    """Return the lengths of prompts: few where a call is slow, as on a GPU of software."""
    return LENGTHS if program.producer.startswith("litert") else FEW


def told(engine: Engine, program: Program, **fields: Any) -> list[Any]:
    """Log-probabilities after prompts of many lengths, each read whole and then resumed at its end; and of a chat."""
    answers = []
    for n in lengths_of(program):
        for more in (0, 70):
            raw = raw_of(n, program) + raw_of(more, program)
            answers.append(ask(engine, raw=raw, max_tokens=3, client="one", **fields))
            assert answers[-1].usage.cached_tokens == (n - 1 if more else 0)
    answers.append(ask(engine, LONG_SYSTEM, user("Who is there?"), max_tokens=5, client="one", **fields))
    assert answers[-1].usage.cached_tokens == 0
    return [said(answer) for answer in answers]


def test_company_changes_no_bit(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    program = loaded[1]
    with serving(loaded, tmp_path / "alone") as (engine, store):
        alone = told(engine, program)
        kept = states(store, program)
        with store.reading() as connection:
            kinds = list(connection.scalars(select(checkpoint.c.kind)))
    with serving(loaded, tmp_path / "beside") as (engine, store), company(engine, loaded):
        beside = told(engine, program)
        assert beside == alone
        assert states(store, program) == kept
    # Of a chat after the system prompt, before the answer and at its end; beside those inside prompts.
    assert len(kinds) - kinds.count("prefix") == 2 * len(lengths_of(program)) + 3


def test_a_prompt_is_cut_alike_whether_its_states_are_kept(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    if loaded[0].manifest.runtime == "wgpu":
        pytest.skip("it is the engine that cuts, and a GPU of software is slow")
    talk = LONG_SYSTEM, user("Who is there, and what do they want from us this late? " * 4)
    with serving(loaded, tmp_path / "data") as (engine, _):
        found = [ask(engine, *talk, max_tokens=3, **fields) for fields in ({"store": False}, {}, {"store": False})]
    assert [answer.usage.cached_tokens > 0 for answer in found] == [False, False, True]
    bare = OwnEngine(*loaded, None)
    bare.start()
    found.append(ask(bare, *talk, max_tokens=3))
    bare.shutdown(0)
    first, *others = map(said, found)
    assert others == [first] * 3


def test_what_a_grammar_forces_has_its_bits_in_company(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    """Tokens that follow from a grammar go in pieces: the same ones beside others, as the state at the end shows."""
    program = loaded[1]
    if loaded[0].manifest.runtime == "wgpu":
        pytest.skip("it is the engine that cuts, and a GPU of software is slow")
    asked: dict[str, Any] = {"grammar": grammar_of(CITY), "sampling": SamplingParams(temperature=1.0, seed=2)}

    def answered(engine: Engine) -> Sequence[str]:
        return [ask(engine, user("Where? " * n), max_tokens=120, client="one", **asked).text for n in (1, 9)]

    with serving(loaded, tmp_path / "alone") as (engine, store):
        alone, kept = answered(engine), states(store, program)
    with serving(loaded, tmp_path / "beside") as (engine, store), company(engine, loaded):
        assert answered(engine) == alone
        assert states(store, program) == kept


def test_threads_change_no_bit(loaded: tuple[Artifact, Program]) -> None:
    artifact, program = loaded
    if artifact.manifest.runtime == "wgpu":
        pytest.skip("its sums are the device's")

    def read(program: Program) -> list[Any]:
        handle, ids = program.new_state(), raw_of(201, program)
        found: list[Any] = []
        for at in (*range(0, 192, 64), 192):
            found.append(program.prefill(handle, ids[at : min(at + 64, 200)]).tobytes())
        found += [program.decode([handle], [token]).tobytes() for token in ids[-1:] * 3]
        found.append({name: array.tobytes() for name, array in program.save(handle).tensors.items()})
        program.release(handle)
        return found

    one = read(program)
    for threads in (2, 4):
        other = get_runtime(artifact.manifest.runtime).load(artifact, threads=threads)
        assert other.threads == threads
        assert read(other) == one
        other.close()


def test_wide_calls_have_the_bits_of_a_call_for_each_cell(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    artifact = with_long_calls(Artifact.open(artifacts["wgpu-granite-f32"]), tmp_path)
    program = get_runtime("wgpu").load(artifact)
    assert program.wide  # type: ignore[attr-defined]  # programs from elsewhere may not say

    def read(*calls: int) -> tuple[bytes, dict[str, bytes]]:
        handle, ids, at = program.new_state(), raw_of(sum(calls), program), 0
        for n in calls:
            logits = program.prefill(handle, ids[at : at + n])
            at += n
        return logits.tobytes(), {name: a.tobytes() for name, a in program.save(handle).tensors.items()}

    assert read(64, 192, 40) == read(64, 64, 64, 64, 40)
    program.close()
