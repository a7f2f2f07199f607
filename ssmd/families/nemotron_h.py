"""Nemotron-H, dense (arXiv:2504.03624; transformers' `NemotronHForCausalLM`).

Every layer is a Mamba-2 mixer, attention without positions, or an MLP with squared ReLU. Parameters as in
ssmd/model/plan.py; the factor 1/sqrt(head_dim) is in q.

dt is clamped to `time_step_limit`, as in the published model. transformers 5.23 uses `time_step_min` instead when it
reads several tokens at once, and no limit when it reads one (its pull request 48989).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families.attention import attention, without_rope
from ssmd.families.decoder import decoder
from ssmd.families.fields import Fields
from ssmd.families.layers import PartKind, part_kinds
from ssmd.families.mixer import Names, mamba2, mamba2_of
from ssmd.families.mlp import mlp
from ssmd.families.weights import Binding, tensor
from ssmd.model.plan import Attention, Layer, Mamba2, Mlp, Plan

_SIZES = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "expand")
NAMES = Names(*_SIZES, "use_conv_bias", "use_bias", default_d_state=128, default_groups=8)
OLDER = {  # names that transformers takes first
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
ONLY = {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "attention_bias": False, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Config:
    vocabulary: int
    hidden: int
    layers: tuple[Mamba2 | Attention | Mlp, ...]
    eps: float
    max_position: int
    tied: bool = False  # it has no other

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Config:
        """Read config.json. Raises FamilyError naming the field."""
        older = {name: config[old] for old, name in OLDER.items() if config.get(old) is not None}
        f = Fields(config, {"head_dim": 128}, fixed=older)
        for name, only in ONLY.items():
            f.only(name, only, only)
        eps = f.number("layer_norm_epsilon", 1e-5)
        inner = f.size("mamba_num_heads", 128) * f.size("mamba_head_dim", 64)
        kinds: dict[PartKind, Mamba2 | Attention | Mlp] = {
            "mamba": mamba2_of(f, eps, NAMES, inner=("mamba_num_heads * mamba_head_dim", inner)),
            "attention": without_rope(f, kv_heads=8),
            "mlp": Mlp(intermediate=f.size("intermediate_size"), bias=f.flag("mlp_bias", False), activation="relu2"),
        }
        layers = tuple(kinds[kind] for kind in part_kinds(f))
        return Config(f.size("vocab_size"), f.size("hidden_size"), layers, eps, f.size("max_position_embeddings", 4096))


def plan(config: Config) -> Plan:
    """Describe the model."""
    c = config
    layers = [Layer(mixers=(), mlp=p) if isinstance(p, Mlp) else Layer(mixers=(p,), mlp=None) for p in c.layers]
    return Plan(
        hidden=c.hidden, vocabulary=c.vocabulary, eps=c.eps, embedding_scale=1.0, tied=c.tied, layers=tuple(layers)
    )


def bindings(config: Config) -> dict[str, Binding]:
    """Bind every parameter to a source's tensors."""
    c = config
    embedding = tensor("backbone.embeddings.weight", c.vocabulary, c.hidden)
    norm = tensor("backbone.norm_f.weight", c.hidden)
    return decoder(c, embedding, norm, (_layer(c, part, f"backbone.layers.{i}.") for i, part in enumerate(c.layers)))


def _layer(c: Config, part: Mamba2 | Attention | Mlp, source: str) -> dict[str, Binding]:
    made = {"norm": tensor(source + "norm.weight", c.hidden)}
    if isinstance(part, Mlp):
        return made | mlp(part, c.hidden, source + "mixer.")
    if isinstance(part, Attention):
        return made | attention(part, c.hidden, source + "mixer.", q=part.head_dim**-0.5)
    return made | mamba2(part, c.hidden, source + "mixer.")
