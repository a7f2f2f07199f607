"""RoPE's settings in a config.json; its arithmetic is in ssmd/model/rope.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ssmd.families.fields import FamilyError, Fields, divides
from ssmd.model.rope import LinearScaling, Llama3Scaling, ProportionalScaling, Rope, Scaling, YarnScaling


def rope_of(
    fields: Fields, head_dim: int, max_position: int, theta: float = 10_000.0, partial: float | None = None
) -> tuple[Rope, int]:
    """Read RoPE from `rope_scaling`, else `rope_parameters`, as transformers does. Raises FamilyError naming the field.

    Returns it with the number of values of a head that it rotates. theta: the family's default. partial: the family's
    default of partial_rotary_factor, the share of a head that is rotated; None supports only whole heads.
    """
    name, table = _table(fields, {"rope_theta": theta, "partial_rotary_factor": 1.0 if partial is None else partial})
    inner = Fields(table)
    kind = inner.get("rope_type") or inner.get("type") or "default"
    if not (isinstance(kind, str) and (kind == "default" or kind in SCALINGS)):
        raise FamilyError(
            f"config.json: {name}.rope_type is {kind!r}; supported: {', '.join(sorted(['default', *SCALINGS]))}"
        )
    for key, value in table.items():
        if isinstance(value, dict):
            raise FamilyError(f"config.json: {name}.{key} is {value!r}: only one RoPE for all layers is supported")
    theta = (inner if inner.get("rope_theta") is not None else fields).number("rope_theta", theta)
    if partial is None:
        for place in (fields, inner):
            place.only("partial_rotary_factor", 1.0, 1.0)
        divides(2, head_dim, "2", "head_dim")
        rotated = head_dim
    else:
        rotated = _share(inner.number("partial_rotary_factor", partial), head_dim)
    if kind == "default":
        return Rope(theta), rotated
    if kind == "yarn" and theta <= 1:
        raise FamilyError(f"config.json: rope_theta is {theta}, expected more than 1 with YaRN")
    # Some configs have it beside the table, where it takes precedence.
    place = fields if fields.get("original_max_position_embeddings") is not None else inner
    original = place.size("original_max_position_embeddings", max_position) if kind != "linear" else 0
    return Rope(theta, SCALINGS[kind](name, inner, original, max_position)), rotated


def rope_by_layer_type(
    fields: Fields, kind: str, head_dim: int, max_position: int, defaults: Mapping[str, Any], theta: float
) -> Rope:
    """Read the RoPE of the layers of one type, which is one object of `rope_parameters`. It rotates whole heads.

    kind: of layers, as in `layer_types`. defaults: the family's objects by kind, for a config without any. theta: the
    family's default. Raises FamilyError naming the field.
    """
    divides(2, head_dim, "2", "head_dim")
    fields.only("partial_rotary_factor", 1.0, 1.0)
    name, tables = _table(fields, {})
    table = (tables or defaults).get(kind)
    if not isinstance(table, dict):
        raise FamilyError(f"config.json: {name}.{kind} is {table!r}, expected an object: these layers have rotations")
    inner = Fields(table)
    if (inner.get("rope_type") or inner.get("type")) != "proportional":
        beside = {"rope_theta": fields.get("rope_theta"), "rope_parameters": table}
        try:
            return rope_of(Fields(beside), head_dim, max_position, theta)[0]
        except FamilyError as err:
            raise FamilyError(f"config.json: of {kind}: {str(err).removeprefix('config.json: ')}") from err
    theta = (inner if inner.get("rope_theta") is not None else fields).number("rope_theta", theta)
    share = inner.number("partial_rotary_factor", 1.0)
    pairs = int(share * head_dim // 2)
    if not 0 < pairs <= head_dim // 2:
        raise FamilyError(f"config.json: {name}.{kind}.partial_rotary_factor is {share}, expected at most 1")
    return Rope(theta, ProportionalScaling(pairs, inner.number("factor", 1.0)))


def _table(fields: Fields, defaults: Mapping[str, float]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the object that is used, and the object.

    Raises FamilyError if the other object has a field that this one lacks, and whose value would be ignored.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name) or {}, dict):
            raise FamilyError(f"config.json: {name} is {fields.get(name)!r}, expected an object")
    scaling, parameters = fields.get("rope_scaling") or {}, fields.get("rope_parameters") or {}
    if not scaling:
        return "rope_parameters", parameters
    for key, default in defaults.items():
        beside = fields.get(key) if key == "rope_theta" else None  # transformers' Bamba does not look for the other
        if scaling.get(key) is None and beside is None and parameters.get(key) not in (None, default):
            raise FamilyError(
                f"config.json: rope_scaling is taken before rope_parameters, as transformers does, and {key} = "
                f"{parameters[key]!r} stands in rope_parameters alone: write it into rope_scaling"
            )
    return "rope_scaling", scaling


def _linear(name: str, table: Fields, original: int, max_position: int) -> Scaling:
    return LinearScaling(table.number("factor"))


def _llama3(name: str, table: Fields, original: int, max_position: int) -> Scaling:
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    if not low < high:
        raise FamilyError(f"config.json: {name}.low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3Scaling(table.number("factor"), low, high, original)


def _yarn(name: str, table: Fields, original: int, max_position: int) -> Scaling:
    """Read YaRN's fields. Those that are absent, null or 0 take transformers' defaults."""
    implied = max_position / original if "factor" in table.config else None  # null: the contexts say it
    factor = table.number("factor", implied)
    attention = _attention_factor(factor)
    if table.get("mscale") and table.get("mscale_all_dim"):
        attention = _attention_factor(factor, table.number("mscale"))
        attention /= _attention_factor(factor, table.number("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=table.number("attention_factor", attention),
        beta_fast=table.number("beta_fast") if table.get("beta_fast") else 32.0,
        beta_slow=table.number("beta_slow") if table.get("beta_slow") else 1.0,
        truncate=table.flag("truncate", "truncate" not in table.config),
    )


def _attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's sqrt(1/t) (arXiv:2309.00071, equation 22)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


SCALINGS: dict[str, Callable[[str, Fields, int, int], Scaling]] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def _share(partial: float, head_dim: int) -> int:
    rotated = int(head_dim * partial)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise FamilyError(
            f"config.json: partial_rotary_factor {partial} of head_dim = {head_dim} is {rotated}, "
            "expected an even number of at most head_dim"
        )
    return rotated
