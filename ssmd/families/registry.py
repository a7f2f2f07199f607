"""The families there are, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.families import (
    bamba,
    falcon_h1,
    falcon_mamba,
    granitemoehybrid,
    lfm2,
    llama,
    mamba,
    mamba2,
    qwen3,
)
from ssmd.families.fields import FamilyError
from ssmd.families.weights import Array, Binding, given
from ssmd.model.state import StateSpec


@dataclass(frozen=True)
class Family:
    """What a family knows. A config is the family's own dataclass; all have `vocabulary` and `max_position`."""

    name: str
    parse: Callable[[Mapping[str, Any]], Any]
    state_spec: Callable[[Any, str], StateSpec]
    bindings: Callable[[Any], dict[str, Binding]]
    buckets: tuple[int, ...] = (16, 64, 256)  # prefill lengths in tokens, unless others are asked for

    def tables(self, config: Any, context: int) -> dict[str, Binding]:
        """What a graph for `context` tokens holds beside its parameters and follows from the config alone: where the
        family has RoPE its `rope_cos` and `rope_sin`, (context, R/2)."""
        if getattr(config, "rope", None) is None:
            return {}
        head_dim = config.head_dim if hasattr(config, "head_dim") else config.attention.head_dim

        def table(i: int) -> Array:
            made: Array = config.rope.tables(head_dim, context)[i]
            return made

        return {"rope_cos": given(lambda: table(0)), "rope_sin": given(lambda: table(1))}


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", llama.Config.parse, llama.state_spec, llama.bindings),
        Family(
            "granitemoehybrid",
            granitemoehybrid.Config.parse,
            granitemoehybrid.state_spec,
            granitemoehybrid.bindings,
        ),
        Family("mamba2", mamba2.Config.parse, mamba2.state_spec, mamba2.bindings),
        Family("bamba", bamba.Config.parse, bamba.state_spec, bamba.bindings),
        Family("falcon_h1", falcon_h1.Config.parse, falcon_h1.state_spec, falcon_h1.bindings),
        Family("qwen3", qwen3.parse, llama.state_spec, llama.bindings),
        # Their scan is unrolled: at 256 tokens nothing is gained a token, and a runtime takes half a minute to load it.
        Family("mamba", mamba.Config.parse, mamba.state_spec, mamba.bindings, buckets=(16, 64)),
        Family("falcon_mamba", falcon_mamba.parse, mamba.state_spec, mamba.bindings, buckets=(16, 64)),
        Family("lfm2", lfm2.Config.parse, lfm2.state_spec, lfm2.bindings),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises FamilyError with what is supported."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        experts = isinstance(name, str) and ("moe" in name or "mixtral" in name)
        why = " (a mixture of experts, of which none is)" if experts else ""
        raise FamilyError(f"config.json: model_type is {name!r}{why}; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]
