"""Frequency and presence penalties against OpenAI's formula, beside the others, and what they count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.sampling.sampler import Sampler

V = 200
PROMPT = np.random.default_rng(7).integers(0, V, 90).astype(np.int32)


def logits(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1, V).astype(np.float32)


def penalized_ref(said: list[int], frequency: float, presence: float, row: NDArray[np.float32]) -> NDArray[Any]:
    """As in OpenAI's API reference: mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence."""
    found = row.astype(np.float64)
    for token, n in Counter(said).items():
        found[token] += -n * frequency - float(n > 0) * presence
    return found


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 0.7), (0.25, 1.5), (-0.1, 0.0), (0.3, -0.3)])
def test_the_penalties_are_those_of_the_formula(frequency: float, presence: float) -> None:
    """Over 300 tokens of 200, so that many are said again; the prompt is of no matter."""
    params = SamplingParams(
        temperature=0.0, frequency_penalty=frequency, presence_penalty=presence, logprobs=True, top_logprobs=5
    )
    sampler, said = Sampler(params, before=PROMPT), list[int]()
    for step in range(300):
        row = logits(step)
        before = row.copy()
        expected = penalized_ref(said, frequency, presence, row)
        sample = sampler.sample(row)
        assert np.array_equal(row, before), "the program's logits stay as they are"
        assert sample.token == int(expected.argmax())
        assert sample.logprob == pytest.approx(expected.max() - np.log(np.exp(expected).sum()), abs=1e-4)
        assert [token for token, _ in sample.top] == list(np.argsort(-expected)[:5])
        said.append(sample.token)
    assert max(Counter(said).values()) > 1


def test_they_come_after_bias_and_repetition_as_in_vllm() -> None:
    params = SamplingParams(
        temperature=0.0,
        logit_bias={3: 4.0},
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        presence_penalty=0.5,
        logprobs=True,
    )
    sampler = Sampler(params, before=[])
    row = np.zeros(V, np.float32)
    assert sampler.sample(row).token == 3
    expected = np.zeros(V)
    expected[3] = 4.0 / 2.0 - 1.0 - 0.5
    sample = sampler.sample(row)
    assert sample.token == 3
    assert sample.logprob == pytest.approx(expected[3] - np.log(np.exp(expected).sum()), abs=1e-5)
    expected[3] -= 1.0
    assert sampler.sample(row).token == 0, "4 / 2 - 2 - 0.5 is below the others"


def test_choices_count_what_they_said_themselves() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    one, other = (Sampler(params, index=index) for index in range(2))
    row = np.zeros(V, np.float32)
    assert [one.sample(row).token for _ in range(3)] == [0, 1, 2]
    assert other.sample(row).token == 0


@pytest.mark.parametrize("fields", [{}, {"frequency_penalty": 0.0, "presence_penalty": 0}])
def test_off_is_off(fields: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(temperature=0.0, **fields))
    assert sampler._penalties == []
    assert sampler._prepare(row := np.zeros(640, np.float32), ()).base is row  # not even copied


@pytest.mark.parametrize("value", [2.1, -2.1, float("nan"), float("inf"), True, "1"])
@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_what_is_no_penalty_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
