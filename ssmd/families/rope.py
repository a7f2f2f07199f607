"""RoPE's settings in a config.json; what it computes stands in ssmd/model/rope.py."""

from __future__ import annotations

from ssmd.families.fields import FamilyError, Fields, divides
from ssmd.model.rope import Llama3Scaling, Rope

SUPPORTED = ("default", "llama3")


def rope_of(fields: Fields, head_dim: int, theta: float = 10_000.0, partial: float | None = None) -> tuple[Rope, int]:
    """Read RoPE from `rope_parameters`, or from the older pair `rope_theta` and `rope_scaling`; with it, how many
    values of a head it rotates.

    `theta` is the family's own, where the config names none. `partial` is the family's default of
    partial_rotary_factor, the share of a head that is rotated; without one, only whole heads are supported. Raises
    FamilyError naming the field.
    """
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    table = fields.get(name)
    if not (table is None or isinstance(table, dict)):
        raise FamilyError(f"config.json: {name} is {table!r}, expected an object")
    inner = Fields(table or {})
    theta = (inner if inner.get("rope_theta") is not None else fields).number("rope_theta", theta)
    kind = inner.get("rope_type") or inner.get("type") or "default"
    if kind not in SUPPORTED:
        raise FamilyError(f"config.json: {name}.rope_type is {kind!r}; supported: {', '.join(SUPPORTED)}")
    if partial is None:
        for place in (fields, inner):
            place.only("partial_rotary_factor", 1.0, 1.0)
        divides(2, head_dim, "2", "head_dim")
        rotated = head_dim
    else:
        rotated = _share(inner.number("partial_rotary_factor", partial), head_dim)
    if kind == "default":
        return Rope(theta), rotated
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if not low < high:
        raise FamilyError(f"config.json: {name}.low_freq_factor {low} is not below high_freq_factor {high}")
    original = inner.size("original_max_position_embeddings")
    return Rope(theta, Llama3Scaling(inner.number("factor"), low, high, original)), rotated


def _share(partial: float, head_dim: int) -> int:
    rotated = int(head_dim * partial)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise FamilyError(
            f"config.json: partial_rotary_factor {partial} of head_dim = {head_dim} is {rotated}, "
            "expected an even number of at most head_dim"
        )
    return rotated
