"""LFM2 with experts (transformers' `Lfm2MoeForCausalLM`): after the first, dense layers each MLP is a mixture.

Scores are sigmoids; the bias of an expert counts for the choice alone. The routed scaling factor is in experts_down.
Parameters as in ssmd/families/lfm2.py and ssmd/families/experts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssmd.families import lfm2
from ssmd.families.experts import chosen_of
from ssmd.families.fields import FamilyError, Fields
from ssmd.model.plan import Experts


def parse(config: Mapping[str, Any]) -> lfm2.Config:
    """Read config.json. Raises FamilyError naming the field."""
    f = Fields(config, fixed={"attention_bias": False, "full_attn_idxs": None})
    count = f.size("num_experts", 32)
    experts = Experts(
        count=count,
        chosen=chosen_of(f, count, "num_experts", 4),
        intermediate=f.size("moe_intermediate_size", 1792),
        sigmoid=True,
        bias=f.flag("use_expert_bias", True),
        normed=f.flag("norm_topk_prob", True),
    )
    dense = 2 if f.get("num_dense_layers") is None else f.get("num_dense_layers")
    if type(dense) is not int or not 0 <= dense < f.size("num_hidden_layers"):
        raise FamilyError(
            f"config.json: num_dense_layers is {dense!r}, expected a whole number below num_hidden_layers = "
            f"{f.size('num_hidden_layers')}"
        )
    mixture = lfm2.Mixture(experts, dense, f.number("routed_scaling_factor", 1.0))
    return lfm2.Config.of(f, f.size("intermediate_size", 7168), mixture)
