"""The sampler against a plain sorted reference: the distribution, its edges, determinism, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from distributions import SHAPES, chi_square_fits, even_counts, worst
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.sampling.sampler import Sampler

Floats = NDArray[np.float32]


def probabilities_ref(logits: Floats, params: SamplingParams) -> NDArray[np.float64]:
    """Sorts everything, float64: temperature, top_k, top_p, min_p, in transformers' order; ties: lower id first."""
    biased = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        biased[token] += bias
    order = np.argsort(-biased, kind="stable")
    if params.temperature == 0:
        order = order[:1]
    if params.top_k:
        order = order[: params.top_k]
    scaled = (biased[order] - biased[order[0]]) / (params.temperature or 1.0)
    p = np.exp(scaled) / np.exp(scaled).sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    keep = (before < params.top_p) & (p >= params.min_p * p[0])
    keep[0] = True
    p = np.where(keep, p, 0.0)
    whole = np.zeros(logits.size)
    whole[order] = p / p.sum()
    return whole


EVEN = 400  # draws of even values
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_p": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.02},
    {"top_p": 0.999},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 150},
    {"top_k": 40, "top_p": 0.7, "temperature": 0.8},
    {"top_k": 10**6, "top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 0.02, "temperature": 1.5, "top_p": 0.95},
    {"min_p": 0.3, "top_p": 0.5, "temperature": 2.0},
    {"min_p": 0.05, "top_k": 40, "top_p": 0.9},
    {"min_p": 1.0},
    {"top_p": 0.9, "logit_bias": {3: 4.0, 14: -100.0}},
]


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_the_distribution_is_the_references(shape: str, fields: dict[str, Any]) -> None:
    logits = SHAPES[shape]
    params = SamplingParams(**fields)
    one_value = params.top_p >= 1.0 or 0 < params.top_k < logits.size  # else a token outside the nucleus is drawn anew
    counts = even_counts(Sampler(params), logits, EVEN if one_value else 3 * EVEN)
    expected = probabilities_ref(logits, params)
    assert chi_square_fits(counts, expected)
    assert not one_value or worst(counts, expected) < 1.01


def test_a_token_outside_the_nucleus_is_drawn_anew_fairly() -> None:
    """Both likely tokens come equally often, though unlikely ones share the column of one (sampler.py) alone."""
    weights = np.zeros((64, 2))  # token = row * 2 + column
    weights[:, 0] = 0.5 / 63
    weights[0] = 0.25, 0.25
    with np.errstate(divide="ignore"):
        logits = np.log(weights.reshape(-1)).astype(np.float32)
    counts = even_counts(Sampler(SamplingParams(top_p=0.45)), logits, 3 * EVEN)
    assert counts.sum() == counts[:2].sum() == 3 * EVEN
    assert abs(int(counts[0]) - int(counts[1])) <= 40


def test_the_chi_square_test_can_fail() -> None:
    params = SamplingParams(temperature=1.1, seed=11)
    sampler = Sampler(params)
    logits = SHAPES["peaked"]
    counts = np.bincount([sampler.sample(logits).token for _ in range(20000)], minlength=logits.size)
    assert chi_square_fits(counts, probabilities_ref(logits, params))
    assert not chi_square_fits(counts, probabilities_ref(logits, SamplingParams()))


@settings(max_examples=150, deadline=None)
@given(
    logits=hnp.arrays(
        np.float32,
        st.integers(1, 400),
        elements=st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -float("inf")])),
    ),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 63, 64, 65, 399]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**63),
)
def test_never_a_token_outside_the_reference(
    logits: Floats, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    if not np.isfinite(logits.max()):
        logits[0] = 0.0
    before = logits.copy()
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    p = probabilities_ref(logits, params)
    # A token at the very edge of the nucleus may fall on either side by rounding.
    near = probabilities_ref(logits, SamplingParams(temperature, min(1.0, top_p + 1e-5), top_k, min_p * (1 - 1e-5)))
    edge = logits[near > 0].min()
    # Float32 makes equals of logits a hair apart, except where they themselves are compared.
    finite = logits[np.isfinite(logits)]
    compared = temperature == 0 or top_p == 0 or 0 < top_k < logits.size
    if not compared:
        edge -= 2 * np.spacing(np.ptp(finite)) + np.float32(2e-7 * temperature)
    sampler = Sampler(params)
    for _ in range(5):
        token = sampler.sample(logits).token
        assert p[token] > 0 or logits[token] >= edge
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}, {"temperature": 1e-9}])
def test_greedy_takes_the_most_likely_and_of_ties_the_first(fields: dict[str, Any]) -> None:
    logits = np.zeros(1000, np.float32)
    logits[[700, 300]] = 2.0
    sampler = Sampler(SamplingParams(**fields))
    assert {sampler.sample(logits).token for _ in range(20)} == {300}


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_any_vocabulary_size_and_memory_layout(size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 3, (size, 2)).astype(np.float32)
    for fields in ({}, {"top_p": 0.5}, {"top_k": 3}):
        strided = [Sampler(SamplingParams(**fields, seed=1)).sample(logits[:, 0]).token for _ in range(3)]
        packed = [Sampler(SamplingParams(**fields, seed=1)).sample(logits[:, 0].copy()).token for _ in range(3)]
        assert strided == packed
        assert 0 <= strided[0] < size


def test_same_seed_and_index_same_tokens_and_other_index_others() -> None:
    logits = SHAPES["flat"]

    def tokens(seed: int | None, index: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, top_p=0.95), index=index)
        return [sampler.sample(logits).token for _ in range(50)]

    assert tokens(5, 0) == tokens(5, 0)
    assert tokens(-5, 1) == tokens(-5, 1)
    assert tokens(5, 0) != tokens(5, 1)
    assert tokens(5, 0) != tokens(6, 0)
    assert tokens(None, 0) != tokens(None, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_of_the_biased_logits_before_temperature(temperature: float) -> None:
    logits = SHAPES["peaked"]
    biased = logits.astype(np.float64)
    biased[9] += 5.0
    expected = biased - biased.max() - math.log(np.exp(biased - biased.max()).sum())
    params = SamplingParams(temperature=temperature, logit_bias={9: 5.0}, logprobs=True, top_logprobs=20, seed=0)
    sample = Sampler(params).sample(logits)
    assert sample.logprob == pytest.approx(expected[sample.token], abs=2e-6)
    assert [t for t, _ in sample.top] == list(np.argsort(-expected, kind="stable")[:20])
    assert [v for _, v in sample.top] == pytest.approx(np.sort(expected)[::-1][:20].tolist(), abs=2e-6)


def test_logprobs_leave_out_what_cannot_happen() -> None:
    logits = np.full(100, -np.inf, np.float32)
    logits[[4, 50]] = 1.0
    sample = Sampler(SamplingParams(logprobs=True, top_logprobs=5)).sample(logits)
    assert [t for t, _ in sample.top] == [4, 50]
    assert sample.logprob == pytest.approx(math.log(0.5))


def test_no_logprobs_unless_asked() -> None:
    assert Sampler(SamplingParams()).sample(SHAPES["flat"]).logprob is None


def test_a_bias_of_minus_100_bans() -> None:
    logits = np.zeros(4, np.float32)
    logits[2] = 20.0
    sampler = Sampler(SamplingParams(logit_bias={2: -100.0}, seed=0))
    assert 2 not in {sampler.sample(logits).token for _ in range(500)}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"logit_bias": {0: 1.0}}])
@pytest.mark.parametrize(
    ("place", "value", "said"),
    [(slice(7, 8), np.nan, "not a number"), (slice(None), -np.inf, "-inf"), (slice(7, 8), np.inf, "infinite")],
)
def test_logits_that_no_token_can_come_from(fields: dict[str, Any], place: slice, value: float, said: str) -> None:
    logits = np.zeros(300, np.float32)
    logits[place] = value
    with pytest.raises(ValueError, match=said):
        Sampler(SamplingParams(**fields)).sample(logits)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.9, "logit_bias": {310: 9.0}},
        {"typical_p": 0.9, "min_p": 0.1},
    ],
)
def test_padding_and_gaps_are_never_drawn(fields: dict[str, Any]) -> None:
    padding = np.array([7, *range(300, 320)])
    logits = np.zeros(320, np.float32)  # a whole number of rows: without padding they are read where they are
    logits[[7, 300, 310, 319]] = 20.0, np.inf, 30.0, np.nan
    sampler = Sampler(SamplingParams(**fields, seed=3, logprobs=True, top_logprobs=3), padding=lambda _: padding)
    for _ in range(50):
        sample = sampler.sample(logits)
        assert {sample.token, *(token for token, _ in sample.top)}.isdisjoint(padding.tolist())
        assert sample.logprob == pytest.approx(-np.log(299), abs=1e-5)


def test_a_bias_outside_the_vocabulary_or_wrong_array_is_refused() -> None:
    with pytest.raises(ValueError, match="token 10; the vocabulary has 10"):
        Sampler(SamplingParams(logit_bias={10: 1.0})).sample(np.zeros(10, np.float32))
    wrong: list[Any] = [np.zeros((1, 4), np.float32), np.zeros(0, np.float32), np.zeros(4, np.float64)]
    for logits in wrong:
        with pytest.raises(ValueError, match="one row of float32"):
            Sampler(SamplingParams()).sample(logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 1.01),
        ("top_p", -1e-9),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 2**40),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("repeat_last_n", -2),
        ("repeat_last_n", 2.5),
        ("seed", 2**70),
        ("seed", 0.5),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {i: 0.0 for i in range(10_001)}),
    ],
)
def test_nonsense_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def masked(logits: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """Return a mask as the sampler takes it: 0 where allowed, else minus infinity."""
    return np.where(allowed, np.float32(0), np.float32(-np.inf)).astype(np.float32)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_mask_is_as_if_the_others_were_not_there(shape: str, params: dict[str, Any]) -> None:
    """The same draws as from a row that has -inf for them, whose distribution is held against the reference above."""
    logits = SHAPES[shape]
    for seed, share in enumerate((0.005, 0.3, 0.97)):
        allowed = np.random.default_rng(seed).random(logits.size) < share
        allowed[np.flatnonzero(np.isfinite(logits))[seed]] = True
        asked = SamplingParams(**{**params, "seed": seed})
        sampler, plain = Sampler(asked), Sampler(asked)
        cut = np.where(allowed, logits, np.float32(-np.inf)).astype(np.float32)
        for _ in range(40):
            token = sampler.sample(logits, masked(logits, allowed)).token
            assert allowed[token]
            assert token == plain.sample(cut).token


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}])
def test_log_probabilities_are_of_the_logits_without_the_mask(sampling: dict[str, Any]) -> None:
    logits = SHAPES["peaked"]
    allowed = np.zeros(logits.size, np.bool_)
    allowed[[7, 11, 500]] = True
    sample = Sampler(SamplingParams(logprobs=True, top_logprobs=5, seed=1, **sampling)).sample(
        logits, masked(logits, allowed)
    )
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert sample.token in (7, 11, 500)
    assert sample.logprob == pytest.approx(exact[sample.token], abs=1e-4)
    assert [token for token, _ in sample.top] == np.argsort(-logits, kind="stable")[:5].tolist()
    assert [logprob for _, logprob in sample.top] == pytest.approx(np.sort(exact)[::-1][:5].tolist(), abs=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 1}])
def test_what_is_skipped_leaves_the_draws_after_it_as_they_are(sampling: dict[str, Any]) -> None:
    logits = SHAPES["flat"]
    asked = SamplingParams(seed=2, frequency_penalty=1.0, repetition_penalty=1.5, **sampling)
    drawn, skipped = Sampler(asked), Sampler(asked)
    only = np.arange(logits.size) == 9
    assert drawn.sample(logits, masked(logits, only)).token == 9
    skipped.skip(9)
    assert [drawn.sample(logits).token for _ in range(20)] == [skipped.sample(logits).token for _ in range(20)]


@pytest.mark.filterwarnings("error")
def test_a_damaged_row_is_told_under_a_mask_too() -> None:
    logits = SHAPES["flat"].copy()
    allowed = np.arange(logits.size) < 5
    for value, said in ((np.nan, "not a number"), (np.inf, "infinite")):
        logits[200] = value
        with pytest.raises(ValueError, match=said):
            Sampler(SamplingParams()).sample(logits, masked(logits, allowed))
    with pytest.raises(ValueError, match="no token can be sampled"):
        Sampler(SamplingParams()).sample(SHAPES["flat"], masked(logits, np.zeros(logits.size, np.bool_)))
