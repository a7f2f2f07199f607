"""Mixtures of experts: their bindings. Parameters: router, router_bias, experts_gate, experts_up, experts_down."""

from __future__ import annotations

from collections.abc import Callable

from ssmd.families.fields import FamilyError, Fields
from ssmd.families.weights import Array, Binding, mapped, stacked, tensor
from ssmd.model.plan import Experts


def chosen_of(f: Fields, count: int, count_name: str, default: int) -> int:
    """Read the number of experts that each token takes, `num_experts_per_tok`. Raises FamilyError."""
    chosen = f.size("num_experts_per_tok", default)
    if chosen > count:
        raise FamilyError(f"config.json: num_experts_per_tok is {chosen}, but {count_name} is {count}")
    return chosen


def stacks(m: Experts, hidden: int, source: str, *, down: float = 1.0) -> dict[str, Binding]:
    """Bind experts to two tensors that have all of them: `source`input_linear, gate before up, and output_linear.

    down: factor on their outputs.
    """
    both = tensor(source + "input_linear.weight", m.count, 2 * m.intermediate, hidden)

    def half(first: int) -> Callable[[Array], Array]:
        return lambda rows: rows[:, first : first + m.intermediate]  # (n, 2 J, hidden) -> (n, J, hidden)

    return {
        "experts_gate": mapped(half(0), both, by_rows=True),
        "experts_up": mapped(half(m.intermediate), both, by_rows=True),
        "experts_down": tensor(source + "output_linear.weight", m.count, hidden, m.intermediate, scale=down),
    }


def singly(m: Experts, hidden: int, source: str, *, down: float = 1.0) -> dict[str, Binding]:
    """Bind experts to three matrices of each: `source`N.w1 (gate), w3 (up) and w2 (down). down: factor on w2."""

    def every(name: str, rows: int, columns: int, scale: float = 1.0) -> Binding:
        one = (tensor(f"{source}{n}.{name}.weight", rows, columns, scale=scale) for n in range(m.count))
        return stacked(*(mapped(lambda matrix: matrix[None], matrix) for matrix in one))

    return {
        "experts_gate": every("w1", m.intermediate, hidden),
        "experts_up": every("w3", m.intermediate, hidden),
        "experts_down": every("w2", hidden, m.intermediate, down),
    }
