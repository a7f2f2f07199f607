"""The repetition penalty and min_p against transformers' own, the window's edges, and what a resumed prompt counts."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyArtifacts
from distributions import even_counts
from engines import OwnEngine
from keeping import open_store
from numpy.typing import NDArray

from ssmd.engine.engine import Engine
from ssmd.engine.request import Delta, Event, Finish, Request
from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.sampling.sampler import Repetition, Sampler
from ssmd.model.artifact import Artifact
from ssmd.model.defaults import ALL_TOKENS
from ssmd.runtime.protocol import get_runtime
from ssmd.text.messages import Message

V = 500
PROMPT = np.random.default_rng(7).integers(0, V, 90).astype(np.int32)
GREEDY = SamplingParams(temperature=0.0)


def logits(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, V).astype(np.float32)


def penalized_ref(ids: NDArray[np.int32] | list[int], penalty: float, row: NDArray[np.float32]) -> Any:
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    given = torch.tensor([[int(i) for i in ids]])
    return RepetitionPenaltyLogitsProcessor(penalty)(given, torch.from_numpy(row.copy())[None])[0].numpy()


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.3, 30.0])
@pytest.mark.parametrize("last_n", [1, 5, 64, 200, ALL_TOKENS])
def test_the_penalty_is_that_of_transformers(penalty: float, last_n: int) -> None:
    """Over 150 tokens: the window is filled by the prompt, written over and, where it is longer, grows."""
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty, repeat_last_n=last_n)
    sampler, said = Sampler(params, before=PROMPT), [int(i) for i in PROMPT]
    for step in range(150):
        row = logits(step)
        window = said if last_n == ALL_TOKENS else said[-last_n:]
        expected = penalized_ref(window, penalty, row)
        own = row.copy()
        [repetition] = sampler._penalties
        repetition.penalize(own)
        np.testing.assert_allclose(own, expected, rtol=1e-6)
        assert (own != row).sum() == len(set(window))
        token = sampler.sample(row).token
        assert token == int(expected.argmax())
        said.append(token)


def test_the_penalty_comes_after_the_bias_and_shows_in_logprobs() -> None:
    row = logits(1)
    row[3] = 2.0
    params = SamplingParams(
        temperature=0.0, logit_bias={3: 30.0}, repetition_penalty=2.0, logprobs=True, top_logprobs=2
    )
    sample = Sampler(params, before=[3]).sample(row)
    biased = row.astype(np.float64)
    biased[3] = (2.0 + 30.0) / 2.0
    assert sample.token == 3
    assert sample.logprob == pytest.approx(biased[3] - np.log(np.exp(biased).sum()), abs=1e-5)


@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.3, "repeat_last_n": 0}, {"repeat_last_n": ALL_TOKENS}])
def test_off_is_off(fields: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(temperature=0.0, **fields), before=PROMPT)
    assert sampler._penalties == []
    assert sampler._prepare(row := np.zeros(640, np.float32), ()).base is row  # not even copied
    assert SamplingParams(**fields).counted(1000) == 0


def test_a_window_of_any_size_takes_no_more_than_what_was_said() -> None:
    window = Repetition(1.1, 2**31 - 1, PROMPT)
    for token in range(1000):
        window.add(token % V)
    assert window._ids.size < 5000
    assert window._filled == len(PROMPT) + 1000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.8}, {"top_k": 20}, {"top_k": 20, "top_p": 0.6}])
@pytest.mark.parametrize("min_p", [0.02, 0.2, 0.9])
def test_min_p_leaves_the_tokens_that_transformers_leaves(
    temperature: float, fields: dict[str, Any], min_p: float
) -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    row = logits(3)
    scores = torch.from_numpy(row.copy())[None]
    warpers = [hf.TemperatureLogitsWarper(temperature)]
    warpers += [hf.TopKLogitsWarper(fields["top_k"])] if "top_k" in fields else []
    warpers += [hf.TopPLogitsWarper(fields["top_p"])] if "top_p" in fields else []
    for warper in [*warpers, hf.MinPLogitsWarper(min_p)]:
        scores = warper(None, scores)
    kept = set(torch.isfinite(scores[0]).nonzero().flatten().tolist())
    sampler = Sampler(SamplingParams(temperature=temperature, min_p=min_p, **fields))
    drawn = np.flatnonzero(even_counts(sampler, row, 1000)).tolist()
    likely = {i for i in kept if float(torch.softmax(scores[0], 0)[i]) > 0.01}
    assert likely <= set(drawn) <= kept


@pytest.mark.parametrize("last_n", [40, ALL_TOKENS])
def test_a_resumed_prompt_counts_the_ids_that_need_not_be_read(
    artifacts: TinyArtifacts, tmp_path: Path, last_n: int
) -> None:
    """Of a conversation that goes on only the end is at hand; the penalty counts what stands before it, too."""
    artifact = Artifact.open(artifacts["llama-f32"])
    program = get_runtime("litert").load(artifact, threads=1)
    store = open_store(tmp_path / "data")
    engine, whole = (OwnEngine(artifact, program, kept) for kept in (store, None))
    engine.start()
    try:
        said: list[Message] = []
        for question in ("Tell me a story about the sea and the boats on it", "And then?", "Why?"):
            said.append(Message("user", question))
            said.append(Message("assistant", answered(engine, said, GREEDY)[0]))
        said.append(Message("user", "So?"))
        plain = engine._planner.plan(Request(tuple(said), GREEDY)).ids
        assert plain.start > 40, "all is at hand: the test tells nothing"
        sampling = SamplingParams(temperature=0.0, repetition_penalty=30.0, repeat_last_n=last_n)
        ids = engine._planner.plan(Request(tuple(said), sampling)).ids
        assert ids.start <= (0 if last_n == ALL_TOKENS else len(ids) - last_n)
        alone = whole._planner.plan(Request(tuple(said), sampling)).ids
        assert ids.own.tolist() == alone.own[ids.start :].tolist()
        text, done = answered(engine, said, sampling)
        assert done.usage.cached_tokens > 40
        assert text != answered(engine, said, GREEDY)[0]
    finally:
        engine.shutdown(0)
        whole.shutdown(0)
        program.close()
        store.close()


def answered(engine: Engine, said: Sequence[Message], sampling: SamplingParams) -> tuple[str, Finish]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(Request(tuple(said), sampling, max_tokens=8), events.put)
    text = ""
    while isinstance(event := events.get(timeout=60), Delta):
        text += event.text
    assert isinstance(event, Finish), event
    return text, event
