"""Configs are read or refused by field; states and bindings are those that a config promises."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from conftest import ROOT

from ssmd.families import (
    bamba,
    falcon_h1,
    falcon_mamba,
    granitemoehybrid,
    lfm2,
    lfm2_moe,
    lfm3,
    llama,
    mamba,
    mamba2,
    nemotron_h,
    qwen3,
    unbuilt,
)
from ssmd.families.fields import FamilyError
from ssmd.families.registry import FAMILIES, WITH_EXPERTS, family_of
from ssmd.model.plan import LATER, Plan
from ssmd.model.rope import ProportionalScaling, Rope
from ssmd.model.source import Source, SourceError
from ssmd.refit.install import config_of

LLAMA = {"model_type": "llama", "vocab_size": 384, **tiny.LLAMA}
QWEN3 = {"model_type": "qwen3", "vocab_size": 384, **tiny.QWEN3}
MAMBA = {"model_type": "mamba", "vocab_size": 384, **tiny.MAMBA}
LFM3 = {"model_type": "lfm3", "vocab_size": 384, **tiny.LFM3}
LFM2_MOE = {"model_type": "lfm2_moe", "vocab_size": 384, **tiny.LFM2_MOE}
LFM2 = {"model_type": "lfm2", "vocab_size": 384, **tiny.LFM2}
MAMBA2 = {"model_type": "mamba2", "vocab_size": 384, **tiny.MAMBA2}
BAMBA = {"model_type": "bamba", "vocab_size": 384, **tiny.BAMBA}
FALCON_H1 = {"model_type": "falcon_h1", "vocab_size": 384, **tiny.FALCON_H1}
NEMOTRON_H = {"model_type": "nemotron_h", "vocab_size": 384, **tiny.NEMOTRON_H}
GRANITE = {"model_type": "granitemoehybrid", "vocab_size": 384, **tiny.GRANITE}


def check_refused(
    parse: Callable[[dict[str, Any]], object], config: dict[str, Any], fields: dict[str, Any], named: str
) -> None:
    """Check that a config is read, and with other fields refused by these words."""
    parse(config)
    with pytest.raises(FamilyError) as failure:
        parse({**config, **fields})
    assert named in str(failure.value)


@pytest.mark.parametrize("model_type", [None, "", "gpt2", 7, ["llama"]])
def test_an_unknown_model_type_is_refused_with_the_list(model_type: Any) -> None:
    with pytest.raises(FamilyError, match=r"model_type is .*supported: .*llama, mamba.*"):
        family_of({"model_type": model_type})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "96"}, "hidden_size is '96'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 6 is not a multiple of num_key_value_heads = 4"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "hidden_size = 96"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "rope_theta": 1.0}},
            "rope_type is 'dynamic'; supported: ",
        ),
        ({"rope_parameters": "default"}, "rope_parameters is 'default'"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {**tiny.LLAMA3_ROPE, "low_freq_factor": 5.0}}, "low_freq_factor 5.0"),
    ],
)
def test_llama_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(llama.Config.parse, LLAMA, fields, named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_local_experts": -1}, "num_local_experts is -1, expected a whole number"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, but num_local_experts is 4"),
        ({"num_local_experts": None, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, but num_local_experts is 8"),
        ({"num_local_experts": 4, "intermediate_size": 0}, "intermediate_size is 0"),
        ({"layer_types": ["mamba"]}, "num_hidden_layers = 4"),
        ({"layer_types": ["mamba", "mamba", "attention", "conv"]}, "layer_types has 'conv'"),
        ({"layer_types": ["mamba", "mamba", "attention", ["mamba"]]}, "layer_types has ['mamba']"),
        ({"mamba_n_groups": 5}, "mamba_n_heads = 12 is not a multiple of mamba_n_groups = 5"),
        ({"mamba_d_head": 32}, "mamba_d_head is 32"),
        ({"mamba_n_heads": 7}, "mamba_expand * hidden_size = 192"),
        ({"mamba_d_conv": 1}, "mamba_d_conv is 1"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({"logits_scaling": 0.0}, "logits_scaling is 0.0"),
        ({"embedding_multiplier": "12"}, "embedding_multiplier is '12'"),
        ({"time_step_limit": [1.0]}, "time_step_limit"),
        ({"time_step_limit": [2.0, 1.0]}, "time_step_limit"),
        ({"time_step_limit": ["a", {}]}, "time_step_limit"),
    ],
)
def test_granite_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(granitemoehybrid.Config.parse, GRANITE, fields, named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types is"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "use_sliding_window is true from"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window is true from"),
        ({"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"head_dim": 15}, "head_dim = 15"),
    ],
)
def test_qwen3_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(qwen3.parse, QWEN3, fields, named)


def test_qwen3_beside_llama() -> None:
    without_window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert qwen3.parse({**QWEN3, **without_window}) == qwen3.parse(QWEN3)
    assert qwen3.parse({**QWEN3, "head_dim": None}).attention.head_dim == 128
    assert qwen3.parse(QWEN3).attention.qk_eps == QWEN3["rms_norm_eps"]
    assert llama.Config.parse(LLAMA).attention.qk_eps is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"conv_kernel": 1}, "conv_kernel is 1"),
        ({"state_size": 0}, "state_size is 0"),
        ({"time_step_rank": "all"}, "time_step_rank is 'all'"),
        ({"intermediate_size": -96}, "intermediate_size is -96"),
        ({"expand": 2.5}, "expand is 2.5"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0"),
        ({"mixer_rms_eps": "tiny"}, "mixer_rms_eps is 'tiny'"),
    ],
)
def test_mamba_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(falcon_mamba.parse, MAMBA, fields, named)


def test_sizes_of_mamba() -> None:
    """mamba-130m: 2.8 MB; falcon-mamba-7b, whose `expand` of 16 is not its own: 39.8 MB."""
    small = mamba.Config.parse({"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24})
    assert (small.mixer.inner, small.mixer.rank, small.mixer.states, small.tied) == (1536, 48, 16, True)
    assert mamba.plan(small).spec("float32").nbytes_at(1000) == 24 * 1536 * (16 + 3) * 4 == 2_801_664
    large = {"vocab_size": 65024, "hidden_size": 4096, "num_hidden_layers": 64, "time_step_rank": 256}
    falcon = falcon_mamba.parse({**large, "expand": 16, "intermediate_size": 8192})
    assert mamba.plan(falcon).spec("float32").nbytes_at(0) == 39_845_888
    assert (falcon.mixer.mixer_eps, small.mixer.mixer_eps) == (1e-6, None)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["conv"]}, "num_hidden_layers = 4"),
        ({"layer_types": ["conv", "conv", "mamba", "conv"]}, "layer_types has 'mamba'"),
        ({"layer_types": None}, "full_attn_idxs is None"),
        ({"layer_types": None, "full_attn_idxs": [4]}, "full_attn_idxs is [4]"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1"),
        ({"block_multiple_of": 0}, "block_multiple_of is 0"),
        ({"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier is -1.0"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size = 64"),
        ({"norm_eps": None, "rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
    ],
)
def test_lfm2_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(lfm2.Config.parse, LFM2, fields, named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but num_experts is 8"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok is True"),
        ({"num_dense_layers": 4}, "num_dense_layers is 4, expected a whole number below num_hidden_layers = 4"),
        ({"num_dense_layers": -1}, "num_dense_layers is -1"),
        ({"moe_intermediate_size": "48"}, "moe_intermediate_size is '48'"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0"),
        ({"use_expert_bias": "yes"}, "use_expert_bias is 'yes'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"layer_types": ["conv"]}, "num_hidden_layers = 4"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1"),
    ],
)
def test_lfm2_moe_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(lfm2_moe.parse, LFM2_MOE, fields, named)


def test_sizes_of_lfm2_8b_a1b() -> None:
    """As it is published: 8.3 G weights, of which a token reads 1.6 G; the state is that of a dense LFM2."""
    attention = (2, 6, 10, 14, 18, 21)
    config = {
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if i in attention else "conv" for i in range(24)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    plan = lfm2.plan(lfm2_moe.parse(config))
    assert [layer.experts is None for layer in plan.layers] == [True, True, *[False] * 22]
    sizes = {name: math.prod(shape) for name, shape in plan.parameters().items()}
    assert round(sum(sizes.values()) / 1e8) == 83
    routed = sum(size for name, size in sizes.items() if "_experts_" in name)
    assert round((sum(sizes.values()) - routed * (1 - 4 / 32)) / 1e8) == 16
    assert plan.spec("float16").nbytes_at(1) - plan.spec("float16").nbytes_at(0) == 12_288


def test_lfm2_in_the_older_spelling() -> None:
    """As LFM2-350M is published."""
    old = {
        "vocab_size": 65536,
        "hidden_size": 1024,
        "block_ff_dim": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "tie_embedding": True,
    }
    c = lfm2.Config.parse(old)
    assert (c.intermediate, c.tied, c.rope.theta, c.conv.width) == (4608, True, 1e6, 3)
    assert [i for i, kind in enumerate(c.layers) if kind == "attention"] == old["full_attn_idxs"]
    assert not lfm2.Config.parse({**old, "tie_embedding": False}).tied


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["conv"]}, "num_hidden_layers = 5"),
        (
            {"layer_types": [*["conv"] * 4, "mamba"]},
            "layer_types has 'mamba'; supported: conv, full_attention, sliding",
        ),
        ({"sliding_window": None}, "sliding_window is None, expected at least 2"),
        ({"sliding_window": 1}, "sliding_window is 1, expected at least 2"),
        ({"sliding_window": 24.0}, "sliding_window is 24.0"),
        ({"norm_eps": 0.1, "rms_norm_eps": 0.2}, "norm_eps is 0.1 and rms_norm_eps 0.2: leave one out"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"use_attention_gate": 1}, "use_attention_gate is 1"),
        ({"use_sandwich_norm": "no"}, "use_sandwich_norm is 'no'"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters.full_attention is None, expected an object"),
        ({"rope_parameters": {"full_attention": 5, "sliding_attention": {}}}, "rope_parameters.full_attention is 5"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "longrope"}}},
            "of sliding_attention: rope_parameters.rope_type is 'longrope'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            "rope_parameters.full_attention.partial_rotary_factor is 1.5",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 0.0}}},
            "factor is 0.0",
        ),
    ],
)
def test_lfm3_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(lfm3.Config.parse, LFM3, fields, named)


def test_lfm3_as_it_is_published() -> None:
    """Without lists and tables: the state of LFM3-1.7B is constant but for its six full layers."""
    sizes = {"hidden_size": 2048, "intermediate_size": 7680, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = lfm3.Config.parse({"vocab_size": 128_000, "num_key_value_heads": 4, **sizes})
    assert (config.window, config.conv.width, config.sandwich, config.attention.gate) == (256, 7, True, "heads")
    plan = lfm3.plan(config)
    assert plan.rope == Rope(1e6, ProportionalScaling(32))
    assert (plan.window_rope, plan.rotated, plan.window_rotated) == (Rope(10_000.0), 128, 128)
    spec = plan.spec("float16")
    assert [t.layer for t in spec.tensors if t.kind == "window_key"] == [4, 8, 12, 16, 20]
    assert [t.layer for t in spec.tensors if t.kind == "key"] == [2, 6, 10, 14, 18, 22]
    assert spec.nbytes_at(0) == 5 * 2 * 4 * 255 * 128 * 4 + 13 * 2048 * 6 * 4
    assert spec.nbytes_at(1) - spec.nbytes_at(0) == 12_288
    assert {t.dtype for t in spec.recurrent} == {"float32"}


def test_a_plan_without_windows_has_the_bytes_that_it_had() -> None:
    """An artifact of before holds such a text: with new fields in it, it would be another artifact."""
    written = lfm2.plan(lfm2.Config.parse(LFM2)).model_dump_json()
    assert not any(name in written for name in LATER)
    mine = lfm3.plan(lfm3.Config.parse(LFM3))
    assert Plan.model_validate_json(mine.model_dump_json()) == mine
    assert all(name in mine.model_dump_json() for name in LATER if name != "experts")


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe", "mixtral"])
def test_mixtures_of_experts_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(FamilyError, match=rf"{name}.*whose experts ssmd does not have; .*lfm2_moe; supported: .*llama"):
        family_of({"model_type": name})


UNBUILT_NEEDS = {
    "jamba": "norms of dt, B and C have weights",
    "kimi_linear": "Kimi Delta Attention .* does not have. .* 48 GB in int8 and 29 GB in int4",
    "olmo_hybrid": "gated DeltaNet whose beta reaches 2",
    "plamo2": "Mamba heads with weighted norms",
    "qwen3_5_moe": "256 experts and a shared one .* does not have. .* 35 GB in int8 and 21 GB in int4",
    "qwen3_next": "512 experts and a shared one .* does not have. .* 80 GB in int8 and 48 GB in int4",
    "qwen4_exp": "hyper-connections, tables of n-grams, an indexer",
    "recurrent_gemma": "the RG-LRU recurrence",
    "rwkv7": "the time mixing of RWKV-7",
    "zamba2": "a block of attention that several layers share",
}


@pytest.mark.parametrize("name", [*UNBUILT_NEEDS, "qwen3_5_moe_text"])
def test_an_unbuilt_hybrid_is_refused_by_what_it_needs(name: str) -> None:
    """Each names the absent part, and a model to take that is served."""
    needs = UNBUILT_NEEDS[name.removesuffix("_text")]
    with pytest.raises(FamilyError, match=rf"'{name}': it needs .*{needs}.* Take a model of ") as refusal:
        family_of({"model_type": name})
    assert ", which ssmd does not have. " in str(refusal.value)
    instead = re.search(r"Take a model of (\w+) instead, such as ([\w.-]+/[\w.-]+)$", str(refusal.value))
    assert instead is not None
    assert instead[1] in FAMILIES


def test_unbuilt_hybrids_are_not_supported_ones() -> None:
    assert UNBUILT_NEEDS.keys() == unbuilt.UNBUILT.keys()
    assert not UNBUILT_NEEDS.keys() & FAMILIES.keys()
    assert set(WITH_EXPERTS) <= FAMILIES.keys()
    everyone = [*unbuilt.UNBUILT.values(), unbuilt.NEMOTRON_EXPERTS]
    assert {name for one in everyone for name in one.instead} <= unbuilt.PUBLISHED.keys()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_heads": 7}, "expand * hidden_size = 192 is not a multiple of num_heads = 7"),
        ({"num_heads": 24}, "head_dim is 16, but expand * hidden_size / num_heads is 8"),
        ({"n_groups": 5}, "num_heads = 12 is not a multiple of n_groups = 5"),
        ({"n_groups": None}, "num_heads = 12 is not a multiple of n_groups = 8"),
        ({"state_size": 0}, "state_size is 0"),
        ({"conv_kernel": 1}, "conv_kernel is 1"),
        ({"expand": 1.5}, "expand is 1.5"),
        ({"use_bias": "no"}, "use_bias is 'no'"),
        ({"use_conv_bias": 0}, "use_conv_bias is 0"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rms_norm": False}, "rms_norm is False; only True is supported"),
        ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon is 0.0"),
        ({"time_step_limit": [0.0, "inf"]}, "time_step_limit"),
    ],
)
def test_mamba2_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(mamba2.Config.parse, MAMBA2, fields, named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attn_layer_indices": [4]}, "attn_layer_indices is [4], expected a list of numbers below num_hidden_layers"),
        ({"attn_layer_indices": [-1]}, "attn_layer_indices is [-1]"),
        ({"attn_layer_indices": "2"}, "attn_layer_indices is '2'"),
        ({"attn_layer_indices": [True]}, "attn_layer_indices is [True]"),
        ({"layers_block_type": ["mamba"] * 4}, "attn_layer_indices is [2], but the list of layer types"),
        ({"layer_types": ["mamba", "sliding_attention"] * 2}, "layer_types has 'sliding_attention'"),
        ({"attn_rotary_emb": 16}, "attn_rotary_emb is 16; only 8 is supported"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor 2.0 of head_dim = 16 is 32"),
        ({"rope_parameters": {"partial_rotary_factor": "1"}}, "partial_rotary_factor is '1'"),
        ({"head_dim": 6}, "partial_rotary_factor 0.5 of head_dim = 6 is 3"),
        ({"mamba_d_head": 8}, "mamba_d_head is 8"),
        ({"mlp_bias": "yes"}, "mlp_bias is 'yes'"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 6 is not a multiple of num_key_value_heads = 4"),
    ],
)
def test_bamba_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(bamba.Config.parse, BAMBA, fields, named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mamba_d_ssm": 100}, "mamba_d_ssm = 100 is not a multiple of mamba_n_heads = 8"),
        ({"mamba_d_head": 8}, "mamba_d_head is 8, but mamba_d_ssm / mamba_n_heads is 16"),
        ({"mamba_n_groups": 3}, "mamba_n_heads = 8 is not a multiple of mamba_n_groups = 3"),
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers is [1.0], expected 2 positive numbers"),
        ({"mlp_multipliers": 1.0}, "mlp_multipliers is 1.0"),
        ({"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, float("inf")]}, "ssm_multipliers is"),
        ({"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, True]}, "ssm_multipliers is"),
        ({"ssm_in_multiplier": -1.0}, "ssm_in_multiplier is -1.0"),
        ({"lm_head_multiplier": "1"}, "lm_head_multiplier is '1'"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"mamba_rms_norm": 1}, "mamba_rms_norm is 1"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": "no"}, "mamba_norm_before_gate is 'no'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'"),
        ({"projectors_bias": 0}, "projectors_bias is 0"),
    ],
)
def test_falcon_h1_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(falcon_h1.Config.parse, FALCON_H1, fields, named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layers_block_type": ["mamba", "moe"]}, "layers_block_type has 'moe': it needs experts with squared ReLU"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M-E"},
            "30 GB in int8 and 18 GB in int4. Take a model of nemotron_h instead, such as Nemotron-3-Nano-4B, which",
        ),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M?"},
            "hybrid_override_pattern has '?'; supported: M, *, -",
        ),
        ({"layers_block_type": ["mamba", ["mlp"]]}, "layers_block_type has ['mlp']; supported: mamba, "),
        ({"layers_block_type": None}, "layers_block_type is None, expected the kinds of all layers"),
        ({"layers_block_type": "M-*"}, "layers_block_type is 'M-*', expected the kinds of all layers"),
        ({"num_hidden_layers": 4}, "expected the kinds of num_hidden_layers = 4 layers"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; only 'relu2' is supported"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"n_groups": 5}, "mamba_num_heads = 12 is not a multiple of n_groups = 5"),
        ({"time_step_limit": [1.0, 0.5]}, "time_step_limit is [1.0, 0.5]"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_nemotron_h_refuses_by_field(fields: dict[str, Any], named: str) -> None:
    check_refused(nemotron_h.Config.parse, NEMOTRON_H, fields, named)


def test_nemotron_h_by_its_pattern() -> None:
    """As it is published: a letter for each layer, and their number."""
    old = {**NEMOTRON_H, "layers_block_type": None, "hybrid_override_pattern": "M-*-M", "num_hidden_layers": 5}
    assert nemotron_h.Config.parse(old) == nemotron_h.Config.parse(NEMOTRON_H)
    plan = nemotron_h.plan(nemotron_h.Config.parse(old))
    assert [t.name for t in plan.spec("float16").tensors] == ["conv_0", "ssm_0", "key_2", "value_2", "conv_4", "ssm_4"]
    assert plan.rotated == 0


def test_a_field_that_is_absent_is_not_one_that_is_null() -> None:
    """In transformers its default is a number, null something else."""

    def without(config: dict[str, Any], name: str) -> dict[str, Any]:
        return {k: v for k, v in config.items() if k != name}

    heads = {"num_attention_heads": 24, "head_dim": 4}
    for parse, config in ((bamba.Config.parse, {**BAMBA, **heads}), (falcon_h1.Config.parse, {**FALCON_H1, **heads})):
        assert parse(without(config, "num_key_value_heads")).attention.kv_heads == 8
        assert parse({**config, "num_key_value_heads": None}).attention.kv_heads == 24
    assert falcon_h1.Config.parse(without(FALCON_H1, "mamba_d_ssm")).mixer.inner == 1024
    assert falcon_h1.Config.parse({**FALCON_H1, "mamba_d_ssm": None}).mixer.inner == 2 * 96


def test_bamba_by_lists_of_layers() -> None:
    kinds = ["mamba", "mamba", "attention", "mamba"]
    for fields in ({"layers_block_type": kinds}, {"attn_layer_indices": None, "layers_block_type": kinds}):
        assert bamba.Config.parse({**BAMBA, **fields}) == bamba.Config.parse(BAMBA)
    assert bamba.Config.parse({**BAMBA, "attn_layer_indices": []}).layers == ("mamba",) * 4


def test_layer_kinds_in_every_spelling() -> None:
    spellings: list[dict[str, Any]] = [
        {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
        {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
        {"layer_types": None, "layers_block_type": ["mamba", "mamba", "attention", "mamba"]},
    ]
    assert len({granitemoehybrid.Config.parse({**GRANITE, **s}).layers for s in spellings}) == 1
    assert granitemoehybrid.Config.parse({**GRANITE, "layer_types": None}).layers == ("mamba",) * 4


def test_rope_in_both_spellings() -> None:
    scaling = {k: v for k, v in tiny.LLAMA3_ROPE.items() if k != "rope_theta"}
    old = {**LLAMA, "rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": scaling}
    new = {**LLAMA, "rope_parameters": tiny.LLAMA3_ROPE}
    assert llama.Config.parse(old) == llama.Config.parse(new)


def test_an_unlimited_time_step_in_every_spelling() -> None:
    for value in (None, [0.0, float("inf")], [0, {"__float__": "Infinity"}]):
        mixer = granitemoehybrid.Config.parse({**GRANITE, "time_step_limit": value}).mixer
        assert (mixer.dt_low, mixer.dt_high) == (0, None)


def test_state_of_granite_350m_weighs_what_it_should() -> None:
    config = {
        **GRANITE,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
    }
    spec = granitemoehybrid.plan(granitemoehybrid.Config.parse(config)).spec("float16")
    assert spec.nbytes_at(0) == 28 * (48 * 32 * 128 + 3 * (48 * 32 + 256)) * 4
    assert spec.nbytes_at(1) - spec.nbytes_at(0) == 4096
    assert [t.name for t in spec.tensors][:2] == ["conv_0", "ssm_0"]
    assert [t.layer for t in spec.rows] == [10, 10, 13, 13, 17, 17, 27, 27]
    assert {t.dtype for t in spec.recurrent} == {"float32"}


def published(**fields: Any) -> dict[str, Any]:
    """Qwen3.5's config.json as it is published: the text model in an object of its own, beside a vision tower."""
    text = {"model_type": "qwen3_5_text", "vocab_size": 384, **tiny.QWEN3_5, "mtp_num_hidden_layers": 1}
    del text["tie_word_embeddings"]
    vision = {"model_type": "qwen3_5_vision", "depth": 2}
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": vision, "image_token_id": 7, **fields}


def test_qwen3_5_is_read_from_its_text_config() -> None:
    nested, flat = FAMILIES["qwen3_5"], FAMILIES["qwen3_5_text"]
    text = published()["text_config"]
    assert family_of(published()) is nested
    assert replace(nested.parse(published()), prefix="model.") == flat.parse(text)
    names = nested.bindings(nested.parse(published()))["embedding"].reads
    assert list(names) == ["model.language_model.embed_tokens.weight"]
    assert nested.unread(published()) == flat.unread(text) == ()
    assert nested.unread(published(new=1, text_config={**text, "newer": 2})) == ("new", "newer")


def test_qwen3_5_0_8b_has_the_published_shapes() -> None:
    """Of tensors as public code lists them, and a state that grows by 12,288 bytes a token."""
    config = json.loads((ROOT / "scripts" / "models" / "qwen3.5-0.8b.json").read_text())["config"]
    family = family_of(config)
    parsed = family.parse(config)
    assert family.unread(config) == ()
    read = {n: shape for binding in family.bindings(parsed).values() for n, shape in binding.reads.items()}
    layers = "model.language_model.layers."
    linear, full = f"{layers}0.linear_attn.", f"{layers}3.self_attn."
    expected = {
        "model.language_model.embed_tokens.weight": (248_320, 1024),
        layers + "23.mlp.down_proj.weight": (1024, 3584),
        **{f"{linear}in_proj_{n}.weight": (rows, 1024) for n, rows in (("qkv", 6144), ("z", 2048), ("b", 16))},
        linear + "conv1d.weight": (6144, 1, 4),
        linear + "out_proj.weight": (1024, 2048),
        **{f"{full}{n}_proj.weight": (rows, 1024) for n, rows in (("q", 4096), ("k", 512), ("v", 512))},
    }
    assert {name: read[name] for name in expected} == expected
    spec = family.plan(parsed).spec("float16")
    assert [t.layer for t in spec.tensors if t.kind == "key"] == [3, 7, 11, 15, 19, 23]
    assert spec.nbytes_at(0) == 18 * (16 * 128 * 128 + 6144 * 3) * 4
    assert spec.nbytes_at(1) - spec.nbytes_at(0) == 12_288


@pytest.mark.parametrize(
    ("beside", "within", "tied"),
    [(None, None, False), (None, True, True), (True, None, True), (True, False, True), (False, True, False)],
)
def test_qwen3_5_is_tied_as_said_outside_first(beside: bool | None, within: bool | None, tied: bool) -> None:
    text = {**published()["text_config"], "tie_word_embeddings": within}
    config = published(text_config=text, tie_word_embeddings=beside)
    assert FAMILIES["qwen3_5"].parse(config).tied == tied


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text_config": None}, "text_config is None"),
        ({"text_config": "qwen"}, "text_config is 'qwen'"),
        ({"text_config": {"model_type": "qwen3_5_moe_text"}}, "text_config is 'qwen3_5_moe_text'"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "text_config: .*quantization_config"),
        ({"text_config": {**tiny.QWEN3_5, "vocab_size": 9, "text_config": {}}}, "text_config is {}"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
    ],
)
def test_qwen3_5_refuses_what_stands_beside(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(FamilyError, match=named):
        FAMILIES["qwen3_5"].parse(published(**fields))


def test_qwen3_5_layers_without_a_list() -> None:
    text = {"model_type": "qwen3_5_text", "vocab_size": 384, **tiny.QWEN3_5, "num_hidden_layers": 5}
    layers = [FAMILIES["qwen3_5_text"].parse({**text, **more}).layers for more in ({}, {"full_attention_interval": 2})]
    assert [[i for i, kind in enumerate(found) if kind == "attention"] for found in layers] == [[3], [1, 3]]


def test_a_vision_tower_and_mtp_are_left_out_by_name(tmp_path: Path) -> None:
    """The checkpoint as it is published is the same model, and each part that it loses is named."""
    from safetensors.numpy import load_file, save_file

    flat = Source.open(tiny.write_source(tmp_path / "flat", "qwen3.5"))
    tensors = load_file(tmp_path / "flat" / "model.safetensors")
    more = {n: np.ones((2, 2), np.float32) for n in ("model.visual.blocks.0.w", "model.visual.b", "mtp.fc.weight")}
    folder = tmp_path / "published"
    shutil.copytree(tmp_path / "flat", folder)
    renamed = {n.replace("model.", "model.language_model."): t for n, t in tensors.items()}
    save_file({**renamed, **more}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published(text_config=dict(flat.config))))
    said: list[str] = []
    source, family = Source.open(folder), FAMILIES["qwen3_5"]
    bound = family.bindings(config_of(family, source, said.append))
    assert said == [
        "left out: the vision tower, 2 tensors named model.visual.*",
        "left out: the head that predicts further tokens (MTP), 1 tensor named mtp.*",
    ]
    other = FAMILIES["qwen3_5_text"]
    for name, binding in other.bindings(other.parse(flat.config)).items():
        np.testing.assert_array_equal(bound[name](source), binding(flat))


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_bindings_read_every_tensor_and_no_other(tmp_path: Path, variant: str) -> None:
    source = Source.open(tiny.write_source(tmp_path, variant))
    family = FAMILIES[source.config["model_type"]]
    bindings = family.bindings(family.parse(source.config))
    read: set[str] = set()

    class Recorded(Source):
        def tensor(self, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None) -> Any:
            read.add(name)
            return super().tensor(name, shape, first, last)

    recorded = Recorded(**{f: getattr(source, f) for f in source.__dataclass_fields__})
    arrays = {name: binding(recorded) for name, binding in bindings.items()}
    assert read == set(source.tensors)
    assert all(a.dtype == np.float32 and a.flags.c_contiguous for a in arrays.values())
    assert all(name.isidentifier() for name in arrays)
    assert {name: a.shape for name, a in arrays.items()} == family.plan(family.parse(source.config)).parameters()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "rms_norm_eps": 2.0}, "eps: Input should be less than or equal to 1"),
        ({**QWEN3, "rms_norm_eps": 2.0}, "eps: Input should be less than or equal to 1"),
        ({**MAMBA2, "expand": 1 << 20, "num_heads": 1, "head_dim": "auto"}, "head_dim: Input should be less than"),
        ({**NEMOTRON_H, "layers_block_type": ["mlp"] * 2}, "a state specification needs at least one tensor"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_part(config: dict[str, Any], said: str) -> None:
    family = family_of(config)
    with pytest.raises(FamilyError, match=f"makes no model that can be: .*{said}"):
        family.plan(family.parse(config))


@pytest.mark.parametrize(
    "config",
    [
        {**MAMBA, "num_hidden_layers": 2000},
        {**LFM3, "num_hidden_layers": 2000, "layer_types": None},
        {**NEMOTRON_H, "num_hidden_layers": None, "layers_block_type": ["mamba"] * 2000},
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 2000}},
    ],
)
def test_too_many_layers_are_refused_before_any_is_made(config: dict[str, Any]) -> None:
    """A config.json of a hub names millions in a few bytes, and each layer takes time and memory."""
    with pytest.raises(FamilyError, match="num_hidden_layers makes 2000 layers, expected at most 1024"):
        family_of(config).parse(config)


def test_a_config_that_does_not_fit_its_weights_names_the_tensor(tmp_path: Path) -> None:
    folder = tiny.write_source(tmp_path, "granite")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mamba_d_state": 16}))
    source = Source.open(folder)
    family = family_of(source.config)
    bindings = family.bindings(family.parse(source.config))
    with pytest.raises(SourceError, match=r"in_proj\.weight"):
        bindings["layer0_in"](source)


SUPPORTED: dict[str, dict[str, Any]] = {  # of which transformers' own defaults are not
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"]},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(name: str) -> None:
    """Field by field: without it, the config is refused, or means the same."""
    transformers, family = pytest.importorskip("transformers"), FAMILIES[name]
    whole = transformers.AutoConfig.for_model(name, **SUPPORTED.get(name, {})).to_dict()
    right, same = family.parse(whole), 0
    for field in whole:
        try:
            found = family.parse({name: value for name, value in whole.items() if name != field})
        except FamilyError:
            continue
        assert found == right, f"without {field}"
        same += 1
    assert same > 10
