"""A plan: what a model is made of, in the words of the kernels. An artifact holds it as plan.json; all sizes of shaders
and buffers follow from it, and everything in the file of weights must have the shape that it promises.

Parameters, (out, in) where they are matrices, and for each layer i `layer{i}_` +
    norm1, norm2              (hidden,)
    in, out, x, dt            projections of a recurrent mixer, as ssmd/families has them, with *_bias
    conv, conv_bias           (C, width), (C,)
    A, D, dt_bias             Mamba-1: (C, N), (C,), (C,); Mamba-2: (H,)
    gated_norm                (inner,)
    qkv, o                    ((H + 2 G) D, hidden), (hidden, H D), with *_bias; q_norm, k_norm (D,)
    gate_up, down             (2 I, hidden), (hidden, I), with *_bias; gate's rows come first
and embedding, head unless tied, norm; rope_cos and rope_sin, (context, R / 2), where a layer rotates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.runtime.protocol import ProgramError

FILE = "plan.json"
MAX_BYTES = 4 << 20
MAX_VALUES = 2**31 - 1  # of a tensor: indices of shaders are u32, and so are their products

Size = Annotated[int, Field(gt=0, le=1 << 24, strict=True)]
Eps = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Shape = tuple[int, ...]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Mamba1(_Part):
    """`mixer_eps`: of FalconMamba's norms of dt's input, B and C."""

    kind: Literal["mamba1"] = "mamba1"
    inner: Size
    states: Annotated[int, Field(gt=0, le=1024, strict=True)]
    rank: Size
    width: Annotated[int, Field(ge=2, le=9, strict=True)]
    conv_bias: bool
    bias: bool
    mixer_eps: Eps | None

    def state(self, layer: int, dtype: str) -> Iterator[TensorSpec]:
        yield TensorSpec(f"conv_{layer}", "conv", layer, (self.inner, self.width - 1))
        yield TensorSpec(f"ssm_{layer}", "ssm", layer, (self.inner, self.states))

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        yield "in", (2 * self.inner, hidden)
        yield "x", (self.rank + 2 * self.states, self.inner)
        yield "dt", (self.inner, self.rank)
        yield "out", (hidden, self.inner)
        yield "conv", (self.inner, self.width)
        yield "A", (self.inner, self.states)
        yield from ((name, (self.inner,)) for name in ("D", "dt_bias"))
        if self.conv_bias:
            yield "conv_bias", (self.inner,)
        if self.bias:
            yield "in_bias", (2 * self.inner,)
            yield "out_bias", (hidden,)


class Mamba2(_Part):
    """`norm`: of the inner channels, in `groups` parts. dt is clamped to [dt_low, dt_high], where None is no bound."""

    kind: Literal["mamba2"] = "mamba2"
    heads: Size
    head_dim: Size
    states: Annotated[int, Field(gt=0, le=1024, strict=True)]
    groups: Size
    width: Annotated[int, Field(ge=2, le=9, strict=True)]
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm: Literal["none", "before the gate", "after the gate"]
    eps: Eps
    dt_low: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    dt_high: Number | None

    @model_validator(mode="after")
    def _divides(self) -> Mamba2:
        if self.heads % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {self.heads} heads")
        return self

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B, C."""
        return self.inner + 2 * self.groups * self.states

    @property
    def rows(self) -> int:
        """Of `in`: gate, conv input, dt."""
        return self.inner + self.channels + self.heads

    def state(self, layer: int, dtype: str) -> Iterator[TensorSpec]:
        yield TensorSpec(f"conv_{layer}", "conv", layer, (self.channels, self.width - 1))
        yield TensorSpec(f"ssm_{layer}", "ssm", layer, (self.heads, self.head_dim, self.states))

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        yield "in", (self.rows, hidden)
        yield "out", (hidden, self.inner)
        yield "conv", (self.channels, self.width)
        yield from ((name, (self.heads,)) for name in ("A", "D", "dt_bias"))
        if self.norm != "none":
            yield "gated_norm", (self.inner,)
        if self.conv_bias:
            yield "conv_bias", (self.channels,)
        if self.in_bias:
            yield "in_bias", (self.rows,)
        if self.out_bias:
            yield "out_bias", (hidden,)


class ShortConv(_Part):
    """LFM2's: rows of `in` are B, gate, x."""

    kind: Literal["short_conv"] = "short_conv"
    channels: Size
    width: Annotated[int, Field(ge=2, le=9, strict=True)]
    bias: bool

    def state(self, layer: int, dtype: str) -> Iterator[TensorSpec]:
        yield TensorSpec(f"conv_{layer}", "conv", layer, (self.channels, self.width - 1))

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        yield "in", (3 * self.channels, hidden)
        yield "out", (hidden, self.channels)
        yield "conv", (self.channels, self.width)
        if self.bias:
            yield "in_bias", (3 * self.channels,)
            yield "out_bias", (hidden,)
            yield "conv_bias", (self.channels,)


class Attention(_Part):
    """`qk_eps`: of the norms of queries and keys; `rotated`: the first so many values of a head take RoPE."""

    kind: Literal["attention"] = "attention"
    heads: Size
    kv_heads: Size
    head_dim: Annotated[int, Field(gt=0, le=1024, strict=True)]
    bias: bool
    qk_eps: Eps | None
    rotated: Annotated[int, Field(ge=0, strict=True)]

    @model_validator(mode="after")
    def _divides(self) -> Attention:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key/value heads do not divide {self.heads} heads")
        if self.rotated % 2 or self.rotated > self.head_dim:
            raise ValueError(f"{self.rotated} of {self.head_dim} values of a head cannot be rotated")
        return self

    @property
    def rows(self) -> int:
        """Of `qkv`."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def state(self, layer: int, dtype: str) -> Iterator[TensorSpec]:
        shape = (self.kv_heads, self.head_dim)
        yield TensorSpec(f"key_{layer}", "key", layer, shape, dtype)
        yield TensorSpec(f"value_{layer}", "value", layer, shape, dtype)

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        yield "qkv", (self.rows, hidden)
        yield "o", (hidden, self.heads * self.head_dim)
        if self.bias:
            yield "qkv_bias", (self.rows,)
            yield "o_bias", (hidden,)
        if self.qk_eps is not None:
            yield from ((name, (self.head_dim,)) for name in ("q_norm", "k_norm"))


class Swiglu(_Part):
    intermediate: Size
    bias: bool

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        yield "norm2", (hidden,)
        yield "gate_up", (2 * self.intermediate, hidden)
        yield "down", (hidden, self.intermediate)
        if self.bias:
            yield "gate_up_bias", (2 * self.intermediate,)
            yield "down_bias", (hidden,)


Mixer = Annotated[Mamba1 | Mamba2 | ShortConv | Attention, Field(discriminator="kind")]


class Layer(_Part):
    """Mixers side by side read the same normed input; a SwiGLU follows them."""

    mixers: Annotated[tuple[Mixer, ...], Field(min_length=1, max_length=2)]
    mlp: Swiglu | None


class Plan(_Part):
    format: Literal[1] = 1
    hidden: Size
    vocabulary: Size
    eps: Eps
    embedding_scale: Number
    tied: bool
    context: Size  # the rows of RoPE's tables
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=1024)]

    @property
    def rotated(self) -> int:
        """Values of a head that RoPE turns; 0 where no layer has it."""
        return max((m.rotated for layer in self.layers for m in layer.mixers if isinstance(m, Attention)), default=0)

    def spec(self, dtype: str) -> StateSpec:
        """`dtype` of keys and values."""
        return StateSpec(
            tuple(t for i, layer in enumerate(self.layers) for m in layer.mixers for t in m.state(i, dtype))
        )

    def parameters(self) -> dict[str, Shape]:
        """Every parameter's name and shape. Raises ProgramError if one is larger than a shader can count."""
        made: dict[str, Shape] = {"embedding": (self.vocabulary, self.hidden), "norm": (self.hidden,)}
        if not self.tied:
            made["head"] = (self.vocabulary, self.hidden)
        if self.rotated:
            made |= dict.fromkeys(("rope_cos", "rope_sin"), (self.context, self.rotated // 2))
        for i, layer in enumerate(self.layers):
            made[f"layer{i}_norm1"] = (self.hidden,)
            for part in (*layer.mixers, *([layer.mlp] if layer.mlp else [])):
                made |= {f"layer{i}_{name}": shape for name, shape in part.parameters(self.hidden)}
        for name, shape in made.items():
            if math.prod(shape) > MAX_VALUES:
                raise ProgramError(f"{name} {list(shape)} has more values than a shader can count")
        return made

    @staticmethod
    def open(file: Path) -> Plan:
        """Raises ProgramError with the field that is wrong."""
        try:
            if file.stat().st_size > MAX_BYTES:
                raise ProgramError(f"{file} is larger than {MAX_BYTES} bytes")
            plan = Plan.model_validate_json(file.read_bytes())
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(str(p) for p in first["loc"])
            raise ProgramError(f"{file}: {where}: {first['msg']}; build the artifact again") from err
        rotations = {m.rotated for layer in plan.layers for m in layer.mixers if isinstance(m, Attention)}
        if len(rotations) > 1:
            raise ProgramError(f"{file}: layers rotate different numbers of values, {sorted(rotations)}")
        return plan
