"""plan.json of an artifact: a model's plan for weights that are packed for shaders.

The file of weights has the plan's parameters (ssmd/model/plan.py), some of them in another form:
    qkv                       q, k and v as one matrix, ((H + 2 G) D, hidden), with qkv_bias; then H D rows of `gate`,
                              if the output has one.
    conv, A                   channels first: (C, width), Mamba-1's A (C, N).
    norm1, norm2              also if the plan's name is `norm`, in a layer with only one norm.
    rope_cos, rope_sin        (context, R / 2), if a layer rotates.
    experts_gate_up           (E 2 J, hidden): of one expert after the other the rows of gate, then those of up.
    experts_down              (E hidden, J): the rows of one expert after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from ssmd.model.plan import (
    Attention,
    Experts,
    GatedDeltaNet,
    Mamba1,
    Mixer,
    Mlp,
    Plan,
    PlanError,
    Shape,
    ShortConv,
    Size,
)
from ssmd.runtime.protocol import ProgramError

FILE = "plan.json"
MAX_VALUES = 2**31 - 1  # of a tensor: indices of shaders are u32, and so are their products
MAX_STATES = MAX_HEAD_DIM = 1024  # which a workgroup holds
MAX_DELTA = 256  # values of a key or a value of gated DeltaNet: a workgroup has a thread for each
MAX_WIDTH = 9
GATES: tuple[str, ...] = ("none", "values")  # of attention's output
# Every field of a plan that shaders are made by. A plan that sets another one is refused: it has a newer kind of layer.
_READ = {
    *("format", "hidden", "vocabulary", "eps", "embedding_scale", "tied", "rope", "layers", "context", "mixers", "mlp"),
    *("intermediate", "bias", "activation", "kind", "inner", "states", "rank", "width", "conv_bias", "mixer_eps"),
    *("heads", "head_dim", "groups", "in_bias", "out_bias", "norm", "dt_low", "dt_high", "channels", "kv_heads"),
    *("qk_eps", "rotated", "gate", "key_heads", "key_dim", "value_dim"),
    *("experts", "count", "chosen", "sigmoid", "normed"),
}


class PackedPlan(Plan):
    """A plan, and for how many positions (`context`) RoPE's tables stand in the file of weights."""

    context: Size

    @model_validator(mode="before")
    @classmethod
    def _named(cls, fields: Any) -> Any:
        """Add the kind of RoPE's scaling to older files, which support only one."""
        match fields:
            case {"rope": {"scaling": {"low_freq_factor": _} as scaling} as rope} if "kind" not in scaling:
                return {**fields, "rope": {**rope, "scaling": {**scaling, "kind": "llama3"}}}
        return fields

    @model_validator(mode="after")
    def _fits_shaders(self) -> Self:
        if any(layer.sandwich for layer in self.layers):
            raise ValueError("layers with sandwich norms are not supported by runtime wgpu")
        for m in self.mixers:
            if isinstance(m, Attention):
                if m.window is not None:
                    raise ValueError(f"attention within a window of {m.window} tokens is not supported by runtime wgpu")
                if m.gate not in GATES:
                    raise ValueError(f"attention with gates of {m.gate} is not supported by runtime wgpu")
                if m.head_dim > MAX_HEAD_DIM:
                    raise ValueError(f"head_dim {m.head_dim} is more than {MAX_HEAD_DIM}")
                if m.head_dim % 2:
                    raise ValueError(f"head_dim {m.head_dim} is odd; runtime wgpu keeps keys and values in pairs")
                continue
            if m.width > MAX_WIDTH:
                raise ValueError(f"width {m.width} of a convolution is more than {MAX_WIDTH}")
            if isinstance(m, GatedDeltaNet):
                for name in ("key_dim", "value_dim"):
                    if getattr(m, name) > MAX_DELTA:
                        raise ValueError(f"{name} {getattr(m, name)} of gated DeltaNet is more than {MAX_DELTA}")
            elif not isinstance(m, ShortConv) and m.states > MAX_STATES:
                raise ValueError(f"states {m.states} are more than {MAX_STATES}")
        for part in (self, *self.layers, *self.mixers, *(f for layer in self.layers for f in layer.followers)):
            for name, field in type(part).model_fields.items():
                if name not in _READ and getattr(part, name) != field.default:
                    raise ValueError(f"runtime wgpu has no shader for {name} {getattr(part, name)}")
        return self

    def packed(self) -> dict[str, Shape]:
        """Name everything in the file of weights with its shape. Raises ProgramError if one is larger than a shader can
        count."""
        made: dict[str, Shape] = {"embedding": (self.vocabulary, self.hidden), "norm": (self.hidden,)}
        if not self.tied:
            made["head"] = (self.vocabulary, self.hidden)
        if self.rotated:
            made |= dict.fromkeys(("rope_cos", "rope_sin"), (self.context, self.rotated // 2))
        for i, layer in enumerate(self.layers):
            to = f"layer{i}_"
            if layer.mixers:
                made[to + "norm1"] = (self.hidden,)
            for mixer in layer.mixers:
                made |= {to + name: shape for name, shape in packed_mixer(mixer, self.hidden)}
            if layer.followers:
                made[to + "norm2"] = (self.hidden,)
            for part in layer.followers:
                made |= {to + name: shape for name, shape in packed_follower(part, self.hidden)}
        for name, shape in made.items():
            if math.prod(shape) > MAX_VALUES:
                raise ProgramError(f"{name} {list(shape)} has more values than a shader can count")
        return made

    def expert_rows(self) -> dict[str, int]:
        """Name the matrices that hold several experts, with the rows of one."""
        made = {}
        for i, layer in enumerate(self.layers):
            if layer.experts is not None:
                made[f"layer{i}_experts_gate_up"] = 2 * layer.experts.intermediate
                made[f"layer{i}_experts_down"] = self.hidden
        return made

    @classmethod
    def open(cls, file: Path) -> Self:
        """Read plan.json. Raises ProgramError with the field that is wrong."""
        try:
            return super().open(file)
        except PlanError as err:
            raise ProgramError(str(err)) from err


def attention_rows(mixer: Attention) -> tuple[tuple[str, ...], int]:
    """Name the matrices that are one as `qkv`, in order, and count their rows."""
    if mixer.gate == "none":
        return ("q", "k", "v"), mixer.rows
    return ("q", "k", "v", "gate"), mixer.rows + mixer.heads * mixer.head_dim


def packed_follower(part: Mlp | Experts, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Name the parameters of an MLP or of experts with their shapes in the file of weights."""
    if isinstance(part, Mlp):
        yield from part.parameters(hidden)
        return
    yield from ((name, shape) for name, shape in part.parameters(hidden) if len(shape) < 3)
    yield "experts_gate_up", (part.count * 2 * part.intermediate, hidden)
    yield "experts_down", (part.count * hidden, part.intermediate)


def packed_mixer(mixer: Mixer, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Name a mixer's parameters with their shapes in the file of weights."""
    if isinstance(mixer, Attention):
        parts, rows = attention_rows(mixer)
        yield "qkv", (rows, hidden)
        if mixer.bias:
            yield "qkv_bias", (rows,)
    for name, shape in mixer.parameters(hidden):
        if isinstance(mixer, Attention) and name.removesuffix("_bias") in parts:
            continue
        if name == "conv" and not isinstance(mixer, Attention):
            yield name, (shape[-1], mixer.width)
        elif name == "A" and isinstance(mixer, Mamba1):
            yield name, shape[::-1]
        else:
            yield name, shape
