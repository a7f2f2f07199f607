"""plan.json of an artifact: a model's plan for weights that are packed for shaders.

The file of weights has the plan's parameters (ssmd/model/plan.py), some of them in another form:
    qkv                       q, k and v as one matrix, ((H + 2 G) D, hidden), with qkv_bias.
    conv, A                   channels first: (C, width), Mamba-1's A (C, N).
    norm1, norm2              also if the plan's name is `norm`, in a layer with only one norm.
    rope_cos, rope_sin        (context, R / 2), if a layer rotates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from ssmd.model.plan import Attention, Mamba1, Mixer, Plan, PlanError, Shape, ShortConv, Size
from ssmd.runtime.protocol import ProgramError

FILE = "plan.json"
MAX_VALUES = 2**31 - 1  # of a tensor: indices of shaders are u32, and so are their products
MAX_STATES = MAX_HEAD_DIM = 1024  # which a workgroup holds
MAX_WIDTH = 9


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
        if self.experts:
            raise ValueError("there are experts, which no shader computes")
        for m in self.mixers:
            if isinstance(m, Attention):
                if m.head_dim > MAX_HEAD_DIM:
                    raise ValueError(f"head_dim {m.head_dim} is more than {MAX_HEAD_DIM}")
                if m.head_dim % 2:
                    raise ValueError(f"head_dim {m.head_dim} is odd; runtime wgpu keeps keys and values in pairs")
                continue
            if m.width > MAX_WIDTH:
                raise ValueError(f"width {m.width} of a convolution is more than {MAX_WIDTH}")
            if not isinstance(m, ShortConv) and m.states > MAX_STATES:
                raise ValueError(f"states {m.states} are more than {MAX_STATES}")
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
            if layer.mlp is not None:
                made[to + "norm2"] = (self.hidden,)
                made |= {to + name: shape for name, shape in layer.mlp.parameters(self.hidden)}
        for name, shape in made.items():
            if math.prod(shape) > MAX_VALUES:
                raise ProgramError(f"{name} {list(shape)} has more values than a shader can count")
        return made

    @classmethod
    def open(cls, file: Path) -> Self:
        """Read plan.json. Raises ProgramError with the field that is wrong."""
        try:
            return super().open(file)
        except PlanError as err:
            raise ProgramError(str(err)) from err


def packed_mixer(mixer: Mixer, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Name a mixer's parameters with their shapes in the file of weights."""
    if isinstance(mixer, Attention):
        yield "qkv", (mixer.rows, hidden)
        if mixer.bias:
            yield "qkv_bias", (mixer.rows,)
    for name, shape in mixer.parameters(hidden):
        if isinstance(mixer, Attention) and name.removesuffix("_bias") in ("q", "k", "v"):
            continue
        if name == "conv" and not isinstance(mixer, Attention):
            yield name, (shape[-1], mixer.width)
        elif name == "A" and isinstance(mixer, Mamba1):
            yield name, shape[::-1]
        else:
            yield name, shape
