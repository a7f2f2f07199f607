"""typical_p against transformers' own, XTC against its definition, and both with top_p and min_p on sorted sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributions import SHAPES, chi_square_fits, even_counts, worst
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ssmd.engine.sampling.filters import Filters
from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.sampling.sampler import Sampler

Floats = NDArray[np.float32]
Probabilities = NDArray[np.float64]


def least_ref(keys: Probabilities, p: Probabilities, share: float) -> Probabilities:
    """The probabilities of the tokens with the least keys up to that share, in a stable sort, normalised."""
    order = np.argsort(keys, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    kept = order[before < share]
    only = np.zeros_like(p)
    only[kept] = p[kept]
    return np.asarray(only / only.sum())


def filtered_ref(logits: Floats, params: SamplingParams) -> Probabilities:
    """typical_p, top_p, min_p, XTC in this order, after temperature and top_k; everything is sorted, in float64."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    if params.top_k:
        p[np.argsort(-scaled, kind="stable")[params.top_k :]] = 0
    p /= p.sum()
    if params.typical_p < 1:
        surprise = -np.log(np.where(p > 0, p, 1.0))
        entropy = (p * surprise).sum()
        p = least_ref(np.where(p > 0, np.abs(surprise - entropy), np.inf), p, params.typical_p)
    if params.top_p < 1:
        p = least_ref(np.where(p > 0, -p, np.inf), p, params.top_p)
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    without = p.copy()
    top = np.flatnonzero((p >= params.xtc_threshold) & (p > 0))
    if params.xtc_threshold <= 0.5 and top.size > 1:
        without[np.setdiff1d(top, top[np.flatnonzero(p[top] == p[top].min())[-1:]])] = 0
    without *= params.xtc_probability / without.sum()
    return np.asarray((1 - params.xtc_probability) * p + without)


def at_the_edge(logits: NDArray[np.float32], mass: float) -> NDArray[np.bool_]:
    """Return the tokens that float32 may put on either side of the typical set's edge (arXiv:2202.00666).

    In float32 a sum of 100,352 masses is off by up to 1e-5, and the distance of a surprise from the entropy by 2e-5.
    """
    scaled = logits.astype(np.float64)
    log_p = np.asarray(scaled - np.logaddexp.reduce(scaled))
    p = np.exp(log_p)
    off = np.abs(-log_p + (p * log_p).sum())  # from the entropy
    order = np.argsort(off, kind="stable")
    before = np.empty_like(p)
    before[order] = np.cumsum(p[order]) - p[order]
    last = order[np.searchsorted(np.cumsum(p[order]), mass)]
    return np.asarray((np.abs(before - mass) <= 1e-5) | (np.abs(off - off[last]) <= 2e-5))


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.9, 0.99])
@pytest.mark.parametrize(("size", "width"), [(50, 3.0), (9000, 0.5), (9000, 4.0), (100_352, 2.0)])
def test_the_typical_set_is_that_of_transformers(mass: float, size: int, width: float) -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import TypicalLogitsWarper

    logits = np.random.default_rng(size).normal(0, width, size).astype(np.float32)
    expected = (
        TypicalLogitsWarper(mass)(torch.zeros(1, 1).long(), torch.from_numpy(logits.copy())[None])[0].numpy() > -np.inf
    )
    scaled = logits - logits.max()
    weights = np.exp(scaled)
    own = weights.copy()
    Filters(mass, 1.0, 0.0, 0.0, 0.1).apply(scaled.copy(), own, np.random.default_rng(0))
    differ = np.flatnonzero(expected != (own > 0))
    assert at_the_edge(logits, mass)[differ].all()
    assert np.array_equal(own[own > 0], weights[own > 0])
    sampler = Sampler(SamplingParams(typical_p=mass, seed=3))
    drawn = {sampler.sample(logits).token for _ in range(200)}
    assert drawn <= {*np.flatnonzero(expected).tolist(), *differ.tolist()}


EVEN = 400  # draws of even values
PARAMS: list[dict[str, Any]] = [
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 1.5},
    {"typical_p": 0.6, "top_k": 20},
    {"typical_p": 0.8, "top_p": 0.71},  # of 200 equal ones no set ends on an edge, which rounding decides
    {"typical_p": 0.8, "top_p": 0.9, "min_p": 0.05, "top_k": 60},
    {"typical_p": 0.5, "min_p": 0.1},
    {"typical_p": 0.95, "min_p": 0.3},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1, "temperature": 0.7},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    {"xtc_probability": 0.7, "xtc_threshold": 0.05, "top_p": 0.8, "min_p": 0.02},
    {"xtc_probability": 0.7, "xtc_threshold": 0.05, "top_k": 8},
]


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_the_distribution_is_the_references(shape: str, fields: dict[str, Any]) -> None:
    logits = SHAPES[shape]
    if shape == "ties" and "typical_p" in fields:
        logits = logits + np.random.default_rng(6).normal(0, 0.01, logits.size).astype(np.float32)
    params = SamplingParams(**fields)
    # XTC draws first whether it is on; a token outside the set that typical_p alone leaves is drawn anew.
    one_value = "typical_p" in fields and not fields.keys() <= {"typical_p", "temperature"}
    counts = even_counts(Sampler(params), logits, EVEN if one_value else 3 * EVEN)
    expected = filtered_ref(logits, params)
    assert chi_square_fits(counts, expected)
    assert not one_value or worst(counts, expected) < 1.01


@pytest.mark.parametrize("probability", [0.3, 0.7])
def test_xtc_comes_as_often_as_asked(probability: float) -> None:
    logits = np.full(64, -np.inf, np.float32)
    logits[[5, 40]] = 3.0, 0.0  # probabilities of 0.953 and 0.047, of which XTC leaves the second
    sampler = Sampler(SamplingParams(xtc_probability=probability, xtc_threshold=0.04))
    assert even_counts(sampler, logits, EVEN)[5] == pytest.approx((1 - probability) * 0.953 * EVEN, abs=8)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 64, 2048, 2112, 8000, 8192]),
    width=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    share=st.sampled_from([0.0, 0.001, 0.4, 0.95, 1.0 - 1e-7]),
    levels=st.sampled_from([0, 1, 10]),
)
def test_a_set_is_as_large_as_it_has_to_be_and_no_larger(
    seed: int, size: int, width: float, share: float, levels: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, width, size).astype(np.float32)
    if levels:  # few different ones, so that many are equal
        logits = (np.round(logits * levels) / levels).astype(np.float32)
    scaled = logits - logits.max()
    for field in ("typical_p", "top_p"):
        values = {"typical_p": 1.0, "top_p": 1.0, field: share}
        weights = np.exp(scaled)
        total = weights.sum(dtype=np.float64)
        Filters(values["typical_p"], values["top_p"], 0.0, 0.0, 0.1).apply(scaled.copy(), weights, _NONE)
        kept = weights[weights > 0].astype(np.float64)
        assert kept.size >= 1
        assert kept.sum() >= (share - 1e-5) * total
        assert kept.size == 1 or kept.sum() - kept.max() <= (share + 1e-5) * total


def test_what_is_impossible_is_never_drawn() -> None:
    logits = np.full(5000, -np.inf, np.float32)
    logits[[7, 4000]] = 1.0, 0.5
    for fields in PARAMS:
        sampler = Sampler(SamplingParams(**fields, seed=1))
        assert {sampler.sample(logits).token for _ in range(50)} <= {7, 4000}


_NONE = np.random.default_rng(0)


@pytest.mark.parametrize("fields", [{"typical_p": 0.0}, {"top_p": 0.0}, {"typical_p": 0.0, "top_p": 0.0}])
def test_a_share_of_nothing_leaves_one(fields: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(seed=3, **fields))
    for likely in (1, 2, 100):
        logits = np.full(128, -50, np.float32)
        logits[:likely] = 0
        assert sampler.sample(logits).token < likely
