"""The kinds of a hybrid model's layers (recurrent, attention or MLP): a config.json's lists, in every spelling."""

from __future__ import annotations

from typing import Literal

from ssmd.families.fields import FamilyError, Fields
from ssmd.families.unbuilt import NEMOTRON_EXPERTS

LayerKind = Literal["mamba", "attention"]
SPELLINGS: dict[str, LayerKind] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}

PartKind = Literal["mamba", "attention", "mlp"]
LETTERS: dict[str, PartKind] = {"M": "mamba", "*": "attention", "-": "mlp"}
_EXPERTS = ("moe", "E")


def layer_kinds(f: Fields) -> tuple[LayerKind, ...] | None:
    """Read `layer_types` or the older `layers_block_type`; None if the config has neither. Raises FamilyError."""
    count = f.size("num_hidden_layers")
    name = _list(f)
    types = f.get(name)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count:
        raise FamilyError(f"config.json: {name} is {types!r}, expected a list of num_hidden_layers = {count}")
    for kind in types:
        if not isinstance(kind, str) or kind not in SPELLINGS:
            raise FamilyError(f"config.json: {name} has {kind!r}; supported: {', '.join(SPELLINGS)}")
    return tuple(SPELLINGS[kind] for kind in types)


def _list(f: Fields) -> str:
    """Return the name of the list that is used. Raises FamilyError if there are two different ones."""
    first, second = f.get("layer_types"), f.get("layers_block_type")
    if first is not None and second is not None and first != second:
        raise FamilyError(f"config.json: layer_types is {first!r} and layers_block_type {second!r}: leave one out")
    return "layers_block_type" if first is None else "layer_types"


def full_attention(f: Fields) -> bool:
    """Return True if `layer_types` says that all layers attend to all positions; False if it is absent.

    Raises FamilyError if it names other kinds of layers.
    """
    types, layers = f.get("layer_types"), f.size("num_hidden_layers")
    if types is not None and types != ["full_attention"] * layers:
        raise FamilyError(
            f"config.json: layer_types is {types!r}; only full_attention is supported, in each of num_hidden_layers = "
            f"{layers}"
        )
    return types is not None


def part_kinds(f: Fields) -> tuple[PartKind, ...]:
    """Read the kinds of layers with one part each. Raises FamilyError.

    They are in a list, or in `hybrid_override_pattern`, which has a letter for each.
    """
    known: dict[str, PartKind] = {**SPELLINGS, "mlp": "mlp"}
    name, letters = _list(f), False
    if f.get(name) is None and f.get("hybrid_override_pattern") is not None:
        name, letters, known = "hybrid_override_pattern", True, LETTERS
    said = f.get(name)
    if (
        not isinstance(said, str if letters else list)
        or not said
        or f.size("num_hidden_layers", len(said)) != len(said)
    ):
        count = f.get("num_hidden_layers")
        layers = "all layers" if count is None else f"num_hidden_layers = {count} layers"
        raise FamilyError(f"config.json: {name} is {said!r}, expected the kinds of {layers}")
    for one in said:
        if not isinstance(one, str) or one not in known:
            experts = one in _EXPERTS
            why = f": {NEMOTRON_EXPERTS.why(('nemotron_h',))}" if experts else f"; supported: {', '.join(known)}"
            raise FamilyError(f"config.json: {name} has {one!r}{why}")
    return tuple(known[one] for one in said)
