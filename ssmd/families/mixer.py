"""Mamba-2's mixer (arXiv:2405.21060, section 7): its sizes in a config.json and its bindings.

Parameters, (out, in) where they are matrices:
    in, out        (inner + C + H, hidden), (hidden, inner); rows of `in`: gate, conv input (x, B, C), dt
    conv           (K, 1, C)
    A, D, dt_bias  (H,); A = -exp(A_log)
    gated_norm     (inner,), unless there is no norm
    conv_bias, in_bias, out_bias  where the config has them

Glossary: H heads, P head_dim and N d_state, G groups, K conv width, inner = H P, C = inner + 2 G N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ssmd.families.fields import FamilyError, Fields, divides
from ssmd.families.weights import Array, Binding, mapped, tensor
from ssmd.model.plan import Mamba2

Norm = Literal["after the gate", "before the gate", "none"]


@dataclass(frozen=True)
class Names:
    """The names of the mixer's fields in a family's config.json, and transformers' default sizes without them."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    d_state: str = "mamba_d_state"
    groups: str = "mamba_n_groups"
    d_conv: str = "mamba_d_conv"
    expand: str = "mamba_expand"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"
    default_d_state: int = 256
    default_groups: int = 1


HYBRID = Names()  # the hybrid families agree


def mamba2_of(
    f: Fields,
    eps: float,
    names: Names = HYBRID,
    *,
    inner: tuple[str, int] | None = None,
    norm: Norm = "after the gate",
    out_bias: bool | None = None,
) -> Mamba2:
    """Read the mixer from a config.json. Raises FamilyError naming the field.

    inner: the name and value of the field that decides the inner size; None: expand * hidden_size. out_bias: None: as
    for `in`.
    """
    source, size = inner or (f"{names.expand} * hidden_size", f.size(names.expand, 2) * f.size("hidden_size"))
    heads, groups = f.size(names.heads, 128), f.size(names.groups, names.default_groups)
    head_dim = divides(heads, size, names.heads, source)
    if f.get(names.head_dim) not in (None, "auto") and f.size(names.head_dim) != head_dim:
        raise FamilyError(
            f"config.json: {names.head_dim} is {f.get(names.head_dim)}, but {source} / {names.heads} is {head_dim}"
        )
    divides(groups, heads, names.groups, names.heads)
    width = f.size(names.d_conv, 4)
    if width < 2:
        raise FamilyError(f"config.json: {names.d_conv} is {width}, expected at least 2")
    in_bias = f.flag(names.bias, False)
    low, high = _time_step_limit(f)
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        states=f.size(names.d_state, names.default_d_state),
        groups=groups,
        width=width,
        conv_bias=f.flag(names.conv_bias, True),
        in_bias=in_bias,
        out_bias=in_bias if out_bias is None else out_bias,
        norm=norm,
        eps=eps,
        dt_low=low,
        dt_high=None if math.isinf(high) else high,
    )


def mamba2(
    m: Mamba2, hidden: int, source: str, *, into: float = 1.0, parts: Sequence[float] = (1.0,) * 5, out: float = 1.0
) -> dict[str, Binding]:
    """Bind the mixer's parameters to the tensors `source`in_proj and so on.

    into: factor on the mixer's input, which does not apply to biases. parts: factors on the outputs of `in` (gate, x,
    B, C, dt). out: factor on the mixer's output.
    """
    made = {
        "in": _scaled(m, tensor(source + "in_proj.weight", m.rows, hidden, scale=into), parts),
        "out": tensor(source + "out_proj.weight", hidden, m.inner, scale=out),
        "conv": mapped(lambda w: w.transpose(2, 1, 0), tensor(source + "conv1d.weight", m.channels, 1, m.width)),
        "A": mapped(lambda a: -np.exp(a), tensor(source + "A_log", m.heads)),
        "D": tensor(source + "D", m.heads),
        "dt_bias": tensor(source + "dt_bias", m.heads),
    }
    if m.norm != "none":
        made["gated_norm"] = tensor(source + "norm.weight", m.inner)
    if m.conv_bias:
        made["conv_bias"] = tensor(source + "conv1d.bias", m.channels)
    if m.in_bias:
        made["in_bias"] = _scaled(m, tensor(source + "in_proj.bias", m.rows), parts)
    if m.out_bias:
        made["out_bias"] = tensor(source + "out_proj.bias", hidden, scale=out)
    return made


def _scaled(m: Mamba2, part: Binding, factors: Sequence[float]) -> Binding:
    """Multiply the rows of `in`, or its bias, by the factor of the part that they belong to."""
    if all(f == 1.0 for f in factors):
        return part
    states = m.groups * m.states
    rows = np.repeat(np.array(factors, np.float32), [m.inner, m.inner, states, states, m.heads])

    def scaled(w: Array) -> Array:
        return w * rows.reshape(-1, *[1] * (w.ndim - 1))

    return mapped(scaled, part)


def _time_step_limit(f: Fields) -> tuple[float, float]:
    value = f.get("time_step_limit")
    if value is None:
        return (0.0, math.inf)
    limits = [_float(v) for v in value] if isinstance(value, list) else []
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise FamilyError(f"config.json: time_step_limit is {value!r}, expected two numbers, 0 <= low < high")
    return (limits[0], limits[1])


def _float(value: object) -> float:
    """Return a number, also one that transformers writes as {"__float__": "Infinity"}; nan for anything else."""
    if isinstance(value, dict):
        value = {"Infinity": math.inf}.get(str(value.get("__float__")))
    return math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
