"""SwiGLU (arXiv:2002.05202): its bindings. Parameters: gate_up, whose first rows are the gate's, down, and *_bias."""

from __future__ import annotations

from ssmd.families.weights import Binding, stacked, tensor


def swiglu(
    source: str, hidden: int, intermediate: int, bias: bool, *, gate: float = 1.0, down: float = 1.0
) -> dict[str, Binding]:
    """From the tensors `source`{gate,up,down}_proj; factors on what gate and down give."""
    parts = ((source + "gate_proj.", gate), (source + "up_proj.", 1.0))
    made = {
        "gate_up": stacked(*(tensor(p + "weight", intermediate, hidden, scale=s) for p, s in parts)),
        "down": tensor(source + "down_proj.weight", hidden, intermediate, scale=down),
    }
    if bias:
        made["gate_up_bias"] = stacked(*(tensor(p + "bias", intermediate, scale=s) for p, s in parts))
        made["down_bias"] = tensor(source + "down_proj.bias", hidden, scale=down)
    return made
