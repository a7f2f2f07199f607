"""Fields of a config.json that no family reads: those without effect, and those with only one supported value.

Together with the fields that a family reads, they are all that transformers 5.23 reads of its config class, in the
class and in its modeling. tests/authoring/test_configs.py walks both and tries every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssmd.families.fields import FamilyError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that do not change transformers' logits: they are for training, initialization, running, returning and saving.
EVERYWHERE = _names(
    "_name_or_path architectures attention_dropout attn_implementation auto_map bos_token_id chunk_size_feed_forward "
    "dtype eos_token_id experts_implementation gradient_checkpointing id2label initializer_range label2id model_type "
    "name_or_path num_labels output_attentions output_hidden_states pad_token_id problem_type return_dict torch_dtype "
    "transformers_version use_cache"
)
_MAMBA = _names(
    "rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_init_scheme time_step_max time_step_min "
    "time_step_scale use_associative_scan use_mambapy"
)
_EXPERTS = _names("num_experts_per_tok output_router_logits router_aux_loss_coef")  # there are none
_ROPE = _names("rope_parameters rope_scaling rope_theta")  # where positions are not known
NEUTRAL: dict[str, frozenset[str]] = {
    "llama": EVERYWHERE | {"pretraining_tp"},
    "granitemoehybrid": EVERYWHERE | _EXPERTS | _ROPE | {"intermediate_size", "mamba_chunk_size"},  # without experts
    "mamba2": EVERYWHERE | _MAMBA | {"chunk_size", "norm_before_gate", "time_step_rank"},
    "bamba": EVERYWHERE | {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"},
    "falcon_h1": EVERYWHERE | {"mamba_chunk_size", "num_logits_to_keep"},
    "qwen3": EVERYWHERE | {"max_window_layers", "sliding_window"},  # unless use_sliding_window is true
    "mamba": EVERYWHERE | _MAMBA,
    "falcon_mamba": EVERYWHERE | _MAMBA | {"use_falcon_mambapy"},
    "nemotron_h": EVERYWHERE
    | _MAMBA
    | _EXPERTS
    | _names(
        "chunk_size expand hidden_dropout mamba_chunk_size mamba_dt_init_floor mamba_dt_max mamba_dt_min mamba_expand "
        "mamba_proj_bias mamba_ssm_cache_dtype moe_intermediate_size moe_latent_size "
        "moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_hybrid_override_pattern "
        "mtp_layers_block_type n_group n_routed_experts n_shared_experts norm_topk_prob num_logits_to_keep "
        "num_nextn_predict_layers routed_scaling_factor sliding_window topk_group use_mamba_kernels"
    ),
    "lfm2": EVERYWHERE | {"full_attn_idxs"},  # beside layer_types
    "lfm2_moe": EVERYWHERE | {"output_router_logits"},
}
# Fields that transformers' code for all models reads. With another value they make a model that is not supported here.
ONLY: dict[str, Any] = {
    "decoder": None,
    "default_rope_type": None,
    "generator": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "kv_sharing_modes": None,
    "number_of_conv_states": None,
    "per_layer_config": None,
    "text_config": None,
}


def check(config: Mapping[str, Any]) -> None:
    """Raise FamilyError, which names the field, if a config describes a kind of model that is not supported."""
    for name, only in ONLY.items():
        if config.get(name) not in (None, only):
            raise FamilyError(
                f"config.json: {name} is {config[name]!r}; supported: {'none' if only is None else repr(only)}"
            )
