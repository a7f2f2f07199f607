"""Which layers of a hybrid model are recurrent and which attend: the lists of a config.json, in every spelling."""

from __future__ import annotations

from typing import Literal

from ssmd.families.fields import FamilyError, Fields

LayerKind = Literal["mamba", "attention"]
SPELLINGS: dict[str, LayerKind] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


def layer_kinds(f: Fields) -> tuple[LayerKind, ...] | None:
    """From `layer_types` or the older `layers_block_type`; None if the config has neither. Raises FamilyError."""
    count = f.size("num_hidden_layers")
    name = "layer_types" if f.get("layer_types") is not None else "layers_block_type"
    types = f.get(name)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count:
        raise FamilyError(f"config.json: {name} is {types!r}, expected a list of num_hidden_layers = {count}")
    for kind in types:
        if not isinstance(kind, str) or kind not in SPELLINGS:
            raise FamilyError(f"config.json: {name} has {kind!r}; supported: {', '.join(SPELLINGS)}")
    return tuple(SPELLINGS[kind] for kind in types)
