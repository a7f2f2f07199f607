"""MLPs: their bindings. Parameters: gate_up (the gate's rows come first) or, without a gate, up; down; and *_bias."""

from __future__ import annotations

from ssmd.families.weights import Binding, stacked, tensor
from ssmd.model.plan import Mlp


def mlp(m: Mlp, hidden: int, source: str, *, gate: float = 1.0, down: float = 1.0) -> dict[str, Binding]:
    """Bind an MLP to the tensors `source`{gate,up,down}_proj. gate, down: factors on their outputs."""
    parts = ((source + "gate_proj.", gate), (source + "up_proj.", 1.0))[0 if m.activation == "swiglu" else 1 :]
    name, _ = m.into
    made = {
        name: stacked(*(tensor(p + "weight", m.intermediate, hidden, scale=s) for p, s in parts)),
        "down": tensor(source + "down_proj.weight", hidden, m.intermediate, scale=down),
    }
    if m.bias:
        made[name + "_bias"] = stacked(*(tensor(p + "bias", m.intermediate, scale=s) for p, s in parts))
        made["down_bias"] = tensor(source + "down_proj.bias", hidden, scale=down)
    return made
