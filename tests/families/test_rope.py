"""RoPE is read as transformers reads it, and its tables are those of transformers; what is not built is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray

from ssmd.families import qwen3
from ssmd.families.fields import FamilyError, Fields
from ssmd.families.registry import family_of
from ssmd.families.rope import rope_of
from ssmd.model.rope import LinearScaling, Rope, YarnScaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {k: v for k, v in tiny.LLAMA3_ROPE.items() if k != "rope_theta"}
HEAD = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
CONTEXT = 1024


def read(fields: dict[str, Any], partial: float | None = None) -> tuple[Rope, int]:
    return rope_of(Fields(fields), 64, 4096, partial=partial)


def check_refused(fields: dict[str, Any], named: str, partial: float | None = None) -> None:
    with pytest.raises(FamilyError) as failure:
        read(fields, partial)
    assert named in str(failure.value)


@pytest.mark.parametrize("theta", [10_000.0, 1e6, 1e11])
@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"rope_type": "linear", "factor": 3.7},
        {"rope_type": "linear", "factor": 0.5},
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 8, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "factor": None},
        {**YARN, "mscale": 0.7, "beta_fast": 0, "beta_slow": None, "truncate": None, "factor": 0.5},
        {"type": "yarn", "factor": 40.0, "beta_fast": 1, "beta_slow": 1},
    ],
)
def test_tables_are_those_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    """Its frequencies are another float32 power, whose last bit differs; angles are off by as much of themselves."""
    torch = pytest.importorskip("torch")
    from transformers.models.bamba.modeling_bamba import BambaConfig, BambaRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    fields = {**HEAD, "rope_theta": theta, "rope_scaling": scaling or None}
    for config, embedding, partial in (
        (LlamaConfig, LlamaRotaryEmbedding, None),
        (BambaConfig, BambaRotaryEmbedding, 0.5),
    ):
        made = embedding(config(**json.loads(json.dumps({**fields, "mamba_expand": 64}))))
        expected = made(torch.zeros(1), torch.arange(CONTEXT)[None])
        rope, rotated = read(fields, partial)
        assert rotated == (64 if partial is None else 32)
        np.testing.assert_allclose(rope.frequencies(rotated), made.inv_freq.numpy(), rtol=5e-7)
        for found, table in zip(rope.tables(rotated, CONTEXT), expected, strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, table[0, :, : rotated // 2].numpy(), rtol=0, atol=5e-7 * CONTEXT)


def exact(scaling: dict[str, Any], theta: float) -> tuple[NDArray[np.float64], float]:
    """Frequencies (32,) and the factor of the tables, in float64, by the papers' own formulas."""
    frequencies = theta ** -(np.arange(32) / 32)
    if not scaling:
        return frequencies, 1.0
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequencies / factor, 1.0
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (kept + (1 - kept) / factor), 1.0
    first, last = (
        32 * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * n), theta) for n in (32, 1)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), 63)
    kept = 1 - np.clip((np.arange(32) - first) / (last - first), 0, 1)
    return frequencies * (kept + (1 - kept) / factor), 0.1 * math.log(factor) + 1


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 3.7}, LLAMA3, YARN])
def test_tables_beside_float64(scaling: dict[str, Any]) -> None:
    rope, _ = read({"rope_theta": 10_000.0, "rope_scaling": scaling})
    frequencies, factor = exact(scaling, 10_000.0)
    np.testing.assert_allclose(rope.frequencies(64), frequencies, rtol=5e-7)
    angles = np.arange(CONTEXT)[:, None] * frequencies
    for found, expected in zip(rope.tables(64, CONTEXT), (np.cos(angles), np.sin(angles)), strict=True):
        np.testing.assert_allclose(found, expected * factor, rtol=0, atol=5e-7 * CONTEXT)


def test_rope_scaling_goes_before_rope_parameters() -> None:
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    both = {"rope_theta": 10_000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": plain}
    assert read(both)[0] == Rope(10_000.0, LinearScaling(2.0))
    assert read({**both, "rope_scaling": {}})[0] == Rope(10_000.0)
    assert read({**both, "rope_scaling": plain, "rope_parameters": LLAMA3})[0] == Rope(10_000.0)
    for kind in ("dynamic", "longrope", "proportional", "su"):
        check_refused(
            {**both, "rope_scaling": {"type": kind}}, f"rope_scaling.rope_type is '{kind}'; supported: default, "
        )
        assert read({**both, "rope_parameters": {"rope_type": kind}})[0].scaling == LinearScaling(2.0)


def test_what_rope_scaling_would_lose_is_refused() -> None:
    """transformers then takes the family's own rope_theta, with which the model was not trained."""
    linear = {"rope_type": "linear", "factor": 2.0}
    check_refused(
        {"rope_scaling": linear, "rope_parameters": {"rope_theta": 1e6}},
        "rope_theta = 1000000.0 stands in rope_parameters alone: write it into rope_scaling",
    )
    parameters = {"rope_theta": 1e6, "partial_rotary_factor": 0.25}
    check_refused(
        {"rope_scaling": {**linear, "rope_theta": 1e6}, "rope_parameters": parameters},
        "partial_rotary_factor = 0.25 stands in rope_parameters alone",
        partial=0.5,
    )
    same = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    assert read({"rope_scaling": linear, "rope_parameters": same}, partial=0.5)[0] == Rope(10_000.0, LinearScaling(2.0))
    whole = {**linear, **parameters}
    assert read({"rope_scaling": whole, "rope_parameters": parameters}, partial=0.5)[1] == 16


def test_where_the_original_context_stands() -> None:
    """Beside the table it goes first, as in transformers; without any it is max_position_embeddings."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    for fields, expected in (
        ({"rope_scaling": YARN}, 64),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 32}, 32),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 4096),
    ):
        scaling = read(fields)[0].scaling
        assert isinstance(scaling, YarnScaling)
        assert scaling.original_max_position_embeddings == expected
        embedding = LlamaRotaryEmbedding(LlamaConfig(**HEAD, **json.loads(json.dumps(fields))))
        np.testing.assert_allclose(read(fields)[0].frequencies(64), embedding.inv_freq.numpy(), rtol=5e-7)


def test_yarn_reaches_further() -> None:
    """As Qwen3's card has it: rope_scaling is added, and max_position_embeddings stays, which bounds a context here."""
    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = {"vocab_size": 384, **tiny.QWEN3, "max_position_embeddings": 40_960, "rope_theta": 1e6}
    assert qwen3.parse({**config, "rope_parameters": None}).max_position == 40_960
    assert qwen3.parse({**config, "rope_parameters": None, "rope_scaling": card}).max_position == 131_072
    assert Rope(1e6, YarnScaling(2.0, 64, 1.0)).reach(4096) == 4096


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type is ['yarn']"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {**YARN, "factor": -4.0}}, "factor is -4.0"),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor is 0"),
        ({"rope_scaling": {**YARN, "beta_fast": "32"}}, "beta_fast is '32'"),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": -1.0}}, "mscale_all_dim is -1.0"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate is 1"),
        ({"rope_scaling": {**YARN, "rope_theta": 1.0}}, "rope_theta is 1.0, expected more than 1 with YaRN"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention is {"),
    ],
)
def test_refused_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(fields, named)


@pytest.mark.parametrize(
    "numbers",
    [
        {"factor": 1e308},
        {"factor": 10**400},
        {"factor": 1e-308},
        {"attention_factor": 1e308},
        {"beta_fast": 1e308},
        {"beta_slow": 1e-308},
        {"rope_theta": 1e-308, "rope_type": "default"},
        {"rope_type": "linear", "factor": 1e-308},
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(numbers: dict[str, Any]) -> None:
    scaling = {**YARN, "rope_theta": 10_000.0, **numbers}
    config = {"model_type": "llama", "vocab_size": 384, **tiny.LLAMA, "rope_scaling": scaling}
    family = family_of(config)
    with pytest.raises(FamilyError, match=r"^config\.json"):
        family.plan(family.parse(config))
